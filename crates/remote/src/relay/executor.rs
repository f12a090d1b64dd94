//! The executor's side: registers with the registry, stays connected to the rendezvous, and hands out a
//! connection for each authorized harness.
//!
//! Invariant: it registers once, and again only when the rendezvous responds to the websocket with 4xx.

use std::time::Duration;

use codex_exec_relay_core::{
    Authorization, ConfigError, Executor, ExecutorMode, NoiseIdentity, NoisePublicKey, Verdict,
};
use codex_exec_rpc::{Connection, Secret};
use futures_util::future::BoxFuture;
use tokio::sync::watch;

use super::config::{Backoff, RelayConfig};
use super::pump::{Admission, Authorizer, DriveOutcome, Pump};
use super::socket::{RelaySocket, RendezvousError};
use crate::entropy::entropy;
use crate::registry::{Registry, RegistryError};

/// What to register as, and with which registry.
#[derive(Debug, Clone)]
pub enum RegistrationTarget {
    /// An environment: every stream is a Noise channel.
    Environment {
        /// The registry.
        registry: Registry,
        /// Its id.
        environment_id: String,
        /// The keys of this process.
        identity: NoiseIdentity,
    },
    /// The older revision: messages in clear.
    Executor {
        /// The registry.
        registry: Registry,
        /// Its id.
        executor_id: String,
    },
}

/// Why serving ended.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// The registry refused the registration.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// [`RelayConfig::core`] is out of range.
    #[error("invalid relay configuration: {0}")]
    Config(#[from] ConfigError),
}

/// The result of a registration: the URL to connect to, and the id that handshakes are bound to.
struct Registered {
    url: Secret,
    registration_id: String,
}

impl RegistrationTarget {
    async fn register(&self) -> Result<Registered, RegistryError> {
        match self {
            Self::Environment { registry, environment_id, identity } => {
                let registered = registry.register(environment_id, &identity.public_key()).await?;
                tracing::info!(environment_id, "registered");
                let registration_id = registered.registration_id;
                Ok(Registered { url: registered.url, registration_id })
            }
            Self::Executor { registry, executor_id } => {
                let url = registry.register_executor(executor_id).await?;
                tracing::info!(executor_id, "registered without end-to-end encryption");
                Ok(Registered { url, registration_id: String::new() })
            }
        }
    }

    /// Registers again, retrying transient failures without limit.
    async fn register_again(&self, config: &RelayConfig) -> Result<Registered, RegistryError> {
        let mut backoff = Backoff::new(config);
        loop {
            match self.register().await {
                Err(error) if error.is_transient() => {
                    tracing::warn!(%error, "cannot register");
                    tokio::time::sleep(backoff.next_delay()).await;
                }
                result => return result,
            }
        }
    }

    fn mode(&self, registration_id: &str) -> ExecutorMode {
        match self {
            Self::Environment { environment_id, identity, .. } => ExecutorMode::Noise {
                identity: identity.clone(),
                environment_id: environment_id.clone(),
                registration_id: registration_id.to_owned(),
            },
            Self::Executor { .. } => ExecutorMode::Clear,
        }
    }

    /// Validates each harness with the registry, under the current registration.
    fn authorizer(
        &self,
        registration: watch::Receiver<String>,
        timeout: Duration,
    ) -> Option<Authorizer> {
        let Self::Environment { registry, environment_id, .. } = self else { return None };
        let (registry, environment_id) = (registry.clone(), environment_id.clone());
        Some(std::sync::Arc::new(
            move |key: NoisePublicKey,
                  authorization: Authorization|
                  -> BoxFuture<'static, Admission> {
                let (registry, environment_id) = (registry.clone(), environment_id.clone());
                let registration_id = registration.borrow().clone();
                Box::pin(async move {
                    let asking = registry.validate(
                        &environment_id,
                        &registration_id,
                        key,
                        authorization.expose(),
                    );
                    match tokio::time::timeout(timeout, asking).await {
                        Ok(Ok(response)) if response.valid => {
                            Admission { verdict: Verdict::Allowed, principal: response.principal }
                        }
                        Ok(Ok(_)) => Verdict::Denied.into(),
                        Ok(Err(error)) => {
                            tracing::warn!(%error, "cannot validate a harness");
                            Verdict::Unavailable.into()
                        }
                        Err(_) => Verdict::Unavailable.into(),
                    }
                })
            },
        ))
    }
}

/// Serves harnesses until `stop` resolves, passing each one's connection and, if the registry names it, its
/// principal to `accept`. Then awaits `drain`, which ends the connections, and closes their streams. Fails if the first registration fails,
/// or if the registry later refuses permanently.
pub async fn serve_streams(
    config: RelayConfig,
    target: RegistrationTarget,
    accept: impl FnMut(Connection, Option<String>) + Send + 'static,
    stop: impl Future<Output = ()>,
    drain: impl Future<Output = ()>,
) -> Result<(), RemoteError> {
    tokio::pin!(stop);
    let mut registered = tokio::select! {
        registered = target.register() => registered?,
        () = &mut stop => {
            drain.await;
            return Ok(());
        }
    };
    let (registration, current) = watch::channel(registered.registration_id.clone());
    let mode = target.mode(&registered.registration_id);
    let executor = Executor::new(config.core.clone(), mode, entropy())?;
    let authorizer = target.authorizer(current, config.core.authorization_timeout);
    let mut pump =
        Pump::new(executor, config.clone(), authorizer, Box::new(accept)).for_many_streams();
    let mut backoff = Backoff::new(&config);
    loop {
        let connecting = connect(&config, &target, &mut registered, &mut backoff);
        let connecting = async {
            tokio::select! {
                connected = connecting => Some(connected),
                () = &mut stop => None,
            }
        };
        let mut socket = match pump.drive(None, connecting).await {
            DriveOutcome::Done(Some(connected)) => connected?,
            DriveOutcome::Done(None) | DriveOutcome::SocketEnded | DriveOutcome::StreamEnded => {
                break;
            }
        };
        if *registration.borrow() != registered.registration_id {
            pump.endpoint().set_registration_id(registered.registration_id.clone());
            registration.send_replace(registered.registration_id.clone());
        }
        tracing::info!("connected to the rendezvous");
        config.set_connected(true);
        pump.on_connected();
        let connected_at = tokio::time::Instant::now();
        let outcome = pump.drive(Some(&mut socket), &mut stop).await;
        if let DriveOutcome::Done(()) = outcome {
            close_streams(&mut pump, &mut socket, drain, config.close_timeout).await;
            socket.close().await;
            return Ok(());
        }
        pump.on_disconnected();
        config.set_connected(false);
        backoff.connection_lasted(connected_at.elapsed());
        tracing::info!(streams = pump.stream_count(), "disconnected from the rendezvous");
        // Close the failed socket in the background; it may be silent.
        tokio::spawn(socket.close());
        let pause = tokio::time::sleep(backoff.next_delay());
        let pause = async {
            tokio::select! {
                () = pause => false,
                () = &mut stop => true,
            }
        };
        if let DriveOutcome::Done(true) = pump.drive(None, pause).await {
            break;
        }
    }
    drain.await;
    Ok(())
}

/// Dials until a socket is open. Fails only if the registry refuses permanently.
async fn connect(
    config: &RelayConfig,
    target: &RegistrationTarget,
    registered: &mut Registered,
    backoff: &mut Backoff,
) -> Result<RelaySocket, RegistryError> {
    loop {
        match RelaySocket::dial(&registered.url, config).await {
            Ok(socket) => return Ok(socket),
            Err(error) => {
                tracing::warn!(%error, "cannot connect to the rendezvous");
                if RendezvousError::needs_new_url(&error) {
                    *registered = target.register_again(config).await?;
                }
                tokio::time::sleep(backoff.next_delay()).await;
            }
        }
    }
}

/// Awaits `drain`, then lets every stream send its queued messages, for at most `timeout`.
async fn close_streams(
    pump: &mut Pump<Executor>,
    socket: &mut RelaySocket,
    drain: impl Future<Output = ()>,
    timeout: Duration,
) {
    tokio::pin!(drain);
    if let DriveOutcome::Done(()) = pump.drive(Some(socket), &mut drain).await {
        let deadline = tokio::time::Instant::now() + timeout;
        while pump.endpoint().stream_count() > 0 {
            // The end of a stream wakes no task, so poll the count, which is cheap.
            let look = tokio::time::sleep(Duration::from_millis(5));
            if !matches!(pump.drive(Some(socket), look).await, DriveOutcome::Done(()))
                || tokio::time::Instant::now() >= deadline
            {
                break;
            }
        }
    } else {
        drain.await;
    }
}
