//! Remote mode: a server that registers itself, connects out, and serves whoever the registry
//! authorizes.

use std::sync::Arc;

use codex_exec_credentials::{SignIn, SignInError, SignInKind, SignInSources};
use codex_exec_relay_core::NoiseIdentity;
use codex_exec_remote::{
    BaseUrl, BaseUrlError, Credential, CredentialError, Enrolment, HttpClient, Registry,
    RelayConfig, RemoteError, TraceContext, entropy, serve_streams,
};
use codex_exec_rpc::{Connection, WebsocketDial};

use crate::config::ServerConfig;
use crate::forward::forward;
use crate::run::{ExecServerRuntimePaths, told_to_stop};
use crate::server::Server;

/// A server of an environment, end-to-end encrypted.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RemoteEnvironmentConfig {
    /// The registry's base URL.
    pub base_url: String,
    /// The environment's id.
    pub environment_id: String,
    /// What this machine is called in logs.
    pub name: String,
    /// How to sign in to the registry: a [`SignIn`], or any other credential.
    pub sign_in: Arc<dyn Credential>,
    /// How streams are carried.
    pub relay: RelayConfig,
    /// How the server behaves.
    pub server: ServerConfig,
    /// Pass every stream on to the exec-server at this `ws://` URL instead of serving it here.
    pub forward_to: Option<String>,
}

/// A server of the older registration, in clear between rendezvous and ends.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RemoteExecutorConfig {
    /// The registry's base URL.
    pub base_url: String,
    /// The executor's id.
    pub executor_id: String,
    /// What this machine is called in logs.
    pub name: String,
    /// How to sign in to the registry.
    pub sign_in: SignIn,
    /// How streams are carried.
    pub relay: RelayConfig,
    /// How the server behaves.
    pub server: ServerConfig,
}

/// Why a remote server ended.
#[derive(Debug, thiserror::Error)]
pub enum RemoteRunError {
    /// The registry's URL is none.
    #[error("--remote: {0}")]
    BaseUrl(#[from] BaseUrlError),
    /// An id that no URL can hold.
    #[error("the environment id is empty; pass --environment-id")]
    EmptyId,
    /// The credential must not be sent there.
    #[error(transparent)]
    SignIn(#[from] CredentialError),
    /// The registry would be asked unencrypted.
    #[error(
        "--remote-transport direct needs an https:// registry unless it is on this machine: {0}"
    )]
    InClear(BaseUrl),
    /// The registry, or the websocket that it named.
    #[error(transparent)]
    Direct(#[from] codex_exec_remote::DirectError),
    /// The registry, or the relay.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// The server could not be set up.
    #[error("cannot set up the server: {0}")]
    Setup(#[source] std::io::Error),
    /// No randomness.
    #[error("cannot get random bytes from the system")]
    Entropy,
}

impl RemoteEnvironmentConfig {
    /// Signed in by the environment variables and `auth.json`, default limits.
    pub fn from_env(
        base_url: impl Into<String>,
        environment_id: impl Into<String>,
    ) -> Result<Self, SignInError> {
        let sign_in = SignInSources::from_env().sign_in(SignInKind::Default)?;
        Ok(Self::new(base_url, environment_id, sign_in))
    }

    /// Signed in so, default limits.
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
    /// Signed in so, default limits.
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

/// Serves an environment until it is told to stop (SIGTERM, SIGINT) or refused for good.
pub async fn run_remote_environment(
    config: RemoteEnvironmentConfig,
    runtime_paths: ExecServerRuntimePaths,
) -> Result<(), RemoteRunError> {
    run_remote_environment_until(config, &runtime_paths, told_to_stop()).await
}

/// Serves an environment until `stop` resolves or it is refused for good.
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
    let enrolment =
        Enrolment::Environment { registry, environment_id: config.environment_id, identity };
    match config.forward_to {
        Some(url) => {
            let dial = WebsocketDial::new(url);
            let connection = config.server.connection;
            let accept = move |from: Connection| {
                tokio::spawn(forward(from, dial.clone(), connection));
            };
            // Dropping the streams at the end closes what they were passed on to.
            Ok(serve_streams(config.relay, enrolment, accept, stop, async {}).await?)
        }
        None => serve(config.relay, enrolment, config.server, runtime_paths, stop).await,
    }
}

/// Serves an executor of the older registration until it is told to stop (SIGTERM, SIGINT).
pub async fn run_remote_executor(
    config: RemoteExecutorConfig,
    runtime_paths: ExecServerRuntimePaths,
) -> Result<(), RemoteRunError> {
    run_remote_executor_until(config, &runtime_paths, told_to_stop()).await
}

/// Serves an executor of the older registration until `stop` resolves.
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
    let enrolment = Enrolment::Executor { registry, executor_id: config.executor_id };
    serve(config.relay, enrolment, config.server, runtime_paths, stop).await
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

async fn serve(
    relay: RelayConfig,
    enrolment: Enrolment,
    mut config: ServerConfig,
    runtime_paths: &ExecServerRuntimePaths,
    stop: impl Future<Output = ()>,
) -> Result<(), RemoteRunError> {
    runtime_paths.install(&mut config);
    let server = Server::new(config).map_err(RemoteRunError::Setup)?;
    let serving = server.clone();
    let accept = move |connection| serving.serve(connection);
    let served = serve_streams(relay, enrolment, accept, stop, server.shut_down()).await;
    // Also when it was refused: nothing that was started is left behind.
    server.shut_down().await;
    Ok(served?)
}
