//! Remote mode without a relay: the server dials one websocket with a signed upgrade, and serves its peer
//! like a client of the listener.

use codex_exec_remote::{
    BaseUrl, Credential, HttpClient, Registry, RelayConfig, TraceContext, serve_direct,
};

use crate::config::ServerConfig;
use crate::remote::{RemoteRunError, listener_name, stopped_or_drained};
use crate::run::ExecServerRuntimePaths;
use crate::server::Server;

/// Configuration of an environment that is served on one websocket, without relay and Noise.
#[derive(Debug)]
#[non_exhaustive]
pub struct DirectEnvironmentConfig<C> {
    /// The registry's base URL: https, or this machine.
    pub base_url: String,
    /// The environment's id.
    pub environment_id: String,
    /// Signs the registration and every upgrade.
    pub credential: C,
    /// How to dial the websocket, and how long to wait before another attempt.
    pub dial: RelayConfig,
    /// Limits of the server.
    pub server: ServerConfig,
}

impl<C: Credential + 'static> DirectEnvironmentConfig<C> {
    /// Makes a configuration with default limits.
    pub fn new(
        base_url: impl Into<String>,
        environment_id: impl Into<String>,
        credential: C,
    ) -> Self {
        Self {
            base_url: base_url.into(),
            environment_id: environment_id.into(),
            credential,
            dial: RelayConfig::default(),
            server: ServerConfig::default(),
        }
    }
}

/// Serves an environment directly until `stop` resolves, or until the registry or the peer refuses it.
pub async fn run_direct_environment_until<C: Credential + 'static>(
    config: DirectEnvironmentConfig<C>,
    runtime_paths: &ExecServerRuntimePaths,
    stop: impl Future<Output = ()>,
) -> Result<(), RemoteRunError> {
    let DirectEnvironmentConfig { base_url, environment_id, credential, dial, mut server } = config;
    if environment_id.trim().is_empty() {
        return Err(RemoteRunError::EmptyId);
    }
    let base: BaseUrl = base_url.parse()?;
    if !base.is_private() {
        return Err(RemoteRunError::InClear(base));
    }
    let registry = Registry::new(base, credential, HttpClient::default())?;
    let registry = registry.with_trace(TraceContext::from_env());
    tracing::info!(environment_id, registry = %registry.base(), "serving directly");
    runtime_paths.configure(&mut server);
    let server = Server::start(server).await.map_err(RemoteRunError::Setup)?;
    server.set_listeners(vec![listener_name(registry.base(), &environment_id)]);
    let serving = server.clone();
    let accept = move |connection| serving.serve(connection);
    let drain = server.shut_down();
    let stop = stopped_or_drained(&server, stop);
    let served = serve_direct(dial, registry, &environment_id, accept, stop, drain).await;
    // Also after a refusal, so that no process is left behind.
    server.shut_down().await;
    Ok(served?)
}
