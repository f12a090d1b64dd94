//! One registered environment while it is here: its socket, the harnesses' sockets, the streams
//! between them.
//!
//! Invariant: the lock is never held across a wait. A frame is looked up under it and delivered
//! after it, by the task that read the frame, so that order within a socket is kept.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use codex_exec_relay_core::{BodyKind, peek};
use codex_exec_rpc::CloseReason;
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use crate::config::Config;
use crate::metrics::Metrics;
use crate::socket::{GOING_AWAY, OFFLINE, Outbound, REPLACED, REVOKED};
use crate::table::{Dropped, FromExecutor, FromHarness, HarnessSocketId, Table, TableLimits};

/// What harnesses are told when a stream ends by our doing.
const ENVIRONMENT_GONE: &str = "environment_disconnected";
/// What environments are told.
const HARNESS_GONE: &str = "harness_disconnected";

/// An environment under one registration.
#[derive(Debug)]
pub(crate) struct Environment {
    pub registration: String,
    config: Arc<Config>,
    metrics: Arc<Metrics>,
    /// Since when this process knows it.
    known_since: Instant,
    /// Held while it is noted in the store whether the environment is here, so that what is
    /// noted last is true.
    pub presence_lock: Arc<tokio::sync::Mutex<()>>,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    table: Table,
    executor: Option<Executor>,
    harness_sockets: HashMap<HarnessSocketId, HarnessSocket>,
    /// Names sockets of either side; grows.
    next: u64,
    /// Changes whenever the environment's socket comes or goes.
    epoch: u64,
    ended: bool,
}

#[derive(Debug)]
struct Executor {
    socket: u64,
    outbound: Outbound,
    token: String,
    since: u64,
}

#[derive(Debug)]
struct HarnessSocket {
    outbound: Outbound,
    harness: Arc<str>,
    token: String,
}

/// A harness's socket, as its reading task has it.
#[derive(Debug, Clone)]
pub(crate) struct HarnessHandle {
    pub id: HarnessSocketId,
    pub harness: Arc<str>,
}

/// Why a socket was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AttachError {
    /// Replaced or removed in the meantime.
    Ended,
    /// As many harnesses as there may be.
    Full,
}

/// What is left when the environment's socket is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Detached {
    /// Another socket has taken its place.
    Replaced,
    /// Nothing.
    Ended,
    /// Streams that wait; to be given up at this epoch.
    Waiting(u64),
}

impl Environment {
    pub(crate) fn new(registration: String, config: Arc<Config>, metrics: Arc<Metrics>) -> Self {
        let limits = TableLimits {
            streams: config.streams_per_environment,
            streams_per_socket: config.streams_per_harness,
        };
        let inner = Inner {
            table: Table::new(limits),
            executor: None,
            harness_sockets: HashMap::new(),
            next: 0,
            epoch: 0,
            ended: false,
        };
        let known_since = Instant::now();
        let presence_lock = Arc::default();
        Self { registration, config, metrics, known_since, presence_lock, inner: Mutex::new(inner) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// Since when the environment's socket is here.
    pub(crate) fn online_since(&self) -> Option<u64> {
        self.lock().executor.as_ref().map(|executor| executor.since)
    }

    /// Sockets of harnesses, and streams.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let inner = self.lock();
        (inner.harness_sockets.len(), inner.table.len())
    }

    /// Whether a harness is here, or expected back.
    pub(crate) fn knows(&self, harness: &str) -> bool {
        let inner = self.lock();
        inner.table.knows(harness)
            || inner.harness_sockets.values().any(|socket| &*socket.harness == harness)
    }

    /// Marks that something waits for the environment's socket; see [`Self::give_up`].
    pub(crate) fn epoch(&self) -> u64 {
        self.lock().epoch
    }

    // --- the environment's side ---

    /// The environment's socket is here. One that was still here is closed.
    pub(crate) fn attach_executor(
        &self,
        outbound: Outbound,
        token: String,
        since: u64,
    ) -> Result<u64, AttachError> {
        let mut inner = self.lock();
        if inner.ended {
            return Err(AttachError::Ended);
        }
        if let Some(old) = inner.executor.take() {
            old.outbound.close(REPLACED);
            self.end_unproven(&mut inner);
        }
        inner.next += 1;
        inner.epoch += 1;
        let socket = inner.next;
        inner.executor = Some(Executor { socket, outbound, token, since });
        Ok(socket)
    }

    /// The environment's socket is gone.
    pub(crate) fn detach_executor(&self, socket: u64) -> Detached {
        let mut inner = self.lock();
        if inner.ended {
            return Detached::Ended;
        }
        if inner.executor.as_ref().is_none_or(|executor| executor.socket != socket) {
            return Detached::Replaced;
        }
        inner.executor = None;
        inner.epoch += 1;
        self.end_unproven(&mut inner);
        Detached::Waiting(inner.epoch)
    }

    /// Whether everything here has ended.
    pub(crate) fn is_ended(&self) -> bool {
        self.lock().ended
    }

    fn end_unproven(&self, inner: &mut Inner) {
        for (socket, stream) in inner.table.executor_gone() {
            self.metrics.resets.fetch_add(1, Relaxed);
            if let Some(socket) = inner.harness_sockets.get(&socket) {
                socket.outbound.reset(&stream, ENVIRONMENT_GONE);
            }
        }
    }

    /// The grace period is over: ends everything, if nothing has changed since `epoch`.
    pub(crate) fn give_up(&self, epoch: u64) -> bool {
        let mut inner = self.lock();
        if inner.epoch != epoch || inner.executor.is_some() {
            return false;
        }
        self.end_all(&mut inner, OFFLINE);
        true
    }

    /// Ends everything now.
    pub(crate) fn end(&self, reason: CloseReason) {
        self.end_all(&mut self.lock(), reason);
    }

    /// The environment's socket is at another node now. Everything here ends without a word about
    /// streams: those that acknowledge go on there.
    pub(crate) fn move_to_other_node(&self) {
        let mut inner = self.lock();
        inner.ended = true;
        inner.table.clear();
        for (_, socket) in inner.harness_sockets.drain() {
            socket.outbound.close(GOING_AWAY);
        }
        if let Some(executor) = inner.executor.take() {
            executor.outbound.close(REPLACED);
        }
    }

    fn end_all(&self, inner: &mut Inner, reason: CloseReason) {
        inner.ended = true;
        for (socket, stream) in inner.table.clear() {
            self.metrics.resets.fetch_add(1, Relaxed);
            if let Some(socket) = inner.harness_sockets.get(&socket) {
                socket.outbound.reset(&stream, ENVIRONMENT_GONE);
            }
        }
        for (_, socket) in inner.harness_sockets.drain() {
            socket.outbound.close(reason);
        }
        if let Some(executor) = inner.executor.take() {
            executor.outbound.close(reason);
        }
    }

    /// A frame that the environment's socket gave.
    pub(crate) async fn executor_frame(&self, socket: u64, frame: Bytes) {
        let Ok(seen) = peek(&frame, &self.config.frame) else {
            return self.metrics.dropped(Dropped::Invalid);
        };
        let to = {
            let mut inner = self.lock();
            if inner.executor.as_ref().is_none_or(|executor| executor.socket != socket) {
                return self.metrics.dropped(Dropped::Away);
            }
            match inner.table.executor_frame(seen) {
                FromExecutor::To(socket) => {
                    inner.harness_sockets.get(&socket).map(|socket| socket.outbound.clone())
                }
                FromExecutor::Drop(why) => return self.metrics.dropped(why),
                FromExecutor::Unknown => {
                    self.metrics.dropped(Dropped::Unknown);
                    // While harnesses may still be on their way back to a service that was
                    // restarted, their streams are not known, but not gone either.
                    if self.known_since.elapsed() > self.config.grace
                        && let Some(executor) = &inner.executor
                    {
                        executor.outbound.refuse(seen.stream_id, HARNESS_GONE);
                    }
                    return;
                }
            }
        };
        let Some(to) = to else { return self.metrics.dropped(Dropped::Away) };
        let len = frame.len() as u64;
        if to.deliver(frame, &self.config).await {
            self.metrics.frames_to_harnesses.fetch_add(1, Relaxed);
            self.metrics.bytes_to_harnesses.fetch_add(len, Relaxed);
        } else {
            self.metrics.dropped(Dropped::Away);
        }
    }

    // --- the harnesses' side ---

    /// A harness's socket is here.
    pub(crate) fn attach_harness(
        &self,
        outbound: Outbound,
        harness: Arc<str>,
        token: String,
    ) -> Result<HarnessHandle, AttachError> {
        let mut inner = self.lock();
        if inner.ended {
            return Err(AttachError::Ended);
        }
        if inner.harness_sockets.len() >= self.config.harnesses_per_environment {
            return Err(AttachError::Full);
        }
        inner.next += 1;
        let id = inner.next;
        inner
            .harness_sockets
            .insert(id, HarnessSocket { outbound, harness: harness.clone(), token });
        Ok(HarnessHandle { id, harness })
    }

    /// A harness's socket is gone. Its streams end, or wait for it; `true` if some wait.
    pub(crate) fn detach_harness(&self, socket: &HarnessHandle) -> bool {
        let mut inner = self.lock();
        inner.harness_sockets.remove(&socket.id);
        let ended = inner.table.socket_gone(socket.id, Instant::now());
        self.reset_at_executor(&inner, ended);
        inner.table.knows(&socket.harness)
    }

    /// Ends the streams that have waited for their harness for the whole grace period.
    pub(crate) fn expire_orphans(&self) {
        let mut inner = self.lock();
        if let Some(before) = Instant::now().checked_sub(self.config.grace) {
            let ended = inner.table.expire(before);
            self.reset_at_executor(&inner, ended);
        }
    }

    fn reset_at_executor(&self, inner: &Inner, ended: Vec<Box<str>>) {
        for stream in ended {
            self.metrics.resets.fetch_add(1, Relaxed);
            if let Some(executor) = &inner.executor {
                executor.outbound.reset(&stream, HARNESS_GONE);
            }
        }
    }

    /// A frame that a harness's socket gave.
    pub(crate) async fn harness_frame(&self, socket: &HarnessHandle, frame: Bytes) {
        let Ok(seen) = peek(&frame, &self.config.frame) else {
            return self.metrics.dropped(Dropped::Invalid);
        };
        let to = {
            let mut inner = self.lock();
            let verdict = inner.table.harness_frame(socket.id, &socket.harness, seen);
            let back = |reason| {
                if let Some(socket) = inner.harness_sockets.get(&socket.id) {
                    socket.outbound.refuse(seen.stream_id, reason);
                }
            };
            match verdict {
                FromHarness::Forward => {}
                FromHarness::Drop(why) => return self.metrics.dropped(why),
                FromHarness::Refuse(reason) => {
                    back(reason);
                    return self.metrics.dropped(Dropped::Unknown);
                }
            }
            match &inner.executor {
                Some(executor) => executor.outbound.clone(),
                None => {
                    // A new stream cannot begin while nobody answers; others wait.
                    if seen.kind == BodyKind::Handshake {
                        back(ENVIRONMENT_GONE);
                        inner.table.remove(seen.stream_id);
                    }
                    return self.metrics.dropped(Dropped::Away);
                }
            }
        };
        let len = frame.len() as u64;
        if to.deliver(frame, &self.config).await {
            self.metrics.frames_to_environments.fetch_add(1, Relaxed);
            self.metrics.bytes_to_environments.fetch_add(len, Relaxed);
        } else {
            self.metrics.dropped(Dropped::Away);
        }
    }

    /// The harnesses that are here.
    pub(crate) fn harnesses(&self) -> Vec<Arc<str>> {
        self.lock().harness_sockets.values().map(|socket| socket.harness.clone()).collect()
    }

    // --- tokens ---

    /// The tokens of all sockets here.
    pub(crate) fn tokens(&self) -> Vec<String> {
        let inner = self.lock();
        let executor = inner.executor.iter().map(|executor| executor.token.clone());
        executor.chain(inner.harness_sockets.values().map(|socket| socket.token.clone())).collect()
    }

    /// Closes the sockets of a token and ends their streams.
    pub(crate) fn revoke(&self, token: &str) {
        let mut inner = self.lock();
        if inner.executor.as_ref().is_some_and(|executor| executor.token == token) {
            return self.end_all(&mut inner, REVOKED);
        }
        let harness_sockets: Vec<HarnessSocketId> = inner
            .harness_sockets
            .iter()
            .filter(|(_, socket)| socket.token == token)
            .map(|(id, _)| *id)
            .collect();
        for id in harness_sockets {
            let ended = inner.table.revoke_socket(id);
            self.reset_at_executor(&inner, ended);
            if let Some(socket) = inner.harness_sockets.remove(&id) {
                socket.outbound.close(REVOKED);
            }
        }
    }

    /// Closes all sockets; streams that acknowledge go on elsewhere or later.
    pub(crate) fn close_sockets(&self, reason: CloseReason) {
        let inner = self.lock();
        for socket in inner.harness_sockets.values() {
            socket.outbound.close(reason);
        }
        if let Some(executor) = &inner.executor {
            executor.outbound.close(reason);
        }
    }
}
