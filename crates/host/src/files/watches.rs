//! The watches of one connection, from their first event to their last.
//!
//! Invariant: an id is taken from before a watch starts until it has ended, and given back on every
//! way out. Nothing of a watch is told before its answer was sent, nor after it was stopped.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use super::{Cancel, Event, EventSink, FileError, Outcome};

/// Events between a running operation and its connection.
pub(super) const EVENTS: usize = 8;

/// The ids of the two kinds are apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum WatchId {
    Path(i64),
    Missing(i64),
}

#[derive(Debug)]
pub(super) struct Watches {
    limit: usize,
    running: Mutex<HashMap<WatchId, RunningWatch>>,
    /// Tells one watch of an id from the next.
    next_generation: AtomicU64,
}

#[derive(Debug)]
struct RunningWatch {
    cancel: Cancel,
    generation: u64,
    /// `None` while it starts.
    forwarding: Option<JoinHandle<()>>,
}

impl RunningWatch {
    fn stop(&self) {
        self.cancel.cancel();
        if let Some(forwarding) = &self.forwarding {
            forwarding.abort();
        }
    }
}

impl Watches {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, running: Mutex::default(), next_generation: AtomicU64::new(1) }
    }

    /// Starts what `run` runs and waits for its first event. The rest goes to `sink`, once the
    /// sender that is returned was dropped.
    pub(super) async fn start(
        self: &Arc<Self>,
        id: WatchId,
        run: impl FnOnce(Cancel, mpsc::Sender<Event>) -> oneshot::Receiver<Result<Outcome, FileError>>,
        sink: Arc<dyn EventSink>,
    ) -> Result<(Outcome, oneshot::Sender<()>), FileError> {
        let cancel = Cancel::new();
        let mut reserved = self.reserve(id, &cancel)?;
        let cancel_if_dropped = cancel.drop_guard();
        let (events, mut incoming) = mpsc::channel(EVENTS);
        let ended = run(cancel, events);
        let Some(Event::Started(outcome)) = incoming.recv().await else {
            // It ended before it began; it says why.
            return match ended.await {
                Ok(Err(error)) => Err(error),
                _ => Err(FileError::Helper { reason: "the watch did not start".into() }),
            };
        };
        let (sent, answer_sent) = oneshot::channel::<()>();
        let (watches, generation) = (Arc::downgrade(self), reserved.generation);
        let forwarding = tokio::spawn(async move {
            let _cancel_if_dropped = cancel_if_dropped;
            let _ = answer_sent.await;
            while let Some(event) = incoming.recv().await {
                if let Event::Notify(notification) = event
                    && !sink.deliver(notification).await
                {
                    break;
                }
            }
            if let Some(watches) = watches.upgrade() {
                watches.forget(id, generation);
            }
        });
        reserved.started = true;
        match self.lock().get_mut(&id) {
            Some(watch) if watch.generation == generation => {
                watch.forwarding = Some(forwarding);
            }
            // Stopped while it started, or over already.
            _ => forwarding.abort(),
        }
        Ok((outcome, sent))
    }

    /// After this no notification of the watch is told any more.
    pub(super) async fn stop(&self, id: WatchId) {
        let watch = self.lock().remove(&id);
        if let Some(watch) = watch {
            watch.stop();
            if let Some(forwarding) = watch.forwarding {
                let _ = forwarding.await;
            }
        }
    }

    pub(super) fn stop_all(&self) {
        self.lock().values().for_each(RunningWatch::stop);
    }

    fn reserve(&self, id: WatchId, cancel: &Cancel) -> Result<Reserved<'_>, FileError> {
        let mut running = self.lock();
        match id {
            // The newest one of an id counts.
            WatchId::Missing(_) => {
                if let Some(old) = running.remove(&id) {
                    old.stop();
                }
            }
            WatchId::Path(number) if running.contains_key(&id) => {
                let id = number.to_string();
                return Err(FileError::IdTaken { what: "watchId".into(), id });
            }
            WatchId::Path(_) => {}
        }
        if running.len() >= self.limit {
            let (what, limit) = ("watches".into(), self.limit as u64);
            return Err(FileError::TooMany { what, limit });
        }
        let generation = self.next_generation.fetch_add(1, Ordering::Relaxed);
        running.insert(id, RunningWatch { cancel: cancel.clone(), generation, forwarding: None });
        Ok(Reserved { watches: self, id, generation, started: false })
    }

    fn forget(&self, id: WatchId, generation: u64) {
        let mut running = self.lock();
        if running.get(&id).is_some_and(|watch| watch.generation == generation) {
            running.remove(&id);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<WatchId, RunningWatch>> {
        self.running.lock()
    }
}

/// Gives an id back if the watch does not come about.
struct Reserved<'a> {
    watches: &'a Watches,
    id: WatchId,
    generation: u64,
    started: bool,
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        if !self.started {
            self.watches.forget(self.id, self.generation);
        }
    }
}
