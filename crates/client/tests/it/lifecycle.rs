//! The handshake, errors, timeouts, and closing.

use std::time::Duration;

use codex_exec_client::protocol::network::NetworkPolicyAnswer;
use codex_exec_client::protocol::process::ReadParams;
use codex_exec_client::{
    Connection, ConnectionConfig, ExecServerClient, ExecServerError, Lost, ReconnectPolicy,
    RemoteExecServerConnectArgs,
};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::support::{Fake, FakeDialer, connect, connect_with, go, options, soon};

fn pair() -> (Connection, Fake) {
    let (ours, theirs) = Connection::pair(&ConnectionConfig::default());
    (ours, Fake::new(theirs))
}

#[tokio::test]
async fn a_session_without_an_id_cannot_be_resumed() {
    let (dialer, mut dialled) = FakeDialer::new();
    let connecting = go(ExecServerClient::connect(dialer, options()));
    let mut fake = dialled.recv().await.unwrap();
    let asked = fake.expect("initialize").await;
    assert_eq!(asked.params, json!({"clientName": "test"}));
    fake.reply(&asked, json!({})).await;
    fake.initialized().await;
    let asked = fake.expect("environment/info").await;
    fake.refuse(&asked, -32601, "no such method").await;
    let client = connecting.await.unwrap().unwrap();
    assert_eq!(client.session_id(), None);
    assert!(!client.capabilities().process_resize);

    drop(fake);
    let error = soon(client.environment_status()).await.unwrap_err();
    assert!(matches!(error, ExecServerError::Lost(Lost::Session { session: None, .. })));
    assert!(error.to_string().contains("does not support resuming"), "{error}");
}

#[tokio::test]
async fn unknown_members_of_other_revisions_are_ignored() {
    let (ours, mut fake) = pair();
    let connecting = go(ExecServerClient::connect_connection(ours, options()));
    let asked = fake.expect("initialize").await;
    let info = json!({"shell": {"name": "sh", "path": "/bin/sh", "x": 1}, "future": [1],
        "capabilities": {"processResize": "yes", "processList": true, "unheardOf": {}}});
    fake.reply(&asked, json!({"sessionId": "s", "environmentInfo": info, "more": null})).await;
    let client = connecting.await.unwrap().unwrap();
    assert!(client.capabilities().process_list);
    assert!(!client.capabilities().process_resize, "only true is true");
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_is_no_exec_server_is_a_protocol_error() {
    let open = |text: Option<&'static str>| async move {
        let (ours, mut fake) = pair();
        let connecting = go(ExecServerClient::connect_connection(ours, options()));
        match text {
            Some("") => drop(fake),
            Some(text) => fake.send_text(text).await,
            None => std::mem::forget(fake),
        }
        connecting.await.unwrap().unwrap_err()
    };
    for garbage in ["hello", "[1]", r#"{"id":"initialize","result":7}"#, r#"{"id":5,"result":{}}"#]
    {
        let error = open(Some(garbage)).await;
        assert!(matches!(error, ExecServerError::Protocol { .. }), "{garbage}: {error}");
    }
    let closed = open(Some("")).await;
    assert!(matches!(closed, ExecServerError::Connect { .. }), "{closed}");
    let silent = open(None).await;
    assert!(silent.to_string().contains("within 10 s"), "{silent}");
}

#[tokio::test]
async fn an_unknown_session_is_the_servers_error() {
    let (ours, mut fake) = pair();
    let mut resume = options();
    resume.resume_session_id = Some("gone".into());
    let connecting = go(ExecServerClient::connect_connection(ours, resume));
    let asked = fake.expect("initialize").await;
    assert_eq!(asked.params["resumeSessionId"], "gone");
    fake.refuse(&asked, -32600, "unknown session id gone").await;
    let error = connecting.await.unwrap().unwrap_err();
    assert!(matches!(&error, ExecServerError::Server { code: -32600, .. }), "{error}");
    assert!(error.to_string().contains("unknown session id gone"), "{error}");
}

#[tokio::test]
async fn a_question_during_the_handshake_is_refused() {
    let (ours, mut fake) = pair();
    let connecting = go(ExecServerClient::connect_connection(ours, options()));
    let asked = fake.expect("initialize").await;
    fake.send(json!({"id": 1, "method": "network/policyRequest", "params": {}})).await;
    let refused = fake.message().await.unwrap();
    assert_eq!((&refused["id"], &refused["error"]["code"]), (&json!(1), &json!(-32601)));
    let info = json!({"cwd": "file:///srv", "platformOs": "linux", "capabilities": {}});
    fake.reply(&asked, json!({"sessionId": "s1", "environmentInfo": info})).await;
    fake.initialized().await;
    connecting.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn resuming_a_held_session_is_retried() {
    let (dialer, mut dialled) = FakeDialer::new();
    let mut resume = options();
    resume.resume_session_id = Some("s1".into());
    let connecting = go(ExecServerClient::connect(dialer, resume));
    for _ in 0..3 {
        let mut fake = dialled.recv().await.unwrap();
        let asked = fake.expect("initialize").await;
        fake.refuse(&asked, -32010, "held").await;
    }
    dialled.recv().await.unwrap().accept_initialize(json!({})).await;
    connecting.await.unwrap().unwrap();
}

#[tokio::test]
async fn error_responses_and_unexpected_messages_are_handled() {
    let (client, mut fake, _dialled) = connect(json!({})).await;
    let call = go({
        let client = client.clone();
        async move { client.environment_status().await }
    });
    let asked = fake.expect("environment/status").await;
    fake.send(json!({"id": 99, "result": {}})).await;
    fake.send(json!({"id": -1, "error": {"code": -32600, "message": "what?"}})).await;
    fake.notify("news/ofTomorrow", json!({"x": 1})).await;
    fake.output("unknown", 1, "x").await;
    fake.send(json!({"id": "q", "method": "client/ask", "params": {}})).await;
    let answer = fake.message().await.unwrap();
    assert_eq!((&answer["id"], &answer["error"]["code"]), (&json!("q"), &json!(-32601)));
    // Questions about hosts are denied unless a handler decides.
    let question = |id: i64, host: &str| {
        let request = json!({"protocol": "http", "host": host, "port": 80});
        let params = json!({"processId": "p", "request": request});
        json!({"id": id, "method": "network/policyRequest", "params": params})
    };
    fake.send(question(1, "a.com")).await;
    let denied =
        json!({"id": 1, "result": {"decision": {"type": "deny", "reason": "not_allowed"}}});
    assert_eq!(fake.message().await.unwrap(), denied);
    client.on_policy_request(|question| async move {
        match question.request.host.as_str() {
            "never.com" => std::future::pending().await,
            _ => NetworkPolicyAnswer::Allow,
        }
    });
    // A question that is not answered delays none; beyond the limit all are denied.
    fake.send(question(2, "never.com")).await;
    fake.send(question(3, "a.com")).await;
    let allowed = json!({"id": 3, "result": {"decision": {"type": "allow"}}});
    assert_eq!(fake.message().await.unwrap(), allowed);
    for id in 4..1000 {
        fake.send(question(id, "never.com")).await;
    }
    let denied = fake.message().await.unwrap();
    assert_eq!(denied["result"]["decision"]["type"], "deny", "{denied}");
    fake.send(json!({"id": 5, "method": "network/policyRequest", "params": {"x": 1}})).await;
    fake.refuse(&asked, -32603, "no luck").await;
    match call.await.unwrap().unwrap_err() {
        ExecServerError::Server { method: "environment/status", code: -32603, message, .. } => {
            assert_eq!(message, "no luck");
        }
        other => panic!("{other}"),
    }
}

#[tokio::test]
async fn an_invalid_response_fails_its_request_only() {
    let (client, mut fake, _dialled) = connect(json!({})).await;
    let status = |client: ExecServerClient| go(async move { client.environment_status().await });
    let call = status(client.clone());
    let asked = fake.expect("environment/status").await;
    fake.reply(&asked, json!([1])).await;
    let error = call.await.unwrap().unwrap_err();
    assert!(matches!(error, ExecServerError::Protocol { .. }), "{error}");

    let call = status(client);
    let asked = fake.expect("environment/status").await;
    fake.reply(&asked, json!({"status": "ready"})).await;
    assert_eq!(call.await.unwrap().unwrap().status, "ready");
}

#[tokio::test(start_paused = true)]
async fn a_request_times_out_and_wait_ms_extends_the_timeout() {
    let (client, mut fake, _dialled) = connect(json!({})).await;
    let began = tokio::time::Instant::now();
    let error = client.environment_status().await.unwrap_err();
    assert!(matches!(error, ExecServerError::Timeout { .. }) && !error.may_have_taken_effect());
    assert!(!error.to_string().contains("taken effect"), "{error}");
    assert_eq!(began.elapsed(), Duration::from_secs(120));
    fake.expect("environment/status").await;

    let began = tokio::time::Instant::now();
    let read = ReadParams {
        process_id: "p".into(),
        after_seq: None,
        max_bytes: None,
        wait_ms: Some(500_000),
    };
    client.process_read(read).await.unwrap_err();
    assert_eq!(began.elapsed(), Duration::from_secs(620));
}

#[tokio::test]
async fn a_client_without_reconnect_fails_when_its_connection_drops() {
    let mut options = options();
    options.reconnect = ReconnectPolicy::never();
    let (client, fake, mut dialled) = connect_with(options, json!({})).await;
    drop(fake);
    let error = soon(client.environment_status()).await.unwrap_err();
    assert!(matches!(error, ExecServerError::Closed { .. }), "{error}");
    assert!(dialled.recv().await.is_none(), "never dialled again");
}

#[tokio::test]
async fn the_connection_closes_with_the_last_handle() {
    let (client, mut fake, _dialled) = connect(json!({})).await;
    let other = client.clone();
    drop(client);
    assert!(other.session_id().is_some());
    drop(other);
    assert!(soon(fake.message()).await.is_none());
}

async fn websocket(url: String) -> ExecServerError {
    let args = RemoteExecServerConnectArgs::new(url, "test");
    soon(ExecServerClient::connect_websocket(args)).await.unwrap_err()
}

#[tokio::test]
async fn a_failed_connect_names_its_cause() {
    for url in ["nonsense", "http://127.0.0.1:1", "ws://127.0.0.1:0"] {
        let error = websocket(url.to_owned()).await;
        assert!(error.to_string().contains("ws://HOST:PORT"), "{url}: {error}");
    }
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let refused = websocket(format!("ws://{free}")).await;
    assert!(refused.to_string().contains("check that the server runs"), "{refused}");

    // An HTTP server without websockets, which refuses some requests.
    for (answer, words) in [
        ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "does not speak websocket"),
        (
            "HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n",
            "bearer token is missing or wrong",
        ),
        ("220 mail.example.org\r\n", "does not speak websocket"),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        go(async move {
            let (mut socket, _) = listener.accept().await.unwrap();
            let _ = socket.read(&mut [0; 1000]).await;
            socket.write_all(answer.as_bytes()).await.unwrap();
            let _ = socket.read(&mut [0; 1000]).await;
        });
        let error = websocket(format!("ws://{address}")).await;
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[tokio::test]
async fn tls_to_a_plain_port_names_tls() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    go(async move {
        let (mut socket, _) = listener.accept().await.unwrap();
        let _ = socket.read(&mut [0; 1000]).await;
        let _ = socket.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
    });
    let error = websocket(format!("wss://{address}")).await;
    assert!(error.to_string().contains("ws://"), "{error}");
}

#[tokio::test]
async fn the_error_of_a_failed_command_contains_its_stderr() {
    let script = ["/bin/sh", "-c", "echo 'host unknown' >&2; exit 255"];
    let error = soon(ExecServerClient::connect_stdio_command(script, options())).await.unwrap_err();
    assert!(error.to_string().contains("host unknown"), "{error}");
    let missing =
        ExecServerClient::connect_stdio_command(["/no/such/program"], options()).await.unwrap_err();
    assert!(missing.to_string().contains("check that it is installed"), "{missing}");
}
