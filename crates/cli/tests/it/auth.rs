//! The flags for authentication.

use std::path::Path;

use crate::support::*;

/// The status of an upgrade with this `Authorization`.
pub(crate) async fn status(url: &str, authorization: Option<&str>) -> u16 {
    use std::io::{Read, Write};
    let address = url.strip_prefix("ws://").unwrap().to_owned();
    let header = authorization.map_or(String::new(), |value| format!("Authorization: {value}\r\n"));
    tokio::task::spawn_blocking(move || {
        let mut socket = std::net::TcpStream::connect(address).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let request = format!(
            "GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
             Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n{header}\r\n"
        );
        socket.write_all(request.as_bytes()).unwrap();
        let mut head = [0; 12];
        socket.read_exact(&mut head).unwrap();
        std::str::from_utf8(&head[9..]).unwrap().parse().unwrap()
    })
    .await
    .unwrap()
}

fn file(directory: &Path, name: &str, text: &str) -> String {
    let path = directory.join(name);
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_capability_token_is_required() {
    let directory = tempfile::tempdir().unwrap();
    let token = file(directory.path(), "token", "open sesame, please\n");
    // SHA-256 of "open sesame, please".
    let digest = "7b467437ad0215a143a8d995fea9a9e55d93a0c2ff3367e4a7990aec3f6fbd6b";
    for how in [["--ws-token-file", &token], ["--ws-token-sha256", digest]] {
        let server = Running::start(&["--ws-auth", "capability-token", how[0], how[1]]);
        assert_eq!(status(&server.url, Some("Bearer open sesame, please")).await, 101, "{how:?}");
        assert_eq!(status(&server.url, Some("Bearer close sesame")).await, 401);
        assert_eq!(status(&server.url, None).await, 401);
    }
}

#[tokio::test]
async fn a_signed_token_is_required() {
    let directory = tempfile::tempdir().unwrap();
    let secret = file(directory.path(), "secret", "0123456789abcdef0123456789abcdef\n");
    let server = Running::start(&[
        "--ws-auth",
        "signed-bearer-token",
        "--ws-shared-secret-file",
        &secret,
        "--ws-issuer",
        "us",
    ]);
    // HS256, {"exp":99999999999,"iss":"us"}, signed with that secret.
    let signed = "eyJhbGciOiJIUzI1NiJ9.eyJleHAiOjk5OTk5OTk5OTk5LCJpc3MiOiJ1cyJ9.HjG36tmXQ5ErqP7nKQqfTkNCmVwiz5jnjXHQCXIZ8CE";
    assert_eq!(status(&server.url, Some(&format!("Bearer {signed}"))).await, 101);
    let forged = signed.replace("eyJleHAiOjk5", "eyJleHAiOjk4");
    assert_eq!(status(&server.url, Some(&format!("Bearer {forged}"))).await, 401);
    assert_eq!(status(&server.url, None).await, 401);
}

#[test]
fn conflicting_flags_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let short = file(directory.path(), "short", "short");
    let empty = file(directory.path(), "empty", " \n");
    for (flags, word) in [
        (&["--ws-auth", "capability-token"][..], "--ws-token-file or --ws-token-sha256"),
        (&["--ws-auth", "signed-bearer-token"], "--ws-shared-secret-file"),
        (&["--ws-token-file", &short], "--ws-auth"),
        (&["--ws-token-sha256", "00"], "--ws-auth"),
        (&["--ws-shared-secret-file", &short], "--ws-auth"),
        (&["--ws-auth", "capability-token", "--ws-token-sha256", "00"], "64 hexadecimal digits"),
        (&["--ws-auth", "capability-token", "--ws-token-file", &empty], "at least 16 bytes"),
        (&["--ws-auth", "capability-token", "--ws-token-file", "/nope"], "cannot read /nope"),
        (
            &["--ws-auth", "signed-bearer-token", "--ws-shared-secret-file", &short],
            "at least 32 bytes",
        ),
    ] {
        let output = codex().arg("exec-server").args(flags).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(stderr.contains(word), "{flags:?}: {stderr}");
        assert!(!output.status.success() && output.stdout.is_empty(), "{flags:?}");
        assert!(!stderr.contains("short\n"), "no secret is repeated: {stderr}");
    }
}
