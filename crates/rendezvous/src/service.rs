//! The service: connections in, until it is told to stop.
//!
//! Stopping goes in three steps. It says that it is not ready and takes nobody new; what runs may
//! finish for [`Config::drain`]; then every socket is closed with 1012, which tells peers
//! to come back, here or to another node.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use codex_exec_rpc::disable_pacing_on_loopback;
use futures_util::FutureExt;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::Config;
use crate::http;
use crate::hub::Hub;
use crate::metrics::{Gauges, Metrics};
use crate::nats::NatsOptions;
use crate::registry::Registry;
use crate::socket::GOING_AWAY;
use crate::store::{FileStore, NatsStore, Store, StoreError};
use crate::tls::{self, TlsError};

/// A registry and rendezvous. Clones are the same service.
#[derive(Debug, Clone)]
pub struct Service(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    config: Arc<Config>,
    metrics: Arc<Metrics>,
    registry: Registry,
    tasks: TaskTracker,
    connection_permits: Arc<Semaphore>,
    draining: CancellationToken,
    stopped: CancellationToken,
}

impl Service {
    /// A service over a store. Has to be called within a tokio runtime.
    pub fn new(config: Config, store: Store) -> Self {
        let config = Arc::new(config);
        let metrics = Arc::new(Metrics::default());
        let tasks = TaskTracker::new();
        let hub = Hub::new(config.clone(), metrics.clone(), store.clone(), tasks.clone());
        let registry = Registry::new(config.clone(), metrics.clone(), store, hub.clone());
        let stopped = CancellationToken::new();
        let until = stopped.clone();
        tasks.spawn(async move { until.run_until_cancelled(hub.run_maintenance()).await });
        let connection_permits = Arc::new(Semaphore::new(config.connections));
        let draining = CancellationToken::new();
        Self(Arc::new(Shared {
            config,
            metrics,
            registry,
            tasks,
            connection_permits,
            draining,
            stopped,
        }))
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
        let connections = self.0.config.connections - self.0.connection_permits.available_permits();
        let gauges = Gauges { connections, ..self.0.registry.hub.gauges() };
        self.0.metrics.render(gauges)
    }

    /// Serves what connects, until [`Self::drain`].
    pub async fn serve(&self, listener: TcpListener, tls: Option<TlsAcceptor>) {
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = self.0.stopped.cancelled() => return,
            };
            let (socket, peer) = match accepted {
                Ok(accepted) => accepted,
                // Out of descriptors, or a peer that was gone already: the next one may do.
                Err(error) => {
                    tracing::warn!(%error, "accept failed");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            let _ = socket.set_nodelay(true);
            let (service, tls) = (self.clone(), tls.clone());
            self.0.tasks.spawn(async move {
                let Some(tls) = tls else {
                    return service.serve_connection(socket, peer.ip(), false).await;
                };
                match timeout(service.config().request_timeout, tls.accept(socket)).await {
                    Ok(Ok(socket)) => service.serve_connection(socket, peer.ip(), true).await,
                    Ok(Err(error)) => tracing::debug!(%error, "tls handshake failed"),
                    Err(_) => tracing::debug!("tls handshake took too long"),
                }
            });
        }
    }

    /// Serves one connection: http, up to the websocket. `secure` says whether clients reach it
    /// by TLS.
    pub async fn serve_connection<T>(&self, socket: T, from: IpAddr, secure: bool)
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let Ok(permit) = self.0.connection_permits.clone().try_acquire_owned() else {
            tracing::warn!("connection limit reached");
            return;
        };
        // Held by the requests, so that it lasts as long as the websocket that came of them.
        let permit = Arc::new(permit);
        let handler = {
            let service = self.clone();
            service_fn(move |request| {
                let (service, permit) = (service.clone(), permit.clone());
                async move {
                    let response = http::respond(&service, from, secure, request, permit).await;
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

    /// Stops in good order; see the module's documentation.
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

/// Where a service program listens and keeps its state.
#[derive(Debug, Clone)]
pub struct ServeOptions {
    /// The address; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Where its state is.
    pub store: StoreOptions,
    /// Certificate chain and key, both PEM.
    pub tls: Option<(PathBuf, PathBuf)>,
}

/// Where a service program keeps its state.
#[derive(Debug, Clone)]
pub enum StoreOptions {
    /// In a directory of its own.
    Directory(PathBuf),
    /// In NATS, together with the other nodes.
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

/// Why a service program could not run.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address cannot be had.
    #[error("cannot listen on {address}")]
    Bind {
        /// Which.
        address: SocketAddr,
        /// Why not.
        source: io::Error,
    },
    /// State cannot be kept.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// No TLS with these files.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The address could not be told.
    #[error("cannot write to stdout")]
    Announce(#[source] io::Error),
}

/// Runs a service until `stop` resolves. `announce` is given the base URL once it accepts.
pub async fn serve(
    options: ServeOptions,
    config: Config,
    announce: impl FnOnce(&str) -> io::Result<()>,
    stop: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let ServeOptions { listen: address, store, tls } = options;
    let tls = tls.map(|(cert, key)| tls::acceptor(&cert, &key)).transpose()?;
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
    // Whoever reads the address may stop us right away: what listens for that has to listen now.
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
