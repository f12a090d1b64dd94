//! The handlers of `process/*`.
//!
//! Each queues its request with the process's owner before it returns, and returns the reply as a
//! future.

use codex_exec_host::files::Reservation;
use codex_exec_host::pool::{self, WorkError};
use codex_exec_host::process::{
    Environment, Group, Launch, LaunchError, NoTerminal, ProcessHandle, StartError, Started,
    environment, environment_is_costly,
};
use codex_exec_server_protocol::process::{
    ExecParams, ExecResponse, ListResponse, ProcessId, ReadParams, ReadResponse, ResizeParams,
    ResizeResponse, SandboxType, SignalParams, SignalResponse, TerminalSize, TerminateParams,
    TerminateResponse, WriteParams, WriteResponse, WriteStatus,
};
use codex_exec_server_protocol::{ErrorKind, RpcError};
use tokio::sync::Semaphore;

use crate::connection::{Attached, Request};
use crate::response_memory::{ResponseMemory, is_small};
use crate::sandbox::Confiner;
use crate::server::Server;
use crate::session::{InsertError, Session};

/// Why a process did not start.
enum StartFailure {
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
            StartError::Launch(_) | StartError::Sandbox(_) => {
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
    let session = attached.session.clone();
    let mut started = None;
    let inserted = session.insert(&id, || {
        let group = session.group();
        let launch = |params, retry| launch(server.confiner().clone(), params, group, retry);
        let retry = params.sandbox.is_some().then(|| launch(params.clone(), true));
        let (handle, reply) = server.host().start(launch(params, false), retry);
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
            Ok(Ok(Started { assurance })) => {
                let kind = match assurance {
                    Some(_) => SandboxType::LinuxSeccomp,
                    None => SandboxType::None,
                };
                let response = ExecResponse {
                    process_id: id,
                    sandbox_type: Some(kind),
                    sandbox_assurance: assurance,
                };
                // Events follow the response.
                if request.respond(Ok(response)).await {
                    attached.session.attach(&process, attached.attachment, &outbound);
                }
            }
            Ok(Err(failure)) => {
                request.respond::<ExecResponse>(Err(failure.into_rpc(&program))).await;
            }
            // The session ended before the process started.
            Err(_) => {
                let error = RpcError::internal(ErrorKind::SessionEnded, "the session has ended");
                request.respond::<ExecResponse>(Err(error)).await;
            }
        }
    });
}

async fn launch(
    confiner: Confiner,
    params: ExecParams,
    group: Group,
    retry: bool,
) -> Result<Launch, StartFailure> {
    if retry {
        confiner.forget_plans();
    }
    let unsupported = [
        // Without a sandbox there is nothing to enforce.
        (
            params.enforce_managed_network && params.sandbox.is_some()
                || params.managed_network.is_some(),
            "a managed network",
        ),
        (params.network_proxy.is_some(), "a network proxy"),
        (params.shell_snapshot.is_some(), "a shell snapshot"),
    ];
    if let Some((_, what)) = unsupported.iter().find(|(requested, _)| *requested) {
        let message = format!("this server does not support {what}");
        let error = RpcError::invalid_params(ErrorKind::Unsupported, message);
        return Err(StartFailure::Refused(error));
    }
    if params.argv.is_empty() {
        return Err(LaunchError::EmptyArgv.into());
    }
    let (mut params, environment) = environment_of(params).await?;
    let sandbox = match params.sandbox.take() {
        Some(context) => confiner.confine(context, &params, &environment).await,
        None => Ok(None),
    };
    match sandbox.map_err(StartFailure::Refused)? {
        Some(sandbox) => Ok(Launch::confined(params, sandbox, group)?),
        None => Ok(Launch::new(params, &environment, group)?),
    }
}

/// How many policies with many patterns are applied at once; compiled, each takes some 10 MiB.
static COSTLY_POLICIES: Semaphore = Semaphore::const_new(2);

/// Builds the environment of a process, away from the lane if that can take long.
async fn environment_of(params: ExecParams) -> Result<(ExecParams, Environment), StartFailure> {
    if !environment_is_costly(&params) {
        let environment = environment(&params)?;
        return Ok((params, environment));
    }
    let turn = COSTLY_POLICIES.acquire().await;
    let built = pool::blocking(move || {
        // The work goes on if the client leaves.
        let _turn = turn;
        environment(&params).map(|built| (params, built))
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
    response_memory: ResponseMemory,
) -> impl Future<Output = (Result<ReadResponse, RpcError>, Option<Reservation>)> + Send + 'static {
    let id = params.process_id.clone();
    let process = session.process(&id);
    let reply = process.as_ref().map(|process| process.read(params.clone()));
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
        (process.read(retry).await.map_err(|_| unknown_process(&id)), Some(memory))
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
    params: &ResizeParams,
) -> impl Future<Output = Result<ResizeResponse, RpcError>> + Send + 'static {
    let size = TerminalSize { rows: params.rows, cols: params.cols };
    let id = params.process_id.clone();
    let reply = session.process(&id).map(|process| process.resize(size));
    async move {
        match reply {
            None => Err(unknown_process(&id)),
            Some(reply) => match reply.await {
                Ok(Ok(())) => Ok(ResizeResponse {}),
                Ok(Err(error @ NoTerminal)) => {
                    let message = format!("{id}: {error}");
                    Err(RpcError::invalid_request(ErrorKind::NoTerminal, message))
                }
                Err(_) => Err(unknown_process(&id)),
            },
        }
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
    let ask = |processes: &[ProcessHandle]| {
        futures_util::future::join_all(processes.iter().map(ProcessHandle::info))
    };
    let bytes = LISTED_PROCESS * processes.len() as u64;
    let asked = is_small(bytes as usize).then(|| ask(&processes));
    async move {
        let (infos, memory) = match asked {
            Some(asked) => (asked.await, None),
            None => {
                let memory = response_memory.reserve(bytes).await;
                (ask(&processes).await, Some(memory))
            }
        };
        let mut processes: Vec<_> = infos.into_iter().flatten().collect();
        processes.sort_by(|a, b| {
            (a.started_at_ms, &a.process_id).cmp(&(b.started_at_ms, &b.process_id))
        });
        (Ok(ListResponse { processes }), memory)
    }
}
