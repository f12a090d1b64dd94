//! Executor credentials that a parent process sends, one JSON object per line, and replaces before they
//! expire.
//!
//! [`CredentialPipe::open`] waits for the first frame and gives an [`ExecutorCredential`] for the
//! registry; [`CredentialPipe::watch`] takes every later one until the pipe ends. The last frame counts.
//!
//! Invariant: a frame that is not as it should be ends the pipe; a token is in no error and no log.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use codex_exec_remote::{
    BaseUrl, Credential, CredentialError, CredentialFuture, HttpClient, Secret,
};
use http::{HeaderMap, header};
use serde::Deserialize;
use tokio::io::{AsyncBufRead, AsyncBufReadExt};
use tokio::sync::watch;
use zeroize::Zeroizing;

/// The longest frame, in bytes, with its newline.
const LONGEST_FRAME: usize = 16 << 10;

/// The one version of a frame.
const VERSION: u64 = 1;

/// What a pipe is for, and how long to wait.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CredentialPipeConfig {
    /// The environment that every credential has to be for.
    pub environment_id: String,
    /// How long the first frame may take. Default 30 s.
    pub first_timeout: Duration,
    /// The clock.
    pub now: fn() -> SystemTime,
}

impl CredentialPipeConfig {
    /// For this environment.
    pub fn new(environment_id: impl Into<String>) -> Self {
        Self {
            environment_id: environment_id.into(),
            first_timeout: Duration::from_secs(30),
            now: SystemTime::now,
        }
    }
}

/// Why a credential is of no use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ExecutorCredentialError {
    /// Not a frame of this version.
    #[error(
        "invalid executor credential frame on stdin; expected one JSON object per line with version \
         1, environment_id, token and expires_at (unix seconds)"
    )]
    Invalid,
    /// Longer than any is.
    #[error(
        "the executor credential frame on stdin exceeds the size limit of {LONGEST_FRAME} bytes"
    )]
    TooLong,
    /// Of another environment.
    #[error("the executor credential on stdin is for a different environment")]
    OtherEnvironment,
    /// Too old.
    #[error("the executor credential is expired; send a new one on stdin")]
    Expired,
    /// The pipe ended before the first.
    #[error("stdin closed before it had an executor credential")]
    Closed,
    /// No first one in time.
    #[error("timed out waiting for the first executor credential on stdin")]
    TimedOut,
    /// It would be sent unencrypted.
    #[error("refusing to send the executor credential to a registry without https")]
    InClear,
    /// Characters that no header can carry.
    #[error("the executor credential contains characters that an HTTP header cannot carry")]
    Malformed,
}

/// A frame as it is sent.
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

/// The credential of the last frame. Clones share it. `Debug` shows no token.
#[derive(Debug, Clone)]
pub struct ExecutorCredential {
    current: watch::Receiver<Arc<Current>>,
    now: fn() -> SystemTime,
}

/// Frames, from stdin as a rule.
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

    /// Takes new credentials until the pipe ends. Fails at the first that is of no use.
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
    let mut line = Zeroizing::new(Vec::with_capacity(LONGEST_FRAME));
    // A pipe that fails has ended.
    while let Ok(buffer) = input.fill_buf().await {
        if buffer.is_empty() {
            break;
        }
        let end = buffer.iter().position(|&byte| byte == b'\n');
        let piece = &buffer[..end.unwrap_or(buffer.len())];
        if line.len() + piece.len() >= LONGEST_FRAME {
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
    fn may_go_to(&self, base: &BaseUrl) -> Result<(), CredentialError> {
        if base.is_private() {
            return Ok(());
        }
        Err(CredentialError::permanent(ExecutorCredentialError::InClear))
    }

    fn headers<'a>(&'a self, _http: &'a HttpClient) -> CredentialFuture<'a, HeaderMap> {
        Box::pin(async {
            let current = self.current.borrow().clone();
            if current.is_expired((self.now)()) {
                // The parent may send another.
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
