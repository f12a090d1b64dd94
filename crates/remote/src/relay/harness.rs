//! A harness's side: the way to an environment, as ordinary connections.
//!
//! Invariant: every physical attempt asks the registry anew and carries a fresh authorization; a
//! stream goes on over another socket only with the executor whose keys it was opened with.

use codex_exec_relay_core::{
    Authorization, CloseCause, ConfigError, EntropyError, Harness, HarnessMode, NoiseIdentity,
    NoisePublicKey, OpenError,
};
use codex_exec_rpc::Connection;
use tokio::sync::oneshot;
use tokio_util::task::TaskTracker;

use super::config::{Backoff, RelayConfig};
use super::pump::{DriveOutcome, Pump, StreamEnd};
use super::socket::{RelaySocket, RendezvousError};
use crate::entropy::entropy;
use crate::registry::{Admission, Registry, RegistryError};

/// Why an environment was not reached.
#[derive(Debug, thiserror::Error)]
pub enum EnvironmentError {
    /// The registry does not show the way.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// The rendezvous was not reached.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// The rendezvous closed the socket before the stream was open.
    #[error(
        "the rendezvous closed the connection before the environment replied; check that its \
         server is running"
    )]
    Dropped,
    /// The stream was ended instead of opened.
    #[error("the environment refused the connection; check that your token may use it")]
    Refused,
    /// The handshake did not come to an end.
    #[error("no secure channel to the environment: {0}")]
    Handshake(CloseCause),
    /// The stream could not even begin.
    #[error("no secure channel to the environment: {0}")]
    Open(#[from] OpenError),
    /// No randomness.
    #[error(transparent)]
    Entropy(#[from] EntropyError),
    /// The configuration is impossible.
    #[error("invalid relay configuration: {0}")]
    Config(#[from] ConfigError),
}

impl EnvironmentError {
    /// Whether another attempt may do better.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Registry(error) => error.is_transient(),
            Self::Rendezvous(_) | Self::Dropped | Self::Refused | Self::Handshake(_) => true,
            Self::Open(_) | Self::Entropy(_) | Self::Config(_) => false,
        }
    }
}

/// The way to one environment. Every dial is a stream of its own.
#[derive(Debug, Clone)]
pub struct EnvironmentConnector {
    registry: Registry,
    environment_id: String,
    identity: NoiseIdentity,
    config: RelayConfig,
    /// The streams that live; shared by clones.
    streams: TaskTracker,
}

impl EnvironmentConnector {
    /// To this environment, by this registry, with keys of its own.
    pub fn new(
        registry: Registry,
        environment_id: impl Into<String>,
        config: RelayConfig,
    ) -> Result<Self, EnvironmentError> {
        let identity = NoiseIdentity::generate(&mut *entropy())?;
        let (environment_id, streams) = (environment_id.into(), TaskTracker::new());
        streams.close();
        Ok(Self { registry, environment_id, identity, config, streams })
    }

    /// Which environment.
    pub fn environment_id(&self) -> &str {
        &self.environment_id
    }

    /// By which registry.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Opens a stream. It lives in a task of its own and outlives lost sockets if the executor
    /// acknowledges; otherwise it ends with its socket.
    pub async fn dial(&self) -> Result<Connection, EnvironmentError> {
        let (admission, mut socket) = self.connect_socket().await?;
        let pinned = admission.executor_key.clone();
        let mode = HarnessMode::Noise {
            identity: self.identity.clone(),
            executor_key: admission.executor_key,
            environment_id: self.environment_id.clone(),
            registration_id: admission.registration_id,
            authorization: Authorization::new(admission.authorization.expose().to_owned()),
        };
        let mut harness = Harness::new(self.config.core.clone(), mode, entropy())?;
        harness.open(tokio::time::Instant::now().into_std())?;
        let (opened, mut opening) = oneshot::channel();
        let mut opened = Some(opened);
        let accept = move |connection| {
            if let Some(opened) = opened.take() {
                let _ = opened.send(connection);
            }
        };
        let mut pump = Pump::new(harness, self.config.clone(), None, Box::new(accept));
        pump.on_connected();
        match pump.drive(Some(&mut socket), &mut opening).await {
            DriveOutcome::Done(Ok(connection)) => {
                self.streams.spawn(self.clone().run_stream(pump, socket, pinned));
                Ok(connection)
            }
            DriveOutcome::Done(Err(_)) | DriveOutcome::SocketEnded => {
                Err(EnvironmentError::Dropped)
            }
            DriveOutcome::StreamEnded => {
                socket.close().await;
                Err(match pump.stream_end() {
                    Some(StreamEnd::Closed(cause)) => EnvironmentError::Handshake(cause),
                    _ => EnvironmentError::Refused,
                })
            }
        }
    }

    /// Resolves when every stream whose connection was dropped has ended at the executor too, or
    /// after [`RelayConfig::close_timeout`]. A program that is about to exit waits for it: a rendezvous
    /// keeps a stream whose socket is gone for a while, and with it whatever the stream holds.
    pub async fn wait_closed(&self) {
        let _ = tokio::time::timeout(self.config.close_timeout, self.streams.wait()).await;
    }

    /// One attempt: a fresh admission and a socket.
    async fn connect_socket(&self) -> Result<(Admission, RelaySocket), EnvironmentError> {
        let admission =
            self.registry.connect(&self.environment_id, &self.identity.public_key()).await?;
        let socket = RelaySocket::dial(&admission.url, &self.config).await?;
        Ok((admission, socket))
    }

    /// Serves the stream to its end, over as many sockets as that takes.
    async fn run_stream(
        self,
        mut pump: Pump<Harness>,
        mut socket: RelaySocket,
        pinned: NoisePublicKey,
    ) {
        loop {
            match pump.drive(Some(&mut socket), std::future::pending::<()>()).await {
                DriveOutcome::SocketEnded => {
                    pump.on_disconnected();
                    tokio::spawn(socket.close());
                }
                DriveOutcome::StreamEnded | DriveOutcome::Done(()) => {
                    socket.close().await;
                    return;
                }
            }
            if pump.stream_end().is_some() {
                return;
            }
            tracing::info!(
                environment_id = self.environment_id,
                "lost the connection to the rendezvous; resuming"
            );
            match pump.drive(None, self.reconnect(&pinned)).await {
                DriveOutcome::Done(Some(next)) => socket = next,
                _ => return,
            }
            pump.on_connected();
        }
    }

    /// Another socket to the same executor; `None` if there is another executor now, or no way.
    async fn reconnect(&self, pinned: &NoisePublicKey) -> Option<RelaySocket> {
        let mut backoff = Backoff::new(&self.config);
        loop {
            match self.connect_socket().await {
                Ok((admission, socket)) if admission.executor_key == *pinned => {
                    return Some(socket);
                }
                Ok(_) => {
                    tracing::info!("another server has registered this environment");
                    return None;
                }
                Err(error) if error.is_transient() => {
                    tracing::debug!(%error, "cannot resume; retrying");
                    tokio::time::sleep(backoff.next_delay()).await;
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot resume");
                    return None;
                }
            }
        }
    }
}
