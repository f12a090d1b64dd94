//! What a process publishes, and where to.

use std::task::{Context, Poll};

use bytes::Bytes;
use codex_exec_server_protocol::process::{OutputStream, ProcessId};

/// One numbered event of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessEvent {
    /// Whose.
    pub process_id: ProcessId,
    /// Its place among the process's events.
    pub seq: u64,
    /// What happened.
    pub kind: EventKind,
}

/// What happened to a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EventKind {
    /// It wrote something.
    Output {
        /// Where to.
        stream: OutputStream,
        /// What.
        bytes: Bytes,
    },
    /// It exited.
    Exited {
        /// 128 + signal for a death by signal.
        code: i32,
        /// The sandbox probably caused it.
        sandbox_denied: bool,
    },
    /// It exited and its streams have ended.
    Closed,
}

impl ProcessEvent {
    /// Bytes of output in it.
    pub fn len(&self) -> usize {
        match &self.kind {
            EventKind::Output { bytes, .. } => bytes.len(),
            _ => 0,
        }
    }

    /// Whether it carries no output.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The other side of a sink has gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SinkClosed;

/// Where a process's events go while a client is attached.
pub trait EventSink: Send {
    /// Waits for room for the event. After `Ready(Ok)` the same event is sent.
    fn poll_ready(
        &mut self,
        cx: &mut Context<'_>,
        event: &ProcessEvent,
    ) -> Poll<Result<(), SinkClosed>>;

    /// Sends the event there was room for.
    fn send(&mut self, event: ProcessEvent);

    /// Finds out that everything sent before the first call has reached the other side, past all
    /// buffers on the way. One that cannot tell takes what was sent for arrived.
    fn poll_arrived(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let _ = cx;
        Poll::Ready(())
    }
}
