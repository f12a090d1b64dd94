//! A connection: messages in, messages out, whatever carries them.
//!
//! Reading is pulled by the owner of the [`Connection`]; writing is a task of its own behind the
//! [`Outbound`] queue. Neither can wait for the other.

use std::fmt;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream, StreamExt};

use crate::budget::{Share, Transfer};
use crate::keep_alive::KeepAlive;
use crate::metered::Meter;
use crate::outbound::{Outbound, OutboundConfig};

/// What every transport is told about limits.
#[derive(Debug, Clone, Copy)]
pub struct ConnectionConfig {
    /// The longest message that is delivered, in bytes. Default 64 MiB.
    pub message_bytes: usize,
    /// How much longer than that a websocket message may be to be thrown away whole, with the
    /// connection going on ([`TransportError::TooLong`]); past it the connection is closed.
    /// Default 16 MiB.
    pub oversize_slack: usize,
    /// The way out.
    pub outbound: OutboundConfig,
    /// Pings on a silent websocket; `None` sends none.
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

/// What can go wrong between two messages.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// A message over the limit was thrown away; the connection goes on.
    #[error("message of {len} bytes is over the limit of {limit}")]
    TooLong {
        /// Its length.
        len: usize,
        /// The limit.
        limit: usize,
    },
    /// A message so long that the connection cannot go on.
    #[error("message is over the limit of {limit} bytes")]
    TooLongToSkip {
        /// The limit.
        limit: usize,
    },
    /// The peer was silent for too long after a ping.
    #[error("the peer did not answer a ping within {} s", timeout.as_secs())]
    Silent {
        /// How long it had.
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
    /// Whether messages may still follow.
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
    /// A connection over a transport of the caller's making (a relay stream).
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

    /// The share of a [`Budget`](crate::Budget) that the last message took, if it is a large one:
    /// to be dropped when it is done with, or else with the next message.
    pub fn take_share(&mut self) -> Option<Share> {
        self.meter.as_ref().and_then(Meter::take_share)
    }

    /// What the socket of this connection moves, as far as the transport tells: nothing but over a
    /// [metered](Self::metered_websocket) websocket.
    pub fn transfer(&self) -> Transfer {
        self.meter.as_ref().map(|meter| meter.transfer().clone()).unwrap_or_default()
    }

    /// Lifts the [limit](Meter::limit) on messages from a peer that nothing is known of.
    pub fn lift_limit(&self) {
        if let Some(meter) = &self.meter {
            meter.lift_limit();
        }
    }

    /// The way out.
    pub fn outbound(&self) -> &Outbound {
        &self.outbound
    }
}
