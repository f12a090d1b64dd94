//! The queue between a process's events and their consumer: all events in order, or the bytes of each
//! stream.
//!
//! Invariant: `cost` is the sum of the costs of the items in memory, so the window of a process bounds
//! them however they are consumed. The queue drops nothing: it spools what exceeds the window to disk if
//! that is allowed, and keeps it in memory otherwise; the sequencer checks for room before it pushes.

use std::collections::VecDeque;
use std::io;

use bytes::Bytes;
use codex_exec_server_protocol::process::OutputStream;

use super::event::ProcessEvent;
use super::spool::Spool;
use crate::error::{ExecServerError, Lost};

/// The cost of a chunk in addition to its bytes, so that the window bounds many tiny ones too.
const OVERHEAD: usize = 64;

/// The cost of a chunk of this length against the window.
pub(crate) fn cost_of(bytes: usize) -> usize {
    bytes + OVERHEAD
}

/// The two byte streams of a process; a terminal has only the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Out,
    Err,
}

#[derive(Debug, Default)]
pub(crate) struct Delivery {
    events: SpillQueue<ProcessEvent>,
    split: Option<[StreamQueue; 2]>,
    /// The consumer is gone: everything is discarded.
    discard: bool,
    /// A consumer has taken the events or a stream.
    consumed: bool,
    cost: usize,
    /// Whether and how output beyond the window is spooled to disk.
    spill: Option<Spill>,
}

/// When output is spooled to disk.
#[derive(Debug, Clone, Copy)]
struct Spill {
    /// Cost in memory beyond which it is.
    window: usize,
    /// Maximum bytes on disk.
    limit: u64,
}

/// A queue of items in memory or on disk.
#[derive(Debug)]
struct SpillQueue<T> {
    items: VecDeque<Queued<T>>,
    spool: Spool,
}

#[derive(Debug)]
enum Queued<T> {
    InMemory(T),
    /// This many chunks of the spool.
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

    /// Takes the first item; makes it by `output` from a chunk on disk, or by `lost` if the disk cannot be
    /// read.
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
            Ok(None) => "the spool is empty".to_owned(),
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

    /// Spools output beyond `window` to disk from now on, up to `limit` bytes.
    pub(crate) fn spill(&mut self, window: usize, limit: u64) {
        self.spill = Some(Spill { window, limit });
    }

    /// Whether output beyond the window is spooled to disk.
    pub(crate) fn spill_enabled(&self) -> bool {
        self.spill.is_some()
    }

    /// Whether the disk limit allows output of this length.
    pub(crate) fn can_spill(&self, len: usize) -> bool {
        self.spill.is_some_and(|spill| self.spilled() + len as u64 <= spill.limit)
    }

    /// Bytes on disk.
    pub(crate) fn spilled(&self) -> u64 {
        let queues = self.split.iter().flatten().map(|queue| queue.chunks.spool.len());
        self.events.spool.len() + queues.sum::<u64>()
    }

    /// Notes that a consumer has taken the events.
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
                    // The disk is full, so from now on the connection waits.
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

    /// The next event, if the streams are not split.
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

    /// Gives each stream its own queue from now on.
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

    /// Takes up to `max` bytes of a stream; `None` if there are none yet, empty at the end.
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

    /// Discards this stream from now on: its consumer is gone.
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

    /// Discards everything from now on: the consumer is gone.
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
