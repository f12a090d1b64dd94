//! Events of a process, and the sink they go to.

use std::task::{Context, Poll};

use bytes::Bytes;
use codex_exec_server_protocol::process::{OutputStream, ProcessId, TerminalSize};
use codex_exec_server_protocol::resources::{EndedBy, Usage};

/// One numbered event of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessEvent {
    /// The process.
    pub process_id: ProcessId,
    /// Sequence number, from 1 on, per process.
    pub seq: u64,
    /// What happened.
    pub kind: EventKind,
}

/// What happened to a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EventKind {
    /// The process wrote output.
    Output {
        /// The stream it wrote to.
        stream: OutputStream,
        /// The bytes it wrote.
        bytes: Bytes,
    },
    /// The process exited.
    Exited {
        /// Exit code; 128 + signal number if a signal killed it.
        code: i32,
        /// The sandbox probably caused the exit.
        sandbox_denied: bool,
        /// Why it ended, if it did not exit by itself.
        ended_by: Option<EndedBy>,
        /// What it used, if that is known.
        usage: Option<Usage>,
    },
    /// The process has exited and its streams have ended.
    Closed,
    /// Its terminal has another size. Has the number of the event before it.
    Resized {
        /// The new size.
        size: TerminalSize,
        /// How often it has changed.
        resizes: u64,
    },
}

impl ProcessEvent {
    /// Bytes of output in the event.
    pub fn len(&self) -> usize {
        match &self.kind {
            EventKind::Output { bytes, .. } => bytes.len(),
            _ => 0,
        }
    }

    /// Whether the event carries no output.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The receiver of a sink is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SinkClosed;

/// Receives a process's events while a client is attached.
pub trait EventSink: Send {
    /// Waits until the sink has room for the event. After `Ready(Ok)`, the caller sends this event.
    fn poll_ready(
        &mut self,
        cx: &mut Context<'_>,
        event: &ProcessEvent,
    ) -> Poll<Result<(), SinkClosed>>;

    /// Sends the event that `poll_ready` had room for.
    fn send(&mut self, event: ProcessEvent);

    /// Resolves once everything sent before the first call has reached the client's side, past all
    /// buffers on the way. The default assumes that what was sent has arrived.
    fn poll_arrived(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let _ = cx;
        Poll::Ready(())
    }
}
