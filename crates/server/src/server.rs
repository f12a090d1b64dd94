//! The server itself: the state that all connections share, and its shutdown.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use codex_exec_host::files::ChangeMemory;
use codex_exec_host::process::ProcessHost;
use codex_exec_host::{machine, pool};
use codex_exec_rpc::{Budget, Connection, ConnectionConfig};
use codex_exec_server_protocol::environment::{Capabilities, EnvironmentInfo, ShellInfo};
use codex_exec_server_protocol::{Assurance, PathUri};
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::audit::AuditLog;
use crate::auth::Principal;
use crate::config::ServerConfig;
use crate::connection;
use crate::control::{ControlFile, ControlSocket};
use crate::drain::Drain;
use crate::entry::{Gate, Pass};
use crate::lanes::Lanes;
use crate::limits::{Ledger, Whose};
use crate::managed_network::ManagedNetworks;
use crate::metrics::{self, Metrics};
use crate::sandbox::Confiner;
use crate::session::Sessions;
use crate::spans::SpanExporter;

/// An execution server. Clones are handles to the same one.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> std::io::Result<()> {
/// use codex_exec_serving::{Server, ServerConfig};
///
/// let server = Server::new(ServerConfig::default())?;
/// let mut client = server.connect();
/// let hello = r#"{"id":1,"method":"initialize","params":{"clientName":"docs"}}"#;
/// client.outbound().send(hello).await.unwrap();
/// let response = client.next().await.unwrap().unwrap();
/// assert!(response.starts_with(br#"{"id":1,"result":{"sessionId":"#));
/// server.shut_down().await;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Server(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    config: ServerConfig,
    host: ProcessHost,
    sessions: Sessions,
    confiner: Confiner,
    managed_networks: ManagedNetworks,
    environment_info: EnvironmentInfo,
    shutdown: CancellationToken,
    connections: TaskTracker,
    lanes: Lanes,
    gate: Gate,
    message_budget: Budget,
    response_budget: Budget,
    ledger: Ledger,
    metrics: Option<Arc<Metrics>>,
    spans: Option<SpanExporter>,
    http_requests: Arc<Semaphore>,
    change_memory: Arc<ChangeMemory>,
    started_at: Instant,
    /// Where it listens, for its operator.
    listeners: Mutex<Vec<String>>,
    open_connections: AtomicUsize,
    drain: Drain,
    control_file: ControlFile,
}

/// Counts a connection while it is open.
pub(crate) struct OpenConnection(Server);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.0.open_connections.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Server {
    /// Creates a server that does not listen yet. Must be called inside a tokio runtime.
    pub fn new(config: ServerConfig) -> io::Result<Self> {
        let host = ProcessHost::new(config.process.clone())?;
        let confiner = Confiner::new(&config, &host)?;
        if config.policy.is_some() && confiner.assurance() < Some(config.sandbox_assurance) {
            let reason = "the operator's policy needs a sandbox, and this machine offers less than \
                          --sandbox-assurance; see codex doctor";
            return Err(io::Error::new(io::ErrorKind::Unsupported, reason));
        }
        let lanes = Lanes::start(config.lanes)?;
        let metrics = config.metrics.then(Arc::default);
        Ok(Self(Arc::new(Shared {
            sessions: Sessions::new(host.clone(), config.limits.session, metrics.clone()),
            metrics,
            spans: config.spans.clone().map(SpanExporter::start),
            ledger: Ledger::new(Whose::Server, config.limits.server),
            environment_info: environment_info(&confiner),
            managed_networks: ManagedNetworks::new(&config),
            gate: Gate::new(config.entry),
            message_budget: Budget::new(config.message_memory),
            response_budget: Budget::new(config.response_memory),
            http_requests: Arc::new(Semaphore::new(config.http_requests)),
            change_memory: ChangeMemory::new(config.watch_memory, None),
            confiner,
            config,
            host,
            shutdown: CancellationToken::new(),
            connections: TaskTracker::new(),
            lanes,
            started_at: Instant::now(),
            listeners: Mutex::default(),
            open_connections: AtomicUsize::new(0),
            drain: Drain::new(),
            control_file: ControlFile::default(),
        })))
    }

    /// Creates a server, and serves its counters and its control socket if the configuration says where.
    pub(crate) async fn start(mut config: ServerConfig) -> io::Result<Self> {
        let mut counters = None;
        if let Some(address) = config.metrics_address {
            let listener = TcpListener::bind(address).await.map_err(|error| {
                io::Error::new(error.kind(), format!("cannot serve metrics at {address}: {error}"))
            })?;
            config.metrics = true;
            counters = Some(listener);
        }
        let control = config.control_socket.as_deref().map(ControlSocket::bind).transpose()?;
        // A sandboxed process that could open it could stop the server.
        config.own_files.denied.extend(control.as_ref().map(|control| control.path().to_owned()));
        let server = Self::new(config)?;
        if let Some(listener) = counters {
            tokio::spawn(metrics::serve(listener, server.clone()));
        }
        if let Some(control) = control {
            control.start(&server);
        }
        Ok(server)
    }

    /// Serves a connection in a new task.
    pub fn serve(&self, connection: Connection) {
        self.serve_as(Principal::Embedder, None, connection);
    }

    /// Like [`serve`](Self::serve), for a peer that the listener has authenticated.
    pub(crate) fn serve_as(
        &self,
        principal: Principal,
        pass: Option<Arc<Pass>>,
        connection: Connection,
    ) {
        self.0.connections.spawn(connection::serve(self.clone(), principal, pass, connection));
    }

    /// Serves a connection until it closes.
    pub async fn serve_until_closed(&self, connection: Connection) {
        let serving = connection::serve(self.clone(), Principal::Embedder, None, connection);
        self.0.connections.track_future(serving).await;
    }

    /// Opens a connection to this server in memory.
    pub fn connect(&self) -> Connection {
        let (ours, theirs) =
            Connection::pair(&ConnectionConfig { keep_alive: None, ..self.0.config.connection });
        self.serve(ours);
        theirs
    }

    /// Closes every connection, kills every process and its descendants, and returns once all are gone. If
    /// [`stop_grace`](ServerConfig::stop_grace) is not zero, processes first get SIGTERM and that much
    /// time, and their output still reaches the clients.
    pub async fn shut_down(&self) {
        let grace = self.0.config.stop_grace;
        if !grace.is_zero() && !self.0.shutdown.is_cancelled() {
            let _ = tokio::time::timeout(grace, self.0.sessions.terminate_all()).await;
        }
        self.0.shutdown.cancel();
        drop(self.0.control_file.lock().take());
        self.0.connections.close();
        self.0.connections.wait().await;
        self.0.sessions.end_all().await;
        if let Some(audit) = self.audit().cloned() {
            let _ = pool::blocking(move || audit.flush(LAST_RECORDS)).await;
        }
        if let Some(spans) = self.spans() {
            spans.flush(LAST_RECORDS).await;
        }
    }

    /// Whether the peer of an accepted TCP connection may use another listener of this program: not if a
    /// sandboxed process of this server holds the other end, or if the server cannot find out.
    pub async fn admits(&self, socket: impl AsFd) -> bool {
        self.host().peers().admit(socket).await.is_ok()
    }

    /// Resolves when the server begins to shut down.
    pub async fn shutting_down(&self) {
        self.0.shutdown.cancelled().await;
    }

    /// Says where the server can be reached, for its operator.
    pub(crate) fn set_listeners(&self, listeners: Vec<String>) {
        *self.0.listeners.lock() = listeners;
    }

    pub(crate) fn listeners(&self) -> Vec<String> {
        self.0.listeners.lock().clone()
    }

    /// Counts a connection until the result is dropped.
    pub(crate) fn count_open(&self) -> OpenConnection {
        self.0.open_connections.fetch_add(1, Ordering::Relaxed);
        OpenConnection(self.clone())
    }

    pub(crate) fn open_connections(&self) -> usize {
        self.0.open_connections.load(Ordering::Relaxed)
    }

    pub(crate) fn uptime(&self) -> Duration {
        self.0.started_at.elapsed()
    }

    pub(crate) fn drain_state(&self) -> &Drain {
        &self.0.drain
    }

    pub(crate) fn control_file(&self) -> &ControlFile {
        &self.0.control_file
    }

    /// The configuration that the server was created with.
    pub fn config(&self) -> &ServerConfig {
        &self.0.config
    }

    pub(crate) fn host(&self) -> &ProcessHost {
        &self.0.host
    }

    pub(crate) fn confiner(&self) -> &Confiner {
        &self.0.confiner
    }

    pub(crate) fn managed_networks(&self) -> &ManagedNetworks {
        &self.0.managed_networks
    }

    pub(crate) fn sessions(&self) -> &Sessions {
        &self.0.sessions
    }

    pub(crate) fn connections(&self) -> &TaskTracker {
        &self.0.connections
    }

    pub(crate) fn lanes(&self) -> &Lanes {
        &self.0.lanes
    }

    /// The limits on connections of the listeners.
    pub(crate) fn gate(&self) -> &Gate {
        &self.0.gate
    }

    /// The counters, if this server has some.
    pub(crate) fn metrics(&self) -> Option<&Arc<Metrics>> {
        self.0.metrics.as_ref()
    }

    /// Where spans go, if this server exports them.
    pub(crate) fn spans(&self) -> Option<&SpanExporter> {
        self.0.spans.as_ref()
    }

    /// The audit log, if this server has one.
    pub(crate) fn audit(&self) -> Option<&AuditLog> {
        self.0.config.audit.as_ref()
    }

    /// What all processes use of the server's budget.
    pub(crate) fn ledger(&self) -> &Ledger {
        &self.0.ledger
    }

    /// A permit for each `http/request` that may run.
    pub(crate) fn http_requests(&self) -> &Arc<Semaphore> {
        &self.0.http_requests
    }

    /// Memory for large responses, shared by all connections.
    pub(crate) fn response_budget(&self) -> &Budget {
        &self.0.response_budget
    }

    /// Memory for changes of watched files, shared by all connections.
    pub(crate) fn change_memory(&self) -> &Arc<ChangeMemory> {
        &self.0.change_memory
    }

    /// Memory for large messages, shared by all websockets.
    pub(crate) fn message_budget(&self) -> &Budget {
        &self.0.message_budget
    }

    pub(crate) fn environment_info(&self) -> EnvironmentInfo {
        // The directory may have been removed since.
        let cwd = std::env::current_dir().ok();
        EnvironmentInfo { cwd: cwd.as_deref().and_then(uri), ..self.0.environment_info.clone() }
    }
}

fn uri(path: &std::path::Path) -> Option<PathUri> {
    PathUri::try_from(path).ok()
}

/// How long the last records of the audit log, and the last spans, may take.
const LAST_RECORDS: Duration = Duration::from_secs(2);

/// Which implementation this is: the SHA-256 of `codex-exec-server`, on every machine.
const PROVIDER_ID: &str = "sha256:ed292d180ca0ce74e31794bb49465770ae81386e5d56540936569321ba646b67";

/// The release of the other implementation that this server stands in for, and the version of this program
/// as build metadata. Clients use some features only from a release on (`capabilities/discoverV2` from
/// 0.164), whatever the capabilities say. The interop suite compares it with the newest release.
const EXECUTOR_VERSION: &str = concat!("0.169.0+codex-exec-server.", env!("CARGO_PKG_VERSION"));

fn environment_info(confiner: &Confiner) -> EnvironmentInfo {
    let shell = machine::shell();
    // Beside permission to write everywhere, only mounts can deny something.
    let mounts = matches!(confiner.assurance(), Some(Assurance::Full | Assurance::Namespaces));
    EnvironmentInfo {
        shell: ShellInfo {
            name: machine::shell_name(&shell),
            path: shell.to_string_lossy().into_owned(),
        },
        executor_version: EXECUTOR_VERSION.to_owned(),
        provider_id: Some(PROVIDER_ID.to_owned()),
        cwd: None,
        user_home_dir: machine::home().as_deref().and_then(uri),
        platform_os: std::env::consts::OS.to_owned(),
        prepend_path_dirs: Vec::new(),
        temporary_directories: Some(
            machine::tmpdir().as_deref().and_then(uri).into_iter().collect(),
        ),
        temp_dir: uri(&std::env::temp_dir()),
        sandbox_assurance: confiner.assurance(),
        capabilities: Capabilities {
            sandboxed_file_streaming: confiner.is_available(),
            sandbox_assurance: confiner.is_available(),
            network_proxy_launch: true,
            network_proxy_review_domains: true,
            credential_masking: true,
            credential_masking_custom_providers: true,
            network_port_rules: true,
            network_update_rules: true,
            network_transparent: true,
            environment_config_read: true,
            capability_discovery_sandbox: true,
            capability_discovery_v2: true,
            linux_root_write_preserves_devices: mounts,
            linux_approved_root_write_preserves_restrictions: mounts,
            file_write_streaming: true,
            fs_watch_missing: true,
            http_header_env_vars: true,
            shell_snapshot_v2: true,
            process_resize: true,
            process_list: true,
            process_screen: true,
            session_sharing: true,
            process_signals: true,
            process_close_stdin: true,
            process_retain: true,
            process_retain_until_read: true,
            process_limits: true,
            session_detach_ttl: true,
            fs_search: true,
            fs_glob: true,
            fs_watch: true,
            fs_rename_link_mode: true,
            fs_atomic_write: true,
            fs_atomic_copy: true,
            fs_keep_handles: true,
            fs_remove_preserve: true,
            ..Capabilities::default()
        },
    }
}
