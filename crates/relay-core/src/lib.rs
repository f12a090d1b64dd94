//! The relay between a harness and an executor, as a machine without sockets, clock or dice.
//!
//! An [`Executor`] serves many streams over one physical websocket to a rendezvous; a [`Harness`]
//! opens one. Between them may be loss, repetition, disorder, reconnects and a relay that is not
//! trusted. A stream delivers every message once and in order, or it ends with an event that says
//! so.
//!
//! # Driving it
//!
//! Methods come in kinds. *Inputs* (`handle_*`) tell what happened and when. *Commands* (`open`,
//! `send`, `close`, `reset`, `authorize`) tell what is wanted. *Outputs* (`poll_*`) are drained
//! after either: events first, then frames as long as the socket takes them, then the next
//! timeout. *Getters* change nothing.
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
//! // then, for ever: one input or command, and
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
//! Deployed peers never acknowledge, resume or cut segments. A peer counts as acknowledging from
//! its first ack frame, or ack or ack bits above 0. Until then an endpoint does not wait for it,
//! sends it nothing twice, cuts nothing, keeps only a small tail of what it sent
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
