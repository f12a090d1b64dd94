//! What waits for the consumer of a process: all events in one line, or the bytes of each stream.
//!
//! Invariant: `cost` is the sum of the costs of what waits, so the window of a process bounds its
//! memory whichever way it is consumed.

use std::collections::VecDeque;
use std::io;

use bytes::{Buf, Bytes};
use codex_exec_server_protocol::process::OutputStream;

use super::event::ProcessEvent;
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

#[derive(Debug)]
pub(crate) struct Delivery {
    events: VecDeque<ProcessEvent>,
    split: Option<[Lane; 2]>,
    /// Nobody will ever take anything.
    discard: bool,
    /// Somebody has taken it on them to take everything.
    taken: bool,
    cost: usize,
}

#[derive(Debug, Default)]
struct Lane {
    pieces: VecDeque<Piece>,
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
        Self { events: VecDeque::new(), split: None, discard: false, taken: false, cost: 0 }
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
        let Some(lanes) = &mut self.split else {
            if let ProcessEvent::Output { bytes, .. } = &event {
                self.cost += cost_of(bytes.len());
            }
            self.events.push_back(event);
            return;
        };
        match event {
            ProcessEvent::Output { stream, bytes } => {
                let lane = &mut lanes[usize::from(stream == OutputStream::Stderr)];
                if !lane.discard && !bytes.is_empty() {
                    self.cost += cost_of(bytes.len());
                    lane.pieces.push_back(Piece::Bytes(bytes));
                }
            }
            ProcessEvent::Lost(lost) => {
                for lane in lanes.iter_mut().filter(|lane| !lane.discard) {
                    lane.pieces.push_back(Piece::Lost(lost.clone()));
                }
            }
            ProcessEvent::Exited(_) => {}
            ProcessEvent::Closed => lanes.iter_mut().for_each(|lane| lane.end = Some(Ok(()))),
            ProcessEvent::Failed(error) => {
                lanes.iter_mut().for_each(|lane| lane.end = Some(Err(error.clone())));
            }
        }
    }

    /// The next event, if all go in one line.
    pub(crate) fn pop(&mut self) -> Option<ProcessEvent> {
        let event = self.events.pop_front()?;
        if let ProcessEvent::Output { bytes, .. } = &event {
            self.cost -= cost_of(bytes.len());
        }
        Some(event)
    }

    /// From now on each stream has its own line.
    pub(crate) fn split(&mut self) {
        self.taken = true;
        if self.split.is_none() {
            self.split = Some(Default::default());
            self.cost = 0;
            for event in std::mem::take(&mut self.events) {
                self.push(event);
            }
        }
    }

    /// Moves up to `max` bytes of a stream out; `None` if none wait, empty at the end.
    pub(crate) fn read(&mut self, side: Side, max: usize) -> Option<io::Result<Bytes>> {
        let lane = &mut self.split.as_mut()?[side as usize];
        match lane.pieces.front_mut() {
            Some(Piece::Bytes(bytes)) if bytes.len() > max => {
                let part = bytes.copy_to_bytes(max);
                self.cost -= max;
                Some(Ok(part))
            }
            Some(_) => match lane.pieces.pop_front()? {
                Piece::Bytes(bytes) => {
                    self.cost -= cost_of(bytes.len());
                    Some(Ok(bytes))
                }
                Piece::Lost(lost) => Some(Err(ExecServerError::from(lost).into())),
            },
            None => match lane.end.clone()? {
                Ok(()) => Some(Ok(Bytes::new())),
                Err(error) => Some(Err(error.into())),
            },
        }
    }

    /// Nobody reads this stream any more.
    pub(crate) fn discard(&mut self, side: Side) {
        if let Some(lanes) = &mut self.split {
            let lane = &mut lanes[side as usize];
            lane.discard = true;
            for piece in std::mem::take(&mut lane.pieces) {
                if let Piece::Bytes(bytes) = piece {
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
