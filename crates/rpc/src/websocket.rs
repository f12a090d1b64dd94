//! Websockets: one JSON text a message; text and binary are taken alike.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, Stream, StreamExt, stream};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_websockets::{Error, Limits, Message, WebSocketStream};

use crate::budget::{Meter, Metered};
use crate::connection::{Connection, ConnectionConfig, TransportError};
use crate::outbound::{Marks, Outbound, OutboundQueue, Queued, outbound};
use crate::peer::Signs;

/// The limits to build a websocket with, so that what is a little too long can be answered.
pub fn websocket_limits(config: &ConnectionConfig) -> Limits {
    Limits::default().max_payload_len(Some(config.message_bytes + config.oversize_slack))
}

/// How to build a websocket: small messages gather into one write, large ones go out whole.
pub fn websocket_config() -> tokio_websockets::Config {
    tokio_websockets::Config::default().flush_threshold(64 << 10)
}

impl Connection {
    /// A connection over an established websocket. Spawns its write task.
    pub fn websocket<T>(socket: WebSocketStream<T>, config: &ConnectionConfig) -> Self
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        Self::websocket_with(socket, None, config)
    }

    /// The same over a websocket whose bytes come through a [`Budget`](crate::Budget).
    pub fn metered_websocket<T>(
        socket: WebSocketStream<Metered<T>>,
        meter: Meter,
        config: &ConnectionConfig,
    ) -> Self
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        Self::websocket_with(socket, Some(meter), config)
    }

    fn websocket_with<T>(
        socket: WebSocketStream<T>,
        meter: Option<Meter>,
        config: &ConnectionConfig,
    ) -> Self
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (sink, stream) = socket.split();
        let (outbound, queue) = outbound(config.outbound);
        let reader_gone = CancellationToken::new();
        let peer_gone = CancellationToken::new();
        let marks = queue.marks().clone();
        let signs = outbound.signs().clone();
        signs.has_pings();
        tokio::spawn(write(
            sink,
            queue,
            signs.clone(),
            peer_gone.clone(),
            reader_gone.clone(),
            config.close_timeout,
        ));
        let now = Instant::now();
        let reader = Reader {
            stream,
            outbound: outbound.clone(),
            config: *config,
            heard: now,
            pinged: None,
            owed: 0,
            marks,
            signs,
            meter: meter.clone(),
            peer_gone,
            _gone: reader_gone.drop_guard(),
        };
        if let Some(meter) = &meter {
            meter.set_outbound(&outbound);
        }
        let connection = Self::new(reader.into_stream(), outbound);
        match meter {
            Some(meter) => connection.with_meter(meter),
            None => connection,
        }
    }
}

/// Pongs that may wait for a peer that does not read.
const OWED_PONGS: usize = 256;

struct Reader<T> {
    stream: SplitStream<WebSocketStream<T>>,
    outbound: Outbound,
    config: ConnectionConfig,
    /// When the peer was last heard.
    heard: Instant,
    /// When it was pinged since then.
    pinged: Option<Instant>,
    /// Pongs that found the way out full.
    owed: usize,
    /// Questions whether something has arrived: pings with a number, answered by a pong with the same.
    marks: Marks,
    signs: Arc<Signs>,
    meter: Option<Meter>,
    /// Tells the write task that the peer has ended the connection.
    peer_gone: CancellationToken,
    /// Tells the write task that nobody listens any more.
    _gone: DropGuard,
}

impl<T: AsyncRead + AsyncWrite + Unpin + Send + 'static> Reader<T> {
    fn into_stream(self) -> impl Stream<Item = Result<Bytes, TransportError>> + Send + 'static {
        stream::unfold(Some(self), |reader| async move {
            let mut reader = reader?;
            reader.signs.listening(true);
            let item = reader.next().await;
            reader.signs.listening(false);
            if item.as_ref().is_none_or(|item| item.as_ref().is_err_and(TransportError::is_fatal)) {
                reader.peer_gone.cancel();
            }
            match item? {
                Err(error) if error.is_fatal() => Some((Err(error), None)),
                item => Some((item, Some(reader))),
            }
        })
    }

    async fn next(&mut self) -> Option<Result<Bytes, TransportError>> {
        loop {
            let deadline = self.deadline();
            let message = tokio::select! {
                message = self.stream.next() => message?,
                () = self.outbound.closed() => return None,
                () = due(deadline) => match self.silence() {
                    Some(error) => return Some(Err(error)),
                    None => continue,
                },
            };
            self.heard = Instant::now();
            self.pinged = None;
            self.signs.heard();
            let limit = self.config.message_bytes;
            match message {
                Ok(message) if message.is_text() || message.is_binary() => {
                    if let Some(meter) = &self.meter {
                        meter.took_message();
                    }
                    let bytes = Bytes::from(message.into_payload());
                    if bytes.len() > limit {
                        return Some(Err(TransportError::TooLong { len: bytes.len(), limit }));
                    }
                    return Some(Ok(bytes));
                }
                Ok(message) if message.is_ping() => self.pong().await?,
                Ok(message) if message.is_pong() => {
                    if let Ok(id) = <[u8; 8]>::try_from(&message.as_payload()[..]) {
                        self.marks.answered(u64::from_be_bytes(id));
                    }
                }
                Ok(message) if message.is_close() => return None,
                Ok(_) => {}
                Err(Error::PayloadTooLong { .. }) => {
                    return Some(Err(TransportError::FarTooLong { limit }));
                }
                Err(error) => return Some(Err(error.into())),
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

    fn deadline(&self) -> Option<Instant> {
        let keep_alive = self.config.keep_alive?;
        Some(match self.pinged {
            None => self.heard + keep_alive.idle,
            Some(pinged) => pinged + keep_alive.patience,
        })
    }

    /// The deadline has come: ping, or give the peer up.
    fn silence(&mut self) -> Option<TransportError> {
        let patience = self.config.keep_alive?.patience;
        if self.meter.as_ref().is_some_and(Meter::is_waiting) {
            // It is we who do not read.
            self.heard = Instant::now();
            self.pinged = None;
            return None;
        }
        if self.pinged.is_some() {
            return Some(TransportError::Silent { patience });
        }
        self.pinged = Some(Instant::now());
        self.outbound.ping();
        None
    }
}

async fn due(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// Empties the queue into the socket, gathering what is there before each flush; then closes it.
/// Once the peer has ended the connection, what is queued is the end of it: whoever still works on
/// an answer must not keep the peer waiting for our own close. Once nobody listens any more the rest
/// has `close_timeout` to go out.
async fn write<T: AsyncRead + AsyncWrite + Unpin>(
    mut sink: SplitSink<WebSocketStream<T>, Message>,
    mut queue: OutboundQueue,
    signs: Arc<Signs>,
    peer_gone: CancellationToken,
    reader_gone: CancellationToken,
    close_timeout: Duration,
) {
    let work = async {
        // Shares of the queue whose messages are not written yet.
        let mut unwritten = Vec::new();
        loop {
            let mut next = tokio::select! {
                biased;
                first = queue.recv() => first,
                () = peer_gone.cancelled() => None,
            };
            if next.is_none() {
                break;
            }
            // Whatever else this turn of the loop brings goes out in the same write: the echo of a
            // key with the answer to it.
            tokio::task::yield_now().await;
            signs.writing();
            while let Some(queued) = next {
                match queued {
                    Queued::Message(bytes, share) => {
                        sink.feed(Message::text(bytes)).await?;
                        signs.written(false);
                        unwritten.push(share);
                    }
                    Queued::Ping => sink.feed(Message::ping("")).await?,
                    Queued::Flush(share) => unwritten.push(share),
                    Queued::Mark(mark) => match queue.marks().await_answer(mark) {
                        Ok(id) => {
                            let number = Bytes::copy_from_slice(&id.to_be_bytes());
                            sink.feed(Message::ping(number)).await?;
                        }
                        Err(mark) => mark.reached(),
                    },
                }
                next = queue.try_recv();
            }
            sink.flush().await?;
            signs.written(true);
            unwritten.clear();
        }
        sink.close().await
    };
    let given_up = async {
        reader_gone.cancelled().await;
        sleep(close_timeout).await;
    };
    tokio::select! {
        result = work => if let Err(error) = result {
            tracing::debug!(%error, "websocket write ended");
        },
        () = given_up => tracing::debug!("websocket did not close in time"),
    }
}
