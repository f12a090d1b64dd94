//! One connected environment: its socket, the harnesses' sockets, and the streams between them.
//!
//! Invariant: the lock is never held across an await. The task that reads a frame looks up its target under
//! the lock and delivers it afterwards, so the order within a socket is preserved.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use codex_exec_relay_core::{BodyKind, peek};
use codex_exec_rpc::CloseReason;
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use crate::blame::Blame;
use crate::config::Config;
use crate::metrics::Metrics;
use crate::socket::{CUT_OFF, GOING_AWAY, OFFLINE, Outbound, REPLACED, REVOKED};
use crate::table::{Dropped, FromExecutor, FromHarness, HarnessSocketId, Table, TableLimits};

/// The reset reason for harnesses when the service ends a stream.
const ENVIRONMENT_GONE: &str = "environment_disconnected";
/// The reset reason for environments when the service ends a stream.
const HARNESS_GONE: &str = "harness_disconnected";

/// An environment under one registration.
#[derive(Debug)]
pub(crate) struct Environment {
    pub registration: String,
    config: Arc<Config>,
    metrics: Arc<Metrics>,
    /// When this process first saw it.
    known_since: Instant,
    /// Held while the store records whether the environment is here, so that the last record is true.
    pub presence_lock: Arc<tokio::sync::Mutex<()>>,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    table: Table,
    executor: Option<Executor>,
    harness_sockets: HashMap<HarnessSocketId, HarnessSocket>,
    blame: Blame,
    /// The number of the last socket, of either side.
    next: u64,
    /// Counts connects and disconnects of the environment's socket.
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

/// A harness's socket, as its reading task knows it.
#[derive(Debug, Clone)]
pub(crate) struct HarnessHandle {
    pub id: HarnessSocketId,
    pub harness: Arc<str>,
}

/// Why a socket was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AttachError {
    /// The environment was replaced or removed meanwhile.
    Ended,
    /// The harness limit is reached.
    Full,
    /// Too many handshakes of its token have failed.
    CutOff,
}

/// The state after the environment's socket is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Detached {
    /// Another socket has replaced it.
    Replaced,
    /// The environment has ended.
    Ended,
    /// Streams wait for a new socket; pass this epoch to [`Environment::give_up`].
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
            blame: Blame::new(config.failed_handshakes, config.cut_off),
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

    /// When the environment's socket connected; `None` while it is offline.
    pub(crate) fn online_since(&self) -> Option<u64> {
        self.lock().executor.as_ref().map(|executor| executor.since)
    }

    /// The numbers of harness sockets and of streams.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let inner = self.lock();
        (inner.harness_sockets.len(), inner.table.len())
    }

    /// Whether a harness is connected, or has streams that wait for it.
    pub(crate) fn knows(&self, harness: &str) -> bool {
        let inner = self.lock();
        inner.table.knows(harness)
            || inner.harness_sockets.values().any(|socket| &*socket.harness == harness)
    }

    /// The current epoch, for [`Self::give_up`].
    pub(crate) fn epoch(&self) -> u64 {
        self.lock().epoch
    }

    // --- the environment's side ---

    /// Attaches the environment's socket and closes an earlier one.
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
        inner.blame.clear(Instant::now());
        let socket = inner.next;
        inner.executor = Some(Executor { socket, outbound, token, since });
        Ok(socket)
    }

    /// Detaches the environment's socket.
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

    /// Whether the environment has ended.
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

    /// Ends everything after the grace period, unless the epoch has changed.
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

    /// Closes everything here after the environment moved to another node. Streams get no reset: those
    /// that acknowledge continue there.
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

    /// Routes a frame from the environment's socket.
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
                FromExecutor::RefusesHandshake(id) => {
                    let outbound =
                        inner.harness_sockets.get(&id).map(|socket| socket.outbound.clone());
                    self.blame(&mut inner, id);
                    outbound
                }
                FromExecutor::Drop(why) => return self.metrics.dropped(why),
                FromExecutor::Unknown => {
                    self.metrics.dropped(Dropped::Unknown);
                    // After a restart of the service, harnesses may still be reconnecting: their
                    // streams are unknown, but not gone.
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

    /// The environment has refused a handshake of this socket. If that happens too often, cuts off the token
    /// of the harness, before the environment closes its own socket, which serves everyone.
    fn blame(&self, inner: &mut Inner, socket: HarnessSocketId) {
        let Some(token) = inner.harness_sockets.get(&socket).map(|socket| socket.token.clone())
        else {
            return;
        };
        if inner.blame.failed(&token, Instant::now()) {
            tracing::warn!(token, "cut off a token whose handshakes fail");
            self.metrics.cut_off.fetch_add(1, Relaxed);
            self.close_sockets_of(inner, &token, CUT_OFF);
        }
    }

    /// Attaches a harness's socket.
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
        if inner.blame.is_cut_off(&token, Instant::now()) {
            return Err(AttachError::CutOff);
        }
        inner.next += 1;
        let id = inner.next;
        inner
            .harness_sockets
            .insert(id, HarnessSocket { outbound, harness: harness.clone(), token });
        Ok(HarnessHandle { id, harness })
    }

    /// Detaches a harness's socket. Its streams end or wait for it; `true` if some wait.
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

    /// Routes a frame from a harness's socket.
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
                    // A new stream cannot begin while the environment is offline; others wait.
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

    /// The connected harnesses.
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
        self.close_sockets_of(&mut inner, token, REVOKED);
    }

    /// Closes the harness sockets of a token and ends their streams.
    fn close_sockets_of(&self, inner: &mut Inner, token: &str, reason: CloseReason) {
        let harness_sockets: Vec<HarnessSocketId> = inner
            .harness_sockets
            .iter()
            .filter(|(_, socket)| socket.token == token)
            .map(|(id, _)| *id)
            .collect();
        for id in harness_sockets {
            let ended = inner.table.revoke_socket(id);
            self.reset_at_executor(inner, ended);
            if let Some(socket) = inner.harness_sockets.remove(&id) {
                socket.outbound.close(reason);
            }
        }
    }

    /// Closes all sockets; streams that acknowledge continue at another node or later.
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
