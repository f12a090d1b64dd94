//! The shell snapshots of a session: `shellSnapshot` of `process/start`.
//!
//! The first command of a scope captures the state of its login shell; later ones start from that. A
//! capture that fails is remembered, too: its commands run as ordinary login shells.
//!
//! Invariant: a capture is a process of the session like any other, except that no client sees it. It ends
//! with the session, and what it started ends with it.

use std::collections::HashMap;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use codex_exec_host::process::{
    Environment, EventKind, EventSink, ProcessEvent, SinkClosed, StartError,
};
use codex_exec_host::sandbox::Failure;
use codex_exec_host::shell_snapshot::{
    CapturedState, Replay, ShellKind, ShellSnapshot, SnapshotError, capture_script,
};
use codex_exec_server_protocol::process::{
    EnvPolicy, ExecParams, OutputStream, ShellSnapshotParams,
};
use codex_exec_server_protocol::{ErrorKind, PathUri, RpcError, SandboxContext};
use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::{OnceCell, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::ShellSnapshotConfig;
use crate::process::{Attempt, StartFailure, Starter};

/// The longest scope, in bytes.
const MAX_SCOPE: usize = 256;

/// The snapshots of one session.
#[derive(Debug, Default)]
pub(crate) struct ShellSnapshots {
    cache: Mutex<Cache>,
    ended: CancellationToken,
    captures: TaskTracker,
}

#[derive(Debug, Default)]
struct Cache {
    entries: HashMap<Key, Entry>,
    /// Counts uses.
    clock: u64,
}

/// What a snapshot depends on, as JSON: the variables of `env` are not part of it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key(String);

#[derive(Debug)]
struct Entry {
    snapshot: Arc<OnceCell<Option<Arc<ShellSnapshot>>>>,
    last_use: u64,
}

/// Why a login shell could not be captured.
#[derive(Debug, thiserror::Error)]
enum CaptureError {
    #[error("the shell did not start")]
    Start(#[source] StartError),
    #[error("the shell was refused: {}", .0.message)]
    Refused(RpcError),
    #[error("the shell did not end within {0:?}")]
    Timeout(Duration),
    #[error("the shell printed more than {0} bytes")]
    TooLong(usize),
    #[error("the shell exited with {0}")]
    Failed(i32),
    #[error("the session has ended")]
    Ended,
    #[error(transparent)]
    State(#[from] SnapshotError),
}

impl From<StartFailure> for CaptureError {
    fn from(failure: StartFailure) -> Self {
        match failure {
            StartFailure::Refused(error) => Self::Refused(error),
            StartFailure::Failed(error) => Self::Start(error),
        }
    }
}

impl ShellSnapshots {
    /// What to start in place of the login shell of `params`, whose environment this is; `None` to start it
    /// as it is. `hold` bounds the environment that the profile leads to.
    pub(crate) async fn replay(
        &self,
        starter: &Starter,
        limits: ShellSnapshotConfig,
        params: &ExecParams,
        environment: &Environment,
        hold: &(dyn Fn(&mut Environment) + Sync),
    ) -> Result<Option<Replay>, StartFailure> {
        let Some(asked) = &params.shell_snapshot else { return Ok(None) };
        validate_scope(&asked.scope_id).map_err(StartFailure::Refused)?;
        if !is_login_shell(params, &asked.shell.path) {
            return Ok(None);
        }
        let kind = validate_shell(&asked.shell.name).map_err(StartFailure::Refused)?;
        let Some(cell) = Key::of(params, asked).map(|key| self.entry(key, limits.entries)) else {
            return Ok(None);
        };
        let capture = async {
            // Boxed, as most processes need none: every start has room for what it may await.
            let captured = Box::pin(self.capture(starter, limits, kind, params, environment, hold));
            captured
                .await
                .inspect_err(|error| {
                    tracing::warn!(%error, "no shell snapshot; the profile runs with each command");
                })
                .ok()
                .map(Arc::new)
        };
        let snapshot = cell.get_or_init(|| capture).await;
        if self.ended.is_cancelled() {
            let error = RpcError::internal(ErrorKind::SessionEnded, "the session has ended");
            return Err(StartFailure::Refused(error));
        }
        Ok(snapshot.as_ref().and_then(|snapshot| {
            snapshot.replay(&params.argv, environment.clone(), &params.env, hold)
        }))
    }

    /// Kills the captures under way. Resolves once they are gone.
    pub(crate) fn end(&self) -> impl Future<Output = ()> + use<> {
        self.ended.cancel();
        self.captures.close();
        let captures = self.captures.clone();
        async move { captures.wait().await }
    }

    /// The entry for this key, perhaps a new one in place of the least recently used.
    fn entry(&self, key: Key, limit: usize) -> Arc<OnceCell<Option<Arc<ShellSnapshot>>>> {
        let mut cache = self.cache.lock();
        cache.clock += 1;
        let now = cache.clock;
        if !cache.entries.contains_key(&key)
            && cache.entries.len() >= limit
            && let Some(oldest) = cache
                .entries
                .iter()
                .min_by_key(|(_, entry)| entry.last_use)
                .map(|(key, _)| key.clone())
        {
            cache.entries.remove(&oldest);
        }
        let entry = cache.entries.entry(key);
        let entry = entry.or_insert_with(|| Entry { snapshot: Arc::default(), last_use: now });
        entry.last_use = now;
        entry.snapshot.clone()
    }

    /// Runs the login shell with a script of ours in place of the command.
    async fn capture(
        &self,
        starter: &Starter,
        limits: ShellSnapshotConfig,
        kind: ShellKind,
        params: &ExecParams,
        environment: &Environment,
        hold: &(dyn Fn(&mut Environment) + Sync),
    ) -> Result<ShellSnapshot, CaptureError> {
        let mark = uuid::Uuid::new_v4().simple().to_string();
        let mut argv = params.argv.clone();
        argv[SCRIPT] = capture_script(kind, &mark);
        let shell = ExecParams {
            process_id: "shell-snapshot".into(),
            argv,
            tty: false,
            pipe_stdin: false,
            shell_snapshot: None,
            retain: None,
            ..params.clone()
        };
        let output = self.captures.track_future(self.output(starter, limits, &shell, environment));
        let state = CapturedState::parse(kind, &mark, &output.await?)?;
        Ok(ShellSnapshot::new(kind, state, environment, params.env_policy.as_ref(), hold)?)
    }

    /// The stdout of a process that exits with 0 in time. Its descendants are killed.
    async fn output(
        &self,
        starter: &Starter,
        limits: ShellSnapshotConfig,
        params: &ExecParams,
        environment: &Environment,
    ) -> Result<Vec<u8>, CaptureError> {
        if self.ended.is_cancelled() {
            return Err(CaptureError::Ended);
        }
        let (prepared, params, environment) =
            (starter.clone(), params.clone(), environment.clone());
        let launch = move |attempt| {
            let (params, environment) = (params.clone(), environment.clone());
            let launch = prepared.clone().prepare(params, environment, None, None, attempt);
            async move { launch.await.map_err(CaptureError::from) }
        };
        let first = launch(Attempt::First);
        let again = move |failure: &Failure| Some(launch(Attempt::after(failure)?));
        let (process, started) = starter.host.start(first, again);
        let (sink, output) = Collector::new(limits.bytes);
        process.attach(Box::new(sink));
        let run = async {
            started.await.map_err(|_| CaptureError::Ended)??;
            output.await.map_err(|_| CaptureError::Ended)?
        };
        let result = tokio::select! {
            () = self.ended.cancelled() => Err(CaptureError::Ended),
            result = tokio::time::timeout(limits.timeout, run) => {
                result.unwrap_or(Err(CaptureError::Timeout(limits.timeout)))
            }
        };
        // A closed process has handed its descendants to the session; `terminate` ends those, too.
        drop(process.terminate());
        process.kill();
        process.gone().await;
        result
    }
}

impl From<StartError> for CaptureError {
    fn from(error: StartError) -> Self {
        Self::Start(error)
    }
}

/// Position of the script in the command line of a shell.
const SCRIPT: usize = 2;

/// Whether the command line is `[path, "-lc", script, …]`, outside of a managed network: a capture has no
/// proxy, so it would have to run without one.
fn is_login_shell(params: &ExecParams, path: &str) -> bool {
    let as_login = params.arg0.as_ref().is_some_and(|name| name.starts_with('-'));
    let managed = params.managed_network.is_some()
        || params.network_proxy.is_some()
        || params.enforce_managed_network && params.sandbox.is_some();
    let [program, flag, _, ..] = &params.argv[..] else { return false };
    program == path && flag == "-lc" && !as_login && !managed
}

fn validate_scope(scope: &str) -> Result<(), RpcError> {
    if scope.is_empty() || scope.len() > MAX_SCOPE {
        let message =
            format!("shell snapshot scope must be non-empty and at most {MAX_SCOPE} bytes");
        return Err(RpcError::invalid_params(ErrorKind::InvalidParams, message));
    }
    Ok(())
}

fn validate_shell(name: &str) -> Result<ShellKind, RpcError> {
    let message = || format!("shell snapshots are unsupported for shell `{name}`");
    ShellKind::named(name)
        .ok_or_else(|| RpcError::invalid_params(ErrorKind::Unsupported, message()))
}

impl Key {
    fn of(params: &ExecParams, asked: &ShellSnapshotParams) -> Option<Self> {
        #[derive(Serialize)]
        struct Parts<'a> {
            asked: &'a ShellSnapshotParams,
            cwd: &'a PathUri,
            policy: &'a Option<EnvPolicy>,
            sandbox: &'a Option<SandboxContext>,
        }
        let ExecParams { cwd, env_policy: policy, sandbox, .. } = params;
        serde_json::to_string(&Parts { asked, cwd, policy, sandbox }).ok().map(Self)
    }
}

/// Collects the stdout of a process until it exits.
struct Collector {
    bytes: Vec<u8>,
    limit: usize,
    done: Option<oneshot::Sender<Result<Vec<u8>, CaptureError>>>,
}

impl Collector {
    fn new(limit: usize) -> (Self, oneshot::Receiver<Result<Vec<u8>, CaptureError>>) {
        let (done, output) = oneshot::channel();
        (Self { bytes: Vec::new(), limit, done: Some(done) }, output)
    }

    fn finish(&mut self, result: Result<Vec<u8>, CaptureError>) {
        if let Some(done) = self.done.take() {
            let _ = done.send(result);
        }
    }
}

impl EventSink for Collector {
    fn poll_ready(
        &mut self,
        _: &mut Context<'_>,
        _: &ProcessEvent,
    ) -> Poll<Result<(), SinkClosed>> {
        Poll::Ready(Ok(()))
    }

    fn send(&mut self, event: ProcessEvent) {
        match event.kind {
            EventKind::Output { stream: OutputStream::Stdout, bytes } if self.done.is_some() => {
                if self.bytes.len() + bytes.len() > self.limit {
                    self.finish(Err(CaptureError::TooLong(self.limit)));
                    return;
                }
                self.bytes.extend_from_slice(&bytes);
            }
            EventKind::Exited { code: 0, .. } => {
                let bytes = std::mem::take(&mut self.bytes);
                self.finish(Ok(bytes));
            }
            EventKind::Exited { code, .. } => self.finish(Err(CaptureError::Failed(code))),
            EventKind::Output { .. } | EventKind::Closed | EventKind::Resized { .. } => {}
        }
    }
}
