//! What ends a stream.
//!
//! A [`ProtocolError`] is the peer's doing (or the relay's) and always ends in a reset; a
//! [`CloseCause`] is every way in which this side ends a stream.

use crate::noise::{HandshakeError, RecordError};

/// The peer, or whoever relays, broke the protocol on one stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    #[error("data before the handshake was done")]
    DataBeforeHandshake,
    #[error("a second handshake on one stream")]
    SecondHandshake,
    #[error("handshake failed: {0}")]
    Handshake(#[from] HandshakeError),
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error("a message of {len} bytes is not within 1..={max}")]
    MessageLength { len: usize, max: usize },
    #[error("segments do not make a message at seq {seq}")]
    Segments { seq: u32 },
    #[error("segment {seq} was acknowledged but never sent")]
    AckOfUnsent { seq: u64 },
    #[error("unfinished messages measure more than {max} bytes")]
    AssemblingLimit { max: usize },
    #[error("the stream has used up its segment numbers")]
    SequenceExhausted,
}

/// Why this side ended a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CloseCause {
    #[error("{0}")]
    Protocol(#[from] ProtocolError),
    #[error("the handshake took too long")]
    HandshakeTimeout,
    #[error("no verdict on the harness's key in time")]
    AuthorizationTimeout,
    #[error("nothing was ever written to the stream")]
    FirstRecordTimeout,
    #[error("the harness's key is not authorized")]
    Denied,
    #[error("the harness's key could not be checked")]
    Unavailable,
    #[error("the physical socket was lost and the peer cannot resume")]
    Disconnected,
    #[error("the physical socket stayed away too long")]
    DetachTimeout,
    #[error("the peer makes no progress")]
    Stalled,
    #[error("the peer is silent")]
    Idle,
    #[error("closed after everything was sent")]
    Finished,
}

/// Why a message was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    #[error("the send buffer is full; a writable event follows")]
    Blocked,
    #[error("no such stream, or it is not open")]
    NotOpen,
    #[error("a message of {len} bytes is not within 1..={max}")]
    MessageLength { len: usize, max: usize },
}
