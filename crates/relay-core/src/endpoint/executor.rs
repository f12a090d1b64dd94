//! The executor's endpoint: one physical socket, many streams, each opened by a harness.
//!
//! Invariant: a stream opens only after an authenticated first message *and* a verdict for that stream;
//! nothing that an unknown peer sends costs more than one handshake and a bounded reply.

use std::fmt;
use std::time::Instant;

use bytes::Bytes;

use super::Streams;
use crate::config::{Config, ConfigError};
use crate::entropy::Entropy;
use crate::error::{CloseCause, ProtocolError, SendError};
use crate::event::Event;
use crate::frame::{Body, Frame, FrameError};
use crate::id::{Generation, StreamId};
use crate::key::NoiseIdentity;
use crate::message::{Deframer, Reassembler};
use crate::noise::{Binding, HandshakeError, Responder, digest};
use crate::stream::{Channel, Phase, Stream, StreamStats};

/// How an executor's streams are secured. Chosen once, without fallback.
#[derive(Debug, Clone)]
pub enum ExecutorMode {
    /// Every stream starts with a handshake to this identity.
    Noise {
        /// The key pair that harnesses pin.
        identity: NoiseIdentity,
        /// The environment that handshakes are bound to.
        environment_id: String,
        /// The registration that handshakes are bound to; see [`Executor::set_registration_id`].
        registration_id: String,
    },
    /// The older revision: messages in clear.
    Clear,
}

/// The registry's verdict on a harness's key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// `valid: true`: the stream opens.
    Allowed,
    /// `valid: false`: the handshake has failed.
    Denied,
    /// The registry did not reply: the stream is refused, but does not count as a failed handshake.
    Unavailable,
}

/// The verdict came for a stream that no longer waits for one. Harmless.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no stream waits for this verdict")]
pub struct StaleVerdict;

/// The executor's side of a physical socket. See the crate's documentation for how to drive it.
pub struct Executor {
    streams: Streams,
    mode: ExecutorMode,
    entropy: Box<dyn Entropy>,
    next_generation: u64,
    failed_handshakes: u32,
}

impl Executor {
    /// Makes an endpoint without streams and without a socket. Fails if `config` is out of range.
    pub fn new(
        config: Config,
        mode: ExecutorMode,
        entropy: Box<dyn Entropy>,
    ) -> Result<Self, ConfigError> {
        Ok(Self {
            streams: Streams::new(config)?,
            mode,
            entropy,
            next_generation: 0,
            failed_handshakes: 0,
        })
    }

    // --- getters ---

    /// Its limits.
    pub fn config(&self) -> &Config {
        self.streams.config()
    }

    /// How many streams exist, handshakes included.
    pub fn stream_count(&self) -> usize {
        self.streams.len()
    }

    /// Counters of one stream.
    pub fn stats(&self, stream: &StreamId) -> Option<StreamStats> {
        self.streams.stats(stream)
    }

    // --- inputs ---

    /// A physical socket is connected: the first, or another after a drop.
    pub fn handle_connected(&mut self, now: Instant) {
        let now = self.streams.advance_clock(now);
        self.failed_handshakes = 0;
        self.streams.handle_connected(now);
    }

    /// The physical socket is lost. Streams whose peer cannot resume end.
    pub fn handle_disconnected(&mut self, now: Instant) {
        let now = self.streams.advance_clock(now);
        self.streams.handle_disconnected(now);
    }

    /// Handles one binary websocket message. An error means that it was dropped without any effect.
    pub fn handle_frame(&mut self, now: Instant, bytes: Bytes) -> Result<(), FrameError> {
        let now = self.streams.advance_clock(now);
        let frame = Frame::decode(bytes, &self.config().frame)?;
        if self.has_failed_too_often() {
            return Ok(());
        }
        if let Body::Handshake { payload } = &frame.body {
            let payload = payload.clone();
            self.on_handshake(&frame.stream_id, &payload, now);
        } else if self.streams.get(&frame.stream_id).is_some() {
            self.streams.handle_stream_frame(frame, now);
        } else {
            self.on_unknown_stream(frame, now);
        }
        Ok(())
    }

    /// Handles due timers. Call it at the time from [`Self::poll_timeout`]; earlier calls do nothing.
    pub fn handle_timeout(&mut self, now: Instant) {
        let now = self.streams.advance_clock(now);
        self.streams.handle_timeout(now);
    }

    // --- commands ---

    /// Answers an [`Event::AuthorizeRequest`].
    pub fn authorize(
        &mut self,
        now: Instant,
        stream: &StreamId,
        generation: Generation,
        verdict: Verdict,
    ) -> Result<(), StaleVerdict> {
        let now = self.streams.advance_clock(now);
        let waiting = self.streams.get_mut(stream).ok_or(StaleVerdict)?;
        if waiting.generation != generation || !matches!(waiting.phase, Phase::Authorizing { .. }) {
            return Err(StaleVerdict);
        }
        match verdict {
            Verdict::Allowed => self.open(stream, now),
            Verdict::Denied => {
                self.streams.close(stream, CloseCause::Denied);
                self.on_failed_handshake();
            }
            Verdict::Unavailable => self.streams.close(stream, CloseCause::Unavailable),
        }
        Ok(())
    }

    /// Queues one message. `Blocked` means that it was not queued; `Writable` follows.
    pub fn send(&mut self, stream: &StreamId, message: Bytes) -> Result<(), SendError> {
        self.streams.send(stream, message)
    }

    /// Checks that the peer of a stream is alive; `PeerResponded` follows with the next frame from it.
    /// Returns false, without an event, for a peer that is not known to respond.
    pub fn probe(&mut self, stream: &StreamId) -> bool {
        self.streams.probe(stream)
    }

    /// Ends a stream at once; the peer sees `reason`. No event follows.
    pub fn reset(&mut self, stream: &StreamId, reason: &str) {
        self.streams.reset(stream, reason);
    }

    /// Ends a stream once everything accepted has been sent and, by a peer that acknowledges,
    /// received; then `Closed` with `Finished`.
    pub fn close(&mut self, stream: &StreamId) {
        self.streams.finish(stream);
    }

    /// Sets the registration that new handshakes are bound to, after a new registration.
    pub fn set_registration_id(&mut self, id: String) {
        if let ExecutorMode::Noise { registration_id, .. } = &mut self.mode {
            *registration_id = id;
        }
    }

    // --- outputs ---

    /// The next frame for the physical socket, streams taking turns.
    pub fn poll_transmit(&mut self, now: Instant) -> Option<Bytes> {
        let now = self.streams.advance_clock(now);
        self.streams.poll_transmit(now)
    }

    /// The next event. To be drained after every other call.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.streams.poll_event()
    }

    /// When to call [`Self::handle_timeout`].
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.streams.poll_timeout()
    }

    // --- inside ---

    fn has_failed_too_often(&self) -> bool {
        self.failed_handshakes >= self.config().max_failed_handshakes
    }

    fn on_failed_handshake(&mut self) {
        self.failed_handshakes += 1;
        if self.failed_handshakes == self.config().max_failed_handshakes {
            self.streams.emit(Event::PhysicalClose);
        }
    }

    fn on_unknown_stream(&mut self, frame: Frame, now: Instant) {
        let id = &frame.stream_id;
        let opens = match &frame.body {
            // Announces a stream; the handshake or the first data makes it.
            Body::Resume { next_seq } => *next_seq == 0,
            Body::Data(data) => data.seq == 0,
            Body::Ack | Body::Reset { .. } => return,
            Body::Heartbeat | Body::Handshake { .. } => false,
        };
        if !opens || self.streams.has_ended(id) {
            self.streams.refuse(id);
            return;
        }
        match (&self.mode, &frame.body) {
            (ExecutorMode::Noise { .. }, Body::Resume { .. }) => {}
            (ExecutorMode::Noise { .. }, _) => self.streams.refuse(id),
            (ExecutorMode::Clear, _) if self.is_full() => self.streams.refuse(id),
            (ExecutorMode::Clear, _) => {
                let mut stream = self.make_stream(id.clone(), Phase::Transitioning);
                let channel = Channel::Clear(Reassembler::default());
                stream.open(channel, self.config(), now);
                self.streams.insert(stream);
                self.streams.emit(Event::Opened { stream: id.clone() });
                self.streams.handle_stream_frame(frame, now);
            }
        }
    }

    fn is_full(&self) -> bool {
        self.streams.len() >= self.config().max_streams
    }

    fn make_stream(&mut self, id: StreamId, phase: Phase) -> Stream {
        self.next_generation += 1;
        Stream::new(id, Generation(self.next_generation), phase)
    }

    fn on_handshake(&mut self, id: &StreamId, message: &[u8], now: Instant) {
        if let Some(stream) = self.streams.get(id) {
            // The same message again is a duplicate; a different one is an attack or a bug.
            if stream.handshake_seen != Some(digest(message)) {
                self.streams.close(id, ProtocolError::SecondHandshake.into());
            }
            return;
        }
        let pending = self.streams.count(|s| matches!(s.phase, Phase::Authorizing { .. }));
        let refused = self.streams.has_ended(id)
            || self.is_full()
            || pending >= self.config().max_pending_authorizations;
        let ExecutorMode::Noise { identity, environment_id, registration_id } = &self.mode else {
            self.streams.refuse(id);
            return;
        };
        if refused {
            self.streams.refuse(id);
            return;
        }
        let binding = Binding { environment_id, registration_id, stream_id: id.as_str() };
        let max = self.streams.config().max_authorization_len;
        match Responder::read(identity, binding, message, max, &mut *self.entropy) {
            Ok((responder, harness_key, authorization)) => {
                let deadline = now + self.config().authorization_timeout;
                let phase = Phase::Authorizing { responder, deadline };
                let mut stream = self.make_stream(id.clone(), phase);
                stream.handshake_seen = Some(digest(message));
                let generation = stream.generation;
                self.streams.insert(stream);
                self.streams.emit(Event::AuthorizeRequest {
                    stream: id.clone(),
                    generation,
                    harness_key,
                    authorization,
                });
            }
            Err(error) => {
                self.streams.refuse(id);
                self.streams.emit(Event::HandshakeFailed { stream: id.clone(), error });
                // Our own random source failing is not the peer's failure.
                if !matches!(error, HandshakeError::Entropy(_)) {
                    self.on_failed_handshake();
                }
            }
        }
    }

    fn open(&mut self, id: &StreamId, now: Instant) {
        let config = self.streams.config().clone();
        let Some(stream) = self.streams.get_mut(id) else { return };
        let Phase::Authorizing { responder, .. } =
            std::mem::replace(&mut stream.phase, Phase::Transitioning)
        else {
            return;
        };
        match responder.accept() {
            Ok((reply, cipher)) => {
                let channel = Channel::Noise { cipher, deframer: Deframer::default() };
                stream.send_handshake(reply);
                stream.open(channel, &config, now);
                stream.expect_first_record(&config, now);
                self.streams.wake(id);
                self.streams.emit(Event::Opened { stream: id.clone() });
            }
            Err(error) => {
                self.streams.close(id, ProtocolError::Handshake(error).into());
                self.on_failed_handshake();
            }
        }
    }
}

impl fmt::Debug for Executor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Executor")
            .field("mode", &self.mode)
            .field("streams", &self.streams.len())
            .field("failed_handshakes", &self.failed_handshakes)
            .finish_non_exhaustive()
    }
}
