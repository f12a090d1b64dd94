//! The outbound queue of a connection, bounded in bytes and drained by the connection's write task.
//!
//! Invariant: queued bytes that the operating system has not taken never exceed
//! [`OutboundConfig::queue_bytes`], except for one larger message alone. Senders wait for room in
//! arrival order, so a peer that stops reading blocks its senders and does not grow this process.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::peer::{Liveness, Peer};

/// Why a websocket is closed: a status code of RFC 6455 and a text for people.
pub type CloseReason = (u16, &'static str);

/// Limits of an outbound queue.
#[derive(Debug, Clone, Copy)]
pub struct OutboundConfig {
    /// Bytes that may wait for the socket (default 512 KiB); senders wait above it.
    pub queue_bytes: usize,
}

impl Default for OutboundConfig {
    fn default() -> Self {
        Self { queue_bytes: 512 << 10 }
    }
}

/// Bytes that the queue charges for a message besides its length, so that tiny ones are bounded too.
const OVERHEAD: usize = 128;

/// The connection has ended; nothing more can be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the connection has ended")]
pub struct Closed;

/// Sends messages; clones share the queue. The connection closes when the last clone is dropped.
#[derive(Debug, Clone)]
pub struct Outbound {
    queue: mpsc::UnboundedSender<Queued>,
    room: Arc<Semaphore>,
    capacity: usize,
    marks: Marks,
    liveness: Arc<Liveness>,
    closing: Arc<Closing>,
}

/// How a connection is closed.
#[derive(Debug, Default)]
pub(crate) struct Closing {
    reason: OnceLock<CloseReason>,
    /// Cancelled when only messages already queued may still be written.
    pub(crate) requested: CancellationToken,
    /// Cancelled when the reader is dropped.
    pub(crate) reader_gone: CancellationToken,
    /// Cancelled when the connection has lost its memory, which its messages hold: then nothing more is
    /// written.
    pub(crate) revoked: OnceLock<CancellationToken>,
}

/// An entry of the queue, for the write task.
#[derive(Debug)]
pub(crate) enum Queued {
    /// A message, and the room it takes until it is written.
    Message(Bytes, OwnedSemaphorePermit),
    /// A keep-alive ping.
    Ping,
    /// Write what the transport itself has pending (a pong). Its room bounds how many there are.
    Flush(OwnedSemaphorePermit),
    /// Report when everything before this has reached the peer.
    Mark(Mark),
}

/// A delivery check: [`Outbound::arrived`].
#[derive(Debug)]
pub(crate) struct Mark {
    reached: oneshot::Sender<()>,
}

impl Mark {
    /// Reports that everything before it has reached the peer, as far as the transport can tell.
    pub(crate) fn reached(self) {
        let _ = self.reached.send(());
    }
}

/// The marks that wait for a pong.
#[derive(Debug, Clone, Default)]
pub(crate) struct Marks(Arc<Mutex<MarkState>>);

#[derive(Debug, Default)]
struct MarkState {
    last_id: u64,
    marks: HashMap<u64, Mark>,
    /// How many [`NotReading`] guards are alive; pongs cannot be read meanwhile.
    not_reading: usize,
}

impl Marks {
    /// Registers a mark and returns the number for its ping. Returns the mark if no pong could be read.
    pub(crate) fn await_pong(&self, mark: Mark) -> Result<u64, Mark> {
        let mut awaited = self.lock();
        if awaited.not_reading > 0 {
            return Err(mark);
        }
        awaited.last_id += 1;
        let id = awaited.last_id;
        awaited.marks.insert(id, mark);
        Ok(id)
    }

    /// Handles the pong with this number: the peer has everything that was sent before.
    pub(crate) fn answered(&self, id: u64) {
        let mark = self.lock().marks.remove(&id);
        if let Some(mark) = mark {
            mark.reached();
        }
    }

    fn lock(&self) -> MutexGuard<'_, MarkState> {
        self.0.lock()
    }
}

/// A guard: this side does not read. See [`Outbound::not_reading`].
#[derive(Debug)]
pub struct NotReading {
    marks: Marks,
    liveness: Arc<Liveness>,
}

impl Drop for NotReading {
    fn drop(&mut self) {
        self.marks.lock().not_reading -= 1;
        self.liveness.not_reading(-1);
    }
}

/// The receiving end of the queue, for the write task or another transport.
#[derive(Debug)]
pub struct OutboundQueue {
    queue: mpsc::UnboundedReceiver<Queued>,
    room: Arc<Semaphore>,
    marks: Marks,
    liveness: Arc<Liveness>,
    closing: Arc<Closing>,
}

/// The room that a message takes in the queue, released on drop.
#[derive(Debug)]
pub struct Room {
    _permit: OwnedSemaphorePermit,
}

/// A reservation for one message.
#[derive(Debug)]
pub struct Slot {
    queue: mpsc::UnboundedSender<Queued>,
    permit: OwnedSemaphorePermit,
}

impl Slot {
    /// Queues the message. It takes the room that was reserved, whatever its length.
    pub fn send(self, message: impl Into<Bytes>) {
        // A closed queue drops the message; the next reservation fails.
        let _ = self.queue.send(Queued::Message(message.into(), self.permit));
    }
}

/// Makes a queue and returns both of its ends.
pub fn outbound(config: OutboundConfig) -> (Outbound, OutboundQueue) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let room = Arc::new(Semaphore::new(config.queue_bytes));
    let (marks, liveness, closing) = (Marks::default(), Arc::default(), Arc::default());
    let outbound =
        Outbound { queue: sender, room, capacity: config.queue_bytes, marks, liveness, closing };
    let queue = OutboundQueue {
        queue: receiver,
        room: outbound.room.clone(),
        marks: outbound.marks.clone(),
        liveness: outbound.liveness.clone(),
        closing: outbound.closing.clone(),
    };
    (outbound, queue)
}

impl Outbound {
    /// Waits for room for a message of `len` bytes.
    pub async fn reserve(&self, len: usize) -> Result<Slot, Closed> {
        Ok(Slot { queue: self.queue.clone(), permit: self.room_for(len).await? })
    }

    /// Reserves room for a message of `len` bytes, if there is room now.
    pub fn try_reserve(&self, len: usize) -> Option<Slot> {
        let permit = self.room.clone().try_acquire_many_owned(self.share(len)).ok()?;
        Some(Slot { queue: self.queue.clone(), permit })
    }

    /// Waits for room and queues the message.
    pub async fn send(&self, message: impl Into<Bytes>) -> Result<(), Closed> {
        let message = message.into();
        self.reserve(message.len()).await?.send(message);
        Ok(())
    }

    /// Queues a message even without room, for callers that cannot wait. The caller must bound how many
    /// there are.
    pub fn send_now(&self, message: impl Into<Bytes>) {
        if let Ok(permit) = self.room.clone().try_acquire_many_owned(0) {
            Slot { queue: self.queue.clone(), permit }.send(message);
        }
    }

    /// Resolves when everything sent so far is written, or the connection has ended.
    pub async fn drained(&self) {
        let all = u32::try_from(self.capacity).unwrap_or(u32::MAX);
        let _ = self.room.acquire_many(all).await;
    }

    /// Resolves when the connection has ended.
    pub async fn closed(&self) {
        self.queue.closed().await;
    }

    /// Whether the connection has ended.
    pub fn is_closed(&self) -> bool {
        self.queue.is_closed()
    }

    /// Closes the connection after the messages already queued, even if other senders remain. The
    /// first reason counts.
    pub fn close(&self, reason: CloseReason) {
        let _ = self.closing.reason.set(reason);
        self.closing.requested.cancel();
    }

    pub(crate) fn closing(&self) -> &Arc<Closing> {
        &self.closing
    }

    /// Resolves when everything sent so far has reached the peer's program, past all buffers of the
    /// operating systems; never resolves once the connection has ended. A transport without pings
    /// resolves when the bytes are written. The check takes no room in the queue, so use few at a time.
    pub fn arrived(&self) -> impl Future<Output = ()> + Send + use<> {
        let (reached, answer) = oneshot::channel();
        let _ = self.queue.send(Queued::Mark(Mark { reached }));
        async move {
            if answer.await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// For a reader that pauses: until the guard is dropped, written bytes count as
    /// [arrived](Self::arrived). The pong would be behind data that is not read, and the reader may be
    /// waiting for the very caller that waits for the pong.
    pub fn not_reading(&self) -> NotReading {
        let unheard = {
            let mut awaited = self.marks.lock();
            awaited.not_reading += 1;
            std::mem::take(&mut awaited.marks)
        };
        unheard.into_values().for_each(Mark::reached);
        self.liveness.not_reading(1);
        NotReading { marks: self.marks.clone(), liveness: self.liveness.clone() }
    }

    /// Queues a keep-alive ping, if the transport has pings. It takes no room; send few.
    pub fn ping(&self) {
        let _ = self.queue.send(Queued::Ping);
    }

    /// The peer, for liveness checks.
    pub fn peer(&self) -> Peer {
        Peer { queue: self.queue.downgrade(), liveness: self.liveness.clone() }
    }

    /// Where the transport records the activity of its peer.
    pub(crate) fn liveness(&self) -> &Arc<Liveness> {
        &self.liveness
    }

    /// Has the transport's own replies written, if there is room now.
    pub(crate) fn try_flush(&self) -> bool {
        match self.room.clone().try_acquire_many_owned(self.share(0)) {
            Ok(permit) => self.queue.send(Queued::Flush(permit)).is_ok(),
            Err(_) => false,
        }
    }

    /// Has the transport's own replies written, waiting for room if the peer does not read them.
    pub(crate) async fn flush(&self) -> Result<(), Closed> {
        let permit = self.room_for(0).await?;
        self.queue.send(Queued::Flush(permit)).map_err(|_| Closed)
    }

    async fn room_for(&self, len: usize) -> Result<OwnedSemaphorePermit, Closed> {
        self.room.clone().acquire_many_owned(self.share(len)).await.map_err(|_| Closed)
    }

    fn share(&self, len: usize) -> u32 {
        u32::try_from((len + OVERHEAD).min(self.capacity)).unwrap_or(u32::MAX)
    }
}

impl OutboundQueue {
    /// The next message and its room, for transports without pings; `None` once the connection is
    /// closed and the queue is empty. Cancel safe.
    pub async fn next_message(&mut self) -> Option<(Bytes, Room)> {
        loop {
            match self.recv().await? {
                Queued::Message(message, permit) => {
                    return Some((message, Room { _permit: permit }));
                }
                Queued::Mark(mark) => mark.reached(),
                Queued::Ping | Queued::Flush(_) => {}
            }
        }
    }

    /// Why the connection was [closed](Outbound::close), if it was.
    pub fn close_reason(&self) -> Option<CloseReason> {
        self.closing.reason.get().copied()
    }

    /// Resolves `timeout` after the connection was closed or its reader was dropped, or once its shares
    /// of a [budget](crate::Budget) are revoked.
    pub fn close_deadline(&self, timeout: Duration) -> impl Future<Output = ()> + Send + use<> {
        let closing = self.closing.clone();
        async move {
            let closed = async {
                tokio::select! {
                    () = closing.requested.cancelled() => {}
                    () = closing.reader_gone.cancelled() => {}
                }
                tokio::time::sleep(timeout).await;
            };
            // The socket's own error may wake the reader instead of the writer: both write, the reader its
            // pongs.
            match closing.revoked.get() {
                Some(revoked) => tokio::select! {
                    () = closed => {}
                    () = revoked.cancelled() => {}
                },
                None => closed.await,
            }
        }
    }

    pub(crate) fn marks(&self) -> &Marks {
        &self.marks
    }

    pub(crate) fn liveness(&self) -> &Arc<Liveness> {
        &self.liveness
    }

    /// The next entry; `None` once the queue is empty and closed.
    pub(crate) async fn recv(&mut self) -> Option<Queued> {
        tokio::select! {
            biased;
            queued = self.queue.recv() => queued,
            () = self.closing.requested.cancelled() => None,
        }
    }

    pub(crate) fn try_recv(&mut self) -> Option<Queued> {
        self.queue.try_recv().ok()
    }
}

/// Without a writer, senders must not wait for room, and callers not for a reply of the peer.
impl Drop for OutboundQueue {
    fn drop(&mut self) {
        self.room.close();
        self.queue.close();
        self.liveness.ended();
    }
}
