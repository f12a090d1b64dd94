//! A renewal of the sign-in that is pending when the program is stopped.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::Stdio;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::commands::codex;
use crate::support::{PATIENCE, send, wait};

/// An issuer: its address, a signal that it received a request, and a sender that lets it respond.
fn issuer() -> (String, Receiver<()>, Sender<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let (asked, was_asked) = channel();
    let (answer, may_answer) = channel();
    thread::spawn(move || {
        for socket in listener.incoming() {
            let mut socket = socket.unwrap();
            let mut request = Vec::new();
            let mut buffer = [0; 4096];
            let is_post = |request: &[u8]| request.starts_with(b"POST");
            let ends = |request: &[u8]| match is_post(request) {
                true => String::from_utf8_lossy(request).contains("client_id="),
                false => request.ends_with(b"\r\n\r\n"),
            };
            while !ends(&request) {
                let len = socket.read(&mut buffer).unwrap();
                request.extend_from_slice(&buffer[..len]);
            }
            let (status, body) = match is_post(&request) {
                true => {
                    asked.send(()).unwrap();
                    may_answer.recv().unwrap();
                    (200, json!({"access_token": "new", "refresh_token": "refresh-2"}).to_string())
                }
                false => (404, String::new()),
            };
            let head = format!("HTTP/1.1 {status} x\r\nContent-Length: {}\r\n\r\n", body.len());
            let _ = socket.write_all((head + &body).as_bytes());
        }
    });
    (url, was_asked, answer)
}

fn jwt(claims: &Value) -> String {
    let part = |value: &Value| base64_simd::URL_SAFE_NO_PAD.encode_to_string(value.to_string());
    format!("{}.{}.c2ln", part(&json!({"alg": "RS256"})), part(claims))
}

#[test]
fn a_pending_renewal_is_stored_before_the_program_exits() {
    let (url, was_asked, answer) = issuer();
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("auth.json");
    let tokens = json!({"id_token": jwt(&json!({"iss": url, "aud": "client"})), "account_id": "a",
        "access_token": jwt(&json!({"exp": 1})), "refresh_token": "refresh-1"});
    std::fs::write(&file, json!({"tokens": tokens}).to_string()).unwrap();
    let mut child = codex()
        .args(["run", "--on", "env:laptop", "--registry", &url, "--", "true"])
        .env("CODEX_HOME", home.path())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    was_asked.recv_timeout(PATIENCE).expect("the issuer is asked");
    send(child.id(), Signal::INT);
    answer.send(()).unwrap();
    assert_eq!(wait(&mut child).code(), Some(130));
    let kept: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(kept["tokens"]["refresh_token"], "refresh-2");
}
