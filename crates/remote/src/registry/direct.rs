//! The registration of an executor that serves a websocket directly, without relay and Noise.

use codex_exec_rpc::Secret;
use http::{HeaderMap, Method};
use serde::{Deserialize, Serialize};

use super::{Registration, Registry, RegistryError};
use crate::base_url::BaseUrl;
use crate::credential::{CredentialError, OutgoingRequest};

/// The one way in which messages are carried.
pub const DIRECT_TRANSPORT: &str = "direct_jsonrpc_v1";

/// POST `/cloud/environment/{id}/direct/register`.
#[derive(Debug, Serialize)]
struct DirectRequest {
    transport: &'static str,
}

/// Members are optional here so that the missing one can be named.
#[derive(Debug, Deserialize)]
struct DirectResponse {
    environment_id: Option<String>,
    registration_id: Option<String>,
    transport: Option<String>,
    url: Option<Secret>,
}

/// Why there is no direct registration.
#[derive(Debug, thiserror::Error)]
pub enum DirectRegistrationError {
    /// The registry was of no use.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// The answer lacks a member.
    #[error("invalid response from the registry: missing field `{0}`")]
    Missing(&'static str),
    /// The answer has a transport that this server does not speak.
    #[error("the registry asks for the unsupported direct transport {0:?}")]
    Transport(String),
    /// The answer has an empty member.
    #[error("the registry returned incomplete direct connection data")]
    Incomplete,
    /// Messages would be sent unencrypted.
    #[error(
        "the registry returned a websocket URL that is not wss://; only this machine may be reached \
         without TLS"
    )]
    InClear,
}

impl Registry {
    /// Makes an executor known that will serve one websocket directly.
    pub async fn register_direct(
        &self,
        environment_id: &str,
    ) -> Result<Registration, DirectRegistrationError> {
        use DirectRegistrationError::{InClear, Incomplete, Missing, Transport};
        let path = ["cloud", "environment", environment_id, "direct", "register"];
        let body = DirectRequest { transport: DIRECT_TRANSPORT };
        let answer: DirectResponse = self.ask(Method::POST, &path, Some(&body)).await?;
        let told_environment = answer.environment_id.ok_or(Missing("environment_id"))?;
        let registration_id = answer.registration_id.ok_or(Missing("registration_id"))?;
        let transport = answer.transport.ok_or(Missing("transport"))?;
        let url = answer.url.ok_or(Missing("url"))?;
        if told_environment != environment_id {
            return Err(RegistryError::Answer("it is for a different environment id").into());
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

/// Whether what follows the scheme of a URL names this machine.
fn is_this_machine(rest: &str) -> bool {
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    format!("http://{authority}").parse::<BaseUrl>().is_ok_and(|base| base.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_is_reached_in_clear() {
        for yes in ["127.0.0.1:1/x?y", "localhost", "[::1]:8/", "127.9.9.9?q=1"] {
            assert!(is_this_machine(yes), "{yes}");
        }
        for no in ["10.0.0.1", "localhost.evil.test/", "x@127.0.0.1", "", "a b", "evil/127.0.0.1"] {
            assert!(!is_this_machine(no), "{no}");
        }
    }
}
