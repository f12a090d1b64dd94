//! The service: accepts connections until shutdown.
//!
//! Shutdown has three steps. The service reports that it is not ready and refuses new clients; open streams
//! may finish for [`Config::drain`]; then it closes every socket with 1012, which makes peers reconnect,
//! here or to another node.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use codex_exec_rpc::{TlsError, TlsFiles, disable_pacing_on_loopback};
use futures_util::FutureExt;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::admission::{Admission, Admissions, Refusal};
use crate::config::Config;
use crate::http;
use crate::hub::Hub;
use crate::metrics::{Gauges, Metrics};
use crate::nats::NatsOptions;
use crate::registry::Registry;
use crate::socket::GOING_AWAY;
use crate::store::{FileStore, NatsStore, Store, StoreError};

/// A registry and rendezvous. Clones are the same service.
#[derive(Debug, Clone)]
pub struct Service(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    config: Arc<Config>,
    metrics: Arc<Metrics>,
    registry: Registry,
    tasks: TaskTracker,
    admissions: Admissions,
    draining: CancellationToken,
    stopped: CancellationToken,
}

impl Service {
    /// Makes a service over a store. Must be called within a tokio runtime.
    pub fn new(config: Config, store: Store) -> Self {
        let config = Arc::new(config);
        let metrics = Arc::new(Metrics::default());
        let tasks = TaskTracker::new();
        let hub = Hub::new(config.clone(), metrics.clone(), store.clone(), tasks.clone());
        let registry = Registry::new(config.clone(), metrics.clone(), store, hub.clone());
        let stopped = CancellationToken::new();
        let until = stopped.clone();
        tasks.spawn(async move { until.run_until_cancelled(hub.run_maintenance()).await });
        let admissions = Admissions::new(config.connections, config.unauthenticated_per_address);
        let draining = CancellationToken::new();
        Self(Arc::new(Shared { config, metrics, registry, tasks, admissions, draining, stopped }))
    }

    pub(crate) fn config(&self) -> &Arc<Config> {
        &self.0.config
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    pub(crate) fn registry(&self) -> &Registry {
        &self.0.registry
    }

    pub(crate) fn tasks(&self) -> &TaskTracker {
        &self.0.tasks
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.0.draining.is_cancelled()
    }

    pub(crate) fn render_metrics(&self) -> String {
        let connections = self.0.admissions.open();
        let gauges = Gauges { connections, ..self.0.registry.hub.gauges() };
        self.0.metrics.render(gauges)
    }

    /// Accepts connections until [`Self::drain`].
    pub async fn serve(&self, listener: TcpListener, tls: Option<TlsAcceptor>) {
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = self.0.stopped.cancelled() => return,
            };
            let (socket, peer) = match accepted {
                Ok(accepted) => accepted,
                // Out of descriptors, or the peer is already gone: continue with the next.
                Err(error) => {
                    tracing::warn!(%error, "accept failed");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            let _ = socket.set_nodelay(true);
            // Before TLS: a handshake is a connection too.
            let Some(admission) = self.admit(peer.ip()) else { continue };
            let (service, tls) = (self.clone(), tls.clone());
            self.0.tasks.spawn(async move {
                let from = peer.ip();
                let Some(tls) = tls else {
                    return service.serve_admitted(socket, from, false, admission).await;
                };
                match timeout(service.config().request_timeout, tls.accept(socket)).await {
                    Ok(Ok(socket)) => service.serve_admitted(socket, from, true, admission).await,
                    Ok(Err(error)) => tracing::debug!(%error, "tls handshake failed"),
                    Err(_) => tracing::debug!("tls handshake took too long"),
                }
            });
        }
    }

    /// Serves one connection: HTTP, then perhaps a websocket. `secure` if clients connect with TLS.
    pub async fn serve_connection<T>(&self, socket: T, from: IpAddr, secure: bool)
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        if let Some(admission) = self.admit(from) {
            self.serve_admitted(socket, from, secure, admission).await;
        }
    }

    fn admit(&self, from: IpAddr) -> Option<Arc<Admission>> {
        match self.0.admissions.admit(from) {
            Ok(admission) => Some(admission),
            Err(Refusal::Total) => {
                tracing::warn!("connection limit reached");
                None
            }
            Err(Refusal::Address) => {
                tracing::debug!("connection limit of an address reached");
                None
            }
        }
    }

    /// Serves a connection. The requests hold `admission`, so that it lasts as long as a websocket upgraded
    /// from one.
    async fn serve_admitted<T>(
        &self,
        socket: T,
        from: IpAddr,
        secure: bool,
        admission: Arc<Admission>,
    ) where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let handler = {
            let service = self.clone();
            service_fn(move |request| {
                let (service, admission) = (service.clone(), admission.clone());
                async move {
                    let response = http::respond(&service, from, secure, request, admission).await;
                    Ok::<_, Infallible>(response)
                }
            })
        };
        let connection = hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.0.config.request_timeout)
            .max_buf_size(16 << 10)
            .serve_connection(TokioIo::new(socket), handler)
            .with_upgrades();
        tokio::pin!(connection);
        let result = tokio::select! {
            result = connection.as_mut() => result,
            () = self.0.stopped.cancelled() => {
                connection.as_mut().graceful_shutdown();
                match timeout(self.0.config.close_timeout, connection).await {
                    Ok(result) => result,
                    Err(_) => return,
                }
            }
        };
        if let Err(error) = result {
            tracing::debug!(%error, "HTTP connection ended");
        }
    }

    /// Shuts down gracefully, in the steps that the module describes.
    pub async fn drain(&self) {
        let shared = &self.0;
        shared.draining.cancel();
        let idle = async {
            while shared.registry.hub.is_busy() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        if timeout(shared.config.drain, idle).await.is_err() {
            tracing::info!("closing sockets with open streams");
        }
        shared.registry.hub.close_sockets(GOING_AWAY);
        shared.stopped.cancel();
        shared.tasks.close();
        let close_timeout = shared.config.close_timeout + Duration::from_secs(1);
        if timeout(close_timeout, shared.tasks.wait()).await.is_err() {
            tracing::warn!("some connections did not end in time");
        }
        shared.registry.hub.flush().await;
    }
}

/// How a service listens and where it stores its state.
#[derive(Debug, Clone)]
pub struct ServeOptions {
    /// The listen address; port 0 picks a free port.
    pub listen: SocketAddr,
    /// Where it stores its state.
    pub store: StoreOptions,
    /// Certificate chain and key, both PEM.
    pub tls: Option<(PathBuf, PathBuf)>,
}

/// Where a service stores its state.
#[derive(Debug, Clone)]
pub enum StoreOptions {
    /// In a directory, for one service.
    Directory(PathBuf),
    /// In NATS, shared with other nodes.
    Nats(NatsOptions),
}

impl StoreOptions {
    async fn open(&self, config: &Config) -> Result<Store, StoreError> {
        Ok(match self {
            Self::Directory(path) => {
                Store::File(Arc::new(FileStore::open(path, config.clock.now())?))
            }
            Self::Nats(options) => {
                Store::Nats(Arc::new(NatsStore::connect(options, config).await?))
            }
        })
    }
}

/// Why a service could not run.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address cannot be bound.
    #[error("cannot listen on {address}")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        source: io::Error,
    },
    /// The store cannot be opened.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The TLS files cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// `announce` failed.
    #[error("cannot write to stdout")]
    Announce(#[source] io::Error),
}

/// Descriptors that are not for clients: files, NATS, the listener.
const RESERVED_DESCRIPTORS: usize = 64;

fn tls_acceptor((certificate, key): (PathBuf, PathBuf)) -> Result<TlsAcceptor, TlsError> {
    let files = TlsFiles { certificate, key, client_authorities: None };
    Ok(TlsAcceptor::from(files.server_config()?))
}

/// Raises the limit of open files as far as the system allows; returns it.
fn raise_descriptor_limit() -> usize {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    let now = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(now).unwrap_or(usize::MAX)
}

/// Runs a service until `stop` resolves. Calls `announce` with the base URL once it listens.
pub async fn serve(
    options: ServeOptions,
    config: Config,
    announce: impl FnOnce(&str) -> io::Result<()>,
    stop: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let ServeOptions { listen: address, store, tls } = options;
    let mut config = config;
    let limit = raise_descriptor_limit().saturating_sub(RESERVED_DESCRIPTORS).max(1);
    if limit < config.connections {
        tracing::warn!(
            limit,
            "the limit of open files allows fewer connections than configured; raise it (ulimit -n, \
             LimitNOFILE)"
        );
        config.connections = limit;
    }
    let tls = tls.map(tls_acceptor).transpose()?;
    let store = store.open(&config).await?;
    let bind = |source| ServeError::Bind { address, source };
    let listener = TcpListener::bind(address).await.map_err(bind)?;
    disable_pacing_on_loopback(&listener, address);
    let scheme = if tls.is_some() { "https" } else { "http" };
    let base = match &config.public_url {
        Some(url) => url.as_str().to_owned(),
        None => format!("{scheme}://{}", listener.local_addr().map_err(bind)?),
    };
    let service = Service::new(config, store);
    tokio::pin!(stop);
    // A reader of the address may stop the service at once: poll the signal handler before announcing.
    let already_stopped = stop.as_mut().now_or_never().is_some();
    announce(&base).map_err(ServeError::Announce)?;
    let accepting = tokio::spawn({
        let service = service.clone();
        async move { service.serve(listener, tls).await }
    });
    if !already_stopped {
        stop.await;
    }
    tracing::info!("stopping");
    service.drain().await;
    accepting.abort();
    Ok(())
}
