//! The relay protocol between a harness and an executor, as a state machine without sockets, clock or
//! randomness.
//!
//! An [`Executor`] serves many streams over one physical websocket to a rendezvous; a [`Harness`]
//! opens one stream. The path between them may lose, duplicate and reorder frames and reconnect, and the
//! relay is not trusted. A stream delivers every message once and in order, or ends with an event.
//!
//! # Driving it
//!
//! Methods fall into four kinds. *Inputs* (`handle_*`) report what happened and when. *Commands* (`open`,
//! `send`, `close`, `reset`, `authorize`) request something. *Outputs* (`poll_*`) are drained after
//! either: first events, then frames while the socket has room, then the next timeout. *Getters* change
//! nothing.
//!
//! ```
//! # use std::time::Instant;
//! # use codex_exec_relay_core::{Config, EntropyError, Event, Executor, ExecutorMode, NoiseIdentity};
//! # let mut fill = |dest: &mut [u8]| -> Result<(), EntropyError> { dest.fill(7); Ok(()) };
//! let identity = NoiseIdentity::generate(&mut fill)?;
//! let mode = ExecutorMode::Noise {
//!     identity,
//!     environment_id: "env_1".into(),
//!     registration_id: "reg_1".into(),
//! };
//! let mut executor = Executor::new(Config::default(), mode, Box::new(fill))?;
//! executor.handle_connected(Instant::now());
//! // then repeat: one input or command, and
//! while let Some(event) = executor.poll_event() {
//!     match event {
//!         Event::Message { stream, message } => { /* hand it on */ }
//!         _ => {}
//!     }
//! }
//! while let Some(frame) = executor.poll_transmit(Instant::now()) { /* write it */ }
//! let wake_at = executor.poll_timeout();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Layers
//!
//! ```text
//!   message ─▶ queue ─▶ record (encrypted once) ─▶ segment in flight ─▶ frame ─▶ socket
//!   message ◀─ deframer ◀─ record ◀─ reorder window ◀─ validated frame ◀──────── socket
//! ```
//!
//! | module | holds |
//! | --- | --- |
//! | `frame`, `peek` | the wire format and its validation; the cheap look a router needs |
//! | `key`, `noise`, `aes_gcm`, `entropy` | identities, the handshake, records, injected randomness |
//! | `queue`, `outbound`, `inbound`, `message`, `retry_timer` | the halves of a stream |
//! | `stream` | one stream's life, drawn above its `Phase` |
//! | `endpoint` | the streams of a socket, their turns, their end |
//!
//! # Peers that never acknowledge
//!
//! Deployed peers never acknowledge, resume or split messages into segments. A peer is *proven* from its
//! first ack frame, or its first frame with an ack or ack bits above 0. Until then an endpoint does not
//! wait for it, retransmits nothing, splits nothing, retains only a small tail of what it sent
//! ([`Config::unproven_segments`]), and ends the stream when the socket is lost. An endpoint itself
//! always acknowledges.
//!
//! # What is absent
//!
//! No socket, no clock, no random source, no thread, no async, no JSON, no `unsafe`. The one piece
//! of hidden state is a thread-local used for the length of a single call, because the Noise
//! library takes its generator by type and not by value (see `entropy`).

#![forbid(unsafe_code)]

mod aes_gcm;
mod config;
mod endpoint;
mod entropy;
mod error;
mod event;
mod frame;
mod id;
mod inbound;
mod key;
mod message;
mod noise;
mod outbound;
mod peek;
mod proto;
mod queue;
mod retry_timer;
mod stream;

pub use config::{Config, ConfigError, FrameLimits};
pub use endpoint::executor::{Executor, ExecutorMode, StaleVerdict, Verdict};
pub use endpoint::harness::{Harness, HarnessMode, OpenError};
pub use endpoint::{FINISHED, PROTOCOL_ERROR};
pub use entropy::{Entropy, EntropyError};
pub use error::{CloseCause, ProtocolError, SendError};
pub use event::Event;
pub use frame::{Body, BodyKind, Data, Frame, FrameError, VERSION};
pub use id::{Generation, StreamId};
pub use key::{KeyError, MLKEM768_LEN, NoiseIdentity, NoisePublicKey, SUITE, X25519_LEN};
pub use noise::{Authorization, HandshakeError, RecordError};
pub use peek::{Peek, peek};
pub use stream::StreamStats;
