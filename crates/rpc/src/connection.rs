//! A connection: messages in and out, over any transport.
//!
//! The owner of the [`Connection`] pulls messages in; a separate task writes those in the [`Outbound`]
//! queue. Neither waits for the other.

use std::fmt;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream, StreamExt};

use crate::budget::{Share, Transfer};
use crate::keep_alive::KeepAlive;
use crate::metered::Meter;
use crate::outbound::{Outbound, OutboundConfig};

/// Limits of a connection, the same for every transport.
#[derive(Debug, Clone, Copy)]
pub struct ConnectionConfig {
    /// The longest message that is delivered, in bytes. Default 64 MiB.
    pub message_bytes: usize,
    /// How far over the limit, in bytes, a websocket message may be and still be skipped
    /// ([`TransportError::TooLong`]); a longer one closes the connection. Default 16 MiB.
    pub oversize_slack: usize,
    /// Limits of the outbound queue.
    pub outbound: OutboundConfig,
    /// When to ping a silent websocket; `None` never pings and never gives up. Default 30 s and 60 s.
    pub keep_alive: Option<KeepAlive>,
    /// How long the closing of a websocket may take. Default 5 s.
    pub close_timeout: Duration,
}

impl Default for ConnectionConfig {
    fn default() -> Self {
        Self {
            message_bytes: 64 << 20,
            oversize_slack: 16 << 20,
            outbound: OutboundConfig::default(),
            keep_alive: Some(KeepAlive::default()),
            close_timeout: Duration::from_secs(5),
        }
    }
}

/// Why a connection delivered no message.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// A message over the limit was skipped; the connection continues.
    #[error("message of {len} bytes is over the limit of {limit}")]
    TooLong {
        /// Its length in bytes.
        len: usize,
        /// [`ConnectionConfig::message_bytes`].
        limit: usize,
    },
    /// A message too long to be skipped; the connection has ended.
    #[error("message is over the limit of {limit} bytes")]
    TooLongToSkip {
        /// [`ConnectionConfig::message_bytes`].
        limit: usize,
    },
    /// The peer did not answer a ping in time.
    #[error("the peer did not answer a ping within {} s", timeout.as_secs())]
    Silent {
        /// [`KeepAlive::timeout`].
        timeout: Duration,
    },
    /// The websocket failed.
    #[error("websocket: {0}")]
    WebSocket(#[from] tokio_websockets::Error),
    /// The stream below failed.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

impl TransportError {
    /// Whether the connection has ended with this error.
    pub fn is_fatal(&self) -> bool {
        !matches!(self, Self::TooLong { .. })
    }
}

/// Messages in and out. The transport ends when the connection and every clone of its
/// [`Outbound`] are dropped.
pub struct Connection {
    incoming: Pin<Box<dyn Stream<Item = Result<Bytes, TransportError>> + Send>>,
    outbound: Outbound,
    meter: Option<Meter>,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").finish_non_exhaustive()
    }
}

impl Connection {
    /// Makes a connection from any stream of messages and an outbound queue.
    pub fn new(
        incoming: impl Stream<Item = Result<Bytes, TransportError>> + Send + 'static,
        outbound: Outbound,
    ) -> Self {
        Self { incoming: Box::pin(incoming), outbound, meter: None }
    }

    /// The next message; `None` when the peer has closed. Cancel safe.
    pub async fn next(&mut self) -> Option<Result<Bytes, TransportError>> {
        self.incoming.next().await
    }

    pub(crate) fn with_meter(mut self, meter: Meter) -> Self {
        self.meter = Some(meter);
        self
    }

    /// Takes the share of a [`Budget`](crate::Budget) that the last message holds, if it is a large
    /// one. Drop it with the message; a share that is not taken is dropped with the next message.
    pub fn take_share(&mut self) -> Option<Share> {
        self.meter.as_ref().and_then(Meter::take_share)
    }

    /// Counts of what this connection's socket moves. Only a
    /// [metered](Self::metered_websocket) websocket counts.
    pub fn transfer(&self) -> Transfer {
        self.meter.as_ref().map(|meter| meter.transfer().clone()).unwrap_or_default()
    }

    /// Lifts the [limit](Meter::limit) on messages before `initialize`.
    pub fn lift_limit(&self) {
        if let Some(meter) = &self.meter {
            meter.lift_limit();
        }
    }

    /// The queue for messages to the peer.
    pub fn outbound(&self) -> &Outbound {
        &self.outbound
    }
}
