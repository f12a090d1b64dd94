//! Sign-in from a machine without a browser: the OAuth device code (RFC 8628).

use std::time::Duration;

use codex_exec_remote::{HttpClient, Payload, Secret};
use http::{HeaderMap, Method};
use serde::Deserialize;
use tokio::time::Instant;

use super::{LoginError, SCOPE};
use crate::issuer::{IssuedTokens, Issuer, OauthError, refusal};

/// A sign-in that waits for its user to enter a code elsewhere.
#[derive(Debug)]
pub struct DeviceLogin {
    issuer: Issuer,
    authorization: DeviceAuthorization,
}

#[derive(Debug, Deserialize)]
struct DeviceAuthorization {
    device_code: Secret,
    user_code: String,
    verification_uri: String,
    #[serde(default = "ten_minutes")]
    expires_in: u64,
    #[serde(default = "five_seconds")]
    interval: u64,
}

/// The longest time that a code is waited for, in seconds, whatever the issuer says.
const MAX_EXPIRY: u64 = 30 * 60;
/// The longest time between two requests, whatever the issuer asks for.
const MAX_INTERVAL: Duration = Duration::from_secs(60);

fn ten_minutes() -> u64 {
    600
}

fn five_seconds() -> u64 {
    5
}

impl DeviceLogin {
    /// Requests a code.
    pub async fn start(issuer: Issuer, http: &HttpClient) -> Result<Self, LoginError> {
        let fields = vec![("client_id", issuer.client_id.clone()), ("scope", SCOPE.to_owned())];
        let response = http
            .send(Method::POST, &issuer.device, HeaderMap::new(), Payload::Form(fields))
            .await
            .map_err(OauthError::from)?;
        match response.status.is_success().then(|| response.json()).flatten() {
            Some(authorization) => Ok(Self { issuer, authorization }),
            None => Err(refusal(&response).into()),
        }
    }

    /// The URL for the user to open.
    pub fn verification_url(&self) -> &str {
        &self.authorization.verification_uri
    }

    /// The code for the user to enter there.
    pub fn user_code(&self) -> &str {
        &self.authorization.user_code
    }

    /// Polls until the user has entered the code, at the interval that the issuer asks for.
    pub async fn finish(self, http: &HttpClient) -> Result<IssuedTokens, LoginError> {
        let expires_in = self.authorization.expires_in.min(MAX_EXPIRY);
        let deadline = Instant::now() + Duration::from_secs(expires_in);
        let seconds = self.authorization.interval.clamp(1, MAX_INTERVAL.as_secs());
        let mut interval = Duration::from_secs(seconds);
        while Instant::now() + interval < deadline {
            tokio::time::sleep(interval).await;
            let fields = vec![
                ("grant_type", "urn:ietf:params:oauth:grant-type:device_code".to_owned()),
                ("device_code", self.authorization.device_code.expose().to_owned()),
            ];
            match self.issuer.tokens(fields, http).await {
                Ok(tokens) => return Ok(tokens),
                Err(OauthError::Refused { code, .. }) if code == "authorization_pending" => {}
                Err(OauthError::Refused { code, .. }) if code == "slow_down" => {
                    interval = (interval + Duration::from_secs(5)).min(MAX_INTERVAL);
                }
                Err(error) if error.is_transient() => {
                    tracing::debug!(%error, "cannot reach the issuer; retrying");
                }
                Err(error) => return Err(error.into()),
            }
        }
        Err(LoginError::Timeout(expires_in))
    }
}
