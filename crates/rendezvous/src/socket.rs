//! One websocket: a queue bounded in bytes towards it, frames out of it.
//!
//! Invariant: a socket that takes nothing makes whoever writes to it wait, and is closed if it
//! takes nothing for [`Config::stall_timeout`]; it never makes the service grow.

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
pub(crate) const ENDED: CloseReason = (1000, "");

/// All reasons, by the number that other nodes know them by; new ones go to the end.
pub(crate) const REASONS: [CloseReason; 9] =
    [ENDED, GOING_AWAY, REPLACED, REGISTERED_AGAIN, REMOVED, REVOKED, OFFLINE, STALLED, SILENT];

/// The way to a socket; clones share it.
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
    /// Queues a frame, waiting for room; `false` if the socket is gone, or was closed because it
    /// took nothing for too long.
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

    /// Tells the end of a stream, without waiting. There is one such frame per stream at most, so
    /// it needs no room.
    pub(crate) fn reset(&self, stream: &str, reason: &str) {
        if let Some(frame) = reset_frame(stream, reason) {
            self.0.send_now(frame);
        }
    }

    /// Tells that there is no such stream, if there is room to say so.
    pub(crate) fn refuse(&self, stream: &str, reason: &str) {
        if let Some(frame) = reset_frame(stream, reason)
            && let Some(slot) = self.0.try_reserve(frame.len())
        {
            slot.send(frame);
        }
    }

    /// Closes the socket after what is queued; the first reason counts.
    pub(crate) fn close(&self, reason: CloseReason) {
        self.0.close(reason);
    }
}

fn reset_frame(stream: &str, reason: &str) -> Option<Bytes> {
    let body = Body::Reset { reason: reason.to_owned() };
    Some(Frame::new(StreamId::new(stream)?, 0, 0, body).encode())
}

/// How to build the websocket: small frames gather into one write, large ones go out whole.
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

/// Starts the writing half of a socket and gives its reading half.
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
    /// The next message; `None` once the socket is done.
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
