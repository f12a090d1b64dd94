//! Whether the far end of a relay stream is there: `Peer::responds_within`, over frames that every peer that
//! acknowledges answers.

use std::time::Duration;

use codex_exec_remote::{EnvironmentConnector, RelayConfig};
use codex_exec_rpc::Connection;

use crate::cloud::{Cloud, ENVIRONMENT, Mangle};
use crate::ends::{Served, environment, registry, serve};

/// Longer than anything that is alive needs, and shorter than the time between heartbeats.
const LONG: Duration = Duration::from_secs(20);
/// For peers that are known to be silent.
const SHORT: Duration = Duration::from_millis(300);

struct World {
    cloud: Cloud,
    _served: Served,
    harness: Connection,
    executor: Connection,
}

impl World {
    async fn new(harness: RelayConfig) -> Self {
        let cloud = Cloud::start().await;
        let mut served = serve(environment(&cloud), RelayConfig::default());
        cloud.upgraded(1).await;
        let link = EnvironmentConnector::new(registry(&cloud), ENVIRONMENT, harness).unwrap();
        let harness = link.dial().await.unwrap();
        let executor = served.connections.recv().await.unwrap();
        Self { cloud, _served: served, harness, executor }
    }

    /// After it, the executor knows that the harness acknowledges.
    async fn talk(&mut self) {
        for _ in 0..3 {
            self.executor.outbound().send("to the harness").await.unwrap();
            self.harness.next().await.unwrap().unwrap();
            self.harness.outbound().send("to the executor").await.unwrap();
            self.executor.next().await.unwrap().unwrap();
        }
    }

    /// Stops all frames from the harness without closing anything.
    fn silence(&self) {
        let mangle = |by_executor: bool, frame| if by_executor { vec![frame] } else { Vec::new() };
        self.cloud.script(|script| script.mangle = Some(Mangle::new(mangle)));
    }

    async fn answers(&self, patience: Duration) -> bool {
        self.executor.outbound().peer().responds_within(patience).await
    }
}

#[tokio::test]
async fn live_peer_answers_probes_and_a_silent_one_does_not() {
    let mut world = World::new(RelayConfig::default()).await;
    world.talk().await;
    for _ in 0..3 {
        assert!(world.answers(LONG).await);
    }
    world.silence();
    assert!(!world.answers(SHORT).await);
    // Also with more to send than the stream takes without acknowledgements.
    let outbound = world.executor.outbound().clone();
    let sending =
        tokio::spawn(async move { while outbound.send(vec![b'x'; 100_000]).await.is_ok() {} });
    assert!(!world.answers(SHORT).await);
    world.cloud.script(|script| script.mangle = None);
    assert!(world.answers(LONG).await, "it was silent for a moment only");
    sending.abort();
}

#[tokio::test]
async fn peer_that_does_not_read_still_answers_probes() {
    let config = RelayConfig { inbox_bytes: 64 << 10, ..RelayConfig::default() };
    let mut world = World::new(config).await;
    world.talk().await;
    let outbound = world.executor.outbound().clone();
    let sending =
        tokio::spawn(async move { while outbound.send(vec![b'x'; 100_000]).await.is_ok() {} });
    for _ in 0..3 {
        assert!(world.answers(LONG).await);
    }
    sending.abort();
}

#[tokio::test]
async fn peer_without_acks_counts_as_alive() {
    let world = World::new(RelayConfig::default()).await;
    world.silence();
    assert!(world.answers(SHORT).await);
}
