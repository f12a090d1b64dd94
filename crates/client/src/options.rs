//! How a client connects, and every limit and timeout it keeps.

use std::fmt;
use std::time::Duration;

use codex_exec_rpc::{ConnectionConfig, KeepAlive};

use crate::backoff::ReconnectPolicy;

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
    /// What the server's logs call this client. Default `codex-exec-client`.
    pub client_name: String,
    /// The session to attach to, instead of a new one.
    pub resume_session_id: Option<String>,
    /// How long `initialize` may take. Default 10 s.
    pub initialize_timeout: Duration,
    /// **extension**: how long the session should outlive its connection; the server's own period
    /// where `None`, and never longer than the server allows.
    pub detach_ttl: Option<Duration>,
    /// What to do when the connection drops.
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
            reconnect: ReconnectPolicy::default(),
            tuning: ClientTuning::default(),
        }
    }
}

/// Limits and timeouts of a client.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ClientTuning {
    /// How long an answer may take, once the request is sent; `None` waits for ever. Does not hold
    /// for writes to stdin (the process decides) nor for `http/request` (it has its own), and a
    /// `process/read` gets its `waitMs` on top. Default 120 s.
    pub request_timeout: Option<Duration>,
    /// Bytes of output that wait for the consumer of one process. Default 8 MiB.
    pub event_window: usize,
    /// Bytes of one process's output that wait in a temporary file once the window is full, where
    /// the server does not keep them until they are read. Beyond that the connection is not read
    /// until the consumer has caught up. Default 256 MiB.
    pub spill_limit: u64,
    /// How long a missing event is waited for before it is fetched. Default 200 ms.
    pub reorder_patience: Duration,
    /// Bytes for one process's stdin that the server has not accepted yet. Default 256 KiB.
    pub stdin_window: usize,
    /// The largest single write to stdin. Default 64 KiB.
    pub stdin_chunk: usize,
    /// Writes to one stdin that are under way at once. Default 8.
    pub stdin_in_flight: usize,
    /// Notifications that wait in one subscription. Default 1,024.
    pub notice_queue: usize,
    /// The size of a block of a streamed file, at most 1 MiB. Default 256 KiB.
    pub file_block: usize,
    /// Blocks of one streamed file that are under way at once. Default 8.
    pub file_in_flight: usize,
    /// Files up to this size are read and written by one request. Default 16 MiB.
    pub whole_file: usize,
    /// The connection's own limits. Differs from the server's in its keep-alive: a ping after 10 s
    /// of silence, given up 15 s later, so that a dead connection is noticed while the session
    /// still lives.
    pub connection: ConnectionConfig,
}

impl Default for ClientTuning {
    fn default() -> Self {
        Self {
            request_timeout: Some(Duration::from_secs(120)),
            event_window: 8 << 20,
            spill_limit: 256 << 20,
            reorder_patience: Duration::from_millis(200),
            stdin_window: 256 << 10,
            stdin_chunk: 64 << 10,
            stdin_in_flight: 8,
            notice_queue: 1024,
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
    /// `ws://HOST:PORT` or `wss://HOST`.
    pub websocket_url: String,
    /// What the server's logs call this client.
    pub client_name: String,
    /// For the name lookup, TCP, TLS and the upgrade together. Default 10 s.
    pub connect_timeout: Duration,
    /// How long `initialize` may take. Default 10 s.
    pub initialize_timeout: Duration,
    /// The session to attach to, instead of a new one.
    pub resume_session_id: Option<String>,
    /// Sent as `Authorization: Bearer …`. Never shown.
    pub bearer_token: Option<String>,
    /// `SO_RCVBUF` of the socket, see
    /// [`WebsocketDial::receive_buffer`](codex_exec_rpc::WebsocketDial). Default 1 MiB.
    pub receive_buffer: Option<u32>,
    /// **extension**: how long the session should outlive its connection.
    pub detach_ttl: Option<Duration>,
    /// What to do when the connection drops.
    pub reconnect: ReconnectPolicy,
    /// Limits and timeouts.
    pub tuning: ClientTuning,
}

impl RemoteExecServerConnectArgs {
    /// This server, a new session, default limits.
    pub fn new(websocket_url: impl Into<String>, client_name: impl Into<String>) -> Self {
        let options = ExecServerClientConnectOptions::default();
        Self {
            websocket_url: websocket_url.into(),
            client_name: client_name.into(),
            connect_timeout: Duration::from_secs(10),
            initialize_timeout: options.initialize_timeout,
            resume_session_id: None,
            bearer_token: None,
            receive_buffer: Some(1 << 20),
            detach_ttl: None,
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
