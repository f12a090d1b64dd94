//! Executor credentials on a pipe: which frames are valid, what ends the pipe, and which token is used.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use codex_exec_credentials::{
    CredentialPipe, CredentialPipeConfig, ExecutorCredential, ExecutorCredentialError,
};
use codex_exec_remote::{Credential, HttpClient};
use serde_json::{Value, json};
use tokio::io::{AsyncWriteExt, BufReader, DuplexStream, duplex};

use ExecutorCredentialError::*;

/// The time of all tests: 1,000 s after the epoch.
fn now() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(1000)
}

fn config() -> CredentialPipeConfig {
    let mut config = CredentialPipeConfig::new("env_1");
    config.now = now;
    config
}

fn frame() -> Value {
    json!({"version": 1, "environment_id": "env_1", "token": "tok-a", "expires_at": 1001})
}

fn with(name: &str, value: Value) -> String {
    let mut frame = frame();
    frame[name] = value;
    frame.to_string()
}

type Opened = (CredentialPipe<BufReader<DuplexStream>>, ExecutorCredential);

async fn open(text: &str) -> Result<Opened, ExecutorCredentialError> {
    let (mut parent, child) = duplex(64 << 10);
    parent.write_all(text.as_bytes()).await.unwrap();
    drop(parent);
    CredentialPipe::open(BufReader::new(child), config()).await
}

async fn bearer(credential: &ExecutorCredential) -> String {
    let headers = credential.headers(&HttpClient::default()).await.unwrap();
    assert!(headers["authorization"].is_sensitive());
    headers["authorization"].to_str().unwrap().to_owned()
}

#[tokio::test]
async fn first_frame_must_be_valid() {
    let long = |bytes: usize| {
        let rest = bytes - with("token", json!("")).len();
        with("token", json!("x".repeat(rest)))
    };
    let missing = |name: &str| {
        let mut frame = frame();
        frame.as_object_mut().unwrap().remove(name);
        frame.to_string()
    };
    for (line, expected) in [
        (frame().to_string(), None),
        (long((16 << 10) - 1), None),
        (long(16 << 10), Some(TooLong)),
        ("x".repeat(17_000), Some(TooLong)),
        ("not JSON".into(), Some(Invalid)),
        (String::new(), Some(Invalid)),
        ("[]".into(), Some(Invalid)),
        (with("version", json!(2)), Some(Invalid)),
        (with("version", json!("1")), Some(Invalid)),
        (with("more", json!(1)), Some(Invalid)),
        (with("token", json!("")), Some(Invalid)),
        (with("expires_at", json!("1001")), Some(Invalid)),
        (with("expires_at", json!(1001.5)), Some(Invalid)),
        (missing("version"), Some(Invalid)),
        (missing("environment_id"), Some(Invalid)),
        (missing("token"), Some(Invalid)),
        (missing("expires_at"), Some(Invalid)),
        (with("environment_id", json!("env_2")), Some(OtherEnvironment)),
        (with("expires_at", json!(1000)), Some(Expired)),
        (with("expires_at", json!(-5)), Some(Expired)),
    ] {
        for end in ["\n", "\n\n"] {
            let opened = open(&format!("{line}{end}")).await;
            assert_eq!(opened.err(), expected, "{}", &line[..line.len().min(120)]);
        }
    }
    assert_eq!(open("").await.err(), Some(Closed));
    // The last line needs no newline.
    open(&frame().to_string()).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn pipe_without_a_first_frame_times_out() {
    let (_parent, child) = duplex(1);
    let opened = CredentialPipe::open(BufReader::new(child), config()).await;
    assert_eq!(opened.err(), Some(TimedOut));
}

#[tokio::test]
async fn latest_frame_is_used_until_the_pipe_ends() {
    let (mut parent, child) = duplex(64 << 10);
    parent.write_all(format!("{}\n", frame()).as_bytes()).await.unwrap();
    let opened = CredentialPipe::open(BufReader::new(child), config()).await;
    let (pipe, credential) = opened.unwrap();
    assert_eq!(bearer(&credential).await, "Bearer tok-a");
    parent.write_all(format!("{}\n", with("token", json!("tok-b"))).as_bytes()).await.unwrap();
    drop(parent);
    assert_eq!(pipe.watch().await, Ok(()), "end of the pipe");
    assert_eq!(bearer(&credential).await, "Bearer tok-b");
    assert!(!format!("{credential:?}").contains("tok-"));
}

#[tokio::test]
async fn invalid_later_frame_ends_the_pipe() {
    for (line, expected) in [
        ("nonsense".to_owned(), Invalid),
        (with("environment_id", json!("env_2")), OtherEnvironment),
        (with("expires_at", json!(1)), Expired),
    ] {
        let (pipe, credential) = open(&format!("{}\n{line}\n", frame())).await.unwrap();
        assert_eq!(pipe.watch().await, Err(expected));
        assert_eq!(bearer(&credential).await, "Bearer tok-a");
    }
}

#[tokio::test]
async fn expired_token_is_a_transient_error() {
    fn later() -> SystemTime {
        // The first call is made when the frame is read, before it expires.
        use std::sync::atomic::{AtomicBool, Ordering};
        static LOOKED: AtomicBool = AtomicBool::new(false);
        let seconds = if LOOKED.swap(true, Ordering::Relaxed) { 1002 } else { 1000 };
        UNIX_EPOCH + Duration::from_secs(seconds)
    }
    let (mut parent, child) = duplex(64 << 10);
    parent.write_all(format!("{}\n", frame()).as_bytes()).await.unwrap();
    let mut config = config();
    config.now = later;
    let (_pipe, credential) = CredentialPipe::open(BufReader::new(child), config).await.unwrap();
    let error = credential.headers(&HttpClient::default()).await.unwrap_err();
    assert!(error.is_transient() && error.to_string().contains("expired"), "{error}");
    for (base, allowed) in
        [("https://h", true), ("http://127.0.0.1:1", true), ("http://h.test", false)]
    {
        assert_eq!(credential.check_target(&base.parse().unwrap()).is_ok(), allowed, "{base}");
    }
}
