//! Remote mode: a server that registers itself, connects out, and serves the clients that the registry
//! authorizes.

use std::sync::Arc;

use codex_exec_credentials::{SignIn, SignInError, SignInKind, SignInSources};
use codex_exec_relay_core::NoiseIdentity;
use codex_exec_remote::{
    BaseUrl, BaseUrlError, Credential, CredentialError, HttpClient, RegistrationTarget, Registry,
    RelayConfig, RemoteError, TraceContext, entropy, serve_streams,
};
use codex_exec_rpc::{Connection, WebsocketDial};

use crate::auth::Principal;
use crate::config::ServerConfig;
use crate::forward::forward;
use crate::run::{ExecServerRuntimePaths, shutdown_signal};
use crate::server::Server;

/// Configuration of a server that serves an environment, with end-to-end encryption.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RemoteEnvironmentConfig {
    /// The registry's base URL.
    pub base_url: String,
    /// The environment's id.
    pub environment_id: String,
    /// The name of this machine in logs. Default `codex-exec-server`.
    pub name: String,
    /// How to sign in to the registry: a [`SignIn`], or any other credential.
    pub sign_in: Arc<dyn Credential>,
    /// Limits of the relay.
    pub relay: RelayConfig,
    /// Limits of the server.
    pub server: ServerConfig,
    /// Pass every stream on to the exec-server at this `ws://` URL instead of serving it here.
    pub forward_to: Option<String>,
}

/// Configuration of a server that registers by the older revision; the rendezvous can read its traffic.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RemoteExecutorConfig {
    /// The registry's base URL.
    pub base_url: String,
    /// The executor's id.
    pub executor_id: String,
    /// The name of this machine in logs. Default `codex-exec-server`.
    pub name: String,
    /// How to sign in to the registry.
    pub sign_in: SignIn,
    /// Limits of the relay.
    pub relay: RelayConfig,
    /// Limits of the server.
    pub server: ServerConfig,
}

/// Why a remote server failed.
#[derive(Debug, thiserror::Error)]
pub enum RemoteRunError {
    /// The registry's URL is invalid.
    #[error("--remote: {0}")]
    BaseUrl(#[from] BaseUrlError),
    /// The environment id is empty.
    #[error("the environment id is empty; pass --environment-id")]
    EmptyId,
    /// The credential must not be sent to this registry.
    #[error(transparent)]
    SignIn(#[from] CredentialError),
    /// The registry's URL would send requests unencrypted over the network.
    #[error(
        "--remote-transport direct needs an https:// registry unless it is on this machine: {0}"
    )]
    InClear(BaseUrl),
    /// The registry, or the websocket that it named, refused or failed for good.
    #[error(transparent)]
    Direct(#[from] codex_exec_remote::DirectError),
    /// The registry or the relay refused, or failed for good.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// The server cannot be set up, for example because the system gives no more threads.
    #[error("cannot set up the server: {0}")]
    Setup(#[source] std::io::Error),
    /// The system gave no random bytes.
    #[error("cannot get random bytes from the system")]
    Entropy,
}

impl RemoteEnvironmentConfig {
    /// Signs in by environment variables or `auth.json`; default limits.
    pub fn from_env(
        base_url: impl Into<String>,
        environment_id: impl Into<String>,
    ) -> Result<Self, SignInError> {
        let sign_in = SignInSources::from_env().sign_in(SignInKind::Default)?;
        Ok(Self::new(base_url, environment_id, sign_in))
    }

    /// Signs in with `sign_in`; default limits.
    pub fn new(
        base_url: impl Into<String>,
        environment_id: impl Into<String>,
        sign_in: impl Credential + 'static,
    ) -> Self {
        Self {
            base_url: base_url.into(),
            environment_id: environment_id.into(),
            name: "codex-exec-server".to_owned(),
            sign_in: Arc::new(sign_in),
            relay: RelayConfig::default(),
            server: ServerConfig::default(),
            forward_to: None,
        }
    }
}

impl RemoteExecutorConfig {
    /// Signs in with `sign_in`; default limits.
    pub fn new(
        base_url: impl Into<String>,
        executor_id: impl Into<String>,
        sign_in: SignIn,
    ) -> Self {
        Self {
            base_url: base_url.into(),
            executor_id: executor_id.into(),
            name: "codex-exec-server".to_owned(),
            sign_in,
            relay: RelayConfig::default(),
            server: ServerConfig::default(),
        }
    }
}

/// Serves an environment until SIGTERM or SIGINT, or until the registry refuses it for good.
pub async fn run_remote_environment(
    config: RemoteEnvironmentConfig,
    runtime_paths: ExecServerRuntimePaths,
) -> Result<(), RemoteRunError> {
    run_remote_environment_until(config, &runtime_paths, shutdown_signal()).await
}

/// Serves an environment until `stop` resolves, or until the registry refuses it for good.
pub async fn run_remote_environment_until(
    config: RemoteEnvironmentConfig,
    runtime_paths: &ExecServerRuntimePaths,
    stop: impl Future<Output = ()>,
) -> Result<(), RemoteRunError> {
    let registry = registry(&config.base_url, &config.environment_id, config.sign_in)?;
    let identity = NoiseIdentity::generate(&mut *entropy()).map_err(|_| RemoteRunError::Entropy)?;
    tracing::info!(
        name = config.name,
        environment_id = config.environment_id,
        registry = %registry.base(),
        "serving remotely"
    );
    let listener = listener_name(registry.base(), &config.environment_id);
    let target = RegistrationTarget::Environment {
        registry,
        environment_id: config.environment_id,
        identity,
    };
    match config.forward_to {
        Some(url) => {
            let dial = WebsocketDial::new(url);
            let connection = config.server.connection;
            let accept = move |from: Connection, _| {
                tokio::spawn(forward(from, dial.clone(), connection));
            };
            // Dropping a stream closes its connection to the other server.
            Ok(serve_streams(config.relay, target, accept, stop, async {}).await?)
        }
        None => serve(config.relay, target, listener, config.server, runtime_paths, stop).await,
    }
}

/// Serves an executor of the older revision until SIGTERM or SIGINT.
pub async fn run_remote_executor(
    config: RemoteExecutorConfig,
    runtime_paths: ExecServerRuntimePaths,
) -> Result<(), RemoteRunError> {
    run_remote_executor_until(config, &runtime_paths, shutdown_signal()).await
}

/// Serves an executor of the older revision until `stop` resolves.
pub async fn run_remote_executor_until(
    config: RemoteExecutorConfig,
    runtime_paths: &ExecServerRuntimePaths,
    stop: impl Future<Output = ()>,
) -> Result<(), RemoteRunError> {
    let registry = registry(&config.base_url, &config.executor_id, config.sign_in)?;
    tracing::warn!(
        name = config.name,
        executor_id = config.executor_id,
        "serving without end-to-end encryption: the rendezvous can read and change all traffic"
    );
    let listener = listener_name(registry.base(), &config.executor_id);
    let target = RegistrationTarget::Executor { registry, executor_id: config.executor_id };
    serve(config.relay, target, listener, config.server, runtime_paths, stop).await
}

fn registry(
    base_url: &str,
    id: &str,
    sign_in: impl Credential + 'static,
) -> Result<Registry, RemoteRunError> {
    if id.trim().is_empty() {
        return Err(RemoteRunError::EmptyId);
    }
    let base: BaseUrl = base_url.parse()?;
    let registry = Registry::new(base, sign_in, HttpClient::default())?;
    Ok(registry.with_trace(TraceContext::from_env()))
}

/// Resolves when `stop` does, or when the server has drained.
pub(crate) async fn stopped_or_drained(server: &Server, stop: impl Future<Output = ()>) {
    tokio::select! {
        () = stop => {}
        () = server.drained() => {}
    }
}

/// How `status` shows an environment.
pub(crate) fn listener_name(registry: &BaseUrl, id: &str) -> String {
    format!("{id} at {registry}")
}

async fn serve(
    relay: RelayConfig,
    target: RegistrationTarget,
    listener: String,
    mut config: ServerConfig,
    runtime_paths: &ExecServerRuntimePaths,
    stop: impl Future<Output = ()>,
) -> Result<(), RemoteRunError> {
    runtime_paths.configure(&mut config);
    let server = Server::start(config).await.map_err(RemoteRunError::Setup)?;
    server.set_listeners(vec![listener]);
    let serving = server.clone();
    let accept = move |connection, principal: Option<String>| {
        let principal = principal.map_or(Principal::Embedder, |id| Principal::Harness { id });
        serving.serve_as(principal, None, connection);
    };
    let stop = stopped_or_drained(&server, stop);
    let served = serve_streams(relay, target, accept, stop, server.shut_down()).await;
    // Also after a refusal: no process is left behind.
    server.shut_down().await;
    Ok(served?)
}
