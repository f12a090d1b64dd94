//! The registration of an executor that serves a websocket directly, without relay and Noise.

use codex_exec_rpc::Secret;
use http::{HeaderMap, Method};
use serde::{Deserialize, Serialize};

use super::{Registration, Registry, RegistryError};
use crate::base_url::BaseUrl;
use crate::credential::{CredentialError, OutgoingRequest};

/// The only supported transport of direct registrations.
pub const DIRECT_TRANSPORT: &str = "direct_jsonrpc_v1";

/// POST `/cloud/environment/{id}/direct/register`.
#[derive(Debug, Serialize)]
struct DirectRequest {
    transport: &'static str,
}

/// Members are optional so that an error can name the missing one.
#[derive(Debug, Deserialize)]
struct DirectResponse {
    environment_id: Option<String>,
    registration_id: Option<String>,
    transport: Option<String>,
    url: Option<Secret>,
}

/// Why a direct registration failed.
#[derive(Debug, thiserror::Error)]
pub enum DirectRegistrationError {
    /// The request to the registry failed.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// The response lacks a member.
    #[error("invalid response from the registry: missing field `{0}`")]
    Missing(&'static str),
    /// The response names a transport that this server does not support.
    #[error("the registry asks for the unsupported direct transport {0:?}")]
    Transport(String),
    /// The registration id or the URL is empty.
    #[error("the registry returned incomplete direct connection data")]
    Incomplete,
    /// The URL would send messages unencrypted over the network.
    #[error(
        "the registry returned a websocket URL that is not wss://; only this machine may be reached \
         without TLS"
    )]
    InClear,
}

impl Registry {
    /// Registers an executor that serves one websocket directly.
    pub async fn register_direct(
        &self,
        environment_id: &str,
    ) -> Result<Registration, DirectRegistrationError> {
        use DirectRegistrationError::{InClear, Incomplete, Missing, Transport};
        let path = ["cloud", "environment", environment_id, "direct", "register"];
        let body = DirectRequest { transport: DIRECT_TRANSPORT };
        let response: DirectResponse = self.call(Method::POST, &path, Some(&body)).await?;
        let response_environment = response.environment_id.ok_or(Missing("environment_id"))?;
        let registration_id = response.registration_id.ok_or(Missing("registration_id"))?;
        let transport = response.transport.ok_or(Missing("transport"))?;
        let url = response.url.ok_or(Missing("url"))?;
        if response_environment != environment_id {
            return Err(
                RegistryError::InvalidResponse("it is for a different environment id").into()
            );
        }
        if transport != DIRECT_TRANSPORT {
            let shown = transport.chars().take(100).collect();
            return Err(Transport(shown));
        }
        if registration_id.is_empty() || url.is_blank() {
            return Err(Incomplete);
        }
        match url.expose().split_once("://") {
            Some(("wss", _)) => {}
            Some(("ws", rest)) if is_this_machine(rest) => {}
            _ => return Err(InClear),
        }
        Ok(Registration { url, registration_id })
    }

    /// The headers that sign the upgrade to this URL.
    pub(crate) async fn upgrade_headers(&self, url: &Secret) -> Result<HeaderMap, CredentialError> {
        let request =
            OutgoingRequest { method: "GET", url: url.expose(), content_type: None, body: &[] };
        self.credential.headers_for(request, &self.http).await
    }
}

/// Whether the host of a URL, given without its scheme, is this machine.
fn is_this_machine(rest: &str) -> bool {
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    format!("http://{authority}").parse::<BaseUrl>().is_ok_and(|base| base.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn websocket_without_tls_is_allowed_on_loopback_only() {
        for yes in ["127.0.0.1:1/x?y", "localhost", "[::1]:8/", "127.9.9.9?q=1"] {
            assert!(is_this_machine(yes), "{yes}");
        }
        for no in ["10.0.0.1", "localhost.evil.test/", "x@127.0.0.1", "", "a b", "evil/127.0.0.1"] {
            assert!(!is_this_machine(no), "{no}");
        }
    }
}
