//! The messages of the control socket, each a JSON object in a line.

use serde::{Deserialize, Serialize};

/// Longest message, in bytes.
pub(super) const MAX_MESSAGE: u64 = 1 << 20;

/// What an operator asks for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub(super) enum Request {
    /// One [`Response::Status`].
    Status {},
    /// [`Response::Status`] at once and [`Response::Drained`] at the end; the connection then stays open until
    /// the server has ended.
    Drain {
        /// When to stop, whatever is in use, in milliseconds from now.
        deadline_ms: u64,
    },
}

/// What the server answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "response", rename_all = "camelCase")]
pub(super) enum Response {
    Status(ServerStatus),
    Drained(DrainEnd),
    Error { error: String },
}

/// What a server does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct ServerStatus {
    /// Version of the program.
    pub version: String,
    /// Process id of the server.
    pub pid: u32,
    /// Time since it started, in milliseconds.
    pub uptime_ms: u64,
    /// Where it listens, or the registry and the environment that it serves.
    pub listeners: Vec<String>,
    /// Open connections of clients.
    pub connections: u64,
    /// Sessions.
    pub sessions: SessionCounts,
    /// Processes that clients started and that run.
    pub processes: u64,
    /// What is allowed at most.
    pub limits: StatusLimits,
    /// The drain that is under way; absent if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draining: Option<DrainStatus>,
}

/// Sessions by whether a connection is attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct SessionCounts {
    /// With a connection.
    pub attached: u64,
    /// Without one.
    pub detached: u64,
}

/// Limits of a server; absent ones are not limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct StatusLimits {
    /// Connections of the listeners (`--max-connections`).
    pub connections: u64,
    /// Processes of all sessions (`--server-limit processes`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processes: Option<u64>,
    /// Sum of their limits on memory, in bytes (`--server-limit memory`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Sum of their limits on processes (`--server-limit pids`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pids: Option<u64>,
}

/// A drain that is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct DrainStatus {
    /// Time since it began, in milliseconds.
    pub elapsed_ms: u64,
    /// Time until its deadline, in milliseconds.
    pub deadline_ms: u64,
}

/// How a drain ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[non_exhaustive]
pub struct DrainEnd {
    /// Sessions that were still in use at the deadline; the server ends them.
    pub cut_sessions: u64,
}
