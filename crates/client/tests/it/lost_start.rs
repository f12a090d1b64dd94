//! A `process/start` whose response is lost with its connection, against this project's server.

use codex_exec_client::{
    Connection, ConnectionConfig, DialFailure, DialFuture, Dialer, ErrorKind, ExecCommand,
    ExecServerClient, ExecServerError, ReconnectPolicy,
};
use codex_exec_serving::{Server, ServerConfig};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::support::{options, soon};

/// Dials an embedded server. Once `cut` is set, the connection ends instead of delivering the next
/// response to a `process/start`.
struct Cutting {
    server: Server,
    cut: Arc<AtomicBool>,
}

impl Dialer for Cutting {
    fn dial(&self) -> DialFuture<'_> {
        Box::pin(async {
            let (ours, theirs) = Connection::pair(&ConnectionConfig::default());
            tokio::spawn(pass(theirs, self.server.connect(), self.cut.clone()));
            Ok::<_, DialFailure>(ours)
        })
    }

    fn endpoint(&self) -> String {
        "the test".to_owned()
    }
}

/// Forwards messages both ways.
async fn pass(mut client: Connection, mut server: Connection, cut: Arc<AtomicBool>) {
    let mut start = None;
    loop {
        let (message, up) = tokio::select! {
            message = client.next() => (message, true),
            message = server.next() => (message, false),
        };
        let Some(Ok(message)) = message else { return };
        let value: serde_json::Value = serde_json::from_slice(&message).unwrap();
        if up && value["method"] == "process/start" && cut.load(Ordering::Relaxed) {
            start = Some(value["id"].clone());
        }
        if !up && start.is_some() && start.as_ref() == value.get("id") {
            cut.store(false, Ordering::Relaxed);
            return;
        }
        let to = if up { &server } else { &client };
        if to.outbound().send(message).await.is_err() {
            return;
        }
    }
}

struct Bench {
    client: ExecServerClient,
    server: Server,
    cut: Arc<AtomicBool>,
}

async fn bench(resume: Option<(Server, String)>) -> Bench {
    let (server, session) = match resume {
        Some((server, session)) => (server, Some(session)),
        None => (Server::new(ServerConfig::default()).unwrap(), None),
    };
    let cut = Arc::new(AtomicBool::new(false));
    let dialer = Cutting { server: server.clone(), cut: cut.clone() };
    let mut options = options();
    options.resume_session_id = session;
    options.reconnect = ReconnectPolicy::default();
    options.reconnect.first_delay = Duration::from_millis(1);
    let client = soon(ExecServerClient::connect(dialer, options)).await.unwrap();
    Bench { client, server, cut }
}

fn job(word: &str) -> ExecCommand {
    ExecCommand::shell(format!("echo {word}; read x; exit 3")).pipe_stdin()
}

async fn said(bench: &Bench, command: ExecCommand) -> Result<Vec<u8>, ExecServerError> {
    bench.cut.store(true, Ordering::Relaxed);
    let process = soon(bench.client.spawn(command)).await?;
    assert!(!bench.cut.load(Ordering::Relaxed), "the answer was lost");
    let output = soon(process.wait_with_output()).await?;
    assert_eq!(output.status.code, 3);
    Ok(output.stdout)
}

#[tokio::test]
async fn a_repeated_start_recognizes_its_own_process() {
    let bench = bench(None).await;
    for round in 0..20 {
        let word = format!("word{round}");
        assert_eq!(said(&bench, job(&word)).await.unwrap(), format!("{word}\n").as_bytes());
        // The same with an id that the caller chose.
        let named = job(&word).process_id(format!("job{round}"));
        assert_eq!(said(&bench, named).await.unwrap(), format!("{word}\n").as_bytes());
    }
    assert_eq!(bench.client.process_list().await.unwrap().processes.len(), 40, "each once");
    bench.server.shut_down().await;
}

#[tokio::test]
async fn a_start_with_an_id_in_use_is_refused() {
    let first = bench(None).await;
    let older = soon(first.client.spawn(job("older").process_id("job"))).await.unwrap();
    drop(older);
    // By this client …
    let error = said(&first, job("newer").process_id("job")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ProcessExists, "{error}");
    // … or before it connected.
    let session = first.client.session_id().unwrap();
    first.client.close().await;
    let second = bench(Some((first.server.clone(), session))).await;
    let error = said(&second, job("newer").process_id("job")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ProcessExists, "{error}");
    first.server.shut_down().await;
}
