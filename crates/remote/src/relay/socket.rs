//! The physical websocket to the rendezvous: a write task sends frames, the pump receives them.
//!
//! Invariant: few frames wait for the socket, so a stream's turn comes soon however much another has to
//! send. The URL is a secret and appears in no error.

use bytes::Bytes;
use codex_exec_rpc::socket::{self, Framing, Received, SocketConfig, SocketReader};
use codex_exec_rpc::{
    DialError, DialledStream, KeepAlive, KeepAliveTimer, Outbound, OutboundConfig, Secret,
    WebsocketDial, outbound,
};
use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::task::JoinHandle;
use tokio_websockets::Limits;

use super::config::RelayConfig;

/// Bytes that a frame takes of the queue; its real length is not known before it is built.
const FRAME_RESERVATION: usize = 60 << 10;
/// Bytes of the queue: room for four frames, and for pongs.
const QUEUE_BYTES: usize = 256 << 10;
/// The longest websocket message, in bytes. Frames are shorter; an overlong frame below this limit is
/// dropped alone, a longer one ends the socket.
const MAX_MESSAGE_BYTES: usize = 1 << 20;

/// The header that names one attempt to connect, so that the logs of both ends can be matched.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// `req_` and 32 random hexadecimal digits.
fn request_id() -> HeaderValue {
    let mut random = [0; 16];
    // Without randomness ids repeat; the connection works all the same.
    let _ = getrandom::fill(&mut random);
    let text = format!("req_{:032x}", u128::from_ne_bytes(random));
    tracing::debug!(request_id = text, "connecting to the rendezvous");
    HeaderValue::try_from(text).unwrap_or_else(|_| HeaderValue::from_static("req_"))
}

/// Why the rendezvous could not be reached.
#[derive(Debug, thiserror::Error)]
pub enum RendezvousError {
    /// It responded with a status instead of a websocket.
    #[error("the rendezvous answered HTTP {status}{}", status_hint(*status))]
    Status {
        /// The HTTP status.
        status: u16,
    },
    /// The registry returned a URL that cannot be dialled.
    #[error("the registry returned an invalid rendezvous URL")]
    Url,
    /// Dialling failed.
    #[error("cannot reach the rendezvous: {0}")]
    Unreachable(DialError),
}

/// A hint for a status, for the error message.
fn status_hint(status: u16) -> &'static str {
    match status {
        409 => {
            ": the environment has been registered again since; if another server did that, give \
             each server its own id"
        }
        _ => "",
    }
}

impl RendezvousError {
    /// Whether the URL is no longer valid, so that a new registration is needed.
    pub fn needs_new_url(&self) -> bool {
        matches!(self, Self::Status { status: 400..=499 } | Self::Url)
    }
}

/// An open websocket to the rendezvous.
pub(crate) struct RelaySocket {
    reader: SocketReader<DialledStream>,
    outbound: Outbound,
    writer: JoinHandle<()>,
}

impl RelaySocket {
    /// Dials the rendezvous.
    pub(crate) async fn dial(url: &Secret, config: &RelayConfig) -> Result<Self, RendezvousError> {
        let dial = WebsocketDial {
            timeout: config.dial_timeout,
            proxies: config.proxies.clone(),
            headers: HeaderMap::from_iter([(REQUEST_ID, request_id())]),
            ..WebsocketDial::new(url.expose())
        };
        let limits = Limits::default().max_payload_len(Some(MAX_MESSAGE_BYTES));
        let websocket =
            dial.connect(limits).await.map_err(|error| match (error.status(), error) {
                (Some(status), _) => RendezvousError::Status { status },
                (None, DialError::Url { .. } | DialError::Token) => RendezvousError::Url,
                (None, error) => RendezvousError::Unreachable(error),
            })?;
        let (outbound, queue) = outbound(OutboundConfig { queue_bytes: QUEUE_BYTES });
        let keep_alive = KeepAlive { idle: config.ping_interval, timeout: config.pong_timeout };
        let socket_config = SocketConfig {
            framing: Framing::Binary,
            keep_alive: Some(KeepAliveTimer::periodic(keep_alive)),
            close_timeout: config.close_timeout,
        };
        let (reader, writer) = socket::start(websocket, (outbound.clone(), queue), socket_config);
        Ok(Self { reader, outbound, writer: tokio::spawn(writer) })
    }

    /// The next message; `None` when the socket has ended or the peer is silent. While `paused`, nothing
    /// is read and silence does not count. Cancel safe.
    pub(crate) async fn next(&mut self, paused: bool) -> Option<Received> {
        if paused {
            self.reader.pause().await;
            return None;
        }
        match self.reader.next().await? {
            Ok(received) => Some(received),
            Err(error) => {
                tracing::info!(%error, "the rendezvous socket failed");
                None
            }
        }
    }

    /// Sends a frame if there is room; calls `frame` only then.
    pub(crate) fn send_with(&self, frame: impl FnOnce() -> Option<Bytes>) -> SendOutcome {
        let Some(room) = self.outbound.try_reserve(FRAME_RESERVATION) else {
            return SendOutcome::Full;
        };
        match frame() {
            Some(frame) => {
                room.send(frame);
                SendOutcome::Sent
            }
            None => SendOutcome::Nothing,
        }
    }

    /// Resolves when there is room for a frame, or the socket has ended.
    pub(crate) fn room(&self) -> impl Future<Output = ()> + use<> {
        let outbound = self.outbound.clone();
        async move {
            let _ = outbound.reserve(FRAME_RESERVATION).await;
        }
    }

    /// Whether nothing can be written any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.outbound.is_closed()
    }

    /// Writes the queue and closes, within [`RelayConfig::close_timeout`].
    pub(crate) async fn close(self) {
        let Self { reader, outbound, writer } = self;
        drop((reader, outbound));
        let _ = writer.await;
    }
}

/// The result of [`RelaySocket::send_with`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum SendOutcome {
    Sent,
    /// There was no frame to send.
    Nothing,
    /// There was no room; see [`RelaySocket::room`].
    Full,
}
