//! Nothing secret is logged, however much is logged, nor shown by `Debug` or in an error.

use std::io::Write;
use std::sync::{Arc, Mutex};

use serde_json::json;
use tracing_subscriber::fmt::MakeWriter;

use crate::util::*;

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Log;

    fn make_writer(&'a self) -> Log {
        self.clone()
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_secret_is_shown() {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::TRACE)
        .with_writer(log.clone())
        .finish();
    // For all tests of this binary: a subscriber of one thread races with the others' callsites.
    tracing::subscriber::set_global_default(subscriber).unwrap();

    let world = World::with(|config| config.failures_per_minute = 2);
    let token = world.token();
    let (url, registration) = world.register("e1", &token).await;
    let mut environment = world.websocket(&url).await.unwrap();
    let (_, answer) = world.connect("e1", &token, 1).await;
    let (link, authorization) = (text(&answer["url"]), text(&answer["harness_key_authorization"]));
    let mut harness = world.websocket(&link).await.unwrap();
    send(&mut harness, claim("s")).await;
    assert_eq!(next(&mut environment).await, "s resume");
    send(&mut harness, data("s", b"payload-of-a-frame")).await;
    assert_eq!(next(&mut environment).await, "s data payload-of-a-frame");
    let body = json!({
        "executor_registration_id": registration,
        "harness_public_key": key(1),
        "harness_key_authorization": authorization,
    });
    let mut answers = String::new();
    // Right, then used up, then all ways to be wrong.
    for _ in 0..2 {
        world.post("/cloud/environment/e1/validate", &token, &body).await;
    }
    let wrong = format!("{token}-wrong");
    for _ in 0..4 {
        let (_, said) = world.post("/cloud/environment/e1/validate", &wrong, &body).await;
        answers += &said.to_string();
    }
    let cut = format!("{{\"harness_key_authorization\": \"{authorization}\", \"x\"");
    for body in [cut, json!({"harness_key_authorization": [&authorization]}).to_string()] {
        let path = "/cloud/environment/e1/validate";
        let (status, said) =
            world.request(hyper::Method::POST, path, Some(&token), body, None).await;
        assert_eq!(status, 400);
        answers += &said;
    }
    assert!(world.websocket(&format!("{link}x")).await.is_err());
    let (_, said) = world.get(&format!("/nothing?pass={authorization}"), Some(&token)).await;
    answers += &said;
    world.register("e1", &token).await;
    assert_eq!(next(&mut environment).await, "closed 1000");
    answers += &world.get("/cloud/environments", Some(&token)).await.1;
    answers += &world.get("/metrics", None).await.1;
    answers += &format!("{:?} {:?}", world.service, world.config);
    world.service.drain().await;

    let mut seen = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert!(seen.contains("registered") && seen.contains("DEBUG"), "{seen}");
    seen += &answers;
    let pass = |url: &str| url.split_once("pass=").unwrap().1.to_owned();
    let key = |who| text(&key(who)["mlkem768_public_key"])[..40].to_owned();
    let secrets = [
        ("token", token.clone()),
        ("part of a token", token[8..30].to_owned()),
        ("the environment's url", pass(&url)),
        ("the harness's url", pass(&link)),
        ("authorization", authorization.clone()),
        ("part of an authorization", authorization[20..60].to_owned()),
        ("signature", authorization.split_once('.').unwrap().1.to_owned()),
        ("the environment's key", key(0)),
        ("the harness's key", key(1)),
        ("a payload", "payload-of-a-frame".to_owned()),
        ("digest", world.tokens().list().unwrap()[0].digest.clone()),
    ];
    for (what, secret) in secrets {
        assert!(!seen.contains(&secret), "{what} was shown");
    }
    // Nor is a token in the data directory, in clear.
    for entry in std::fs::read_dir(world.dir.path()).unwrap() {
        let held = std::fs::read(entry.unwrap().path()).unwrap();
        assert!(!is_in(&held, token.as_bytes()));
    }
}
