//! The harness's side: ordinary connections to an environment.
//!
//! Invariant: every attempt to connect uses a fresh authorization from the registry; a stream continues
//! over another socket only with the executor whose keys it was opened with.

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

/// Why an environment could not be reached.
#[derive(Debug, thiserror::Error)]
pub enum EnvironmentError {
    /// The registry refused or did not respond.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// The rendezvous could not be reached.
    #[error(transparent)]
    Rendezvous(#[from] RendezvousError),
    /// The rendezvous closed the socket before the stream was open.
    #[error(
        "the rendezvous closed the connection before the environment replied; check that its \
         server is running"
    )]
    Dropped,
    /// The environment reset the stream instead of opening it.
    #[error("the environment refused the connection; check that your token may use it")]
    Refused,
    /// The handshake failed or timed out.
    #[error("no secure channel to the environment: {0}")]
    Handshake(CloseCause),
    /// The stream could not be started.
    #[error("no secure channel to the environment: {0}")]
    Open(#[from] OpenError),
    /// The random source failed.
    #[error(transparent)]
    Entropy(#[from] EntropyError),
    /// [`RelayConfig::core`] is out of range.
    #[error("invalid relay configuration: {0}")]
    Config(#[from] ConfigError),
}

impl EnvironmentError {
    /// Whether a later attempt may succeed.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Registry(error) => error.is_transient(),
            Self::Rendezvous(_) | Self::Dropped | Self::Refused | Self::Handshake(_) => true,
            Self::Open(_) | Self::Entropy(_) | Self::Config(_) => false,
        }
    }
}

/// Connects to one environment. Each dial opens a separate stream.
#[derive(Debug, Clone)]
pub struct EnvironmentConnector {
    registry: Registry,
    environment_id: String,
    identity: NoiseIdentity,
    config: RelayConfig,
    /// The open streams; shared by clones.
    streams: TaskTracker,
}

impl EnvironmentConnector {
    /// Makes a connector with a new key pair.
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

    /// The id of the environment.
    pub fn environment_id(&self) -> &str {
        &self.environment_id
    }

    /// The registry that it uses.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Opens a stream and runs it in a task. The stream survives lost sockets if the executor
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
        let accept = move |connection, _| {
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

    /// Resolves when every stream whose connection was dropped has ended at the executor too, or after
    /// [`RelayConfig::close_timeout`]. Await it before the program exits: a rendezvous keeps a stream
    /// whose socket is gone for a while, and the stream's session stays attached.
    pub async fn wait_closed(&self) {
        let _ = tokio::time::timeout(self.config.close_timeout, self.streams.wait()).await;
    }

    /// Makes one attempt: a fresh admission and a socket.
    async fn connect_socket(&self) -> Result<(Admission, RelaySocket), EnvironmentError> {
        let admission =
            self.registry.connect(&self.environment_id, &self.identity.public_key()).await?;
        let socket = RelaySocket::dial(&admission.url, &self.config).await?;
        Ok((admission, socket))
    }

    /// Runs the stream to its end, reconnecting as needed.
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

    /// Opens another socket to the same executor; `None` if another executor has registered, or the attempt failed permanently.
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
