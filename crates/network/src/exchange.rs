//! One request to a target and its answer back, over HTTP/1.1 or HTTP/2: headers for the next hop
//! only are removed, upgrades are joined.

use std::sync::Arc;

use http::header::{
    CONNECTION, COOKIE, EXPECT, HOST, HeaderName, HeaderValue, PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderMap, Request, Response, StatusCode, Version};
use http_body_util::Either;
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tracing::debug;

use crate::http::Body;
use crate::proxy::{Client, Shared};
use crate::tunnel;

/// A connection to a target, ready for requests.
pub(crate) enum Sender {
    Http1(http1::SendRequest<Incoming>),
    Http2(http2::SendRequest<Incoming>),
}

/// Why a request could not be passed on. Shown in the log only.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ForwardError {
    #[error("cannot connect: {0}")]
    Connect(#[from] std::io::Error),
    #[error(transparent)]
    Exchange(#[from] hyper::Error),
    #[error(transparent)]
    Uri(#[from] http::uri::InvalidUri),
    #[error(transparent)]
    UriParts(#[from] http::uri::InvalidUriParts),
    #[error(transparent)]
    Header(#[from] http::header::InvalidHeaderValue),
    #[error("the target switched protocols without being asked")]
    UnaskedUpgrade,
}

/// Runs the tasks of HTTP/2 connections, so that they end with the proxy.
#[derive(Clone)]
pub(crate) struct TaskExecutor(pub Arc<Shared>);

impl<F> hyper::rt::Executor<F> for TaskExecutor
where
    F: Future + Send + 'static,
{
    fn execute(&self, task: F) {
        self.0.spawn(async move {
            task.await;
        });
    }
}

impl Sender {
    pub(crate) async fn http1<S>(shared: &Arc<Shared>, stream: S) -> Result<Self, ForwardError>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let mut builder = http1::Builder::new();
        builder.preserve_header_case(true).max_buf_size(shared.limits.http_buffer);
        let (sender, connection) = builder.handshake(TokioIo::new(stream)).await?;
        shared.spawn(async move {
            if let Err(error) = connection.with_upgrades().await {
                debug!(%error, "connection to the target ended");
            }
        });
        Ok(Self::Http1(sender))
    }

    pub(crate) async fn http2<S>(shared: &Arc<Shared>, stream: S) -> Result<Self, ForwardError>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let builder = http2::Builder::new(TaskExecutor(shared.clone()));
        let (sender, connection) = builder.handshake(TokioIo::new(stream)).await?;
        shared.spawn(async move {
            if let Err(error) = connection.await {
                debug!(%error, "connection to the target ended");
            }
        });
        Ok(Self::Http2(sender))
    }

    /// Whether another request can be sent now.
    pub(crate) fn is_usable(&self) -> bool {
        match self {
            Self::Http1(sender) => sender.is_ready(),
            Self::Http2(sender) => sender.is_ready(),
        }
    }
}

/// Sends a request whose URI is in the form that the target wants. `host`: the value of `Host` if the
/// request has none. `proxy_authorization`: for a proxy that the connection leads to. `upgrades`: whether it may become something else than HTTP.
pub(crate) async fn pass_on(
    shared: &Arc<Shared>,
    mut request: Request<Incoming>,
    host: &str,
    proxy_authorization: Option<&str>,
    upgrades: bool,
    client: &Client,
    sender: &mut Sender,
) -> Result<Response<Body>, ForwardError> {
    let upgrades = upgrades && matches!(sender, Sender::Http1(_));
    let upgrade = requested_upgrade(request.headers()).filter(|_| upgrades);
    let client_side = upgrade.is_some().then(|| hyper::upgrade::on(&mut request));
    let headers = request.headers_mut();
    let trailers = headers.get(TE).is_some_and(|value| value == "trailers");
    remove_hop_headers(headers);
    join_cookies(headers);
    if let Some(authorization) = proxy_authorization {
        let mut value = HeaderValue::try_from(authorization)?;
        value.set_sensitive(true);
        headers.insert(PROXY_AUTHORIZATION, value);
    }
    let mut response = match sender {
        Sender::Http1(sender) => {
            if !headers.contains_key(HOST) {
                headers.insert(HOST, HeaderValue::try_from(host)?);
            }
            if let Some(protocol) = &upgrade {
                headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
                headers.insert(UPGRADE, protocol.clone());
            }
            *request.version_mut() = Version::HTTP_11;
            sender.send_request(request).await?
        }
        Sender::Http2(sender) => {
            headers.remove(HOST);
            if trailers {
                headers.insert(TE, HeaderValue::from_static("trailers"));
            }
            *request.version_mut() = Version::HTTP_2;
            sender.send_request(request).await?
        }
    };
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        let client_side = client_side.ok_or(ForwardError::UnaskedUpgrade)?;
        let target_side = hyper::upgrade::on(&mut response);
        let client = client.clone();
        shared.spawn_for(&client.clone(), async move {
            let _client = client;
            let (Ok(near), Ok(far)) = (client_side.await, target_side.await) else { return };
            let _ = tunnel::copy(&mut TokioIo::new(near), &mut TokioIo::new(far)).await;
        });
        // The headers that make it an upgrade are the target's own.
        return Ok(response.map(Either::Right));
    }
    remove_hop_headers(response.headers_mut());
    Ok(response.map(Either::Right))
}

const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");

/// Removes what is meant for the next hop only: the known names, and those that `Connection` lists.
fn remove_hop_headers(headers: &mut HeaderMap) {
    let listed: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        // The target is not the client's to take out.
        .filter(|name| *name != HOST)
        .collect();
    for name in listed {
        headers.remove(name);
    }
    for name in [
        CONNECTION,
        PROXY_CONNECTION,
        KEEP_ALIVE,
        PROXY_AUTHENTICATE,
        PROXY_AUTHORIZATION,
        TE,
        TRAILER,
        TRANSFER_ENCODING,
        UPGRADE,
        // Answered by this proxy as soon as the body is read.
        EXPECT,
    ] {
        headers.remove(name);
    }
}

/// HTTP/2 may split cookies over several headers, HTTP/1.1 may not.
fn join_cookies(headers: &mut HeaderMap) {
    let cookies: Vec<_> = headers.get_all(COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if cookies.len() > 1
        && let Ok(joined) = HeaderValue::from_bytes(&cookies.join(&b"; "[..]))
    {
        headers.insert(COOKIE, joined);
    }
}

/// The protocol that the client wants to switch to.
fn requested_upgrade(headers: &HeaderMap) -> Option<HeaderValue> {
    let asked = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|name| name.trim().eq_ignore_ascii_case("upgrade"));
    headers.get(UPGRADE).filter(|_| asked).cloned()
}
