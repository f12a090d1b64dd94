//! Events of a process, and its result.

use bytes::Bytes;
use codex_exec_server_protocol::process::OutputStream;
use codex_exec_server_protocol::resources::{EndedBy, Usage};

use crate::error::{ExecServerError, Lost};

/// An event of a process. Events arrive once each, in the order in which the server published them;
/// [`Closed`](Self::Closed) or [`Failed`](Self::Failed) is the last.
#[derive(Debug, Clone)]
pub enum ProcessEvent {
    /// The process wrote output.
    Output {
        /// The stream that it wrote to.
        stream: OutputStream,
        /// The bytes that it wrote.
        bytes: Bytes,
    },
    /// Output is lost here for good ([`Lost::Output`]); later events continue after the gap.
    Lost(Lost),
    /// The process has exited. Output may still follow from a descendant that holds its pipes open.
    Exited(ExitStatus),
    /// The process has exited and its streams have ended.
    Closed,
    /// The client cannot learn any more about the process.
    Failed(ExecServerError),
}

/// The exit status of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExitStatus {
    /// The exit code; 128 + N if signal N killed the process.
    pub code: i32,
    /// The sandbox probably caused the failure.
    pub sandbox_denied: bool,
    /// Why it ended, if it did not exit by itself and the server says so (capability `processLimits`).
    pub ended_by: Option<EndedBy>,
    /// What it used, if the server says so.
    pub usage: Option<Usage>,
}

impl ExitStatus {
    /// An exit that the server says no more about.
    pub fn of_code(code: i32) -> Self {
        Self { code, sandbox_denied: false, ended_by: None, usage: None }
    }

    /// Whether the exit code is 0.
    pub fn success(self) -> bool {
        self.code == 0
    }
}

/// The complete output of a process, and its exit status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// The exit status.
    pub status: ExitStatus,
    /// Output to stdout, or to the terminal.
    pub stdout: Vec<u8>,
    /// Output to stderr.
    pub stderr: Vec<u8>,
}
