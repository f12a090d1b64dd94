//! An executor's side: enrol with the registry, stay connected to the rendezvous, and hand out a
//! connection for each harness that proves itself.
//!
//! Invariant: it registers once, and again only when the rendezvous answers the websocket with 4xx.

use std::time::Duration;

use codex_exec_relay_core::{
    Authorization, ConfigError, Executor, ExecutorMode, NoiseIdentity, NoisePublicKey, Verdict,
};
use codex_exec_rpc::{Connection, Secret};
use futures_util::future::BoxFuture;
use tokio::sync::watch;

use super::config::{Backoff, RelayConfig};
use super::pump::{Authorizer, Drove, Pump};
use super::socket::{RelaySocket, RendezvousError};
use crate::entropy::entropy;
use crate::registry::{Registry, RegistryError};

/// As what to register, and with whom.
#[derive(Debug, Clone)]
pub enum Enrolment {
    /// An environment: every stream is a Noise channel.
    Environment {
        /// Who knows it.
        registry: Registry,
        /// Its id.
        environment_id: String,
        /// The keys of this process.
        identity: NoiseIdentity,
    },
    /// The older revision: messages in clear.
    Executor {
        /// Who knows it.
        registry: Registry,
        /// Its id.
        executor_id: String,
    },
}

/// Why an executor is not served any longer.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// The registry will not have it.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// The configuration is impossible.
    #[error("invalid relay configuration: {0}")]
    Config(#[from] ConfigError),
}

/// A URL to connect to, and what handshakes are bound to.
struct Enrolled {
    url: Secret,
    registration_id: String,
}

impl Enrolment {
    async fn enrol(&self) -> Result<Enrolled, RegistryError> {
        match self {
            Self::Environment { registry, environment_id, identity } => {
                let registered = registry.register(environment_id, &identity.public_key()).await?;
                tracing::info!(environment_id, "registered");
                let registration_id = registered.registration_id;
                Ok(Enrolled { url: registered.url, registration_id })
            }
            Self::Executor { registry, executor_id } => {
                let url = registry.register_executor(executor_id).await?;
                tracing::info!(executor_id, "registered without end-to-end encryption");
                Ok(Enrolled { url, registration_id: String::new() })
            }
        }
    }

    /// Enrols again, however long that takes. Fails only for good.
    async fn enrol_again(&self, config: &RelayConfig) -> Result<Enrolled, RegistryError> {
        let mut backoff = Backoff::new(config);
        loop {
            match self.enrol().await {
                Err(error) if error.is_transient() => {
                    tracing::warn!(%error, "cannot register");
                    tokio::time::sleep(backoff.wait()).await;
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

    /// Asks the registry about each harness, under the registration that is current.
    fn authorizer(
        &self,
        registration: watch::Receiver<String>,
        patience: Duration,
    ) -> Option<Authorizer> {
        let Self::Environment { registry, environment_id, .. } = self else { return None };
        let (registry, environment_id) = (registry.clone(), environment_id.clone());
        Some(std::sync::Arc::new(
            move |key: NoisePublicKey,
                  authorization: Authorization|
                  -> BoxFuture<'static, Verdict> {
                let (registry, environment_id) = (registry.clone(), environment_id.clone());
                let registration_id = registration.borrow().clone();
                Box::pin(async move {
                    let asking = registry.validate(
                        &environment_id,
                        &registration_id,
                        key,
                        authorization.expose(),
                    );
                    match tokio::time::timeout(patience, asking).await {
                        Ok(Ok(true)) => Verdict::Allowed,
                        Ok(Ok(false)) => Verdict::Denied,
                        Ok(Err(error)) => {
                            tracing::warn!(%error, "cannot validate a harness");
                            Verdict::Unavailable
                        }
                        Err(_) => Verdict::Unavailable,
                    }
                })
            },
        ))
    }
}

/// Serves harnesses until `stop` resolves: each one's connection is given to `accept`. Then awaits
/// `wind_down`, which ends the connections, and sends their last words. Fails if the registry
/// refuses for good; at the first registration, whatever the failure.
pub async fn serve_streams(
    config: RelayConfig,
    enrolment: Enrolment,
    accept: impl FnMut(Connection) + Send + 'static,
    stop: impl Future<Output = ()>,
    wind_down: impl Future<Output = ()>,
) -> Result<(), RemoteError> {
    tokio::pin!(stop);
    let mut enrolled = tokio::select! {
        enrolled = enrolment.enrol() => enrolled?,
        () = &mut stop => {
            wind_down.await;
            return Ok(());
        }
    };
    let (registration, current) = watch::channel(enrolled.registration_id.clone());
    let mode = enrolment.mode(&enrolled.registration_id);
    let executor = Executor::new(config.core.clone(), mode, entropy())?;
    let authorizer = enrolment.authorizer(current, config.core.authorization_timeout);
    let mut pump = Pump::new(executor, config.clone(), authorizer, Box::new(accept)).living_on();
    let mut backoff = Backoff::new(&config);
    loop {
        let connecting = connect(&config, &enrolment, &mut enrolled, &mut backoff);
        let connecting = async {
            tokio::select! {
                connected = connecting => Some(connected),
                () = &mut stop => None,
            }
        };
        let mut socket = match pump.drive(None, connecting).await {
            Drove::Done(Some(connected)) => connected?,
            Drove::Done(None) | Drove::SocketEnded | Drove::StreamEnded => break,
        };
        if *registration.borrow() != enrolled.registration_id {
            pump.endpoint().set_registration_id(enrolled.registration_id.clone());
            registration.send_replace(enrolled.registration_id.clone());
        }
        tracing::info!("connected to the rendezvous");
        pump.on_connected();
        let since = tokio::time::Instant::now();
        let drove = pump.drive(Some(&mut socket), &mut stop).await;
        if let Drove::Done(()) = drove {
            say_farewell(&mut pump, &mut socket, wind_down, config.farewell).await;
            socket.close().await;
            return Ok(());
        }
        pump.on_disconnected();
        backoff.lasted(since.elapsed());
        tracing::info!(streams = pump.stream_count(), "disconnected from the rendezvous");
        // A condemned or silent socket still deserves a close, but nobody waits for it.
        tokio::spawn(socket.close());
        let pause = tokio::time::sleep(backoff.wait());
        let pause = async {
            tokio::select! {
                () = pause => false,
                () = &mut stop => true,
            }
        };
        if let Drove::Done(true) = pump.drive(None, pause).await {
            break;
        }
    }
    wind_down.await;
    Ok(())
}

/// Dials until there is a socket. Fails only if the registry refuses for good.
async fn connect(
    config: &RelayConfig,
    enrolment: &Enrolment,
    enrolled: &mut Enrolled,
    backoff: &mut Backoff,
) -> Result<RelaySocket, RegistryError> {
    loop {
        match RelaySocket::dial(&enrolled.url, config).await {
            Ok(socket) => return Ok(socket),
            Err(error) => {
                tracing::warn!(%error, "cannot connect to the rendezvous");
                if RendezvousError::is_url_spent(&error) {
                    *enrolled = enrolment.enrol_again(config).await?;
                }
                tokio::time::sleep(backoff.wait()).await;
            }
        }
    }
}

/// Lets every stream say its last words, for a bounded time.
async fn say_farewell(
    pump: &mut Pump<Executor>,
    socket: &mut RelaySocket,
    wind_down: impl Future<Output = ()>,
    patience: Duration,
) {
    tokio::pin!(wind_down);
    if let Drove::Done(()) = pump.drive(Some(socket), &mut wind_down).await {
        let deadline = tokio::time::Instant::now() + patience;
        while pump.endpoint().stream_count() > 0 {
            // Each look is cheap and each stream's end wakes nobody: look again shortly.
            let look = tokio::time::sleep(Duration::from_millis(5));
            if !matches!(pump.drive(Some(socket), look).await, Drove::Done(()))
                || tokio::time::Instant::now() >= deadline
            {
                break;
            }
        }
    } else {
        wind_down.await;
    }
}
