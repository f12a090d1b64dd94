//! Several nodes as one service: which node has which environment, and the wires between nodes.
//!
//! An environment's *home* is the node that has its socket; only that node knows its streams. The store
//! records the home. A wire connects a harness at another node to the home, which treats it like any other
//! harness. When an environment moves, its former home closes the sockets with 1012, and their peers
//! reconnect to the new home.
//!
//! ```text
//!   harness ── socket.rs ── bridge.rs ══ wire.rs ══ NATS ══ wire.rs ══ bridge.rs ── environment.rs
//!                          this node                         the environment's home
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::kv::Operation;
use async_nats::{Message, Subscriber};
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::future::join_all;
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio::time::sleep;

use crate::bridge;
use crate::config::Config;
use crate::hub::{Hub, SocketOwner};
use crate::metrics::Metrics;
use crate::nats::{Nats, with_timeout};
use crate::nats_store::{NatsStore, environment_of};
use crate::rate::Limited;
use crate::secret::fill;
use crate::store::{Registration, Store, StoreError};
use crate::wire::{WireId, WireReceiver, WireSender, Wires, subject_of};

// The first byte of a request to a node; lower values are for wires.
const OPEN: u8 = 3;
const PRESENCE: u8 = 4;
const PING: u8 = 5;

/// How many environments one presence request names.
const PRESENCE_BATCH: usize = 500;

/// The subject on which nodes say what counts towards limits.
const LIMITS_SUBJECT: &str = "codex-rendezvous.limits";
/// How much of that waits to be sent; beyond it, only this node counts.
const MAX_UNSHARED: usize = 1024;
/// How much of that one message has.
const SHARED_BATCH: usize = 128;

/// Whether there are other nodes.
#[derive(Debug, Clone)]
pub(crate) enum Router {
    /// This process is the only one.
    Alone,
    /// This process is a node of a cluster.
    Cluster(Arc<Cluster>),
}

/// What an environment's home knows of it.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Presence {
    pub since: u64,
    pub harnesses: usize,
    pub streams: usize,
}

impl Router {
    pub(crate) fn new(config: &Arc<Config>, metrics: &Arc<Metrics>, store: &Store) -> Self {
        match store {
            Store::File(_) => Self::Alone,
            Store::Nats(store) => Self::Cluster(Cluster::new(config, metrics.clone(), store)),
        }
    }

    pub(crate) fn cluster(&self) -> Option<&Arc<Cluster>> {
        match self {
            Self::Alone => None,
            Self::Cluster(cluster) => Some(cluster),
        }
    }
}

/// This node among the others.
#[derive(Debug)]
pub(crate) struct Cluster {
    config: Arc<Config>,
    store: Arc<NatsStore>,
    nats: Arc<Nats>,
    pub wires: Arc<Wires>,
    /// What this node has let through and the others have yet to count.
    unshared: (mpsc::Sender<Limited>, Mutex<Option<mpsc::Receiver<Limited>>>),
}

/// What one node has let through.
#[derive(Debug, Serialize, Deserialize)]
struct Taken {
    node: String,
    limited: Vec<Limited>,
}

/// The request of a harness's node to an environment's home for a wire.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Open {
    from: String,
    generation: u64,
    pub environment: String,
    pub registration: String,
    pub harness: String,
    pub token: String,
}

#[derive(Debug, Serialize, Deserialize)]
enum OpenReply {
    #[serde(rename = "Laid")]
    Opened {
        generation: u64,
    },
    Refused(Refusal),
}

/// Why a wire was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Refusal {
    /// The environment is not at that node.
    Away,
    /// The environment's harness limit is reached.
    Full,
    /// The node does not reply.
    NodeGone,
}

impl Cluster {
    fn new(config: &Arc<Config>, metrics: Arc<Metrics>, store: &Arc<NatsStore>) -> Arc<Self> {
        let nats = store.nats().clone();
        // Longer than the wait for a slow socket, which gives up first.
        let stall = 2 * config.stall_timeout;
        let wires = Wires::new(nats.client.clone(), &nats.node, config.wire_bytes, stall, metrics);
        let (sender, receiver) = mpsc::channel(MAX_UNSHARED);
        let unshared = (sender, Mutex::new(Some(receiver)));
        Arc::new(Self { config: config.clone(), store: store.clone(), nats, wires, unshared })
    }

    pub(crate) fn node(&self) -> &str {
        &self.nats.node
    }

    fn generation(&self) -> u64 {
        self.nats.connection_state().borrow().generation
    }

    /// Runs this node's part of the cluster; never returns while NATS lasts.
    pub(crate) async fn run(self: &Arc<Self>, hub: &Arc<Hub>) {
        let inbox = self.nats.inbox();
        tokio::join!(
            async {
                if let Some(inbox) = inbox {
                    self.read_inbox(inbox, hub).await;
                }
            },
            self.follow_connection(hub),
            self.follow_environments(hub),
            self.follow_tokens(hub),
            self.watch_peers(),
            self.share_limits(),
            self.follow_limits(hub),
        );
    }

    async fn read_inbox(self: &Arc<Self>, mut inbox: Subscriber, hub: &Arc<Hub>) {
        while let Some(message) = inbox.next().await {
            match message.payload.first() {
                Some(&OPEN) => self.reply(&message, |body| self.accept_wire(hub, body)),
                Some(&PRESENCE) => self.reply(&message, |body| {
                    let requested: Vec<(String, String)> = serde_json::from_slice(body).ok()?;
                    let known = requested
                        .iter()
                        .map(|(id, registration)| hub.presence_here(id, registration));
                    encode(&known.collect::<Vec<_>>())
                }),
                Some(&PING) => self.reply(&message, |_| encode(&self.generation())),
                _ => self.wires.handle(&message.payload, message.reply),
            }
        }
    }

    fn reply(&self, message: &Message, handler: impl FnOnce(&[u8]) -> Option<Bytes>) {
        let Some(subject) = message.reply.clone() else { return };
        if let Some(reply) = handler(&message.payload[1..]) {
            let client = self.nats.client.clone();
            // Spawned, so that the reader of the inbox does not wait.
            tokio::spawn(async move {
                let _ = with_timeout(client.publish(subject, reply)).await;
            });
        }
    }

    async fn request<T: DeserializeOwned>(&self, node: &str, kind: u8, body: &[u8]) -> Option<T> {
        self.nats.up().ok()?;
        let request = Bytes::from([&[kind], body].concat());
        let reply = with_timeout(self.nats.client.request(subject_of(node), request)).await;
        serde_json::from_slice(&reply.ok()?.ok()?.payload).ok()
    }

    /// Flushes everything published to other nodes.
    pub(crate) async fn flush(&self) {
        let _ = with_timeout(self.nats.client.flush()).await;
    }

    // --- limits ---

    /// Has the other nodes count this too.
    pub(crate) fn share(&self, limited: Limited) {
        // A node that cannot keep up, or has no NATS, limits by itself.
        let _ = self.unshared.0.try_send(limited);
    }

    async fn share_limits(&self) {
        let Some(mut unshared) = self.unshared.1.lock().take() else { return };
        let mut limited = Vec::new();
        while unshared.recv_many(&mut limited, SHARED_BATCH).await > 0 {
            let taken =
                Taken { node: self.node().to_owned(), limited: std::mem::take(&mut limited) };
            if let (Ok(()), Some(taken)) = (self.nats.up(), encode(&taken)) {
                let _ = with_timeout(self.nats.client.publish(LIMITS_SUBJECT, taken)).await;
            }
        }
    }

    async fn follow_limits(&self, hub: &Hub) {
        loop {
            if let Ok(Ok(mut messages)) =
                with_timeout(self.nats.client.subscribe(LIMITS_SUBJECT)).await
            {
                while let Some(message) = messages.next().await {
                    let taken = serde_json::from_slice(&message.payload);
                    let Ok(Taken { node, limited }) = taken else { continue };
                    if node != self.node() {
                        limited.iter().for_each(|limited| hub.taken_elsewhere(limited));
                    }
                }
            }
            sleep(Duration::from_secs(1)).await;
        }
    }

    // --- wires ---

    /// Opens a wire from a harness here to the home of its environment.
    pub(crate) async fn open_wire(
        &self,
        node: &str,
        owner: &SocketOwner,
        harness: &str,
    ) -> Result<(WireSender, WireReceiver), Refusal> {
        let mut id = [0; 16];
        fill(&mut id).map_err(|_| Refusal::Away)?;
        let (environment, registration) = (owner.environment.clone(), owner.registration.clone());
        let open = Open {
            from: self.node().to_owned(),
            generation: self.generation(),
            environment: environment.clone(),
            registration: registration.clone(),
            harness: harness.to_owned(),
            token: owner.token.clone(),
        };
        let body = [&id[..], &encode(&open).unwrap_or_default()].concat();
        // Opened before the request, since frames may follow the reply at once.
        let id = WireId::from_be_bytes(id);
        let (sender, receiver) = self.wires.open(id, node, Some(environment), registration);
        let refusal = match self.request(node, OPEN, &body).await {
            Some(OpenReply::Opened { generation }) => {
                sender.end().set_peer_generation(generation);
                return Ok((sender, receiver));
            }
            Some(OpenReply::Refused(refusal)) => refusal,
            None => Refusal::NodeGone,
        };
        sender.close(crate::socket::ENDED).await;
        Err(refusal)
    }

    /// Handles another node's request for a wire.
    fn accept_wire(self: &Arc<Self>, hub: &Arc<Hub>, body: &[u8]) -> Option<Bytes> {
        let id = WireId::from_be_bytes(body.get(..16)?.try_into().ok()?);
        let open: Open = serde_json::from_slice(&body[16..]).ok()?;
        let reply = match hub.admit(&open) {
            Ok(admitted) => {
                let (sender, receiver) = self.wires.open(id, &open.from, None, open.registration);
                sender.end().set_peer_generation(open.generation);
                bridge::serve(hub, admitted, sender, receiver);
                OpenReply::Opened { generation: self.generation() }
            }
            Err(refusal) => OpenReply::Refused(refusal),
        };
        encode(&reply)
    }

    // --- who is where ---

    /// Asks other nodes about these environments; the result has the same order.
    pub(crate) async fn presences(&self, known: &[&Registration]) -> Vec<Option<Presence>> {
        let mut by_node: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (at, registration) in known.iter().enumerate() {
            if let Some(node) = registration.node.as_deref().filter(|node| *node != self.node()) {
                by_node.entry(node).or_default().push(at);
            }
        }
        let presences: Mutex<Vec<Option<Presence>>> = Mutex::new(vec![None; known.len()]);
        let requests = by_node.into_iter().map(async |(node, indexes)| {
            for indexes in indexes.chunks(PRESENCE_BATCH) {
                let requested: Vec<_> =
                    indexes.iter().map(|at| (&known[*at].environment, &known[*at].id)).collect();
                let body = encode(&requested).unwrap_or_default();
                let reply: Option<Vec<Option<Presence>>> =
                    self.request(node, PRESENCE, &body).await;
                // A node that does not reply is gone, and so are its environments.
                let Some(reply) = reply else { return };
                let mut presences = presences.lock();
                for (at, presence) in indexes.iter().zip(reply) {
                    presences[*at] = presence;
                }
            }
        });
        join_all(requests).await;
        presences.into_inner()
    }

    /// Records in the store that the node of an environment is gone.
    pub(crate) async fn node_gone(
        &self,
        environment: &str,
        registration: &str,
        node: &str,
    ) -> Result<(), StoreError> {
        let gone = crate::nats_store::SocketChange::Gone { node };
        let now = self.config.clock.now();
        self.store.record_socket(environment, registration, gone, now).await.map(drop)
    }

    /// Follows the state of the connection to NATS.
    async fn follow_connection(&self, hub: &Arc<Hub>) {
        let mut state = self.nats.connection_state();
        let mut generation = state.borrow_and_update().generation;
        while state.changed().await.is_ok() {
            let now = *state.borrow_and_update();
            if now.generation != generation {
                generation = now.generation;
                tracing::warn!("lost the connection to NATS; closing streams between nodes");
                self.wires.close_all();
            }
            if now.up {
                self.store.tokens_changed();
                hub.recheck_all().await;
            }
        }
    }

    /// Follows registrations and moves of environments at any node.
    async fn follow_environments(&self, hub: &Arc<Hub>) {
        loop {
            if let Ok(Ok(mut changes)) = with_timeout(self.nats.environments.watch_all()).await {
                // Changes before the watch began.
                hub.recheck_all().await;
                while let Some(Ok(change)) = changes.next().await {
                    let Some(environment) = environment_of(&change.key) else { continue };
                    let here = hub.get(&environment);
                    let wired = self.wires.has_wire_to(&environment);
                    let same = here.as_ref().is_some_and(|here| {
                        let value: Option<Registration> =
                            serde_json::from_slice(&change.value).ok();
                        value.is_some_and(|value| {
                            value.id == here.registration
                                && value.node.as_deref() == Some(self.node())
                        })
                    });
                    if (here.is_some() && !same) || wired {
                        let hub = hub.clone();
                        tokio::spawn(async move { hub.recheck(&environment).await });
                    }
                }
            }
            sleep(Duration::from_secs(1)).await;
        }
    }

    async fn follow_tokens(&self, hub: &Hub) {
        loop {
            if let Ok(Ok(mut changes)) = with_timeout(self.nats.tokens.watch_all()).await {
                self.store.tokens_changed();
                while let Some(Ok(change)) = changes.next().await {
                    let token = self.store.token_changed(&change.key);
                    if let (Some(token), false) = (token, change.operation == Operation::Put) {
                        hub.check_token(token).await;
                    }
                }
            }
            sleep(Duration::from_secs(1)).await;
        }
    }

    /// Pings the nodes at the other ends of wires, which may die silently.
    async fn watch_peers(&self) {
        loop {
            sleep(self.config.peer_ping).await;
            if self.nats.up().is_err() {
                continue;
            }
            join_all(self.wires.peers().iter().map(async |peer| {
                let generation: Option<u64> = self.request(peer, PING, &[]).await;
                if generation.is_none() {
                    tracing::warn!(node = &**peer, "a node does not respond");
                }
                self.wires.close_peer(peer, generation);
            }))
            .await;
        }
    }
}

fn encode<T: Serialize>(value: &T) -> Option<Bytes> {
    serde_json::to_vec(value).ok().map(Bytes::from)
}
