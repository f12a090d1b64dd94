//! Memory for large messages, shared by all connections of a server.
//!
//! Invariant: the payload of a large incoming message is read only once its share of the [`Budget`] is
//! taken, in one step, so that two messages never wait for each other's rest; the share goes back when
//! the owner of the message is done with it. Small messages pass without.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::PollSemaphore;

use crate::outbound::{NotReading, Outbound};

/// Up to this length a message takes no share.
const SMALL: u64 = 256 << 10;

/// The most that is read ahead of a header that may follow.
const STEP: usize = 64 << 10;

/// A message costs its own length, and as much again for what is decoded of it.
const COST: u64 = 2;

/// An amount of memory that large messages share. Clones share the same amount.
#[derive(Debug, Clone)]
pub struct Budget {
    left: Arc<Semaphore>,
    bytes: usize,
}

/// A message's share of the budget. Dropping it gives it back.
#[derive(Debug)]
pub struct Share {
    _permit: OwnedSemaphorePermit,
}

impl Budget {
    /// So many bytes. A message that would take more than all of it takes all of it.
    pub fn new(bytes: usize) -> Self {
        let bytes = bytes.clamp(1, Semaphore::MAX_PERMITS.min(u32::MAX as usize));
        Self { left: Arc::new(Semaphore::new(bytes)), bytes }
    }

    /// Waits for a share of `bytes`, first come first served.
    pub async fn take(&self, bytes: u64) -> Share {
        let permit = self.left.clone().acquire_many_owned(self.permits(bytes)).await;
        Share { _permit: permit.expect("the semaphore is never closed") }
    }

    /// A share of `bytes`, if nothing has to be waited for.
    pub fn try_take(&self, bytes: u64) -> Option<Share> {
        let permit = self.left.clone().try_acquire_many_owned(self.permits(bytes)).ok()?;
        Some(Share { _permit: permit })
    }

    /// Whoever asks for more than all of it gets all of it.
    fn permits(&self, bytes: u64) -> u32 {
        u32::try_from(bytes.min(self.bytes as u64)).unwrap_or(u32::MAX)
    }

    /// Bytes that are not taken.
    pub fn left(&self) -> usize {
        self.left.available_permits()
    }

    /// Reads websocket frames from `io`, as they are, and waits with the payloads of large messages
    /// until there is room for them. `longest` is what a message may come to whose length is not known
    /// from its first frame.
    pub fn meter<T>(&self, io: T, longest: usize) -> (Metered<T>, Meter) {
        let meter = Meter::default();
        let metered = Metered {
            io,
            permits: PollSemaphore::new(self.left.clone()),
            bytes: self.bytes as u64,
            longest: longest as u64,
            state: State::Header { bytes: [0; 14], len: 0 },
            message: Message::default(),
            passed: 0,
            waiting: None,
            meter: meter.clone(),
        };
        (metered, meter)
    }
}

/// The shares of the messages of one connection, from the reader of its bytes to its owner.
#[derive(Debug, Clone, Default)]
pub struct Meter(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    shares: Mutex<Shares>,
    outbound: OnceLock<Outbound>,
}

#[derive(Debug, Default)]
struct Shares {
    /// Of messages that were read, by their number.
    read: VecDeque<(u64, Share)>,
    /// How many messages were taken.
    taken: u64,
    /// Of the message that was taken last.
    last: Option<Share>,
    waiting: bool,
}

impl Meter {
    /// Tells who may wait for an answer of the peer that cannot be read while a payload waits.
    pub(crate) fn set_outbound(&self, outbound: &Outbound) {
        let _ = self.0.outbound.set(outbound.clone());
    }

    /// Whether the peer is made to wait; then it cannot be heard.
    pub(crate) fn is_waiting(&self) -> bool {
        self.lock().waiting
    }

    /// The next message was taken.
    pub(crate) fn took_message(&self) {
        let mut shares = self.lock();
        shares.taken += 1;
        let is_next = shares.read.front().is_some_and(|(number, _)| *number == shares.taken);
        shares.last = if is_next { shares.read.pop_front().map(|(_, share)| share) } else { None };
    }

    /// The share of the message that was taken last.
    pub(crate) fn take_share(&self) -> Option<Share> {
        self.lock().last.take()
    }

    fn lock(&self) -> MutexGuard<'_, Shares> {
        self.0.shares.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes of a websocket on their way to whoever decodes them. See [`Budget::meter`].
#[derive(Debug)]
pub struct Metered<T> {
    io: T,
    permits: PollSemaphore,
    bytes: u64,
    longest: u64,
    state: State,
    message: Message,
    /// How many messages have passed.
    passed: u64,
    /// Held while a payload waits.
    waiting: Option<NotReading>,
    meter: Meter,
}

#[derive(Debug)]
enum State {
    /// In the header of a frame.
    Header { bytes: [u8; 14], len: usize },
    /// A payload that has to wait for this share.
    Waiting { share: u32, left: u64, last: bool },
    /// In a payload; `last` if the message ends with it.
    Payload { left: u64, last: bool },
}

/// The message that the frames belong to.
#[derive(Debug, Default)]
struct Message {
    len: u64,
    share: Option<Share>,
}

impl<T> Metered<T> {
    /// Follows the frames through bytes that were read.
    fn follow(&mut self, mut bytes: &[u8]) {
        loop {
            match &mut self.state {
                State::Header { bytes: header, len } => {
                    let Some((&first, rest)) = bytes.split_first() else { return };
                    header[*len] = first;
                    *len += 1;
                    bytes = rest;
                    if let Some(frame) = Frame::parse(&header[..*len]) {
                        self.begin(&frame);
                    }
                }
                State::Waiting { left, last, .. } | State::Payload { left, last } => {
                    let passed = (*left).min(bytes.len() as u64);
                    *left -= passed;
                    bytes = &bytes[passed as usize..];
                    if *left > 0 {
                        return;
                    }
                    let last = *last;
                    self.end(last);
                }
            }
        }
    }

    fn begin(&mut self, frame: &Frame) {
        let (left, last) = (frame.payload, frame.is_data && frame.is_final);
        if frame.is_data {
            self.message.len = self.message.len.saturating_add(frame.payload);
        }
        let needs_share = frame.is_data && self.message.share.is_none() && self.message.len > SMALL;
        self.state = if needs_share {
            let len = if frame.is_final { self.message.len } else { self.longest };
            let share = len.saturating_mul(COST).min(self.bytes);
            State::Waiting { share: u32::try_from(share).unwrap_or(u32::MAX), left, last }
        } else {
            State::Payload { left, last }
        };
    }

    fn end(&mut self, last: bool) {
        self.state = State::Header { bytes: [0; 14], len: 0 };
        if last {
            self.passed += 1;
            if let Some(share) = std::mem::take(&mut self.message).share {
                self.meter.lock().read.push_back((self.passed, share));
            }
        }
    }

    /// Waits for the share of the payload that is next, if it needs one.
    fn poll_share(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let State::Waiting { share, left, last } = self.state else { return Poll::Ready(()) };
        let permit = match self.permits.poll_acquire_many(cx, share) {
            Poll::Ready(permit) => permit,
            Poll::Pending => {
                if self.waiting.is_none() {
                    self.meter.lock().waiting = true;
                    self.waiting = self.meter.0.outbound.get().map(Outbound::not_reading);
                }
                return Poll::Pending;
            }
        };
        self.meter.lock().waiting = false;
        self.waiting = None;
        self.message.share = permit.map(|permit| Share { _permit: permit });
        self.state = State::Payload { left, last };
        Poll::Ready(())
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Metered<T> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_share(cx));
        let limit = match this.state {
            State::Payload { left, .. } if this.message.share.is_some() => {
                usize::try_from(left).unwrap_or(usize::MAX).saturating_add(STEP)
            }
            _ => STEP,
        };
        let before = buf.filled().len();
        if buf.remaining() <= limit {
            ready!(Pin::new(&mut this.io).poll_read(cx, buf))?;
        } else {
            // Bytes are cleared before they are read into: no more than are likely to come.
            let mut part = ReadBuf::new(buf.initialize_unfilled_to(STEP));
            ready!(Pin::new(&mut this.io).poll_read(cx, &mut part))?;
            let len = part.filled().len();
            buf.advance(len);
        }
        this.follow(&buf.filled()[before..]);
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Metered<T> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().io).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_shutdown(cx)
    }
}

/// A frame of a websocket (RFC 6455, 5.2), as far as it matters here.
#[derive(Debug, PartialEq, Eq)]
struct Frame {
    is_data: bool,
    is_final: bool,
    payload: u64,
}

impl Frame {
    /// `None` if these are not all bytes of its header. What makes no sense is left to the decoder.
    fn parse(header: &[u8]) -> Option<Self> {
        let [first, second, rest @ ..] = header else { return None };
        let (length_bytes, short) = match second & 0x7f {
            126 => (2, None),
            127 => (8, None),
            len => (0, Some(u64::from(len))),
        };
        let mask_bytes = if second & 0x80 == 0 { 0 } else { 4 };
        if rest.len() < length_bytes + mask_bytes {
            return None;
        }
        let long = || rest[..length_bytes].iter().fold(0, |len, &b| len << 8 | u64::from(b));
        let (is_data, is_final) = (first & 0x08 == 0, first & 0x80 != 0);
        Some(Self { is_data, is_final, payload: short.unwrap_or_else(long) })
    }
}
