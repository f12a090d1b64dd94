//! The harness's endpoint: one physical socket, one stream that it opens.
//!
//! Invariant: the stream opens only if the executor has the pinned keys.

use std::fmt;
use std::time::Instant;

use bytes::Bytes;

use super::Streams;
use crate::config::{Config, ConfigError};
use crate::entropy::{Entropy, EntropyError};
use crate::error::{ProtocolError, SendError};
use crate::event::Event;
use crate::frame::{Body, Frame, FrameError};
use crate::id::{Generation, StreamId};
use crate::key::{NoiseIdentity, NoisePublicKey};
use crate::message::{Deframer, Reassembler};
use crate::noise::{Authorization, Binding, HandshakeError, Initiator, digest};
use crate::stream::{Channel, Phase, Stream, StreamStats};

/// How a harness's stream is secured. Chosen once, without fallback.
#[derive(Debug, Clone)]
pub enum HarnessMode {
    /// A handshake with the keys the registry gave.
    Noise {
        /// The key pair that the registry authorized.
        identity: NoiseIdentity,
        /// The key that the executor must have.
        executor_key: NoisePublicKey,
        /// The environment that the handshake is bound to.
        environment_id: String,
        /// The executor's registration that the handshake is bound to.
        registration_id: String,
        /// What the executor shows to the registry.
        authorization: Authorization,
    },
    /// The older revision: messages in clear.
    Clear,
}

/// Why a stream was not opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// A harness opens one stream in its life.
    #[error("this endpoint has opened its stream already")]
    AlreadyOpened,
    /// The authorization is empty or too long to send.
    #[error("the authorization is not of 1..={max} bytes")]
    Authorization {
        /// [`Config::max_authorization_len`].
        max: usize,
    },
    /// The first handshake message could not be made.
    #[error(transparent)]
    Handshake(#[from] HandshakeError),
    /// No stream id could be made.
    #[error(transparent)]
    Entropy(#[from] EntropyError),
}

/// The harness's side of a physical socket. See the crate's documentation for how to drive it.
pub struct Harness {
    streams: Streams,
    mode: HarnessMode,
    entropy: Box<dyn Entropy>,
    stream: Option<StreamId>,
}

impl Harness {
    /// Makes an endpoint without a stream and without a socket. Fails if `config` is out of range.
    pub fn new(
        config: Config,
        mode: HarnessMode,
        entropy: Box<dyn Entropy>,
    ) -> Result<Self, ConfigError> {
        Ok(Self { streams: Streams::new(config)?, mode, entropy, stream: None })
    }

    // --- getters ---

    /// Its limits.
    pub fn config(&self) -> &Config {
        self.streams.config()
    }

    /// The stream it has opened, if any; also after its end.
    pub fn stream(&self) -> Option<&StreamId> {
        self.stream.as_ref()
    }

    /// Counters of the stream; `None` once it has ended.
    pub fn stats(&self) -> Option<StreamStats> {
        self.streams.stats(self.stream.as_ref()?)
    }

    /// Whether the stream would outlive the loss of its physical socket.
    pub fn can_resume(&self) -> bool {
        self.stats().is_some_and(|stats| stats.open && stats.peer_acknowledges)
    }

    // --- inputs ---

    /// A physical socket is connected: the first, or another after a drop.
    pub fn handle_connected(&mut self, now: Instant) {
        let now = self.streams.advance_clock(now);
        self.streams.handle_connected(now);
    }

    /// The physical socket is lost. The stream ends unless its peer can resume.
    pub fn handle_disconnected(&mut self, now: Instant) {
        let now = self.streams.advance_clock(now);
        self.streams.handle_disconnected(now);
    }

    /// Handles one binary websocket message. An error means that it was dropped without any effect.
    pub fn handle_frame(&mut self, now: Instant, bytes: Bytes) -> Result<(), FrameError> {
        let now = self.streams.advance_clock(now);
        let frame = Frame::decode(bytes, &self.config().frame)?;
        if let Body::Handshake { payload } = &frame.body {
            let payload = payload.clone();
            self.on_handshake(&frame.stream_id, &payload, now);
        } else if self.streams.has_ended(&frame.stream_id) {
            // A reset was lost, so the executor continues: send it again.
            if !matches!(frame.body, Body::Reset { .. } | Body::Ack) {
                self.streams.refuse(&frame.stream_id);
            }
        } else {
            self.streams.handle_stream_frame(frame, now);
        }
        Ok(())
    }

    /// Handles due timers. Call it at the time from [`Self::poll_timeout`]; earlier calls do nothing.
    pub fn handle_timeout(&mut self, now: Instant) {
        let now = self.streams.advance_clock(now);
        self.streams.handle_timeout(now);
    }

    // --- commands ---

    /// Opens the stream: announces it and begins the handshake. `Opened` follows, or `Closed`,
    /// or `Reset`. Once per endpoint, before or after the socket is connected.
    pub fn open(&mut self, now: Instant) -> Result<StreamId, OpenError> {
        let now = self.streams.advance_clock(now);
        if self.stream.is_some() {
            return Err(OpenError::AlreadyOpened);
        }
        let id = StreamId::generate(&mut *self.entropy)?;
        let config = self.streams.config().clone();
        let stream = match &self.mode {
            HarnessMode::Noise {
                identity,
                executor_key,
                environment_id,
                registration_id,
                authorization,
            } => {
                let max = config.max_authorization_len;
                if !(1..=max).contains(&authorization.expose().len()) {
                    return Err(OpenError::Authorization { max });
                }
                let binding = Binding { environment_id, registration_id, stream_id: id.as_str() };
                let (initiator, message) = Initiator::start(
                    identity,
                    executor_key,
                    binding,
                    authorization,
                    &mut *self.entropy,
                )?;
                let deadline = now + config.handshake_timeout;
                let phase = Phase::Opening { initiator, deadline };
                let mut stream = Stream::new(id.clone(), Generation(1), phase);
                stream.send_handshake(message);
                stream
            }
            HarnessMode::Clear => {
                let mut stream = Stream::new(id.clone(), Generation(1), Phase::Transitioning);
                stream.open(Channel::Clear(Reassembler::default()), &config, now);
                self.streams.emit(Event::Opened { stream: id.clone() });
                stream
            }
        };
        let mut stream = stream;
        stream.announce();
        self.streams.insert(stream);
        self.stream = Some(id.clone());
        Ok(id)
    }

    /// Queues one message. `Blocked` means that it was not queued; `Writable` follows.
    pub fn send(&mut self, message: Bytes) -> Result<(), SendError> {
        let id = self.stream.as_ref().ok_or(SendError::NotOpen)?;
        self.streams.send(id, message)
    }

    /// Queues a heartbeat, for a driver that reads no frames for a while and so acknowledges none.
    pub fn heartbeat(&mut self) {
        if let Some(id) = &self.stream {
            self.streams.heartbeat(id);
        }
    }

    /// Ends the stream at once; the peer sees `reason`. No event follows.
    pub fn reset(&mut self, reason: &str) {
        if let Some(id) = &self.stream {
            self.streams.reset(id, reason);
        }
    }

    /// Ends the stream once everything accepted has been sent and, by a peer that acknowledges,
    /// received; then `Closed` with `Finished`.
    pub fn close(&mut self) {
        if let Some(id) = &self.stream {
            self.streams.finish(id);
        }
    }

    // --- outputs ---

    /// The next frame for the physical socket.
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

    fn on_handshake(&mut self, id: &StreamId, reply: &[u8], now: Instant) {
        let config = self.streams.config().clone();
        let Some(stream) = self.streams.get_mut(id) else { return };
        let seen = digest(reply);
        match std::mem::replace(&mut stream.phase, Phase::Transitioning) {
            Phase::Opening { initiator, .. } => match initiator.finish(reply) {
                Ok(cipher) => {
                    let channel = Channel::Noise { cipher, deframer: Deframer::default() };
                    stream.handshake_seen = Some(seen);
                    stream.open(channel, &config, now);
                    self.streams.wake(id);
                    self.streams.emit(Event::Opened { stream: id.clone() });
                }
                Err(error) => self.streams.close(id, ProtocolError::Handshake(error).into()),
            },
            phase => {
                // The same reply again is a duplicate.
                stream.phase = phase;
                if stream.handshake_seen != Some(seen) {
                    self.streams.close(id, ProtocolError::SecondHandshake.into());
                }
            }
        }
    }
}

impl fmt::Debug for Harness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Harness")
            .field("mode", &self.mode)
            .field("stream", &self.stream)
            .finish_non_exhaustive()
    }
}
