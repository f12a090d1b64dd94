//! The physical websocket to the rendezvous: frames out by a write task, in by the pump.
//!
//! Invariant: few frames wait for the socket, so a stream's turn comes soon however much another
//! has to send. The URL is a secret and is in no error.

use bytes::Bytes;
use codex_exec_rpc::socket::{self, Framing, Received, SocketConfig, SocketReader};
use codex_exec_rpc::{
    DialError, DialledStream, KeepAlive, Outbound, OutboundConfig, Pulse, Secret, WebsocketDial,
    outbound,
};
use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::task::JoinHandle;
use tokio_websockets::Limits;

use super::config::RelayConfig;

/// What a frame takes of the queue, however long it is: nobody knows that before it is made.
const FRAME_ROOM: usize = 60 << 10;
/// Room for four frames, and for pongs.
const QUEUE_BYTES: usize = 256 << 10;
/// The longest message that is read at all. Frames are shorter; one a little longer is dropped
/// alone, and only what is beyond this ends the socket.
const LONGEST_MESSAGE: usize = 1 << 20;

/// Names one attempt to connect, for whoever reads the logs of both ends.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// `req_` and 32 random hexadecimal digits.
fn request_id() -> HeaderValue {
    let mut random = [0; 16];
    // Without randomness the id is of less use, and the connection as good.
    let _ = getrandom::fill(&mut random);
    let text = format!("req_{:032x}", u128::from_ne_bytes(random));
    tracing::debug!(request_id = text, "connecting to the rendezvous");
    HeaderValue::try_from(text).unwrap_or_else(|_| HeaderValue::from_static("req_"))
}

/// Why the rendezvous was not reached.
#[derive(Debug, thiserror::Error)]
pub enum RendezvousError {
    /// It answered with a status instead of a websocket.
    #[error("the rendezvous answered HTTP {status}{}", meaning(*status))]
    Status {
        /// Which.
        status: u16,
    },
    /// The registry gave a URL that cannot be dialled.
    #[error("the registry returned an invalid rendezvous URL")]
    Url,
    /// Not reached.
    #[error("cannot reach the rendezvous: {0}")]
    Unreachable(DialError),
}

/// What a status says beyond its number.
fn meaning(status: u16) -> &'static str {
    match status {
        409 => {
            ": the environment has been registered again since; if another server did that, give \
             each server its own id"
        }
        _ => "",
    }
}

impl RendezvousError {
    /// Whether the URL is of no more use and another is to be asked for.
    pub fn is_url_spent(&self) -> bool {
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
        let limits = Limits::default().max_payload_len(Some(LONGEST_MESSAGE));
        let websocket =
            dial.connect(limits).await.map_err(|error| match (error.status(), error) {
                (Some(status), _) => RendezvousError::Status { status },
                (None, DialError::Url { .. } | DialError::Token) => RendezvousError::Url,
                (None, error) => RendezvousError::Unreachable(error),
            })?;
        let (outbound, queue) = outbound(OutboundConfig { queue_bytes: QUEUE_BYTES });
        let keep_alive = KeepAlive { idle: config.ping_interval, patience: config.pong_timeout };
        let socket_config = SocketConfig {
            framing: Framing::Binary,
            pulse: Some(Pulse::periodic(keep_alive)),
            close_timeout: config.farewell,
        };
        let (reader, writer) = socket::start(websocket, (outbound.clone(), queue), socket_config);
        Ok(Self { reader, outbound, writer: tokio::spawn(writer) })
    }

    /// The next message; `None` when the socket has ended or is silent. While the pump is `paused`
    /// nothing is read, and silence means nothing. Cancel safe.
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

    /// Sends a frame if there is room; without room, none is asked for.
    pub(crate) fn send_with(&self, frame: impl FnOnce() -> Option<Bytes>) -> Sending {
        let Some(room) = self.outbound.try_reserve(FRAME_ROOM) else { return Sending::Full };
        match frame() {
            Some(frame) => {
                room.send(frame);
                Sending::Sent
            }
            None => Sending::Nothing,
        }
    }

    /// Resolves when there is room for a frame, or the socket has ended.
    pub(crate) fn room(&self) -> impl Future<Output = ()> + use<> {
        let outbound = self.outbound.clone();
        async move {
            let _ = outbound.reserve(FRAME_ROOM).await;
        }
    }

    /// Whether nothing can be written any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.outbound.is_closed()
    }

    /// Writes what is queued and closes, within [`RelayConfig::farewell`].
    pub(crate) async fn close(self) {
        let Self { reader, outbound, writer } = self;
        drop((reader, outbound));
        let _ = writer.await;
    }
}

/// What became of an offer to send.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Sending {
    Sent,
    /// There was no frame to send.
    Nothing,
    /// There was no room; see [`RelaySocket::room`].
    Full,
}
