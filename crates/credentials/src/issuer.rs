//! An OAuth issuer: where tokens are made and renewed.
//!
//! Its endpoints come from its discovery document; an issuer without one is taken to have them at
//! the usual paths. Tokens are sent to it only over https, or on this machine.

use codex_exec_remote::{BaseUrl, HttpClient, HttpError, HttpResponse, Payload, Secret};
use http::{HeaderMap, Method, StatusCode};
use serde::Deserialize;

/// An issuer and the client that asks it.
#[derive(Debug, Clone)]
pub struct Issuer {
    /// Where people sign in.
    pub authorize: String,
    /// Where tokens come from.
    pub token: String,
    /// Where devices without a browser begin.
    pub device: String,
    /// The client's id.
    pub client_id: String,
}

/// Why there are no tokens.
#[derive(Debug, thiserror::Error)]
pub enum OauthError {
    /// No issuer or no client id is known.
    #[error("{0}")]
    Setup(&'static str),
    /// The issuer is not one to send tokens to.
    #[error("refusing to send tokens to the issuer {0}: it is not https")]
    InClear(String),
    /// Not reached.
    #[error(transparent)]
    Unreachable(#[from] HttpError),
    /// The issuer's own error code.
    #[error("the issuer returned {code}{}", detail(.description))]
    Refused {
        /// As in RFC 6749 and 8628: `invalid_grant`, `authorization_pending`, …
        code: String,
        /// For people.
        description: Option<String>,
    },
    /// An answer that makes no sense.
    #[error("the issuer answered HTTP {0} without tokens")]
    NoTokens(u16),
}

impl OauthError {
    /// Whether trying later may do.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable(error) => !matches!(error, HttpError::Url),
            Self::NoTokens(status) => matches!(status, 429 | 500..),
            _ => false,
        }
    }
}

fn detail(description: &Option<String>) -> String {
    let harmless = |text: &String| {
        let text: String = text.chars().filter(|c| !c.is_control()).take(300).collect();
        format!(" ({text})")
    };
    description.as_ref().map(harmless).unwrap_or_default()
}

/// Tokens as an issuer gives them. A renewal may leave some out.
#[derive(Debug, Clone, Deserialize)]
pub struct IssuedTokens {
    /// What a request carries.
    pub access_token: Secret,
    /// Who the user is.
    pub id_token: Option<Secret>,
    /// What gets the next ones.
    pub refresh_token: Option<Secret>,
}

impl Issuer {
    /// Asks the issuer where its endpoints are.
    pub async fn discover(
        base: &BaseUrl,
        client_id: String,
        http: &HttpClient,
    ) -> Result<Self, OauthError> {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct Document {
            authorization_endpoint: Option<String>,
            token_endpoint: Option<String>,
            device_authorization_endpoint: Option<String>,
        }
        if !base.is_private() {
            return Err(OauthError::InClear(base.to_string()));
        }
        let url = base.join(&[".well-known", "openid-configuration"]);
        let response = http.send(Method::GET, &url, HeaderMap::new(), Payload::None).await?;
        let document: Document = match response.status {
            StatusCode::OK => response.json().unwrap_or_default(),
            _ => Document::default(),
        };
        let endpoint = |named: Option<String>, usual: &[&str]| {
            let url = named.unwrap_or_else(|| base.join(usual));
            match url.parse::<BaseUrl>() {
                Ok(parsed) if parsed.is_private() => Ok(url),
                _ => Err(OauthError::InClear(url)),
            }
        };
        Ok(Self {
            authorize: endpoint(document.authorization_endpoint, &["oauth", "authorize"])?,
            token: endpoint(document.token_endpoint, &["oauth", "token"])?,
            device: endpoint(document.device_authorization_endpoint, &["oauth", "device", "code"])?,
            client_id,
        })
    }

    /// One question to the token endpoint.
    pub async fn tokens(
        &self,
        mut fields: Vec<(&'static str, String)>,
        http: &HttpClient,
    ) -> Result<IssuedTokens, OauthError> {
        fields.push(("client_id", self.client_id.clone()));
        let payload = Payload::Form(fields);
        let response = http.send(Method::POST, &self.token, HeaderMap::new(), payload).await?;
        match response.status.is_success().then(|| response.json()).flatten() {
            Some(tokens) => Ok(tokens),
            None => Err(refusal(&response)),
        }
    }
}

/// What an answer without tokens means.
pub(crate) fn refusal(response: &HttpResponse) -> OauthError {
    #[derive(Deserialize)]
    struct Body {
        error: serde_json::Value,
        error_description: Option<String>,
    }
    let Some(body) = response.json::<Body>() else {
        return OauthError::NoTokens(response.status.as_u16());
    };
    // RFC 6749 has a text here; some issuers have an object with a code.
    let code = body.error.as_str().or_else(|| body.error.get("code")?.as_str());
    match code {
        Some(code) if response.status.is_client_error() => {
            let code = code.chars().filter(|c| !c.is_control()).take(100).collect();
            OauthError::Refused { code, description: body.error_description }
        }
        _ => OauthError::NoTokens(response.status.as_u16()),
    }
}
