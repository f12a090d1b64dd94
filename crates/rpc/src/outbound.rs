//! The way out of a connection: a queue bounded in bytes, emptied by the connection's write task.
//!
//! Invariant: what is queued and not yet handed to the operating system never passes
//! [`OutboundConfig::queue_bytes`] (one larger message alone excepted). Whoever sends into a full
//! queue waits, first come first served; so a peer that stops reading makes its senders wait and
//! does not make this process grow.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::peer::{Liveness, Peer};

/// Why a websocket is closed: a status code of RFC 6455 and a text for people who read the wire.
pub type CloseReason = (u16, &'static str);

/// The bounds of a connection's way out.
#[derive(Debug, Clone, Copy)]
pub struct OutboundConfig {
    /// Bytes that may wait for the socket. Default 512 KiB.
    pub queue_bytes: usize,
}

impl Default for OutboundConfig {
    fn default() -> Self {
        Self { queue_bytes: 512 << 10 }
    }
}

/// What the queue charges for a message besides its length, so that tiny ones are bounded too.
const OVERHEAD: usize = 128;

/// The connection has ended; nothing more can be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the connection has ended")]
pub struct Closed;

/// A handle to send messages; clones share the queue. The connection closes when the last is gone.
#[derive(Debug, Clone)]
pub struct Outbound {
    queue: mpsc::UnboundedSender<Queued>,
    room: Arc<Semaphore>,
    capacity: usize,
    marks: Marks,
    liveness: Arc<Liveness>,
    closing: Arc<Closing>,
}

/// How a connection comes to its end.
#[derive(Debug, Default)]
pub(crate) struct Closing {
    reason: OnceLock<CloseReason>,
    /// Cancelled when nothing but what is queued is to be written.
    pub(crate) requested: CancellationToken,
    /// Cancelled when the reading side is gone.
    pub(crate) reader_gone: CancellationToken,
}

/// What the write task takes from the queue.
#[derive(Debug)]
pub(crate) enum Queued {
    /// A message, and its share of the queue until it is written.
    Message(Bytes, OwnedSemaphorePermit),
    /// A keep-alive ping.
    Ping,
    /// Write what the transport itself has pending (a pong); bounds how much of it there can be.
    Flush(OwnedSemaphorePermit),
    /// Find out when everything before this has reached the peer.
    Mark(Mark),
}

/// A question for the peer: [`Outbound::arrived`].
#[derive(Debug)]
pub(crate) struct Mark {
    reached: oneshot::Sender<()>,
}

impl Mark {
    /// Everything before it has reached the peer, as far as the transport can tell.
    pub(crate) fn reached(self) {
        let _ = self.reached.send(());
    }
}

/// The marks whose answers are awaited.
#[derive(Debug, Clone, Default)]
pub(crate) struct Marks(Arc<Mutex<MarkState>>);

#[derive(Debug, Default)]
struct MarkState {
    last_id: u64,
    marks: HashMap<u64, Mark>,
    /// Those for whom no answer can be read.
    not_reading: usize,
}

impl Marks {
    /// Takes a mark to be asked for. Gives it back if no answer would be heard.
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

    /// The peer has answered: it has everything that was sent before.
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

/// See [`Outbound::not_reading`].
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

/// The other end of the queue: the write task's, or that of a transport of the caller's making.
#[derive(Debug)]
pub struct OutboundQueue {
    queue: mpsc::UnboundedReceiver<Queued>,
    room: Arc<Semaphore>,
    marks: Marks,
    liveness: Arc<Liveness>,
    closing: Arc<Closing>,
}

/// The room that a message takes in the queue, until this is dropped.
#[derive(Debug)]
pub struct Room {
    _permit: OwnedSemaphorePermit,
}

/// Room in the queue, held until the message is written.
#[derive(Debug)]
pub struct Slot {
    queue: mpsc::UnboundedSender<Queued>,
    permit: OwnedSemaphorePermit,
}

impl Slot {
    /// Queues the message. The room taken stays what was reserved.
    pub fn send(self, message: impl Into<Bytes>) {
        // A closed queue drops the message; whoever cares learns it from the next reservation.
        let _ = self.queue.send(Queued::Message(message.into(), self.permit));
    }
}

/// A queue, to send into and to take from.
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

    /// Room for a message of `len` bytes, if there is some now.
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

    /// Queues a message whether or not there is room, for those that cannot wait. The caller bounds
    /// how many of them there can be.
    pub fn send_now(&self, message: impl Into<Bytes>) {
        if let Ok(permit) = self.room.clone().try_acquire_many_owned(0) {
            Slot { queue: self.queue.clone(), permit }.send(message);
        }
    }

    /// Resolves when everything that was sent so far has been written, or never will be.
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

    /// Closes the connection after what is queued, whoever else could still send. The first reason
    /// counts.
    pub fn close(&self, reason: CloseReason) {
        let _ = self.closing.reason.set(reason);
        self.closing.requested.cancel();
    }

    pub(crate) fn closing(&self) -> &Arc<Closing> {
        &self.closing
    }

    /// Asks the peer whether everything that was sent so far has reached it, past every buffer of the
    /// operating systems in between, and resolves when it has; never once the connection has ended.
    /// Where the transport cannot ask, what is written counts. For few at a time: a question needs no
    /// room.
    pub fn arrived(&self) -> impl Future<Output = ()> + Send + use<> {
        let (reached, answer) = oneshot::channel();
        let _ = self.queue.send(Queued::Mark(Mark { reached }));
        async move {
            if answer.await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// For a reader that lets the peer wait: until this is dropped, what is written counts as
    /// [arrived](Self::arrived). The answer would lie behind what is not read, and whoever waits for
    /// it may be what the reader waits for.
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

    /// Queues a keep-alive ping, where the transport has one. It needs no room: callers send few.
    pub fn ping(&self) {
        let _ = self.queue.send(Queued::Ping);
    }

    /// Whoever is at the other end.
    pub fn peer(&self) -> Peer {
        Peer { queue: self.queue.downgrade(), liveness: self.liveness.clone() }
    }

    /// Where the transport notes what it hears of its peer.
    pub(crate) fn liveness(&self) -> &Arc<Liveness> {
        &self.liveness
    }

    /// Has the transport's own answers written, if there is room now.
    pub(crate) fn try_flush(&self) -> bool {
        match self.room.clone().try_acquire_many_owned(self.share(0)) {
            Ok(permit) => self.queue.send(Queued::Flush(permit)).is_ok(),
            Err(_) => false,
        }
    }

    /// Has the transport's own answers written, waiting for room if the peer does not read them.
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
    /// The next message and its room, for transports without pings of their own; `None` once
    /// everything is said. Cancel safe.
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

    /// Resolves once the connection has been closed, or not read any more, for `timeout`.
    pub fn close_deadline(&self, timeout: Duration) -> impl Future<Output = ()> + Send + use<> {
        let closing = self.closing.clone();
        async move {
            tokio::select! {
                () = closing.requested.cancelled() => {}
                () = closing.reader_gone.cancelled() => {}
            }
            tokio::time::sleep(timeout).await;
        }
    }

    pub(crate) fn marks(&self) -> &Marks {
        &self.marks
    }

    pub(crate) fn liveness(&self) -> &Arc<Liveness> {
        &self.liveness
    }

    /// What is next in the queue; `None` once it is empty and nothing more will come or is wanted.
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

/// Once nobody writes, nobody may wait for room, nor for a sign of the peer.
impl Drop for OutboundQueue {
    fn drop(&mut self) {
        self.room.close();
        self.queue.close();
        self.liveness.ended();
    }
}
