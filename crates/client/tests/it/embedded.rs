//! The client against this project's server, in memory and by websocket.

use std::net::SocketAddr;

use codex_exec_client::protocol::files::FsWatchParams;
use codex_exec_client::{
    ExecCommand, ExecServerClient, ExecServerError, PathUri, RemoteExecServerConnectArgs,
};
use codex_exec_serving::{Server, ServerConfig, WebSocketAuth, WebSocketListener};
use futures_util::StreamExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::{options, soon};

pub(crate) struct Listening {
    pub address: SocketAddr,
    pub server: Server,
}

impl Listening {
    pub(crate) fn url(&self) -> String {
        format!("ws://{}", self.address)
    }
}

/// Starts a server on a free loopback port.
pub(crate) async fn listening(config: ServerConfig) -> Listening {
    let server = Server::new(config).unwrap();
    let listener =
        WebSocketListener::bind("127.0.0.1:0".parse().unwrap(), WebSocketAuth::Open).await.unwrap();
    let address = listener.local_addr().unwrap();
    let serving = server.clone();
    tokio::spawn(async move { listener.serve(&serving).await });
    Listening { address, server }
}

pub(crate) async fn embedded() -> (Server, ExecServerClient) {
    let server = Server::new(ServerConfig::default()).unwrap();
    let client = ExecServerClient::connect_connection(server.connect(), options()).await.unwrap();
    (server, client)
}

#[tokio::test]
async fn an_embedded_server_runs_commands() {
    let (server, client) = embedded().await;
    let command = ExecCommand::shell("cat; echo err >&2; exit 5").pipe_stdin();
    let mut process = client.spawn(command).await.unwrap();
    let mut stdin = process.take_stdin().unwrap();
    stdin.write_all(b"through").await.unwrap();
    soon(stdin.shutdown()).await.unwrap();
    let output = soon(process.wait_with_output()).await.unwrap();
    assert_eq!(
        (output.status.code, &*output.stdout, &*output.stderr),
        (5, &b"through"[..], &b"err\n"[..])
    );
    server.shut_down().await;
    let error = soon(client.environment_status()).await.unwrap_err();
    assert!(matches!(error, ExecServerError::Lost(_)), "{error}");
}

#[tokio::test]
async fn dropping_stdin_closes_it() {
    let (_server, client) = embedded().await;
    let output = client.run(ExecCommand::new(["cat"]).pipe_stdin()).await.unwrap();
    assert!(output.status.success());
}

#[tokio::test]
async fn stdout_and_stderr_are_separate_and_a_dropped_one_is_discarded() {
    let (_server, client) = embedded().await;
    let command = ExecCommand::shell("head -c 20000000 /dev/zero >&2; head -c 3000000 /dev/zero");
    let mut process = client.spawn(command).await.unwrap();
    drop(process.take_stderr());
    let mut stdout = process.take_stdout().unwrap();
    let mut said = Vec::new();
    soon(stdout.read_to_end(&mut said)).await.unwrap();
    assert_eq!(said.len(), 3_000_000);
    assert!(soon(process.wait()).await.unwrap().success());
}

#[tokio::test]
async fn a_terminal_is_resized_and_signalled() {
    let (_server, client) = embedded().await;
    let script = "trap 'stty size; exit 9' WINCH; sleep 600 >/dev/null 2>&1 & stty size; \
                  while :; do wait; done";
    let mut process = client.spawn(ExecCommand::shell(script).size(10, 20)).await.unwrap();
    let mut stdout = process.take_stdout().unwrap();
    let mut first = [0; 7];
    soon(stdout.read_exact(&mut first)).await.unwrap();
    assert_eq!(&first, b"10 20\r\n");
    process.resize(33, 44).await.unwrap();
    let mut rest = String::new();
    soon(stdout.read_to_string(&mut rest)).await.unwrap();
    assert_eq!(rest, "33 44\r\n");
    assert_eq!(soon(process.wait()).await.unwrap().code, 9);
}

#[tokio::test]
async fn a_session_is_detached_and_resumed() {
    let listening = listening(ServerConfig::default()).await;
    let args = || RemoteExecServerConnectArgs::new(listening.url(), "test");
    let client = soon(ExecServerClient::connect_websocket(args())).await.unwrap();
    let command = ExecCommand::shell("echo one; read x; echo $x; exit 4").tty().process_id("job");
    let process = client.spawn(command).await.unwrap();
    let session = client.session_id();
    client.close().await;
    drop(process);

    let mut again = args();
    again.resume_session_id = session;
    let client = soon(ExecServerClient::connect_websocket(again)).await.unwrap();
    assert_eq!(client.process_list().await.unwrap().processes.len(), 1);
    let mut process = client.attach("job", 0, ExecCommand::new(["x"])).await.unwrap();
    // Input before the shell's first output would be echoed before it.
    let mut said = Vec::new();
    while !said.ends_with(b"one\r\n") {
        match soon(process.next_event()).await {
            Some(codex_exec_client::ProcessEvent::Output { bytes, .. }) => said.extend(bytes),
            other => panic!("{other:?}"),
        }
    }
    let mut stdin = process.take_stdin().unwrap();
    stdin.write_all(b"two\n").await.unwrap();
    let output = soon(process.wait_with_output()).await.unwrap();
    assert_eq!(output.stdout, b"two\r\ntwo\r\n");
    assert_eq!(output.status.code, 4);
    let error = client.attach("nobody", 0, ExecCommand::new(["x"])).await.unwrap_err();
    assert!(matches!(error, ExecServerError::Lost(_)), "{error}");
    listening.server.shut_down().await;
}

#[tokio::test]
async fn terminate_on_drop_kills_the_process() {
    let (_server, client) = embedded().await;
    let command = ExecCommand::new(["sleep", "1000"]).process_id("s").terminate_on_drop();
    drop(client.spawn(command).await.unwrap());
    let process = client.attach("s", 0, ExecCommand::new(["x"])).await.unwrap();
    assert_eq!(soon(process.wait()).await.unwrap().code, 137);
}

#[tokio::test]
async fn a_slow_consumer_delays_no_other_and_loses_nothing() {
    let (_server, client) = embedded().await;
    // Less than the server retains, but more than the window.
    let command = ExecCommand::shell("seq 1 500000").window(64 << 10);
    let slow = client.spawn(command).await.unwrap();
    // The process exits although its output is not read, and others are not delayed.
    assert!(soon(slow.wait()).await.unwrap().success());
    assert_eq!(client.run(ExecCommand::new(["echo", "quick"])).await.unwrap().stdout, b"quick\n");
    let output = soon(slow.wait_with_output()).await.unwrap();
    let want: String = (1..=500_000).map(|n| format!("{n}\n")).collect();
    assert!(output.stdout == want.as_bytes(), "{} of {} bytes", output.stdout.len(), want.len());
}

#[tokio::test]
async fn output_that_the_server_dropped_is_reported_as_lost() {
    let (_server, client) = embedded().await;
    let command = ExecCommand::shell("head -c 30000000 /dev/zero").window(64 << 10);
    let mut slow = client.spawn(command).await.unwrap();
    assert!(soon(slow.wait()).await.unwrap().success());
    let (mut got, mut lost) = (0, 0);
    while let Some(event) = soon(slow.next_event()).await {
        match event {
            codex_exec_client::ProcessEvent::Output { bytes, .. } => got += bytes.len() as u64,
            codex_exec_client::ProcessEvent::Lost(codex_exec_client::Lost::Output {
                bytes,
                ..
            }) => lost += bytes.expect("this server counts"),
            _ => {}
        }
    }
    assert!(lost > 0);
    assert_eq!(got + lost, 30_000_000);
}

#[tokio::test]
async fn holding_the_connection_makes_the_process_wait() {
    let listening = listening(ServerConfig::default()).await;
    let args = RemoteExecServerConnectArgs::new(listening.url(), "test");
    let client = soon(ExecServerClient::connect_websocket(args)).await.unwrap();
    let command = ExecCommand::shell("head -c 24000000 /dev/zero")
        .window(64 << 10)
        .on_slow_consumer(codex_exec_client::OnSlowConsumer::HoldConnection);
    let process = client.spawn(command).await.unwrap();
    // Without a reader it cannot have ended, since its output exceeds all buffers.
    let early = tokio::time::timeout(std::time::Duration::from_millis(300), process.wait()).await;
    assert!(early.is_err());
    let output = soon(process.wait_with_output()).await.unwrap();
    assert_eq!(output.stdout.len(), 24_000_000);
    listening.server.shut_down().await;
}

#[tokio::test]
async fn a_read_that_waits_acknowledges_at_once() {
    use codex_exec_client::protocol::process::{
        Env, EnvPolicy, ExecParams, OnFull, ProcessId, ReadParams, Retain, RetainUntil,
    };
    let (_server, client) = embedded().await;
    let id = ProcessId::from("p");
    let params = ExecParams {
        process_id: id.clone(),
        argv: ["head", "-c", "3000000", "/dev/zero"].map(str::to_owned).to_vec(),
        cwd: "/".parse().unwrap(),
        env: Env::default(),
        env_policy: Some(EnvPolicy::default()),
        tty: false,
        pipe_stdin: false,
        arg0: None,
        sandbox: None,
        enforce_managed_network: false,
        metadata: None,
        managed_network: None,
        network_proxy: None,
        shell_snapshot: None,
        size: None,
        // Retention that is full long before the end.
        retain: Some(Retain { bytes: 100_000, on_full: OnFull::Wait, until: RetainUntil::Read }),
        limits: None,
    };
    client.process_start(params).await.unwrap();
    let (mut after, mut bytes) = (0, 0);
    loop {
        let params = ReadParams {
            process_id: id.clone(),
            after_seq: Some(after),
            max_bytes: None,
            wait_ms: Some(60_000),
        };
        let read = soon(client.process_read(params)).await.unwrap();
        assert_eq!(read.dropped_bytes, 0);
        for chunk in &read.chunks {
            after = chunk.seq;
            bytes += chunk.chunk.len();
        }
        if read.closed && read.chunks.is_empty() {
            break;
        }
    }
    assert_eq!(bytes, 3_000_000);
}

#[tokio::test]
async fn a_watch_reports_changes_in_a_tree() {
    let (server, client) = embedded().await;
    let directory = tempfile::tempdir().unwrap();
    let root = PathUri::try_from(directory.path()).unwrap();
    let mut watch = client.files().watch(FsWatchParams::new(0, root.clone())).await.unwrap();
    std::fs::write(directory.path().join("fresh"), "x").unwrap();
    let told = soon(watch.next()).await.unwrap().unwrap();
    assert_eq!(told.changes[0].path, root.join("fresh").unwrap());
    server.shut_down().await;
    soon(watch.next()).await.unwrap().unwrap_err();
    assert!(soon(watch.next()).await.is_none());
}
