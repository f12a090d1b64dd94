//! Registries and rendezvous that misbehave.

use std::net::SocketAddr;
use std::time::Duration;

use codex_exec_credentials::SignIn;
use codex_exec_remote::{
    EnvironmentConnector, HttpClient, HttpConfig, RegistrationTarget, Registry, RegistryError,
    RelayConfig, RemoteError,
};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_websockets::Message;

use crate::cloud::{Cloud, ENVIRONMENT, URL_SECRET};
use crate::ends::{environment, link, registry, serve};

fn quick() -> RelayConfig {
    RelayConfig {
        backoff_initial: Duration::from_millis(5),
        backoff_max: Duration::from_millis(20),
        ..RelayConfig::default()
    }
}

#[tokio::test]
async fn registry_refusal_is_reported_with_its_message() {
    let good = json!({"environment_id": ENVIRONMENT, "url": "ws://127.0.0.1:1/",
        "security_profile": "noise_hybrid_ik_v1", "executor_registration_id": "r"});
    let with = |name: &str, value: &str| {
        let mut changed = good.clone();
        changed[name] = json!(value);
        (200, changed.to_string())
    };
    let error = json!({"error": {"code": "nope", "message": "because"}}).to_string();
    for ((status, body), expected) in [
        ((401, error.clone()), "refused the sign-in (HTTP 401: nope: because)"),
        ((403, error.clone()), "refused the sign-in (HTTP 403: nope: because)"),
        ((404, error.clone()), "HTTP 404: nope: because"),
        ((409, error.clone()), "HTTP 409: nope: because"),
        ((500, "oh".to_owned()), "HTTP 500: oh"),
        ((200, "garbage".to_owned()), "invalid response"),
        ((200, String::new()), "invalid response"),
        ((302, String::new()), "HTTP 302"),
        (with("environment_id", "env_2"), "another environment"),
        (with("security_profile", "none"), "another security profile"),
        (with("url", "https://h"), "not a websocket URL"),
        (with("executor_registration_id", ""), "registration id is empty"),
    ] {
        let cloud = Cloud::start().await;
        cloud.script(|script| {
            script.answers.insert("register", (status, body));
        });
        let error = serve(environment(&cloud), quick()).ended().await.unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!(cloud.seen("/register").len(), 1);
    }
}

#[tokio::test]
async fn silent_registry_times_out() {
    let cloud = Cloud::start().await;
    cloud.script(|script| script.silent = Some("connect"));
    let http = HttpClient::new({
        let mut config = HttpConfig::default();
        config.timeout = Duration::from_millis(50);
        config.max_body = 100;
        config
    });
    let sign_in = SignIn::api_key("k".into());
    let registry = Registry::new(cloud.base(), sign_in, http).unwrap();
    let key = codex_exec_relay_core::NoiseIdentity::generate(&mut *codex_exec_remote::entropy())
        .unwrap()
        .public_key();
    let error = registry.connect(ENVIRONMENT, &key).await.unwrap_err();
    assert!(error.is_transient() && matches!(error, RegistryError::Unreachable { .. }), "{error}");
    // And one that says too much.
    cloud.script(|script| {
        script.answers.insert("register", (200, "x".repeat(101)));
    });
    let error = registry.register(ENVIRONMENT, &key).await.unwrap_err();
    assert!(error.to_string().contains("100 bytes"), "{error}");
}

#[tokio::test]
async fn status_4xx_makes_the_executor_register_again() {
    let cloud = Cloud::start().await;
    cloud.script(|script| script.refuse_upgrades = vec![503, 502, 404, 500, 401]);
    let served = serve(environment(&cloud), quick());
    cloud.upgraded(1).await;
    assert_eq!(cloud.seen("/register").len(), 3, "once, after 404, and after 401");
    link(&cloud).dial().await.unwrap();
    served.stop().await.unwrap();
}

#[tokio::test]
async fn refused_second_registration_ends_the_server() {
    let cloud = Cloud::start().await;
    let served = serve(environment(&cloud), quick());
    cloud.upgraded(1).await;
    cloud.script(|script| {
        script.refuse_upgrades = vec![403];
        script.answers.insert("register", (401, String::new()));
    });
    cloud.drop_sockets();
    let error = served.ended().await.unwrap_err();
    assert!(matches!(error, RemoteError::Registry(RegistryError::Authentication { .. })));
}

#[tokio::test]
async fn invalid_frames_disturb_no_stream() {
    let cloud = Cloud::start().await;
    let mut served = serve(environment(&cloud), quick());
    cloud.upgraded(1).await;
    let harness = link(&cloud).dial().await.unwrap();
    let mut executor = served.connections.recv().await.unwrap();
    cloud.to_executor(Message::text("not a frame")).await;
    cloud.to_executor(Message::binary(vec![0xff; 300 << 10])).await;
    cloud.to_executor(Message::binary(vec![])).await;
    cloud.to_executor(Message::ping("hello")).await;
    harness.outbound().send("still here").await.unwrap();
    assert_eq!(&executor.next().await.unwrap().unwrap()[..], b"still here");
    served.stop().await.unwrap();
}

#[tokio::test]
async fn eight_denied_handshakes_close_the_relay_socket() {
    let cloud = Cloud::start().await;
    let served = serve(environment(&cloud), quick());
    cloud.upgraded(1).await;
    cloud.script(|script| script.deny = true);
    for _ in 0..8 {
        link(&cloud).dial().await.unwrap_err();
    }
    // Eight harnesses have come, and the executor a second time.
    cloud.upgraded(10).await;
    cloud.script(|script| script.deny = false);
    link(&cloud).dial().await.unwrap();
    served.stop().await.unwrap();
}

#[tokio::test]
async fn unread_stream_is_reset_without_affecting_others() {
    let cloud = Cloud::start().await;
    let config =
        RelayConfig { inbox_bytes: 256 << 10, inbox_timeout: Duration::from_millis(50), ..quick() };
    let mut served = serve(environment(&cloud), config);
    cloud.upgraded(1).await;
    let mut pouring = link(&cloud).dial().await.unwrap();
    let unread = served.connections.recv().await.unwrap();
    let quiet = link(&cloud).dial().await.unwrap();
    let mut read = served.connections.recv().await.unwrap();
    let outbound = pouring.outbound().clone();
    let pour =
        tokio::spawn(async move { while outbound.send(vec![b'x'; 60_000]).await.is_ok() {} });
    assert!(pouring.next().await.is_none(), "the peer has reset it");
    pour.await.unwrap();
    quiet.outbound().send("unhurt").await.unwrap();
    assert_eq!(&read.next().await.unwrap().unwrap()[..], b"unhurt");
    drop(unread);
    served.stop().await.unwrap();
}

/// A harness that reads nothing stops its own stream at the executor, and no other; when it reads,
/// everything is there, once and in order.
#[tokio::test(flavor = "multi_thread")]
async fn blocked_stream_delays_no_other_and_loses_nothing() {
    const MESSAGES: usize = 300;
    let cloud = Cloud::start().await;
    let mut served = serve(environment(&cloud), quick());
    cloud.upgraded(1).await;
    let slow_config = RelayConfig { inbox_bytes: 64 << 10, ..quick() };
    let slow = EnvironmentConnector::new(registry(&cloud), ENVIRONMENT, slow_config).unwrap();
    let mut slow = slow.dial().await.unwrap();
    let mut blocked = served.connections.recv().await.unwrap();
    let mut reading = link(&cloud).dial().await.unwrap();
    let flowing = served.connections.recv().await.unwrap();
    // Once the executor has seen an acknowledgement, it sends no more than a window without another.
    blocked.outbound().send("hello").await.unwrap();
    slow.next().await.unwrap().unwrap();
    slow.outbound().send("hello").await.unwrap();
    blocked.next().await.unwrap().unwrap();
    let mut random = fastrand::Rng::with_seed(13);
    let messages: Vec<Vec<u8>> = (0..MESSAGES)
        .map(|n| {
            let mut message = n.to_be_bytes().to_vec();
            message.resize(8 + random.usize(0..50_000), n as u8);
            message
        })
        .collect();
    let (sent, outbound) = (messages.clone(), blocked.outbound().clone());
    let sending = tokio::spawn(async move {
        for message in sent {
            outbound.send(message).await.unwrap();
        }
        outbound.drained().await;
    });
    // The windows, the buffers and the queue take 3 MB or so of 7.5 MB.
    let outbound = blocked.outbound().clone();
    tokio::time::timeout(Duration::from_secs(60), async {
        while outbound.try_reserve(50_000).is_some() {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("the queue fills up");
    for n in 0..50_u8 {
        flowing.outbound().send(vec![n; 1000]).await.unwrap();
        assert_eq!(reading.next().await.unwrap().unwrap(), vec![n; 1000]);
    }
    assert!(!sending.is_finished());
    for (n, message) in messages.iter().enumerate() {
        assert!(slow.next().await.unwrap().unwrap() == message, "message {n}");
    }
    sending.await.unwrap();
    drop((slow, blocked, reading, flowing));
    served.stop().await.unwrap();
}

#[tokio::test]
async fn older_registration_carries_messages_unencrypted() {
    let cloud = Cloud::start().await;
    let sign_in = SignIn::bearer("remote-token".into());
    let registry = Registry::new(cloud.base(), sign_in, HttpClient::default()).unwrap();
    let target = RegistrationTarget::Executor { registry, executor_id: "exec-1".into() };
    let mut served = serve(target, quick());
    cloud.upgraded(1).await;
    let seen = &cloud.seen("/register")[0];
    assert_eq!(seen.path, "/cloud/executor/exec-1/register");
    assert_eq!(seen.headers["authorization"], "Bearer remote-token");
    use codex_exec_relay_core::{Body, Data, Frame, StreamId};
    let stream = StreamId::new("s-1").unwrap();
    let data = Data { seq: 0, segment_index: 0, segment_count: 1, payload: "clear".into() };
    let frame = Frame::new(stream, 0, 0, Body::Data(data)).encode();
    cloud.to_executor(Message::binary(frame)).await;
    let mut executor = served.connections.recv().await.unwrap();
    assert_eq!(&executor.next().await.unwrap().unwrap()[..], b"clear");
    served.stop().await.unwrap();
}

/// Passes bytes on until `limit` of them have come from the rendezvous, then closes both ways.
async fn cut_after(target: SocketAddr, limit: usize) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let (mut near, _) = listener.accept().await.unwrap();
        let mut far = TcpStream::connect(target).await.unwrap();
        let (mut from_near, mut to_near) = near.split();
        let (mut from_far, mut to_far) = far.split();
        let inward = async {
            let mut left = limit;
            let mut buffer = [0; 4096];
            while left > 0 {
                let want = left.min(buffer.len());
                match from_far.read(&mut buffer[..want]).await {
                    Ok(read @ 1..) => {
                        left -= read;
                        if to_near.write_all(&buffer[..read]).await.is_err() {
                            break;
                        }
                    }
                    _ => break,
                }
            }
        };
        tokio::select! {
            () = inward => {}
            _ = tokio::io::copy(&mut from_near, &mut to_far) => {}
        }
    });
    address
}

#[tokio::test]
async fn stream_survives_a_rendezvous_that_closes_at_any_byte() {
    let cloud = Cloud::start().await;
    let mut served = serve(environment(&cloud), quick());
    cloud.upgraded(1).await;
    // The answer to the upgrade, cut at every place; then the handshake's answer, which leaves a
    // stream at the executor each time: fewer cuts than it has places.
    let mut opened = 0;
    for limit in (0..140).chain((140..4400).step_by(61)) {
        let proxy = cut_after(cloud.address(), limit).await;
        cloud.script(|script| script.rendezvous = Some(proxy));
        match link(&cloud).dial().await {
            Err(error) => assert!(!error.to_string().contains(URL_SECRET), "{error}"),
            Ok(_) => opened += 1,
        }
    }
    assert!(opened > 0, "the last ones are long enough to open a stream");
    cloud.script(|script| script.rendezvous = None);
    let harness = link(&cloud).dial().await.unwrap();
    harness.outbound().send("alive").await.unwrap();
    // Its stream opened before its dial returned, and after all that were cut.
    let mut latest = None;
    while let Ok(connection) = served.connections.try_recv() {
        latest = Some(connection);
    }
    let message = latest.unwrap().next().await.unwrap().unwrap();
    assert_eq!(&message[..], b"alive");
    served.stop().await.unwrap();
}
