//! Reading large messages within memory that all connections of a server share.
//!
//! Invariant: the reader takes the whole share of a large message from the [`Budget`] before it reads the
//! payload, so two messages never wait for each other's second half. The owner of the message gives the
//! share back. Small messages need no share. [`budget`](crate::budget) describes the progress that a peer
//! with a share must make while others wait.
//!
//! A websocket decoder keeps a buffer as large as the longest frame it has seen, for as long as its
//! connection is open. This reader therefore presents long frames as fragments of [`FRAGMENT`] bytes: the
//! decoder's buffer stays small, and the message is assembled in memory that is freed with it.

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

/// Messages up to this length, in bytes, need no share.
const SMALL_MESSAGE: u64 = 256 << 10;

/// How many bytes are read at once while a frame header may follow.
const READ_AHEAD: usize = 64 << 10;

/// The longest frame that the decoder sees, in bytes. More than [`READ_AHEAD`], so that no fragment ends
/// within the bytes read together with its header; more than 65,535, so that its header is as long as that
/// of the original frame; and a multiple of 4, so that every fragment starts at the same mask position.
const FRAGMENT: u64 = 128 << 10;

impl Budget {
    /// Wraps `io` so that large messages wait for a share of this budget before their payload is read. A
    /// message in several frames takes a share for `longest` bytes, since its length is not known in
    /// advance.
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

/// Passes the shares of one connection's messages from its byte reader to its owner.
#[derive(Debug, Clone, Default)]
pub struct Meter(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// The longest message that is accepted, in bytes.
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
    /// Shares of messages that were read and not taken, with the message's number.
    read: VecDeque<(u64, Share)>,
    /// How many messages the owner has taken.
    taken: u64,
    /// The share of the message taken last.
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

    /// Sets the queue whose [`Outbound::arrived`] must not wait for pongs while a payload waits here.
    pub(crate) fn set_outbound(&self, outbound: &Outbound) {
        let _ = self.0.outbound.set(outbound.clone());
        let _ = outbound.closing().revoked.set(self.0.transfer.token().clone());
    }

    /// Whether a payload waits for a share, so that nothing is read from the peer.
    pub(crate) fn is_waiting(&self) -> bool {
        self.lock().waiting
    }

    /// Counts of what the connection's socket moves.
    pub(crate) fn transfer(&self) -> &Transfer {
        &self.0.transfer
    }

    /// Notes that the owner took the next message.
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

/// The byte stream of a websocket, below its decoder. See [`Budget::meter`].
#[derive(Debug)]
pub struct Metered<T> {
    io: T,
    account: Account,
    /// The wait for the share of the next payload, once it has begun.
    pending_share: Option<PendingShare>,
    /// One for the reader and one for the writer.
    revoked: [Revoked; 2],
    longest: u64,
    state: State,
    /// A header that goes to the decoder before any other byte.
    pending_header: PendingHeader,
    message: Message,
    /// How many messages have been read.
    messages_read: u64,
    /// Present while a payload waits for its share.
    waiting: Option<Waiting>,
    meter: Meter,
}

/// The wait for a share.
struct PendingShare(Pin<Box<dyn Future<Output = Share> + Send + Sync>>);

impl fmt::Debug for PendingShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PendingShare")
    }
}

/// Resolves when the connection has to end because others wait for memory.
struct Revoked(Pin<Box<WaitForCancellationFutureOwned>>);

impl Revoked {
    fn new(transfer: &Transfer) -> Self {
        Self(Box::pin(transfer.token().clone().cancelled_owned()))
    }

    /// The error for a pending read or write, once the shares are revoked.
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
    /// In the header of a frame. An incomplete header is held back here.
    Header { bytes: [u8; MAX_HEADER], len: usize },
    /// In a payload.
    Payload(Payload),
}

/// The rest of a frame's payload.
#[derive(Debug)]
struct Payload {
    /// Bytes of the current fragment, whose header the decoder has.
    remaining: u64,
    /// Bytes that follow as further fragments.
    unframed: u64,
    frame: Frame,
    /// What has to pass before more of it is read.
    gate: Gate,
}

#[derive(Debug, Clone, Copy)]
enum Gate {
    Open,
    /// The message is over the limit, unless an earlier message lifts that.
    Limit {
        share: u64,
    },
    Share(u64),
}

/// A header on its way to the decoder.
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

/// The message that the current frames belong to.
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
    /// Tracks frames in `bytes` and rewrites the headers of long ones. Returns how many bytes the decoder
    /// gets; an incomplete header is held back.
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

    /// Begins a frame. Returns whether the decoder sees it as fragments.
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
        // A frame over the decoder's own limit passes unchanged: the decoder ends the connection.
        let is_long = frame.is_data && (FRAGMENT + 1..=self.longest).contains(&frame.payload);
        let remaining = if is_long { FRAGMENT } else { frame.payload };
        let unframed = frame.payload - remaining;
        self.state = State::Payload(Payload { remaining, unframed, frame, gate });
        is_long
    }

    /// Moves on to the next fragment or frame once the current fragment is read.
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

    /// Waits for the share of the next payload, if it needs one.
    fn poll_gate(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let State::Payload(Payload { gate, .. }) = &mut self.state else {
            return Poll::Ready(Ok(()));
        };
        if let Gate::Limit { share } = *gate {
            // The owner has taken every earlier message, or it would not read further.
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
                    // Also ends a frame without payload.
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
                // Stops before the next frame, whose header must not be read with this payload.
                State::Payload(Payload { remaining, frame, .. }) if frame.payload > FRAGMENT => {
                    usize::try_from(*remaining).unwrap_or(usize::MAX)
                }
                _ => READ_AHEAD,
            };
            let before = buf.filled().len();
            if buf.remaining() <= limit {
                ready!(Pin::new(&mut self.io).poll_read(cx, buf))?;
            } else {
                // The buffer is zeroed before it is read into, so it is kept small.
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
    /// Counts a write, or waits for it or for the revocation.
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

/// The parts of a websocket frame header (RFC 6455, 5.2) that matter here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Frame {
    is_data: bool,
    is_final: bool,
    payload: u64,
    mask: Option<[u8; 4]>,
}

impl Frame {
    /// Parses the header that `bytes` begin with, and its length; `None` if it is incomplete. Validity is
    /// the decoder's concern.
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

    /// The length of the header that `bytes` begin with, or the least it can be.
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

/// Turns the header of a long frame into that of its first fragment.
fn rewrite_as_fragment(header: &mut [u8]) {
    header[0] &= 0x7f;
    header[2..10].copy_from_slice(&FRAGMENT.to_be_bytes());
}
