//! What waits for the consumer of a process: all events in one line, or the bytes of each stream.
//!
//! Invariant: `cost` is the sum of the costs of what waits in memory, so the window of a process
//! bounds that whichever way it is consumed. What is pushed is never dropped: what is too much for
//! memory waits on disk if that is allowed, and in memory otherwise; whoever pushes looks first.

use std::collections::VecDeque;
use std::io;

use bytes::Bytes;
use codex_exec_server_protocol::process::OutputStream;

use super::event::ProcessEvent;
use super::spool::Spool;
use crate::error::{ExecServerError, Lost};

/// What a chunk costs besides its bytes, so that many tiny ones are bounded too.
const OVERHEAD: usize = 64;

/// What a chunk of that length counts against the window.
pub(crate) fn cost_of(bytes: usize) -> usize {
    bytes + OVERHEAD
}

/// The two byte streams of a process; a terminal's is the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Out,
    Err,
}

#[derive(Debug, Default)]
pub(crate) struct Delivery {
    events: SpillQueue<ProcessEvent>,
    split: Option<[StreamQueue; 2]>,
    /// Nobody will ever take anything.
    discard: bool,
    /// A consumer has taken the events or a stream.
    consumed: bool,
    cost: usize,
    /// What is too much for memory waits on disk.
    spill: Option<Spill>,
}

/// When output waits on disk.
#[derive(Debug, Clone, Copy)]
struct Spill {
    /// When so much waits in memory.
    window: usize,
    /// As long as less than this is there.
    limit: u64,
}

/// What waits, in order: in memory, or on disk.
#[derive(Debug)]
struct SpillQueue<T> {
    items: VecDeque<Queued<T>>,
    spool: Spool,
}

#[derive(Debug)]
enum Queued<T> {
    InMemory(T),
    /// So many chunks of the spool.
    Spooled(u64),
}

impl<T> Default for SpillQueue<T> {
    fn default() -> Self {
        Self { items: VecDeque::new(), spool: Spool::default() }
    }
}

impl<T> SpillQueue<T> {
    fn push(&mut self, item: T) {
        self.items.push_back(Queued::InMemory(item));
    }

    fn push_spooled(&mut self, stream: OutputStream, bytes: &[u8]) -> io::Result<()> {
        self.spool.push(stream, bytes)?;
        match self.items.back_mut() {
            Some(Queued::Spooled(chunks)) => *chunks += 1,
            _ => self.items.push_back(Queued::Spooled(1)),
        }
        Ok(())
    }

    /// What is first; output that was on disk by `output`, and by `lost` if it cannot be read back.
    fn pop(
        &mut self,
        output: impl FnOnce(OutputStream, Bytes) -> T,
        lost: impl FnOnce(Lost) -> T,
    ) -> Option<T> {
        let Queued::Spooled(chunks) = self.items.front_mut()? else {
            return match self.items.pop_front()? {
                Queued::InMemory(item) => Some(item),
                Queued::Spooled(_) => None,
            };
        };
        *chunks -= 1;
        if *chunks == 0 {
            self.items.pop_front();
        }
        let bytes = self.spool.len();
        let why = match self.spool.pop() {
            Ok(Some((stream, bytes))) => return Some(output(stream, bytes)),
            Ok(None) => "it is not there".to_owned(),
            Err(error) => error.to_string(),
        };
        self.items.retain(|item| matches!(item, Queued::InMemory(_)));
        self.spool = Spool::default();
        Some(lost(Lost::Spooled { bytes, why }))
    }
}

#[derive(Debug, Default)]
struct StreamQueue {
    chunks: SpillQueue<Chunk>,
    discard: bool,
    end: Option<Result<(), ExecServerError>>,
}

#[derive(Debug)]
enum Chunk {
    Bytes(Bytes),
    Lost(Lost),
}

impl Delivery {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// From now on what is more than `window` waits on disk, up to `limit`.
    pub(crate) fn spill(&mut self, window: usize, limit: u64) {
        self.spill = Some(Spill { window, limit });
    }

    /// Whether there is a place on disk for what is too much for memory.
    pub(crate) fn spill_enabled(&self) -> bool {
        self.spill.is_some()
    }

    /// Whether output of this length can wait on disk.
    pub(crate) fn can_spill(&self, len: usize) -> bool {
        self.spill.is_some_and(|spill| self.spilled() + len as u64 <= spill.limit)
    }

    /// Bytes that wait on disk.
    pub(crate) fn spilled(&self) -> u64 {
        let queues = self.split.iter().flatten().map(|queue| queue.chunks.spool.len());
        self.events.spool.len() + queues.sum::<u64>()
    }

    /// Somebody takes the events.
    pub(crate) fn attach_consumer(&mut self) {
        self.consumed = true;
    }

    pub(crate) fn has_consumer(&self) -> bool {
        self.consumed
    }

    pub(crate) fn cost(&self) -> usize {
        self.cost
    }

    pub(crate) fn push(&mut self, event: ProcessEvent) {
        if self.discard {
            return;
        }
        match event {
            ProcessEvent::Output { stream, bytes } => self.push_output(stream, bytes),
            event => self.push_status(event),
        }
    }

    fn push_output(&mut self, stream: OutputStream, bytes: Bytes) {
        let cost = cost_of(bytes.len());
        let full = self.spill.is_some_and(|spill| self.cost > 0 && self.cost + cost > spill.window);
        let spill = full && self.can_spill(bytes.len());
        let queue = self.split.as_mut().map(|queues| &mut queues[side_of(stream) as usize]);
        if queue.as_ref().is_some_and(|queue| queue.discard || bytes.is_empty()) {
            return;
        }
        if spill {
            let spooled = match queue {
                None => self.events.push_spooled(stream, &bytes),
                Some(queue) => queue.chunks.push_spooled(stream, &bytes),
            };
            match spooled {
                Ok(()) => return,
                Err(error) => {
                    // The disk is full: then the connection has to wait.
                    tracing::warn!(%error, "cannot spool output to disk");
                    self.spill = self.spill.map(|spill| Spill { limit: 0, ..spill });
                }
            }
        }
        self.cost += cost;
        match self.split.as_mut().map(|queues| &mut queues[side_of(stream) as usize]) {
            None => self.events.push(ProcessEvent::Output { stream, bytes }),
            Some(queue) => queue.chunks.push(Chunk::Bytes(bytes)),
        }
    }

    fn push_status(&mut self, event: ProcessEvent) {
        let Some(queues) = &mut self.split else { return self.events.push(event) };
        match event {
            ProcessEvent::Lost(lost) => {
                for queue in queues.iter_mut().filter(|queue| !queue.discard) {
                    queue.chunks.push(Chunk::Lost(lost.clone()));
                }
            }
            ProcessEvent::Closed => queues.iter_mut().for_each(|queue| queue.end = Some(Ok(()))),
            ProcessEvent::Failed(error) => {
                queues.iter_mut().for_each(|queue| queue.end = Some(Err(error.clone())));
            }
            ProcessEvent::Exited(_) | ProcessEvent::Output { .. } => {}
        }
    }

    /// The next event, if all go in one line.
    pub(crate) fn pop(&mut self) -> Option<ProcessEvent> {
        let was_in_memory = matches!(self.events.items.front(), Some(Queued::InMemory(_)));
        let output = |stream, bytes| ProcessEvent::Output { stream, bytes };
        let event = self.events.pop(output, ProcessEvent::Lost)?;
        if let ProcessEvent::Output { bytes, .. } = &event
            && was_in_memory
        {
            self.cost -= cost_of(bytes.len());
        }
        Some(event)
    }

    /// From now on each stream has its own line.
    pub(crate) fn split(&mut self) {
        self.consumed = true;
        if self.split.is_none() {
            let mut events = std::mem::take(&mut self.events);
            self.split = Some(Default::default());
            self.cost = 0;
            let output = |stream, bytes| ProcessEvent::Output { stream, bytes };
            while let Some(event) = events.pop(output, ProcessEvent::Lost) {
                self.push(event);
            }
        }
    }

    /// Moves up to `max` bytes of a stream out; `None` if none wait, empty at the end.
    pub(crate) fn read(&mut self, side: Side, max: usize) -> Option<io::Result<Bytes>> {
        let queue = &mut self.split.as_mut()?[side as usize];
        let was_in_memory = matches!(queue.chunks.items.front(), Some(Queued::InMemory(_)));
        let Some(chunk) = queue.chunks.pop(|_, bytes| Chunk::Bytes(bytes), Chunk::Lost) else {
            return match queue.end.clone()? {
                Ok(()) => Some(Ok(Bytes::new())),
                Err(error) => Some(Err(error.into())),
            };
        };
        match chunk {
            Chunk::Bytes(mut bytes) => {
                if was_in_memory {
                    self.cost -= cost_of(bytes.len());
                }
                let part = bytes.split_to(bytes.len().min(max));
                if !bytes.is_empty() {
                    self.cost += cost_of(bytes.len());
                    queue.chunks.items.push_front(Queued::InMemory(Chunk::Bytes(bytes)));
                }
                Some(Ok(part))
            }
            Chunk::Lost(lost) => Some(Err(ExecServerError::from(lost).into())),
        }
    }

    /// Nobody reads this stream any more.
    pub(crate) fn discard(&mut self, side: Side) {
        if let Some(queues) = &mut self.split {
            let queue = &mut queues[side as usize];
            queue.discard = true;
            for item in std::mem::take(&mut queue.chunks).items {
                if let Queued::InMemory(Chunk::Bytes(bytes)) = item {
                    self.cost -= cost_of(bytes.len());
                }
            }
        }
    }

    /// Nobody takes events any more.
    pub(crate) fn discard_all(&mut self) {
        *self = Self { discard: true, consumed: true, ..Self::new() };
    }
}

fn side_of(stream: OutputStream) -> Side {
    match stream {
        OutputStream::Stderr => Side::Err,
        OutputStream::Stdout | OutputStream::Pty => Side::Out,
    }
}
