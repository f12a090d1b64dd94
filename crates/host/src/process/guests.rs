//! The clients that watch a process beside its subscriber, and the sizes of all its clients.
//!
//! Each guest has a queue of its own. A guest that does not keep up misses output in it, never an exit; it sees
//! that in the numbers and reads what is missing, as far as it is retained. So no guest delays another one.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::task::{Context, Poll, Waker};

use codex_exec_server_protocol::process::{Fit, TerminalSize};

use super::event::{EventKind, EventSink, ProcessEvent, SinkClosed};

/// A client of a process, unique in its server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ClientId(pub u64);

/// All guests of a process.
#[derive(Default)]
pub(super) struct Guests {
    all: Vec<Guest>,
}

struct Guest {
    id: ClientId,
    sink: Box<dyn EventSink>,
    /// Without a subscriber, the process waits for this guest, and what it has received is dropped.
    paces: bool,
    queue: VecDeque<ProcessEvent>,
    bytes: usize,
    /// The last event that did not fit: sent once the queue is empty, so that the guest sees that it missed
    /// something even if nothing follows.
    missed: Option<ProcessEvent>,
    delivered: u64,
}

impl Guests {
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Whether there is a guest that a process without a subscriber waits for.
    pub(super) fn any_paces(&self) -> bool {
        self.pacing().next().is_some()
    }

    /// Whether a process without a subscriber waits for this guest.
    pub(super) fn paces(&self, id: ClientId) -> bool {
        self.pacing().any(|guest| guest.id == id)
    }

    fn pacing(&self) -> impl Iterator<Item = &Guest> {
        self.all.iter().filter(|guest| guest.paces)
    }

    pub(super) fn join(&mut self, id: ClientId, sink: Box<dyn EventSink>, paces: bool) {
        self.leave(id);
        let (queue, bytes, missed) = (VecDeque::new(), 0, None);
        self.all.push(Guest { id, sink, paces, queue, bytes, missed, delivered: 0 });
    }

    pub(super) fn leave(&mut self, id: ClientId) {
        self.all.retain(|guest| guest.id != id);
    }

    /// Queues an event for everyone; output only where at most `limit` bytes wait.
    pub(super) fn publish(&mut self, event: &ProcessEvent, limit: usize) {
        for guest in &mut self.all {
            let is_output = matches!(event.kind, EventKind::Output { .. });
            if is_output && (guest.missed.is_some() || guest.bytes >= limit) {
                guest.missed = Some(event.clone());
            } else {
                guest.bytes += event.len();
                guest.queue.push_back(event.clone());
            }
        }
    }

    /// Bytes that wait for the pacing guest that is furthest ahead; `None` without one.
    pub(super) fn least_waiting(&self) -> Option<usize> {
        self.pacing().map(|guest| guest.bytes).min()
    }

    /// The last event that any pacing guest was sent.
    pub(super) fn delivered(&self) -> u64 {
        self.pacing().map(|guest| guest.delivered).max().unwrap_or(0)
    }

    /// Sends what the sinks have room for. Returns whether anything changed.
    pub(super) fn poll_deliver(&mut self, cx: &mut Context<'_>) -> bool {
        let mut changed = false;
        self.all.retain_mut(|guest| {
            loop {
                if guest.queue.is_empty()
                    && let Some(missed) = guest.missed.take()
                {
                    guest.bytes += missed.len();
                    guest.queue.push_back(missed);
                }
                let Some(event) = guest.queue.front() else { return true };
                match guest.sink.poll_ready(cx, event) {
                    Poll::Pending => return true,
                    Poll::Ready(Err(SinkClosed)) => {
                        changed = true;
                        return false;
                    }
                    Poll::Ready(Ok(())) => {
                        changed = true;
                        let Some(event) = guest.queue.pop_front() else { return true };
                        guest.bytes -= event.len();
                        guest.delivered = guest.delivered.max(event.seq);
                        guest.sink.send(event);
                    }
                }
            }
        });
        changed
    }

    /// Resolves when events were sent, or a guest has gone; never without guests.
    pub(super) async fn moved(&mut self) {
        poll_fn(|cx| if self.poll_deliver(cx) { Poll::Ready(()) } else { Poll::Pending }).await;
    }

    /// Sends what there is room for now.
    pub(super) fn deliver_ready(&mut self) {
        self.poll_deliver(&mut Context::from_waker(Waker::noop()));
    }
}

/// The sizes that the clients of a terminal have given, the latest last.
#[derive(Debug, Default)]
pub(super) struct Sizes(Vec<(ClientId, TerminalSize, Fit)>);

impl Sizes {
    pub(super) fn set(&mut self, id: ClientId, size: TerminalSize, fit: Fit) {
        self.remove(id);
        self.0.push((id, size, fit));
    }

    pub(super) fn remove(&mut self, id: ClientId) {
        self.0.retain(|(known, ..)| *known != id);
    }

    /// The size that the terminal should have; `None` if no client has given one.
    pub(super) fn effective(&self) -> Option<TerminalSize> {
        if let Some((_, size, _)) = self.0.iter().rev().find(|(.., fit)| *fit == Fit::Mine) {
            return Some(*size);
        }
        let smaller = |a: TerminalSize, b: TerminalSize| TerminalSize {
            rows: a.rows.min(b.rows),
            cols: a.cols.min(b.cols),
        };
        self.0.iter().map(|(_, size, _)| *size).reduce(smaller)
    }
}
