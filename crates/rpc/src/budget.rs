//! Memory for large messages, shared by all connections of a server.
//!
//! Invariant: the payload of a large incoming message is read only once its share of the [`Budget`] is
//! taken, in one step, so that two messages never wait for each other's rest; the share goes back when
//! the owner of the message is done with it. Small messages pass without.
//!
//! A decoder keeps a buffer as long as the longest frame that it has seen, as long as its connection is
//! open. So it is shown long frames as fragments of [`PIECE`] bytes each: the buffer stays small, and the
//! message is put together in memory that goes with it.
//!
//! A peer that holds a share has to send: while others wait, one that sends less than [`PROGRESS`] bytes
//! in [`PERIOD`] is given up.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep, sleep};
use tokio_util::sync::PollSemaphore;

use crate::outbound::{NotReading, Outbound};

/// Up to this length a message takes no share.
const SMALL: u64 = 256 << 10;

/// The most that is read ahead of a header that may follow.
const STEP: usize = 64 << 10;

/// The longest frame that a decoder is shown. More than [`STEP`], so that no piece ends in what was read
/// with its header; more than 65,535, so that its header is as long as that of the frame it is part of;
/// and a multiple of 4, so that the mask of the next piece begins where this one's does.
const PIECE: u64 = 128 << 10;

/// How much a peer with a share has to send in each [`PERIOD`] while others wait for one.
const PROGRESS: u64 = 64 << 10;
const PERIOD: Duration = Duration::from_secs(10);

/// A message costs its own length, and as much again for what is decoded of it.
const COST: u64 = 2;

/// An amount of memory that large messages share. Clones share the same amount.
#[derive(Debug, Clone)]
pub struct Budget {
    left: Arc<Semaphore>,
    bytes: usize,
    /// How many messages wait for their shares.
    waiting: Arc<AtomicUsize>,
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
        Self { left: Arc::new(Semaphore::new(bytes)), bytes, waiting: Arc::default() }
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

    /// Reads websocket frames from `io`, the long ones as fragments, and waits with the payloads of large
    /// messages until there is room for them. `longest` is what a message may come to whose length is not known
    /// from its first frame.
    pub fn meter<T>(&self, io: T, longest: usize) -> (Metered<T>, Meter) {
        let meter = Meter::default();
        let metered = Metered {
            io,
            permits: PollSemaphore::new(self.left.clone()),
            bytes: self.bytes as u64,
            longest: longest as u64,
            state: State::Header { bytes: [0; HEADER], len: 0 },
            due: Due::default(),
            message: Message::default(),
            passed: 0,
            waiting: None,
            waiters: self.waiting.clone(),
            pace: None,
            meter: meter.clone(),
        };
        (metered, meter)
    }
}

/// The shares of the messages of one connection, from the reader of its bytes to its owner.
#[derive(Debug, Clone, Default)]
pub struct Meter(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// The longest message that is read.
    limit: AtomicU64,
    shares: Mutex<Shares>,
    outbound: OnceLock<Outbound>,
}

impl Default for Shared {
    fn default() -> Self {
        let limit = AtomicU64::new(u64::MAX);
        Self { limit, shares: Mutex::default(), outbound: OnceLock::new() }
    }
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
    /// Ends the connection at a message of more than `bytes` bytes, until the limit is lifted.
    pub fn limit(&self, bytes: usize) {
        self.0.limit.store(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn lift_limit(&self) {
        self.0.limit.store(u64::MAX, Ordering::Relaxed);
    }

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
        self.0.shares.lock()
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
    /// A header that the decoder is to get next.
    due: Due,
    message: Message,
    /// How many messages have passed.
    passed: u64,
    /// Held while a payload waits.
    waiting: Option<Waiting>,
    waiters: Arc<AtomicUsize>,
    /// While a share is held.
    pace: Option<Pace>,
    meter: Meter,
}

#[derive(Debug)]
enum State {
    /// In the header of a frame. Of one that was not read at once, these bytes are held back.
    Header { bytes: [u8; HEADER], len: usize },
    /// In a payload.
    Payload(Payload),
}

/// What follows of a frame.
#[derive(Debug)]
struct Payload {
    /// Bytes of it that the decoder knows of.
    left: u64,
    /// Bytes that it will be shown as further fragments.
    rest: u64,
    frame: Frame,
    /// Whether it has to be looked at before more of it is read.
    gate: Gate,
}

#[derive(Debug, Clone, Copy)]
enum Gate {
    Open,
    /// The message may be over the limit, unless that is lifted by what came before.
    Limit {
        share: u32,
    },
    Share(u32),
}

/// Bytes that are on their way to the decoder.
#[derive(Debug, Default)]
struct Due {
    bytes: [u8; HEADER],
    at: usize,
    len: usize,
}

impl Due {
    fn is_empty(&self) -> bool {
        self.at == self.len
    }

    fn put_into(&mut self, buf: &mut ReadBuf<'_>) {
        let len = buf.remaining().min(self.len - self.at);
        buf.put_slice(&self.bytes[self.at..self.at + len]);
        self.at += len;
    }
}

/// The message that the frames belong to.
#[derive(Debug, Default)]
struct Message {
    len: u64,
    share: Option<Share>,
}

/// A payload that waits for its share.
#[derive(Debug)]
struct Waiting {
    _not_reading: Option<NotReading>,
    waiters: Arc<AtomicUsize>,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.waiters.fetch_sub(1, Ordering::Relaxed);
    }
}

/// How fast a peer sends.
#[derive(Debug)]
struct Pace {
    period: Pin<Box<Sleep>>,
    /// Bytes that came in this period.
    came: u64,
}

impl<T> Metered<T> {
    /// Follows the frames through bytes that were read, and shows long frames as fragments. Returns how
    /// many of them the decoder may have: a header that is not complete is held back.
    fn follow(&mut self, bytes: &mut [u8]) -> usize {
        let mut at = 0;
        while at < bytes.len() {
            match &mut self.state {
                State::Header { bytes: header, .. } => {
                    let there = &mut bytes[at..];
                    let Some((frame, len)) = Frame::parse(there) else {
                        let len = there.len();
                        header[..len].copy_from_slice(there);
                        self.state = State::Header { bytes: *header, len };
                        return at;
                    };
                    at += len;
                    if self.begin(frame) {
                        show_as_piece(&mut there[..len]);
                    }
                }
                State::Payload(payload) => {
                    let passed = payload.left.min((bytes.len() - at) as u64);
                    payload.left -= passed;
                    at += passed as usize;
                }
            }
            self.end_of_piece();
        }
        at
    }

    /// A frame begins. Tells whether it is shown as fragments.
    fn begin(&mut self, frame: Frame) -> bool {
        if frame.is_data {
            self.message.len = self.message.len.saturating_add(frame.payload);
        }
        let len = self.message.len;
        let needs_share = frame.is_data && self.message.share.is_none() && len > SMALL;
        let share = if needs_share {
            let len = if frame.is_final { len } else { self.longest };
            u32::try_from(len.saturating_mul(COST).min(self.bytes)).unwrap_or(u32::MAX)
        } else {
            0
        };
        let gate = match share {
            share if frame.is_data && len > self.meter.0.limit.load(Ordering::Relaxed) => {
                Gate::Limit { share }
            }
            0 => Gate::Open,
            share => Gate::Share(share),
        };
        // One that is too long for the decoder is left to it, which ends the connection.
        let is_long = frame.is_data && (PIECE + 1..=self.longest).contains(&frame.payload);
        let left = if is_long { PIECE } else { frame.payload };
        let rest = frame.payload - left;
        self.state = State::Payload(Payload { left, rest, frame, gate });
        is_long
    }

    /// If what the decoder knows of a frame has passed: goes on to the next piece, or the next frame.
    fn end_of_piece(&mut self) {
        let State::Payload(payload) = &mut self.state else { return };
        if payload.left > 0 {
            return;
        }
        if payload.rest > 0 {
            payload.left = payload.rest.min(PIECE);
            payload.rest -= payload.left;
            let is_final = payload.frame.is_final && payload.rest == 0;
            self.due = payload.frame.continuation(payload.left, is_final);
            return;
        }
        let last = payload.frame.is_data && payload.frame.is_final;
        self.state = State::Header { bytes: [0; HEADER], len: 0 };
        if last {
            self.passed += 1;
            self.pace = None;
            if let Some(share) = std::mem::take(&mut self.message).share {
                self.meter.lock().read.push_back((self.passed, share));
            }
        }
    }

    /// Waits for the share of the payload that is next, if it needs one.
    fn poll_gate(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let State::Payload(Payload { gate, .. }) = &mut self.state else {
            return Poll::Ready(Ok(()));
        };
        if let Gate::Limit { share } = *gate {
            // All that came before was taken by now, or nobody would ask for more.
            let limit = self.meter.0.limit.load(Ordering::Relaxed);
            if self.message.len > limit {
                let error = format!("message is over {limit} bytes, the limit before initialize");
                return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, error)));
            }
            *gate = if share > 0 { Gate::Share(share) } else { Gate::Open };
        }
        let Gate::Share(share) = *gate else { return Poll::Ready(Ok(())) };
        let permit = match self.permits.poll_acquire_many(cx, share) {
            Poll::Ready(permit) => permit,
            Poll::Pending => {
                if self.waiting.is_none() {
                    self.meter.lock().waiting = true;
                    self.waiters.fetch_add(1, Ordering::Relaxed);
                    self.waiting = Some(Waiting {
                        _not_reading: self.meter.0.outbound.get().map(Outbound::not_reading),
                        waiters: self.waiters.clone(),
                    });
                }
                return Poll::Pending;
            }
        };
        *gate = Gate::Open;
        self.meter.lock().waiting = false;
        self.waiting = None;
        self.message.share = permit.map(|permit| Share { _permit: permit });
        self.pace = Some(Pace { period: Box::pin(sleep(PERIOD)), came: 0 });
        Poll::Ready(Ok(()))
    }

    /// Fails once a peer with a share sends too little while others wait.
    fn poll_pace(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        let Some(pace) = &mut self.pace else { return Poll::Pending };
        loop {
            ready!(pace.period.as_mut().poll(cx));
            let came = std::mem::take(&mut pace.came);
            // If it is we who have not looked for a while, the peer is given another period.
            let in_time = pace.period.deadline().elapsed() < PERIOD / 2;
            if in_time && came < PROGRESS && self.waiters.load(Ordering::Relaxed) > 0 {
                let error = "the peer stopped sending in the middle of a large message";
                return Poll::Ready(io::Error::new(io::ErrorKind::TimedOut, error));
            }
            pace.period.as_mut().reset(Instant::now() + PERIOD);
        }
    }
}

impl<T: AsyncRead + Unpin> Metered<T> {
    /// Reads the rest of a header that was held back.
    fn poll_header(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while let State::Header { bytes, len: len @ 1.. } = &mut self.state {
            let wanted = Frame::header_len(&bytes[..*len]);
            let mut part = ReadBuf::new(&mut bytes[*len..wanted]);
            ready!(Pin::new(&mut self.io).poll_read(cx, &mut part))?;
            let came = part.filled().len();
            *len += came;
            let (mut header, len) = (*bytes, *len);
            if came == 0 {
                // The decoder gets what there is, and finds that it is not all.
                self.due = Due { bytes: header, at: 0, len };
                self.state = State::Header { bytes: [0; HEADER], len: 0 };
                return Poll::Ready(Ok(()));
            }
            if let Some((frame, _)) = Frame::parse(&header[..len]) {
                if self.begin(frame) {
                    show_as_piece(&mut header[..len]);
                }
                self.due = Due { bytes: header, at: 0, len };
            }
        }
        Poll::Ready(Ok(()))
    }

    fn poll_bytes(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            if !self.due.is_empty() {
                self.due.put_into(buf);
                if self.due.is_empty() {
                    // An empty frame, if it was that one's header.
                    self.end_of_piece();
                }
                return Poll::Ready(Ok(()));
            }
            ready!(self.poll_gate(cx))?;
            if matches!(self.state, State::Header { len: 1.., .. }) {
                ready!(self.poll_header(cx))?;
                continue;
            }
            let limit = match &self.state {
                // No byte of the next frame, which has no place before its header.
                State::Payload(Payload { left, frame, .. }) if frame.payload > PIECE => {
                    usize::try_from(*left).unwrap_or(usize::MAX)
                }
                _ => STEP,
            };
            let before = buf.filled().len();
            if buf.remaining() <= limit {
                ready!(Pin::new(&mut self.io).poll_read(cx, buf))?;
            } else {
                // Bytes are cleared before they are read into: no more than are likely to come.
                let limit = limit.min(STEP);
                let mut part = ReadBuf::new(buf.initialize_unfilled_to(limit));
                ready!(Pin::new(&mut self.io).poll_read(cx, &mut part))?;
                let len = part.filled().len();
                buf.advance(len);
            }
            let came = buf.filled().len() - before;
            if let Some(pace) = &mut self.pace {
                pace.came += came as u64;
            }
            let shown = self.follow(&mut buf.filled_mut()[before..]);
            buf.set_filled(before + shown);
            if shown > 0 || came == 0 {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Metered<T> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        match this.poll_bytes(cx, buf) {
            Poll::Pending => this.poll_pace(cx).map(Err),
            ready => ready,
        }
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

/// The longest header of a frame: two bytes, eight of length, four of mask.
const HEADER: usize = 14;

/// A frame of a websocket (RFC 6455, 5.2), as far as it matters here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Frame {
    is_data: bool,
    is_final: bool,
    payload: u64,
    mask: Option<[u8; 4]>,
}

impl Frame {
    /// The frame that `bytes` begin with, and the length of its header. `None` if these are not all bytes of
    /// that. What makes no sense is left to the decoder.
    fn parse(bytes: &[u8]) -> Option<(Self, usize)> {
        let header = bytes.get(..Self::header_len(bytes))?;
        let [first, second, rest @ ..] = header else { return None };
        let (length, mask) = rest.split_at(Self::length_bytes(*second));
        let payload = match length {
            [] => u64::from(second & 0x7f),
            long => long.iter().fold(0, |len, &b| len << 8 | u64::from(b)),
        };
        let (is_data, is_final) = (first & 0x08 == 0, first & 0x80 != 0);
        Some((Self { is_data, is_final, payload, mask: mask.try_into().ok() }, header.len()))
    }

    /// How long the header is that these bytes begin, as far as they tell.
    fn header_len(bytes: &[u8]) -> usize {
        let [_, second, ..] = bytes else { return 2 };
        let mask = if second & 0x80 == 0 { 0 } else { 4 };
        2 + Self::length_bytes(*second) + mask
    }

    fn length_bytes(second: u8) -> usize {
        match second & 0x7f {
            126 => 2,
            127 => 8,
            _ => 0,
        }
    }

    /// The header of a fragment that carries the next `len` bytes of this frame.
    fn continuation(&self, len: u64, is_final: bool) -> Due {
        let (mut bytes, mut at) = ([0; HEADER], 0);
        let mut put = |part: &[u8]| {
            bytes[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        };
        let masked = if self.mask.is_some() { 0x80 } else { 0 };
        put(&[if is_final { 0x80 } else { 0 }]);
        match (u8::try_from(len), u16::try_from(len)) {
            (Ok(len @ ..126), _) => put(&[masked | len]),
            (_, Ok(len)) => {
                put(&[masked | 126]);
                put(&len.to_be_bytes());
            }
            _ => {
                put(&[masked | 127]);
                put(&len.to_be_bytes());
            }
        }
        put(self.mask.as_ref().map_or(&[][..], |mask| mask));
        Due { bytes, at: 0, len: at }
    }
}

/// Makes the header of a long frame that of its first piece.
fn show_as_piece(header: &mut [u8]) {
    header[0] &= 0x7f;
    header[2..10].copy_from_slice(&PIECE.to_be_bytes());
}
