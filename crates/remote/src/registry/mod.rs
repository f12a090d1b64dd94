//! The registry client: obtains rendezvous URLs and validates the keys of harnesses.
//!
//! Invariant: a response that names another environment, another security profile or no websocket URL is
//! refused; URLs and authorizations are never shown.

mod direct;
mod environments;
mod key;
mod messages;

use std::sync::Arc;

use codex_exec_rpc::Secret;
use http::{Method, StatusCode};
use serde::Serialize;
use serde::de::DeserializeOwned;

use codex_exec_relay_core::NoisePublicKey;

use crate::base_url::BaseUrl;
use crate::credential::{Credential, CredentialError, OutgoingRequest};
use crate::http_client::{HttpClient, HttpError, HttpResponse, Payload};
use crate::trace_context::TraceContext;

pub use direct::{DIRECT_TRANSPORT, DirectRegistrationError};
pub use key::{NoiseKeyJson, key_to_json};
pub use messages::{
    ConnectRequest, ConnectResponse, ENVIRONMENT_NOT_FOUND, ENVIRONMENT_OFFLINE, EnvironmentStatus,
    ErrorDetail, ErrorResponse, ExecutorResponse, ListResponse, RegisterRequest, RegisterResponse,
    SECURITY_PROFILE, ValidateRequest, ValidateResponse,
};

/// The longest part of an error body that an error shows, in characters.
const MAX_SHOWN_BODY: usize = 4096;

/// The longest name of a principal, in bytes.
const MAX_PRINCIPAL: usize = 256;

/// A client of one registry, with one credential.
#[derive(Debug, Clone)]
pub struct Registry {
    base: BaseUrl,
    credential: Arc<dyn Credential>,
    http: HttpClient,
    trace: TraceContext,
}

/// Why a request to the registry failed.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// The registry did not respond.
    #[error("cannot reach the registry at {base}: {cause}")]
    Unreachable {
        /// The registry's base URL.
        base: BaseUrl,
        /// The cause.
        cause: HttpError,
    },
    /// The registry responded with 401 or 403.
    #[error(
        "the registry refused the sign-in (HTTP {status}{detail}); run codex login, or check that \
         the key or token is valid for this environment"
    )]
    Authentication {
        /// 401 or 403.
        status: u16,
        /// The registry's message, with a separator before it.
        detail: String,
    },
    /// The registry responded with another error status.
    #[error("the registry answered HTTP {status}{detail}")]
    Refused {
        /// The HTTP status.
        status: u16,
        /// `error.code` of the response, such as [`ENVIRONMENT_OFFLINE`].
        code: Option<String>,
        /// The registry's message, with a separator before it.
        detail: String,
    },
    /// The registry responded with success, but with an invalid body.
    #[error("invalid response from the registry: {0}")]
    InvalidResponse(&'static str),
    /// The credential cannot be used.
    #[error(transparent)]
    SignIn(#[from] CredentialError),
}

impl RegistryError {
    /// Whether a later attempt may succeed.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { cause, .. } => !matches!(cause, HttpError::Url),
            Self::Refused { status, .. } => matches!(status, 408 | 409 | 429 | 500..),
            Self::SignIn(error) => error.is_transient(),
            Self::Authentication { .. } | Self::InvalidResponse(_) => false,
        }
    }
}

/// The registration of an executor.
#[derive(Debug, Clone)]
pub struct Registration {
    /// The websocket URL to connect to.
    pub url: Secret,
    /// Bound into every handshake.
    pub registration_id: String,
}

/// The permission of a harness to connect.
#[derive(Debug, Clone)]
pub struct Admission {
    /// The websocket URL to connect to.
    pub url: Secret,
    /// Bound into the handshake.
    pub registration_id: String,
    /// The executor's key, to be pinned.
    pub executor_key: NoisePublicKey,
    /// What the harness shows to the executor.
    pub authorization: Secret,
}

impl Registry {
    /// Makes a client. Fails if the credential must not be sent to this registry.
    pub fn new(
        base: BaseUrl,
        credential: impl Credential + 'static,
        http: HttpClient,
    ) -> Result<Self, CredentialError> {
        credential.check_target(&base)?;
        Ok(Self { base, credential: Arc::new(credential), http, trace: TraceContext::default() })
    }

    /// Adds the headers of this trace to every request.
    #[must_use]
    pub fn with_trace(mut self, trace: TraceContext) -> Self {
        self.trace = trace;
        self
    }

    /// Its base URL.
    pub fn base(&self) -> &BaseUrl {
        &self.base
    }

    /// Registers an executor with this key.
    pub async fn register(
        &self,
        environment_id: &str,
        key: &NoisePublicKey,
    ) -> Result<Registration, RegistryError> {
        let body = RegisterRequest {
            security_profile: SECURITY_PROFILE.to_owned(),
            executor_public_key: NoiseKeyJson(key.clone()),
        };
        let path = ["cloud", "environment", environment_id, "register"];
        let response: RegisterResponse = self.call(Method::POST, &path, Some(&body)).await?;
        check(environment_id, &response.environment_id, &response.security_profile)?;
        Ok(Registration {
            url: websocket_url(response.url)?,
            registration_id: require_registration_id(response.executor_registration_id)?,
        })
    }

    /// Requests a connection to an environment, for a harness with this key.
    pub async fn connect(
        &self,
        environment_id: &str,
        key: &NoisePublicKey,
    ) -> Result<Admission, RegistryError> {
        let body = ConnectRequest { harness_public_key: NoiseKeyJson(key.clone()) };
        let path = ["cloud", "environment", environment_id, "connect"];
        let response: ConnectResponse = self.call(Method::POST, &path, Some(&body)).await?;
        check(environment_id, &response.environment_id, &response.security_profile)?;
        Ok(Admission {
            url: websocket_url(response.url)?,
            registration_id: require_registration_id(response.executor_registration_id)?,
            executor_key: response.executor_public_key.0,
            authorization: response.harness_key_authorization,
        })
    }

    /// Whether a harness with this key may use the environment, and who it is.
    pub async fn validate(
        &self,
        environment_id: &str,
        registration_id: &str,
        key: NoisePublicKey,
        authorization: &str,
    ) -> Result<ValidateResponse, RegistryError> {
        let body = ValidateRequest {
            executor_registration_id: registration_id.to_owned(),
            harness_public_key: NoiseKeyJson(key),
            harness_key_authorization: authorization.into(),
        };
        let path = ["cloud", "environment", environment_id, "validate"];
        let response: ValidateResponse = self.call(Method::POST, &path, Some(&body)).await?;
        if response.principal.as_ref().is_some_and(|principal| principal.len() > MAX_PRINCIPAL) {
            return Err(RegistryError::InvalidResponse("the name of its principal is too long"));
        }
        Ok(response)
    }

    /// The older registration, without Noise; returns the URL to connect to.
    pub async fn register_executor(&self, executor_id: &str) -> Result<Secret, RegistryError> {
        let path = ["cloud", "executor", executor_id, "register"];
        let response: ExecutorResponse = self.call(Method::POST, &path, None::<&()>).await?;
        if response.executor_id != executor_id {
            return Err(RegistryError::InvalidResponse("it is for another executor"));
        }
        websocket_url(response.url)
    }

    async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &[&str],
        body: Option<&impl Serialize>,
    ) -> Result<T, RegistryError> {
        let mut response = self.send(method.clone(), path, body).await?;
        // The token may have been revoked or rotated: renew it and retry once.
        if response.status == StatusCode::UNAUTHORIZED && self.credential.renew(&self.http).await? {
            response = self.send(method, path, body).await?;
        }
        let status = response.status.as_u16();
        match response.status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                Err(RegistryError::Authentication { status, detail: error_text(&response) })
            }
            ok if ok.is_success() => {
                response.json().ok_or(RegistryError::InvalidResponse("it is not the expected JSON"))
            }
            _ => {
                let code = error_detail(&response).and_then(|detail| detail.code);
                Err(RegistryError::Refused { status, code, detail: error_text(&response) })
            }
        }
    }

    async fn send(
        &self,
        method: Method,
        path: &[&str],
        body: Option<&impl Serialize>,
    ) -> Result<HttpResponse, RegistryError> {
        let body = body.map(serde_json::to_vec).transpose();
        let body = body.map_err(|_| RegistryError::InvalidResponse("cannot encode the request"))?;
        let url = self.base.join(path);
        let request = OutgoingRequest {
            method: method.as_str(),
            url: &url,
            content_type: body.is_some().then_some("application/json"),
            body: body.as_deref().unwrap_or_default(),
        };
        let mut headers = self.credential.headers_for(request, &self.http).await?;
        headers.extend(self.trace.headers());
        let payload = body.map_or(Payload::None, Payload::Json);
        tracing::debug!(%url, "request to the registry");
        self.http
            .send(method, &url, headers, payload)
            .await
            .map_err(|cause| RegistryError::Unreachable { base: self.base.clone(), cause })
    }
}

fn check(asked: &str, environment_id: &str, profile: &str) -> Result<(), RegistryError> {
    if environment_id != asked {
        return Err(RegistryError::InvalidResponse("it is for another environment"));
    }
    if profile != SECURITY_PROFILE {
        return Err(RegistryError::InvalidResponse("it has another security profile"));
    }
    Ok(())
}

fn require_registration_id(registration_id: String) -> Result<String, RegistryError> {
    if registration_id.is_empty() {
        return Err(RegistryError::InvalidResponse("its registration id is empty"));
    }
    Ok(registration_id)
}

fn websocket_url(url: Secret) -> Result<Secret, RegistryError> {
    let text = url.expose();
    if text.starts_with("wss://") || text.starts_with("ws://") {
        Ok(url)
    } else {
        Err(RegistryError::InvalidResponse("its url is not a websocket URL"))
    }
}

/// The `error` of an error body.
fn error_detail(response: &HttpResponse) -> Option<ErrorDetail> {
    response.json::<ErrorResponse>().map(|body| body.error)
}

/// The text of an error body for people: code and message of `{"error": {…}}`, or the raw text.
fn error_text(response: &HttpResponse) -> String {
    let text = match error_detail(response) {
        Some(ErrorDetail { code: Some(code), message: Some(message) }) => {
            format!("{code}: {message}")
        }
        Some(ErrorDetail { code: Some(one), .. } | ErrorDetail { message: Some(one), .. }) => one,
        _ => String::from_utf8_lossy(&response.body).into_owned(),
    };
    // The text is untrusted: strip control characters, which could change a terminal.
    let text: String = text
        .trim()
        .chars()
        .take(MAX_SHOWN_BODY)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    if text.is_empty() { text } else { format!(": {text}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn response(body: &[u8]) -> HttpResponse {
        HttpResponse { status: StatusCode::CONFLICT, body: bytes::Bytes::copy_from_slice(body) }
    }

    #[test]
    fn error_body_is_truncated_and_stripped_of_controls() {
        let shown =
            error_text(&response(br#"{"error":{"code":"taken","message":"by \u001b[2Janother"}}"#));
        assert_eq!(shown, ": taken: by  [2Janother");
        assert_eq!(error_text(&response(b" gone \n")), ": gone");
        assert_eq!(error_text(&response(b"")), "");
        assert_eq!(error_text(&response(&vec![b'x'; 10_000])).len(), MAX_SHOWN_BODY + 2);
        assert!(error_text(&response(&[0xff; 10])).starts_with(": "));
    }

    #[test]
    fn responses_for_another_environment_are_rejected() {
        check("e", "e", SECURITY_PROFILE).unwrap();
        check("e", "f", SECURITY_PROFILE).unwrap_err();
        check("e", "e", "none").unwrap_err();
        websocket_url("https://h".into()).unwrap_err();
        websocket_url("wss://h".into()).unwrap();
    }
}
