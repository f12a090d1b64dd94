//! Environments: servers behind a rendezvous, dialled by their id.
//!
//! Each dial asks the registry for the rendezvous and a fresh authorization, pins the server's keys and
//! opens a new stream. If the server acknowledges frames, the relay recovers from a lost socket;
//! otherwise the connection ends and the client resumes the session with the next dial.

use std::pin::Pin;

use codex_exec_remote::{
    BaseUrl, Credential, ENVIRONMENT_NOT_FOUND, ENVIRONMENT_OFFLINE, EnvironmentConnector,
    EnvironmentError, HttpClient, HttpError, Registry, RegistryError, RelayConfig, RendezvousError,
    TraceContext,
};
use codex_exec_server_protocol::ErrorKind;

use crate::client::ExecServerClient;
use crate::dialer::{DialFuture, Dialer};
use crate::error::{DialFailure, ExecServerError, dial_kind};
use crate::options::ExecServerClientConnectOptions;

/// Dials an environment through its registry.
#[derive(Debug, Clone)]
pub struct EnvironmentDialer {
    link: EnvironmentConnector,
}

impl EnvironmentDialer {
    /// Dials the environment with this id through the registry at this URL. Sends the registry the trace
    /// in `TRACEPARENT`, if it is set.
    pub fn new(
        registry_url: &str,
        environment_id: &str,
        credential: impl Credential + 'static,
        config: RelayConfig,
    ) -> Result<Self, DialFailure> {
        let base: BaseUrl = registry_url.parse().map_err(DialFailure::permanent)?;
        let registry = Registry::new(base, credential, HttpClient::default())
            .map_err(DialFailure::permanent)?;
        let registry = registry.with_trace(TraceContext::from_env());
        let link = EnvironmentConnector::new(registry, environment_id, config)
            .map_err(DialFailure::permanent)?;
        Ok(Self { link })
    }
}

impl Dialer for EnvironmentDialer {
    fn dial(&self) -> DialFuture<'_> {
        Box::pin(async {
            self.link.dial().await.map_err(|error| {
                let kind = kind_of(&error);
                match error.is_transient() {
                    true => DialFailure::transient(error).of_kind(kind),
                    false => DialFailure::permanent(error).of_kind(kind),
                }
            })
        })
    }

    fn closed(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(self.link.wait_closed())
    }

    fn endpoint(&self) -> String {
        format!("env:{} by {}", self.link.environment_id(), self.link.registry().base())
    }
}

/// The kind of a failure to reach an environment.
fn kind_of(error: &EnvironmentError) -> ErrorKind {
    match error {
        EnvironmentError::Registry(error) => match error {
            RegistryError::Unreachable { cause: HttpError::Dial(error), .. } => dial_kind(error),
            RegistryError::Unreachable { cause: HttpError::Timeout { .. }, .. } => {
                ErrorKind::TimedOut
            }
            RegistryError::Authentication { .. } => ErrorKind::TokenRefused,
            RegistryError::Refused { code, .. } => match code.as_deref() {
                Some(ENVIRONMENT_OFFLINE) => ErrorKind::EnvironmentOffline,
                Some(ENVIRONMENT_NOT_FOUND) => ErrorKind::EnvironmentNotFound,
                _ => ErrorKind::Unreachable,
            },
            RegistryError::InvalidResponse(_) => ErrorKind::ProtocolViolation,
            RegistryError::Unreachable { .. } | RegistryError::SignIn(_) => ErrorKind::Unreachable,
        },
        EnvironmentError::Rendezvous(error) => match error {
            RendezvousError::Status { status: 401 | 403 } => ErrorKind::TokenRefused,
            RendezvousError::Unreachable(error) => dial_kind(error),
            RendezvousError::Status { .. } | RendezvousError::Url => ErrorKind::Unreachable,
        },
        EnvironmentError::Dropped
        | EnvironmentError::Refused
        | EnvironmentError::Handshake(_)
        | EnvironmentError::Open(_)
        | EnvironmentError::Entropy(_)
        | EnvironmentError::Config(_) => ErrorKind::Unreachable,
    }
}

impl ExecServerClient {
    /// Opens a session with an environment; see [`EnvironmentDialer`].
    pub async fn connect_environment(
        registry_url: &str,
        environment_id: &str,
        credential: impl Credential + 'static,
        options: ExecServerClientConnectOptions,
    ) -> Result<Self, ExecServerError> {
        let endpoint = format!("env:{environment_id}");
        let config = RelayConfig::default();
        let dialer = EnvironmentDialer::new(registry_url, environment_id, credential, config)
            .map_err(|cause| ExecServerError::Connect { endpoint, cause })?;
        Self::connect(dialer, options).await
    }
}
