//! An OAuth issuer, which issues and renews tokens.
//!
//! Its endpoints come from its discovery document; without one, the usual paths apply. Tokens are sent
//! only over https or to this machine.

use codex_exec_remote::{BaseUrl, HttpClient, HttpError, HttpResponse, Payload, Secret};
use http::{HeaderMap, Method, StatusCode};
use serde::Deserialize;

/// An issuer's endpoints and the client id to use with them.
#[derive(Debug, Clone)]
pub struct Issuer {
    /// The authorization endpoint, for browsers.
    pub authorize: String,
    /// The token endpoint.
    pub token: String,
    /// The device authorization endpoint, for machines without a browser.
    pub device: String,
    /// The OAuth client id.
    pub client_id: String,
}

/// Why the issuer gave no tokens.
#[derive(Debug, thiserror::Error)]
pub enum OauthError {
    /// The issuer, the client id or the refresh token is missing.
    #[error("{0}")]
    Setup(&'static str),
    /// The endpoint is not https.
    #[error("refusing to send tokens to the issuer {0}: it is not https")]
    InClear(String),
    /// The issuer could not be reached.
    #[error(transparent)]
    Unreachable(#[from] HttpError),
    /// The issuer responded with an OAuth error.
    #[error("the issuer returned {code}{}", detail(.description))]
    Refused {
        /// The code of RFC 6749 or 8628: `invalid_grant`, `authorization_pending`, …
        code: String,
        /// The issuer's text for people.
        description: Option<String>,
    },
    /// The response has neither tokens nor an OAuth error.
    #[error("the issuer answered HTTP {0} without tokens")]
    NoTokens(u16),
}

impl OauthError {
    /// Whether a later attempt may succeed.
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

/// The token response of an issuer. A renewal may leave tokens out.
#[derive(Debug, Clone, Deserialize)]
pub struct IssuedTokens {
    /// The token that requests carry.
    pub access_token: Secret,
    /// The JWT that identifies the user.
    pub id_token: Option<Secret>,
    /// The token that obtains the next access token.
    pub refresh_token: Option<Secret>,
}

impl Issuer {
    /// Reads the issuer's discovery document.
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

    /// Sends one request to the token endpoint.
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

/// The error in a response without tokens.
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
