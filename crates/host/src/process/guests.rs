//! The clients that watch a process beside its subscriber, and the sizes of all its clients.
//!
//! Each guest has a queue of its own. A guest that does not keep up misses output in it, never an exit; it sees
//! that in the numbers and reads what is missing, as far as it is retained. So no guest delays another one.
//!
//! Invariant: a guest is sent events in their order, and `Closed` last. What waits for it is bounded: output by
//! the limit, sizes by one after another event.

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
    /// The last output that did not fit: sent once the queue is empty, or before an exit, so that the guest sees
    /// that it missed something even if nothing follows.
    missed: Option<ProcessEvent>,
    /// The last size that did not fit.
    missed_size: Option<ProcessEvent>,
    delivered: u64,
}

impl Guest {
    fn publish(&mut self, event: &ProcessEvent, limit: usize) {
        let is_behind = self.missed.is_some() || self.missed_size.is_some() || self.bytes >= limit;
        match &event.kind {
            EventKind::Output { .. } if is_behind => self.missed = Some(event.clone()),
            EventKind::Resized { .. } if is_behind => self.missed_size = Some(event.clone()),
            EventKind::Resized { .. } => {
                let is_size =
                    |last: &mut ProcessEvent| matches!(last.kind, EventKind::Resized { .. });
                self.queue.pop_back_if(is_size);
                self.queue(event.clone());
            }
            EventKind::Output { .. } => self.queue(event.clone()),
            EventKind::Exited { .. } | EventKind::Closed => {
                self.queue_missed();
                self.queue(event.clone());
            }
        }
    }

    fn queue(&mut self, event: ProcessEvent) {
        self.bytes += event.len();
        self.queue.push_back(event);
    }

    /// Queues what did not fit. (A size has the number of the output before it.)
    fn queue_missed(&mut self) {
        let mut missed = [self.missed.take(), self.missed_size.take()];
        if let [Some(output), Some(size)] = &missed
            && size.seq < output.seq
        {
            missed.swap(0, 1);
        }
        missed.into_iter().flatten().for_each(|event| self.queue(event));
    }
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
        let queue = VecDeque::new();
        let (missed, missed_size) = (None, None);
        let guest = Guest { id, sink, paces, queue, bytes: 0, missed, missed_size, delivered: 0 };
        self.all.push(guest);
    }

    pub(super) fn leave(&mut self, id: ClientId) {
        self.all.retain(|guest| guest.id != id);
    }

    /// Queues an event for everyone; output only where fewer than `limit` bytes wait.
    pub(super) fn publish(&mut self, event: &ProcessEvent, limit: usize) {
        self.all.iter_mut().for_each(|guest| guest.publish(event, limit));
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
                if guest.queue.is_empty() {
                    guest.queue_missed();
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use bytes::Bytes;
    use codex_exec_server_protocol::process::OutputStream;
    use parking_lot::Mutex;

    use super::*;

    /// A sink that takes as many events as it was given room for.
    #[derive(Clone, Default)]
    struct Sink {
        room: Arc<AtomicUsize>,
        taken: Arc<Mutex<Vec<ProcessEvent>>>,
    }

    impl EventSink for Sink {
        fn poll_ready(
            &mut self,
            _: &mut Context<'_>,
            _: &ProcessEvent,
        ) -> Poll<Result<(), SinkClosed>> {
            let took = self
                .room
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |room| room.checked_sub(1));
            if took.is_ok() { Poll::Ready(Ok(())) } else { Poll::Pending }
        }

        fn send(&mut self, event: ProcessEvent) {
            self.taken.lock().push(event);
        }
    }

    /// However slow a guest is, it is sent events in their order, the exit and the latest size among them, `Closed`
    /// last, and a bounded amount waits for it.
    #[test]
    fn a_slow_guest_is_sent_events_in_order() {
        const LIMIT: usize = 1000;
        const LARGEST: usize = 300;
        let mut gaps = 0;
        for seed in 0..2000 {
            let mut random = fastrand::Rng::with_seed(seed);
            let sink = Sink::default();
            let mut guests = Guests::default();
            guests.join(ClientId(1), Box::new(sink.clone()), false);
            let (count, slowness) = (random.usize(1..60), random.usize(1..12));
            let exits_at = random.usize(..count);
            let (mut seq, mut size) = (0, None);
            let publish = |guests: &mut Guests, seq: u64, kind: EventKind| {
                let event = ProcessEvent { process_id: "p".into(), seq, kind };
                guests.publish(&event, LIMIT);
                let guest = &guests.all[0];
                assert!(guest.bytes < LIMIT + 3 * LARGEST, "seed {seed}");
                assert!(guest.queue.len() <= 2 * count + 4, "seed {seed}");
            };
            for n in 0..count {
                for resizes in 0..random.u64(..4) {
                    let new = TerminalSize { rows: random.u16(1..), cols: 1 };
                    size = Some(new);
                    publish(&mut guests, seq, EventKind::Resized { size: new, resizes });
                }
                seq += 1;
                let kind = if n == exits_at {
                    let (ended_by, usage) = (None, None);
                    EventKind::Exited { code: 0, sandbox_denied: false, ended_by, usage }
                } else {
                    let bytes = Bytes::from(vec![0; random.usize(1..LARGEST)]);
                    EventKind::Output { stream: OutputStream::Pty, bytes }
                };
                publish(&mut guests, seq, kind);
                sink.room.store(random.usize(..6) / slowness, Ordering::Relaxed);
                guests.deliver_ready();
            }
            publish(&mut guests, seq + 1, EventKind::Closed);
            sink.room.store(usize::MAX, Ordering::Relaxed);
            guests.deliver_ready();
            let taken = sink.taken.lock();
            assert!(taken.is_sorted_by_key(|event| event.seq), "seed {seed}: {taken:?}");
            assert_eq!(taken.last().unwrap().kind, EventKind::Closed, "seed {seed}");
            let is_exit = |event: &&ProcessEvent| matches!(event.kind, EventKind::Exited { .. });
            assert_eq!(taken.iter().filter(is_exit).count(), 1, "seed {seed}");
            let sizes = taken.iter().filter_map(|event| match event.kind {
                EventKind::Resized { size, .. } => Some(size),
                _ => None,
            });
            assert_eq!(sizes.last(), size, "seed {seed}");
            gaps += usize::from(taken.windows(2).any(|pair| pair[1].seq > pair[0].seq + 1));
        }
        assert!(gaps > 100, "{gaps}");
    }
}
