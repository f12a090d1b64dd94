//! What ends a stream.
//!
//! A [`ProtocolError`] is the fault of the peer or the relay and always resets the stream; a
//! [`CloseCause`] is any reason for which this side ends a stream.

use crate::noise::{HandshakeError, RecordError};

/// The peer, or the relay between, broke the protocol on one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// A data frame arrived before the stream was open.
    #[error("data before the handshake was done")]
    DataBeforeHandshake,
    /// A handshake message arrived that differs from the first.
    #[error("a second handshake on one stream")]
    SecondHandshake,
    /// The handshake failed.
    #[error("handshake failed: {0}")]
    Handshake(#[from] HandshakeError),
    /// A record is not authentic.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A message is empty or too long.
    #[error("a message of {len} bytes is not within 1..={max}")]
    MessageLength {
        /// The announced length in bytes.
        len: usize,
        /// [`Config::max_message_len`](crate::Config::max_message_len).
        max: usize,
    },
    /// A segment does not continue the message before it.
    #[error("segments do not make a message at seq {seq}")]
    Segments {
        /// The segment's number.
        seq: u32,
    },
    /// The peer acknowledged a segment that this side never sent.
    #[error("segment {seq} was acknowledged but never sent")]
    AckOfUnsent {
        /// The highest number it acknowledged.
        seq: u64,
    },
    /// The unfinished messages of all streams together are too long.
    #[error("unfinished messages measure more than {max} bytes")]
    AssemblingLimit {
        /// [`Config::max_assembling_bytes`](crate::Config::max_assembling_bytes).
        max: usize,
    },
    /// The stream has sent 2^32 segments.
    #[error("the stream has used up its segment numbers")]
    SequenceExhausted,
}

/// Why this side ended a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CloseCause {
    /// The peer, or the relay between, broke the protocol.
    #[error("{0}")]
    Protocol(#[from] ProtocolError),
    /// The executor did not reply within [`Config::handshake_timeout`](crate::Config).
    #[error("the handshake took too long")]
    HandshakeTimeout,
    /// The driver gave no verdict within [`Config::authorization_timeout`](crate::Config).
    #[error("no verdict on the harness's key in time")]
    AuthorizationTimeout,
    /// No record arrived within [`Config::first_record_timeout`](crate::Config).
    #[error("nothing was ever written to the stream")]
    FirstRecordTimeout,
    /// The verdict was [`Verdict::Denied`](crate::Verdict).
    #[error("the harness's key is not authorized")]
    Denied,
    /// The verdict was [`Verdict::Unavailable`](crate::Verdict).
    #[error("the harness's key could not be checked")]
    Unavailable,
    /// The peer has not shown that it acknowledges, so its stream ends with the socket.
    #[error("the physical socket was lost and the peer cannot resume")]
    Disconnected,
    /// No new socket came within [`Config::detach_timeout`](crate::Config).
    #[error("the physical socket stayed away too long")]
    DetachTimeout,
    /// [`Config::max_retries`](crate::Config) retries in a row brought no progress.
    #[error("the peer makes no progress")]
    Stalled,
    /// Nothing arrived within [`Config::idle_timeout`](crate::Config).
    #[error("the peer is silent")]
    Idle,
    /// The driver closed the stream, and everything queued has been sent.
    #[error("closed after everything was sent")]
    Finished,
}

/// Why a message was not queued.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// More than [`Config::send_buffer`](crate::Config) bytes wait to be sent.
    #[error("the send buffer is full; a writable event follows")]
    Blocked,
    /// The stream does not exist, is not open yet, or is closing.
    #[error("no such stream, or it is not open")]
    NotOpen,
    /// The message is empty or too long for this peer.
    #[error("a message of {len} bytes is not within 1..={max}")]
    MessageLength {
        /// Its length in bytes.
        len: usize,
        /// The longest message that this peer takes.
        max: usize,
    },
}
