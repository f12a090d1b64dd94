//! The HTTP proxy: absolute-form and origin-form requests, CONNECT, upgrades. Every request of a
//! connection is judged on its own.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use http::{Method, Request, Response, StatusCode, Uri};
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper::upgrade::Upgraded;
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tracing::debug;

use crate::audit::About;
use crate::decide::{Destination, Finding, Mode, Protocol, Refusal, Subject};
use crate::exchange::{ForwardError, Sender, pass_on};
use crate::idle::Idle;
use crate::mitm::{self, Opened};
use crate::proxy::{Client, Shared};
use crate::target::Target;
use crate::tunnel;

pub(crate) type Body = Either<Full<Bytes>, Incoming>;

/// Serves the requests of one connection until it ends.
pub(crate) async fn serve<S>(shared: Arc<Shared>, stream: S, client: Client)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let limits = &shared.limits;
    let stream = TokioIo::new(Idle::new(stream, limits.idle_timeout));
    let mut builder = hyper::server::conn::http1::Builder::new();
    builder
        .preserve_header_case(true)
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_timeout)
        .max_buf_size(limits.http_buffer);
    let service = hyper::service::service_fn(move |request| {
        let (shared, client) = (shared.clone(), client.clone());
        async move { Ok::<_, Infallible>(handle(&shared, request, &client).await) }
    });
    if let Err(error) = builder.serve_connection(stream, service).with_upgrades().await {
        debug!(%error, "connection to the HTTP proxy ended");
    }
}

async fn handle(
    shared: &Arc<Shared>,
    request: Request<Incoming>,
    client: &Client,
) -> Response<Body> {
    if request.method() == Method::CONNECT {
        return connect(shared, request, client).await;
    }
    let target = match Target::of_request(request.uri(), request.headers()) {
        Ok(target) => target,
        Err(error) => return text(StatusCode::BAD_REQUEST, &error.to_string()),
    };
    let method = request.method().as_str().to_owned();
    if request.headers().contains_key("x-unix-socket") {
        let (method, client) = (Some(method.as_str()), client.address());
        let about = About { protocol: Protocol::Http, host: None, port: 0, method, client };
        shared.judge.report(&Finding::unix_socket(), &about);
        return text(StatusCode::NOT_IMPLEMENTED, "unix sockets unsupported");
    }
    let subject = Subject {
        protocol: Protocol::Http,
        host: &target.host,
        port: target.port,
        method: Some(&method),
        opened: false,
    };
    let destination = match shared.judge(subject, client).await {
        Ok(destination) => destination,
        Err(refusal) => return blocked(&target, Protocol::Http, &refusal),
    };
    forward(shared, request, client, &target, &destination).await.unwrap_or_else(|error| {
        debug!(%error, "upstream failure");
        text(StatusCode::BAD_GATEWAY, "upstream failure")
    })
}

/// CONNECT: the tunnel is promised before its other end is there, as clients expect.
async fn connect(
    shared: &Arc<Shared>,
    request: Request<Incoming>,
    client: &Client,
) -> Response<Body> {
    let target = match Target::of_connect(request.uri()) {
        Ok(target) => target,
        Err(error) => return text(StatusCode::BAD_REQUEST, &error.to_string()),
    };
    let subject = Subject {
        protocol: Protocol::HttpsConnect,
        host: &target.host,
        port: target.port,
        method: Some("CONNECT"),
        opened: shared.mitm_for(&target.host, target.port).is_some(),
    };
    let destination = match shared.judge(subject, client).await {
        Ok(destination) => destination,
        Err(refusal) => {
            let mut response = text(StatusCode::FORBIDDEN, refusal.reason.message());
            let kind = HeaderValue::from_static(refusal.reason.kind());
            response.headers_mut().insert(PROXY_ERROR, kind);
            return response;
        }
    };
    let (owner, client) = (shared.clone(), client.clone());
    shared.spawn_for(&client.clone(), async move {
        // The client's place among the connections is kept until the tunnel ends.
        let client = client;
        let Ok(upgraded) = hyper::upgrade::on(request).await else { return };
        let stream = TokioIo::new(upgraded);
        if let Some(mitm) = owner.mitm_for(&target.host, target.port) {
            let protocol = Protocol::HttpsConnect;
            let opened = Opened { target, destination, protocol, client };
            return mitm::serve(owner, mitm, stream, opened).await;
        }
        match owner.dialer.tunnel(&target.host, target.port, &destination).await {
            Ok(mut upstream) => {
                let _ = join(stream.into_inner(), &mut upstream).await;
            }
            Err(error) => debug!(%error, "tunnel target unreachable"),
        }
    });
    Response::new(Either::Left(Full::default()))
}

/// Joins a tunnel with its target.
async fn join(client: Upgraded, target: &mut TcpStream) -> io::Result<()> {
    match client.downcast::<TokioIo<Idle<TcpStream>>>() {
        Ok(parts) => {
            target.write_all(&parts.read_buf).await?;
            tunnel::join(&mut parts.io.into_inner(), target).await
        }
        Err(client) => tunnel::join(&mut TokioIo::new(client), target).await,
    }
}

/// Sends a judged request on, and its answer back.
async fn forward(
    shared: &Arc<Shared>,
    mut request: Request<Incoming>,
    client: &Client,
    target: &Target,
    destination: &Destination,
) -> Result<Response<Body>, ForwardError> {
    let route = shared.dialer.http(&target.host, target.port, destination).await?;
    let mut sender = Sender::http1(shared, route.stream).await?;
    // The rest of the request stays as it is: hyper keeps the case of header names in it.
    *request.uri_mut() = match &route.proxy {
        Some(_) => absolute_form(request.uri(), target)?,
        None => origin_form(request.uri())?,
    };
    // An upgraded connection could carry anything, which limited mode must not pass.
    let upgrades = shared.judge.mode() == Mode::Full;
    let authorization = route.proxy.and_then(|proxy| proxy.authorization);
    let host = target.host_header();
    pass_on(
        shared,
        request,
        &host,
        authorization.as_deref().map(String::as_str),
        upgrades,
        client,
        &mut sender,
    )
    .await
}

fn origin_form(uri: &Uri) -> Result<Uri, http::uri::InvalidUri> {
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    if path.is_empty() { Ok(Uri::from_static("/")) } else { path.parse() }
}

fn absolute_form(uri: &Uri, target: &Target) -> Result<Uri, http::uri::InvalidUri> {
    let path = uri.path_and_query().map_or("/", |path| path.as_str());
    let path = if path.starts_with('/') { path } else { "/" };
    format!("http://{}{path}", target.host_header()).parse()
}

const PROXY_ERROR: HeaderName = HeaderName::from_static("x-proxy-error");

pub(crate) fn text(status: StatusCode, message: &str) -> Response<Body> {
    let mut response = Response::new(Either::Left(Full::from(message.to_owned())));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    response
}

/// The body of a refusal, its members in the order of the protocol.
#[derive(Serialize)]
struct Blocked<'a> {
    status: &'static str,
    host: &'a str,
    reason: &'a str,
    decision: &'static str,
    source: &'static str,
    protocol: &'static str,
    port: u16,
    message: &'static str,
}

pub(crate) fn blocked(target: &Target, protocol: Protocol, refusal: &Refusal) -> Response<Body> {
    let body = Blocked {
        status: "blocked",
        host: target.host.as_str(),
        reason: refusal.reason.as_str(),
        decision: refusal.outcome.as_str(),
        source: refusal.source.as_str(),
        protocol: protocol.as_str(),
        port: target.port,
        message: refusal.reason.message(),
    };
    let body = serde_json::to_vec(&body).unwrap_or_default();
    let mut response = Response::new(Either::Left(Full::from(body)));
    *response.status_mut() = StatusCode::FORBIDDEN;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(PROXY_ERROR, HeaderValue::from_static(refusal.reason.kind()));
    response
}
