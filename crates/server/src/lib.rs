//! The execution server: runs commands and works with files for a client on another machine.
//!
//! A [`Server`] serves [`Connection`]s: in memory ([`Server::connect`]), over websockets
//! ([`WebSocketListener`]), over stdio, through a rendezvous ([`run_remote_environment`]).
//! [`run_main`] is a whole server program.
//!
//! The path of a request: [`Connection`] → envelope → one match in `connection` → handler →
//! owner of the process → response → the connection's bounded send queue.

mod audit;
mod auth;
mod client_calls;
mod config;
mod connection;
mod control;
#[cfg(feature = "remote")]
mod direct;
mod drain;
mod entry;
mod environment;
mod files;
#[cfg(feature = "remote")]
mod forward;
mod http;
mod lanes;
mod limits;
mod listen_url;
mod listener;
mod managed_network;
mod metrics;
mod network;
mod policy;
mod process;
mod recording;
#[cfg(feature = "remote")]
mod remote;
mod response_memory;
mod run;
mod sandbox;
mod server;
mod service_manager;
mod session;
mod shell_snapshots;
mod sink;
mod socket_file;
mod spans;
#[cfg(test)]
mod takeover_tests;
mod tls;

pub use audit::{AuditConfig, AuditLog};
pub use auth::{AuthConfigError, SignedBearer, WebSocketAuth};
pub use config::{ServerConfig, ShellSnapshotConfig};
pub use control::{
    ControlClient, ControlError, DrainEnd, DrainStatus, ServerStatus, SessionCounts, StatusLimits,
};
#[cfg(feature = "remote")]
pub use direct::{DirectEnvironmentConfig, run_direct_environment_until};
pub use entry::EntryConfig;
pub use limits::{LimitConfig, Quota};
pub use listen_url::{DEFAULT_LISTEN_URL, ExecServerListenUrlParseError, ListenUrl};
pub use listener::WebSocketListener;
pub use policy::{OperatorPolicy, PolicyFileError};
pub use recording::{RecordConfig, Recorder};
#[cfg(feature = "remote")]
pub use remote::{
    RemoteEnvironmentConfig, RemoteExecutorConfig, RemoteRunError, run_remote_environment,
    run_remote_environment_until, run_remote_executor, run_remote_executor_until,
};
pub use run::{ExecServerRuntimePaths, Listening, RunError, run, run_main, shutdown_signal};
pub use server::Server;
pub use service_manager::{InheritedSocket, ServiceNotifier};
pub use spans::{SpanConfig, SpanEndpointError};
pub use tls::ListenerTlsError;

// The types of the configuration's fields, and the connections that a server serves.
pub use codex_exec_host::environment::EnvironmentPlaces;
pub use codex_exec_host::files::FilesConfig;
pub use codex_exec_host::main_if_reentered;
pub use codex_exec_host::process::{Lifeline, NEVER_INHERITED, NEVER_PASSED_ON, ProcessConfig};
pub use codex_exec_host::sandbox::OwnFiles;
pub use codex_exec_rpc::{
    Connection, ConnectionConfig, KeepAlive, OutboundConfig, TlsError, TlsFiles,
};
pub use codex_exec_server_protocol::{Assurance, DecodeLimits};
