//! Whole sessions: the client, the rendezvous, the server, real processes.

use codex_exec_client::{
    EnvironmentDialer, ExecCommand, ExecServerClient, ExecServerClientConnectOptions,
};
use codex_exec_credentials::SignIn;
use codex_exec_remote::{RegistrationTarget, RelayConfig, serve_streams};
use codex_exec_serving::{Server, ServerConfig};
use tokio::sync::oneshot;

use crate::cloud::{Cloud, ENVIRONMENT};
use crate::ends::environment;

/// A server behind the rendezvous.
pub(crate) struct Remote {
    stop: oneshot::Sender<()>,
    task: tokio::task::JoinHandle<()>,
}

impl Remote {
    pub(crate) fn start(target: RegistrationTarget) -> Self {
        let server = Server::new(ServerConfig::default()).unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let (serving, ending) = (server.clone(), server);
        let task = tokio::spawn(async move {
            let stop = async {
                let _ = stopped.await;
            };
            let wind_down = async move { ending.shut_down().await };
            let accept = move |connection, _| serving.serve(connection);
            serve_streams(RelayConfig::default(), target, accept, stop, wind_down).await.unwrap();
        });
        Self { stop, task }
    }

    pub(crate) async fn stop(self) {
        let _ = self.stop.send(());
        self.task.await.unwrap();
    }
}

pub(crate) async fn client(cloud: &Cloud) -> ExecServerClient {
    let sign_in = SignIn::api_key("sk-harness".into());
    let url = cloud.base().to_string();
    let config = RelayConfig::default();
    let dialer = EnvironmentDialer::new(&url, ENVIRONMENT, sign_in, config).unwrap();
    ExecServerClient::connect(dialer, ExecServerClientConnectOptions::default()).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn remote_session_runs_commands() {
    let cloud = Cloud::start().await;
    let remote = Remote::start(environment(&cloud));
    cloud.upgraded(1).await;
    let client = client(&cloud).await;
    let output =
        client.run(ExecCommand::shell("printf out; printf err >&2; exit 3")).await.unwrap();
    assert_eq!(
        (output.status.code, &*output.stdout, &*output.stderr),
        (3, &b"out"[..], &b"err"[..])
    );
    let output =
        client.run(ExecCommand::shell("head -c 16777216 /dev/zero | tr '\\0' x")).await.unwrap();
    assert_eq!(output.stdout.len(), 16 << 20);
    remote.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn flooding_stream_does_not_starve_another() {
    let cloud = Cloud::start().await;
    let remote = Remote::start(environment(&cloud));
    cloud.upgraded(1).await;
    let (flooded, typing) = (client(&cloud).await, client(&cloud).await);
    let mut flood = flooded.spawn(ExecCommand::shell("exec cat /dev/zero")).await.unwrap();
    let (progress, mut flooding) = tokio::sync::watch::channel(0u64);
    let reading = tokio::spawn(async move {
        while flood.next_event().await.is_some() {
            progress.send_modify(|events| *events += 1);
        }
    });
    flooding.wait_for(|events| *events > 10).await.unwrap();
    for number in 0..5 {
        let command = ExecCommand::shell(format!("echo {number}"));
        let output = typing.run(command).await.unwrap();
        assert_eq!(output.stdout, format!("{number}\n").as_bytes());
    }
    // The client would go on to look for its server.
    reading.abort();
    remote.stop().await;
}
