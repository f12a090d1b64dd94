//! Puts the events of one process in order, each once.
//!
//! Pure: no clock, no task, no socket. Events arrive as notifications (perhaps out of order, twice, or
//! unnumbered) and in responses to `process/read`; the sequencer emits [`ProcessEvent`]s in order and
//! says when to read ([`EventSequencer::need`]).
//!
//! ```text
//!   notifications ──┐                                  ┌─▶ delivery (in order)
//!                   ├─▶ early: numbers ≥ next ─ drain ─┤
//!   read responses ─┘                                  └─▶ next
//! ```
//!
//! Invariant: every number below `next` was delivered, or is the number of the exit, or was reported as
//! lost. The response to a read is the authority on what exists: a number that it skips is no output.

use std::collections::BTreeMap;

use bytes::Bytes;
use codex_exec_server_protocol::ErrorKind;
use codex_exec_server_protocol::process::{OutputStream, ProcessId, ReadResponse};

use super::delivery::{Delivery, cost_of};
use super::event::{ExitStatus, ProcessEvent};
use crate::error::{ExecServerError, Lost};

/// Bytes of the first read on a connection.
const FIRST_READ: u64 = 64 << 10;

/// Output was dropped, but how many bytes of it are lost is unknown.
const UNCOUNTED: u64 = u64::MAX;

/// Bytes after which the client acknowledges; well below what a server retains.
const ACKNOWLEDGE_AFTER: u64 = 1 << 20;

/// Maximum bytes of one read.
const LARGEST_READ: u64 = 8 << 20;

#[derive(Debug)]
pub(crate) struct EventSequencer {
    process: ProcessId,
    window: usize,
    /// The lowest undelivered number.
    next: u64,
    early: BTreeMap<u64, Early>,
    early_cost: usize,
    /// Numbers below this exist, but the client will get no notification of them.
    missing_until: u64,
    /// Notifications may have been missed: read until there is nothing more.
    resync: bool,
    /// Bytes of the next read: doubles each time and starts small on a new connection, so that reading
    /// makes progress even on short-lived connections.
    read_bytes: u64,
    /// The server retains output until a later read acknowledges it.
    acks: bool,
    /// Bytes delivered since the last acknowledgement.
    unacknowledged: u64,
    /// The highest number of output seen, in order or not.
    seen: u64,
    /// Read once even without room, to learn whether the process has exited.
    probe: bool,
    /// A close without a number has arrived.
    closed_unnumbered: bool,
    /// Maximum bytes on disk.
    spill_limit: u64,
    exit: Option<Exit>,
    end: Option<Result<(), ExecServerError>>,
    pub(crate) delivery: Delivery,
}

#[derive(Debug, Clone, Copy)]
struct Exit {
    status: ExitStatus,
    delivered: bool,
    seq: ExitSeq,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExitSeq {
    /// A read reported the exit, without its number.
    Unknown,
    /// The notification had no number.
    Unnumbered,
    /// A read skipped one number, which is probably the exit's.
    Guessed(u64),
    Known(u64),
}

impl ExitSeq {
    fn is_unknown(self) -> bool {
        matches!(self, Self::Unknown | Self::Unnumbered)
    }
}

#[derive(Debug)]
enum Early {
    Output(OutputStream, Bytes),
    Exited,
    Closed,
    /// The server retains no output for the numbers from here to before `end`.
    Gap {
        end: u64,
        dropped: u64,
    },
}

/// Whether a `process/read` is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// No read.
    Nothing,
    /// A read, at once.
    Now,
    /// A read, at once, only to acknowledge what has arrived.
    Acknowledge,
    /// A read, unless the missing events arrive soon.
    Soon,
}

/// What the sequencer did with a notification of output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Intake {
    /// Kept it, or knew it already.
    Accepted,
    /// Had no room; a later read fetches it.
    ReadLater,
}

impl EventSequencer {
    /// For a process that is being started (`after` 0), or that a client attaches to.
    pub(crate) fn new(process: ProcessId, window: usize, after: u64, resync: bool) -> Self {
        Self {
            process,
            window,
            next: after + 1,
            early: BTreeMap::new(),
            early_cost: 0,
            missing_until: 0,
            resync,
            read_bytes: FIRST_READ,
            acks: false,
            unacknowledged: 0,
            seen: after,
            probe: false,
            closed_unnumbered: false,
            spill_limit: 0,
            exit: None,
            end: None,
            delivery: Delivery::new(),
        }
    }

    pub(crate) fn exit(&self) -> Option<ExitStatus> {
        self.exit.map(|exit| exit.status)
    }

    /// The result of the process, once its last event is delivered.
    pub(crate) fn end(&self) -> Option<&Result<(), ExecServerError>> {
        self.end.as_ref()
    }

    /// The number of the last delivered event.
    pub(crate) fn delivered(&self) -> u64 {
        self.next - 1
    }

    /// Whether the window has room for output of this length.
    pub(crate) fn has_room(&self, len: usize) -> bool {
        let waiting = self.delivery.cost() + self.early_cost;
        waiting == 0 || waiting + cost_of(len) <= self.window
    }

    /// Spools output without room to disk from now on, up to `limit` bytes, instead of reading it again:
    /// the server may have dropped it by then.
    pub(crate) fn spill(&mut self, limit: u64) {
        self.delivery.spill(self.window, limit);
        self.spill_limit = limit;
    }

    /// Whether to keep output of this number and length now, rather than read it later.
    fn accepts(&self, seq: u64, len: usize) -> bool {
        if self.has_room(len) {
            return true;
        }
        if seq == self.next {
            return self.delivery.can_spill(len);
        }
        // The events before it are being read; waiting here would stop that read.
        self.delivery.spill_enabled() && (self.early_cost + cost_of(len)) as u64 <= self.spill_limit
    }

    /// Whether the driver should stop reading the connection rather than accept output of this length.
    /// Never while a response to a read is needed, which would not arrive either.
    pub(crate) fn holds_connection(&self, len: usize, always: bool) -> bool {
        let catching_up = self.resync
            || self.probe
            || self.closed_unnumbered
            || self.missing_until > self.next
            || !self.early.is_empty();
        let accepts = self.has_room(len) || (!always && self.delivery.can_spill(len));
        let may = always || (self.delivery.spill_enabled() && self.delivery.has_consumer());
        may && !accepts && !catching_up
    }

    pub(crate) fn need(&self) -> Need {
        if self.end.is_some() {
            return Need::Nothing;
        }
        if self.probe {
            return Need::Now;
        }
        // Output on disk has arrived, but must not make room for more.
        let on_disk = self.delivery.has_consumer() && self.delivery.spilled() > 0;
        if self.acks
            && !on_disk
            && self.unacknowledged >= ACKNOWLEDGE_AFTER.min(self.window as u64 / 2)
        {
            return Need::Acknowledge;
        }
        if self.is_full() {
            return Need::Nothing;
        }
        if self.resync || self.closed_unnumbered || self.missing_until > self.next {
            return Need::Now;
        }
        if self.early.is_empty() { Need::Nothing } else { Need::Soon }
    }

    /// Acknowledges output by reads from now on.
    pub(crate) fn acknowledge(&mut self) {
        self.acks = true;
    }

    /// Whether the server waits for acknowledgements.
    pub(crate) fn acknowledges(&self) -> bool {
        self.acks
    }

    /// The number to acknowledge; counts as acknowledged from now on. A process whose output was never
    /// taken must not wait for a consumer, so everything seen counts as arrived.
    pub(crate) fn acknowledgement(&mut self) -> u64 {
        self.unacknowledged = 0;
        if self.delivery.has_consumer() {
            self.delivered()
        } else {
            self.delivered().max(self.seen)
        }
    }

    /// Whether the consumer has too much unread to read more.
    fn is_full(&self) -> bool {
        self.delivery.cost() > self.window / 2 && !self.delivery.can_spill(self.window)
    }

    /// Bytes to ask for in a read; the response has at least one chunk in any case.
    pub(crate) fn read_size(&self) -> u64 {
        if self.is_full() {
            return 1;
        }
        self.read_bytes.min(self.window as u64 / 4).max(1)
    }

    /// Starts to resynchronize after a reconnect.
    pub(crate) fn reconnected(&mut self) {
        self.resync = true;
        self.probe = true;
        self.read_bytes = FIRST_READ;
    }

    pub(crate) fn output(
        &mut self,
        seq: Option<u64>,
        stream: OutputStream,
        bytes: Bytes,
    ) -> Intake {
        let seq = seq.unwrap_or_else(|| self.next_unnumbered());
        if self.end.is_some() || seq < self.next || self.early.contains_key(&seq) {
            return Intake::Accepted;
        }
        self.seen = self.seen.max(seq);
        if !self.accepts(seq, bytes.len()) {
            if !self.delivery.has_consumer() {
                self.unacknowledged += bytes.len() as u64;
            }
            self.missing_until = self.missing_until.max(seq + 1);
            return Intake::ReadLater;
        }
        self.hold_early(seq, stream, bytes);
        self.drain();
        Intake::Accepted
    }

    pub(crate) fn exited(&mut self, seq: Option<u64>, status: ExitStatus) {
        if self.end.is_some() {
            return;
        }
        let exit =
            self.exit.get_or_insert(Exit { status, delivered: false, seq: ExitSeq::Unknown });
        let Some(seq) = seq else {
            if exit.seq == ExitSeq::Unknown {
                exit.seq = ExitSeq::Unnumbered;
            }
            self.drain();
            return;
        };
        let before = std::mem::replace(&mut exit.seq, ExitSeq::Known(seq));
        if let ExitSeq::Guessed(guess) = before
            && guess != seq
        {
            // The guessed number was output after all.
            self.deliver_loss(1, 0);
        }
        if seq >= self.next {
            self.early.insert(seq, Early::Exited);
            self.drain();
        } else {
            self.deliver_exit();
        }
    }

    pub(crate) fn closed(&mut self, seq: Option<u64>) {
        match seq {
            _ if self.end.is_some() => {}
            Some(seq) if seq >= self.next => {
                self.early.insert(seq, Early::Closed);
                self.drain();
            }
            _ => self.closed_unnumbered = true,
        }
    }

    /// Handles the response to a read after number `after`.
    pub(crate) fn read(&mut self, after: u64, response: ReadResponse) {
        if self.end.is_some() {
            return;
        }
        self.probe = false;
        self.read_bytes = self.read_bytes.saturating_mul(2).min(LARGEST_READ);
        if response.exited && self.exit.is_none() {
            let status = ExitStatus {
                code: response.exit_code.unwrap_or(-1),
                sandbox_denied: response.sandbox_denied,
                ended_by: response.ended_by,
                usage: response.usage,
            };
            self.exit = Some(Exit { status, delivered: false, seq: ExitSeq::Unknown });
        }
        let nothing_more = response.chunks.is_empty();
        let mut from = after + 1;
        let first = response.chunks.first().map_or(response.next_seq, |chunk| chunk.seq);
        let mut dropped = self.dropped_unseen(after, first, response.dropped_bytes);
        for chunk in response.chunks {
            self.mark_gap(from, chunk.seq, std::mem::take(&mut dropped));
            from = chunk.seq + 1;
            if chunk.seq >= self.next && !self.early.contains_key(&chunk.seq) {
                self.hold_early(chunk.seq, chunk.stream, chunk.chunk.0);
            }
        }
        if !nothing_more {
            // The exit's number is known once there is no more output to read.
            self.resync |= self.exit.is_some_and(|exit| exit.seq == ExitSeq::Unknown);
            self.drain();
            return;
        }

        // There is no output after `after`: every number before the server's next is the exit, the close,
        // or lost.
        let closed = response.closed || self.closed_unnumbered;
        self.finish_reading(from, response.next_seq, dropped, closed);
        self.resync = false;
        if let Some(why) = response.failure.filter(|_| self.end.is_none()) {
            let error = ExecServerError::Server {
                method: "process/read",
                code: codex_exec_server_protocol::error::INTERNAL_ERROR,
                message: format!("process {} failed: {why}", self.process),
                kind: ErrorKind::Internal,
            };
            self.fail(error);
        }
    }

    fn finish_reading(&mut self, from: u64, end: u64, dropped: u64, closed: bool) {
        self.drain();
        if self.end.is_some() {
            return;
        }
        let start = from.max(self.next);
        let mut unknown = 0;
        let mut at = start;
        for (&n, early) in self.early.range(start..end.max(start)) {
            unknown += n.saturating_sub(at);
            at = if let Early::Gap { end, .. } = early { *end } else { n + 1 };
        }
        unknown += end.saturating_sub(at);
        let exit_unnumbered = self.exit.is_some_and(|exit| exit.seq.is_unknown());
        let close_unnumbered = closed && !self.early.values().any(|e| matches!(e, Early::Closed));
        let explained = u64::from(exit_unnumbered) + u64::from(close_unnumbered);
        if dropped > 0 || unknown > explained {
            self.deliver_loss(unknown.saturating_sub(explained).max(1), dropped);
        }
        // Deliver the known events after the unknown numbers.
        while self.next < end && self.end.is_none() {
            match self.early.keys().next() {
                Some(&n) if n < end => self.next = n,
                _ => self.next = end,
            }
            self.drain();
        }
        if exit_unnumbered {
            self.deliver_exit();
        }
        if closed {
            self.drain_all();
            self.close();
        }
    }

    /// Ends the process: the server no longer knows it.
    pub(crate) fn gone(&mut self) {
        if self.end.is_some() {
            return;
        }
        let close_known =
            self.closed_unnumbered || self.early.values().any(|e| matches!(e, Early::Closed));
        if !close_known {
            self.fail(Lost::Process { process: self.process.clone() }.into());
            return;
        }
        self.drain_all();
        self.close();
    }

    /// Ends the process with an error.
    pub(crate) fn fail(&mut self, error: ExecServerError) {
        if self.end.is_none() {
            self.early.clear();
            self.early_cost = 0;
            self.delivery.push(ProcessEvent::Failed(error.clone()));
            self.end = Some(Err(error));
        }
    }

    /// Of the bytes that the server dropped between `after` and `first`, those that no notification
    /// delivered; [`UNCOUNTED`] if that is unknown.
    fn dropped_unseen(&self, after: u64, first: u64, dropped: u64) -> u64 {
        if dropped == 0 || first <= self.next {
            return 0;
        }
        if self.next > after + 1 {
            return UNCOUNTED;
        }
        let here = self.early.range(self.next..first).map(|(_, early)| match early {
            Early::Output(_, bytes) => bytes.len() as u64,
            _ => 0,
        });
        dropped.saturating_sub(here.sum())
    }

    /// A number after all known ones, for an event without a number.
    fn next_unnumbered(&self) -> u64 {
        self.early.keys().next_back().map_or(self.next, |last| last + 1)
    }

    fn hold_early(&mut self, seq: u64, stream: OutputStream, bytes: Bytes) {
        self.early_cost += cost_of(bytes.len());
        self.early.insert(seq, Early::Output(stream, bytes));
    }

    /// Records that a read skipped the numbers from `from` to before `end`.
    fn mark_gap(&mut self, from: u64, end: u64, dropped: u64) {
        let mut at = from.max(self.next);
        while at < end {
            let stop = match self.early.range(at..end).next() {
                Some((&n, Early::Gap { end, .. })) if n == at => {
                    at = *end;
                    continue;
                }
                Some((&n, _)) if n == at => {
                    at += 1;
                    continue;
                }
                Some((&n, _)) => n,
                None => end,
            };
            self.early.insert(at, Early::Gap { end: stop, dropped });
            at = stop;
        }
    }

    /// Delivers the next events, as far as they have arrived.
    fn drain(&mut self) {
        while self.end.is_none()
            && let Some(early) = self.early.remove(&self.next)
        {
            let at = self.next;
            self.next += 1;
            match early {
                Early::Output(stream, bytes) => {
                    self.early_cost -= cost_of(bytes.len());
                    self.unacknowledged += bytes.len() as u64;
                    self.delivery.push(ProcessEvent::Output { stream, bytes });
                }
                Early::Exited => self.deliver_exit(),
                Early::Closed => self.close(),
                Early::Gap { end, dropped } => {
                    self.next = end;
                    self.deliver_gap(at, end - at, dropped);
                }
            }
        }
        // An exit without a number is delivered once no known event precedes it.
        if self.exit.is_some_and(|exit| exit.seq == ExitSeq::Unnumbered)
            && self.early.is_empty()
            && !self.resync
            && self.missing_until <= self.next
        {
            self.deliver_exit();
        }
    }

    /// Delivers everything that has arrived; the gaps are lost.
    fn drain_all(&mut self) {
        self.drain();
        while self.end.is_none()
            && let Some(&at) = self.early.keys().next()
        {
            let from = std::mem::replace(&mut self.next, at);
            self.deliver_gap(from, at - from, 0);
            self.drain();
        }
    }

    /// Delivers a gap of `count` numbers: one may be the exit's, others are lost.
    fn deliver_gap(&mut self, at: u64, count: u64, dropped: u64) {
        if let Some(exit) = &mut self.exit
            && exit.seq.is_unknown()
            && count == 1
            && dropped == 0
        {
            exit.seq = ExitSeq::Guessed(at);
            self.deliver_exit();
            return;
        }
        self.deliver_loss(count, dropped);
    }

    fn deliver_loss(&mut self, chunks: u64, dropped: u64) {
        let bytes = Some(dropped).filter(|&n| n > 0 && n != UNCOUNTED);
        let process = self.process.clone();
        self.delivery.push(ProcessEvent::Lost(Lost::Output { process, chunks, bytes }));
    }

    fn deliver_exit(&mut self) {
        if let Some(exit) = &mut self.exit
            && !exit.delivered
        {
            exit.delivered = true;
            self.delivery.push(ProcessEvent::Exited(exit.status));
        }
    }

    fn close(&mut self) {
        if self.end.is_some() {
            return;
        }
        self.deliver_exit();
        self.early.clear();
        self.early_cost = 0;
        self.delivery.push(ProcessEvent::Closed);
        self.end = Some(Ok(()));
    }
}

#[cfg(test)]
#[path = "sequencer_tests.rs"]
mod tests;
