//! HTTP/1.1: one request over a connection of its own.
//!
//! There is no pool, no cookie, and no redirect is followed, so that a credential goes nowhere but
//! where it was sent. Up to TLS, HTTP and a websocket are dialled the same way. Through a proxy, https
//! takes a tunnel; a request in clear is sent to the proxy itself.

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
use crate::proxy::Proxies;

/// Where a request goes.
#[derive(Debug, Clone)]
pub struct HttpTarget<'a> {
    /// Whether TLS is spoken.
    pub secure: bool,
    /// `HOST` or `HOST:PORT`; the brackets of an IPv6 address included.
    pub authority: &'a str,
    /// For the name lookup, TCP and TLS together.
    pub connect_timeout: Duration,
    /// How to speak TLS; the system's root certificates where `None`.
    pub tls: Option<Arc<ClientConfig>>,
    /// Proxies to go through.
    pub proxies: Arc<Proxies>,
}

/// Why there is no answer. Shows neither body nor headers nor path.
#[derive(Debug, thiserror::Error)]
pub enum ExchangeError {
    /// There is no connection.
    #[error(transparent)]
    Dial(#[from] DialError),
    /// The path cannot be asked of a proxy.
    #[error("the proxy cannot be asked for this path")]
    Uri,
    /// The exchange broke off.
    #[error("the HTTP exchange failed: {0}")]
    Http(#[from] hyper::Error),
}

impl HttpTarget<'_> {
    /// Sends a request as it is: with a path for its URI, and with every header it needs. The
    /// connection ends with the body of the response, or when that is dropped.
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
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        Ok(sender.send_request(request).await?)
    }
}
