//! The physical websocket to the rendezvous: binary messages out by a task of its own, in by the
//! pump.
//!
//! Invariant: few frames wait for the socket, so a stream's turn comes soon however much another
//! has to send. The URL is a secret and is in no error.

use std::time::Duration;

use bytes::Bytes;
use codex_exec_rpc::{DialError, DialledStream, WebsocketDial};
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_websockets::{Limits, Message, WebSocketStream};

use crate::secret::Secret;

/// Frames that may wait for the socket.
const WAITING_FRAMES: usize = 4;
/// The longest message that is read at all. Frames are shorter; one a little longer is dropped
/// alone, and only what is beyond this ends the socket.
const LONGEST_MESSAGE: usize = 1 << 20;

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
    #[error("the registry gave a rendezvous URL that cannot be dialled")]
    Url,
    /// Not reached.
    #[error("cannot reach the rendezvous: {0}")]
    Unreachable(DialError),
}

/// What a status says beyond its number.
fn meaning(status: u16) -> &'static str {
    match status {
        409 => {
            ": the environment has been registered anew since; \
             if another server did that, give each server an id of its own"
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

/// What goes to the write task.
enum Outgoing {
    Frame(Bytes),
    Ping,
    /// Write what the library has pending: a pong.
    Flush,
}

/// What came in.
#[derive(Debug)]
pub(crate) enum Incoming {
    Frame(Bytes),
    /// A text message: never a frame.
    Text,
    /// A sign of life.
    Life,
}

/// An open websocket to the rendezvous.
pub(crate) struct RelaySocket {
    incoming: SplitStream<WebSocketStream<DialledStream>>,
    outgoing: mpsc::Sender<Outgoing>,
    writer: JoinHandle<()>,
    /// When a ping was sent that nothing has answered.
    pinged: Option<Instant>,
    next_ping: Instant,
    ping_interval: Duration,
    pong_timeout: Duration,
}

impl RelaySocket {
    /// Dials the rendezvous.
    pub(crate) async fn dial(
        url: &Secret,
        dial_timeout: Duration,
        ping_interval: Duration,
        pong_timeout: Duration,
    ) -> Result<Self, RendezvousError> {
        let dial = WebsocketDial { timeout: dial_timeout, ..WebsocketDial::new(url.expose()) };
        let limits = Limits::default().max_payload_len(Some(LONGEST_MESSAGE));
        let socket = dial.connect(limits).await.map_err(|error| match (error.status(), error) {
            (Some(status), _) => RendezvousError::Status { status },
            (None, DialError::Url { .. } | DialError::Token) => RendezvousError::Url,
            (None, error) => RendezvousError::Unreachable(error),
        })?;
        let (sink, incoming) = socket.split();
        let (outgoing, queue) = mpsc::channel(WAITING_FRAMES);
        let writer = tokio::spawn(write(sink, queue));
        let next_ping = Instant::now() + ping_interval;
        Ok(Self {
            incoming,
            outgoing,
            writer,
            pinged: None,
            next_ping,
            ping_interval,
            pong_timeout,
        })
    }

    /// The next message; `None` when the socket has ended. Cancel safe.
    pub(crate) async fn next(&mut self) -> Option<Incoming> {
        let message = match self.incoming.next().await? {
            Ok(message) => message,
            Err(error) => {
                tracing::debug!(%error, "the rendezvous socket failed");
                return None;
            }
        };
        self.pinged = None;
        if message.is_binary() {
            Some(Incoming::Frame(message.into_payload().into()))
        } else if message.is_text() {
            Some(Incoming::Text)
        } else if message.is_close() {
            None
        } else {
            if message.is_ping() {
                // A full queue is about to be flushed anyway.
                let _ = self.outgoing.try_send(Outgoing::Flush);
            }
            Some(Incoming::Life)
        }
    }

    /// Sends a frame if there is room; gives back `false` if there is none, without asking for one.
    pub(crate) fn send_with(&self, frame: impl FnOnce() -> Option<Bytes>) -> Sending {
        match self.outgoing.try_reserve() {
            Ok(room) => match frame() {
                Some(frame) => {
                    room.send(Outgoing::Frame(frame));
                    Sending::Sent
                }
                None => Sending::Nothing,
            },
            Err(_) => Sending::Full,
        }
    }

    /// Resolves when there is room for a frame, or the socket has ended.
    pub(crate) fn room(&self) -> impl Future<Output = ()> + use<> {
        let outgoing = self.outgoing.clone();
        async move {
            let _ = outgoing.reserve().await;
        }
    }

    /// Whether nothing can be written any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.outgoing.is_closed()
    }

    /// When [`Self::on_timer`] is to be called.
    pub(crate) fn timer(&self) -> Instant {
        match self.pinged {
            Some(pinged) => self.next_ping.min(pinged + self.pong_timeout),
            None => self.next_ping,
        }
    }

    /// Pings when it is time. False if the peer has been silent for too long; while it is not
    /// `unheard` of our own will, silence means nothing.
    pub(crate) fn on_timer(&mut self, now: Instant, unheard: bool) -> bool {
        if unheard {
            self.pinged = None;
        }
        if self.pinged.is_some_and(|pinged| now >= pinged + self.pong_timeout) {
            return false;
        }
        if now >= self.next_ping {
            self.next_ping = now + self.ping_interval;
            // If the queue is full now, the peer does not read; the earlier ping's clock runs.
            let _ = self.outgoing.try_send(Outgoing::Ping);
            self.pinged.get_or_insert(now);
        }
        true
    }

    /// Writes what is queued and closes, within `patience`.
    pub(crate) async fn close(self, patience: Duration) {
        let Self { outgoing, mut writer, .. } = self;
        drop(outgoing);
        if tokio::time::timeout(patience, &mut writer).await.is_err() {
            writer.abort();
        }
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

async fn write(
    mut sink: SplitSink<WebSocketStream<DialledStream>, Message>,
    mut queue: mpsc::Receiver<Outgoing>,
) {
    let work = async {
        while let Some(first) = queue.recv().await {
            let mut next = Some(first);
            while let Some(outgoing) = next {
                match outgoing {
                    Outgoing::Frame(frame) => sink.feed(Message::binary(frame)).await?,
                    Outgoing::Ping => sink.feed(Message::ping("")).await?,
                    Outgoing::Flush => {}
                }
                next = queue.try_recv().ok();
            }
            sink.flush().await?;
        }
        sink.close().await
    };
    if let Err(error) = work.await {
        tracing::debug!(%error, "writing to the rendezvous ended");
    }
}
