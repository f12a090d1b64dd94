//! A small HTTP client: one connection per request, and the whole response in memory.
//!
//! It follows no redirect, so a credential reaches only the host it was sent to. It has no cookies and no
//! pool; requests to registries and issuers are rare.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use codex_exec_rpc::{DialError, ExchangeError, HttpTarget, Proxies, escape};
use http::{HeaderMap, HeaderValue, Method, Request, StatusCode, Uri, header};
use http_body_util::{BodyExt, Full, Limited};
use serde::de::DeserializeOwned;
use tokio_rustls::rustls::ClientConfig;

/// Limits of a request.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct HttpConfig {
    /// Timeout from the name lookup to the last byte of the response. Default 30 s.
    pub timeout: Duration,
    /// The longest response body, in bytes (default 1 MiB); a longer one is an error.
    pub max_body: usize,
    /// TLS configuration. Default `None`: trust the system's root certificates.
    pub tls: Option<Arc<ClientConfig>>,
    /// Proxies to go through. Default: those of the environment.
    pub proxies: Arc<Proxies>,
}

impl Default for HttpConfig {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(30),
            max_body: 1 << 20,
            tls: None,
            proxies: Proxies::from_env(),
        }
    }
}

/// Why there is no response. Shows neither body nor headers nor URL.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// The URL is not http or https.
    #[error("invalid URL; expected https://HOST/…")]
    Url,
    /// The connection failed.
    #[error(transparent)]
    Dial(#[from] DialError),
    /// The exchange ended early or was not HTTP.
    #[error("the HTTP request failed: {0}")]
    Exchange(#[from] hyper::Error),
    /// The server sent too much before the end of the response's head.
    #[error("the response has no head, or one that is too long")]
    Head,
    /// The body is longer than [`HttpConfig::max_body`], or ended early.
    #[error("the response is incomplete or longer than {max} bytes")]
    Body {
        /// The limit in bytes.
        max: usize,
    },
    /// The request took longer than [`HttpConfig::timeout`].
    #[error("no response within {} s", after.as_secs())]
    Timeout {
        /// The timeout.
        after: Duration,
    },
}

impl From<ExchangeError> for HttpError {
    fn from(error: ExchangeError) -> Self {
        match error {
            ExchangeError::Dial(error) => Self::Dial(error),
            ExchangeError::Head => Self::Head,
            ExchangeError::Uri => Self::Url,
            ExchangeError::Http(error) => Self::Exchange(error),
        }
    }
}

/// A complete response. `Debug` hides the body, which may contain tokens.
#[derive(Clone)]
pub struct HttpResponse {
    /// Its status.
    pub status: StatusCode,
    /// Its body.
    pub body: Bytes,
}

impl HttpResponse {
    /// The body parsed as JSON; `None` if it is not a `T`.
    pub fn json<T: DeserializeOwned>(&self) -> Option<T> {
        serde_json::from_slice(&self.body).ok()
    }
}

impl fmt::Debug for HttpResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpResponse")
            .field("status", &self.status)
            .field("body_len", &self.body.len())
            .finish()
    }
}

/// The body of a request.
#[derive(Debug)]
pub enum Payload {
    /// Nothing.
    None,
    /// JSON text.
    Json(Vec<u8>),
    /// Form fields.
    Form(Vec<(&'static str, String)>),
}

/// Sends HTTP requests.
#[derive(Debug, Clone, Default)]
pub struct HttpClient {
    config: HttpConfig,
}

impl HttpClient {
    /// Makes a client with these limits.
    pub fn new(config: HttpConfig) -> Self {
        Self { config }
    }

    /// Sends one request. A response of any status is `Ok`.
    pub async fn send(
        &self,
        method: Method,
        url: &str,
        headers: HeaderMap,
        payload: Payload,
    ) -> Result<HttpResponse, HttpError> {
        let after = self.config.timeout;
        match tokio::time::timeout(after, self.exchange(method, url, headers, payload)).await {
            Ok(result) => result,
            Err(_) => Err(HttpError::Timeout { after }),
        }
    }

    async fn exchange(
        &self,
        method: Method,
        url: &str,
        headers: HeaderMap,
        payload: Payload,
    ) -> Result<HttpResponse, HttpError> {
        let uri: Uri = url.parse().map_err(|_| HttpError::Url)?;
        let host = uri.authority().ok_or(HttpError::Url)?.as_str().to_owned();
        let secure = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(HttpError::Url),
        };
        let path = uri.path_and_query().map_or("/", |path| path.as_str());
        let mut request = Request::new(Full::<Bytes>::default());
        *request.method_mut() = method;
        *request.uri_mut() = path.parse().map_err(|_| HttpError::Url)?;
        *request.headers_mut() = headers;
        let fixed = request.headers_mut();
        fixed.insert(header::HOST, HeaderValue::from_str(&host).map_err(|_| HttpError::Url)?);
        fixed.insert(header::ACCEPT, HeaderValue::from_static("application/json"));
        let body = match payload {
            Payload::None => Bytes::new(),
            Payload::Json(json) => {
                let kind = HeaderValue::from_static("application/json");
                fixed.insert(header::CONTENT_TYPE, kind);
                json.into()
            }
            Payload::Form(fields) => {
                let kind = HeaderValue::from_static("application/x-www-form-urlencoded");
                fixed.insert(header::CONTENT_TYPE, kind);
                encode_form(&fields).into()
            }
        };
        *request.body_mut() = Full::from(body);
        let target = HttpTarget {
            secure,
            authority: &host,
            connect_timeout: self.config.timeout,
            tls: self.config.tls.clone(),
            proxies: self.config.proxies.clone(),
        };
        let (head, body) = target.send(request).await?.into_parts();
        let max = self.config.max_body;
        let body = Limited::new(body, max).collect().await.map_err(|_| HttpError::Body { max })?;
        Ok(HttpResponse { status: head.status, body: body.to_bytes() })
    }
}

/// Encodes form fields as `a=b&c=d`, escaped.
pub fn encode_form(fields: &[(&'static str, String)]) -> String {
    let mut text = String::new();
    for (name, value) in fields {
        if !text.is_empty() {
            text.push('&');
        }
        text.push_str(name);
        text.push('=');
        text.extend(escape(value));
    }
    text
}
