//! Processes: start, output and exit, read, write, signal, terminate, resize, list.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::base64_bytes::Base64Bytes;
use crate::network::{ManagedNetwork, NetworkInfo, NetworkProxyLaunch};
use crate::path_uri::PathUri;
use crate::permissions::{Assurance, SandboxContext};
use crate::resources::{AppliedLimits, EndedBy, ResourceLimits, Usage};

/// A process's name, chosen by the client, unique in its session.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct ProcessId(pub Arc<str>);

impl From<&str> for ProcessId {
    fn from(id: &str) -> Self {
        Self(id.into())
    }
}

impl From<String> for ProcessId {
    fn from(id: String) -> Self {
        Self(id.into())
    }
}

impl fmt::Display for ProcessId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Environment variables. `Debug` shows their names only.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct Env(pub BTreeMap<String, String>);

impl fmt::Debug for Env {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

impl<K: Into<String>, V: Into<String>> FromIterator<(K, V)> for Env {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(pairs: I) -> Self {
        Self(pairs.into_iter().map(|(k, v)| (k.into(), v.into())).collect())
    }
}

/// JSON that is preserved and not interpreted. `Debug` hides it.
#[derive(Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct Opaque(
    #[cfg_attr(feature = "schema", schemars(with = "serde_json::Value"))] pub Box<RawValue>,
);

impl fmt::Debug for Opaque {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

impl PartialEq for Opaque {
    fn eq(&self, other: &Self) -> bool {
        self.0.get() == other.0.get()
    }
}

/// Rows and columns of a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TerminalSize {
    /// Height in lines.
    pub rows: u16,
    /// Width in characters.
    pub cols: u16,
}

impl Default for TerminalSize {
    fn default() -> Self {
        Self { rows: 24, cols: 80 }
    }
}

/// Params of `process/start`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ExecParams {
    /// The process's id, chosen by the client.
    pub process_id: ProcessId,
    /// Program and arguments; the program is looked up in the child's `PATH`.
    pub argv: Vec<String>,
    /// Working directory.
    pub cwd: PathUri,
    /// The whole environment; with `env_policy`, variables that are added to the result of that.
    #[serde(default)]
    pub env: Env,
    /// Start from the server's environment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_policy: Option<EnvPolicy>,
    /// Use a terminal instead of pipes.
    #[serde(default)]
    pub tty: bool,
    /// Without a terminal: keep stdin open for `process/write`.
    #[serde(default)]
    pub pipe_stdin: bool,
    /// What the program sees as `argv[0]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arg0: Option<String>,
    /// The sandbox policy; unrestricted if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
    /// With a sandbox: leave the process no way out but its proxy, or refuse to start it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub enforce_managed_network: bool,
    /// Information about the caller; ignored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Opaque>,
    /// A proxy of the client's own; ignored beside `network_proxy`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub managed_network: Option<ManagedNetwork>,
    /// A proxy for this process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_proxy: Option<NetworkProxyLaunch>,
    /// Run the profile of a login shell once, and start later shells from the result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shell_snapshot: Option<ShellSnapshotParams>,
    /// **extension**: the terminal's size; 24×80 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<TerminalSize>,
    /// **extension**: how much output is retained, and what happens at the limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retain: Option<Retain>,
    /// **extension**: what the process and its descendants may use.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "crate::resources::requested"
    )]
    #[cfg_attr(feature = "schema", schemars(with = "Option<crate::resources::Requested>"))]
    pub limits: Option<ResourceLimits>,
}

/// `shellSnapshot` of `process/start`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ShellSnapshotParams {
    /// Commands of the same scope may share a snapshot; at most 256 bytes.
    pub scope_id: String,
    /// The shell.
    pub shell: SnapshotShell,
}

/// The shell of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SnapshotShell {
    /// `bash`, `zsh` or `sh`.
    pub name: String,
    /// Its path, which `argv` starts with.
    pub path: String,
}

/// How the child's environment is made from the server's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct EnvPolicy {
    /// What to start from.
    pub inherit: EnvInherit,
    /// Keep variables with names like `*KEY*`, `*SECRET*`, `*TOKEN*` (default false).
    pub ignore_default_excludes: bool,
    /// Names to drop, as case-insensitive globs.
    pub exclude: Vec<String>,
    /// Variables to add after that.
    pub set: Env,
    /// If not empty, keep only these names in the end.
    pub include_only: Vec<String>,
}

/// Which of the server's variables an [`EnvPolicy`] starts from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum EnvInherit {
    /// All of them.
    #[default]
    All,
    /// The few that every program expects.
    Core,
    /// Nothing.
    None,
}

/// How much output of a process is retained for `process/read`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Retain {
    /// Maximum retained output, in bytes.
    pub bytes: u64,
    /// What happens at the limit; the process waits by default.
    #[serde(default)]
    pub on_full: OnFull,
    /// **extension** `processRetainUntilRead`: which output must not be dropped.
    #[serde(default, skip_serializing_if = "RetainUntil::is_sent")]
    pub until: RetainUntil,
}

/// Until when output must be retained.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum RetainUntil {
    /// Until it has reached the client: over a websocket, until the client has answered a ping that was
    /// sent after it; over other transports, until it is sent.
    #[default]
    Sent,
    /// Until a `process/read` requests what comes after it, which confirms its arrival. A slow client makes
    /// the process wait, and neither a dropped connection nor a slow reader loses anything.
    Read,
}

impl RetainUntil {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature serde asks for")]
    fn is_sent(&self) -> bool {
        *self == Self::Sent
    }
}

/// What happens to new output when the retained output is at its limit and must not be dropped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum OnFull {
    /// The process waits, as at a full pipe.
    #[default]
    Wait,
    /// The oldest output is dropped, and counted.
    Drop,
}

/// Result of `process/start`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ExecResponse {
    /// The id that the client chose.
    pub process_id: ProcessId,
    /// The kind of sandbox; absent from older servers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_type: Option<SandboxType>,
    /// **extension**: the assurance of its sandbox, if it has one.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "crate::permissions::assurance::lenient"
    )]
    #[cfg_attr(feature = "schema", schemars(with = "Option<crate::schema::ReportedAssurance>"))]
    pub sandbox_assurance: Option<Assurance>,
    /// **extension**: how it reaches its proxies, if `networkProxy.transparent` was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkInfo>,
    /// **extension**: the limits in force; absent if there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<Box<AppliedLimits>>,
}

/// The kind of sandbox around a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
#[cfg_attr(feature = "schema", schemars(transform = crate::schema::open_enum))]
pub enum SandboxType {
    /// Nothing.
    None,
    /// A Linux sandbox of any kind.
    LinuxSeccomp,
    /// The macOS sandbox.
    MacosSeatbelt,
    /// The Windows sandbox.
    WindowsRestrictedToken,
    /// A kind that this version does not know.
    #[serde(other)]
    Other,
}

/// The stream that output came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum OutputStream {
    /// Standard output of a process with pipes.
    Stdout,
    /// Standard error of a process with pipes.
    Stderr,
    /// Both, through a terminal.
    Pty,
}

impl OutputStream {
    /// The name in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
            Self::Pty => "pty",
        }
    }
}

/// Params of the notification `process/output`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ExecOutputDeltaNotification {
    /// The process.
    pub process_id: ProcessId,
    /// The number of the event, counted per process from 1.
    pub seq: u64,
    /// The stream that it came from.
    pub stream: OutputStream,
    /// The bytes.
    pub chunk: Base64Bytes,
}

/// Params of the notification `process/exited`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ExecExitedNotification {
    /// The process.
    pub process_id: ProcessId,
    /// The number of the event, counted per process from 1.
    pub seq: u64,
    /// The exit code; 128 + N if signal N killed the process.
    pub exit_code: i32,
    /// Whether the sandbox probably caused the failure.
    #[serde(default)]
    pub sandbox_denied: bool,
    /// **extension**: why it ended, if it did not exit by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_by: Option<EndedBy>,
    /// **extension**: what it used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
}

/// Params of the notification `process/closed`, the last one of a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ExecClosedNotification {
    /// The process.
    pub process_id: ProcessId,
    /// The number of the event; absent from older servers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq: Option<u64>,
}

/// Params of `process/read`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ReadParams {
    /// The process.
    pub process_id: ProcessId,
    /// Return only chunks with a higher number; all if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_seq: Option<u64>,
    /// Return at most this many bytes, but at least one chunk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_bytes: Option<u64>,
    /// How long to wait for output or an event, in milliseconds; no wait if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<u64>,
}

/// A piece of output in [`ReadResponse`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ProcessOutputChunk {
    /// The number of the event, counted per process from 1.
    pub seq: u64,
    /// The stream that it came from.
    pub stream: OutputStream,
    /// The bytes.
    pub chunk: Base64Bytes,
}

/// Result of `process/read`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct ReadResponse {
    /// The chunks, oldest first.
    pub chunks: Vec<ProcessOutputChunk>,
    /// The number after the last chunk if `max_bytes` cut the list, otherwise the process's next number.
    pub next_seq: u64,
    /// Whether the process has exited.
    pub exited: bool,
    /// The exit code; 128 + N if signal N killed the process.
    pub exit_code: Option<i32>,
    /// Whether the process has exited and its streams have ended.
    pub closed: bool,
    /// Why the process failed, if the server could not run it to its end.
    pub failure: Option<String>,
    /// Whether the sandbox probably caused the exit.
    pub sandbox_denied: bool,
    /// **extension**: bytes dropped before the first chunk returned.
    #[serde(skip_serializing_if = "is_zero")]
    pub dropped_bytes: u64,
    /// **extension**: why the process ended, if it did not exit by itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended_by: Option<EndedBy>,
    /// **extension**: what it used, once it has exited.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// Params of `process/write`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct WriteParams {
    /// The process.
    pub process_id: ProcessId,
    /// The bytes to write.
    pub chunk: Base64Bytes,
    /// An id that makes a retry safe; older clients leave it out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_id: Option<String>,
    /// **extension**: close stdin after this chunk; on a terminal, send its EOF character.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub close_stdin: bool,
}

/// Result of `process/write`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WriteResponse {
    /// Whether the bytes were accepted.
    pub status: WriteStatus,
}

/// Whether bytes for stdin were accepted; nothing was written unless [`WriteStatus::Accepted`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum WriteStatus {
    /// Accepted, to be written in order.
    Accepted,
    /// The session has no such process.
    UnknownProcess,
    /// The process has neither a terminal nor a stdin pipe, or stdin is closed.
    StdinClosed,
    /// The process is still starting.
    Starting,
}

/// Params of `process/signal`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct SignalParams {
    /// The process whose group gets the signal.
    pub process_id: ProcessId,
    /// The signal.
    pub signal: ProcessSignal,
}

/// A signal by its portable name; all except `interrupt` are an **extension**.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum ProcessSignal {
    /// SIGINT.
    Interrupt,
    /// SIGTERM.
    Terminate,
    /// SIGKILL.
    Kill,
    /// SIGHUP.
    Hangup,
    /// SIGQUIT.
    Quit,
    /// SIGUSR1.
    User1,
    /// SIGUSR2.
    User2,
    /// SIGSTOP.
    Stop,
    /// SIGCONT.
    Continue,
}

/// Result of `process/signal`: empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SignalResponse {}

/// Params of `process/terminate`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct TerminateParams {
    /// The process.
    pub process_id: ProcessId,
}

/// Result of `process/terminate`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TerminateResponse {
    /// Whether the process was running; it is killed now.
    pub running: bool,
}

/// Params of `process/resize` (**extension**).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ResizeParams {
    /// The process that has the terminal.
    pub process_id: ProcessId,
    /// Height in lines.
    pub rows: u16,
    /// Width in characters.
    pub cols: u16,
    /// How this size counts beside those of other clients; `smallest` if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fit: Option<Fit>,
}

/// How the size of one client counts (**extension**).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum Fit {
    /// The terminal has the smallest size of all clients, in each direction.
    #[default]
    Smallest,
    /// The terminal has the size of this client; of several, the one that asked last.
    Mine,
}

/// Result of `process/resize`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ResizeResponse {
    /// The size of the terminal; absent from a server without sharing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<TerminalSize>,
}

/// Params of the notification `process/resized` (**extension**), for clients with a role.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ProcessResizedNotification {
    /// The process that has the terminal.
    pub process_id: ProcessId,
    /// The number of the last event before the change.
    pub after_seq: u64,
    /// How often the size has changed, this time included.
    pub resizes: u64,
    /// The new size.
    pub size: TerminalSize,
}

/// Params of `process/screen` (**extension**).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ScreenParams {
    /// The process that has the terminal.
    pub process_id: ProcessId,
}

/// Result of `process/screen`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ScreenResponse {
    /// The number of the last event that the screen shows.
    pub seq: u64,
    /// How often the size has changed; a `process/resized` with a number that is not above it is in it.
    pub resizes: u64,
    /// The size of the terminal.
    pub size: TerminalSize,
    /// What brings a terminal of this size into the same state: history, screen, modes.
    pub repaint: Base64Bytes,
}

/// Params of `process/list` (**extension**): none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ListParams {}

/// Result of `process/list`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ListResponse {
    /// The session's processes, oldest first.
    pub processes: Vec<ProcessInfo>,
}

/// One process of `process/list`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ProcessInfo {
    /// Its id in the session.
    pub process_id: ProcessId,
    /// Program and arguments; the server may cut a long command line, which then ends in an ellipsis.
    pub argv: Vec<String>,
    /// Its working directory.
    pub cwd: PathUri,
    /// Whether it has a terminal.
    pub tty: bool,
    /// Its PID; null while it starts.
    pub pid: Option<u32>,
    /// When it started, in milliseconds since 1970.
    pub started_at_ms: u64,
    /// Whether the process has exited.
    pub exited: bool,
    /// The exit code; 128 + N if signal N killed the process.
    pub exit_code: Option<i32>,
    /// Whether the process has exited and its streams have ended.
    pub closed: bool,
    /// The number of its next event.
    pub next_seq: u64,
    /// **extension**: the limits in force; absent if there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<Box<AppliedLimits>>,
    /// **extension**: why it ended, if it did not exit by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_by: Option<EndedBy>,
    /// **extension**: what it used, once it has exited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
}

crate::encode::by_serde! { ExecParams, ExecResponse, ExecExitedNotification, ExecClosedNotification, ReadParams, WriteResponse, SignalParams, SignalResponse, TerminateParams, TerminateResponse, ResizeParams, ResizeResponse, ProcessResizedNotification, ScreenParams, ScreenResponse, ListParams, ListResponse }
