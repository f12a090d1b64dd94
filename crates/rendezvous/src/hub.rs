//! The environments that are here, by id; their coming, going and being replaced.
//!
//! Invariant: there is at most one [`Environment`] per id, that of its current registration.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::task::TaskTracker;
use tokio_websockets::WebSocketStream;

use crate::config::Config;
use crate::environment::{AttachError, Detached, Environment, LinkHandle};
use crate::metrics::{Gauges, Metrics};
use crate::socket::{self, Outbound, Queue, REGISTERED_AGAIN, Reason, Received};
use crate::store::Store;
use crate::table::Dropped;

/// All environments with a socket here, or whose streams wait for one.
#[derive(Debug)]
pub(crate) struct Hub {
    config: Arc<Config>,
    metrics: Arc<Metrics>,
    store: Store,
    tasks: TaskTracker,
    environments: Mutex<HashMap<String, Arc<Environment>>>,
}

/// Whose websocket it is.
#[derive(Debug, Clone)]
pub(crate) struct Who {
    pub environment: String,
    pub registration: String,
    pub token: String,
    /// `None` for the environment itself.
    pub harness: Option<String>,
}

/// A place for a websocket, taken before the upgrade is answered.
#[derive(Debug)]
pub(crate) struct Seat {
    who: Who,
    environment: Arc<Environment>,
    side: Side,
    outbound: Outbound,
    queue: Queue,
}

#[derive(Debug)]
enum Side {
    Executor(u64),
    Harness(LinkHandle),
}

impl Hub {
    pub(crate) fn new(
        config: Arc<Config>,
        metrics: Arc<Metrics>,
        store: Store,
        tasks: TaskTracker,
    ) -> Arc<Self> {
        Arc::new(Self { config, metrics, store, tasks, environments: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Environment>>> {
        self.environments.lock().unwrap_or_else(PoisonError::into_inner)
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
            let (links, streams) = environment.counts();
            gauges.environments += usize::from(environment.online_since().is_some());
            gauges.harnesses += links;
            gauges.streams += streams;
        }
        gauges
    }

    /// An environment has registered again, or was removed: what was under another registration
    /// ends.
    pub(crate) fn replace(&self, environment: &str, registration: Option<&str>, reason: Reason) {
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

    /// Takes a place for a websocket.
    pub(crate) fn seat(self: &Arc<Self>, who: Who) -> Result<Seat, AttachError> {
        let (outbound, queue) = socket::queue(&self.config);
        let (environment, fresh) = self.entry(&who)?;
        let side = match &who.harness {
            None => {
                let now = self.config.clock.now();
                let token = who.token.clone();
                Side::Executor(environment.attach_executor(outbound.clone(), token, now)?)
            }
            Some(harness) => {
                let harness = harness.as_str().into();
                let link = environment.attach_link(outbound.clone(), harness, who.token.clone())?;
                if fresh {
                    // A harness that is back before its environment, after a restart of ours.
                    self.give_up_later(&who, environment.clone(), environment.epoch());
                }
                Side::Harness(link)
            }
        };
        Ok(Seat { who, environment, side, outbound, queue })
    }

    fn entry(&self, who: &Who) -> Result<(Arc<Environment>, bool), AttachError> {
        let mut environments = self.lock();
        if let Some(known) = environments.get(&who.environment) {
            if known.registration == who.registration {
                return Ok((known.clone(), false));
            }
            // The store says that ours is the current one.
            known.end(REGISTERED_AGAIN);
        }
        let (config, metrics) = (self.config.clone(), self.metrics.clone());
        let environment = Arc::new(Environment::new(who.registration.clone(), config, metrics));
        environments.insert(who.environment.clone(), environment.clone());
        Ok((environment, true))
    }

    /// Runs a websocket until it ends.
    pub(crate) async fn run<T>(self: &Arc<Self>, seat: Seat, socket: WebSocketStream<T>)
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let Seat { who, environment, side, outbound, queue } = seat;
        let mut reader = socket::start(socket, outbound, queue, self.config.clone(), &self.tasks);
        match side {
            Side::Executor(number) => {
                tracing::info!(environment = who.environment, "environment online");
                self.note(&who, true).await;
                while let Some(received) = reader.next().await {
                    match received {
                        Received::Frame(frame) => environment.executor_frame(number, frame).await,
                        Received::Text => self.metrics.dropped(Dropped::Invalid),
                    }
                }
                drop(reader);
                self.executor_gone(&who, &environment, number).await;
            }
            Side::Harness(link) => {
                tracing::debug!(environment = who.environment, "harness here");
                while let Some(received) = reader.next().await {
                    match received {
                        Received::Frame(frame) => environment.harness_frame(&link, frame).await,
                        Received::Text => self.metrics.dropped(Dropped::Invalid),
                    }
                }
                drop(reader);
                self.harness_gone(&environment, &link);
            }
        }
    }

    /// A websocket for which there was a place did not come to be.
    pub(crate) async fn abandon(self: &Arc<Self>, seat: Seat) {
        match seat.side {
            Side::Executor(number) => {
                self.executor_gone(&seat.who, &seat.environment, number).await;
            }
            Side::Harness(link) => self.harness_gone(&seat.environment, &link),
        }
    }

    async fn executor_gone(
        self: &Arc<Self>,
        who: &Who,
        environment: &Arc<Environment>,
        number: u64,
    ) {
        let detached = environment.detach_executor(number);
        if detached == Detached::Replaced {
            return;
        }
        tracing::info!(environment = who.environment, "environment offline");
        if let Detached::Waiting(epoch) = detached {
            self.give_up_later(who, environment.clone(), epoch);
        }
        self.note(who, false).await;
    }

    fn harness_gone(&self, environment: &Arc<Environment>, link: &LinkHandle) {
        if environment.detach_link(link) {
            let (environment, grace) = (environment.clone(), self.config.grace);
            tokio::spawn(async move {
                tokio::time::sleep(grace).await;
                environment.expire_orphans();
            });
        }
    }

    fn give_up_later(self: &Arc<Self>, who: &Who, environment: Arc<Environment>, epoch: u64) {
        let (hub, id, grace) = (self.clone(), who.environment.clone(), self.config.grace);
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

    async fn note(&self, who: &Who, online: bool) {
        let now = self.config.clock.now();
        let seen = self.store.seen(&who.environment, &who.registration, online, now).await;
        if let Err(error) = seen {
            self.metrics.store_errors.fetch_add(1, Relaxed);
            tracing::warn!(%error, "cannot note who is online");
        }
    }

    /// Closes the sockets whose token no longer holds.
    pub(crate) async fn sweep_tokens(&self) {
        let environments = self.all();
        let tokens: BTreeSet<String> =
            environments.iter().flat_map(|environment| environment.tokens()).collect();
        let now = self.config.clock.now();
        // A store that cannot be asked is no reason to close anything.
        let Ok(dead) = self.store.dead_tokens(tokens, now).await else { return };
        for token in dead {
            tracing::info!(token, "closing the sockets of a token that no longer holds");
            environments.iter().for_each(|environment| environment.revoke(&token));
            self.lock().retain(|_, environment| !environment.is_over());
        }
    }

    /// Closes all sockets.
    pub(crate) fn close_sockets(&self, reason: Reason) {
        self.all().iter().for_each(|environment| environment.close_sockets(reason));
    }
}
