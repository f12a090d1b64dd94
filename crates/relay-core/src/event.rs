//! Events from an endpoint to its driver.
//!
//! For each stream: at most one `AuthorizeRequest` (executor only), at most one `Opened`, then messages,
//! then exactly one of `Reset` and `Closed`, and nothing after it. A stream whose handshake fails before
//! those shows as `HandshakeFailed` only. A stream that the driver resets ends without an event.

use std::fmt;

use bytes::Bytes;

use crate::error::CloseCause;
use crate::id::{Generation, StreamId};
use crate::key::NoisePublicKey;
use crate::noise::{Authorization, HandshakeError};

/// Something for the driver to act on. `Debug` shows no message and no secret.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// Executor: ask the registry about this key, then call `authorize` with the generation.
    AuthorizeRequest {
        /// The stream that waits for the verdict.
        stream: StreamId,
        /// To be passed to `authorize`.
        generation: Generation,
        /// The key that the handshake authenticated.
        harness_key: NoisePublicKey,
        /// What the harness got from the registry.
        authorization: Authorization,
    },
    /// The stream is open: messages pass from here on.
    Opened {
        /// The stream.
        stream: StreamId,
    },
    /// The next message of a stream, whole.
    Message {
        /// The stream.
        stream: StreamId,
        /// The message, decrypted and complete.
        message: Bytes,
    },
    /// A stream whose `send` returned `Blocked` has room again.
    Writable {
        /// The stream.
        stream: StreamId,
    },
    /// A frame arrived from the peer after `probe`. Not authenticated: the relay can forge it.
    PeerResponded {
        /// The stream.
        stream: StreamId,
    },
    /// The peer ended the stream. The reason is not authenticated: log it, do not show it.
    Reset {
        /// The stream.
        stream: StreamId,
        /// What the peer sent, cut to 256 bytes.
        reason: String,
    },
    /// This side ended the stream.
    Closed {
        /// The stream.
        stream: StreamId,
        /// Why it ended.
        cause: CloseCause,
    },
    /// Executor: a handshake failed before an `AuthorizeRequest`.
    HandshakeFailed {
        /// The stream that the handshake was for.
        stream: StreamId,
        /// Why it failed.
        error: HandshakeError,
    },
    /// Executor: too many handshakes failed on this physical socket; close it.
    PhysicalClose,
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AuthorizeRequest { stream, generation, harness_key, .. } => f
                .debug_struct("AuthorizeRequest")
                .field("stream", stream)
                .field("generation", generation)
                .field("harness_key", harness_key)
                .finish_non_exhaustive(),
            Self::Opened { stream } => write!(f, "Opened({stream})"),
            Self::Message { stream, message } => {
                write!(f, "Message({stream}, {} bytes)", message.len())
            }
            Self::Writable { stream } => write!(f, "Writable({stream})"),
            Self::PeerResponded { stream } => write!(f, "PeerResponded({stream})"),
            Self::Reset { stream, reason } => write!(f, "Reset({stream}, {reason:?})"),
            Self::Closed { stream, cause } => write!(f, "Closed({stream}, {cause:?})"),
            Self::HandshakeFailed { stream, error } => {
                write!(f, "HandshakeFailed({stream}, {error:?})")
            }
            Self::PhysicalClose => f.write_str("PhysicalClose"),
        }
    }
}
