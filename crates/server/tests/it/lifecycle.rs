//! The handshake, messages before it, and invalid requests.

use serde_json::{Value, json};

use crate::support::*;

fn refused(code: i64, message: &str) -> Result<Value, ErrorResponse> {
    Err(ErrorResponse { code, message: message.into() })
}

const FAMILIES: &[(&str, &str)] = &[
    ("process/start", "exec"),
    ("process/read", "exec"),
    ("process/write", "exec"),
    ("process/signal", "exec"),
    ("process/terminate", "exec"),
    ("process/resize", "exec"),
    ("process/list", "exec"),
    ("fs/readFile", "filesystem"),
    ("fs/walk", "filesystem"),
    ("http/request", "http"),
    ("environment/info", "environment info"),
    ("environment/status", "environment status"),
];

#[tokio::test]
async fn methods_are_refused_before_the_handshake() {
    let server = server();
    let mut client = Client::websocket(listen(&server).await).await;
    for (method, family) in FAMILIES {
        let message = format!("client must call initialize before using {family} methods");
        assert_eq!(client.call(method, json!({})).await, refused(-32600, &message));
    }
    client.call("initialize", json!({"clientName": "test"})).await.unwrap();
    for (method, family) in FAMILIES {
        let message = format!("client must send initialized before using {family} methods");
        assert_eq!(client.call(method, json!({})).await, refused(-32600, &message));
    }
    client.send(r#"{"method":"initialized","params":{"anything":[1]}}"#).await;
    assert_eq!(client.call("environment/status", json!({})).await, Ok(json!({"status": "ready"})));
}

#[tokio::test]
async fn initialize_returns_the_session_and_the_environment() {
    let server = server();
    let mut client = Client::memory(&server);
    let answer = client.call("initialize", json!({"clientName": "test"})).await.unwrap();
    client.send(r#"{"method":"initialized"}"#).await;
    assert!(!answer["sessionId"].as_str().unwrap().is_empty());
    let info = client.call("environment/info", json!({})).await.unwrap();
    assert_eq!(answer["environmentInfo"], info);
    assert!(info["shell"]["path"].as_str().unwrap().starts_with('/'));
    assert_eq!(info["platformOs"], "linux");
    assert!(info["cwd"].as_str().unwrap().starts_with("file:///"));
    assert_eq!(info["prependPathDirs"], json!([]));
    assert!(info["tempDir"].as_str().unwrap().starts_with("file:///"));
    let capabilities = info["capabilities"].as_object().unwrap();
    assert!(capabilities.values().all(Value::is_boolean));
    for ours in ["processResize", "processList", "processSignals", "networkProxyLaunch"] {
        assert_eq!(capabilities[ours], true, "{ours}");
    }
    assert_eq!(capabilities["shellSnapshotV2"], true);
}

#[tokio::test]
async fn a_second_initialize_is_refused_at_any_time() {
    let server = server();
    let mut client = Client::memory(&server);
    client.call("initialize", json!({"clientName": "test"})).await.unwrap();
    let again = client.call("initialize", json!({"clientName": "test"})).await.unwrap_err();
    assert_eq!(again.code, -32600);
    client.send(r#"{"method":"initialized"}"#).await;
    let again = client.call("initialize", json!({"clientName": "test"})).await.unwrap_err();
    assert_eq!(again.code, -32600);
    // A repeated `initialized` changes nothing.
    client.send(r#"{"method":"initialized"}"#).await;
    client.nothing_more().await;
}

#[tokio::test]
async fn a_failed_initialize_can_be_tried_again() {
    let server = server();
    let mut client = Client::memory(&server);
    assert_eq!(client.call("initialize", json!({})).await.unwrap_err().code, -32602);
    assert_eq!(client.call("initialize", json!({"clientName": 5})).await.unwrap_err().code, -32602);
    assert_eq!(client.call("initialize", Value::Null).await.unwrap_err().code, -32602);
    let unknown = json!({"clientName": "test", "resumeSessionId": "nope"});
    assert_eq!(
        client.call("initialize", unknown).await,
        refused(-32600, "unknown session id nope")
    );
    client.handshake(json!({"clientName": "test", "resumeSessionId": null})).await.unwrap();
    client.nothing_more().await;
}

#[tokio::test]
async fn initialized_before_initialize_is_refused() {
    let server = server();
    let mut client = Client::memory(&server);
    client.send(r#"{"method":"initialized"}"#).await;
    assert_eq!(client.response(-1).await.unwrap_err().code, -32600);
    client.handshake(json!({"clientName": "test"})).await.unwrap();
    client.nothing_more().await;
}

#[tokio::test]
async fn unknown_methods_are_refused_at_any_time() {
    let server = server();
    let mut client = Client::memory(&server);
    assert_eq!(client.call("nope/x", json!({})).await.unwrap_err().code, -32601);
    client.handshake(json!({"clientName": "test"})).await.unwrap();
    for method in ["nope/x", "", "initialized", "process/output", "Process/Start"] {
        assert_eq!(client.call(method, json!({})).await.unwrap_err().code, -32601, "{method}");
    }
}

#[tokio::test]
async fn ids_come_back_unchanged() {
    let server = server();
    let mut client = Client::websocket(listen(&server).await).await;
    client.handshake(json!({"clientName": "test"})).await.unwrap();
    for id in [
        "0",
        "-1",
        "-3",
        "9223372036854775807",
        "-9223372036854775808",
        "\"\"",
        "\"a\"",
        "\"7\"",
        "\"\\\"quoted\\\" \\\\ é\"",
    ] {
        client.send(format!(r#"{{"id":{id},"method":"environment/status"}}"#)).await;
        let answer = client.text().await.unwrap();
        assert_eq!(answer, format!(r#"{{"id":{id},"result":{{"status":"ready"}}}}"#));
    }
    client.send(r#"{"id":"x","method":"nope"}"#).await;
    let answer = client.text().await.unwrap();
    assert_eq!(
        answer,
        r#"{"error":{"code":-32601,"message":"unknown method `nope`","data":{"kind":"methodNotFound"}},"id":"x"}"#
    );
}

#[tokio::test]
async fn unknown_members_are_ignored() {
    let server = server();
    let mut client = Client::websocket(listen(&server).await).await;
    client.handshake(json!({"clientName": "test", "future": {"x": [1]}})).await.unwrap();
    let ready = json!({"status": "ready"});
    for text in [
        r#"{"id":"m","method":"environment/status","jsonrpc":"2.0"}"#,
        r#"{"id":"m","method":"environment/status","jsonrpc":1,"x":{}}"#,
        r#"{"id":"m","method":"environment/status","params":null}"#,
        r#"{"id":"m","method":"environment/status","params":{"x":1}}"#,
        r#"{"id":"m","method":"environment/status","result":1}"#,
        r#"{"id":"m","method":"environment/status","trace":{"traceparent":"00-a-b-01","tracestate":"x=y"}}"#,
        r#"{"id":"m","method":"environment/status","trace":7}"#,
        " \n{\"id\" : \"m\", \"method\":\"environment\\/status\"}\r\n",
    ] {
        client.send(text).await;
        assert_eq!(client.response("m").await, Ok(ready.clone()), "{text}");
    }
    client.send_binary(br#"{"id":"m","method":"environment/status"}"#.to_vec()).await;
    assert_eq!(client.response("m").await, Ok(ready));
    let all = client.run(sh("p", "echo hi").with("future", json!({"x": 1}))).await;
    assert_eq!(all.text(), "hi\n");
}

/// Every invalid start, with its exact code.
#[tokio::test]
async fn bad_starts_are_refused_and_leave_their_id_free() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("plain");
    std::fs::write(&file, "no program").unwrap();
    let plain = file.to_str().unwrap();
    let ok = || sh("p", "echo ran");
    let argv = |argv: &[&str]| ok().with("argv", json!(argv));
    let cases = [
        (-32602, ok().with("processId", Value::Null), "missing id"),
        (-32602, ok().with("processId", 5), "id of the wrong type"),
        (-32602, ok().with("processId", "p".repeat(4097)), "id that is too long"),
        (-32602, ok().with("argv", json!([])), "empty argv"),
        (-32602, ok().with("argv", json!("sh")), "argv of the wrong type"),
        (-32602, ok().with("argv", json!([1])), "argument of the wrong type"),
        (-32602, ok().with("cwd", Value::Null), "no cwd"),
        (-32602, ok().with("cwd", "relative"), "relative cwd"),
        (-32602, ok().with("cwd", ""), "empty cwd"),
        (-32602, ok().with("cwd", "http://x/y"), "cwd of another scheme"),
        (-32602, ok().with("cwd", "file://host/y"), "cwd on another host"),
        (-32602, ok().with("cwd", "file:///a%00b"), "cwd with NUL"),
        (-32602, ok().with("env", Value::Null), "env null"),
        (-32602, ok().with("env", json!({"A": 1})), "variable of the wrong type"),
        (-32602, ok().with("envPolicy", json!({"inherit": "some"})), "unknown policy"),
        (-32602, ok().with("envPolicy", json!({"exclude": ["["]})), "bad glob"),
        (-32602, ok().with("envPolicy", json!({"exclude": vec!["*a*"; 16385]})), "many globs"),
        (-32602, ok().with("envPolicy", json!({"set": {"A".repeat(65536): ""}})), "long names"),
        (-32602, ok().with("tty", "yes"), "tty of the wrong type"),
        (-32602, ok().with("size", json!({"rows": 70000, "cols": 1})), "size out of range"),
        (-32602, ok().with("managedNetwork", json!(1)), "a network of the wrong type"),
        (-32602, ok().with("networkProxy", json!({"x": 1})), "a proxy without rules"),
        (-32602, ok().with("shellSnapshot", json!({})), "a snapshot without a shell"),
        (-32602, ok().with("retain", json!({"bytes": u64::MAX})), "more than can be kept"),
        (-32602, ok().with("retain", json!({"bytes": -1})), "less than nothing kept"),
        (-32603, argv(&["a\0b"]), "program with NUL"),
        (-32603, argv(&["/bin/echo", "a\0b"]), "argument with NUL"),
        (-32603, ok().with("arg0", "a\0b"), "arg0 with NUL"),
        (-32603, ok().with("env", json!({"A\0": "b"})), "variable with NUL"),
        (-32603, ok().with("cwd", "file:///nope/nope"), "cwd that is not there"),
        (-32603, ok().with("cwd", plain), "cwd that is a file"),
        (-32603, argv(&[""]), "empty program"),
        (-32603, argv(&["nope-not-there"]), "program not found"),
        (-32603, argv(&["/nope/not-there"]), "program not found by path"),
        (-32603, argv(&[plain]), "program not executable"),
        (-32603, argv(&["/"]), "program that is a directory"),
    ];
    for (code, start, what) in cases {
        let refused = client.start(start).await.unwrap_err();
        assert_eq!(refused.code, code, "{what}: {refused:?}");
        assert!(!refused.message.is_empty());
    }
    // Nothing ran, nothing was published, and the id is free.
    client.nothing_more().await;
    assert_eq!(client.run(ok()).await.text(), "ran\n");
    let longest = ok().with("processId", "p".repeat(4096));
    assert_eq!(client.run(longest).await.text(), "ran\n");
}

#[tokio::test]
async fn a_failed_start_contains_the_systems_error() {
    let server = server();
    let mut client = Client::ready(&server).await;
    for (start, word) in [
        (start("p", &["nope-not-there"]), "No such file or directory (os error 2)"),
        (start("p", &["/"]), "Permission denied (os error 13)"),
        (sh("p", "").with("cwd", "file:///nope"), "No such file or directory (os error 2)"),
        (sh("p", "").with("cwd", "file:///bin/sh"), "Not a directory (os error 20)"),
    ] {
        let refused = client.start(start).await.unwrap_err();
        assert!(refused.message.ends_with(word), "{refused:?}");
    }
}

#[tokio::test]
async fn bad_params_are_refused_and_lose_nothing() {
    let server = server();
    let mut client = Client::ready(&server).await;
    client.start(start("cat", &["cat"]).piped()).await.unwrap();
    for (method, params) in [
        ("process/read", json!({})),
        ("process/read", json!({"processId": 1})),
        ("process/read", json!({"processId": "cat", "afterSeq": -1})),
        ("process/read", json!({"processId": "cat", "afterSeq": "1"})),
        ("process/read", json!({"processId": "cat", "maxBytes": 1.5})),
        ("process/read", json!({"processId": "cat", "waitMs": -5})),
        ("process/write", json!({"processId": "cat"})),
        ("process/write", json!({"processId": "cat", "chunk": "!!"})),
        ("process/write", json!({"processId": "cat", "chunk": "aGk"})),
        ("process/write", json!({"processId": "cat", "chunk": 5})),
        ("process/write", json!({"processId": "cat", "chunk": "aGk=", "writeId": ""})),
        ("process/write", json!({"processId": "nope", "chunk": "aGk=", "writeId": ""})),
        ("process/write", json!({"processId": "cat", "chunk": "aGk=", "writeId": 7})),
        ("process/signal", json!({"processId": "cat"})),
        ("process/signal", json!({"processId": "cat", "signal": "nope"})),
        ("process/signal", json!({"processId": "cat", "signal": "SIGINT"})),
        ("process/terminate", json!({})),
        ("process/resize", json!({"processId": "cat", "rows": -1, "cols": 1})),
    ] {
        let refused = client.call(method, params.clone()).await.unwrap_err();
        assert_eq!(refused.code, -32602, "{method} {params}: {refused:?}");
    }
    client.nothing_more().await;
    client.close_stdin("cat").await;
    let all = client.until_closed("cat").await;
    assert_eq!((all.text(), all.exit_code), (String::new(), 0));
}

#[tokio::test]
async fn each_method_reports_an_unknown_process_in_its_way() {
    let server = server();
    let mut client = Client::ready(&server).await;
    let id = json!({"processId": "zz"});
    assert_eq!(
        client.call("process/read", id.clone()).await,
        refused(-32600, "unknown process id zz")
    );
    let write = json!({"processId": "zz", "chunk": "aGk=", "writeId": "w"});
    assert_eq!(client.call("process/write", write).await, Ok(json!({"status": "unknownProcess"})));
    let signal = json!({"processId": "zz", "signal": "interrupt"});
    assert_eq!(client.call("process/signal", signal).await, Ok(json!({})));
    assert_eq!(client.call("process/terminate", id).await, Ok(json!({"running": false})));
    let resize = json!({"processId": "zz", "rows": 1, "cols": 1});
    assert_eq!(client.call("process/resize", resize).await.unwrap_err().code, -32600);
    assert_eq!(client.call("process/list", json!({})).await, Ok(json!({"processes": []})));
}

#[tokio::test]
async fn a_server_that_shuts_down_ends_connections_and_processes() {
    let server = server();
    let address = listen(&server).await;
    let mut first = Client::websocket(address).await;
    first.handshake(json!({"clientName": "test"})).await.unwrap();
    first.start(sh("p", "echo $$; exec sleep 1000")).await.unwrap();
    let pid = numbers(&first.until("p", "\n").await.text())[0];
    let mut second = Client::memory(&server);
    server.shut_down().await;
    assert!(!is_running(pid), "gone before shut_down returns");
    assert_eq!(second.text().await, None);
    while first.text().await.is_some() {}
}
