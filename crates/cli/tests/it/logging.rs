//! Logs go to stderr and contain no secret.

use std::process::Stdio;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::*;

const SECRET: &str = "do-not-tell-5ca1ab1e";

/// Every request of a client, with a secret wherever possible.
async fn say_everything(server: &Running) {
    let mut client = server.client().await;
    let mut with_env = start("p", "read line; echo \"$line $MINE\"");
    with_env["env"] = json!({"PATH": "/usr/bin:/bin", "MINE": SECRET});
    with_env["envPolicy"] = json!({"inherit": "all", "set": {"SET": SECRET}});
    with_env["metadata"] = json!({"threadId": SECRET});
    with_env["pipeStdin"] = json!(true);
    client.call("process/start", with_env.clone()).await;
    let chunk = base64_simd::STANDARD.encode_to_string(format!("{SECRET}\n"));
    client.call("process/write", json!({"processId": "p", "chunk": chunk})).await;
    assert_eq!(client.closed("p").await, (format!("{SECRET} {SECRET}\n"), 0));
    client.call("process/read", json!({"processId": "p"})).await;
    // Also failing requests.
    with_env["processId"] = json!("q");
    for (member, value) in [
        ("cwd", json!("/nope")),
        ("argv", json!(["/nope"])),
        ("argv", json!([])),
        ("env", json!({"MINE": 5, "OTHER": SECRET})),
        ("env", json!({"MINE": format!("{SECRET}\0")})),
        ("networkProxy", json!({"password": SECRET})),
    ] {
        let mut bad = with_env.clone();
        bad[member] = value;
        let answer = client.call("process/start", bad).await;
        assert!(answer["error"].is_object(), "{answer}");
    }
    client.send_request("nope", json!({"password": SECRET})).await;
    client.call("process/write", json!({"processId": "p", "chunk": SECRET})).await;
}

#[tokio::test]
async fn no_secret_is_logged_at_any_level() {
    for format in ["text", "json"] {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        let mut command = codex();
        command
            .args(["exec-server", "--log-format", format])
            .env("RUST_LOG", "trace")
            .env("SERVER_PASSWORD", SECRET)
            .stderr(Stdio::from(std::fs::File::create(&log).unwrap()));
        let server = Running::start_with(&mut command);
        say_everything(&server).await;
        server.signal(Signal::TERM);
        assert_eq!(server.ended().code(), Some(0), "and stdout stayed clean");
        let log = std::fs::read_to_string(&log).unwrap();
        assert!(log.lines().count() > 10, "it does log: {log}");
        let encoded = base64_simd::STANDARD.encode_to_string(SECRET);
        for line in log.lines() {
            assert!(!line.contains(SECRET), "{line}");
            assert!(!line.contains(&encoded[..16]), "{line}");
            if format == "json" {
                assert!(serde_json::from_str::<Value>(line).unwrap().is_object());
            } else {
                assert!(!line.contains('\u{1b}'), "colours are for terminals: {line}");
            }
        }
    }
}

#[tokio::test]
async fn a_token_is_not_logged() {
    let directory = tempfile::tempdir().unwrap();
    let (log, token) = (directory.path().join("log"), directory.path().join("token"));
    std::fs::write(&token, SECRET).unwrap();
    let mut command = codex();
    command
        .args(["exec-server", "--ws-auth", "capability-token", "--ws-token-file"])
        .arg(&token)
        .env("RUST_LOG", "trace")
        .stderr(Stdio::from(std::fs::File::create(&log).unwrap()));
    let server = Running::start_with(&mut command);
    let bearer = format!("Bearer {SECRET}");
    assert_eq!(crate::auth::status(&server.url, Some(&bearer)).await, 101);
    assert_eq!(crate::auth::status(&server.url, Some(&format!("{bearer}x"))).await, 401);
    server.signal(Signal::TERM);
    assert_eq!(server.ended().code(), Some(0));
    let log = std::fs::read_to_string(&log).unwrap();
    assert!(!log.is_empty() && !log.contains(SECRET), "{log}");
}

#[tokio::test]
async fn by_default_success_is_not_logged() {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("log");
    let mut command = codex();
    command.arg("exec-server").stderr(Stdio::from(std::fs::File::create(&log).unwrap()));
    let server = Running::start_with(&mut command);
    say_everything(&server).await;
    server.signal(Signal::TERM);
    assert_eq!(server.ended().code(), Some(0));
    assert_eq!(std::fs::read_to_string(&log).unwrap(), "");
}
