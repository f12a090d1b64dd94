//! The handlers of `process/*`.
//!
//! Each queues its request with the process's owner before it returns, and returns the reply as a
//! future.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use codex_exec_host::files::Reservation;
use codex_exec_host::pool::{self, WorkError};
use codex_exec_host::process::{
    ClientId, Command, Environment, Group, Launch, LaunchError, NoTerminal, OnExit, ProcessHandle,
    ProcessHost, Reader, Reply, StartError, Started, TerminalTap, UntilGone, WhileRunning,
    environment, environment_is_costly,
};
use codex_exec_host::sandbox::{Failure, ManagedNetwork, NativeSandbox, SandboxBackend};
use codex_exec_server_protocol::network::{
    NetworkInfo, NetworkUpdateRulesParams, NetworkUpdateRulesResponse,
};
use codex_exec_server_protocol::process::{
    ExecParams, ExecResponse, Fit, ListResponse, ProcessId, ProcessInfo, ReadParams, ReadResponse,
    ResizeParams, ResizeResponse, SandboxType, ScreenParams, ScreenResponse, SignalParams,
    SignalResponse, TerminalSize, TerminateParams, TerminateResponse, WriteParams, WriteResponse,
    WriteStatus,
};
use codex_exec_server_protocol::session::{SessionInfo, SessionListResponse};
use codex_exec_server_protocol::{ErrorKind, RpcError};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::audit::Caller;
use crate::connection::{Attached, Request};
use crate::limits;
use crate::managed_network::{Controller, Inside};
use crate::metrics::Metrics;
use crate::recording::Recorder;
use crate::response_memory::{ResponseMemory, is_small};
use crate::sandbox::Confiner;
use crate::server::Server;
use crate::session::{InsertError, Session};

/// Why a process did not start.
pub(crate) enum StartFailure {
    /// The server refuses the request.
    Refused(RpcError),
    /// The host failed to start the process.
    Failed(StartError),
}

impl From<StartError> for StartFailure {
    fn from(error: StartError) -> Self {
        Self::Failed(error)
    }
}

impl From<LaunchError> for StartFailure {
    fn from(error: LaunchError) -> Self {
        Self::Failed(error.into())
    }
}

impl StartFailure {
    fn into_rpc(self, program: &str) -> RpcError {
        let error = match self {
            Self::Refused(error) => return error,
            Self::Failed(error) => error,
        };
        let kind = error.kind();
        match &error {
            StartError::Launch(LaunchError::Nul(_)) => RpcError::internal(kind, error.to_string()),
            // The program or its directory failed, not the sandbox: the same error as without a sandbox.
            StartError::Sandbox(failure) if failure.is_target() => {
                RpcError::internal(kind, format!("cannot start `{program}`: {failure}"))
            }
            StartError::Launch(_) | StartError::Limit(_) | StartError::Sandbox(_) => {
                RpcError::invalid_params(kind, error.to_string())
            }
            StartError::Spawn(_) | StartError::Setup { .. } => {
                RpcError::internal(kind, format!("cannot start `{program}`: {error}"))
            }
        }
    }
}

/// Maximum bytes of a process id, which is kept as long as the process and repeated in each of its events.
const MAX_PROCESS_ID_BYTES: usize = 4 << 10;

pub(crate) fn start(server: &Server, attached: &Attached, request: Request, params: ExecParams) {
    let id = params.process_id.clone();
    let id_bytes = id.0.len();
    if id_bytes > MAX_PROCESS_ID_BYTES {
        let message =
            format!("processId has {id_bytes} bytes; at most {MAX_PROCESS_ID_BYTES} are allowed");
        let error = RpcError::invalid_params(ErrorKind::InvalidParams, message);
        return request.respond_without_waiting::<ExecResponse>(Err(error));
    }
    let program = params.argv.first().cloned().unwrap_or_default();
    let metrics = server.metrics().cloned();
    let began = metrics.as_ref().map(|_| Instant::now());
    let caller = request.caller();
    let session = attached.session.clone();
    let size = params.size.filter(|_| params.tty);
    let mut started = None;
    let network: Arc<Mutex<Managed>> = Arc::default();
    let inserted = session.insert(&id, || {
        let (server, session, network) = (server.clone(), session.clone(), network.clone());
        let host = server.host().clone();
        let launch = move |params, attempt| {
            let caller = caller.clone();
            launch(server.clone(), session.clone(), params, attempt, network.clone(), caller)
        };
        let first = launch(params.clone(), Attempt::First);
        let again = move |failure: &Failure| Some(launch(params, Attempt::after(failure)?));
        let (handle, reply) = host.start(first, again);
        started = Some(reply);
        handle
    });
    let (attached, outbound) = (attached.clone(), request.outbound().clone());
    tokio::spawn(async move {
        let (process, started) = match (inserted, started) {
            (Ok(process), Some(started)) => (process, started),
            (failed, _) => {
                let kind = match failed {
                    Err(InsertError::Ended) => ErrorKind::SessionEnded,
                    _ => ErrorKind::ProcessExists,
                };
                let message = format!("process id {id} is already in use");
                let error = RpcError::invalid_request(kind, message);
                request.respond::<ExecResponse>(Err(error)).await;
                return;
            }
        };
        match started.await {
            Ok(Ok(Started { assurance, network: descriptors, limits })) => {
                let Managed { inside, mut info } = std::mem::take(&mut *network.lock());
                if let (Some(descriptors), Some(inside)) = (descriptors, inside) {
                    let routes = inside.serve(descriptors);
                    info = info.map(|_| NetworkInfo { routes });
                }
                let kind = match assurance {
                    Some(_) => SandboxType::LinuxSeccomp,
                    None => SandboxType::None,
                };
                let response = ExecResponse {
                    process_id: id,
                    sandbox_type: Some(kind),
                    sandbox_assurance: assurance,
                    network: info,
                    limits,
                };
                if let (Some(metrics), Some(began)) = (metrics, began) {
                    metrics.started(began.elapsed());
                }
                // Events follow the response.
                if request.respond(Ok(response)).await {
                    if let Some(size) = size {
                        // Its first client is one of those that the terminal has to fit.
                        drop(process.resize(attached.part.client(), size, Fit::Smallest));
                    }
                    attached.session.attach(&process, attached.part, &outbound);
                }
            }
            Ok(Err(failure)) => {
                let error = failure.into_rpc(&program);
                if let Some(metrics) = metrics {
                    metrics.start_failed(error.kind.unwrap_or(ErrorKind::Internal));
                }
                request.respond::<ExecResponse>(Err(error)).await;
            }
            // The session ended before the process started.
            Err(_) => {
                let error = RpcError::internal(ErrorKind::SessionEnded, "the session has ended");
                request.respond::<ExecResponse>(Err(error)).await;
            }
        }
    });
}

/// The managed network of a process that starts.
#[derive(Default)]
struct Managed {
    inside: Option<Inside>,
    info: Option<NetworkInfo>,
}

/// Which attempt to start a process this is.
#[derive(Debug)]
pub(crate) enum Attempt {
    First,
    /// A path changed while its sandbox was built.
    AfterRace,
    /// The program was not found, or not executable, inside its sandbox.
    AfterHiddenProgram(Failure),
}

impl Attempt {
    /// The next attempt after the first one failed; `None` if it would fail, too.
    pub(crate) fn after(failure: &Failure) -> Option<Self> {
        if failure.is_race() {
            return Some(Self::AfterRace);
        }
        NativeSandbox::hides_program(failure).then(|| Self::AfterHiddenProgram(failure.clone()))
    }
}

/// Where and how a session's processes start.
#[derive(Debug, Clone)]
pub(crate) struct Starter {
    pub(crate) host: ProcessHost,
    confiner: Confiner,
    group: Group,
}

impl Starter {
    /// Prepares a process with this environment, and this network inside a sandbox; `inherit` becomes its
    /// descriptor 3.
    pub(crate) async fn prepare(
        self,
        mut params: ExecParams,
        environment: Environment,
        network: Option<ManagedNetwork>,
        inherit: Option<Arc<OwnedFd>>,
        attempt: Attempt,
    ) -> Result<Launch, StartFailure> {
        let refusal = match attempt {
            Attempt::First => None,
            Attempt::AfterRace => {
                self.confiner.forget_plans();
                None
            }
            Attempt::AfterHiddenProgram(failure) => {
                Some(Box::pin(hidden_program(&params, &environment, failure)).await?)
            }
        };
        let sandbox = match params.sandbox.take() {
            Some(context) => {
                let (confiner, inherit) = (&self.confiner, inherit.clone());
                confiner.confine(context, &params, &environment, network, inherit, refusal).await
            }
            None => Ok(None),
        };
        match sandbox.map_err(StartFailure::Refused)? {
            Some(sandbox) => Ok(Launch::confined(params, sandbox, self.group)?),
            None => Ok(Launch::new(params, &environment, self.group)?.inheriting(inherit)),
        }
    }
}

/// The message for a program that its sandbox hides. Returns the failure if it cannot be executed outside
/// either.
async fn hidden_program(
    params: &ExecParams,
    environment: &Environment,
    failure: Failure,
) -> Result<String, StartFailure> {
    let program = params.argv.first().ok_or(LaunchError::EmptyArgv)?;
    let name = OsStr::new(program);
    let command = Command::new(name, name, [], environment, params.cwd.as_path());
    let command = command.map_err(LaunchError::from)?;
    match pool::blocking(move || command.is_executable()).await {
        Ok(true) => Ok(format!("program `{program}` cannot be executed under this policy")),
        _ => Err(StartError::Sandbox(failure).into()),
    }
}

async fn launch(
    server: Server,
    session: Arc<Session>,
    mut params: ExecParams,
    attempt: Attempt,
    managed: Arc<Mutex<Managed>>,
    caller: Option<Caller>,
) -> Result<Launch, StartFailure> {
    if params.argv.is_empty() {
        return Err(LaunchError::EmptyArgv.into());
    }
    let config = &server.config().limits;
    let limits = config.resolve(params.limits.take()).map_err(StartFailure::Refused)?;
    let admission = limits::admit(session.ledger(), server.ledger(), limits.as_ref());
    let admission = admission.map_err(StartFailure::Refused)?;
    params.limits = limits;
    let starter = Starter {
        host: server.host().clone(),
        confiner: server.confiner().clone(),
        group: session.group(),
    };
    let mut params = params;
    let policy = server.config().policy.as_ref();
    if let Some(policy) = policy {
        policy.hold_process(&mut params).map_err(StartFailure::Refused)?;
    }
    let (mut params, mut environment) =
        environment_of(params, server.config().own_variables.clone()).await?;
    if let Some(policy) = policy {
        policy.hold_environment(&mut environment);
    }
    let controller = Controller::new(&session, params.process_id.clone());
    let networks = server.managed_networks();
    let network = networks.start(&params, &mut environment, controller).await;
    let network = network.map_err(StartFailure::Refused)?;
    let (snapshots, config) = (session.shell_snapshots(), server.config().shell_snapshots);
    let hold = |exported: &mut Environment| {
        if params.sandbox.is_some() {
            keep_tmpdir(&environment, exported);
        }
        if let Some(policy) = policy {
            policy.hold_environment(exported);
        }
    };
    let replay = snapshots.replay(&starter, config, &params, &environment, &hold).await?;
    if let Some(context) = &mut params.sandbox {
        network.make_readable(context);
    }
    let namespace = network.namespace();
    let (mut listed, mut state) = (None, None);
    if let Some(replay) = replay {
        listed = Some(std::mem::replace(&mut params.argv, replay.argv));
        environment = replay.environment;
        state = Some(replay.state);
    }
    let mut launch = starter.prepare(params, environment, namespace, state, attempt).await?;
    if let Some(listed) = listed {
        launch = launch.listed_as(listed);
    }
    *managed.lock() = Managed { inside: network.inside, info: network.info };
    if let (Some(recorder), Some(size)) = (&server.config().recorder, launch.terminal) {
        launch.tap = Some(record(recorder.clone(), launch.argv.clone(), size).await?);
    }
    let counted = server.metrics().map(Metrics::process);
    launch.while_running = Some(WhileRunning::new((network.held, counted)));
    launch.on_exit = on_exit(&server, launch.process_id.clone(), caller);
    launch.until_gone = admission.map(UntilGone::new);
    Ok(launch)
}

/// Keeps the `TMPDIR` of the request, whatever a profile exports: a policy may grant what it names, and an
/// earlier command may have written the profile.
fn keep_tmpdir(asked: &Environment, exported: &mut Environment) {
    let tmpdir = OsStr::new(TMPDIR);
    exported.remove(tmpdir);
    exported.extend(asked.get(tmpdir).map(|value| (tmpdir.to_owned(), value.clone())));
}

/// The variable that decides what a sandbox grants.
const TMPDIR: &str = "TMPDIR";

/// Starts the recording of a terminal.
async fn record(
    recorder: Recorder,
    argv: Vec<String>,
    size: TerminalSize,
) -> Result<Box<dyn TerminalTap>, StartFailure> {
    let started = pool::blocking(move || recorder.record(&argv, size)).await;
    let started = started.unwrap_or_else(|error| Err(std::io::Error::other(error)));
    match started {
        Ok(recording) => Ok(Box::new(recording)),
        Err(source) => {
            Err(StartError::Setup { what: "the recording of its terminal", source }.into())
        }
    }
}

/// What to do when a process has exited; `None` if nothing wants to know.
fn on_exit(server: &Server, process: ProcessId, caller: Option<Caller>) -> Option<OnExit> {
    let (metrics, audit) = (server.metrics().cloned(), server.audit().cloned());
    if metrics.is_none() && audit.is_none() {
        return None;
    }
    Some(OnExit::new(move |exit| {
        if let Some(metrics) = metrics {
            metrics.exited(exit);
        }
        if let Some(audit) = audit {
            audit.exited(&caller.unwrap_or_default(), &process, exit);
        }
    }))
}

/// How many policies with many patterns are applied at once; compiled, each takes some 10 MiB.
static COSTLY_POLICIES: Semaphore = Semaphore::const_new(2);

/// Builds the environment of a process, away from the lane if that can take long.
async fn environment_of(
    params: ExecParams,
    own_variables: Vec<String>,
) -> Result<(ExecParams, Environment), StartFailure> {
    if !environment_is_costly(&params) {
        let environment = environment(&params, &own_variables)?;
        return Ok((params, environment));
    }
    let turn = COSTLY_POLICIES.acquire().await;
    let built = pool::blocking(move || {
        // The work goes on if the client leaves.
        let _turn = turn;
        environment(&params, &own_variables).map(|built| (params, built))
    })
    .await;
    let internal = |error: WorkError| {
        StartFailure::Refused(RpcError::internal(ErrorKind::Internal, error.to_string()))
    };
    Ok(built.map_err(internal)??)
}

fn unknown_process(id: &ProcessId) -> RpcError {
    RpcError::invalid_request(ErrorKind::UnknownProcess, format!("unknown process id {id}"))
}

pub(crate) fn read(
    session: &Session,
    params: ReadParams,
    reader: Reader,
    response_memory: ResponseMemory,
) -> impl Future<Output = (Result<ReadResponse, RpcError>, Option<Reservation>)> + Send + 'static {
    let id = params.process_id.clone();
    let process = session.process(&id);
    let reply = process.as_ref().map(|process| process.read(params.clone(), reader));
    async move {
        let (Some(process), Some(reply)) = (process, reply) else {
            return (Err(unknown_process(&id)), None);
        };
        let Ok(response) = reply.await else { return (Err(unknown_process(&id)), None) };
        let bytes = response.chunks.iter().map(|chunk| chunk.chunk.len()).sum();
        if is_small(bytes) {
            return (Ok(response), None);
        }
        if let Some(memory) = response_memory.try_reserve(bytes as u64) {
            return (Ok(response), Some(memory));
        }
        // While the response would wait for memory, the output stays with its process.
        drop(response);
        let memory = response_memory.reserve(bytes as u64).await;
        let retry = ReadParams { max_bytes: Some(bytes as u64), wait_ms: None, ..params };
        (process.read(retry, reader).await.map_err(|_| unknown_process(&id)), Some(memory))
    }
}

pub(crate) fn write(
    session: &Session,
    params: WriteParams,
) -> impl Future<Output = Result<WriteResponse, RpcError>> + Send + 'static {
    let empty_id = params.write_id.as_deref() == Some("");
    let process = session.process(&params.process_id).filter(|_| !empty_id);
    let reply = process.map(|process| process.write(params));
    async move {
        if empty_id {
            let message = "writeId must not be empty";
            return Err(RpcError::invalid_params(ErrorKind::InvalidParams, message));
        }
        let status = match reply {
            Some(reply) => reply.await.unwrap_or(WriteStatus::UnknownProcess),
            None => WriteStatus::UnknownProcess,
        };
        Ok(WriteResponse { status })
    }
}

pub(crate) fn signal(
    session: &Session,
    params: &SignalParams,
) -> impl Future<Output = Result<SignalResponse, RpcError>> + Send + 'static {
    let reply = session.process(&params.process_id).map(|process| process.signal(params.signal));
    async move {
        if let Some(reply) = reply {
            let _ = reply.await;
        }
        Ok(SignalResponse {})
    }
}

pub(crate) fn terminate(
    session: &Session,
    params: &TerminateParams,
) -> impl Future<Output = Result<TerminateResponse, RpcError>> + Send + 'static {
    let reply = session.process(&params.process_id).map(|process| process.terminate());
    async move {
        let running = match reply {
            Some(reply) => reply.await.unwrap_or(false),
            None => false,
        };
        Ok(TerminateResponse { running })
    }
}

pub(crate) fn resize(
    session: &Session,
    client: ClientId,
    params: &ResizeParams,
) -> impl Future<Output = Result<ResizeResponse, RpcError>> + Send + 'static {
    let size = TerminalSize { rows: params.rows, cols: params.cols };
    let id = params.process_id.clone();
    let fit = params.fit.unwrap_or_default();
    let reply = session.process(&id).map(|process| process.resize(client, size, fit));
    async move { Ok(ResizeResponse { size: Some(of_terminal(&id, reply).await?) }) }
}

pub(crate) fn screen(
    session: &Session,
    params: &ScreenParams,
) -> impl Future<Output = Result<ScreenResponse, RpcError>> + Send + 'static {
    let id = params.process_id.clone();
    let reply = session.process(&id).map(|process| process.screen());
    async move { of_terminal(&id, reply).await }
}

/// The reply to a request that needs a terminal.
async fn of_terminal<T>(
    id: &ProcessId,
    reply: Option<Reply<Result<T, NoTerminal>>>,
) -> Result<T, RpcError> {
    let Some(reply) = reply else { return Err(unknown_process(id)) };
    let result = reply.await.map_err(|_| unknown_process(id))?;
    result.map_err(|error @ NoTerminal| {
        RpcError::invalid_request(ErrorKind::NoTerminal, format!("{id}: {error}"))
    })
}

pub(crate) fn update_rules(
    session: &Session,
    params: &NetworkUpdateRulesParams,
) -> Result<NetworkUpdateRulesResponse, RpcError> {
    let id = &params.process_id;
    let rules = session.network_rules().get(id).cloned();
    match (rules, session.process(id)) {
        (Some(rules), _) => rules.update(&params.rules).map(|()| NetworkUpdateRulesResponse {}),
        (None, Some(_)) => {
            let message = format!("process {id} has no network proxy, or has exited");
            Err(RpcError::invalid_params(ErrorKind::InvalidParams, message))
        }
        (None, None) => Err(unknown_process(id)),
    }
}

/// The most that `process/list` says of one process, roughly: its command line (cut by the host), working
/// directory and id.
const LISTED_PROCESS: u64 = 8 * 1024;

pub(crate) fn list(
    session: &Session,
    response_memory: ResponseMemory,
) -> impl Future<Output = (Result<ListResponse, RpcError>, Option<Reservation>)> + Send + 'static {
    let processes = session.processes();
    let bytes = LISTED_PROCESS * processes.len() as u64;
    let asked = is_small(bytes as usize).then(|| infos(&processes));
    async move {
        let (processes, memory) = match asked {
            Some(asked) => (asked.await, None),
            None => {
                let memory = response_memory.reserve(bytes).await;
                (infos(&processes).await, Some(memory))
            }
        };
        (Ok(ListResponse { processes }), memory)
    }
}

/// Asks every process for its entry; sorted by start.
fn infos(processes: &[ProcessHandle]) -> impl Future<Output = Vec<ProcessInfo>> + Send + use<> {
    let asked = futures_util::future::join_all(processes.iter().map(ProcessHandle::info));
    async move {
        let mut infos: Vec<_> = asked.await.into_iter().flatten().collect();
        infos.sort_by(|a, b| {
            (a.started_at_ms, &a.process_id).cmp(&(b.started_at_ms, &b.process_id))
        });
        infos
    }
}

pub(crate) async fn list_sessions(
    sessions: Vec<Arc<Session>>,
    response_memory: ResponseMemory,
) -> (Result<SessionListResponse, RpcError>, Option<Reservation>) {
    let count: usize = sessions.iter().map(|session| session.processes().len()).sum();
    let memory = response_memory.reserve(LISTED_PROCESS * count as u64).await;
    let mut listed = Vec::new();
    for session in sessions {
        let processes = infos(&session.processes()).await;
        if !processes.is_empty() {
            listed.push(SessionInfo {
                session_id: session.id().to_owned(),
                session_name: session.name().map(str::to_owned),
                connections: u32::try_from(session.connections()).unwrap_or(u32::MAX),
                processes,
            });
        }
    }
    (Ok(SessionListResponse { sessions: listed }), Some(memory))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every start allocates, copies and frees it.
    #[test]
    fn launch_of_a_process_is_small() {
        fn size<F>(
            _: impl Fn(
                Server,
                Arc<Session>,
                ExecParams,
                Attempt,
                Arc<Mutex<Managed>>,
                Option<Caller>,
            ) -> F,
        ) -> usize {
            size_of::<F>()
        }
        let bytes = size(launch);
        assert!(bytes <= 9 << 10, "{bytes} bytes");
    }
}
