//! One framed socket: a websocket behind a queue bounded in bytes, with keep-alive.
//!
//! JSON-RPC connections, the relay socket of either end and the sockets of a rendezvous use it. They
//! differ in the kind of message ([`Framing`]), in when they ping ([`KeepAliveTimer`]), and in what they
//! do with incoming messages.
//!
//! Invariant: reading and writing do not wait for each other, except that a peer which pings and does
//! not read is not read either once `MAX_PENDING_PONGS` pongs wait for it.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::DropGuard;
use tokio_websockets::{CloseCode, Message, WebSocketStream};

use crate::connection::TransportError;
use crate::keep_alive::{Due, KeepAliveTimer};
use crate::metered::Meter;
use crate::outbound::{Marks, Outbound, OutboundQueue, Queued};
use crate::peer::Liveness;

/// How many pongs may wait for a peer that does not read.
const MAX_PENDING_PONGS: usize = 256;

/// Bytes that are collected before a flush.
const FLUSH_BYTES: usize = 64 << 10;

/// How to build a websocket: small messages gather into one write, large ones go out whole.
pub fn websocket_config() -> tokio_websockets::Config {
    tokio_websockets::Config::default().flush_threshold(FLUSH_BYTES)
}

/// How a queued message is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framing {
    /// As a text message. Messages that are queued in the same turn of the event loop share a write,
    /// such as a keystroke's echo and the response to it.
    Text,
    /// As a binary message, written at once.
    Binary,
}

/// How a socket behaves.
#[derive(Debug)]
pub struct SocketConfig {
    /// How queued messages are sent.
    pub framing: Framing,
    /// When to ping; `None` never pings and never gives up.
    pub keep_alive: Option<KeepAliveTimer>,
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

/// The reading half of a socket. Once it is dropped, queued messages have
/// [`SocketConfig::close_timeout`] to be written.
#[derive(Debug)]
pub struct SocketReader<T> {
    stream: SplitStream<WebSocketStream<T>>,
    outbound: Outbound,
    timer: Option<KeepAliveTimer>,
    /// Pongs that found the outbound queue full.
    pending_pongs: usize,
    /// Delivery checks: pings with a number, whose pongs carry the same number.
    marks: Marks,
    liveness: Arc<Liveness>,
    meter: Option<Meter>,
    /// Tells the write task that the reader is gone.
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
    let liveness = outbound.liveness().clone();
    liveness.has_pings();
    let reader = SocketReader {
        stream,
        timer: config.keep_alive,
        pending_pongs: 0,
        marks: queue.marks().clone(),
        liveness,
        meter: None,
        _gone: outbound.closing().reader_gone.clone().drop_guard(),
        outbound,
    };
    (reader, write(sink, queue, config.framing, config.close_timeout))
}

impl<T: AsyncRead + AsyncWrite + Unpin> SocketReader<T> {
    /// Sets the meter of a socket that reads within a [`Budget`](crate::Budget).
    pub(crate) fn with_meter(mut self, meter: Meter) -> Self {
        meter.set_outbound(&self.outbound);
        self.meter = Some(meter);
        self
    }

    /// Notes that the peer closed the connection: the write task ends after the queue.
    pub(crate) fn peer_gone(&self) {
        self.outbound.closing().requested.cancel();
    }

    /// The next message; `None` when the socket has ended. Pings while it waits. Cancel safe.
    pub async fn next(&mut self) -> Option<Result<Received, TransportError>> {
        self.liveness.listening(true);
        let item = self.read().await;
        self.liveness.listening(false);
        item
    }

    async fn read(&mut self) -> Option<Result<Received, TransportError>> {
        let closing = self.outbound.closing().clone();
        loop {
            let deadline = self.timer.as_ref().map(KeepAliveTimer::deadline);
            // Read what is there before declaring the peer silent or gone: this side may have been
            // the slow one.
            let message = tokio::select! {
                biased;
                () = closing.requested.cancelled() => return None,
                message = self.stream.next() => message?,
                () = self.outbound.closed() => return None,
                () = sleep_until_deadline(deadline) => match self.on_deadline() {
                    Some(error) => return Some(Err(error)),
                    None => continue,
                },
            };
            if let Some(timer) = &mut self.timer {
                timer.heard(Instant::now());
            }
            self.liveness.heard();
            let message = match message {
                Ok(message) => message,
                Err(error) => return Some(Err(error.into())),
            };
            if message.is_text() || message.is_binary() {
                if let Some(meter) = &self.meter {
                    meter.on_message_taken();
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

    /// Pings without reading, for an owner that has no room for messages. Resolves when the socket can
    /// no longer be written to. Cancel safe.
    pub async fn pause(&mut self) {
        loop {
            let deadline = self.timer.as_ref().map(KeepAliveTimer::deadline);
            tokio::select! {
                () = self.outbound.closed() => return,
                () = sleep_until_deadline(deadline) => {}
            }
            if let Some(timer) = &mut self.timer {
                let now = Instant::now();
                timer.on_not_reading(now);
                if timer.due(now) == Due::Ping {
                    self.outbound.ping();
                }
            }
        }
    }

    /// Flushes the pong that the library has queued. A peer that pings and does not read is still read,
    /// since its pings show that it is alive, until [`MAX_PENDING_PONGS`] pongs wait for it.
    async fn pong(&mut self) -> Option<()> {
        if self.outbound.try_flush() {
            self.pending_pongs = 0;
            return Some(());
        }
        self.pending_pongs += 1;
        if self.pending_pongs < MAX_PENDING_PONGS {
            return Some(());
        }
        self.liveness.listening(false);
        self.outbound.flush().await.ok()?;
        self.liveness.listening(true);
        self.pending_pongs = 0;
        Some(())
    }

    /// Handles the keep-alive deadline: pings, or gives the peer up.
    fn on_deadline(&mut self) -> Option<TransportError> {
        let (now, timer) = (Instant::now(), self.timer.as_mut()?);
        if self.meter.as_ref().is_some_and(Meter::is_waiting) {
            // This side does not read.
            timer.heard(now);
            return None;
        }
        match timer.due(now) {
            Due::Nothing => None,
            Due::Ping => {
                self.outbound.ping();
                None
            }
            Due::GiveUp => Some(TransportError::Silent { timeout: timer.timeout() }),
        }
    }
}

async fn sleep_until_deadline(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// Writes the queue to the socket, flushing after each batch, and closes the socket at the end. Once
/// either side has closed it, only messages already queued are written: a request still in progress must
/// not delay the close.
async fn write<T: AsyncRead + AsyncWrite + Unpin>(
    mut sink: SplitSink<WebSocketStream<T>, Message>,
    mut queue: OutboundQueue,
    framing: Framing,
    close_timeout: Duration,
) {
    let given_up = queue.close_deadline(close_timeout);
    let liveness = queue.liveness().clone();
    let work = async {
        // Room of messages that are not flushed yet.
        let (mut unwritten, mut bytes) = (Vec::new(), 0);
        while let Some(first) = queue.recv().await {
            if framing == Framing::Text {
                tokio::task::yield_now().await;
            }
            liveness.writing();
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
                        liveness.written(false);
                        unwritten.push(room);
                    }
                    Queued::Ping => sink.feed(Message::ping("")).await?,
                    Queued::Flush(room) => unwritten.push(room),
                    Queued::Mark(mark) => match queue.marks().await_pong(mark) {
                        Ok(id) => {
                            let number = Bytes::copy_from_slice(&id.to_be_bytes());
                            sink.feed(Message::ping(number)).await?;
                        }
                        Err(mark) => mark.reached(),
                    },
                }
                // Flushing here frees room gradually for a slow peer.
                if bytes >= FLUSH_BYTES {
                    sink.flush().await?;
                    unwritten.clear();
                    bytes = 0;
                }
                next = queue.try_recv();
            }
            sink.flush().await?;
            liveness.written(true);
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
