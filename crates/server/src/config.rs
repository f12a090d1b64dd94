//! Limits and timeouts of a server, each with its default.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use codex_exec_host::environment::EnvironmentPlaces;
use codex_exec_host::files::FilesConfig;
use codex_exec_host::process::ProcessConfig;
use codex_exec_host::sandbox::OwnFiles;
use codex_exec_rpc::ConnectionConfig;
use codex_exec_server_protocol::{Assurance, DecodeLimits};

use crate::audit::AuditLog;
use crate::entry::EntryConfig;
use crate::limits::LimitConfig;
use crate::policy::OperatorPolicy;
use crate::recording::Recorder;
use crate::spans::SpanConfig;

/// Limits and timeouts of a server.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ServerConfig {
    /// Limits of each connection's transport.
    pub connection: ConnectionConfig,
    /// Limits for parsing one message.
    pub decode: DecodeLimits,
    /// Limits of each process.
    pub process: ProcessConfig,
    /// What processes may use.
    pub limits: LimitConfig,
    /// Where to log who did what (default: nowhere).
    pub audit: Option<AuditLog>,
    /// Whether to count connections, starts and so on (default: false); true with a
    /// [`metrics_address`](Self::metrics_address).
    pub metrics: bool,
    /// Where a server program serves the counters as Prometheus text, at `/metrics` (default: nowhere).
    pub metrics_address: Option<SocketAddr>,
    /// Where a server program listens for its operator: a Unix socket (default: nowhere). Who may use it
    /// may stop the server.
    pub control_socket: Option<PathBuf>,
    /// Where to export spans of requests whose `traceparent` is sampled (default: nowhere).
    pub spans: Option<SpanConfig>,
    /// Records the terminals of processes (default: none).
    pub recorder: Option<Recorder>,
    /// Limits of filesystem requests.
    pub files: Arc<FilesConfig>,
    /// Where `environmentConfig/read` and `capabilities/discoverV2` look.
    pub environment: EnvironmentPlaces,
    /// The executable that the server re-enters to build a sandbox; it has to call
    /// [`main_if_reentered`](crate::main_if_reentered) first in its `main`. Without one, the server
    /// refuses requests that ask for a sandbox. Default none; [`run`](crate::run) sets it.
    pub sandbox_executable: Option<PathBuf>,
    /// Files of the server itself, such as its credentials, that no sandbox can open, whatever its
    /// policy says. Default none; [`run`](crate::run) adds the executables.
    pub own_files: OwnFiles,
    /// Variables that the server signs in with, besides the fixed list: no process inherits them, but a
    /// client may set them itself. Default none.
    pub own_variables: Vec<String>,
    /// The weakest sandbox level to accept for a request that names no `assurance`. Default full: on a
    /// machine that offers less, the server refuses such a request.
    pub sandbox_assurance: Assurance,
    /// Whether to reuse the cached plan of a sandbox policy until a file that it depends on changes.
    /// Default true. If false, the server computes a plan for every request, which takes longer for long
    /// policies.
    pub sandbox_plan_cache: bool,
    /// Sandboxed processes see the processes and the `/proc` of the host (default: false). They can still
    /// neither signal nor inspect those outside of their sandbox.
    pub sandbox_shares_pids: bool,
    /// How long the server keeps a session without a connection. Default 30 s; then it kills the
    /// session's processes.
    pub detach_ttl: Duration,
    /// The longest such time that a client may request. Default 7 days.
    pub max_detach_ttl: Duration,
    /// How long processes may run after SIGTERM when the server shuts down, before it kills them.
    /// Default 0: it kills them at once.
    pub stop_grace: Duration,
    /// How long a connection may leave a ping unanswered while another connection of the same principal
    /// asks for its session; after that it loses the session to the other. Default 5 s.
    pub takeover_timeout: Duration,
    /// Maximum requests of one connection that run at once, not counting those that only wait.
    /// Default 64.
    pub concurrent_requests: usize,
    /// Maximum requests of one connection without a response yet, including those that wait. Default
    /// 4,096. At the limit, the server does not read from the connection.
    pub pending_requests: usize,
    /// Maximum bytes of those requests. Default 96 MiB. At the limit, the server does not read from the
    /// connection.
    pub pending_bytes: usize,
    /// Longest message before `initialize` has succeeded on a websocket, in bytes. Default 64 KiB. A
    /// longer one closes the connection before the server reads it.
    pub first_message_bytes: usize,
    /// Memory for large incoming messages (more than 256 KiB) of all websockets together, in bytes.
    /// Default 256 MiB. A message counts twice, for its text and for its decoded form, from before the
    /// server reads it until it responds; a message that does not fit waits in its socket.
    ///
    /// A quarter is a reserve for first shares: at most a 24th part each (messages of up to 5 MiB), for
    /// connections that hold nothing else. A message that needs more than the rest waits for all of the
    /// rest. While one waits, a connection that holds memory and waits for its peer has to move a
    /// sixtieth of it each second. The server closes it once it is 10 s behind, or less while one such
    /// connection follows another (at least 1 s), and also once it has held memory for two minutes, whatever
    /// it waits for.
    pub message_memory: usize,
    /// Memory for large responses (more than 256 KiB) of all connections together, in bytes. Default
    /// 256 MiB. A response counts with its content and with its message, from before the server reads a
    /// file until the message is written to the socket; a response that does not fit waits. The reserve
    /// and the deadlines are those of [`message_memory`](Self::message_memory); a first share is enough
    /// for a response with 4.5 MiB of content. On transports other than websockets, only the two minutes
    /// apply.
    pub response_memory: usize,
    /// The part of it that one connection may hold, in bytes. Default 64 MiB; one larger response may
    /// take all of it.
    pub response_memory_per_connection: usize,
    /// `http/request`s of one connection that run at once, until their bodies have ended. Default 64; more
    /// wait.
    pub http_requests_per_connection: usize,
    /// `http/request`s of all connections that run at once. Default 512; more are refused with the kind
    /// `busy`.
    pub http_requests: usize,
    /// Memory for the changes that the watches of all connections have seen and not yet reported, in
    /// bytes. Default 64 MiB; changes beyond it are reported as an overflow.
    pub watch_memory: usize,
    /// Number of lanes, the threads that serve a listener's connections; each connection stays on one.
    /// Default 0: connections run on the listener's own runtime. [`run`](crate::run) sets one per
    /// processor.
    pub lanes: usize,
    /// Unsent bytes that the kernel buffers for a websocket (`TCP_NOTSENT_LOWAT`). Default 512 KiB.
    pub unsent_bytes: u32,
    /// Whether the proxies of a managed network pass connections to private addresses on to the upstream
    /// proxy, instead of connecting themselves; loopback is never passed on. Default false.
    pub proxy_private_ips_via_upstream: bool,
    /// Limits of shell snapshots.
    pub shell_snapshots: ShellSnapshotConfig,
    /// How long a TLS handshake may take, and the head of an HTTP request. Default 10 s.
    pub handshake_timeout: Duration,
    /// What clients may do at most, whatever they ask for. Default none: everything that the server's user may
    /// do. Requires [`sandbox_executable`](Self::sandbox_executable).
    pub policy: Option<OperatorPolicy>,
    /// Limits on the connections of listeners.
    pub entry: EntryConfig,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            connection: ConnectionConfig::default(),
            decode: DecodeLimits::default(),
            process: ProcessConfig::default(),
            limits: LimitConfig::default(),
            audit: None,
            metrics: false,
            metrics_address: None,
            spans: None,
            control_socket: None,
            recorder: None,
            files: Arc::default(),
            environment: EnvironmentPlaces::default(),
            sandbox_executable: None,
            own_files: OwnFiles::default(),
            own_variables: Vec::new(),
            sandbox_assurance: Assurance::Full,
            sandbox_plan_cache: true,
            sandbox_shares_pids: false,
            detach_ttl: Duration::from_secs(30),
            max_detach_ttl: Duration::from_secs(7 * 24 * 3600),
            stop_grace: Duration::ZERO,
            takeover_timeout: Duration::from_secs(5),
            concurrent_requests: 64,
            pending_requests: 4096,
            pending_bytes: 96 << 20,
            first_message_bytes: 64 << 10,
            message_memory: 256 << 20,
            response_memory: 256 << 20,
            response_memory_per_connection: 64 << 20,
            http_requests_per_connection: 64,
            http_requests: 512,
            watch_memory: 64 << 20,
            lanes: 0,
            unsent_bytes: 512 << 10,
            proxy_private_ips_via_upstream: false,
            shell_snapshots: ShellSnapshotConfig::default(),
            handshake_timeout: Duration::from_secs(10),
            policy: None,
            entry: EntryConfig::default(),
        }
    }
}

/// Limits of `shellSnapshot` in `process/start`.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct ShellSnapshotConfig {
    /// How long a login shell may take to print its state. Default 10 s; then the command runs as an
    /// ordinary login shell.
    pub timeout: Duration,
    /// How much it may print, in bytes. Default 512 KiB.
    pub bytes: usize,
    /// Snapshots that a session keeps. Default 16; the least recently used one goes first.
    pub entries: usize,
}

impl Default for ShellSnapshotConfig {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(10), bytes: 512 << 10, entries: 16 }
    }
}
