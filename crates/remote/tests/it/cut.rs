//! A rendezvous that closes the executor's socket after every byte that it could close it after.

use std::time::Duration;

use base64_simd::STANDARD;
use codex_exec_relay_core::{Authorization, Harness, HarnessMode, NoiseIdentity};
use codex_exec_remote::{RelayConfig, entropy};
use ring::digest;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use crate::cloud::{Cloud, ENVIRONMENT};
use crate::ends::{environment, link, registry, serve};

/// A binary websocket message, as a server writes it.
fn message(payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0x82];
    match u16::try_from(payload.len()) {
        Ok(len) if len < 126 => bytes.push(len as u8),
        Ok(len) => {
            bytes.push(126);
            bytes.extend(len.to_be_bytes());
        }
        Err(_) => panic!("longer than any handshake"),
    }
    bytes.extend(payload);
    bytes
}

/// What a genuine harness of this environment would have the rendezvous write.
async fn opening(cloud: &Cloud) -> Vec<u8> {
    let identity = NoiseIdentity::generate(&mut *entropy()).unwrap();
    let admission = registry(cloud).connect(ENVIRONMENT, &identity.public_key()).await.unwrap();
    let mode = HarnessMode::Noise {
        identity,
        executor_key: admission.executor_key,
        environment_id: ENVIRONMENT.into(),
        registration_id: admission.registration_id,
        authorization: Authorization::new(admission.authorization.expose().to_owned()),
    };
    let mut harness = Harness::new(RelayConfig::default().core, mode, entropy()).unwrap();
    let now = std::time::Instant::now();
    harness.handle_connected(now);
    harness.open(now).unwrap();
    let mut bytes = Vec::new();
    while let Some(frame) = harness.poll_transmit(now) {
        bytes.extend(message(&frame));
    }
    bytes
}

/// The answer to an upgrade with this key.
fn upgrade(key: &str) -> Vec<u8> {
    let mut sha1 = digest::Context::new(&digest::SHA1_FOR_LEGACY_USE_ONLY);
    sha1.update(key.as_bytes());
    sha1.update(b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11");
    let accept = STANDARD.encode_to_string(sha1.finish());
    format!(
        "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Accept: {accept}\r\n\r\n"
    )
    .into_bytes()
}

/// Serves one connection after the other, each cut one byte later; then answers 404, so that the
/// executor registers again.
async fn cutting(listener: TcpListener, cloud: Cloud, done: oneshot::Sender<usize>) {
    let mut exchange = None;
    for cut in 0.. {
        let (mut socket, _) = listener.accept().await.unwrap();
        let mut lines = BufReader::new(&mut socket).lines();
        let mut key = String::new();
        while let Some(line) = lines.next_line().await.unwrap() {
            if let Some((name, value)) = line.split_once(": ")
                && name.eq_ignore_ascii_case("sec-websocket-key")
            {
                key = value.to_owned();
            }
            if line.is_empty() {
                break;
            }
        }
        if exchange.is_none() {
            exchange = Some(opening(&cloud).await);
        }
        let mut bytes = upgrade(&key);
        bytes.extend(exchange.as_deref().unwrap_or_default());
        if cut == bytes.len() {
            // The first byte after the last: from here on the real one serves.
            cloud.script(|script| script.rendezvous = None);
            socket.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n").await.unwrap();
            let _ = done.send(cut);
            return;
        }
        socket.write_all(&bytes[..cut]).await.unwrap();
        socket.shutdown().await.unwrap();
    }
}

#[tokio::test]
async fn server_survives_a_rendezvous_that_closes_after_any_byte() {
    let cloud = Cloud::start().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    cloud.script(|script| script.rendezvous = Some(address));
    let (done, cuts) = oneshot::channel();
    tokio::spawn(cutting(listener, cloud.clone(), done));
    let config = RelayConfig {
        backoff_initial: Duration::from_micros(1),
        backoff_max: Duration::from_micros(1),
        ..RelayConfig::default()
    };
    let mut served = serve(environment(&cloud), config);
    let cuts = cuts.await.unwrap();
    assert!(cuts > 2000, "{cuts}: the whole first message of a handshake was cut");
    cloud.upgraded(1).await;
    assert_eq!(cloud.seen("/register").len(), 2, "once, and again after 404");
    assert!(served.connections.try_recv().is_err(), "a message cut short opens nothing");
    let harness = link(&cloud).dial().await.unwrap();
    let mut executor = served.connections.recv().await.unwrap();
    harness.outbound().send("alive").await.unwrap();
    assert_eq!(&executor.next().await.unwrap().unwrap()[..], b"alive");
    served.stop().await.unwrap();
}
