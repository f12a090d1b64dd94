//! The receiving half of a stream: order, duplicates, and what to acknowledge.
//!
//! Invariant: every segment leaves [`ReceiveWindow`] once and in order; at most the configured number of
//! segments and bytes wait out of order, in buffers that hold nothing else.

use std::collections::BTreeMap;
use std::time::Instant;

use bytes::Bytes;

use crate::config::Config;
use crate::frame::Data;

#[derive(Default)]
pub(crate) struct ReceiveWindow {
    /// The segment that must come next. Wider than a seq, so that the last seq has a successor.
    next: u64,
    held: BTreeMap<u32, Data>,
    held_bytes: usize,
    /// Segments taken since an acknowledgement last went out.
    unacked: u32,
    ack_now: bool,
    ack_at: Option<Instant>,
    /// Whether an acknowledgement was sent that differs from "nothing yet": an ack frame, or a value
    /// above 0.
    ack_was_visible: bool,
}

impl ReceiveWindow {
    /// Accepts a received segment and returns it if it is the next one; [`Self::pop_ready`] then
    /// returns the segments that waited for it.
    pub(crate) fn push(&mut self, data: Data, config: &Config, now: Instant) -> Option<Data> {
        let seq = u64::from(data.seq);
        if seq == self.next {
            self.next += 1;
            self.unacked += 1;
            if self.unacked >= config.ack_every {
                self.ack_now = true;
            } else if self.ack_at.is_none() {
                self.ack_at = Some(now + config.ack_delay);
            }
            return Some(data);
        }
        // A duplicate means that an acknowledgement was lost, a gap that a segment was: acknowledge at
        // once in both cases.
        self.ack_now = true;
        let fits = seq > self.next
            && seq - self.next <= u64::from(config.reorder_segments)
            && self.held.len() < config.reorder_segments as usize
            && self.held_bytes + data.payload.len() <= config.reorder_bytes;
        if fits && !self.held.contains_key(&data.seq) {
            self.held_bytes += data.payload.len();
            // Copied, since a slice would keep the whole frame alive, whose size is not counted.
            let payload = Bytes::copy_from_slice(&data.payload);
            self.held.insert(data.seq, Data { payload, ..data });
        }
        None
    }

    /// The held segment that is next, if any.
    pub(crate) fn pop_ready(&mut self) -> Option<Data> {
        let next = u32::try_from(self.next).ok()?;
        let data = self.held.remove(&next)?;
        self.held_bytes -= data.payload.len();
        self.next += 1;
        self.unacked += 1;
        Some(data)
    }

    /// Whether segments wait for one that is missing.
    pub(crate) fn has_gap(&self) -> bool {
        !self.held.is_empty()
    }

    pub(crate) fn held(&self) -> (usize, usize) {
        (self.held.len(), self.held_bytes)
    }

    /// `ack` and `ack_bits` for an outbound frame.
    pub(crate) fn ack(&self) -> (u32, u32) {
        // Before segment 0 nothing can be acknowledged: a 0 would acknowledge it.
        let Some(ack) = self.next.checked_sub(1) else { return (0, 0) };
        let mut bits = 0;
        for &seq in self.held.keys() {
            match u64::from(seq) - self.next {
                ahead @ 0..32 => bits |= 1 << ahead,
                _ => break,
            }
        }
        // `next` is at most one above the last seq.
        (u32::try_from(ack).unwrap_or(u32::MAX), bits)
    }

    /// Whether anything can be acknowledged at all.
    pub(crate) fn has_ack(&self) -> bool {
        self.next > 0
    }

    /// Asks for an acknowledgement without delay.
    pub(crate) fn request_ack(&mut self) {
        self.ack_now = true;
    }

    pub(crate) fn wants_ack(&self) -> bool {
        self.ack_now && self.has_ack()
    }

    pub(crate) fn ack_at(&self) -> Option<Instant> {
        self.ack_at
    }

    pub(crate) fn on_timeout(&mut self, now: Instant) {
        if self.ack_at.is_some_and(|at| at <= now) {
            self.ack_at = None;
            self.ack_now = true;
        }
    }

    /// Records that a frame with [`Self::ack`] is sent; `explicit` if it is an ack frame.
    pub(crate) fn on_ack_sent(&mut self, explicit: bool) {
        self.ack_was_visible |= explicit || self.ack() > (0, 0);
        // Segment 0 alone cannot be piggybacked: it needs an ack frame.
        if self.ack_was_visible {
            self.unacked = 0;
            self.ack_now = false;
            self.ack_at = None;
        }
    }

    /// Notes that frames in flight may be lost, acknowledgements among them.
    pub(crate) fn on_new_socket(&mut self) {
        self.ack_was_visible = false;
        self.ack_now = true;
    }
}
