//! One websocket: an outbound queue bounded in bytes, and a reader of frames.
//!
//! Invariant: a socket that takes nothing blocks its senders and is closed after
//! [`Config::stall_timeout`]; it never makes the service grow.

use bytes::Bytes;
use codex_exec_relay_core::{Body, Frame, StreamId};
pub(crate) use codex_exec_rpc::socket::Received;
use codex_exec_rpc::socket::{self, Framing, SocketConfig, SocketReader, websocket_config};
use codex_exec_rpc::{
    CloseReason, KeepAlive, KeepAliveTimer, OutboundConfig, OutboundQueue, TransportError, outbound,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;
use tokio_websockets::{Limits, WebSocketStream};

use crate::config::Config;
use crate::rate::Throttle;

pub(crate) const GOING_AWAY: CloseReason = (1012, "service restart");
pub(crate) const REPLACED: CloseReason = (1000, "replaced by a newer socket");
pub(crate) const REGISTERED_AGAIN: CloseReason = (1000, "replaced by a newer registration");
pub(crate) const REMOVED: CloseReason = (1008, "environment removed");
pub(crate) const REVOKED: CloseReason = (1008, "token no longer valid");
pub(crate) const OFFLINE: CloseReason = (1000, "environment offline");
pub(crate) const STALLED: CloseReason = (1008, "too slow");
const SILENT: CloseReason = (1001, "no pong");
pub(crate) const CUT_OFF: CloseReason = (1008, "too many failed handshakes");
pub(crate) const ENDED: CloseReason = (1000, "");

/// All reasons, by the number that nodes send each other; add new ones at the end.
pub(crate) const REASONS: [CloseReason; 10] = [
    ENDED,
    GOING_AWAY,
    REPLACED,
    REGISTERED_AGAIN,
    REMOVED,
    REVOKED,
    OFFLINE,
    STALLED,
    SILENT,
    CUT_OFF,
];

/// The outbound queue of a socket; clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Outbound(codex_exec_rpc::Outbound);

/// A queue for one socket.
pub(crate) fn queue(config: &Config) -> (Outbound, OutboundQueue) {
    let (outbound, queue) = outbound(OutboundConfig { queue_bytes: config.queue_bytes });
    (Outbound(outbound), queue)
}

/// Why a queue was closed, once it is.
pub(crate) fn reason(queue: &OutboundQueue) -> CloseReason {
    queue.close_reason().unwrap_or(ENDED)
}

impl Outbound {
    /// Queues a frame, waiting for room; `false` if the socket is closed, or took nothing for too long and
    /// is closed now.
    pub(crate) async fn deliver(&self, frame: Bytes, config: &Config) -> bool {
        let slot = match self.0.try_reserve(frame.len()) {
            Some(slot) => slot,
            None => match timeout(config.stall_timeout, self.0.reserve(frame.len())).await {
                Ok(Ok(slot)) => slot,
                Ok(Err(_)) => return false,
                Err(_) => {
                    self.close(STALLED);
                    return false;
                }
            },
        };
        slot.send(frame);
        !self.0.is_closed()
    }

    /// Sends a reset without waiting for room. At most one per stream is sent, which bounds them.
    pub(crate) fn reset(&self, stream: &str, reason: &str) {
        if let Some(frame) = reset_frame(stream, reason) {
            self.0.send_now(frame);
        }
    }

    /// Sends a reset for an unknown stream, if there is room.
    pub(crate) fn refuse(&self, stream: &str, reason: &str) {
        if let Some(frame) = reset_frame(stream, reason)
            && let Some(slot) = self.0.try_reserve(frame.len())
        {
            slot.send(frame);
        }
    }

    /// Closes the socket after its queued frames; the first reason counts.
    pub(crate) fn close(&self, reason: CloseReason) {
        self.0.close(reason);
    }
}

fn reset_frame(stream: &str, reason: &str) -> Option<Bytes> {
    let body = Body::Reset { reason: reason.to_owned() };
    Some(Frame::new(StreamId::new(stream)?, 0, 0, body).encode())
}

/// The builder of websockets: small frames share a write, large ones are written whole.
pub(crate) fn builder(config: &Config) -> tokio_websockets::ServerBuilder {
    tokio_websockets::ServerBuilder::new()
        .config(websocket_config())
        .limits(Limits::default().max_payload_len(Some(config.message_bytes)))
}

/// The reading half. Dropping it closes the socket.
#[derive(Debug)]
pub(crate) struct Reader<T> {
    socket: SocketReader<T>,
    outbound: Outbound,
    throttle: Throttle,
}

/// Starts the write task of a socket and returns its reading half.
pub(crate) fn start<T>(
    websocket: WebSocketStream<T>,
    outbound: Outbound,
    queue: OutboundQueue,
    config: &Config,
    tasks: &tokio_util::task::TaskTracker,
) -> Reader<T>
where
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let keep_alive = KeepAlive { idle: config.ping_after, timeout: config.pong_within };
    let socket_config = SocketConfig {
        framing: Framing::Binary,
        keep_alive: Some(KeepAliveTimer::when_idle(keep_alive)),
        close_timeout: config.close_timeout,
    };
    let (socket, writer) = socket::start(websocket, (outbound.0.clone(), queue), socket_config);
    tasks.spawn(writer);
    Reader { socket, outbound, throttle: Throttle::new(config.frames_per_second) }
}

impl<T: AsyncRead + AsyncWrite + Unpin> Reader<T> {
    /// The next message; `None` once the socket has ended.
    pub(crate) async fn next(&mut self) -> Option<Received> {
        self.throttle.wait().await;
        match self.socket.next().await? {
            Ok(received) => Some(received),
            Err(error) => {
                tracing::debug!(%error, "websocket ended");
                if let TransportError::Silent { .. } = error {
                    self.outbound.close(SILENT);
                }
                None
            }
        }
    }
}

impl<T> Drop for Reader<T> {
    fn drop(&mut self) {
        self.outbound.close(ENDED);
    }
}
