//! Support for the client's file tests, which run here against their server.

use std::future::Future;

use codex_exec_client::{ExecServerClient, RemoteExecServerConnectArgs};

use crate::programs::{Implementation, Server, TIMEOUT};

/// Their server, and our client on it; `None` without their program, since those tests are not ignored.
pub(crate) async fn server() -> Option<(Server, ExecServerClient)> {
    if std::env::var_os("CODEX_INTEROP_BIN").is_none() {
        eprintln!("skipped: interop/run runs it");
        return None;
    }
    let server = Server::start(Implementation::Theirs);
    let args = RemoteExecServerConnectArgs::new(&server.url, "interop");
    let client = ExecServerClient::connect_websocket(args).await.unwrap();
    Some((server, client))
}

/// Fails instead of hanging.
pub(crate) async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(TIMEOUT, future).await.expect("it takes too long")
}
