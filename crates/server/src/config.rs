//! Limits and times of a server, each with its default.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use codex_exec_host::files::FilesConfig;
use codex_exec_host::process::ProcessConfig;
use codex_exec_host::sandbox::OwnFiles;
use codex_exec_rpc::ConnectionConfig;
use codex_exec_server_protocol::{Assurance, DecodeLimits};

/// How a server behaves.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ServerConfig {
    /// Every connection's transport.
    pub connection: ConnectionConfig,
    /// What one message may cost.
    pub decode: DecodeLimits,
    /// Every process.
    pub process: ProcessConfig,
    /// Every filesystem request.
    pub files: Arc<FilesConfig>,
    /// The executable that is re-entered to confine what is started; it has to call
    /// [`main_if_reentered`](crate::main_if_reentered) first thing in its `main`. Without one, a
    /// request that asks for a sandbox is refused. Default none; [`run`](crate::run) sets it.
    pub sandbox_executable: Option<PathBuf>,
    /// Files of the server itself, such as its credentials, that no sandbox can open whatever its policy
    /// says. Default none; [`run`](crate::run) adds the executables.
    pub own_files: OwnFiles,
    /// What has to stand behind a sandbox at least, for a request that does not name its own
    /// `assurance`. Default full: where the machine offers less, such a request is refused.
    pub sandbox_assurance: Assurance,
    /// Whether the plan of a sandbox policy is used again while no file it rests on has changed
    /// (default true). Off, every request is planned anew, which takes longer for long policies.
    pub sandbox_plan_cache: bool,
    /// How long a session outlives its connection. Default 30 s.
    pub detach_ttl: Duration,
    /// The longest such time a client may ask for. Default 7 days.
    pub max_detach_ttl: Duration,
    /// How long processes may go on after a SIGTERM when the server shuts down, before they are killed.
    /// Default 0: they are killed at once.
    pub stop_grace: Duration,
    /// How long a connection may leave a ping unanswered while another of the same principal asks for
    /// its session; then it loses the session to that one. Default 5 s.
    pub takeover_patience: Duration,
    /// Requests of one connection that run at once; those that only wait do not count.
    /// Default 64.
    pub concurrent_requests: usize,
    /// Requests of one connection that are under way, waiting ones included. Default 4,096. A
    /// connection that has more is not read from until one is answered.
    pub pending_requests: usize,
    /// Bytes of requests of one connection that are under way. Default 96 MiB. As above.
    pub pending_bytes: usize,
    /// The longest message that a websocket may carry before `initialize` has succeeded on it, in bytes.
    /// Default 64 KiB. A longer one ends the connection before it is read.
    pub first_message_bytes: usize,
    /// Memory for large messages (more than 256 KiB) that come in over all websockets together, in
    /// bytes. Default 256 MiB. A message counts twice, for its text and for what is decoded of it, from
    /// before it is read until it is answered; one that finds too little left waits in its socket.
    ///
    /// A quarter of it is a reserve for first shares: of at most a 24th part (messages of up to 5 MiB), for
    /// connections that hold nothing else. A message that would take more than the rest waits for all of
    /// the rest. While one waits, a connection that holds memory and waits for its peer has to move a
    /// sixtieth of what it holds each second, and is closed once it is 10 s behind; so is one that holds
    /// memory for two minutes, whatever it waits for.
    pub message_memory: usize,
    /// Memory for large answers (more than 256 KiB) of all connections together, in bytes. Default
    /// 256 MiB. An answer counts as what it carries and as its message, from before a file is read
    /// until the message is written to the socket; one that finds too little left waits. The reserve and
    /// the time to finish are those of [`message_memory`](Self::message_memory); a first share is enough
    /// for an answer that carries 4.5 MiB. Over other transports than websockets, only the two minutes
    /// count.
    pub answer_memory: usize,
    /// The part of that which one connection may hold. Default 64 MiB, or one larger answer alone.
    pub answer_memory_per_connection: usize,
    /// Threads among which a listener's connections are shared out, each staying on its own.
    /// Default 0: connections are served in the runtime that the listener is in;
    /// [`run`](crate::run) sets as many as there are processors.
    pub lanes: usize,
    /// Bytes of a websocket that the kernel takes ahead of what its peer has room for. Default
    /// 512 KiB.
    pub unsent_bytes: u32,
    /// Whether proxies of a managed network pass what is for private addresses on to the upstream proxy
    /// that applies, in place of connecting to them; loopback stays here. Default false. Nothing reads it
    /// while managed networks are not offered.
    pub proxy_private_ips_via_upstream: bool,
    /// How long a connection may take from being accepted to being a websocket. Default 10 s.
    pub handshake_timeout: Duration,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            connection: ConnectionConfig::default(),
            decode: DecodeLimits::default(),
            process: ProcessConfig::default(),
            files: Arc::default(),
            sandbox_executable: None,
            own_files: OwnFiles::default(),
            sandbox_assurance: Assurance::Full,
            sandbox_plan_cache: true,
            detach_ttl: Duration::from_secs(30),
            max_detach_ttl: Duration::from_secs(7 * 24 * 3600),
            stop_grace: Duration::ZERO,
            takeover_patience: Duration::from_secs(5),
            concurrent_requests: 64,
            pending_requests: 4096,
            pending_bytes: 96 << 20,
            first_message_bytes: 64 << 10,
            message_memory: 256 << 20,
            answer_memory: 256 << 20,
            answer_memory_per_connection: 64 << 20,
            lanes: 0,
            unsent_bytes: 512 << 10,
            proxy_private_ips_via_upstream: false,
            handshake_timeout: Duration::from_secs(10),
        }
    }
}
