//! The execution server and its client: run commands and work with files on another machine.
//!
//! This crate has no code. It re-exports the public names of other crates: the server
//! (`codex-exec-serving`), the client (`codex-exec-client`) and the messages between them
//! (`codex-exec-server-protocol`).
//!
//! A [`Server`] serves [`Connection`]s: in memory ([`Server::connect`]), over websockets
//! ([`WebSocketListener`]), over stdio, through a rendezvous ([`run_remote_environment`]).
//! An [`ExecServerClient`] is a session with a server.
//!
//! ```
//! use codex_exec_server::client::ExecCommand;
//! use codex_exec_server::{ExecServerClient, Server, ServerConfig};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let server = Server::new(ServerConfig::default())?;
//! let client = ExecServerClient::connect_connection(server.connect(), Default::default()).await?;
//! let output = client.run(ExecCommand::new(["echo", "hello"])).await?;
//! assert_eq!(output.stdout, b"hello\n");
//! server.shut_down().await;
//! # Ok(())
//! # }
//! ```
//!
//! [`run_main`] is a whole server program:
//!
//! ```no_run
//! use codex_exec_server::{DEFAULT_LISTEN_URL, ExecServerRuntimePaths, main_if_reentered, run_main};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//!     main_if_reentered();
//!     let paths = ExecServerRuntimePaths::new(std::env::current_exe()?, None)?;
//!     tokio::runtime::Runtime::new()?.block_on(run_main(DEFAULT_LISTEN_URL, paths))
//! }
//! ```
//!
//! # Features
//!
//! All are on by default. `server` and `client` are the two sides; `remote` adds remote mode to them: the
//! registry, sign-in and the encrypted relay. Without `remote`, neither Noise nor OAuth is compiled.

// The examples of the guide are tests, too.
#![cfg_attr(doctest, doc = include_str!("../../../docs/guides/embedding.md"))]

// The server.
#[cfg(feature = "server")]
pub use codex_exec_serving::{
    Assurance, AuditConfig, AuditLog, AuthConfigError, Connection, ConnectionConfig, ControlClient,
    ControlError, DEFAULT_LISTEN_URL, DecodeLimits, DrainEnd, DrainStatus, EntryConfig,
    EnvironmentPlaces, ExecServerListenUrlParseError, ExecServerRuntimePaths, FilesConfig,
    InheritedSocket, KeepAlive, Lifeline, LimitConfig, ListenUrl, ListenerTlsError, Listening,
    NEVER_INHERITED, NEVER_PASSED_ON, OperatorPolicy, OutboundConfig, OwnFiles, PolicyFileError,
    ProcessConfig, Quota, RecordConfig, Recorder, RunError, Server, ServerConfig, ServerStatus,
    ServiceNotifier, SessionCounts, SignedBearer, SpanConfig, SpanEndpointError, StatusLimits,
    TlsError, TlsFiles, WebSocketAuth, WebSocketListener, main_if_reentered, run, run_main,
    shutdown_signal,
};

// Its remote mode.
#[cfg(feature = "remote")]
pub use codex_exec_credentials as credentials;
#[cfg(feature = "remote")]
pub use codex_exec_credentials::{SignIn, SignInError, SignInKind, SignInSources};
#[cfg(feature = "remote")]
pub use codex_exec_remote as remote_mode;
#[cfg(feature = "remote")]
pub use codex_exec_remote::{RelayConfig, Secret};
#[cfg(all(feature = "server", feature = "remote"))]
pub use codex_exec_serving::{
    DirectEnvironmentConfig, RemoteEnvironmentConfig, RemoteExecutorConfig, RemoteRunError,
    run_direct_environment_until, run_remote_environment, run_remote_environment_until,
    run_remote_executor, run_remote_executor_until,
};

// The client.
#[cfg(feature = "client")]
pub use codex_exec_client as client;
#[cfg(feature = "client")]
pub use codex_exec_client::{
    ExecServerClient, ExecServerClientConnectOptions, ExecServerError, RemoteExecServerConnectArgs,
};

// The messages.
pub use codex_exec_server_protocol as protocol;
pub use codex_exec_server_protocol::environment::{
    Capabilities, EnvironmentInfo, EnvironmentInfoParams, EnvironmentStatusParams,
    EnvironmentStatusResponse, ShellInfo,
};
pub use codex_exec_server_protocol::files::{
    FsCancelSearchParams, FsCancelSearchResponse, FsCanonicalizeParams, FsCanonicalizeResponse,
    FsChange, FsChangeKind, FsChangedNotification, FsCloseParams, FsCloseResponse, FsCopyParams,
    FsCopyResponse, FsCreateDirectoryParams, FsCreateDirectoryResponse, FsDone, FsEntryKind,
    FsGetMetadataParams, FsGetMetadataResponse, FsGlobParams, FsGlobResponse,
    FsMissingChangedNotification, FsOpenMode, FsOpenParams, FsOpenResponse, FsPathError,
    FsReadBlockParams, FsReadBlockResponse, FsReadDirectoryEntry, FsReadDirectoryParams,
    FsReadDirectoryResponse, FsReadFileParams, FsReadFileResponse, FsRemoveParams,
    FsRemoveResponse, FsRenameParams, FsRenameResponse, FsSearchFile, FsSearchLine,
    FsSearchLineKind, FsSearchMatchesNotification, FsSearchParams, FsSearchRange, FsSearchResponse,
    FsSetModeParams, FsSetModeResponse, FsSymlinkParams, FsSymlinkResponse, FsUnwatchParams,
    FsUnwatchResponse, FsWalkEntry, FsWalkOptions, FsWalkParams, FsWalkResponse,
    FsWatchMissingParams, FsWatchMissingResponse, FsWatchParams, FsWatchResponse,
    FsWriteBlockParams, FsWriteBlockResponse, FsWriteFileParams, FsWriteFileResponse,
};
pub use codex_exec_server_protocol::http::{
    HttpHeader, HttpRedirectPolicy, HttpRequestBodyDeltaNotification, HttpRequestParams,
    HttpRequestResponse,
};
pub use codex_exec_server_protocol::process::{
    Env, EnvInherit, EnvPolicy, ExecClosedNotification, ExecExitedNotification,
    ExecOutputDeltaNotification, ExecParams, ExecResponse, Fit, ListParams, ListResponse, OnFull,
    Opaque, OutputStream, ProcessId, ProcessInfo, ProcessOutputChunk, ProcessResizedNotification,
    ProcessSignal, ReadParams, ReadResponse, ResizeParams, ResizeResponse, Retain, RetainUntil,
    SandboxType, ScreenParams, ScreenResponse, ShellSnapshotParams, SignalParams, SignalResponse,
    SnapshotShell, TerminalSize, TerminateParams, TerminateResponse, WriteParams, WriteResponse,
    WriteStatus,
};
pub use codex_exec_server_protocol::resources::{
    AppliedLimit, AppliedLimits, EndedBy, LimitMechanism, PerResource, Resource, ResourceLimits,
    Usage,
};
pub use codex_exec_server_protocol::session::{
    AttachParams, InitializeParams, InitializeResponse, InitializedParams, Role,
    SessionDetachedNotification, SessionInfo, SessionListParams, SessionListResponse,
};
pub use codex_exec_server_protocol::{ErrorKind, PathUri, RpcError};
