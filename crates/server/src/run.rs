//! A whole server program: listen, say where, serve, stop when told.

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

/// The files a server program is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExecServerRuntimePaths {
    /// The executable that is re-entered for sandboxes, helpers and the warden. It has to call
    /// [`main_if_reentered`](crate::main_if_reentered) first thing in its `main`.
    pub codex_self_exe: PathBuf,
    /// Another executable for sandboxes, where that is not the same.
    pub codex_linux_sandbox_exe: Option<PathBuf>,
}

impl ExecServerRuntimePaths {
    /// Paths that exist and are absolute.
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

    /// Has a server re-enter these executables, wherever it listens.
    pub(crate) fn configure(&self, config: &mut ServerConfig) {
        config.process.lifeline = Lifeline::Warden { executable: self.codex_self_exe.clone() };
        let sandbox = self.codex_linux_sandbox_exe.as_ref().unwrap_or(&self.codex_self_exe);
        config.sandbox_executable = Some(sandbox.clone());
        let executables = [&self.codex_self_exe].into_iter().chain(&self.codex_linux_sandbox_exe);
        config.own_files.read_only.extend(executables.cloned());
    }
}

/// Why a server program could not run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Where it should listen is nowhere.
    #[error(transparent)]
    ListenUrl(#[from] crate::ExecServerListenUrlParseError),
    /// The address cannot be had.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// Which.
        address: std::net::SocketAddr,
        /// Why not.
        source: io::Error,
    },
    /// The server could not be set up.
    #[error("cannot set up the server: {0}")]
    Setup(#[source] io::Error),
}

/// Runs a server with the default configuration until it is told to stop (SIGTERM, SIGINT) or, on
/// stdio, until its input ends. Prints the address on stdout, alone on one line.
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

/// Runs a server until `stop` resolves or, on stdio, its input ends; then kills what was started.
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
            let server = Server::new(config).map_err(RunError::Setup)?;
            announce(&format!("ws://{address}")).map_err(RunError::Setup)?;
            tokio::select! {
                () = listener.serve(&server) => {}
                () = stop => tracing::info!("stopping"),
            }
            server.shut_down().await;
        }
        ListenUrl::Stdio => {
            let server = Server::new(config).map_err(RunError::Setup)?;
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
            // The answers to what came before the end of the input.
            let timeout = server.config().connection.close_timeout;
            let _ = tokio::time::timeout(timeout, outbound.drained()).await;
        }
    }
    Ok(())
}

/// The one line that ever goes to stdout.
fn announce(url: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{url}")?;
    stdout.flush()
}

/// Resolves on SIGTERM or SIGINT that come from now on: they are listened for by the time this
/// returns. To be called inside a runtime.
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
