//! Asking a registry who is there.

use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::header::{AUTHORIZATION, HOST, HeaderValue};
use hyper::{Method, Request, Uri};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::api::{EnvironmentStatus, ErrorAnswer, ListAnswer};
use crate::secret::Secret;
use crate::tls::{self, TlsError};

/// How long an answer may take.
const TIMEOUT: Duration = Duration::from_secs(30);
/// The longest answer.
const MAX_ANSWER: usize = 64 << 20;

/// A registry at some address, and a token for it.
#[derive(Debug)]
pub struct RegistryClient {
    base: Base,
    token: Secret,
    tls: Option<Tls>,
}

#[derive(Debug)]
struct Base {
    host: String,
    port: u16,
    authority: String,
    path: String,
}

struct Tls(TlsConnector);

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

/// Why a registry could not be asked, or what it answered.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The address is none.
    #[error("a registry url looks like https://rendezvous.example.com")]
    Url,
    /// The token cannot be sent.
    #[error("the token has characters that no token has")]
    Token,
    /// No TLS.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// It cannot be reached.
    #[error("cannot reach the registry")]
    Unreachable(#[source] std::io::Error),
    /// It does not speak http.
    #[error("the registry broke off")]
    Http(#[from] hyper::Error),
    /// It takes too long.
    #[error("the registry did not answer in time")]
    Timeout,
    /// It said no.
    #[error("the registry answered {status}: {message} ({code})")]
    Refused {
        /// The status of http.
        status: u16,
        /// A word for programs.
        code: String,
        /// A sentence for people.
        message: String,
    },
    /// It said something else.
    #[error(
        "the registry's answer ({status}) cannot be understood; is the url that of a registry?"
    )]
    Answer {
        /// The status of http.
        status: u16,
    },
}

impl RegistryClient {
    /// A registry; `authorities` is a PEM file in place of the system's.
    pub fn new(url: &str, token: Secret, authorities: Option<&Path>) -> Result<Self, ClientError> {
        let uri: Uri = url.trim_end_matches('/').parse().map_err(|_| ClientError::Url)?;
        let authority = uri.authority().ok_or(ClientError::Url)?;
        let (tls, port) = match uri.scheme_str() {
            Some("https") => (Some(Tls(tls::connector(authorities)?)), 443),
            Some("http") => (None, 80),
            _ => return Err(ClientError::Url),
        };
        let base = Base {
            host: authority.host().trim_matches(['[', ']']).to_owned(),
            port: authority.port_u16().unwrap_or(port),
            authority: authority.as_str().to_owned(),
            path: uri.path().trim_end_matches('/').to_owned(),
        };
        Ok(Self { base, token, tls })
    }

    /// All environments that the token covers.
    pub async fn list(&self) -> Result<Vec<EnvironmentStatus>, ClientError> {
        let answer: ListAnswer = self.call(Method::GET, "/cloud/environments").await?;
        Ok(answer.environments)
    }

    /// One environment.
    pub async fn show(&self, environment: &str) -> Result<EnvironmentStatus, ClientError> {
        self.call(Method::GET, &path(environment)).await
    }

    /// Forgets an environment and ends what runs there.
    pub async fn remove(&self, environment: &str) -> Result<(), ClientError> {
        let _: serde_json::Value = self.call(Method::DELETE, &path(environment)).await?;
        Ok(())
    }

    async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
    ) -> Result<T, ClientError> {
        tokio::time::timeout(TIMEOUT, self.exchange(method, path))
            .await
            .map_err(|_| ClientError::Timeout)?
    }

    async fn exchange<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
    ) -> Result<T, ClientError> {
        let mut bearer = HeaderValue::from_str(&format!("Bearer {}", self.token.expose()))
            .map_err(|_| ClientError::Token)?;
        bearer.set_sensitive(true);
        let request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.base.path))
            .header(HOST, &self.base.authority)
            .header(AUTHORIZATION, bearer)
            .body(Empty::<Bytes>::new())
            .map_err(|_| ClientError::Url)?;
        let address = (self.base.host.as_str(), self.base.port);
        let socket = TcpStream::connect(address).await.map_err(ClientError::Unreachable)?;
        match &self.tls {
            None => converse(socket, request).await,
            Some(Tls(tls)) => {
                let name = ServerName::try_from(self.base.host.clone());
                let name = name.map_err(|_| ClientError::Url)?;
                let socket = tls.connect(name, socket).await.map_err(ClientError::Unreachable)?;
                converse(socket, request).await
            }
        }
    }
}

async fn converse<S, T>(socket: S, request: Request<Empty<Bytes>>) -> Result<T, ClientError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    T: DeserializeOwned,
{
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(socket)).await?;
    let connection = tokio::spawn(connection);
    let answer = sender.send_request(request).await?;
    let status = answer.status();
    let body = Limited::new(answer.into_body(), MAX_ANSWER).collect().await;
    connection.abort();
    let other = ClientError::Answer { status: status.as_u16() };
    let Ok(body) = body else { return Err(other) };
    let body = body.to_bytes();
    if status.is_success() {
        return serde_json::from_slice(&body).map_err(|_| other);
    }
    let answer: ErrorAnswer = serde_json::from_slice(&body).map_err(|_| other)?;
    let shorten = |text: String| text.chars().take(4096).filter(|c| !c.is_control()).collect();
    Err(ClientError::Refused {
        status: status.as_u16(),
        code: shorten(answer.error.code),
        message: shorten(answer.error.message),
    })
}

/// Every byte that is not plainly a name's is escaped, so that an id cannot lead elsewhere.
fn path(environment: &str) -> String {
    use std::fmt::Write as _;
    let mut path = String::from("/cloud/environment/");
    for byte in environment.bytes() {
        if byte.is_ascii_alphanumeric() || b"._~-".contains(&byte) {
            path.push(char::from(byte));
        } else {
            let _ = write!(path, "%{byte:02X}");
        }
    }
    path
}
