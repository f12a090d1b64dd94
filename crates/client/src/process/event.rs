//! What a process tells.

use bytes::Bytes;
use codex_exec_server_protocol::process::OutputStream;

use crate::error::{ExecServerError, Lost};

/// One event of a process. They come in the order in which the server published them, each once;
/// [`Closed`](Self::Closed) or [`Failed`](Self::Failed) is the last.
#[derive(Debug, Clone)]
pub enum ProcessEvent {
    /// Bytes that it wrote.
    Output {
        /// Where to.
        stream: OutputStream,
        /// What.
        bytes: Bytes,
    },
    /// Output is missing here, for good ([`Lost::Output`]); what follows goes on after it.
    Lost(Lost),
    /// It has exited. Output may still follow, from a child that holds its pipes.
    Exited(ExitStatus),
    /// It has exited and its streams have ended.
    Closed,
    /// Nothing more can be known of it.
    Failed(ExecServerError),
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExitStatus {
    /// Its exit code; 128 + signal for a death by signal.
    pub code: i32,
    /// The sandbox probably caused the failure.
    pub sandbox_denied: bool,
}

impl ExitStatus {
    /// Whether it ended with code 0.
    pub fn success(self) -> bool {
        self.code == 0
    }
}

/// All that a process said, and how it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// How it ended.
    pub status: ExitStatus,
    /// What it wrote to stdout, or to its terminal.
    pub stdout: Vec<u8>,
    /// What it wrote to stderr.
    pub stderr: Vec<u8>,
}
