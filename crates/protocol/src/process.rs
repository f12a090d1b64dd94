//! Processes: start, output and exit, read, write, signal, terminate, resize, list.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::base64_bytes::Base64Bytes;
use crate::path_uri::PathUri;
use crate::permissions::{Assurance, SandboxContext};

/// A process's name, chosen by the client, unique in its session.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
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

/// JSON that is decoded and kept, but whose content is not ours to know. `Debug` hides it.
#[derive(Clone, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Opaque(pub Box<RawValue>);

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
pub struct TerminalSize {
    /// Lines.
    pub rows: u16,
    /// Characters in a line.
    pub cols: u16,
}

impl Default for TerminalSize {
    fn default() -> Self {
        Self { rows: 24, cols: 80 }
    }
}

/// Params of `process/start`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExecParams {
    /// Chosen by the client.
    pub process_id: ProcessId,
    /// Program and arguments; the program is looked up in the child's `PATH`.
    pub argv: Vec<String>,
    /// Working directory.
    pub cwd: PathUri,
    /// The whole environment, or what is laid over the one `env_policy` makes.
    #[serde(default)]
    pub env: Env,
    /// Take the server's environment as a start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_policy: Option<EnvPolicy>,
    /// A terminal instead of pipes.
    #[serde(default)]
    pub tty: bool,
    /// Without a terminal: keep stdin open for `process/write`.
    #[serde(default)]
    pub pipe_stdin: bool,
    /// What the program sees as `argv[0]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arg0: Option<String>,
    /// What it may do; anything where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
    /// Refuse to start without a managed network.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub enforce_managed_network: bool,
    /// Who asks; never acted on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Opaque>,
    /// A network we do not offer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub managed_network: Option<Opaque>,
    /// A proxy we do not offer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_proxy: Option<Opaque>,
    /// A snapshot we do not offer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shell_snapshot: Option<Opaque>,
    /// **extension**: the terminal's size, 24×80 where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<TerminalSize>,
    /// **extension**: how much output is kept, and what happens when that is full.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retain: Option<Retain>,
}

/// How the child's environment is made from the server's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EnvPolicy {
    /// What to start from.
    pub inherit: EnvInherit,
    /// Keep names like `*KEY*`, `*SECRET*`, `*TOKEN*`.
    pub ignore_default_excludes: bool,
    /// Names to drop, as globs without regard to case.
    pub exclude: Vec<String>,
    /// Variables to add after that.
    pub set: Env,
    /// If not empty, the only names to keep in the end.
    pub include_only: Vec<String>,
}

/// What of the server's environment an [`EnvPolicy`] starts from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EnvInherit {
    /// All of it.
    #[default]
    All,
    /// The handful every program expects.
    Core,
    /// Nothing.
    None,
}

/// How much of a process's output is kept for `process/read`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Retain {
    /// Bytes of output.
    pub bytes: u64,
    /// What a full store does.
    #[serde(default)]
    pub on_full: OnFull,
    /// **extension** `processRetainUntilRead`: what has to be kept.
    #[serde(default, skip_serializing_if = "RetainUntil::is_sent")]
    pub until: RetainUntil,
}

/// Until when output may not be dropped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RetainUntil {
    /// Until it has reached the client's side: over a websocket, until the client's side has answered a
    /// ping that was sent after it; over other transports, until it is sent.
    #[default]
    Sent,
    /// Until a `process/read` asks for what comes after it, which says that it has arrived. A client
    /// that does not keep up makes the process wait, and neither a dropped connection nor a slow
    /// reader loses anything.
    Read,
}

impl RetainUntil {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature serde asks for")]
    fn is_sent(&self) -> bool {
        *self == Self::Sent
    }
}

/// What happens to new output when the store is full of output that nobody was sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
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
#[serde(rename_all = "camelCase")]
pub struct ExecResponse {
    /// As asked for.
    pub process_id: ProcessId,
    /// What confines it; older servers do not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_type: Option<SandboxType>,
    /// **extension**: how much stands behind its sandbox, if it has one.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "crate::permissions::assurance::lenient"
    )]
    pub sandbox_assurance: Option<Assurance>,
}

/// What confines a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum SandboxType {
    /// Nothing.
    None,
    /// A Linux sandbox of any make.
    LinuxSeccomp,
    /// macOS.
    MacosSeatbelt,
    /// Windows.
    WindowsRestrictedToken,
    /// One this revision does not know.
    #[serde(other)]
    Other,
}

/// Where output came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
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
    /// The name on the wire.
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
#[serde(rename_all = "camelCase")]
pub struct ExecOutputDeltaNotification {
    /// Whose output.
    pub process_id: ProcessId,
    /// Its place among the process's events.
    pub seq: u64,
    /// Where it came from.
    pub stream: OutputStream,
    /// The bytes.
    pub chunk: Base64Bytes,
}

/// Params of the notification `process/exited`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExecExitedNotification {
    /// Who exited.
    pub process_id: ProcessId,
    /// Its place among the process's events.
    pub seq: u64,
    /// 128 + signal for a death by signal.
    pub exit_code: i32,
    /// The sandbox probably caused the failure.
    #[serde(default)]
    pub sandbox_denied: bool,
}

/// Params of the notification `process/closed`, the last one of a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExecClosedNotification {
    /// Who is done.
    pub process_id: ProcessId,
    /// Its place among the process's events; older servers leave it out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq: Option<u64>,
}

/// Params of `process/read`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReadParams {
    /// Of which process.
    pub process_id: ProcessId,
    /// Chunks with a higher number; all where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_seq: Option<u64>,
    /// Stop before this many bytes would be passed, but return at least one chunk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_bytes: Option<u64>,
    /// How long to wait for something to return; not at all where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<u64>,
}

/// A piece of output in [`ReadResponse`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessOutputChunk {
    /// Its place among the process's events.
    pub seq: u64,
    /// Where it came from.
    pub stream: OutputStream,
    /// The bytes.
    pub chunk: Base64Bytes,
}

/// Result of `process/read`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ReadResponse {
    /// Oldest first.
    pub chunks: Vec<ProcessOutputChunk>,
    /// One past the last chunk if the list was cut, else the process's next number.
    pub next_seq: u64,
    /// It has been reaped.
    pub exited: bool,
    /// 128 + signal for a death by signal.
    pub exit_code: Option<i32>,
    /// Exited, and its streams have ended.
    pub closed: bool,
    /// Why it cannot go on.
    pub failure: Option<String>,
    /// The sandbox probably caused the exit.
    pub sandbox_denied: bool,
    /// **extension**: bytes lost before the first chunk returned.
    #[serde(skip_serializing_if = "is_zero")]
    pub dropped_bytes: u64,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// Params of `process/write`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WriteParams {
    /// To which process.
    pub process_id: ProcessId,
    /// The bytes.
    pub chunk: Base64Bytes,
    /// Makes a retry safe; older clients leave it out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_id: Option<String>,
    /// **extension**: close stdin after this chunk; on a terminal, type its EOF character.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub close_stdin: bool,
}

/// Result of `process/write`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteResponse {
    /// Whether the bytes were taken.
    pub status: WriteStatus,
}

/// Whether bytes for stdin were taken; anything but [`WriteStatus::Accepted`] wrote nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum WriteStatus {
    /// Taken, to be written in order.
    Accepted,
    /// No such process.
    UnknownProcess,
    /// Neither a terminal nor a pipe, or closed since.
    StdinClosed,
    /// Not yet.
    Starting,
}

/// Params of `process/signal`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SignalParams {
    /// To which process's group.
    pub process_id: ProcessId,
    /// Which one.
    pub signal: ProcessSignal,
}

/// A signal by its portable name; all but `interrupt` are an **extension**.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
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

/// Result of `process/signal`: nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignalResponse {}

/// Params of `process/terminate`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TerminateParams {
    /// Which process.
    pub process_id: ProcessId,
}

/// Result of `process/terminate`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminateResponse {
    /// It was running and is being killed.
    pub running: bool,
}

/// Params of `process/resize` (**extension**).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ResizeParams {
    /// Whose terminal.
    pub process_id: ProcessId,
    /// Lines.
    pub rows: u16,
    /// Characters in a line.
    pub cols: u16,
}

/// Result of `process/resize`: nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResizeResponse {}

/// Params of `process/list` (**extension**): none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListParams {}

/// Result of `process/list`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListResponse {
    /// The session's processes, oldest first.
    pub processes: Vec<ProcessInfo>,
}

/// One line of `process/list`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProcessInfo {
    /// Its name in the session.
    pub process_id: ProcessId,
    /// What was started.
    pub argv: Vec<String>,
    /// Where.
    pub cwd: PathUri,
    /// With a terminal.
    pub tty: bool,
    /// The host's number for it; absent while it starts.
    pub pid: Option<u32>,
    /// Milliseconds since 1970.
    pub started_at_ms: u64,
    /// It has been reaped.
    pub exited: bool,
    /// 128 + signal for a death by signal.
    pub exit_code: Option<i32>,
    /// Exited, and its streams have ended.
    pub closed: bool,
    /// The number its next event will have.
    pub next_seq: u64,
}

crate::encode::by_serde! { ExecParams, ExecResponse, ExecExitedNotification, ExecClosedNotification, ReadParams, WriteResponse, SignalParams, SignalResponse, TerminateParams, TerminateResponse, ResizeParams, ResizeResponse, ListParams, ListResponse }
