//! The running watches of one connection.
//!
//! Invariant: an id is reserved from before a watch starts until it has ended, and freed on every path.
//! A watch sends no notification before its response was sent, nor after it was stopped.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use super::{Cancel, Event, EventSink, FileError, Outcome};

/// Capacity of the channel between a running search and its connection.
pub(super) const EVENTS: usize = 8;

/// Capacity of the channel between a watch and its connection: more wait with the watch, which merges them.
const WATCH_EVENTS: usize = 1;

/// The two kinds of watches have separate ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum WatchId {
    Path(i64),
    Missing(i64),
}

#[derive(Debug)]
pub(super) struct Watches {
    limit: usize,
    running: Mutex<HashMap<WatchId, RunningWatch>>,
    /// Distinguishes a watch from a later one with the same id.
    next_generation: AtomicU64,
}

#[derive(Debug)]
struct RunningWatch {
    cancel: Cancel,
    generation: u64,
    /// `None` while the watch starts.
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

    /// Starts an operation with `run` and waits for its first event. Later events go to `sink`, once
    /// the returned sender is dropped.
    pub(super) async fn start(
        self: &Arc<Self>,
        id: WatchId,
        run: impl FnOnce(Cancel, mpsc::Sender<Event>) -> oneshot::Receiver<Result<Outcome, FileError>>,
        sink: Arc<dyn EventSink>,
    ) -> Result<(Outcome, oneshot::Sender<()>), FileError> {
        let cancel = Cancel::new();
        let mut reserved = self.reserve(id, &cancel)?;
        let cancel_if_dropped = cancel.drop_guard();
        let (events, mut incoming) = mpsc::channel(WATCH_EVENTS);
        let ended = run(cancel, events);
        let Some(Event::Started(outcome)) = incoming.recv().await else {
            // It failed before it started.
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
            // Stopped while it started, or already over.
            _ => forwarding.abort(),
        }
        Ok((outcome, sent))
    }

    /// Stops a watch; afterwards it sends no notification.
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
            // A new watch replaces one with the same id.
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

/// Frees an id if the watch does not start.
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
