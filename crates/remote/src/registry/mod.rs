//! The registry: hands out rendezvous URLs and says whose key is authorized.
//!
//! Invariant: an answer that names another environment, another security profile or no proper URL
//! is refused; neither URL nor authorization is ever shown.

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
use crate::http_client::{Answer, HttpClient, HttpError, Payload};
use crate::trace_context::TraceContext;

pub use direct::{DIRECT_TRANSPORT, DirectRegistrationError};
pub use key::{NoiseKeyJson, key_to_json};
pub use messages::{
    ConnectRequest, ConnectResponse, ENVIRONMENT_NOT_FOUND, ENVIRONMENT_OFFLINE, EnvironmentStatus,
    ErrorDetail, ErrorResponse, ExecutorResponse, ListResponse, RegisterRequest, RegisterResponse,
    SECURITY_PROFILE, ValidateRequest, ValidateResponse,
};

/// Characters of an error body that are shown to a person.
const SHOWN_BODY: usize = 4096;

/// Asks one registry under one identity.
#[derive(Debug, Clone)]
pub struct Registry {
    base: BaseUrl,
    credential: Arc<dyn Credential>,
    http: HttpClient,
    trace: TraceContext,
}

/// Why the registry was of no use.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// No answer.
    #[error("cannot reach the registry at {base}: {cause}")]
    Unreachable {
        /// Which registry.
        base: BaseUrl,
        /// Why.
        cause: HttpError,
    },
    /// 401 or 403.
    #[error(
        "the registry refused the sign-in (HTTP {status}{said}); run codex login, or check that \
         the key or token is valid for this environment"
    )]
    Authentication {
        /// 401 or 403.
        status: u16,
        /// What the registry said, with a separator before it.
        said: String,
    },
    /// Any other status that is no success.
    #[error("the registry answered HTTP {status}{said}")]
    Refused {
        /// Which.
        status: u16,
        /// `error.code` of its answer, for programs: [`ENVIRONMENT_OFFLINE`] and others.
        code: Option<String>,
        /// What the registry said, with a separator before it.
        said: String,
    },
    /// A success that makes no sense.
    #[error("invalid response from the registry: {0}")]
    Answer(&'static str),
    /// There is nothing to sign in with.
    #[error(transparent)]
    SignIn(#[from] CredentialError),
}

impl RegistryError {
    /// Whether the same question may be answered better later.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { cause, .. } => !matches!(cause, HttpError::Url),
            Self::Refused { status, .. } => matches!(status, 408 | 409 | 429 | 500..),
            Self::SignIn(error) => error.is_transient(),
            Self::Authentication { .. } | Self::Answer(_) => false,
        }
    }
}

/// An executor is registered.
#[derive(Debug, Clone)]
pub struct Registration {
    /// Where it connects to.
    pub url: Secret,
    /// Bound into every handshake.
    pub registration_id: String,
}

/// A harness may connect.
#[derive(Debug, Clone)]
pub struct Admission {
    /// Where it connects to.
    pub url: Secret,
    /// Bound into the handshake.
    pub registration_id: String,
    /// The keys to pin.
    pub executor_key: NoisePublicKey,
    /// What the executor has validated.
    pub authorization: Secret,
}

impl Registry {
    /// This registry, asked with that credential. Fails if the credential must not be sent there.
    pub fn new(
        base: BaseUrl,
        credential: impl Credential + 'static,
        http: HttpClient,
    ) -> Result<Self, CredentialError> {
        credential.may_go_to(&base)?;
        Ok(Self { base, credential: Arc::new(credential), http, trace: TraceContext::default() })
    }

    /// With the headers of this trace on every call.
    #[must_use]
    pub fn with_trace(mut self, trace: TraceContext) -> Self {
        self.trace = trace;
        self
    }

    /// Where it is.
    pub fn base(&self) -> &BaseUrl {
        &self.base
    }

    /// Makes an executor with this key known.
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
        let answer: RegisterResponse = self.ask(Method::POST, &path, Some(&body)).await?;
        check(environment_id, &answer.environment_id, &answer.security_profile)?;
        Ok(Registration {
            url: websocket_url(answer.url)?,
            registration_id: present(answer.executor_registration_id)?,
        })
    }

    /// Asks for the way to an environment, for a harness with this key.
    pub async fn connect(
        &self,
        environment_id: &str,
        key: &NoisePublicKey,
    ) -> Result<Admission, RegistryError> {
        let body = ConnectRequest { harness_public_key: NoiseKeyJson(key.clone()) };
        let path = ["cloud", "environment", environment_id, "connect"];
        let answer: ConnectResponse = self.ask(Method::POST, &path, Some(&body)).await?;
        check(environment_id, &answer.environment_id, &answer.security_profile)?;
        Ok(Admission {
            url: websocket_url(answer.url)?,
            registration_id: present(answer.executor_registration_id)?,
            executor_key: answer.executor_public_key.0,
            authorization: answer.harness_key_authorization,
        })
    }

    /// Whether a harness with this key may use the environment.
    pub async fn validate(
        &self,
        environment_id: &str,
        registration_id: &str,
        key: NoisePublicKey,
        authorization: &str,
    ) -> Result<bool, RegistryError> {
        let body = ValidateRequest {
            executor_registration_id: registration_id.to_owned(),
            harness_public_key: NoiseKeyJson(key),
            harness_key_authorization: authorization.into(),
        };
        let path = ["cloud", "environment", environment_id, "validate"];
        let answer: ValidateResponse = self.ask(Method::POST, &path, Some(&body)).await?;
        Ok(answer.valid)
    }

    /// The older registration, without Noise; gives the URL to connect to.
    pub async fn register_executor(&self, executor_id: &str) -> Result<Secret, RegistryError> {
        let path = ["cloud", "executor", executor_id, "register"];
        let answer: ExecutorResponse = self.ask(Method::POST, &path, None::<&()>).await?;
        if answer.executor_id != executor_id {
            return Err(RegistryError::Answer("it is for another executor"));
        }
        websocket_url(answer.url)
    }

    async fn ask<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &[&str],
        body: Option<&impl Serialize>,
    ) -> Result<T, RegistryError> {
        let mut answer = self.send(method.clone(), path, body).await?;
        // A token may have been revoked or rotated under us: once, with a new one.
        if answer.status == StatusCode::UNAUTHORIZED && self.credential.renew(&self.http).await? {
            answer = self.send(method, path, body).await?;
        }
        let status = answer.status.as_u16();
        match answer.status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                Err(RegistryError::Authentication { status, said: said(&answer) })
            }
            ok if ok.is_success() => {
                answer.json().ok_or(RegistryError::Answer("it is not the expected JSON"))
            }
            _ => {
                let code = told(&answer).and_then(|told| told.code);
                Err(RegistryError::Refused { status, code, said: said(&answer) })
            }
        }
    }

    async fn send(
        &self,
        method: Method,
        path: &[&str],
        body: Option<&impl Serialize>,
    ) -> Result<Answer, RegistryError> {
        let body = body.map(serde_json::to_vec).transpose();
        let body = body.map_err(|_| RegistryError::Answer("cannot encode the request"))?;
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
            .ask(method, &url, headers, payload)
            .await
            .map_err(|cause| RegistryError::Unreachable { base: self.base.clone(), cause })
    }
}

fn check(asked: &str, environment_id: &str, profile: &str) -> Result<(), RegistryError> {
    if environment_id != asked {
        return Err(RegistryError::Answer("it is for another environment"));
    }
    if profile != SECURITY_PROFILE {
        return Err(RegistryError::Answer("it has another security profile"));
    }
    Ok(())
}

fn present(registration_id: String) -> Result<String, RegistryError> {
    if registration_id.is_empty() {
        return Err(RegistryError::Answer("its registration id is empty"));
    }
    Ok(registration_id)
}

fn websocket_url(url: Secret) -> Result<Secret, RegistryError> {
    let text = url.expose();
    if text.starts_with("wss://") || text.starts_with("ws://") {
        Ok(url)
    } else {
        Err(RegistryError::Answer("its url is not a websocket URL"))
    }
}

/// The `error` of an error body.
fn told(answer: &Answer) -> Option<ErrorDetail> {
    answer.json::<ErrorResponse>().map(|body| body.error)
}

/// What an error body says to a person: the message of `{"error": {code, message}}`, or the text.
fn said(answer: &Answer) -> String {
    let text = match told(answer) {
        Some(ErrorDetail { code: Some(code), message: Some(message) }) => {
            format!("{code}: {message}")
        }
        Some(ErrorDetail { code: Some(one), .. } | ErrorDetail { message: Some(one), .. }) => one,
        _ => String::from_utf8_lossy(&answer.body).into_owned(),
    };
    // The text is another's: nothing in it may move the cursor of a terminal.
    let text: String = text
        .trim()
        .chars()
        .take(SHOWN_BODY)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    if text.is_empty() { text } else { format!(": {text}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(body: &[u8]) -> Answer {
        Answer { status: StatusCode::CONFLICT, body: bytes::Bytes::copy_from_slice(body) }
    }

    #[test]
    fn an_error_body_is_shown_in_bounds_and_harmless() {
        let told = said(&answer(br#"{"error":{"code":"taken","message":"by \u001b[2Janother"}}"#));
        assert_eq!(told, ": taken: by  [2Janother");
        assert_eq!(said(&answer(b" gone \n")), ": gone");
        assert_eq!(said(&answer(b"")), "");
        assert_eq!(said(&answer(&vec![b'x'; 10_000])).len(), SHOWN_BODY + 2);
        assert!(said(&answer(&[0xff; 10])).starts_with(": "));
    }

    #[test]
    fn answers_for_others_are_refused() {
        check("e", "e", SECURITY_PROFILE).unwrap();
        check("e", "f", SECURITY_PROFILE).unwrap_err();
        check("e", "e", "none").unwrap_err();
        websocket_url("https://h".into()).unwrap_err();
        websocket_url("wss://h".into()).unwrap();
    }
}
