//! One websocket: a queue bounded in bytes towards it, frames out of it.
//!
//! Invariant: a socket that takes nothing makes whoever writes to it wait, and is closed if it
//! takes nothing for [`Config::stall_timeout`]; it never makes the service grow.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use codex_exec_relay_core::{Body, Frame, StreamId};
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tokio_websockets::{CloseCode, Limits, Message, WebSocketStream};

use crate::config::Config;
use crate::rate::Pace;

/// What the queue charges for a frame besides its length, so that tiny ones are bounded too.
const OVERHEAD: usize = 128;

/// Why a socket is closed: a code of RFC 6455 and a word for whoever looks at the wire.
pub(crate) type Reason = (u16, &'static str);

pub(crate) const GOING_AWAY: Reason = (1012, "service restart");
pub(crate) const REPLACED: Reason = (1000, "replaced by a newer socket");
pub(crate) const REGISTERED_AGAIN: Reason = (1000, "replaced by a newer registration");
pub(crate) const REMOVED: Reason = (1008, "environment removed");
pub(crate) const REVOKED: Reason = (1008, "token no longer valid");
pub(crate) const OFFLINE: Reason = (1000, "environment offline");
pub(crate) const STALLED: Reason = (1008, "too slow");
const SILENT: Reason = (1001, "no pong");
pub(crate) const ENDED: Reason = (1000, "");

/// All reasons, by the number that other nodes know them by; new ones go to the end.
pub(crate) const REASONS: [Reason; 9] =
    [ENDED, GOING_AWAY, REPLACED, REGISTERED_AGAIN, REMOVED, REVOKED, OFFLINE, STALLED, SILENT];

/// The way to a socket; clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Outbound {
    queue: mpsc::UnboundedSender<Queued>,
    room: Arc<Semaphore>,
    capacity: usize,
    closing: Arc<Closing>,
}

#[derive(Debug, Default)]
struct Closing {
    reason: OnceLock<Reason>,
    asked: CancellationToken,
}

#[derive(Debug)]
enum Queued {
    Frame(Bytes, Option<OwnedSemaphorePermit>),
    Ping,
    /// Have the library write the pong it has ready.
    Flush(#[allow(dead_code, reason = "held until it is written")] OwnedSemaphorePermit),
}

/// The socket's own end of the queue.
#[derive(Debug)]
pub(crate) struct Queue {
    queue: mpsc::UnboundedReceiver<Queued>,
    room: Arc<Semaphore>,
    closing: Arc<Closing>,
}

/// A queue for one socket.
pub(crate) fn queue(config: &Config) -> (Outbound, Queue) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let room = Arc::new(Semaphore::new(config.queue_bytes));
    let closing = Arc::new(Closing::default());
    let outbound = Outbound {
        queue: sender,
        room: room.clone(),
        capacity: config.queue_bytes,
        closing: closing.clone(),
    };
    (outbound, Queue { queue: receiver, room, closing })
}

impl Outbound {
    /// Queues a frame, waiting for room; `false` if the socket is gone, or was closed because it
    /// took nothing for too long.
    pub(crate) async fn deliver(&self, frame: Bytes, config: &Config) -> bool {
        let share = self.share(frame.len());
        let permit = match self.room.clone().try_acquire_many_owned(share) {
            Ok(permit) => permit,
            Err(_) => {
                let room = self.room.clone().acquire_many_owned(share);
                match timeout(config.stall_timeout, room).await {
                    Ok(Ok(permit)) => permit,
                    Ok(Err(_)) => return false,
                    Err(_) => {
                        self.close(STALLED);
                        return false;
                    }
                }
            }
        };
        self.queue.send(Queued::Frame(frame, Some(permit))).is_ok()
    }

    /// Tells the end of a stream, without waiting. There is one such frame per stream at most, so
    /// it needs no room.
    pub(crate) fn reset(&self, stream: &str, reason: &str) {
        if let Some(frame) = reset_frame(stream, reason) {
            let _ = self.queue.send(Queued::Frame(frame, None));
        }
    }

    /// Tells that there is no such stream, if there is room to say so.
    pub(crate) fn refuse(&self, stream: &str, reason: &str) {
        if let Some(frame) = reset_frame(stream, reason)
            && let Ok(permit) = self.room.clone().try_acquire_many_owned(self.share(frame.len()))
        {
            let _ = self.queue.send(Queued::Frame(frame, Some(permit)));
        }
    }

    /// Closes the socket after what is queued; the first reason counts.
    pub(crate) fn close(&self, reason: Reason) {
        let _ = self.closing.reason.set(reason);
        self.closing.asked.cancel();
    }

    async fn flush(&self) -> bool {
        match self.room.clone().acquire_many_owned(self.share(0)).await {
            Ok(permit) => self.queue.send(Queued::Flush(permit)).is_ok(),
            Err(_) => false,
        }
    }

    fn share(&self, len: usize) -> u32 {
        u32::try_from((len + OVERHEAD).min(self.capacity)).unwrap_or(u32::MAX)
    }
}

fn reset_frame(stream: &str, reason: &str) -> Option<Bytes> {
    let body = Body::Reset { reason: reason.to_owned() };
    Some(Frame::new(StreamId::new(stream)?, 0, 0, body).encode())
}

impl Queue {
    /// The next frame and its share of the room, for whoever passes frames on to something that is
    /// no websocket; `None` once all is said.
    pub(crate) async fn next(&mut self) -> Option<(Bytes, Option<OwnedSemaphorePermit>)> {
        loop {
            let queued = tokio::select! {
                biased;
                queued = self.queue.recv() => queued,
                () = self.closing.asked.cancelled() => None,
            };
            match queued? {
                Queued::Frame(frame, share) => return Some((frame, share)),
                Queued::Ping | Queued::Flush(_) => {}
            }
        }
    }

    /// Why it is closed, once it is.
    pub(crate) fn reason(&self) -> Reason {
        self.closing.reason.get().copied().unwrap_or(ENDED)
    }

    /// Resolves once the queue has been closed for `patience`.
    pub(crate) fn given_up(&self, patience: Duration) -> impl Future<Output = ()> + use<> {
        let closing = self.closing.clone();
        async move {
            closing.asked.cancelled().await;
            sleep(patience).await;
        }
    }
}

/// Once nobody writes, nobody may wait for room.
impl Drop for Queue {
    fn drop(&mut self) {
        self.room.close();
    }
}

/// How to build the websocket: small frames gather into one write, large ones go out whole.
pub(crate) fn builder(config: &Config) -> tokio_websockets::ServerBuilder {
    tokio_websockets::ServerBuilder::new()
        .config(tokio_websockets::Config::default().flush_threshold(64 << 10))
        .limits(Limits::default().max_payload_len(Some(config.message_bytes)))
}

/// What came in.
#[derive(Debug)]
pub(crate) enum Received {
    /// A binary message.
    Frame(Bytes),
    /// A text message, which is never a frame.
    Text,
}

/// The reading half. Dropping it closes the socket.
#[derive(Debug)]
pub(crate) struct Reader<T> {
    stream: SplitStream<WebSocketStream<T>>,
    outbound: Outbound,
    config: Arc<Config>,
    pace: Pace,
    heard: Instant,
    pinged: Option<Instant>,
}

/// Starts the writing half of a socket and gives its reading half.
pub(crate) fn start<T>(
    socket: WebSocketStream<T>,
    outbound: Outbound,
    queue: Queue,
    config: Arc<Config>,
    tasks: &tokio_util::task::TaskTracker,
) -> Reader<T>
where
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (sink, stream) = socket.split();
    tasks.spawn(write(sink, queue, config.clone()));
    let pace = Pace::new(config.frames_per_second);
    Reader { stream, outbound, config, pace, heard: Instant::now(), pinged: None }
}

impl<T: AsyncRead + AsyncWrite + Unpin> Reader<T> {
    /// The next message; `None` once the socket is done.
    pub(crate) async fn next(&mut self) -> Option<Received> {
        self.pace.wait().await;
        let closing = self.outbound.closing.clone();
        loop {
            let deadline = match self.pinged {
                None => self.heard + self.config.ping_after,
                Some(pinged) => pinged + self.config.pong_within,
            };
            let message = tokio::select! {
                biased;
                () = closing.asked.cancelled() => return None,
                message = self.stream.next() => message?,
                () = sleep_until(deadline) => {
                    if self.pinged.is_some() {
                        self.outbound.close(SILENT);
                        return None;
                    }
                    self.pinged = Some(Instant::now());
                    let _ = self.outbound.queue.send(Queued::Ping);
                    continue;
                }
            };
            self.heard = Instant::now();
            self.pinged = None;
            match message {
                Ok(message) if message.is_binary() => {
                    return Some(Received::Frame(message.into_payload().into()));
                }
                Ok(message) if message.is_text() => return Some(Received::Text),
                Ok(message) if message.is_ping() => {
                    if !self.outbound.flush().await {
                        return None;
                    }
                }
                Ok(message) if message.is_close() => return None,
                Ok(_) => {}
                Err(error) => {
                    tracing::debug!(%error, "websocket ended");
                    return None;
                }
            }
        }
    }
}

impl<T> Drop for Reader<T> {
    fn drop(&mut self) {
        self.outbound.close(ENDED);
    }
}

/// Empties the queue into the socket, gathering what is there before each flush. Once the socket
/// is to be closed the rest has `close_timeout` to go out.
async fn write<T: AsyncRead + AsyncWrite + Unpin>(
    mut sink: SplitSink<WebSocketStream<T>, Message>,
    mut queue: Queue,
    config: Arc<Config>,
) {
    let closing = queue.closing.clone();
    let given_up = queue.given_up(config.close_timeout);
    let work = async {
        loop {
            let first = tokio::select! {
                biased;
                queued = queue.queue.recv() => queued,
                () = closing.asked.cancelled() => None,
            };
            let Some(first) = first else { break };
            let mut next = Some(first);
            while let Some(queued) = next {
                match queued {
                    // The share is given back once the socket has taken all but the last few.
                    Queued::Frame(frame, _share) => sink.feed(Message::binary(frame)).await?,
                    Queued::Ping => sink.feed(Message::ping("")).await?,
                    Queued::Flush(_) => {}
                }
                next = queue.queue.try_recv().ok();
            }
            sink.flush().await?;
        }
        let (code, word) = closing.reason.get().copied().unwrap_or(ENDED);
        sink.send(Message::close(CloseCode::try_from(code).ok(), word)).await?;
        sink.close().await
    };
    tokio::select! {
        result = work => if let Err(error) = result {
            tracing::debug!(%error, "websocket write ended");
        },
        () = given_up => tracing::debug!("websocket did not close in time"),
    }
    // Whatever the reason that nothing can be written: reading is over too.
    closing.asked.cancel();
}
