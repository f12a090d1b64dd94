//! The pump: one task that drives an endpoint, its socket and the connections of its streams.
//!
//! Invariants: the pump never waits for one stream alone. It takes a connection's messages only while its
//! stream has room, so a slow rendezvous makes senders wait. A stream whose messages are not taken delays
//! the others for a bounded time, then it is reset.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use codex_exec_relay_core::{
    Authorization, CloseCause, Event, Generation, NoisePublicKey, SendError, StreamId, Verdict,
};
use codex_exec_rpc::socket::Received;
use codex_exec_rpc::{Connection, OutboundQueue, PeerActivity, Room};
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;
use tokio::time::{Duration, Instant};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::config::RelayConfig;
use super::endpoint::Endpoint;
use super::inbox::Inbox;
use super::socket::{RelaySocket, SendOutcome};

/// The reset reason for a stream whose messages are not taken.
const OVERRUN_REASON: &str = "receiver_overrun";
/// How often a harness sends a heartbeat while it does not read.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);

/// Validates a harness's key.
pub(crate) type Authorizer =
    Arc<dyn Fn(NoisePublicKey, Authorization) -> BoxFuture<'static, Admission> + Send + Sync>;

/// What the registry says of a harness.
pub(crate) struct Admission {
    pub verdict: Verdict,
    /// Who it is; only with [`Verdict::Allowed`].
    pub principal: Option<String>,
}

impl From<Verdict> for Admission {
    fn from(verdict: Verdict) -> Self {
        Self { verdict, principal: None }
    }
}

/// Why [`Pump::drive`] returned.
#[derive(Debug)]
pub(crate) enum DriveOutcome<T> {
    /// `until` resolved.
    Done(T),
    /// The physical socket has ended or must be closed.
    SocketEnded,
    /// The only stream of the pump has ended.
    StreamEnded,
}

/// How a stream ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StreamEnd {
    /// By the peer or the relay.
    Reset,
    /// By this side.
    Closed(CloseCause),
}

pub(crate) struct Pump<E> {
    endpoint: E,
    config: RelayConfig,
    streams: HashMap<StreamId, StreamEntry>,
    /// The next message of each connection that has room to send.
    next_messages: FuturesUnordered<BoxFuture<'static, NextMessage>>,
    admissions: JoinSet<(StreamId, Generation, Admission)>,
    /// Who the harnesses of streams are that were just allowed to open.
    principals: HashMap<StreamId, String>,
    authorizer: Option<Authorizer>,
    accept: Box<dyn FnMut(Connection, Option<String>) + Send>,
    /// Notified when a connection takes a message.
    drained: Arc<Notify>,
    /// Streams whose peers are to be probed.
    probes: (mpsc::UnboundedSender<StreamId>, mpsc::UnboundedReceiver<StreamId>),
    /// When the next heartbeat is due while this harness does not read.
    heartbeat_at: Option<Instant>,
    /// Streams over [`RelayConfig::inbox_bytes`], and since when.
    overrun: HashMap<StreamId, Instant>,
    connected: bool,
    must_close_socket: bool,
    stream_end: Option<StreamEnd>,
    /// Whether [`Self::drive`] ends with the stream.
    single_stream: bool,
}

/// One stream's connection.
struct StreamEntry {
    inbox: Inbox,
    activity: PeerActivity,
    /// A message that the stream had no room for. It keeps its room in the connection's queue.
    blocked: Option<QueuedMessage>,
    ended: CancellationToken,
    /// Ends the wait for the connection's next message with the stream.
    _end: DropGuard,
}

/// A message of a connection, and the queue with the next one.
struct QueuedMessage {
    message: Bytes,
    _room: Room,
    queue: OutboundQueue,
}

/// A connection's next message; `None` once the connection is closed.
struct NextMessage {
    stream: StreamId,
    message: Option<QueuedMessage>,
}

impl<E: Endpoint> Pump<E> {
    pub(crate) fn new(
        endpoint: E,
        config: RelayConfig,
        authorizer: Option<Authorizer>,
        accept: Box<dyn FnMut(Connection, Option<String>) + Send>,
    ) -> Self {
        Self {
            endpoint,
            config,
            streams: HashMap::new(),
            next_messages: FuturesUnordered::new(),
            admissions: JoinSet::new(),
            principals: HashMap::new(),
            single_stream: authorizer.is_none(),
            authorizer,
            accept,
            drained: Arc::default(),
            probes: mpsc::unbounded_channel(),
            heartbeat_at: None,
            overrun: HashMap::new(),
            connected: false,
            must_close_socket: false,
            stream_end: None,
        }
    }

    /// Keeps the pump running when a stream ends.
    pub(crate) fn for_many_streams(mut self) -> Self {
        self.single_stream = false;
        self
    }

    pub(crate) fn endpoint(&mut self) -> &mut E {
        &mut self.endpoint
    }

    pub(crate) fn stream_count(&self) -> usize {
        self.streams.len()
    }

    /// How the latest stream ended.
    pub(crate) fn stream_end(&self) -> Option<StreamEnd> {
        self.stream_end
    }

    pub(crate) fn on_connected(&mut self) {
        self.connected = true;
        self.endpoint.handle_connected(now());
    }

    pub(crate) fn on_disconnected(&mut self) {
        self.connected = false;
        self.endpoint.handle_disconnected(now());
        while self.handle_events() {}
        self.must_close_socket = false;
    }

    /// Runs until `until` resolves, the socket ends or, for a harness, the stream ends. Without a socket
    /// it still serves timers and connections.
    pub(crate) async fn drive<T>(
        &mut self,
        mut socket: Option<&mut RelaySocket>,
        until: impl Future<Output = T>,
    ) -> DriveOutcome<T> {
        tokio::pin!(until);
        let drained = self.drained.clone();
        loop {
            let mut full = false;
            while self.handle_events() | self.transmit(socket.as_deref(), &mut full) {}
            if self.must_close_socket || socket.as_deref().is_some_and(RelaySocket::is_closed) {
                return DriveOutcome::SocketEnded;
            }
            if self.single_stream && self.stream_end.is_some() {
                return DriveOutcome::StreamEnded;
            }
            self.reset_overrun();
            let paused = !self.overrun.is_empty();
            self.heartbeat_if_paused(paused);
            let wake = self.wake_at();
            let room = socket.as_deref().filter(|_| full).map(RelaySocket::room);
            tokio::select! {
                done = &mut until => return DriveOutcome::Done(done),
                received = next(&mut socket, paused) => match received {
                    Some(Received::Binary(frame)) => {
                        if let Err(error) = self.endpoint.handle_frame(now(), frame) {
                            tracing::debug!(%error, "dropped a frame");
                        }
                    }
                    Some(Received::Text(_)) => tracing::debug!("dropped a text message"),
                    None => return DriveOutcome::SocketEnded,
                },
                () = or_pending(room) => {}
                Some(next) = self.next_messages.next() => self.on_next_message(next),
                Some(admission) = self.admissions.join_next() => self.on_admission(admission),
                Some(stream) = self.probes.1.recv() => self.probe(&stream),
                () = drained.notified(), if paused => {}
                () = sleep_until(wake) => self.endpoint.handle_timeout(now()),
            }
        }
    }

    fn wake_at(&self) -> Option<Instant> {
        let timeout = self.config.inbox_timeout;
        let overrun = self.overrun.values().map(|since| *since + timeout).min();
        let overrun = overrun.filter(|_| !self.single_stream);
        let core = self.endpoint.poll_timeout().map(Instant::from_std);
        [core, overrun, self.heartbeat_at].into_iter().flatten().min()
    }

    /// Queues frames while the socket has room. Returns whether it queued any.
    fn transmit(&mut self, socket: Option<&RelaySocket>, full: &mut bool) -> bool {
        let Some(socket) = socket else { return false };
        let mut any = false;
        let now = now();
        loop {
            match socket.send_with(|| self.endpoint.poll_transmit(now)) {
                SendOutcome::Sent => any = true,
                SendOutcome::Nothing => {
                    *full = false;
                    return any;
                }
                SendOutcome::Full => {
                    *full = true;
                    return any;
                }
            }
        }
    }

    // --- from the endpoint ---

    /// Handles the endpoint's events. Returns whether there were any.
    fn handle_events(&mut self) -> bool {
        let mut any = false;
        while let Some(event) = self.endpoint.poll_event() {
            any = true;
            match event {
                Event::AuthorizeRequest { stream, generation, harness_key, authorization } => {
                    self.request_admission(stream, generation, harness_key, authorization);
                }
                Event::Opened { stream } => self.open(stream),
                Event::Message { stream, message } => self.deliver(stream, message),
                Event::Writable { stream } => self.unblock(&stream),
                Event::PeerResponded { stream } => {
                    if let Some(entry) = self.streams.get(&stream) {
                        entry.activity.note();
                    }
                }
                Event::Reset { stream, reason } => {
                    tracing::debug!(%stream, ?reason, "the peer ended a stream");
                    self.end(&stream, StreamEnd::Reset);
                }
                Event::Closed { stream, cause } => {
                    tracing::debug!(%stream, %cause, "ended a stream");
                    self.end(&stream, StreamEnd::Closed(cause));
                }
                Event::HandshakeFailed { stream, error } => {
                    tracing::info!(%stream, %error, "a handshake failed");
                }
                Event::PhysicalClose => {
                    tracing::warn!("too many handshakes failed; closing the socket");
                    self.must_close_socket = true;
                }
                _ => {}
            }
        }
        any
    }

    fn request_admission(
        &mut self,
        stream: StreamId,
        generation: Generation,
        key: NoisePublicKey,
        authorization: Authorization,
    ) {
        if let Some(authorizer) = &self.authorizer {
            let admission = authorizer(key, authorization);
            self.admissions.spawn(async move { (stream, generation, admission.await) });
        }
    }

    fn on_admission(
        &mut self,
        admission: Result<(StreamId, Generation, Admission), tokio::task::JoinError>,
    ) {
        // Without a verdict the endpoint's own deadline applies.
        let Ok((stream, generation, admission)) = admission else { return };
        // An earlier stream of this id is gone: its harness is not this one's.
        if self.endpoint.authorize(now(), &stream, generation, admission.verdict)
            && let Some(principal) = admission.principal
        {
            self.principals.insert(stream, principal);
        }
        while self.handle_events() {}
        self.principals.clear();
    }

    fn open(&mut self, stream: StreamId) {
        tracing::debug!(%stream, "a stream opened");
        let principal = self.principals.remove(&stream);
        let (inbox, messages) = Inbox::new(self.drained.clone());
        let (connection, queue) = Connection::over(messages, &self.config.connection);
        let ended = CancellationToken::new();
        let end = ended.clone().drop_guard();
        self.await_next_message(stream.clone(), queue, ended.clone());
        let (probes, id) = (self.probes.0.clone(), stream.clone());
        let activity = connection.set_ping(move || drop(probes.send(id.clone())));
        self.streams
            .insert(stream, StreamEntry { inbox, activity, blocked: None, ended, _end: end });
        (self.accept)(connection, principal);
    }

    fn deliver(&mut self, stream: StreamId, message: Bytes) {
        let Some(entry) = self.streams.get(&stream) else { return };
        // A dropped connection takes nothing; its stream is closing.
        if entry.inbox.put(message) && entry.inbox.held() > self.config.inbox_bytes {
            self.overrun.entry(stream).or_insert_with(Instant::now);
        }
    }

    fn end(&mut self, stream: &StreamId, stream_end: StreamEnd) {
        self.streams.remove(stream);
        self.overrun.remove(stream);
        self.stream_end = Some(stream_end);
    }

    /// Probes the peer of a stream. A peer that may not respond counts as alive.
    fn probe(&mut self, stream: &StreamId) {
        if !self.endpoint.probe(stream)
            && let Some(entry) = self.streams.get(stream)
        {
            entry.activity.note();
        }
    }

    /// Sends heartbeats while a harness does not read, since it acknowledges nothing then.
    fn heartbeat_if_paused(&mut self, paused: bool) {
        let now = Instant::now();
        if !paused || !self.single_stream {
            self.heartbeat_at = None;
        } else if self.heartbeat_at.is_none_or(|at| at <= now) {
            self.endpoint.heartbeat();
            self.heartbeat_at = Some(now + HEARTBEAT_INTERVAL);
        }
    }

    /// Resets the streams that have delayed the others for too long.
    fn reset_overrun(&mut self) {
        if self.overrun.is_empty() {
            return;
        }
        let (streams, bound) = (&self.streams, self.config.inbox_bytes);
        self.overrun
            .retain(|stream, _| streams.get(stream).is_some_and(|p| p.inbox.held() > bound));
        // A single stream delays no other: without acknowledgements its peer stops sending.
        if self.single_stream {
            return;
        }
        let late = |since: &Instant| since.elapsed() >= self.config.inbox_timeout;
        let over: Vec<StreamId> = self
            .overrun
            .iter()
            .filter(|(_, since)| late(since))
            .map(|(stream, _)| stream.clone())
            .collect();
        for stream in over {
            tracing::warn!(%stream, "the input of a stream is not being read; resetting it");
            self.endpoint.reset(&stream, OVERRUN_REASON);
            self.end(&stream, StreamEnd::Reset);
        }
    }

    // --- from the connections ---

    fn await_next_message(
        &mut self,
        stream: StreamId,
        mut queue: OutboundQueue,
        ended: CancellationToken,
    ) {
        self.next_messages.push(Box::pin(async move {
            let message = tokio::select! {
                message = queue.next_message() => message,
                () = ended.cancelled() => None,
            };
            let message =
                message.map(|(message, room)| QueuedMessage { message, _room: room, queue });
            NextMessage { stream, message }
        }));
    }

    fn on_next_message(&mut self, NextMessage { stream, message }: NextMessage) {
        match message {
            Some(message) => self.send(stream, message),
            None if self.connected => self.endpoint.close(&stream),
            None if self.streams.contains_key(&stream) => {
                // The connection is gone, so the stream does not wait for a new socket.
                self.endpoint.reset(&stream, codex_exec_relay_core::FINISHED);
                self.end(&stream, StreamEnd::Closed(CloseCause::Finished));
            }
            None => {}
        }
    }

    fn send(&mut self, stream: StreamId, message: QueuedMessage) {
        let Some(entry) = self.streams.get_mut(&stream) else { return };
        match self.endpoint.send(&stream, message.message.clone()) {
            Ok(()) => {
                let ended = entry.ended.clone();
                self.await_next_message(stream, message.queue, ended);
            }
            Err(SendError::Blocked) => entry.blocked = Some(message),
            Err(error) => {
                tracing::warn!(%stream, %error, "a message cannot be sent; resetting its stream");
                self.endpoint.reset(&stream, codex_exec_relay_core::PROTOCOL_ERROR);
                self.end(&stream, StreamEnd::Reset);
            }
        }
    }

    fn unblock(&mut self, stream: &StreamId) {
        if let Some(message) = self.streams.get_mut(stream).and_then(|entry| entry.blocked.take()) {
            self.send(stream.clone(), message);
        }
    }
}

fn now() -> std::time::Instant {
    Instant::now().into_std()
}

async fn next(socket: &mut Option<&mut RelaySocket>, paused: bool) -> Option<Received> {
    match socket {
        Some(socket) => socket.next(paused).await,
        None => std::future::pending().await,
    }
}

async fn or_pending(future: Option<impl Future<Output = ()>>) {
    match future {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
