//! `codex exec-server --linux-sandbox-pid-namespace`.

use serde_json::json;

use crate::support::{Running, start};

/// Whether a sandboxed process sees its server, and whether it can signal it.
async fn sees_and_signals(arguments: &[&str]) -> (String, i64) {
    let server = Running::start(arguments);
    let pid = server.pid();
    let mut client = server.client().await;
    let script = format!(
        "test -d /proc/{pid} && echo seen; kill -0 {pid} 2>/dev/null && echo signalled; sleep 1000 & exit 3"
    );
    let mut params = start("p", &script);
    params["sandbox"] = json!({"type": "read-only", "network_access": false});
    let answer = client.call("process/start", params).await;
    assert_eq!(answer["result"]["sandboxType"], "linuxSeccomp", "{answer}");
    client.closed("p").await
}

#[tokio::test]
async fn with_inherit_the_server_is_seen_and_not_signalled() {
    for (arguments, said) in [
        (&[][..], ""),
        (&["--linux-sandbox-pid-namespace", "isolate"], ""),
        (&["--linux-sandbox-pid-namespace", "inherit"], "seen\n"),
    ] {
        // The process that the command has left holds its output open until it is killed.
        assert_eq!(sees_and_signals(arguments).await, (said.to_owned(), 3), "{arguments:?}");
    }
}
