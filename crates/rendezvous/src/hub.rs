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

/// A place for a websocket, taken before the upgrade is answered. One that is dropped, because the
/// client went before it had its websocket, is given back.
#[derive(Debug)]
pub(crate) struct Seat {
    hub: Arc<Hub>,
    taken: Option<Taken>,
}

#[derive(Debug)]
struct Taken {
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

    /// Takes a place for a websocket. That an environment is here is kept before it is told so.
    pub(crate) async fn seat(self: &Arc<Self>, who: Who) -> Result<Seat, AttachError> {
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
        let noted = who.harness.is_none().then(|| (who.clone(), environment.clone()));
        let taken = Taken { who, environment, side, outbound, queue };
        let seat = Seat { hub: self.clone(), taken: Some(taken) };
        if let Some((who, environment)) = noted {
            self.note(&who, &environment).await;
        }
        Ok(seat)
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
    pub(crate) async fn run<T>(self: &Arc<Self>, mut seat: Seat, socket: WebSocketStream<T>)
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let Some(taken) = seat.taken.take() else { return };
        let Taken { who, environment, side, outbound, queue } = taken;
        let mut reader = socket::start(socket, outbound, queue, self.config.clone(), &self.tasks);
        match side {
            Side::Executor(number) => {
                tracing::info!(environment = who.environment, "environment online");
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
        self.note(who, environment).await;
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

    /// Notes in the store whether an environment is here.
    async fn note(&self, who: &Who, environment: &Environment) {
        let _turn = environment.noting.lock().await;
        let online = environment.online_since().is_some();
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

impl Drop for Seat {
    fn drop(&mut self) {
        let Some(taken) = self.taken.take() else { return };
        let hub = self.hub.clone();
        tokio::spawn(async move {
            match taken.side {
                Side::Executor(number) => {
                    hub.executor_gone(&taken.who, &taken.environment, number).await;
                }
                Side::Harness(link) => hub.harness_gone(&taken.environment, &link),
            }
        });
    }
}
