//! Executor credentials that a parent process sends, one JSON object per line, and replaces before they
//! expire.
//!
//! [`CredentialPipe::open`] waits for the first frame and returns an [`ExecutorCredential`] for the
//! registry; [`CredentialPipe::watch`] reads later frames until the pipe ends. Each replaces the one before.
//!
//! Invariant: an invalid frame ends the pipe; no error and no log shows a token.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use codex_exec_remote::{
    BaseUrl, Credential, CredentialError, CredentialFuture, CredentialKind, HttpClient, Secret,
    Verdict, may_send,
};
use http::{HeaderMap, header};
use serde::Deserialize;
use tokio::io::{AsyncBufRead, AsyncBufReadExt};
use tokio::sync::watch;
use zeroize::Zeroizing;

/// The longest frame with its newline, in bytes.
const MAX_FRAME_BYTES: usize = 16 << 10;

/// The supported version of frames.
const VERSION: u64 = 1;

/// The environment of a credential pipe, and its timeout.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CredentialPipeConfig {
    /// The environment that every credential must name.
    pub environment_id: String,
    /// Timeout of the first frame. Default 30 s.
    pub first_timeout: Duration,
    /// The clock that decides whether a credential is expired. Default the system's.
    pub now: fn() -> SystemTime,
}

impl CredentialPipeConfig {
    /// Makes a configuration for this environment, with the default timeout.
    pub fn new(environment_id: impl Into<String>) -> Self {
        Self {
            environment_id: environment_id.into(),
            first_timeout: Duration::from_secs(30),
            now: SystemTime::now,
        }
    }
}

/// Why an executor credential cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ExecutorCredentialError {
    /// The line is not a frame of the supported version.
    #[error(
        "invalid executor credential frame on stdin; expected one JSON object per line with version \
         1, environment_id, token and expires_at (unix seconds)"
    )]
    Invalid,
    /// The frame exceeds the size limit.
    #[error(
        "the executor credential frame on stdin exceeds the size limit of {MAX_FRAME_BYTES} bytes"
    )]
    TooLong,
    /// The credential is for another environment.
    #[error("the executor credential on stdin is for a different environment")]
    OtherEnvironment,
    /// The credential is expired.
    #[error("the executor credential is expired; send a new one on stdin")]
    Expired,
    /// The pipe ended before the first frame.
    #[error("stdin closed before the first executor credential")]
    Closed,
    /// The first frame took longer than [`CredentialPipeConfig::first_timeout`].
    #[error("timed out waiting for the first executor credential on stdin")]
    TimedOut,
    /// The registry's URL would send the credential unencrypted over the network.
    #[error("refusing to send the executor credential to a registry without https")]
    InClear,
    /// The token has characters that no header can carry.
    #[error("the executor credential contains characters that an HTTP header cannot carry")]
    Malformed,
}

/// A frame on the wire.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Frame {
    version: u64,
    environment_id: String,
    token: Secret,
    expires_at: i64,
}

#[derive(Debug)]
struct Current {
    token: Secret,
    expires_at: SystemTime,
}

/// The credential of the latest frame. Clones share it. `Debug` shows no token.
#[derive(Debug, Clone)]
pub struct ExecutorCredential {
    current: watch::Receiver<Arc<Current>>,
    now: fn() -> SystemTime,
}

/// Reads frames, usually from stdin.
#[derive(Debug)]
pub struct CredentialPipe<R> {
    input: R,
    config: CredentialPipeConfig,
    sender: watch::Sender<Arc<Current>>,
}

impl<R: AsyncBufRead + Unpin> CredentialPipe<R> {
    /// Waits for the first credential.
    pub async fn open(
        mut input: R,
        config: CredentialPipeConfig,
    ) -> Result<(Self, ExecutorCredential), ExecutorCredentialError> {
        let first = tokio::time::timeout(config.first_timeout, next(&mut input, &config)).await;
        let first = first.map_err(|_| ExecutorCredentialError::TimedOut)??;
        let first = first.ok_or(ExecutorCredentialError::Closed)?;
        let (sender, current) = watch::channel(Arc::new(first));
        let credential = ExecutorCredential { current, now: config.now };
        Ok((Self { input, config, sender }, credential))
    }

    /// Reads new credentials until the pipe ends. Fails at the first invalid one.
    pub async fn watch(mut self) -> Result<(), ExecutorCredentialError> {
        while let Some(current) = next(&mut self.input, &self.config).await? {
            tracing::debug!("new executor credential");
            self.sender.send_replace(Arc::new(current));
        }
        Ok(())
    }
}

/// The credential of the next line; `None` at the end.
async fn next(
    input: &mut (impl AsyncBufRead + Unpin),
    config: &CredentialPipeConfig,
) -> Result<Option<Current>, ExecutorCredentialError> {
    let mut line = Zeroizing::new(Vec::with_capacity(MAX_FRAME_BYTES));
    // An error of the pipe counts as its end.
    while let Ok(buffer) = input.fill_buf().await {
        if buffer.is_empty() {
            break;
        }
        let end = buffer.iter().position(|&byte| byte == b'\n');
        let piece = &buffer[..end.unwrap_or(buffer.len())];
        if line.len() + piece.len() >= MAX_FRAME_BYTES {
            return Err(ExecutorCredentialError::TooLong);
        }
        line.extend_from_slice(piece);
        let taken = piece.len() + usize::from(end.is_some());
        input.consume(taken);
        if end.is_some() {
            return parse(&line, config).map(Some);
        }
    }
    if line.is_empty() { Ok(None) } else { parse(&line, config).map(Some) }
}

fn parse(line: &[u8], config: &CredentialPipeConfig) -> Result<Current, ExecutorCredentialError> {
    let invalid = ExecutorCredentialError::Invalid;
    let frame: Frame = serde_json::from_slice(line).map_err(|_| invalid)?;
    if frame.version != VERSION || frame.token.is_blank() {
        return Err(invalid);
    }
    if frame.environment_id != config.environment_id {
        return Err(ExecutorCredentialError::OtherEnvironment);
    }
    let seconds = Duration::from_secs(u64::try_from(frame.expires_at).unwrap_or(0));
    let expires_at = UNIX_EPOCH.checked_add(seconds).ok_or(invalid)?;
    let current = Current { token: frame.token, expires_at };
    if current.is_expired((config.now)()) {
        return Err(ExecutorCredentialError::Expired);
    }
    Ok(current)
}

impl Current {
    fn is_expired(&self, now: SystemTime) -> bool {
        self.expires_at <= now
    }
}

impl Credential for ExecutorCredential {
    fn check_target(&self, base: &BaseUrl) -> Result<(), CredentialError> {
        match may_send(CredentialKind::Executor, base.origin(), &[]) {
            Verdict::Send => Ok(()),
            _ => Err(CredentialError::permanent(ExecutorCredentialError::InClear)),
        }
    }

    fn headers<'a>(&'a self, _http: &'a HttpClient) -> CredentialFuture<'a, HeaderMap> {
        Box::pin(async {
            let current = self.current.borrow().clone();
            if current.is_expired((self.now)()) {
                // Transient, because the parent may send another one.
                return Err(CredentialError::transient(ExecutorCredentialError::Expired));
            }
            let value = current.token.header("Bearer ");
            let malformed = || CredentialError::permanent(ExecutorCredentialError::Malformed);
            Ok(HeaderMap::from_iter([(header::AUTHORIZATION, value.ok_or_else(malformed)?)]))
        })
    }

    fn renew<'a>(&'a self, _http: &'a HttpClient) -> CredentialFuture<'a, bool> {
        Box::pin(async { Ok(false) })
    }
}
