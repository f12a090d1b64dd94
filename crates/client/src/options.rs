//! How a client connects, and its limits and timeouts.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use codex_exec_rpc::{ConnectionConfig, KeepAlive};
use codex_exec_server_protocol::session::AttachParams;

use crate::backoff::ReconnectPolicy;
use crate::heartbeat::Heartbeat;

/// How to open or resume a session over any transport.
///
/// ```
/// use codex_exec_client::{ExecServerClientConnectOptions, ReconnectPolicy};
/// let mut options = ExecServerClientConnectOptions::default();
/// options.client_name = "my-tool".into();
/// options.reconnect = ReconnectPolicy::never();
/// assert!(options.resume_session_id.is_none());
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ExecServerClientConnectOptions {
    /// The name of this client in the server's logs. Default `codex-exec-client`.
    pub client_name: String,
    /// The session to resume. Default none: a new session.
    pub resume_session_id: Option<String>,
    /// How long `initialize` may take. Default 10 s.
    pub initialize_timeout: Duration,
    /// **extension**: how long the server keeps the session without a connection, at most as long as the
    /// server allows. Default: the server's own time.
    pub detach_ttl: Option<Duration>,
    /// **extension**: how this client takes part in the session. Default: as its holder, without what only
    /// clients with a role are sent.
    pub attach: Option<AttachParams>,
    /// **extension**: the name of a new session, for people. Default none.
    pub session_name: Option<String>,
    /// Whether and how long to reconnect when the connection drops.
    pub reconnect: ReconnectPolicy,
    /// Limits and timeouts.
    pub tuning: ClientTuning,
}

impl Default for ExecServerClientConnectOptions {
    fn default() -> Self {
        Self {
            client_name: "codex-exec-client".to_owned(),
            resume_session_id: None,
            initialize_timeout: Duration::from_secs(10),
            detach_ttl: None,
            attach: None,
            session_name: None,
            reconnect: ReconnectPolicy::default(),
            tuning: ClientTuning::default(),
        }
    }
}

/// Limits and timeouts of a client.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ClientTuning {
    /// How long to wait for a response once the request is sent; `None` waits for ever. Default 120 s.
    /// Does not apply to writes to stdin (the process decides) and `http/request` (it has its own
    /// timeout); `process/read` gets its `waitMs` in addition.
    pub request_timeout: Option<Duration>,
    /// Output of one process that the client buffers in memory, in bytes. Default 8 MiB; then see
    /// [`OnSlowConsumer`](crate::OnSlowConsumer).
    pub event_window: usize,
    /// Output of one process that the client buffers in a temporary file once the window is full, in
    /// bytes, if the server does not retain it until it is read. Default 256 MiB; then the client does
    /// not read the connection until the consumer has caught up.
    pub spill_limit: u64,
    /// How long to wait for a missing event before the client reads it. Default 200 ms.
    pub reorder_timeout: Duration,
    /// Bytes for one process's stdin that the server has not accepted yet. Default 256 KiB; then writes
    /// wait.
    pub stdin_window: usize,
    /// The largest single write to stdin, in bytes. Default 64 KiB.
    pub stdin_chunk: usize,
    /// Concurrent writes to one stdin. Default 8.
    pub stdin_in_flight: usize,
    /// Notifications that one subscription queues. Default 1,024; more are dropped and counted.
    pub notification_queue: usize,
    /// The size of a block of a streamed file, in bytes, at most 1 MiB. Default 256 KiB.
    pub file_block: usize,
    /// Concurrent block requests of one streamed file. Default 8.
    pub file_in_flight: usize,
    /// The largest file that one request reads or writes, in bytes. Default 16 MiB.
    pub whole_file: usize,
    /// The connection's limits. Its keep-alive differs from the server's: a ping after 10 s of silence,
    /// and a timeout of 15 s, so that the client detects a dead connection while the server still keeps
    /// the session.
    pub connection: ConnectionConfig,
    /// How to notice, over any transport, that the server has fallen silent. Default `None`: by the keep-alive
    /// of the connection alone, which is slower, and which a relay does not have.
    pub heartbeat: Option<Heartbeat>,
}

impl Default for ClientTuning {
    fn default() -> Self {
        Self {
            request_timeout: Some(Duration::from_secs(120)),
            event_window: 8 << 20,
            spill_limit: 256 << 20,
            reorder_timeout: Duration::from_millis(200),
            stdin_window: 256 << 10,
            stdin_chunk: 64 << 10,
            stdin_in_flight: 8,
            notification_queue: 1024,
            file_block: 256 << 10,
            file_in_flight: 8,
            whole_file: 16 << 20,
            connection: ConnectionConfig {
                keep_alive: Some(KeepAlive {
                    idle: Duration::from_secs(10),
                    timeout: Duration::from_secs(15),
                }),
                ..ConnectionConfig::default()
            },
            heartbeat: None,
        }
    }
}

/// How to reach a server by websocket.
///
/// ```
/// use codex_exec_client::RemoteExecServerConnectArgs;
/// let mut args = RemoteExecServerConnectArgs::new("ws://127.0.0.1:4321", "my-tool");
/// args.bearer_token = Some("hunter2".into());
/// assert!(!format!("{args:?}").contains("hunter2"));
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct RemoteExecServerConnectArgs {
    /// `ws://HOST:PORT`, `wss://HOST`, `unix:PATH` or `vsock:CID:PORT`.
    pub websocket_url: String,
    /// The name of this client in the server's logs.
    pub client_name: String,
    /// How long the name lookup, TCP, TLS and the upgrade may take together. Default 10 s.
    pub connect_timeout: Duration,
    /// How long `initialize` may take. Default 10 s.
    pub initialize_timeout: Duration,
    /// The session to resume. Default none: a new session.
    pub resume_session_id: Option<String>,
    /// Sent as `Authorization: Bearer …`; `Debug` does not show it.
    pub bearer_token: Option<String>,
    /// The PEM files with the client's certificate and with its key, for a server that requires one. Default
    /// none.
    pub client_certificate: Option<(PathBuf, PathBuf)>,
    /// `SO_RCVBUF` of the socket, in bytes, see
    /// [`WebsocketDial::receive_buffer`](codex_exec_rpc::WebsocketDial). Default 1 MiB.
    pub receive_buffer: Option<u32>,
    /// **extension**: how long the server keeps the session without a connection. Default: the server's
    /// own time.
    pub detach_ttl: Option<Duration>,
    /// **extension**: how this client takes part in the session, see
    /// [`ExecServerClientConnectOptions::attach`].
    pub attach: Option<AttachParams>,
    /// **extension**: the name of a new session, for people. Default none.
    pub session_name: Option<String>,
    /// Whether and how long to reconnect when the connection drops.
    pub reconnect: ReconnectPolicy,
    /// Limits and timeouts.
    pub tuning: ClientTuning,
}

impl RemoteExecServerConnectArgs {
    /// A new session with this server, with default limits.
    pub fn new(websocket_url: impl Into<String>, client_name: impl Into<String>) -> Self {
        let options = ExecServerClientConnectOptions::default();
        Self {
            websocket_url: websocket_url.into(),
            client_name: client_name.into(),
            connect_timeout: Duration::from_secs(10),
            initialize_timeout: options.initialize_timeout,
            resume_session_id: None,
            bearer_token: None,
            client_certificate: None,
            receive_buffer: Some(1 << 20),
            detach_ttl: None,
            attach: None,
            session_name: None,
            reconnect: options.reconnect,
            tuning: options.tuning,
        }
    }
}

impl From<RemoteExecServerConnectArgs> for ExecServerClientConnectOptions {
    fn from(args: RemoteExecServerConnectArgs) -> Self {
        Self {
            client_name: args.client_name,
            resume_session_id: args.resume_session_id,
            initialize_timeout: args.initialize_timeout,
            detach_ttl: args.detach_ttl,
            attach: args.attach,
            session_name: args.session_name,
            reconnect: args.reconnect,
            tuning: args.tuning,
        }
    }
}

impl fmt::Debug for RemoteExecServerConnectArgs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let url = codex_exec_rpc::WebsocketDial::new(&self.websocket_url).redacted_url();
        f.debug_struct("RemoteExecServerConnectArgs")
            .field("websocket_url", &url)
            .field("client_name", &self.client_name)
            .field("connect_timeout", &self.connect_timeout)
            .field("initialize_timeout", &self.initialize_timeout)
            .field("resume_session_id", &self.resume_session_id)
            .field("bearer_token", &self.bearer_token.as_ref().map(|_| "…"))
            .field("reconnect", &self.reconnect)
            .finish_non_exhaustive()
    }
}
