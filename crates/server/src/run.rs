//! A whole server program: listen, print the address, serve until a signal.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use codex_exec_host::process::Lifeline;
use codex_exec_rpc::Connection;
use tokio::signal::unix::{SignalKind, signal};

use crate::auth::WebSocketAuth;
use crate::config::ServerConfig;
use crate::listen_url::ListenUrl;
use crate::listener::WebSocketListener;
use crate::server::Server;

/// The executables of a server program.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExecServerRuntimePaths {
    /// The executable that the server re-enters for sandboxes, helpers and the warden. It has to call
    /// [`main_if_reentered`](crate::main_if_reentered) first in its `main`.
    pub codex_self_exe: PathBuf,
    /// Another executable for sandboxes. Default: the same one.
    pub codex_linux_sandbox_exe: Option<PathBuf>,
}

impl ExecServerRuntimePaths {
    /// Resolves both paths to absolute ones; fails if one does not exist.
    pub fn new(
        codex_self_exe: impl AsRef<Path>,
        codex_linux_sandbox_exe: Option<PathBuf>,
    ) -> io::Result<Self> {
        Ok(Self {
            codex_self_exe: codex_self_exe.as_ref().canonicalize()?,
            codex_linux_sandbox_exe: codex_linux_sandbox_exe
                .map(|path| path.canonicalize())
                .transpose()?,
        })
    }

    /// Sets these executables in the configuration of a server.
    pub(crate) fn configure(&self, config: &mut ServerConfig) {
        config.process.lifeline = Lifeline::Warden { executable: self.codex_self_exe.clone() };
        let sandbox = self.codex_linux_sandbox_exe.as_ref().unwrap_or(&self.codex_self_exe);
        config.sandbox_executable = Some(sandbox.clone());
        let executables = [&self.codex_self_exe].into_iter().chain(&self.codex_linux_sandbox_exe);
        config.own_files.read_only.extend(executables.cloned());
    }
}

/// Why a server program failed to start.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The listen URL is invalid.
    #[error(transparent)]
    ListenUrl(#[from] crate::ExecServerListenUrlParseError),
    /// The server cannot bind the address.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// The address it tried.
        address: std::net::SocketAddr,
        /// The error of the system.
        source: io::Error,
    },
    /// The server cannot be set up, for example because the system gives no more threads.
    #[error("cannot set up the server: {0}")]
    Setup(#[source] io::Error),
}

/// Runs a server with the default configuration until SIGTERM or SIGINT or, on stdio, until its input
/// ends. Prints its address as the only line on stdout.
///
/// ```no_run
/// use codex_exec_serving::{DEFAULT_LISTEN_URL, ExecServerRuntimePaths, main_if_reentered, run_main};
///
/// fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
///     main_if_reentered();
///     let paths = ExecServerRuntimePaths::new(std::env::current_exe()?, None)?;
///     tokio::runtime::Runtime::new()?.block_on(run_main(DEFAULT_LISTEN_URL, paths))
/// }
/// ```
pub async fn run_main(
    listen_url: &str,
    runtime_paths: ExecServerRuntimePaths,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let listen_url = listen_url.parse().map_err(RunError::ListenUrl)?;
    let auth = WebSocketAuth::default();
    run(listen_url, auth, ServerConfig::default(), &runtime_paths, shutdown_signal()).await?;
    Ok(())
}

/// Runs a server until `stop` resolves or, on stdio, its input ends; then kills every process that it
/// started.
pub async fn run(
    listen_url: ListenUrl,
    auth: WebSocketAuth,
    mut config: ServerConfig,
    runtime_paths: &ExecServerRuntimePaths,
    stop: impl Future<Output = ()>,
) -> Result<(), RunError> {
    runtime_paths.configure(&mut config);
    config.lanes = std::thread::available_parallelism().map_or(1, Into::into);
    match listen_url {
        ListenUrl::WebSocket(address) => {
            let bind = |source| RunError::Bind { address, source };
            if matches!(auth, WebSocketAuth::Open) && !address.ip().is_loopback() {
                tracing::warn!(
                    "anyone who can reach {address} can run commands on this machine; require a \
                     token with --ws-auth"
                );
            }
            let listener = WebSocketListener::bind(address, auth).await.map_err(bind)?;
            let address = listener.local_addr().map_err(bind)?;
            let server = Server::start(config).await.map_err(RunError::Setup)?;
            announce(&format!("ws://{address}")).map_err(RunError::Setup)?;
            tokio::select! {
                () = listener.serve(&server) => {}
                () = stop => tracing::info!("stopping"),
            }
            server.shut_down().await;
        }
        ListenUrl::Stdio => {
            let server = Server::start(config).await.map_err(RunError::Setup)?;
            let connection = Connection::lines(
                tokio::io::stdin(),
                tokio::io::stdout(),
                &server.config().connection,
            );
            let outbound = connection.outbound().clone();
            tokio::select! {
                () = server.serve_until_closed(connection) => {}
                () = stop => tracing::info!("stopping"),
            }
            server.shut_down().await;
            // Responses to requests that arrived before the input ended.
            let timeout = server.config().connection.close_timeout;
            let _ = tokio::time::timeout(timeout, outbound.drained()).await;
        }
    }
    Ok(())
}

/// Prints the only line that ever goes to stdout.
fn announce(url: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{url}")?;
    stdout.flush()
}

/// Resolves on the next SIGTERM or SIGINT. The handlers are installed by the time this returns, so no
/// later signal is missed. Must be called inside a tokio runtime.
pub fn shutdown_signal() -> impl Future<Output = ()> {
    let listen = |kind| {
        let signals = signal(kind);
        async move {
            match signals {
                Ok(mut signals) => signals.recv().await,
                Err(error) => {
                    tracing::error!(%error, "cannot listen for signals");
                    std::future::pending().await
                }
            }
        }
    };
    let (terminate, interrupt) = (listen(SignalKind::terminate()), listen(SignalKind::interrupt()));
    async move {
        tokio::select! {
            _ = terminate => {}
            _ = interrupt => {}
        }
    }
}
