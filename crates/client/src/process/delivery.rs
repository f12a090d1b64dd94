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
    events: Line<ProcessEvent>,
    split: Option<[Lane; 2]>,
    /// Nobody will ever take anything.
    discard: bool,
    /// Somebody has taken it on them to take everything.
    taken: bool,
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
struct Line<T> {
    waiting: VecDeque<Waiting<T>>,
    spool: Spool,
}

#[derive(Debug)]
enum Waiting<T> {
    Here(T),
    /// So many chunks of the spool.
    Spooled(u64),
}

impl<T> Default for Line<T> {
    fn default() -> Self {
        Self { waiting: VecDeque::new(), spool: Spool::default() }
    }
}

impl<T> Line<T> {
    fn push(&mut self, item: T) {
        self.waiting.push_back(Waiting::Here(item));
    }

    fn push_spooled(&mut self, stream: OutputStream, bytes: &[u8]) -> io::Result<()> {
        self.spool.push(stream, bytes)?;
        match self.waiting.back_mut() {
            Some(Waiting::Spooled(chunks)) => *chunks += 1,
            _ => self.waiting.push_back(Waiting::Spooled(1)),
        }
        Ok(())
    }

    /// What is first; output that was on disk by `output`, and by `lost` if it cannot be read back.
    fn pop(
        &mut self,
        output: impl FnOnce(OutputStream, Bytes) -> T,
        lost: impl FnOnce(Lost) -> T,
    ) -> Option<T> {
        let Waiting::Spooled(chunks) = self.waiting.front_mut()? else {
            return match self.waiting.pop_front()? {
                Waiting::Here(item) => Some(item),
                Waiting::Spooled(_) => None,
            };
        };
        *chunks -= 1;
        if *chunks == 0 {
            self.waiting.pop_front();
        }
        let bytes = self.spool.len();
        let why = match self.spool.pop() {
            Ok(Some((stream, bytes))) => return Some(output(stream, bytes)),
            Ok(None) => "it is not there".to_owned(),
            Err(error) => error.to_string(),
        };
        self.waiting.retain(|waiting| matches!(waiting, Waiting::Here(_)));
        self.spool = Spool::default();
        Some(lost(Lost::Spooled { bytes, why }))
    }
}

#[derive(Debug, Default)]
struct Lane {
    pieces: Line<Piece>,
    discard: bool,
    end: Option<Result<(), ExecServerError>>,
}

#[derive(Debug)]
enum Piece {
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
    pub(crate) fn spills(&self) -> bool {
        self.spill.is_some()
    }

    /// Whether output of this length can wait on disk.
    pub(crate) fn can_spill(&self, len: usize) -> bool {
        self.spill.is_some_and(|spill| self.spilled() + len as u64 <= spill.limit)
    }

    /// Bytes that wait on disk.
    pub(crate) fn spilled(&self) -> u64 {
        let lanes = self.split.iter().flatten().map(|lane| lane.pieces.spool.len());
        self.events.spool.len() + lanes.sum::<u64>()
    }

    /// Somebody takes the events.
    pub(crate) fn take(&mut self) {
        self.taken = true;
    }

    pub(crate) fn is_taken(&self) -> bool {
        self.taken
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
            event => self.push_other(event),
        }
    }

    fn push_output(&mut self, stream: OutputStream, bytes: Bytes) {
        let cost = cost_of(bytes.len());
        let full = self.spill.is_some_and(|spill| self.cost > 0 && self.cost + cost > spill.window);
        let spill = full && self.can_spill(bytes.len());
        let lane = self.split.as_mut().map(|lanes| &mut lanes[side_of(stream) as usize]);
        if lane.as_ref().is_some_and(|lane| lane.discard || bytes.is_empty()) {
            return;
        }
        if spill {
            let spooled = match lane {
                None => self.events.push_spooled(stream, &bytes),
                Some(lane) => lane.pieces.push_spooled(stream, &bytes),
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
        match self.split.as_mut().map(|lanes| &mut lanes[side_of(stream) as usize]) {
            None => self.events.push(ProcessEvent::Output { stream, bytes }),
            Some(lane) => lane.pieces.push(Piece::Bytes(bytes)),
        }
    }

    fn push_other(&mut self, event: ProcessEvent) {
        let Some(lanes) = &mut self.split else { return self.events.push(event) };
        match event {
            ProcessEvent::Lost(lost) => {
                for lane in lanes.iter_mut().filter(|lane| !lane.discard) {
                    lane.pieces.push(Piece::Lost(lost.clone()));
                }
            }
            ProcessEvent::Closed => lanes.iter_mut().for_each(|lane| lane.end = Some(Ok(()))),
            ProcessEvent::Failed(error) => {
                lanes.iter_mut().for_each(|lane| lane.end = Some(Err(error.clone())));
            }
            ProcessEvent::Exited(_) | ProcessEvent::Output { .. } => {}
        }
    }

    /// The next event, if all go in one line.
    pub(crate) fn pop(&mut self) -> Option<ProcessEvent> {
        let was_here = matches!(self.events.waiting.front(), Some(Waiting::Here(_)));
        let output = |stream, bytes| ProcessEvent::Output { stream, bytes };
        let event = self.events.pop(output, ProcessEvent::Lost)?;
        if let ProcessEvent::Output { bytes, .. } = &event
            && was_here
        {
            self.cost -= cost_of(bytes.len());
        }
        Some(event)
    }

    /// From now on each stream has its own line.
    pub(crate) fn split(&mut self) {
        self.taken = true;
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
        let lane = &mut self.split.as_mut()?[side as usize];
        let was_here = matches!(lane.pieces.waiting.front(), Some(Waiting::Here(_)));
        let Some(piece) = lane.pieces.pop(|_, bytes| Piece::Bytes(bytes), Piece::Lost) else {
            return match lane.end.clone()? {
                Ok(()) => Some(Ok(Bytes::new())),
                Err(error) => Some(Err(error.into())),
            };
        };
        match piece {
            Piece::Bytes(mut bytes) => {
                if was_here {
                    self.cost -= cost_of(bytes.len());
                }
                let part = bytes.split_to(bytes.len().min(max));
                if !bytes.is_empty() {
                    self.cost += cost_of(bytes.len());
                    lane.pieces.waiting.push_front(Waiting::Here(Piece::Bytes(bytes)));
                }
                Some(Ok(part))
            }
            Piece::Lost(lost) => Some(Err(ExecServerError::from(lost).into())),
        }
    }

    /// Nobody reads this stream any more.
    pub(crate) fn discard(&mut self, side: Side) {
        if let Some(lanes) = &mut self.split {
            let lane = &mut lanes[side as usize];
            lane.discard = true;
            for waiting in std::mem::take(&mut lane.pieces).waiting {
                if let Waiting::Here(Piece::Bytes(bytes)) = waiting {
                    self.cost -= cost_of(bytes.len());
                }
            }
        }
    }

    /// Nobody takes events any more.
    pub(crate) fn discard_all(&mut self) {
        *self = Self { discard: true, taken: true, ..Self::new() };
    }
}

fn side_of(stream: OutputStream) -> Side {
    match stream {
        OutputStream::Stderr => Side::Err,
        OutputStream::Stdout | OutputStream::Pty => Side::Out,
    }
}
