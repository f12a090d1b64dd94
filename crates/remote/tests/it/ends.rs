//! Both ends, through a rendezvous: what an executor and a harness say to each other.

use std::time::Duration;

use codex_exec_credentials::SignIn;
use codex_exec_relay_core::NoiseIdentity;
use codex_exec_remote::{
    EnvironmentConnector, HttpClient, RegistrationTarget, Registry, RelayConfig, RemoteError,
    Secret, TraceContext, entropy, serve_streams,
};
use codex_exec_rpc::Connection;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use crate::cloud::{AUTHORIZATION, Cloud, ENVIRONMENT};

/// An executor whose connections the test holds.
pub(crate) struct Served {
    pub connections: mpsc::UnboundedReceiver<Connection>,
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), RemoteError>>,
}

impl Served {
    pub(crate) async fn stop(self) -> Result<(), RemoteError> {
        let Self { connections, stop, task } = self;
        drop(connections);
        let _ = stop.send(());
        task.await.unwrap()
    }

    pub(crate) async fn ended(self) -> Result<(), RemoteError> {
        self.task.await.unwrap()
    }
}

pub(crate) fn registry(cloud: &Cloud) -> Registry {
    let key = Secret::from("sk-test");
    Registry::new(cloud.base(), SignIn::api_key(key), HttpClient::default()).unwrap()
}

pub(crate) fn environment(cloud: &Cloud) -> RegistrationTarget {
    RegistrationTarget::Environment {
        registry: registry(cloud),
        environment_id: ENVIRONMENT.into(),
        identity: NoiseIdentity::generate(&mut *entropy()).unwrap(),
    }
}

pub(crate) fn serve(target: RegistrationTarget, config: RelayConfig) -> Served {
    let (sender, connections) = mpsc::unbounded_channel();
    let (stop, stopped) = oneshot::channel();
    let accept = move |connection, _| {
        let _ = sender.send(connection);
    };
    let stopped = async {
        let _ = stopped.await;
    };
    let task = tokio::spawn(serve_streams(config, target, accept, stopped, async {}));
    Served { connections, stop, task }
}

pub(crate) fn link(cloud: &Cloud) -> EnvironmentConnector {
    EnvironmentConnector::new(registry(cloud), ENVIRONMENT, RelayConfig::default()).unwrap()
}

async fn say(connection: &Connection, text: &str) {
    connection.outbound().send(text.to_owned()).await.unwrap();
}

async fn hear(connection: &mut Connection) -> String {
    String::from_utf8(connection.next().await.unwrap().unwrap().to_vec()).unwrap()
}

#[tokio::test]
async fn stream_passes_messages_both_ways_and_reports_the_end() {
    let cloud = Cloud::start().await;
    let mut served = serve(environment(&cloud), RelayConfig::default());
    cloud.upgraded(1).await;
    let mut harness = link(&cloud).dial().await.unwrap();
    let mut executor = served.connections.recv().await.unwrap();
    say(&harness, "to the executor").await;
    assert_eq!(hear(&mut executor).await, "to the executor");
    let long = "x".repeat(3 << 20);
    say(&executor, &long).await;
    assert_eq!(hear(&mut harness).await, long);

    let validated = &cloud.seen("/validate")[0];
    assert_eq!(validated.body["harness_key_authorization"], AUTHORIZATION);
    assert_eq!(validated.headers["authorization"], "Bearer sk-test");
    assert_eq!(cloud.seen("/register").len(), 1);

    drop(executor);
    assert!(harness.next().await.is_none());
    served.stop().await.unwrap();
}

#[tokio::test]
async fn invalid_harness_gets_no_stream() {
    let cloud = Cloud::start().await;
    cloud.script(|script| script.deny = true);
    let mut served = serve(environment(&cloud), RelayConfig::default());
    cloud.upgraded(1).await;
    link(&cloud).dial().await.unwrap_err();
    assert!(served.connections.try_recv().is_err());
    served.stop().await.unwrap();
}

#[tokio::test]
async fn dropped_socket_loses_nothing_between_acking_peers() {
    let cloud = Cloud::start().await;
    let config = RelayConfig {
        backoff_initial: Duration::from_millis(10),
        backoff_max: Duration::from_millis(50),
        ..RelayConfig::default()
    };
    let mut served = serve(environment(&cloud), config.clone());
    cloud.upgraded(1).await;
    let link = EnvironmentConnector::new(registry(&cloud), ENVIRONMENT, config).unwrap();
    let mut harness = link.dial().await.unwrap();
    let mut executor = served.connections.recv().await.unwrap();
    // Acknowledgements ride on answers; from then on each knows that the other can resume.
    for _ in 0..3 {
        say(&harness, "ping").await;
        assert_eq!(hear(&mut executor).await, "ping");
        say(&executor, "pong").await;
        assert_eq!(hear(&mut harness).await, "pong");
    }
    let mut sockets = 2;
    for round in 0..5 {
        for number in 0..50 {
            let text = format!("{round}/{number}");
            say(&harness, &text).await;
            say(&executor, &text).await;
        }
        for number in 0..50 {
            let text = format!("{round}/{number}");
            assert_eq!(hear(&mut executor).await, text);
            assert_eq!(hear(&mut harness).await, text);
            if number == 25 {
                cloud.drop_sockets();
                sockets += 2;
            }
        }
        cloud.upgraded(sockets).await;
    }
    assert_eq!(cloud.seen("/register").len(), 1, "it registers once");
    assert_eq!(cloud.seen("/connect").len(), 6, "every attempt has its own authorization");
    served.stop().await.unwrap();
}

#[tokio::test]
async fn registry_requests_carry_the_trace_context() {
    let cloud = Cloud::start().await;
    let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let trace = TraceContext::new(Some(parent), Some("vendor=1"));
    let key = NoiseIdentity::generate(&mut *entropy()).unwrap().public_key();
    registry(&cloud).with_trace(trace).register(ENVIRONMENT, &key).await.unwrap();
    let seen = &cloud.seen("/register")[0];
    assert_eq!(seen.headers["traceparent"], parent);
    assert_eq!(seen.headers["tracestate"], "vendor=1");
}
