//! The handlers of `environmentConfig/read`, `capabilityRoots/discoverV1` and `capabilities/discoverV2`.
//!
//! They wait for nothing but files, hold the memory of their answer before they read any, and change
//! nothing; so they are in no order with other requests.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use codex_exec_host::environment::{
    MAX_ANSWER_BYTES, MAX_ROOTS, ROOTS_AT_ONCE, Reader, discover_installed, discover_root,
    read_config,
};
use codex_exec_host::files::Reservation;
use codex_exec_host::pool;
use codex_exec_server_protocol::discovery::{
    CapabilitiesDiscoverParams, CapabilitiesDiscoverResponse, CapabilityRoot,
    CapabilityRootsDiscoverParams, CapabilityRootsDiscoverResponse, DiscoveredRoot,
};
use codex_exec_server_protocol::environment_config::{
    EnvironmentConfigReadParams, EnvironmentConfigReadResponse,
};
use codex_exec_server_protocol::{ErrorKind, RpcError};
use futures_util::StreamExt;
use tokio::sync::Semaphore;

use crate::policy;
use crate::response_memory::ResponseMemory;
use crate::server::Server;

/// An answer and its memory, which lasts until the answer is written.
type Held<R> = (Result<R, RpcError>, Option<Reservation>);

/// Parsing takes over a hundred times the memory of a file, so one configuration is read at a time.
static CONFIG_READS: Semaphore = Semaphore::const_new(1);

/// Reads the configuration files of this machine.
pub(crate) async fn config(
    server: Server,
    params: EnvironmentConfigReadParams,
    memory: ResponseMemory,
) -> Held<EnvironmentConfigReadResponse> {
    // It reads files of the server's user without a sandbox.
    if server.confiner().is_bounded() {
        let error = policy::refused("environmentConfig/read", "read");
        return (Err(error), None);
    }
    let held = memory.reserve(MAX_ANSWER_BYTES as u64).await;
    let turn = CONFIG_READS.acquire().await;
    let read = pool::blocking(move || {
        // The work goes on if the client leaves.
        let _turn = turn;
        read_config(&server.config().environment, &params)
    });
    let result = match read.await {
        Ok(result) => result.map_err(RpcError::from),
        Err(error) => Err(RpcError::internal(ErrorKind::Internal, error.to_string())),
    };
    (result, Some(held))
}

/// Searches the roots that a client names, each under its own sandbox.
pub(crate) async fn roots(
    server: Server,
    params: CapabilityRootsDiscoverParams,
    memory: ResponseMemory,
) -> Held<CapabilityRootsDiscoverResponse> {
    if params.roots.len() > MAX_ROOTS {
        let message = format!("capability root discovery accepts at most {MAX_ROOTS} roots");
        return (Err(RpcError::invalid_request(ErrorKind::LimitReached, message)), None);
    }
    let held = memory.reserve(MAX_ANSWER_BYTES as u64).await;
    let budget = Arc::new(AtomicUsize::new(MAX_ANSWER_BYTES));
    let roots = futures_util::stream::iter(params.roots)
        .map(|asked| root(&server, asked, budget.clone()))
        .buffered(ROOTS_AT_ONCE)
        .collect::<Vec<_>>()
        .await;
    (Ok(CapabilityRootsDiscoverResponse { roots }), Some(held))
}

async fn root(server: &Server, asked: CapabilityRoot, budget: Arc<AtomicUsize>) -> DiscoveredRoot {
    let CapabilityRoot { id, path, sandbox } = asked;
    match server.confiner().backend(sandbox, true).await {
        Ok(backend) => {
            let reader = Reader::new(server.config().files.clone(), backend, budget);
            discover_root(&reader, id, path).await
        }
        Err(error) => {
            let error = format!("failed to inspect capability root {path}: {error}");
            DiscoveredRoot { error: Some(error), ..DiscoveredRoot::empty(id, path) }
        }
    }
}

/// Finds what is installed on this machine.
pub(crate) async fn installed(
    server: Server,
    params: CapabilitiesDiscoverParams,
    memory: ResponseMemory,
) -> Held<CapabilitiesDiscoverResponse> {
    let held = memory.reserve(MAX_ANSWER_BYTES as u64).await;
    let backend = match server.confiner().backend(params.sandbox, true).await {
        Ok(backend) => backend,
        Err(error) => return (Err(error.into()), None),
    };
    let config = server.config();
    let budget = Arc::new(AtomicUsize::new(MAX_ANSWER_BYTES));
    let reader = Reader::new(config.files.clone(), backend, budget);
    (Ok(discover_installed(&config.environment, &reader).await), Some(held))
}
