//! The direct transport: an executor dials one websocket, and the peer at its other end is the client.
//!
//! Invariant: it registers once, and dials that one URL again after every drop. A 4xx on the upgrade ends
//! it, because the URL is no longer valid.

use codex_exec_rpc::{Connection, ConnectionConfig, DialError, WebsocketDial, websocket_limits};
use tokio::time::Instant;

use crate::credential::CredentialError;
use crate::registry::{DirectRegistrationError, Registration, Registry};
use crate::relay::{Backoff, RelayConfig};

/// Why serving an environment directly ended. Shows no query of a URL.
#[derive(Debug, thiserror::Error)]
pub enum DirectError {
    /// The registration failed.
    #[error(transparent)]
    Registration(#[from] DirectRegistrationError),
    /// The credential cannot sign the upgrade.
    #[error(transparent)]
    SignIn(#[from] CredentialError),
    /// The peer refused the upgrade.
    #[error("{url} refused the websocket (HTTP {status})")]
    Refused {
        /// The URL, [redacted](WebsocketDial::redacted_url).
        url: String,
        /// 400 to 499.
        status: u16,
    },
}

/// Serves an environment until `stop` resolves, passing each connection to `accept`, one at a time. Then
/// awaits `drain`, which ends the connection. Fails if the registration fails, or if the peer refuses the
/// upgrade with a 4xx.
pub async fn serve_direct(
    config: RelayConfig,
    registry: Registry,
    environment_id: &str,
    mut accept: impl FnMut(Connection),
    stop: impl Future<Output = ()>,
    drain: impl Future<Output = ()>,
) -> Result<(), DirectError> {
    tokio::pin!(stop);
    let served = async {
        let registered = registry.register_direct(environment_id).await?;
        tracing::info!(environment_id, "registered directly");
        let mut backoff = Backoff::new(&config);
        loop {
            match dial(&config, &registry, &registered).await {
                Ok(connection) => {
                    tracing::info!("connected");
                    config.set_connected(true);
                    let (connected_at, outbound) = (Instant::now(), connection.outbound().clone());
                    accept(connection);
                    outbound.closed().await;
                    tracing::info!("disconnected");
                    config.set_connected(false);
                    backoff.connection_lasted(connected_at.elapsed());
                }
                Err(DialFailure::Refused(error)) => return Err(error),
                Err(DialFailure::Unreachable(error)) => tracing::warn!(%error, "cannot connect"),
            }
            tokio::time::sleep(backoff.next_delay()).await;
        }
    };
    let result = tokio::select! {
        result = served => result,
        () = &mut stop => Ok(()),
    };
    drain.await;
    result
}

enum DialFailure {
    Refused(DirectError),
    Unreachable(DialError),
}

async fn dial(
    config: &RelayConfig,
    registry: &Registry,
    registered: &Registration,
) -> Result<Connection, DialFailure> {
    let headers = registry.upgrade_headers(&registered.url).await;
    let headers = headers.map_err(|error| DialFailure::Refused(error.into()))?;
    let dial = WebsocketDial {
        timeout: config.dial_timeout,
        proxies: config.proxies.clone(),
        headers,
        ..WebsocketDial::new(registered.url.expose())
    };
    let connection_config = ConnectionConfig::default();
    let socket = dial.connect(websocket_limits(&connection_config)).await.map_err(|error| {
        match error.status() {
            Some(status @ 400..=499) => {
                DialFailure::Refused(DirectError::Refused { url: dial.redacted_url(), status })
            }
            _ => DialFailure::Unreachable(error),
        }
    })?;
    Ok(Connection::websocket(socket, &connection_config))
}
