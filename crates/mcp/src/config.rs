//! The limits of the server, each with its default.

use std::time::Duration;

/// The limits of an MCP server.
#[derive(Debug, Clone)]
pub struct McpConfig {
    /// How long `run` waits for a command unless the call says otherwise (default 20 s): less than the time
    /// limits of common clients. Then the result has a handle, and the command keeps running.
    pub default_wait: Duration,
    /// How long a call may wait at most (default 50 s); the common limit of clients is a minute.
    pub max_wait: Duration,
    /// How long to wait for more output after a command has exited while another process holds its output
    /// open (default 1 s).
    pub drain: Duration,
    /// How often a call that waits reports its progress, if the client asked for reports (default 2 s).
    pub progress_interval: Duration,
    /// Output, file content or matches in one result, in bytes (default 32 KiB), unless the call says
    /// otherwise; the rest is left out, and the result says how to read on.
    pub default_result_bytes: usize,
    /// The most that a call may ask for, in bytes (default 1 MiB).
    pub max_result_bytes: usize,
    /// The largest image that is returned as one, in bytes (default 5 MiB).
    pub max_image_bytes: u64,
    /// Output that is kept of each command, in bytes (default 4 MiB); older output is dropped, and counted.
    pub kept_output_bytes: usize,
    /// Commands that a session may have running at once (default 64); more are refused.
    pub max_running: usize,
    /// Ended commands whose output is kept (default 64); the oldest are forgotten.
    pub max_ended: usize,
    /// Requests of one client that are handled at once (default 32); more wait.
    pub max_requests: usize,
    /// The longest message, in bytes (default 32 MiB).
    pub max_message_bytes: usize,
    /// HTTP only: clients at once (default 64); one more ends the session that was idle for the longest time.
    pub max_sessions: usize,
    /// HTTP only: connections at once (default 256); more wait.
    pub max_connections: usize,
    /// HTTP only: how long a session without requests and running commands is kept (default 8 h).
    pub session_idle: Duration,
    /// HTTP only: how long the head of a request may take (default 30 s).
    pub head_timeout: Duration,
}

impl Default for McpConfig {
    fn default() -> Self {
        Self {
            default_wait: Duration::from_secs(20),
            max_wait: Duration::from_secs(50),
            drain: Duration::from_secs(1),
            progress_interval: Duration::from_secs(2),
            default_result_bytes: 32 << 10,
            max_result_bytes: 1 << 20,
            max_image_bytes: 5 << 20,
            kept_output_bytes: 4 << 20,
            max_running: 64,
            max_ended: 64,
            max_requests: 32,
            max_message_bytes: 32 << 20,
            max_sessions: 64,
            max_connections: 256,
            session_idle: Duration::from_secs(8 * 3600),
            head_timeout: Duration::from_secs(30),
        }
    }
}
