//! Reading large messages within memory that all connections of a server share.
//!
//! Invariant: the payload of a large incoming message is read only once its share of the [`Budget`] is
//! taken, in one step, so that two messages never wait for each other's rest; the share goes back when
//! the owner of the message is done with it. Small messages pass without. What a peer that holds a share
//! has to do while others wait is in [`budget`](crate::budget).
//!
//! A decoder keeps a buffer as long as the longest frame that it has seen, as long as its connection is
//! open. So it is shown long frames as fragments of [`FRAGMENT`] bytes each: the buffer stays small, and the
//! message is put together in memory that goes with it.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};

use parking_lot::{Mutex, MutexGuard};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_util::sync::WaitForCancellationFutureOwned;

use crate::budget::{Account, Budget, COST, Share, Transfer};
use crate::outbound::{NotReading, Outbound};

/// Up to this length a message takes no share.
const SMALL_MESSAGE: u64 = 256 << 10;

/// The most that is read ahead of a header that may follow.
const READ_AHEAD: usize = 64 << 10;

/// The longest frame that a decoder is shown. More than [`READ_AHEAD`], so that no piece ends in what was read
/// with its header; more than 65,535, so that its header is as long as that of the frame it is part of;
/// and a multiple of 4, so that the mask of the next piece begins where this one's does.
const FRAGMENT: u64 = 128 << 10;

impl Budget {
    /// Reads websocket frames from `io`, the long ones as fragments, and waits with the payloads of large
    /// messages until there is room for them. `longest` is what a message may come to whose length is not known
    /// from its first frame.
    pub fn meter<T>(&self, io: T, longest: usize) -> (Metered<T>, Meter) {
        let meter = Meter::default();
        let transfer = &meter.0.transfer;
        let metered = Metered {
            io,
            account: self.account(transfer),
            pending_share: None,
            revoked: [Revoked::new(transfer), Revoked::new(transfer)],
            longest: longest as u64,
            state: State::Header { bytes: [0; MAX_HEADER], len: 0 },
            pending_header: PendingHeader::default(),
            message: Message::default(),
            messages_read: 0,
            waiting: None,
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
    transfer: Transfer,
}

impl Default for Shared {
    fn default() -> Self {
        Self {
            limit: AtomicU64::new(u64::MAX),
            shares: Mutex::default(),
            outbound: OnceLock::new(),
            transfer: Transfer::default(),
        }
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

    /// What the connection's socket moves.
    pub(crate) fn transfer(&self) -> &Transfer {
        &self.0.transfer
    }

    /// The next message was taken.
    pub(crate) fn on_message_taken(&self) {
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
    account: Account,
    /// The share of the payload that is next, once it was asked for.
    pending_share: Option<PendingShare>,
    /// Of the reader and of the writer.
    revoked: [Revoked; 2],
    longest: u64,
    state: State,
    /// A header that the decoder is to get next.
    pending_header: PendingHeader,
    message: Message,
    /// How many messages have passed.
    messages_read: u64,
    /// Held while a payload waits.
    waiting: Option<Waiting>,
    meter: Meter,
}

/// A share that is being waited for.
struct PendingShare(Pin<Box<dyn Future<Output = Share> + Send + Sync>>);

impl fmt::Debug for PendingShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PendingShare")
    }
}

/// Whether the connection has to end for others that wait.
struct Revoked(Pin<Box<WaitForCancellationFutureOwned>>);

impl Revoked {
    fn new(transfer: &Transfer) -> Self {
        Self(Box::pin(transfer.token().clone().cancelled_owned()))
    }

    /// An error once it has, for whoever waits for the socket.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        ready!(self.0.as_mut().poll(cx));
        let error = "the peer was too slow with a large message while others waited for memory";
        Poll::Ready(io::Error::new(io::ErrorKind::TimedOut, error))
    }
}

impl fmt::Debug for Revoked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Revoked")
    }
}

#[derive(Debug)]
enum State {
    /// In the header of a frame. Of one that was not read at once, these bytes are held back.
    Header { bytes: [u8; MAX_HEADER], len: usize },
    /// In a payload.
    Payload(Payload),
}

/// What follows of a frame.
#[derive(Debug)]
struct Payload {
    /// Bytes of it that the decoder knows of.
    remaining: u64,
    /// Bytes that it will be shown as further fragments.
    unframed: u64,
    frame: Frame,
    /// Whether it has to be looked at before more of it is read.
    gate: Gate,
}

#[derive(Debug, Clone, Copy)]
enum Gate {
    Open,
    /// The message may be over the limit, unless that is lifted by what came before.
    Limit {
        share: u64,
    },
    Share(u64),
}

/// Bytes that are on their way to the decoder.
#[derive(Debug, Default)]
struct PendingHeader {
    bytes: [u8; MAX_HEADER],
    at: usize,
    len: usize,
}

impl PendingHeader {
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
}

impl<T> Metered<T> {
    /// Follows the frames through bytes that were read, and shows long frames as fragments. Returns how
    /// many of them the decoder may have: a header that is not complete is held back.
    fn track_frames(&mut self, bytes: &mut [u8]) -> usize {
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
                    if self.begin_frame(frame) {
                        rewrite_as_fragment(&mut there[..len]);
                    }
                }
                State::Payload(payload) => {
                    let passed = payload.remaining.min((bytes.len() - at) as u64);
                    payload.remaining -= passed;
                    at += passed as usize;
                }
            }
            self.end_fragment();
        }
        at
    }

    /// A frame begins. Tells whether it is shown as fragments.
    fn begin_frame(&mut self, frame: Frame) -> bool {
        if frame.is_data {
            self.message.len = self.message.len.saturating_add(frame.payload);
        }
        let len = self.message.len;
        let needs_share = frame.is_data && self.message.share.is_none() && len > SMALL_MESSAGE;
        let share = if needs_share {
            let len = if frame.is_final { len } else { self.longest };
            len.saturating_mul(COST)
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
        let is_long = frame.is_data && (FRAGMENT + 1..=self.longest).contains(&frame.payload);
        let remaining = if is_long { FRAGMENT } else { frame.payload };
        let unframed = frame.payload - remaining;
        self.state = State::Payload(Payload { remaining, unframed, frame, gate });
        is_long
    }

    /// If what the decoder knows of a frame has passed: goes on to the next piece, or the next frame.
    fn end_fragment(&mut self) {
        let State::Payload(payload) = &mut self.state else { return };
        if payload.remaining > 0 {
            return;
        }
        if payload.unframed > 0 {
            payload.remaining = payload.unframed.min(FRAGMENT);
            payload.unframed -= payload.remaining;
            let is_final = payload.frame.is_final && payload.unframed == 0;
            self.pending_header = payload.frame.continuation(payload.remaining, is_final);
            return;
        }
        let last = payload.frame.is_data && payload.frame.is_final;
        self.state = State::Header { bytes: [0; MAX_HEADER], len: 0 };
        if last {
            self.messages_read += 1;
            self.account.receiving(0);
            if let Some(share) = std::mem::take(&mut self.message).share {
                self.meter.lock().read.push_back((self.messages_read, share));
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
        let pending_share = self.pending_share.get_or_insert_with(|| {
            let account = self.account.clone();
            PendingShare(Box::pin(async move { account.take(share).await }))
        });
        let Poll::Ready(taken) = pending_share.0.as_mut().poll(cx) else {
            if self.waiting.is_none() {
                self.meter.lock().waiting = true;
                let outbound = self.meter.0.outbound.get();
                self.waiting = Some(Waiting { _not_reading: outbound.map(Outbound::not_reading) });
            }
            return Poll::Pending;
        };
        *gate = Gate::Open;
        self.pending_share = None;
        self.meter.lock().waiting = false;
        self.waiting = None;
        self.account.receiving(share);
        self.message.share = Some(taken);
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncRead + Unpin> Metered<T> {
    /// Reads the rest of a header that was held back.
    fn poll_header(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while let State::Header { bytes, len: len @ 1.. } = &mut self.state {
            let wanted = Frame::header_len(&bytes[..*len]);
            let mut part = ReadBuf::new(&mut bytes[*len..wanted]);
            ready!(Pin::new(&mut self.io).poll_read(cx, &mut part))?;
            let read = part.filled().len();
            *len += read;
            let (mut header, len) = (*bytes, *len);
            if read == 0 {
                // The decoder gets what there is, and finds that it is not all.
                self.pending_header = PendingHeader { bytes: header, at: 0, len };
                self.state = State::Header { bytes: [0; MAX_HEADER], len: 0 };
                return Poll::Ready(Ok(()));
            }
            if let Some((frame, _)) = Frame::parse(&header[..len]) {
                if self.begin_frame(frame) {
                    rewrite_as_fragment(&mut header[..len]);
                }
                self.pending_header = PendingHeader { bytes: header, at: 0, len };
            }
        }
        Poll::Ready(Ok(()))
    }

    fn poll_bytes(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            if !self.pending_header.is_empty() {
                self.pending_header.put_into(buf);
                if self.pending_header.is_empty() {
                    // An empty frame, if it was that one's header.
                    self.end_fragment();
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
                State::Payload(Payload { remaining, frame, .. }) if frame.payload > FRAGMENT => {
                    usize::try_from(*remaining).unwrap_or(usize::MAX)
                }
                _ => READ_AHEAD,
            };
            let before = buf.filled().len();
            if buf.remaining() <= limit {
                ready!(Pin::new(&mut self.io).poll_read(cx, buf))?;
            } else {
                // Bytes are cleared before they are read into: no more than are likely to come.
                let limit = limit.min(READ_AHEAD);
                let mut part = ReadBuf::new(buf.initialize_unfilled_to(limit));
                ready!(Pin::new(&mut self.io).poll_read(cx, &mut part))?;
                let len = part.filled().len();
                buf.advance(len);
            }
            let read = buf.filled().len() - before;
            self.meter.0.transfer.received(read);
            let shown = self.track_frames(&mut buf.filled_mut()[before..]);
            buf.set_filled(before + shown);
            if shown > 0 || read == 0 {
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
            Poll::Pending => this.revoked[0].poll(cx).map(Err),
            ready => ready,
        }
    }
}

impl<T> Metered<T> {
    /// Notes how a write went.
    fn note_write(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        let transfer = &self.meter.0.transfer;
        match written {
            Poll::Pending => {
                transfer.send_blocked(true);
                return self.revoked[1].poll(cx).map(Err);
            }
            Poll::Ready(Ok(len)) => transfer.sent(len),
            Poll::Ready(Err(_)) => {}
        }
        written
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Metered<T> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.io).poll_write(cx, bytes);
        this.note_write(cx, written)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.io).poll_write_vectored(cx, bytes);
        this.note_write(cx, written)
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
const MAX_HEADER: usize = 14;

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
    fn continuation(&self, len: u64, is_final: bool) -> PendingHeader {
        let (mut bytes, mut at) = ([0; MAX_HEADER], 0);
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
        PendingHeader { bytes, at: 0, len: at }
    }
}

/// Makes the header of a long frame that of its first piece.
fn rewrite_as_fragment(header: &mut [u8]) {
    header[0] &= 0x7f;
    header[2..10].copy_from_slice(&FRAGMENT.to_be_bytes());
}
