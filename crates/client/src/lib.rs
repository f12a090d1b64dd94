//! A client of an exec-server: run commands and work with files on another machine, without losing a
//! byte to a dropped connection.
//!
//! [`ExecServerClient`] is a session. It connects [by websocket](ExecServerClient::connect_websocket),
//! [through a command](ExecServerClient::connect_stdio_command), over [a connection in
//! memory](ExecServerClient::connect_connection), or through [any dialer](Dialer).
//! [`spawn`](ExecServerClient::spawn) starts an [`ExecCommand`] and gives a [`Process`];
//! [`files`](ExecServerClient::files) reads, writes, walks and transfers.
//!
//! When the connection drops, the client dials again and resumes the session: processes keep running, the
//! client fetches missed output and sends input exactly once. It reports what it cannot recover as
//! [`ExecServerError::Lost`].
//!
//! This crate does not depend on the server's operating system and runs nothing itself.

mod approval;
mod backoff;
mod calls;
mod channel;
mod client;
mod dialer;
mod driver;
#[cfg(feature = "remote")]
mod environment;
mod error;
mod files;
mod handshake;
mod heartbeat;
mod http;
mod infer_kind;
mod options;
mod patch;
mod policy;
mod process;
mod shared;
mod subscriptions;

pub use approval::{Approval, Denial};
pub use backoff::{Jitter, ReconnectPolicy};
pub use client::ExecServerClient;
pub use dialer::{DialFuture, Dialer, StdioDialer, WebsocketDialer};
#[cfg(feature = "remote")]
pub use environment::EnvironmentDialer;
pub use error::{DialFailure, ExecServerError, Lost};
pub use files::{
    Changes, FileReader, FileWriter, Files, TransferOptions, TransferProgress, TransferReport,
    Walk, WalkItem, Watch,
};
pub use heartbeat::Heartbeat;
pub use http::HttpBody;
pub use options::{ClientTuning, ExecServerClientConnectOptions, RemoteExecServerConnectArgs};
pub use patch::{
    DiffHunk, FileDiff, Hunk, HunkLine, Patch, PatchChange, PatchChangeKind, PatchError,
    PatchReport, PatchSection,
};
pub use process::{
    ExecCommand, ExitStatus, OnSlowConsumer, Output, Process, ProcessEvent, ProcessEvents,
    ProcessOutput, ProcessStdin,
};
pub use shared::ConnectionStatus;
pub use subscriptions::Notifications;

#[cfg(feature = "remote")]
pub use codex_exec_remote as remote;
pub use codex_exec_rpc::{Connection, ConnectionConfig, WebsocketDial, trust_only};
pub use codex_exec_server_protocol as protocol;
pub use codex_exec_server_protocol::process::OutputStream;
pub use codex_exec_server_protocol::{ErrorKind, PathUri, PermissionProfile, SandboxContext};
