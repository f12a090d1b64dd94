//! HTTP up to the upgrade: readiness, refusals, tokens.

use std::net::SocketAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use codex_exec_serving::WebSocketAuth;
use ring::digest::{SHA256, digest};
use ring::hmac;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::support::*;

const UPGRADE: &str = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
                       Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";

/// The head of the response to a request with these headers.
async fn request(address: SocketAddr, line: &str, headers: &str) -> String {
    let mut socket = TcpStream::connect(address).await.unwrap();
    let text = format!("{line} HTTP/1.1\r\nHost: x\r\n{headers}\r\n");
    socket.write_all(text.as_bytes()).await.unwrap();
    let mut head = Vec::new();
    let reading = async {
        while !head.ends_with(b"\r\n\r\n") {
            head.push(socket.read_u8().await.unwrap());
        }
    };
    timeout(PATIENCE, reading).await.unwrap();
    String::from_utf8(head).unwrap()
}

async fn status(address: SocketAddr, line: &str, headers: &str) -> u16 {
    let head = request(address, line, headers).await;
    head.split(' ').nth(1).unwrap().parse().unwrap()
}

#[tokio::test]
async fn the_listener_serves_readiness_and_upgrades_only() {
    let server = server();
    let address = listen(&server).await;
    assert_eq!(status(address, "GET /readyz", "").await, 200);
    assert_eq!(status(address, "GET /", UPGRADE).await, 101);
    assert_eq!(status(address, "GET /", "").await, 426);
    assert_eq!(status(address, "GET /nope", "").await, 404);
    assert_eq!(status(address, "GET /nope", UPGRADE).await, 404);
    assert_eq!(status(address, "POST /", "Content-Length: 0\r\n").await, 404);
    assert_eq!(status(address, "POST /readyz", "Content-Length: 0\r\n").await, 404);
    let old = UPGRADE.replace("Version: 13", "Version: 8");
    assert_eq!(status(address, "GET /", &old).await, 426);
    let no_key = UPGRADE.replace("Sec-WebSocket-Key", "X-Key");
    assert_eq!(status(address, "GET /", &no_key).await, 426);
}

#[tokio::test]
async fn the_upgrade_is_answered_as_rfc_6455_says() {
    let server = server();
    let head = request(listen(&server).await, "GET /", UPGRADE).await.to_lowercase();
    assert!(head.starts_with("http/1.1 101 "), "{head}");
    assert!(head.contains("upgrade: websocket\r\n"), "{head}");
    assert!(head.contains("connection: upgrade\r\n"), "{head}");
    // The example of the RFC, in lower case.
    assert!(head.contains("sec-websocket-accept: s3pplmbitxaq9kygzzhzrbk+xoo=\r\n"), "{head}");
    let mixed = UPGRADE.replace("Connection: Upgrade", "connection: keep-alive, UPGRADE");
    assert_eq!(status(listen(&server).await, "GET /", &mixed).await, 101);
}

#[tokio::test]
async fn requests_with_an_origin_are_forbidden() {
    let server = server();
    let address = listen(&server).await;
    for origin in ["Origin: http://evil\r\n", "origin: null\r\n", "Origin:\r\n"] {
        assert_eq!(status(address, "GET /readyz", origin).await, 403);
        assert_eq!(status(address, "GET /nope", origin).await, 403);
        assert_eq!(status(address, "GET /", &format!("{UPGRADE}{origin}")).await, 403);
        assert_eq!(status(address, "OPTIONS /", origin).await, 403);
    }
}

#[tokio::test]
async fn invalid_and_slow_http_ends_its_own_connection_only() {
    let server = server_with(|config| config.handshake_timeout = Duration::from_millis(200));
    let address = listen(&server).await;
    let mut nonsense = TcpStream::connect(address).await.unwrap();
    nonsense
        .write_all(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03nonsense\r\n\r\n")
        .await
        .unwrap();
    let mut silent = TcpStream::connect(address).await.unwrap();
    let mut slow = TcpStream::connect(address).await.unwrap();
    slow.write_all(b"GET / HTTP/1.1\r\nHost").await.unwrap();
    for socket in [&mut nonsense, &mut silent, &mut slow] {
        let mut rest = Vec::new();
        let ended = timeout(PATIENCE, socket.read_to_end(&mut rest)).await.expect("it is ended");
        drop(ended);
    }
    let mut client = Client::websocket(address).await;
    client.handshake(json!({"clientName": "test"})).await.unwrap();
}

#[tokio::test]
async fn the_handshake_timeout_does_not_apply_after_the_upgrade() {
    let server = server_with(|config| config.handshake_timeout = Duration::from_millis(50));
    let mut client = Client::websocket(listen(&server).await).await;
    client.handshake(json!({"clientName": "test"})).await.unwrap();
    let all = client.run(sh("p", "sleep 0.3; echo done")).await;
    assert_eq!(all.text(), "done\n");
}

fn bearer(token: &str) -> String {
    format!("{UPGRADE}Authorization: Bearer {token}\r\n")
}

#[tokio::test]
async fn a_capability_token_is_required_and_accepted() {
    let digest: String =
        digest(&SHA256, b"sesame").as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    let auth = WebSocketAuth::capability_token_sha256(&digest).unwrap();
    let server = server();
    let address = listen_with(&server, auth).await;
    assert_eq!(status(address, "GET /", &bearer("sesame")).await, 101);
    let head = request(address, "GET /", UPGRADE).await;
    assert!(head.starts_with("HTTP/1.1 401 "), "{head}");
    assert!(head.to_lowercase().contains("www-authenticate: bearer\r\n"), "{head}");
    assert_eq!(status(address, "GET /", &bearer("sesam")).await, 401);
    assert_eq!(status(address, "GET /", &bearer("")).await, 401);
    // Readiness needs no token; an origin is refused before the token is checked.
    assert_eq!(status(address, "GET /readyz", "").await, 200);
    let with_origin = format!("{}Origin: x\r\n", bearer("sesame"));
    assert_eq!(status(address, "GET /", &with_origin).await, 403);
}

fn jwt(claims: &serde_json::Value, secret: &[u8]) -> String {
    let encode = |text: &[u8]| base64_simd::URL_SAFE_NO_PAD.encode_to_string(text);
    let header = encode(br#"{"alg":"HS256","typ":"JWT"}"#);
    let signed = format!("{header}.{}", encode(claims.to_string().as_bytes()));
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret);
    format!("{signed}.{}", encode(hmac::sign(&key, signed.as_bytes()).as_ref()))
}

#[tokio::test]
async fn a_signed_token_is_required_and_accepted() {
    const SECRET: &str = "0123456789abcdef0123456789abcdef";
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("secret");
    std::fs::write(&file, format!("{SECRET}\n")).unwrap();
    let (issuer, audience) = (Some("us".to_owned()), Some("here".to_owned()));
    let auth = WebSocketAuth::signed_bearer(&file, issuer, audience, Duration::from_secs(30));
    let server = server();
    let address = listen_with(&server, auth.unwrap()).await;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let good = json!({"exp": now + 600, "iss": "us", "aud": "here"});
    assert_eq!(status(address, "GET /", &bearer(&jwt(&good, SECRET.as_bytes()))).await, 101);
    for (bad, what) in [
        (json!({"exp": now - 600, "iss": "us", "aud": "here"}), "expired"),
        (json!({"iss": "us", "aud": "here"}), "never expires"),
        (json!({"exp": now + 600, "nbf": now + 500, "iss": "us", "aud": "here"}), "not yet"),
        (json!({"exp": now + 600, "iss": "them", "aud": "here"}), "another issuer"),
        (json!({"exp": now + 600, "iss": "us", "aud": ["there"]}), "another audience"),
        (json!({"exp": now + 600, "aud": "here"}), "no issuer"),
    ] {
        let token = jwt(&bad, SECRET.as_bytes());
        assert_eq!(status(address, "GET /", &bearer(&token)).await, 401, "{what}");
    }
    let forged = jwt(&good, b"another secret of thirty-two byte");
    assert_eq!(status(address, "GET /", &bearer(&forged)).await, 401);
    assert_eq!(status(address, "GET /", UPGRADE).await, 401);
    assert_eq!(status(address, "GET /", &bearer("a.b.c")).await, 401);
}
