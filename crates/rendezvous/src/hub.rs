//! The environments at this node, by id: connecting, disconnecting and replacing them.
//!
//! Invariant: there is at most one [`Environment`] per id, that of its current registration. In a cluster
//! the store names one node as its home; a node that finds another home ends its own [`Environment`].

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use codex_exec_rpc::{CloseReason, OutboundQueue};
use parking_lot::{Mutex, MutexGuard};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::task::TaskTracker;
use tokio_websockets::WebSocketStream;

use crate::bridge::{self, Admitted};
use crate::cluster::{Open, Presence, Refusal, Router};
use crate::config::Config;
use crate::environment::{AttachError, Detached, Environment, HarnessHandle};
use crate::metrics::{Gauges, Metrics};
use crate::rate::{Limited, Limits};
use crate::socket::{self, Outbound, REGISTERED_AGAIN, REMOVED, Received};
use crate::store::{Registration, Store, StoreError};
use crate::table::Dropped;
use crate::wire::{WireReceiver, WireSender};

/// All environments with a socket here, or with streams that wait for one.
#[derive(Debug)]
pub(crate) struct Hub {
    config: Arc<Config>,
    metrics: Arc<Metrics>,
    store: Store,
    router: Router,
    limits: Limits,
    tasks: TaskTracker,
    environments: Mutex<HashMap<String, Arc<Environment>>>,
}

/// The owner of a websocket.
#[derive(Debug, Clone)]
pub(crate) struct SocketOwner {
    pub environment: String,
    pub registration: String,
    pub token: String,
    /// `None` for the environment itself.
    pub harness: Option<String>,
}

/// Room for one websocket, reserved before the upgrade is answered. Dropping it, because the client left
/// before the upgrade, releases it.
#[derive(Debug)]
pub(crate) struct Seat {
    hub: Arc<Hub>,
    claim: Option<SeatClaim>,
}

#[derive(Debug)]
struct SeatClaim {
    owner: SocketOwner,
    side: Side,
    outbound: Outbound,
    queue: OutboundQueue,
}

#[derive(Debug)]
enum Side {
    Executor(Arc<Environment>, u64),
    Harness(Arc<Environment>, HarnessHandle),
    /// The environment's home is another node.
    Remote(WireSender, WireReceiver),
}

/// Why a websocket was refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SeatError {
    #[error("the registration was replaced or removed")]
    Replaced,
    #[error("harness limit reached")]
    Full,
    #[error("too many handshakes failed")]
    CutOff,
    #[error("the environment has been offline for too long")]
    Offline,
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl From<AttachError> for SeatError {
    fn from(error: AttachError) -> Self {
        match error {
            AttachError::Ended => Self::Replaced,
            AttachError::Full => Self::Full,
            AttachError::CutOff => Self::CutOff,
        }
    }
}

impl Hub {
    pub(crate) fn new(
        config: Arc<Config>,
        metrics: Arc<Metrics>,
        store: Store,
        tasks: TaskTracker,
    ) -> Arc<Self> {
        let router = Router::new(&config, &metrics, &store);
        let limits = Limits::new(&config);
        let environments = Mutex::default();
        Arc::new(Self { config, metrics, store, router, limits, tasks, environments })
    }

    /// Counts this at every node; `false` if the limit is reached.
    pub(crate) fn try_take(&self, limited: Limited) -> bool {
        let permitted = self.limits.try_take(&limited);
        if permitted && let Some(cluster) = self.router.cluster() {
            cluster.share(limited);
        }
        permitted
    }

    /// Counts what another node has let through.
    pub(crate) fn taken_elsewhere(&self, limited: &Limited) {
        self.limits.try_take(limited);
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    pub(crate) fn tasks(&self) -> &TaskTracker {
        &self.tasks
    }

    /// Runs the periodic work and the cluster; never returns.
    pub(crate) async fn run_maintenance(self: &Arc<Self>) {
        let sweep = async {
            loop {
                tokio::time::sleep(self.config.revocation_interval).await;
                self.sweep_tokens().await;
            }
        };
        let note = async {
            loop {
                tokio::time::sleep(self.config.harness_record_interval).await;
                self.record_harnesses().await;
            }
        };
        let cluster = async {
            if let Some(cluster) = self.router.cluster() {
                cluster.run(self).await;
            }
        };
        tokio::join!(sweep, note, cluster);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Environment>>> {
        self.environments.lock()
    }

    pub(crate) fn get(&self, environment: &str) -> Option<Arc<Environment>> {
        self.lock().get(environment).cloned()
    }

    fn all(&self) -> Vec<Arc<Environment>> {
        self.lock().values().cloned().collect()
    }

    pub(crate) fn gauges(&self) -> Gauges {
        let mut gauges = Gauges::default();
        for environment in self.all() {
            let (harnesses, streams) = environment.counts();
            gauges.environments += usize::from(environment.online_since().is_some());
            gauges.harnesses += harnesses;
            gauges.streams += streams;
        }
        gauges.wires = self.router.cluster().map_or(0, |cluster| cluster.wires.len());
        gauges
    }

    /// Whether there are open streams.
    pub(crate) fn is_busy(&self) -> bool {
        self.gauges().streams > 0
            || self.router.cluster().is_some_and(|cluster| cluster.wires.outbound_count() > 0)
    }

    /// The presence of an environment under this registration, if its socket is here.
    pub(crate) fn presence_here(&self, environment: &str, registration: &str) -> Option<Presence> {
        let known = self.get(environment).filter(|known| known.registration == registration)?;
        let (harnesses, streams) = known.counts();
        Some(Presence { since: known.online_since()?, harnesses, streams })
    }

    /// The presence of these environments, here or at other nodes, in the same order.
    pub(crate) async fn presences(&self, known: &[&Registration]) -> Vec<Option<Presence>> {
        let here = known.iter().map(|known| self.presence_here(&known.environment, &known.id));
        let mut all: Vec<_> = here.collect();
        if let Some(cluster) = self.router.cluster() {
            for (known, remote) in all.iter_mut().zip(cluster.presences(known).await) {
                *known = known.or(remote);
            }
        }
        all
    }

    /// Ends an environment under any registration but this one, after a new registration or a removal.
    pub(crate) fn replace(
        &self,
        environment: &str,
        registration: Option<&str>,
        reason: CloseReason,
    ) {
        let mut environments = self.lock();
        if environments
            .get(environment)
            .is_some_and(|known| registration != Some(known.registration.as_str()))
            && let Some(old) = environments.remove(environment)
        {
            self.metrics.replaced.fetch_add(1, Relaxed);
            old.end(reason);
        }
    }

    /// Reserves a seat. The store records an environment as online before its upgrade is answered.
    pub(crate) async fn seat(
        self: &Arc<Self>,
        owner: SocketOwner,
        current: &Registration,
    ) -> Result<Seat, SeatError> {
        match owner.harness.clone() {
            None => self.seat_executor(owner).await,
            Some(harness) => self.seat_harness(owner, &harness, current).await,
        }
    }

    async fn seat_executor(self: &Arc<Self>, owner: SocketOwner) -> Result<Seat, SeatError> {
        let (outbound, queue) = socket::queue(&self.config);
        let now = self.config.clock.now();
        let (environment, turn, number) = loop {
            let (environment, _) = self.entry(&owner);
            // Held from before the socket is attached until the store has it, so that a recheck does
            // not find another home meanwhile.
            let turn = environment.presence_lock.clone().lock_owned().await;
            match environment.attach_executor(outbound.clone(), owner.token.clone(), now) {
                Ok(number) => break (environment, turn, number),
                // It has ended meanwhile; the store decides whether there may be another.
                Err(AttachError::Ended) if !self.is_current(&owner.environment, &environment) => {}
                Err(error) => return Err(error.into()),
            }
        };
        let kept = self.store.set_online(&owner.environment, &owner.registration, true, now).await;
        drop(turn);
        let side = Side::Executor(environment, number);
        let seat =
            Seat { hub: self.clone(), claim: Some(SeatClaim { owner, side, outbound, queue }) };
        match kept {
            Ok(true) => Ok(seat),
            Ok(false) => Err(SeatError::Replaced),
            // Other nodes could not find the environment.
            Err(error) if self.router.cluster().is_some() => Err(error.into()),
            Err(error) => {
                self.store_failed(&error);
                Ok(seat)
            }
        }
    }

    async fn seat_harness(
        self: &Arc<Self>,
        owner: SocketOwner,
        harness: &str,
        current: &Registration,
    ) -> Result<Seat, SeatError> {
        let (outbound, queue) = socket::queue(&self.config);
        let here = self.get(&owner.environment);
        let here = here.filter(|here| here.registration == owner.registration);
        let mut away_since = current.last_seen;
        if here.as_ref().is_none_or(|here| here.online_since().is_none())
            && let Some(node) = current.node.as_deref()
            && let Some(cluster) = self.router.cluster().filter(|all| all.node() != node)
        {
            match cluster.open_wire(node, &owner, harness).await {
                Ok((sender, receiver)) => {
                    let side = Side::Remote(sender, receiver);
                    let claim = SeatClaim { owner, side, outbound, queue };
                    return Ok(Seat { hub: self.clone(), claim: Some(claim) });
                }
                Err(Refusal::Full) => return Err(SeatError::Full),
                Err(Refusal::Away) => {}
                Err(Refusal::NodeGone) => {
                    cluster.node_gone(&owner.environment, &owner.registration, node).await?;
                    away_since = self.config.clock.now();
                }
            }
        }
        // The harness waits here for the environment to reconnect, to this node or another.
        let window = away_since + self.config.reconnect_window.as_secs();
        if here.is_none() && self.config.clock.now() >= window {
            return Err(SeatError::Offline);
        }
        let (environment, fresh, handle) = loop {
            let (environment, fresh) = self.entry(&owner);
            match environment.attach_harness(outbound.clone(), harness.into(), owner.token.clone())
            {
                Ok(handle) => break (environment, fresh, handle),
                Err(AttachError::Ended) if !self.is_current(&owner.environment, &environment) => {}
                Err(error) => return Err(error.into()),
            }
        };
        if fresh {
            self.schedule_give_up(&owner, environment.clone(), environment.epoch());
        }
        let (id, side) = (owner.environment.clone(), Side::Harness(environment.clone(), handle));
        let seat =
            Seat { hub: self.clone(), claim: Some(SeatClaim { owner, side, outbound, queue }) };
        if self.router.cluster().is_some() && environment.online_since().is_none() {
            // The environment may have connected to another node meanwhile.
            let hub = self.clone();
            tokio::spawn(async move { hub.recheck(&id).await });
        }
        Ok(seat)
    }

    /// Admits a harness of another node.
    pub(crate) fn admit(&self, open: &Open) -> Result<Admitted, Refusal> {
        let environment = self.get(&open.environment).filter(|known| {
            known.registration == open.registration && known.online_since().is_some()
        });
        let environment = environment.ok_or(Refusal::Away)?;
        let (outbound, queue) = socket::queue(&self.config);
        let (harness, token) = (open.harness.as_str().into(), open.token.clone());
        match environment.attach_harness(outbound.clone(), harness, token) {
            Ok(handle) => Ok(Admitted { environment, harness: handle, outbound, queue }),
            Err(AttachError::Ended) => Err(Refusal::Away),
            Err(AttachError::Full | AttachError::CutOff) => Err(Refusal::Full),
        }
    }

    fn is_current(&self, id: &str, environment: &Arc<Environment>) -> bool {
        self.lock().get(id).is_some_and(|known| Arc::ptr_eq(known, environment))
    }

    fn entry(&self, owner: &SocketOwner) -> (Arc<Environment>, bool) {
        let mut environments = self.lock();
        if let Some(known) = environments.get(&owner.environment) {
            if known.registration == owner.registration {
                return (known.clone(), false);
            }
            // The store has this registration as the current one.
            known.end(REGISTERED_AGAIN);
        }
        let (config, metrics) = (self.config.clone(), self.metrics.clone());
        let environment = Arc::new(Environment::new(owner.registration.clone(), config, metrics));
        environments.insert(owner.environment.clone(), environment.clone());
        (environment, true)
    }

    /// Runs a websocket until it ends.
    pub(crate) async fn run<T>(self: &Arc<Self>, mut seat: Seat, socket: WebSocketStream<T>)
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let Some(claim) = seat.claim.take() else { return };
        let SeatClaim { owner, side, outbound, queue } = claim;
        let mut reader = socket::start(socket, outbound.clone(), queue, &self.config, &self.tasks);
        match side {
            Side::Executor(environment, number) => {
                drop(outbound);
                tracing::info!(environment = owner.environment, "environment online");
                while let Some(received) = reader.next().await {
                    match received {
                        Received::Binary(frame) => environment.executor_frame(number, frame).await,
                        Received::Text(_) => self.metrics.dropped(Dropped::Invalid),
                    }
                }
                drop(reader);
                self.executor_gone(&owner, &environment, number).await;
            }
            Side::Harness(environment, handle) => {
                drop(outbound);
                tracing::debug!(environment = owner.environment, "harness connected");
                while let Some(received) = reader.next().await {
                    match received {
                        Received::Binary(frame) => environment.harness_frame(&handle, frame).await,
                        Received::Text(_) => self.metrics.dropped(Dropped::Invalid),
                    }
                }
                drop(reader);
                self.harness_gone(&environment, &handle);
            }
            Side::Remote(sender, receiver) => {
                tracing::debug!(
                    environment = owner.environment,
                    "harness connected; its environment is at another node"
                );
                let config = self.config.clone();
                bridge::run(reader, outbound, sender, receiver, config, &self.metrics).await;
            }
        }
    }

    async fn executor_gone(
        self: &Arc<Self>,
        owner: &SocketOwner,
        environment: &Arc<Environment>,
        number: u64,
    ) {
        let detached = environment.detach_executor(number);
        if detached == Detached::Replaced {
            return;
        }
        tracing::info!(environment = owner.environment, "environment offline");
        if let Detached::Waiting(epoch) = detached {
            self.schedule_give_up(owner, environment.clone(), epoch);
        }
        self.record_presence(owner, environment).await;
    }

    pub(crate) fn harness_gone(&self, environment: &Arc<Environment>, handle: &HarnessHandle) {
        if environment.detach_harness(handle) {
            let (environment, grace) = (environment.clone(), self.config.grace);
            tokio::spawn(async move {
                tokio::time::sleep(grace).await;
                environment.expire_orphans();
            });
        }
    }

    fn schedule_give_up(
        self: &Arc<Self>,
        owner: &SocketOwner,
        environment: Arc<Environment>,
        epoch: u64,
    ) {
        let (hub, id, grace) = (self.clone(), owner.environment.clone(), self.config.grace);
        tokio::spawn(async move {
            tokio::time::sleep(grace).await;
            let mut environments = hub.lock();
            if environment.give_up(epoch)
                && environments.get(&id).is_some_and(|known| Arc::ptr_eq(known, &environment))
            {
                environments.remove(&id);
            }
        });
    }

    /// Records in the store whether an environment is here.
    async fn record_presence(&self, owner: &SocketOwner, environment: &Environment) {
        let _turn = environment.presence_lock.lock().await;
        let online = environment.online_since().is_some();
        let now = self.config.clock.now();
        let seen =
            self.store.set_online(&owner.environment, &owner.registration, online, now).await;
        if let Err(error) = seen {
            self.store_failed(&error);
        }
    }

    fn store_failed(&self, error: &StoreError) {
        self.metrics.store_errors.fetch_add(1, Relaxed);
        tracing::warn!(%error, "cannot record who is online");
    }

    /// Records the connected harnesses, so that they may reconnect with their URLs after a crash.
    async fn record_harnesses(&self) {
        let now = self.config.clock.now();
        for environment in self.all() {
            for harness in environment.harnesses() {
                let seen =
                    self.store.record_harness(&environment.registration, &harness, now).await;
                if let Err(error) = seen {
                    return self.store_failed(&error);
                }
            }
        }
    }

    // --- other nodes ---

    /// Compares an environment here with the store, and follows the store.
    pub(crate) async fn recheck(&self, environment: &str) {
        let Some(cluster) = self.router.cluster() else { return };
        let known = self.get(environment);
        let turn = match &known {
            Some(known) => Some(known.presence_lock.lock().await),
            None => None,
        };
        // Without the store nothing changes.
        let Ok(current) = self.store.registration(environment).await else { return };
        let Some(current) = current else {
            return self.replace(environment, None, REMOVED);
        };
        let elsewhere = current.node.as_deref().filter(|node| *node != cluster.node());
        if let Some(home) = current.node.as_deref() {
            cluster.wires.close_moved(environment, &current.id, home);
        }
        let Some(known) = &known else { return };
        if known.registration != current.id {
            self.replace(environment, Some(&current.id), REGISTERED_AGAIN);
        } else if elsewhere.is_some() {
            tracing::info!(environment, "environment moved to another node");
            let mut environments = self.lock();
            if environments.get(environment).is_some_and(|now| Arc::ptr_eq(now, known)) {
                environments.remove(environment);
            }
            drop(environments);
            known.move_to_other_node();
        } else if current.node.is_none() && known.online_since().is_some() {
            // Another node has declared this one dead.
            let now = self.config.clock.now();
            if let Err(error) = self.store.set_online(environment, &current.id, true, now).await {
                self.store_failed(&error);
            }
        }
        drop(turn);
    }

    /// Rechecks every environment here.
    pub(crate) async fn recheck_all(&self) {
        let mut all: BTreeSet<String> = self.lock().keys().cloned().collect();
        all.extend(self.router.cluster().into_iter().flat_map(|all| all.wires.environments()));
        for environment in all {
            self.recheck(&environment).await;
        }
    }

    /// Flushes messages to other nodes, at the very end.
    pub(crate) async fn flush(&self) {
        if let Some(cluster) = self.router.cluster() {
            cluster.flush().await;
        }
    }

    /// Closes the sockets whose token is revoked or expired.
    pub(crate) async fn sweep_tokens(&self) {
        let environments = self.all();
        let tokens = environments.iter().flat_map(|environment| environment.tokens()).collect();
        self.check_tokens(tokens, &environments).await;
    }

    /// Closes the sockets of a token that may have been revoked, without waiting for the next sweep.
    pub(crate) async fn check_token(&self, token: String) {
        self.check_tokens([token].into(), &self.all()).await;
    }

    async fn check_tokens(&self, tokens: BTreeSet<String>, environments: &[Arc<Environment>]) {
        let now = self.config.clock.now();
        // Without the store nothing is closed.
        let Ok(dead) = self.store.invalid_tokens(tokens, now).await else { return };
        for token in dead {
            tracing::info!(token, "closing the sockets of a token that is no longer valid");
            environments.iter().for_each(|environment| environment.revoke(&token));
            self.lock().retain(|_, environment| !environment.is_ended());
        }
    }

    /// Closes all sockets.
    pub(crate) fn close_sockets(&self, reason: CloseReason) {
        self.all().iter().for_each(|environment| environment.close_sockets(reason));
        if let Some(cluster) = self.router.cluster() {
            cluster.wires.close_outbound();
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let Some(claim) = self.claim.take() else { return };
        let hub = self.hub.clone();
        tokio::spawn(async move {
            match claim.side {
                Side::Executor(environment, number) => {
                    hub.executor_gone(&claim.owner, &environment, number).await;
                }
                Side::Harness(environment, handle) => hub.harness_gone(&environment, &handle),
                Side::Remote(sender, _) => sender.close(socket::ENDED).await,
            }
        });
    }
}
