//! Nothing secret is logged, however much is logged, nor shown by `Debug` or in an error.

use std::io::Write;
use std::sync::{Arc, Mutex, OnceLock};

use serde_json::json;
use tracing_subscriber::fmt::MakeWriter;

use crate::cluster::{self, Node};
use crate::nats_server::NatsServer;
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

/// Everything that is logged, by all tests of this binary: a subscriber of one thread races with
/// the others' callsites.
fn log() -> &'static Log {
    static LOG: OnceLock<Log> = OnceLock::new();
    LOG.get_or_init(|| {
        let log = Log::default();
        let subscriber = tracing_subscriber::fmt()
            // The library tells whole messages; programs have to keep it quiet, as ours does.
            .with_env_filter("trace,async_nats=warn")
            .with_writer(log.clone())
            .finish();
        tracing::subscriber::set_global_default(subscriber).unwrap();
        log
    })
}

#[tokio::test]
#[ignore = "needs nats-server; .ci/run has it"]
async fn cluster_logs_contain_no_secret() {
    let log = log();
    let server = NatsServer::start().await;
    let one = Node::start(&server, |_| {}).await;
    let other = Node::start(&server, |_| {}).await;
    let (token, book) = (cluster::token(&server).await, cluster::tokens(&server).await);
    let record = book.list().await.unwrap().pop().unwrap();
    let (url, registration) = one.register("e1", &token).await;
    let mut environment = one.websocket(&url).await.unwrap();
    let (_, answer) = other.connect("e1", &token, 1).await;
    let (link, authorization) = (text(&answer["url"]), text(&answer["harness_key_authorization"]));
    let mut harness = other.websocket(&link).await.unwrap();
    send(&mut harness, claim("s")).await;
    assert_eq!(next(&mut environment).await, "s resume");
    send(&mut harness, data("s", b"payload-between-nodes")).await;
    assert_eq!(next(&mut environment).await, "s data payload-between-nodes");
    let body = json!({
        "executor_registration_id": registration,
        "harness_public_key": key(1),
        "harness_key_authorization": authorization,
    });
    for node in [&one, &other] {
        node.post("/cloud/environment/e1/validate", &token, &body).await;
    }
    assert!(book.revoke(&record.id).await.unwrap());
    assert_eq!(next(&mut environment).await, "closed 1008");
    // The cluster's key, from where it is.
    let client = async_nats::connect(&server.address).await.unwrap();
    let context = async_nats::jetstream::new(client);
    let secrets = context.get_key_value("codex-rendezvous-secrets").await.unwrap();
    let signing = secrets.get("signing").await.unwrap().unwrap();
    assert_eq!(signing.len(), 32);

    let mut seen = String::from_utf8_lossy(&log.0.lock().unwrap()).into_owned();
    seen += &format!("{:?} {:?} {book:?}", one.service, server.options());
    let pass = |url: &str| url.split_once("pass=").unwrap().1.to_owned();
    let secrets = [
        ("token", token.clone()),
        ("the environment's url", pass(&url)),
        ("the harness's url", pass(&link)),
        ("authorization", authorization.clone()),
        ("signature", authorization.split_once('.').unwrap().1.to_owned()),
        ("the environment's key", text(&key(0)["mlkem768_public_key"])[..40].to_owned()),
        ("a payload", "payload-between-nodes".to_owned()),
        ("signing key in base64", base64_simd::STANDARD.encode_to_string(&signing[..30])),
        ("signing key as bytes", format!("{:?}", &signing[..]).trim_matches(['[', ']']).to_owned()),
        ("signing key as text", format!("{signing:?}").trim_matches(['b', '"']).to_owned()),
    ];
    for (what, secret) in secrets {
        assert!(!seen.contains(&secret), "{what} was shown");
    }
}

#[tokio::test(start_paused = true)]
async fn service_logs_contain_no_secret() {
    let log = log();
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

    let mut seen = String::from_utf8_lossy(&log.0.lock().unwrap()).into_owned();
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
