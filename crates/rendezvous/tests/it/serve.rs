//! The program's side: real sockets, TLS, stopping, one service per directory.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use codex_exec_remote::{
    BearerToken, HttpClient, HttpConfig, Registry, RegistryError, tls_from_file,
};
use codex_rendezvous::{
    Config, FileStore, Right, Scope, ServeError, ServeOptions, StoreError, StoreOptions, TokenFile,
    serve,
};
use futures_util::{SinkExt, StreamExt};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio_rustls::client::TlsStream;
use tokio_websockets::{ClientBuilder, Message};

use crate::util::*;

struct Running {
    url: String,
    stop: oneshot::Sender<()>,
    done: tokio::task::JoinHandle<Result<(), ServeError>>,
}

async fn start(options: ServeOptions, config: Config) -> Running {
    let (stop, stopped) = oneshot::channel::<()>();
    let (announce, announced) = oneshot::channel();
    let done = tokio::spawn(async move {
        let announce = |url: &str| {
            announce.send(url.to_owned()).unwrap();
            Ok(())
        };
        let stopped = async {
            let _ = stopped.await;
        };
        serve(options, config, announce, stopped).await
    });
    Running { url: announced.await.unwrap(), stop, done }
}

fn options(dir: &tempfile::TempDir) -> ServeOptions {
    ServeOptions {
        listen: "127.0.0.1:0".parse().unwrap(),
        store: StoreOptions::Directory(dir.path().join("data")),
        tls: None,
    }
}

/// The registry, asked by one who may manage all of it.
fn manager(url: &str, dir: &tempfile::TempDir, config: HttpConfig) -> Registry {
    let tokens = TokenFile::new(&dir.path().join("data"));
    let token = tokens.create(Scope::Any, vec![Right::Manage], system_now(), None).unwrap().0;
    let token = BearerToken(token.expose().into());
    Registry::new(url.parse().unwrap(), token, HttpClient::new(config)).unwrap()
}

#[tokio::test]
async fn serves_over_tcp_until_shutdown() {
    let dir = tempfile::tempdir().unwrap();
    let running = start(options(&dir), Config::default()).await;
    assert!(running.url.starts_with("http://127.0.0.1:"), "{}", running.url);
    let client = manager(&running.url, &dir, HttpConfig::default());
    assert_eq!(client.list().await.unwrap(), []);
    match client.show("e/1").await.unwrap_err() {
        RegistryError::Refused { status: 400, code: Some(code), .. } => {
            assert_eq!(code, "invalid_environment_id");
        }
        other => panic!("{other}"),
    }
    match client.remove("e1").await.unwrap_err() {
        RegistryError::Refused { status: 404, code: Some(code), .. } => {
            assert_eq!(code, "environment_not_found");
        }
        other => panic!("{other}"),
    }
    running.stop.send(()).unwrap();
    running.done.await.unwrap().unwrap();
    assert!(matches!(client.list().await.unwrap_err(), RegistryError::Unreachable { .. }));
}

#[tokio::test]
async fn serves_over_tls() {
    let dir = tempfile::tempdir().unwrap();
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let (cert, key) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
    std::fs::write(&cert, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let options = ServeOptions { tls: Some((cert.clone(), key.clone())), ..options(&dir) };
    let running = start(options.clone(), Config::default()).await;
    let url = running.url.replace("127.0.0.1", "localhost");
    assert!(url.starts_with("https://"), "{url}");
    let client = manager(&url, &dir, {
        let mut config = HttpConfig::default();
        config.tls = Some(tls_from_file(&cert).unwrap());
        config
    });
    assert_eq!(client.list().await.unwrap(), []);
    // A client that does not trust the authority, or uses no TLS, fails.
    let stranger = manager(&url, &dir, HttpConfig::default());
    assert!(matches!(stranger.list().await.unwrap_err(), RegistryError::Unreachable { .. }));
    let plain = url.replace("https", "http");
    manager(&plain, &dir, HttpConfig::default()).list().await.unwrap_err();
    running.stop.send(()).unwrap();
    running.done.await.unwrap().unwrap();

    let swapped = ServeOptions { tls: Some((key, cert)), ..options };
    let refused = serve(swapped, Config::default(), |_| Ok(()), async {}).await;
    assert!(matches!(refused, Err(ServeError::Tls(_))), "{refused:?}");
}

/// A connection by TLS that believes in that certificate only.
async fn secure(
    address: &str,
    cert: &rustls::pki_types::CertificateDer<'_>,
) -> TlsStream<TcpStream> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(cert.clone().into_owned()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let socket = TcpStream::connect(address).await.unwrap();
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    connector.connect("localhost".try_into().unwrap(), socket).await.unwrap()
}

#[tokio::test]
async fn frames_pass_over_tls() {
    let dir = tempfile::tempdir().unwrap();
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let (cert, key) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
    std::fs::write(&cert, made.cert.pem()).unwrap();
    std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
    let options = ServeOptions { tls: Some((cert, key)), ..options(&dir) };
    let mut config = Config::default();
    config.drain = Duration::ZERO;
    let running = start(options, config).await;
    let address = running.url.strip_prefix("https://").unwrap().to_owned();
    let tokens = TokenFile::new(&dir.path().join("data"));
    let can = vec![Right::Register, Right::Connect];
    let token = tokens.create(Scope::Any, can, system_now(), None).unwrap().0;
    let call = async |what: &str, body: serde_json::Value| -> String {
        let socket = TokioIo::new(secure(&address, made.cert.der()).await);
        let (mut sender, connection) = hyper::client::conn::http1::handshake(socket).await.unwrap();
        tokio::spawn(connection);
        let request = hyper::Request::post(format!("/cloud/environment/e1/{what}"))
            .header("host", &address)
            .header("authorization", format!("Bearer {}", token.expose()))
            .body(Full::new(Bytes::from(body.to_string())))
            .unwrap();
        let answer = sender.send_request(request).await.unwrap().into_body();
        let answer = answer.collect().await.unwrap().to_bytes();
        let answer: serde_json::Value = serde_json::from_slice(&answer).unwrap();
        text(&answer["url"])
    };
    let open = async |url: String| {
        // The URL names the host that the client used, with TLS.
        assert!(url.starts_with(&format!("wss://{address}/")), "{url}");
        let socket = secure(&address, made.cert.der()).await;
        ClientBuilder::new().uri(&url).unwrap().connect_on(socket).await.unwrap().0
    };
    let mut environment = open(call("register", register_body()).await).await;
    let body = serde_json::json!({"harness_public_key": crate::util::key(1)});
    let mut harness = open(call("connect", body).await).await;
    let same = |one: Message, other: &Message| one.as_payload()[..] == other.as_payload()[..];
    harness.send(claim("s")).await.unwrap();
    assert!(same(environment.next().await.unwrap().unwrap(), &claim("s")));
    for (payload, len) in [(1u8, 10), (2, 60 << 10), (3, 200 << 10)] {
        let frame = data("s", &vec![payload; len]);
        harness.send(frame.clone()).await.unwrap();
        assert!(same(environment.next().await.unwrap().unwrap(), &frame));
        environment.send(frame.clone()).await.unwrap();
        assert!(same(harness.next().await.unwrap().unwrap(), &frame));
    }
    running.stop.send(()).unwrap();
    // Closed with a closing handshake; a reset of the stream may come first.
    let code = loop {
        let message = environment.next().await.unwrap().unwrap();
        if let Some((code, _)) = message.as_close() {
            break u16::from(code);
        }
    };
    assert_eq!(code, 1012);
    drop((environment, harness));
    running.done.await.unwrap().unwrap();
}

#[tokio::test]
async fn second_service_on_a_directory_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let running = start(options(&dir), Config::default()).await;
    let second = serve(options(&dir), Config::default(), |_| Ok(()), async {}).await;
    assert!(matches!(second, Err(ServeError::Store(StoreError::Locked(_)))), "{second:?}");
    running.stop.send(()).unwrap();
    running.done.await.unwrap().unwrap();
    FileStore::open(&dir.path().join("data"), 0).unwrap();
}

#[tokio::test(start_paused = true)]
async fn shutdown_drains_streams_and_closes_with_1012() {
    let world = World::new();
    let token = world.token();
    let mut environment = world.online("e1", &token).await;
    let (_, answer) = world.connect("e1", &token, 1).await;
    let mut harness = world.websocket(&text(&answer["url"])).await.unwrap();
    send(&mut harness, claim("s")).await;
    assert_eq!(next(&mut environment).await, "s resume");
    let draining = tokio::spawn({
        let service = world.service.clone();
        async move { service.drain().await }
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    // New clients are refused; connected ones continue.
    assert_eq!(world.get("/readyz", None).await.0, 503);
    assert_eq!(world.get("/healthz", None).await.0, 200);
    assert_eq!(world.connect("e1", &token, 1).await.0, 503);
    // Not 4xx, which would make an environment register again.
    assert_eq!(world.websocket(&text(&answer["url"])).await.unwrap_err(), 503);
    send(&mut harness, data("s", b"last words")).await;
    assert_eq!(next(&mut environment).await, "s data last words");
    let started = tokio::time::Instant::now();
    // A stream that does not acknowledge ends here, and both may hear of it.
    for socket in [&mut environment, &mut harness] {
        let mut last = next(socket).await;
        while last.starts_with("s reset") {
            last = next(socket).await;
        }
        assert_eq!(last, "closed 1012");
    }
    assert!(started.elapsed() < Duration::from_secs(5));
    drop((environment, harness));
    draining.await.unwrap();
}

/// Opens as many silent connections as the service allows, and one more, which has to end. The service accepts
/// in order, so it has judged the others by then.
async fn fill(address: &str, allowed: usize) -> Vec<TcpStream> {
    use tokio::io::AsyncReadExt;
    let mut open = Vec::new();
    for _ in 0..allowed {
        open.push(TcpStream::connect(address).await.unwrap());
    }
    let mut refused = TcpStream::connect(address).await.unwrap();
    assert!(matches!(refused.read(&mut [0]).await, Ok(0) | Err(_)));
    for socket in &open {
        let read = socket.try_read(&mut [0]);
        assert!(matches!(&read, Err(error) if error.kind() == ErrorKind::WouldBlock), "{read:?}");
    }
    open
}

#[tokio::test]
async fn silent_connections_of_one_address_leave_room_for_others_also_before_tls() {
    for tls in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let (cert, key) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
        std::fs::write(&cert, made.cert.pem()).unwrap();
        std::fs::write(&key, made.signing_key.serialize_pem()).unwrap();
        let mut config = Config::default();
        config.unauthenticated_per_address = 5;
        config.connections = 7;
        config.request_timeout = Duration::from_secs(600);
        let tls = tls.then_some((cert, key));
        let running = start(ServeOptions { tls, ..options(&dir) }, config).await;
        let address = running.url.split("//").nth(1).unwrap().to_owned();
        let silent = fill(&address, 5).await;
        // Another address of this machine.
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
        let mut other = socket.connect(address.parse().unwrap()).await.unwrap();
        if running.url.starts_with("http:") {
            use tokio::io::{AsyncReadExt, AsyncWriteExt};
            other.write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
            let mut answer = [0; 12];
            other.read_exact(&mut answer).await.unwrap();
            assert_eq!(&answer, b"HTTP/1.1 200");
        }
        drop((silent, other));
        running.stop.send(()).unwrap();
        running.done.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_body_is_read_only_after_its_token_was_checked() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let dir = tempfile::tempdir().unwrap();
    let mut config = Config::default();
    // The body never comes, and no timeout makes up for that.
    config.request_timeout = Duration::from_secs(3600);
    let running = start(options(&dir), config).await;
    let address = running.url.split("//").nth(1).unwrap();
    for call in ["register", "connect", "validate"] {
        for token in ["", "Authorization: Bearer wrong\r\n"] {
            let mut socket = TcpStream::connect(address).await.unwrap();
            let head = format!(
                "POST /cloud/environment/e1/{call} HTTP/1.1\r\nHost: x\r\n{token}Content-Length: 60000\r\n\r\n"
            );
            socket.write_all(head.as_bytes()).await.unwrap();
            let mut answer = [0; 12];
            socket.read_exact(&mut answer).await.unwrap();
            assert_eq!(&answer, b"HTTP/1.1 401", "{call}");
        }
    }
    running.stop.send(()).unwrap();
    running.done.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_data_directory_that_others_can_write_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    std::fs::create_dir(&data).unwrap();
    for mode in [0o700, 0o750, 0o755, 0o770, 0o702, 0o777] {
        std::fs::set_permissions(&data, PermissionsExt::from_mode(mode)).unwrap();
        let opened = FileStore::open(&data, system_now());
        assert_eq!(opened.is_ok(), mode & 0o022 == 0, "{mode:o}: {opened:?}");
        let token = TokenFile::new(&data).create(Scope::Any, vec![Right::Manage], 1, None);
        assert_eq!(token.is_ok(), mode & 0o022 == 0, "{mode:o}");
    }
}
