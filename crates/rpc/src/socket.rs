//! One framed socket: a websocket behind a queue bounded in bytes, with keep-alive.
//!
//! JSON-RPC connections, the relay socket of both ends and the sockets of a rendezvous are made of
//! it. They differ in what a message is ([`Framing`]), in when they ping ([`Pulse`]), and in what they
//! do with what comes in.
//!
//! Invariant: reading and writing do not wait for each other, except that a peer which pings and does
//! not read is not read either once `OWED_PONGS` pongs wait for it.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::DropGuard;
use tokio_websockets::{CloseCode, Message, WebSocketStream};

use crate::budget::Meter;
use crate::connection::TransportError;
use crate::keep_alive::{Due, Pulse};
use crate::outbound::{Marks, Outbound, OutboundQueue, Queued};
use crate::peer::Signs;

/// Pongs that may wait for a peer that does not read.
const OWED_PONGS: usize = 256;

/// Bytes that are gathered into one write.
const GATHERED: usize = 64 << 10;

/// How to build a websocket: small messages gather into one write, large ones go out whole.
pub fn websocket_config() -> tokio_websockets::Config {
    tokio_websockets::Config::default().flush_threshold(GATHERED)
}

/// What a message of the queue is on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framing {
    /// A text. Whatever else the current turn of the event loop queues goes out in the same write:
    /// the echo of a key with the answer to it.
    Text,
    /// A binary message, written at once.
    Binary,
}

/// How a socket behaves.
#[derive(Debug)]
pub struct SocketConfig {
    /// What goes out.
    pub framing: Framing,
    /// When to ping; `None` never pings and never gives up.
    pub pulse: Option<Pulse>,
    /// How long the rest of the queue and the closing handshake may take, once the socket is closed
    /// or its reader is dropped.
    pub close_timeout: Duration,
}

/// A message that came in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Received {
    /// A text message.
    Text(Bytes),
    /// A binary message.
    Binary(Bytes),
}

/// The reading half of a socket. Once it is dropped, what is queued has
/// [`SocketConfig::close_timeout`] to go out.
#[derive(Debug)]
pub struct SocketReader<T> {
    stream: SplitStream<WebSocketStream<T>>,
    outbound: Outbound,
    pulse: Option<Pulse>,
    /// Pongs that found the way out full.
    owed: usize,
    /// Questions whether something has arrived: pings with a number, answered by a pong with the same.
    marks: Marks,
    signs: Arc<Signs>,
    meter: Option<Meter>,
    /// Tells the write task that nobody listens any more.
    _gone: DropGuard,
}

/// Splits a websocket into its reading half and its write task, which the caller spawns. The task
/// ends when the socket is closed, or every clone of `outbound` is dropped.
pub fn start<T>(
    socket: WebSocketStream<T>,
    (outbound, queue): (Outbound, OutboundQueue),
    config: SocketConfig,
) -> (SocketReader<T>, impl Future<Output = ()> + Send + use<T>)
where
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (sink, stream) = socket.split();
    let signs = outbound.signs().clone();
    signs.has_pings();
    let reader = SocketReader {
        stream,
        pulse: config.pulse,
        owed: 0,
        marks: queue.marks().clone(),
        signs,
        meter: None,
        _gone: outbound.closing().reader_gone.clone().drop_guard(),
        outbound,
    };
    (reader, write(sink, queue, config.framing, config.close_timeout))
}

impl<T: AsyncRead + AsyncWrite + Unpin> SocketReader<T> {
    /// With bytes that come through a [`Budget`](crate::Budget).
    pub(crate) fn with_meter(mut self, meter: Meter) -> Self {
        meter.set_outbound(&self.outbound);
        self.meter = Some(meter);
        self
    }

    /// The peer has ended the connection: nothing is written any more but what is queued.
    pub(crate) fn peer_gone(&self) {
        self.outbound.closing().asked.cancel();
    }

    /// The next message; `None` when the socket has ended. Pings while it waits. Cancel safe.
    pub async fn next(&mut self) -> Option<Result<Received, TransportError>> {
        self.signs.listening(true);
        let item = self.read().await;
        self.signs.listening(false);
        item
    }

    async fn read(&mut self) -> Option<Result<Received, TransportError>> {
        let closing = self.outbound.closing().clone();
        loop {
            let deadline = self.pulse.as_ref().map(Pulse::deadline);
            // What is there is read before the peer is found silent or gone: it may be this side
            // that has not looked for a while.
            let message = tokio::select! {
                biased;
                () = closing.asked.cancelled() => return None,
                message = self.stream.next() => message?,
                () = self.outbound.closed() => return None,
                () = at(deadline) => match self.silence() {
                    Some(error) => return Some(Err(error)),
                    None => continue,
                },
            };
            if let Some(pulse) = &mut self.pulse {
                pulse.heard(Instant::now());
            }
            self.signs.heard();
            let message = match message {
                Ok(message) => message,
                Err(error) => return Some(Err(error.into())),
            };
            if message.is_text() || message.is_binary() {
                if let Some(meter) = &self.meter {
                    meter.took_message();
                }
                let is_text = message.is_text();
                let bytes = Bytes::from(message.into_payload());
                let received = if is_text { Received::Text } else { Received::Binary };
                return Some(Ok(received(bytes)));
            } else if message.is_ping() {
                self.pong().await?;
            } else if message.is_pong() {
                if let Ok(id) = <[u8; 8]>::try_from(&message.as_payload()[..]) {
                    self.marks.answered(u64::from_be_bytes(id));
                }
            } else if message.is_close() {
                return None;
            }
        }
    }

    /// Pings, without reading; resolves when nothing can be written any more. For an owner that
    /// cannot take what would be read. Cancel safe.
    pub async fn pause(&mut self) {
        loop {
            let deadline = self.pulse.as_ref().map(Pulse::deadline);
            tokio::select! {
                () = self.outbound.closed() => return,
                () = at(deadline) => {}
            }
            if let Some(pulse) = &mut self.pulse {
                let now = Instant::now();
                pulse.excuse(now);
                if pulse.due(now) == Due::Ping {
                    self.outbound.ping();
                }
            }
        }
    }

    /// The library has queued the pong; has it written. A peer that pings and does not read is
    /// listened to all the same, since its pings show that it lives, until so many pongs wait for it
    /// that they would fill our memory.
    async fn pong(&mut self) -> Option<()> {
        if self.outbound.try_flush() {
            self.owed = 0;
            return Some(());
        }
        self.owed += 1;
        if self.owed < OWED_PONGS {
            return Some(());
        }
        self.signs.listening(false);
        self.outbound.flush().await.ok()?;
        self.signs.listening(true);
        self.owed = 0;
        Some(())
    }

    /// The deadline has come: ping, or give the peer up.
    fn silence(&mut self) -> Option<TransportError> {
        let (now, pulse) = (Instant::now(), self.pulse.as_mut()?);
        if self.meter.as_ref().is_some_and(Meter::is_waiting) {
            // It is we who do not read.
            pulse.heard(now);
            return None;
        }
        match pulse.due(now) {
            Due::Nothing => None,
            Due::Ping => {
                self.outbound.ping();
                None
            }
            Due::GivingUp => Some(TransportError::Silent { patience: pulse.patience() }),
        }
    }
}

async fn at(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// Empties the queue into the socket, gathering what is there before each flush; then closes it.
/// Once the socket is closed, or the peer has ended it, what is queued is the end of it: whoever
/// still works on an answer must not keep the peer waiting for our own close.
async fn write<T: AsyncRead + AsyncWrite + Unpin>(
    mut sink: SplitSink<WebSocketStream<T>, Message>,
    mut queue: OutboundQueue,
    framing: Framing,
    close_timeout: Duration,
) {
    let given_up = queue.given_up(close_timeout);
    let signs = queue.signs().clone();
    let work = async {
        // Room of messages that are not written yet.
        let (mut unwritten, mut bytes) = (Vec::new(), 0);
        while let Some(first) = queue.recv().await {
            if framing == Framing::Text {
                tokio::task::yield_now().await;
            }
            signs.writing();
            let mut next = Some(first);
            while let Some(queued) = next {
                match queued {
                    Queued::Message(message, room) => {
                        bytes += message.len();
                        sink.feed(match framing {
                            Framing::Text => Message::text(message),
                            Framing::Binary => Message::binary(message),
                        })
                        .await?;
                        signs.written(false);
                        unwritten.push(room);
                    }
                    Queued::Ping => sink.feed(Message::ping("")).await?,
                    Queued::Flush(room) => unwritten.push(room),
                    Queued::Mark(mark) => match queue.marks().await_answer(mark) {
                        Ok(id) => {
                            let number = Bytes::copy_from_slice(&id.to_be_bytes());
                            sink.feed(Message::ping(number)).await?;
                        }
                        Err(mark) => mark.reached(),
                    },
                }
                // A slow peer frees the room of what it takes as it takes it.
                if bytes >= GATHERED {
                    sink.flush().await?;
                    unwritten.clear();
                    bytes = 0;
                }
                next = queue.try_recv();
            }
            sink.flush().await?;
            signs.written(true);
            unwritten.clear();
            bytes = 0;
        }
        if let Some((code, text)) = queue.close_reason() {
            sink.send(Message::close(CloseCode::try_from(code).ok(), text)).await?;
        }
        sink.close().await
    };
    tokio::select! {
        result = work => if let Err(error) = result {
            tracing::debug!(%error, "websocket write ended");
        },
        () = given_up => tracing::debug!("websocket did not close in time"),
    }
}
