//! The audit log: a JSON object per request that does something, and per process that exits.
//!
//! A thread of its own writes, so that a slow disk delays no connection; its queue is bounded. What could not
//! be written is counted, reported, and noted in the log once that works again. With
//! [`required`](AuditConfig::required) the server refuses requests meanwhile.
//!
//! Invariant: no record holds content, an environment value, a credential, the id of a session, or the query
//! of a URL.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use codex_exec_host::process::ExitSummary;
use codex_exec_server_protocol::process::ProcessId;
use codex_exec_server_protocol::resources::{EndedBy, ResourceLimits};
use codex_exec_server_protocol::{ErrorKind, Method, RpcError};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::auth::Principal;

/// Where and how to log.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct AuditConfig {
    /// The file, which is created with mode 0600 and appended to.
    pub path: PathBuf,
    /// Refuse requests while the log cannot be written (default: false).
    pub required: bool,
    /// Records that wait to be written (default: 4,096); more are lost.
    pub queue: usize,
    /// Longest command line in a record, in bytes (default: 4 KiB); the rest is cut.
    pub argv_bytes: usize,
}

impl AuditConfig {
    /// Logs to this file.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), required: false, queue: 4096, argv_bytes: 4096 }
    }
}

/// An open audit log. Clones share it.
#[derive(Debug, Clone)]
pub struct AuditLog(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    config: AuditConfig,
    queue: SyncSender<Message>,
    state: Arc<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The last record could not be written or queued.
    failing: AtomicBool,
    /// Records lost since the last one that was written.
    lost: AtomicU64,
    error: Mutex<Option<ErrorKind>>,
}

enum Message {
    Line(Vec<u8>),
    Reopen,
    Flush(SyncSender<()>),
}

impl AuditLog {
    /// Opens the log and starts the thread that writes it.
    pub fn open(config: AuditConfig) -> io::Result<Self> {
        let file = open(&config.path)?;
        let (queue, messages) = sync_channel(config.queue.max(1));
        let state = Arc::<State>::default();
        let writer = Writer { path: config.path.clone(), file, torn: false, state: state.clone() };
        std::thread::Builder::new()
            .name("exec-audit".into())
            .spawn(move || writer.run(&messages))?;
        Ok(Self(Arc::new(Shared { config, queue, state })))
    }

    /// Opens the file again, which a rotation may have moved away.
    pub fn reopen(&self) {
        let _ = self.0.queue.try_send(Message::Reopen);
    }

    /// Waits until what was logged before is written, at most this long. Blocks.
    pub fn flush(&self, timeout: Duration) {
        let (done, flushed) = sync_channel(1);
        if self.0.queue.try_send(Message::Flush(done)).is_ok() {
            let _ = flushed.recv_timeout(timeout);
        }
    }

    /// Why no request may be served now, if the log is required and cannot be written.
    pub(crate) fn refusal(&self) -> Option<RpcError> {
        if !self.0.config.required || !self.0.state.failing.load(Ordering::Relaxed) {
            return None;
        }
        let kind = self.0.state.error.lock().unwrap_or(ErrorKind::IoError);
        let kind = if kind.codes().contains(&INTERNAL) { kind } else { ErrorKind::IoError };
        Some(RpcError::internal(kind, "the audit log cannot be written, so nothing is done"))
    }

    fn write(&self, record: &Record<'_>) {
        let Ok(mut line) = serde_json::to_vec(record) else { return };
        line.push(b'\n');
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) =
            self.0.queue.try_send(Message::Line(line))
        {
            self.0.state.failed(ErrorKind::LimitReached);
        }
    }

    /// Starts the record of a request; `None` if its method only observes what others did.
    pub(crate) fn entry(
        &self,
        caller: &Caller,
        method: &str,
        params: Option<&RawValue>,
        bytes: usize,
    ) -> Option<Box<Entry>> {
        let known = Method::from_name(method);
        if known.is_some_and(only_observes) {
            return None;
        }
        let text = params.map_or("{}", RawValue::get);
        let mut seen: Audited = serde_json::from_str(text).unwrap_or_default();
        shorten(&mut seen.argv, self.0.config.argv_bytes);
        // What is not a method may be anything.
        let method = known.map_or_else(|| "unknown".to_owned(), |_| method.to_owned());
        Some(Box::new(Entry {
            log: self.clone(),
            caller: caller.clone(),
            method,
            seen,
            bytes_in: bytes,
            began: Instant::now(),
            outcome: None,
            bytes_out: 0,
        }))
    }

    /// Logs the exit of a process.
    pub(crate) fn exited(&self, caller: &Caller, process: &ProcessId, exit: &ExitSummary) {
        self.write(&Record {
            process_id: Some(&process.0),
            exit_code: Some(exit.code),
            ended_by: exit.ended_by,
            sandbox_denied: exit.sandbox_denied.then_some(true),
            bytes_out: Some(exit.output_bytes),
            ..Record::new(caller, "process/exited")
        });
    }
}

/// The code that a refusal is sent with.
const INTERNAL: i64 = codex_exec_server_protocol::error::INTERNAL_ERROR;

/// Requests that change nothing and read nothing but what other requests led to.
fn only_observes(method: Method) -> bool {
    matches!(
        method,
        Method::ProcessRead
            | Method::ProcessList
            | Method::EnvironmentInfo
            | Method::EnvironmentStatus
    )
}

/// Who acts.
#[derive(Debug, Clone, Default)]
pub(crate) struct Caller {
    principal: Arc<str>,
    /// Names the session in the log only.
    session: Option<Arc<str>>,
}

impl Caller {
    pub(crate) fn new(principal: &Principal) -> Self {
        Self { principal: name_of(principal).into(), session: None }
    }

    /// The same in a session, named by a digest of its id, which is a secret.
    pub(crate) fn in_session(&self, id: &str) -> Self {
        let digest = ring::digest::digest(&ring::digest::SHA256, id.as_bytes());
        let tag: String =
            digest.as_ref().iter().take(6).map(|byte| format!("{byte:02x}")).collect();
        Self { principal: self.principal.clone(), session: Some(tag.into()) }
    }
}

/// How the log names a principal.
fn name_of(principal: &Principal) -> String {
    match principal {
        Principal::Embedder => "embedder".to_owned(),
        Principal::Harness { id } => format!("harness:{id}"),
        Principal::Anyone => "anyone".to_owned(),
        Principal::TokenHolder => "token".to_owned(),
        Principal::User { uid } => format!("user:{uid}"),
        Principal::Certified { key, token } => {
            let key: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
            format!("certificate:{key}:{}", name_of(token))
        }
        Principal::Signed { issuer, subject } => {
            let text = |name: &Option<String>| name.clone().unwrap_or_default();
            format!("signed:{}:{}", text(issuer), text(subject))
        }
    }
}

/// What a record takes from the params of any request. Contents and environments are skipped.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Audited {
    process_id: Option<String>,
    argv: Vec<String>,
    cwd: Option<String>,
    path: Option<String>,
    source_path: Option<String>,
    destination_path: Option<String>,
    sandbox: Option<Box<RawValue>>,
    limits: Option<ResourceLimits>,
    signal: Option<String>,
    url: Option<String>,
}

/// The record of a request; dropping it logs it.
#[derive(Debug)]
pub(crate) struct Entry {
    log: AuditLog,
    caller: Caller,
    method: String,
    seen: Audited,
    bytes_in: usize,
    began: Instant,
    outcome: Option<&'static str>,
    bytes_out: usize,
}

impl Entry {
    pub(crate) fn caller(&self) -> Caller {
        self.caller.clone()
    }

    /// Sets who acts, once that is known.
    pub(crate) fn set_caller(&mut self, caller: Caller) {
        self.caller = caller;
    }

    /// Sets what came of it.
    pub(crate) fn respond(&mut self, error: Option<&RpcError>) {
        let kind = |error: &RpcError| error.kind.unwrap_or(ErrorKind::Internal).name();
        self.outcome = Some(error.map_or("ok", kind));
    }

    /// Sets the length of the response.
    pub(crate) fn sent(&mut self, bytes: usize) {
        self.bytes_out = bytes;
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let seen = &self.seen;
        let paths = [&seen.path, &seen.source_path, &seen.destination_path];
        self.log.write(&Record {
            process_id: seen.process_id.as_deref(),
            argv: &seen.argv,
            cwd: seen.cwd.as_deref(),
            policy: seen.sandbox.as_deref(),
            limits: seen.limits.as_ref(),
            signal: seen.signal.as_deref(),
            paths: paths.into_iter().flatten().map(String::as_str).collect(),
            origin: seen.url.as_deref().and_then(origin),
            // The connection ended first.
            outcome: Some(self.outcome.unwrap_or("connectionLost")),
            bytes_in: Some(self.bytes_in),
            bytes_out: Some(self.bytes_out as u64),
            duration_us: Some(self.began.elapsed().as_micros() as u64),
            ..Record::new(&self.caller, &self.method)
        });
    }
}

/// Scheme, host and port of a URL: the rest may hold secrets.
fn origin(url: &str) -> Option<String> {
    Some(url::Url::parse(url).ok()?.origin().ascii_serialization())
}

/// Cuts a command line after `room` bytes.
fn shorten(argv: &mut Vec<String>, mut room: usize) {
    for at in 0..argv.len() {
        let argument = &mut argv[at];
        if argument.len() + 1 > room {
            argument.truncate(argument.floor_char_boundary(room));
            argument.push('\u{2026}');
            argv.truncate(at + 1);
            return;
        }
        room -= argument.len() + 1;
    }
}

/// A line of the log.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Record<'a> {
    /// RFC 3339, in UTC.
    time: String,
    principal: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    session: Option<&'a str>,
    method: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    process_id: Option<&'a str>,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    argv: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    cwd: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    policy: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    limits: Option<&'a ResourceLimits>,
    #[serde(skip_serializing_if = "Option::is_none")]
    signal: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    paths: Vec<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    origin: Option<String>,
    /// `ok`, or the kind of the error.
    #[serde(skip_serializing_if = "Option::is_none")]
    outcome: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    exit_code: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ended_by: Option<EndedBy>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sandbox_denied: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes_in: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes_out: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    duration_us: Option<u64>,
    /// Records that are missing before this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    lost: Option<u64>,
}

impl<'a> Record<'a> {
    fn new(caller: &'a Caller, method: &'a str) -> Self {
        Self {
            time: timestamp(SystemTime::now()),
            principal: &caller.principal,
            session: caller.session.as_deref(),
            method,
            ..Self::default()
        }
    }
}

/// A time in RFC 3339, in UTC with milliseconds.
pub(crate) fn timestamp(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, seconds) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    // The civil date of a day number, in years that begin with March.
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let milliseconds = since.subsec_millis();
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{milliseconds:03}Z")
}

impl State {
    fn failed(&self, kind: ErrorKind) {
        self.lost.fetch_add(1, Ordering::Relaxed);
        *self.error.lock() = Some(kind);
        self.failing.store(true, Ordering::Relaxed);
    }
}

fn open(path: &Path) -> io::Result<File> {
    let refuse = |why| Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    if path.symlink_metadata().is_ok_and(|found| !found.is_file()) {
        return refuse("it exists and is not a regular file");
    }
    let file = OpenOptions::new().append(true).create(true).mode(0o600).open(path)?;
    let found = file.metadata()?;
    if found.permissions().mode() & 0o077 != 0 {
        return refuse("others can read or write it; chmod it to 600");
    }
    if found.nlink() > 1 {
        return refuse("it has several names");
    }
    Ok(file)
}

/// The thread that writes.
struct Writer {
    path: PathBuf,
    file: File,
    /// The last write ended in the middle of a line, which could not be removed.
    torn: bool,
    state: Arc<State>,
}

impl Writer {
    fn run(mut self, messages: &Receiver<Message>) {
        while let Ok(message) = messages.recv() {
            match message {
                Message::Line(line) => self.write(line),
                Message::Reopen => match open(&self.path) {
                    Ok(file) => (self.file, self.torn) = (file, false),
                    Err(error) => {
                        tracing::error!(%error, path = %self.path.display(), "cannot reopen the audit log");
                    }
                },
                Message::Flush(done) => drop(done),
            }
        }
    }

    /// Removes what a write left of a record, unless something was written behind it.
    fn cut(&mut self, written: usize) -> bool {
        let end = self.file.stream_position();
        let len = self.file.metadata().map(|found| found.len());
        match (end, len) {
            (Ok(end), Ok(len)) if end == len => self.file.set_len(end - written as u64).is_ok(),
            _ => false,
        }
    }

    fn write(&mut self, line: Vec<u8>) {
        let lost = self.state.lost.load(Ordering::Relaxed);
        let mut text = if self.torn { b"\n".to_vec() } else { Vec::new() };
        if lost > 0 {
            let nobody = Caller { principal: "server".into(), session: None };
            let note = Record { lost: Some(lost), ..Record::new(&nobody, "audit/lost") };
            text.extend(serde_json::to_vec(&note).unwrap_or_default());
            text.push(b'\n');
        }
        text.extend(line);
        // One write, so that lines of several programs do not mix.
        let written = loop {
            match self.file.write(&text) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                written => break written,
            }
        };
        let error = match written {
            Ok(len) if len == text.len() => {
                self.torn = false;
                self.state.lost.fetch_sub(lost, Ordering::Relaxed);
                if self.state.failing.swap(false, Ordering::Relaxed) {
                    tracing::warn!(lost, "the audit log can be written again");
                }
                return;
            }
            Ok(len) => {
                self.torn = len > 0 && !self.cut(len);
                io::Error::from(io::ErrorKind::StorageFull)
            }
            Err(error) => error,
        };
        if !self.state.failing.load(Ordering::Relaxed) {
            tracing::error!(%error, path = %self.path.display(), "cannot write the audit log");
        }
        self.state.failed(ErrorKind::of_io(&error));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps_are_those_of_the_calendar() {
        let at = |seconds| timestamp(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00.000Z");
        assert_eq!(at(1_709_251_199), "2024-02-29T23:59:59.000Z");
        assert_eq!(at(1_794_988_800), "2026-11-18T08:00:00.000Z");
        assert_eq!(at(4_107_542_400), "2100-03-01T00:00:00.000Z");
    }

    #[test]
    fn urls_lose_everything_but_their_origin() {
        let url = "https://user:password@example.com:8443/path?token=x#y";
        assert_eq!(origin(url).as_deref(), Some("https://example.com:8443"));
    }
}
