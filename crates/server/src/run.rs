//! A whole server program: listen, print the addresses, serve until a signal.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use codex_exec_host::process::Lifeline;
use codex_exec_rpc::{Connection, TlsFiles};
use tokio::signal::unix::{SignalKind, signal};

use crate::auth::WebSocketAuth;
use crate::config::ServerConfig;
use crate::listen_url::ListenUrl;
use crate::listener::WebSocketListener;
use crate::server::Server;
use crate::service_manager::{InheritedSocket, ServiceNotifier};
use crate::tls::{ListenerTlsError, Tls};

/// Where a server program listens, and for whom.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Listening {
    /// The addresses, or stdio alone.
    pub urls: Vec<ListenUrl>,
    /// Sockets that the service manager passed. Default none.
    pub inherited: Vec<InheritedSocket>,
    /// Who may connect, except on Unix sockets, which only the server's user and root can use.
    pub auth: WebSocketAuth,
    /// The certificate of `wss://` and, unless their name is `ws`, of inherited TCP sockets. Default none.
    pub tls: Option<TlsFiles>,
    /// Listen beyond loopback although neither a token nor a client certificate is required. Default false: the
    /// server refuses to start.
    pub insecure_open: bool,
    /// Notified when the server is ready and when it stops (default: nothing).
    pub notifier: ServiceNotifier,
}

impl From<ListenUrl> for Listening {
    fn from(url: ListenUrl) -> Self {
        Self { urls: vec![url], ..Self::default() }
    }
}

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
    #[error("cannot listen on {url}: {source}")]
    Bind {
        /// The address it tried.
        url: ListenUrl,
        /// The error of the system.
        source: io::Error,
    },
    /// A socket of the service manager cannot be used.
    #[error("cannot use socket {number} of LISTEN_FDS: {source}")]
    Inherited {
        /// Its number, from 1.
        number: usize,
        /// What is wrong with it.
        source: io::Error,
    },
    /// There is no address and no socket.
    #[error("there is nothing to listen on; pass --listen URL")]
    Nothing,
    /// Other addresses beside stdio.
    #[error("--listen stdio cannot be combined with other addresses")]
    StdioAmongOthers,
    /// An address with TLS needs a certificate.
    #[error("{url} needs --tls-cert and --tls-key")]
    NoCertificate {
        /// The address.
        url: ListenUrl,
    },
    /// A certificate, and no address with TLS.
    #[error("--tls-cert needs an address with TLS; pass --listen wss://IP:PORT")]
    UnusedCertificate,
    /// A token is required, and no listener checks it.
    #[error(
        "--ws-auth needs a websocket listener on a network; --listen stdio and unix:PATH need no token"
    )]
    UnusedAuth,
    /// Anyone who can reach the address could run commands.
    #[error(
        "anyone who can reach {url} could run commands on this machine; require a token with --ws-auth or \
         client certificates with --tls-client-ca, or pass --insecure-open"
    )]
    Open {
        /// The address.
        url: ListenUrl,
    },
    /// The certificate cannot be used.
    #[error(transparent)]
    Tls(#[from] ListenerTlsError),
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
    let listen_url: ListenUrl = listen_url.parse().map_err(RunError::ListenUrl)?;
    run(listen_url.into(), ServerConfig::default(), &runtime_paths, shutdown_signal()).await?;
    Ok(())
}

/// Runs a server until `stop` resolves, it has drained or, on stdio, its input ends; then kills every process
/// that it started. Prints the address of each listener as a line on stdout, first those of the service manager, then
/// the others, in their order.
pub async fn run(
    listening: Listening,
    mut config: ServerConfig,
    runtime_paths: &ExecServerRuntimePaths,
    stop: impl Future<Output = ()>,
) -> Result<(), RunError> {
    runtime_paths.configure(&mut config);
    config.lanes = std::thread::available_parallelism().map_or(1, Into::into);
    if listening.urls.contains(&ListenUrl::Stdio) {
        return serve_stdio(listening, config, stop).await;
    }
    let notifier = listening.notifier;
    let tls = listening.tls.map(|files| Tls::new(files).map(Arc::new)).transpose()?;
    let auth = Arc::new(listening.auth);
    let mut listeners = Vec::new();
    for (index, inherited) in listening.inherited.into_iter().enumerate() {
        let failed = |source| RunError::Inherited { number: index + 1, source };
        let listener = WebSocketListener::inherit(inherited, &auth, tls.as_ref());
        let listener = listener.map_err(failed)?;
        let url = listener.url().map_err(failed)?;
        listeners.push((listener, url));
    }
    for url in listening.urls {
        if tls.is_none() && matches!(url, ListenUrl::Tls(_)) {
            return Err(RunError::NoCertificate { url });
        }
        let failed = |source| RunError::Bind { url: url.clone(), source };
        let listener = WebSocketListener::listen(&url, &auth, tls.as_ref()).map_err(failed)?;
        let url = listener.url().map_err(failed)?;
        listeners.push((listener, url));
    }
    check(&listeners, &auth, tls.is_some(), listening.insecure_open)?;
    // A sandboxed process that could open the socket could start one without a sandbox.
    let sockets = listeners.iter().filter_map(|(listener, _)| listener.socket_path());
    config.own_files.denied.extend(sockets);
    let server = Server::start(config).await.map_err(RunError::Setup)?;
    if let Some(tls) = tls {
        reload_on_hangup(tls);
    }
    server.set_listeners(listeners.iter().map(|(_, url)| url.to_string()).collect());
    announce(listeners.iter().map(|(_, url)| url)).map_err(RunError::Setup)?;
    notifier.ready();
    let serving = listeners.into_iter().map(|(listener, _)| listener.serve(&server));
    tokio::select! {
        _ = futures_util::future::join_all(serving) => {}
        () = server.drained() => {}
        () = stop => tracing::info!("stopping"),
    }
    notifier.stopping();
    server.shut_down().await;
    Ok(())
}

/// Refuses listeners that the flags do not fit.
fn check(
    listeners: &[(WebSocketListener, ListenUrl)],
    auth: &WebSocketAuth,
    has_tls: bool,
    insecure_open: bool,
) -> Result<(), RunError> {
    if listeners.is_empty() {
        return Err(RunError::Nothing);
    }
    if has_tls && !listeners.iter().any(|(_, url)| matches!(url, ListenUrl::Tls(_))) {
        return Err(RunError::UnusedCertificate);
    }
    let checks_tokens = listeners.iter().any(|(listener, _)| listener.checks_tokens());
    if !matches!(auth, WebSocketAuth::Open) && !checks_tokens {
        return Err(RunError::UnusedAuth);
    }
    for (listener, url) in listeners {
        if !listener.is_open_to_others().map_err(RunError::Setup)? {
            continue;
        }
        if !insecure_open {
            return Err(RunError::Open { url: url.clone() });
        }
        tracing::warn!("anyone who can reach {url} can run commands on this machine");
    }
    Ok(())
}

async fn serve_stdio(
    listening: Listening,
    config: ServerConfig,
    stop: impl Future<Output = ()>,
) -> Result<(), RunError> {
    if listening.urls.len() > 1 || !listening.inherited.is_empty() {
        return Err(RunError::StdioAmongOthers);
    }
    if listening.tls.is_some() {
        return Err(RunError::UnusedCertificate);
    }
    if !matches!(listening.auth, WebSocketAuth::Open) {
        return Err(RunError::UnusedAuth);
    }
    let server = Server::start(config).await.map_err(RunError::Setup)?;
    let connection =
        Connection::lines(tokio::io::stdin(), tokio::io::stdout(), &server.config().connection);
    let outbound = connection.outbound().clone();
    server.set_listeners(vec![ListenUrl::Stdio.to_string()]);
    listening.notifier.ready();
    tokio::select! {
        () = server.serve_until_closed(connection) => {}
        () = server.drained() => {}
        () = stop => tracing::info!("stopping"),
    }
    listening.notifier.stopping();
    server.shut_down().await;
    // Responses to requests that arrived before the input ended.
    let timeout = server.config().connection.close_timeout;
    let _ = tokio::time::timeout(timeout, outbound.drained()).await;
    Ok(())
}

/// Reads certificates and key again on every SIGHUP.
fn reload_on_hangup(tls: Arc<Tls>) {
    let mut hangups = match signal(SignalKind::hangup()) {
        Ok(hangups) => hangups,
        Err(error) => return tracing::error!(%error, "cannot listen for SIGHUP"),
    };
    tokio::spawn(async move {
        while hangups.recv().await.is_some() {
            match tls.reload() {
                Ok(()) => tracing::info!("read the certificates again"),
                Err(error) => tracing::error!(%error, "keeping the old certificates"),
            }
        }
    });
}

/// Prints the only lines that ever go to stdout.
fn announce<'a>(urls: impl Iterator<Item = &'a ListenUrl>) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    for url in urls {
        writeln!(stdout, "{url}")?;
    }
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
