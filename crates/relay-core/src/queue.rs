//! Messages that wait to be split and sent.
//!
//! The queue accepts a message while less than the limit waits, so it holds at most the limit plus one
//! message. Bytes leave it once and in order, when the window has room; only then are they encrypted.

use std::collections::VecDeque;

use bytes::{BufMut, Bytes, BytesMut};

use crate::message::LENGTH_LEN;

#[derive(Default)]
pub(crate) struct MessageQueue {
    messages: VecDeque<Bytes>,
    /// Unsent bytes of all messages.
    bytes: usize,
    /// Bytes of the first message, including its length prefix if it has one, that were sent.
    offset: usize,
    /// The segments of the first clear message: next index and count.
    cut: Option<(u32, u32)>,
    /// A message was refused since the last [`Self::take_writable`].
    blocked: bool,
}

impl MessageQueue {
    pub(crate) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Accepts a message, or refuses it because `limit` bytes wait already.
    pub(crate) fn push(&mut self, message: Bytes, limit: usize) -> bool {
        if self.bytes >= limit {
            self.blocked = true;
            return false;
        }
        self.bytes += message.len();
        self.messages.push_back(message);
        true
    }

    /// Whether a refused sender may continue; reported once.
    pub(crate) fn take_writable(&mut self, limit: usize) -> bool {
        let writable = self.blocked && self.bytes <= limit / 2;
        if writable {
            self.blocked = false;
        }
        writable
    }

    /// Bytes of the next record: what is left of the first message, at most `max`.
    pub(crate) fn record_len(&self, max: usize) -> usize {
        self.messages.front().map_or(0, |m| (LENGTH_LEN + m.len() - self.offset).min(max))
    }

    /// Moves `len` bytes of the framed first message onto the end of `out`.
    pub(crate) fn take_record(&mut self, len: usize, out: &mut BytesMut) {
        let Some(message) = self.messages.front() else { return };
        let mut left = len;
        if self.offset < LENGTH_LEN {
            let head = (message.len() as u32).to_be_bytes();
            let part = left.min(LENGTH_LEN - self.offset);
            out.put_slice(&head[self.offset..self.offset + part]);
            self.offset += part;
            left -= part;
        }
        let from = self.offset - LENGTH_LEN.min(self.offset);
        out.put_slice(&message[from..from + left]);
        self.offset += left;
        self.bytes -= left;
        if self.offset == LENGTH_LEN + message.len() {
            self.finish_first();
        }
    }

    /// The next clear segment with its index and count. A message is split only if its first segment is
    /// taken with `may_cut`; the split then stays the same.
    pub(crate) fn take_segment(&mut self, may_cut: bool, max: usize) -> Option<(Bytes, u32, u32)> {
        let message = self.messages.front()?;
        let (index, count) = *self.cut.get_or_insert_with(|| {
            let count = if may_cut { message.len().div_ceil(max) } else { 1 };
            (0, u32::try_from(count).unwrap_or(u32::MAX))
        });
        let end = if index + 1 == count { message.len() } else { self.offset + max };
        let segment = message.slice(self.offset..end);
        self.offset = end;
        self.bytes -= segment.len();
        if index + 1 == count {
            self.finish_first();
        } else {
            self.cut = Some((index + 1, count));
        }
        Some((segment, index, count))
    }

    fn finish_first(&mut self) {
        self.messages.pop_front();
        self.offset = 0;
        self.cut = None;
        if self.messages.is_empty() {
            self.messages = VecDeque::new();
        }
    }
}
