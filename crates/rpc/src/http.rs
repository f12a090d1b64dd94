//! HTTP/1.1: one request per connection.
//!
//! The client has no pool and no cookies, and follows no redirect, so a credential reaches only the host it
//! was sent to. HTTP and websockets dial the same way up to TLS. Through a proxy, https takes a tunnel; a
//! request without TLS goes to the proxy, which forwards it.

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response, header};
use hyper::body::{Body, Incoming};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio_rustls::rustls::ClientConfig;
use tokio_websockets::MaybeTlsStream;

use crate::dial::{DialError, WebsocketDial};
use crate::head_limit::{HeadLimit, HeadProgress, MAX_HEAD_BYTES, MAX_INTERIM_RESPONSES};
use crate::proxy::Proxies;

/// Where a request goes.
#[derive(Debug, Clone)]
pub struct HttpTarget<'a> {
    /// Whether to use TLS.
    pub secure: bool,
    /// `HOST` or `HOST:PORT`; the brackets of an IPv6 address included.
    pub authority: &'a str,
    /// Timeout for the name lookup, TCP and TLS together.
    pub connect_timeout: Duration,
    /// TLS configuration; `None` trusts the system's root certificates.
    pub tls: Option<Arc<ClientConfig>>,
    /// Proxies to go through.
    pub proxies: Arc<Proxies>,
}

/// Why there is no response. Shows neither body nor headers nor path.
#[derive(Debug, thiserror::Error)]
pub enum ExchangeError {
    /// The connection failed.
    #[error(transparent)]
    Dial(#[from] DialError),
    /// The path cannot be part of an absolute URI, which a proxy needs.
    #[error("the path is not valid in a request to a proxy")]
    Uri,
    /// The head of the response, interim responses included, is too long.
    #[error(
        "the server sent {MAX_HEAD_BYTES} bytes or {MAX_INTERIM_RESPONSES} interim responses, and no \
         response yet"
    )]
    Head,
    /// The exchange ended early or was not HTTP.
    #[error("the HTTP exchange failed: {0}")]
    Http(#[from] hyper::Error),
}

impl HttpTarget<'_> {
    /// Sends a request as it is: its URI must be a path, and it must have every header it needs. The
    /// connection closes with the response's body, or when that is dropped.
    pub async fn send<B>(self, mut request: Request<B>) -> Result<Response<Incoming>, ExchangeError>
    where
        B: Body<Data: Send, Error: Into<Box<dyn Error + Send + Sync>>> + Send + 'static,
    {
        let scheme = if self.secure { "wss" } else { "ws" };
        let dial = WebsocketDial {
            timeout: self.connect_timeout,
            tls: self.tls,
            proxies: self.proxies,
            ..WebsocketDial::new(format!("{scheme}://{}", self.authority))
        };
        let stream = match dial.open_forwarding().await? {
            None => dial.open_stream().await?,
            Some((stream, authorization)) => {
                let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
                let uri = format!("http://{}{path}", self.authority).parse();
                *request.uri_mut() = uri.map_err(|_| ExchangeError::Uri)?;
                if let Some(value) = authorization {
                    request.headers_mut().insert(header::PROXY_AUTHORIZATION, value);
                }
                MaybeTlsStream::Plain(stream)
            }
        };
        let progress = Arc::new(HeadProgress::default());
        let stream = HeadLimit::new(stream, progress.clone());
        let counted = progress.clone();
        hyper::ext::on_informational(&mut request, move |_| counted.count_interim());
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        let response = sender.send_request(request).await;
        progress.set_received();
        response.map_err(|error| match progress.is_exceeded() {
            true => ExchangeError::Head,
            false => error.into(),
        })
    }
}
