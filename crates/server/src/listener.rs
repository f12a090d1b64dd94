//! The websocket listener: HTTP up to the upgrade, the protocol after it.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use codex_exec_rpc::{
    Connection, disable_pacing_on_loopback, websocket_accept, websocket_config, websocket_limits,
};
use http_body_util::{Empty, Full};
use hyper::body::Incoming;
use hyper::header::{
    AUTHORIZATION, CONNECTION, HeaderValue, ORIGIN, SEC_WEBSOCKET_ACCEPT, UPGRADE, WWW_AUTHENTICATE,
};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio_websockets::ServerBuilder;

use crate::auth::{Principal, WebSocketAuth};
use crate::metrics::Refused;
use crate::server::Server;

/// Accepts websocket connections until the server shuts down.
#[derive(Debug)]
pub struct WebSocketListener {
    listener: TcpListener,
    auth: Arc<WebSocketAuth>,
}

impl WebSocketListener {
    /// Binds `address`; `auth` decides who may connect.
    pub async fn bind(address: SocketAddr, auth: WebSocketAuth) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        disable_pacing_on_loopback(&listener, address);
        Ok(Self { listener, auth: Arc::new(auth) })
    }

    /// The bound address, with the port that the system chose for port 0.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves incoming connections on the server's lanes. Returns when the server begins to shut down.
    pub async fn serve(self, server: &Server) {
        loop {
            let accepted = tokio::select! {
                accepted = self.listener.accept() => accepted,
                () = server.shutting_down() => return,
            };
            match accepted.and_then(|(socket, peer)| Ok((socket.into_std()?, peer))) {
                Ok((socket, peer)) => {
                    tracing::debug!(%peer, "accepted");
                    let (server, auth) = (server.clone(), self.auth.clone());
                    let handshake = handshake(server.clone(), auth, socket);
                    server.connections().spawn_on(handshake, &server.lanes().next());
                }
                // Out of descriptors, or the peer has already gone: the next accept may succeed.
                Err(error) => {
                    tracing::warn!(%error, "accept failed");
                    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                }
            }
        }
    }
}

/// Speaks HTTP on a new connection until it becomes a websocket or closes.
async fn handshake(server: Server, auth: Arc<WebSocketAuth>, socket: std::net::TcpStream) {
    let socket = match TcpStream::from_std(socket) {
        Ok(socket) => socket,
        Err(error) => return tracing::warn!(%error, "cannot serve a connection"),
    };
    let refusal = match (socket.local_addr(), socket.peer_addr()) {
        (Ok(local), Ok(peer)) => {
            let admitted = server.host().peers().admit(local, peer).await;
            admitted
                .inspect_err(|refusal| {
                    tracing::warn!(%peer, "refused: {refusal}");
                    refused(&server, Refused::Admission);
                })
                .err()
        }
        // The peer has already gone.
        _ => return,
    };
    // Without this, three small messages in a row cost 40 ms each round trip.
    let _ = socket.set_nodelay(true);
    // A lost socket must not lose more output than a process retains.
    let unsent = server.config().unsent_bytes;
    if let Err(error) = socket2::SockRef::from(&socket).set_tcp_notsent_lowat(unsent) {
        tracing::debug!(%error, "cannot set the send buffer size");
    }
    let timeout = server.config().handshake_timeout;
    let service = {
        let server = server.clone();
        service_fn(move |request| {
            let response = match refusal {
                Some(refusal) => text(StatusCode::FORBIDDEN, format!("{refusal}\n")),
                None => respond(&server, &auth, request),
            };
            async move { Ok::<_, std::convert::Infallible>(response) }
        })
    };
    let http = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(timeout)
        .max_buf_size(16 << 10)
        .serve_connection(TokioIo::new(socket), service)
        .with_upgrades();
    tokio::select! {
        result = http => if let Err(error) = result {
            tracing::debug!(%error, "HTTP connection ended");
        },
        () = server.shutting_down() => {}
    }
}

fn refused(server: &Server, why: Refused) {
    if let Some(metrics) = server.metrics() {
        metrics.refused(why);
    }
}

type Body = http_body_util::Either<Empty<Bytes>, Full<Bytes>>;

fn respond(
    server: &Server,
    auth: &WebSocketAuth,
    mut request: Request<Incoming>,
) -> Response<Body> {
    // No page in a browser may reach the server; browsers always send Origin.
    if request.headers().contains_key(ORIGIN) {
        refused(server, Refused::Origin);
        return text(StatusCode::FORBIDDEN, "requests with an Origin header are refused\n");
    }
    match (request.method(), request.uri().path()) {
        (&Method::GET, "/readyz") => text(StatusCode::OK, "ok\n"),
        (&Method::GET, "/") => {
            let authorization = request.headers().get(AUTHORIZATION);
            let authorization = authorization.and_then(|value| value.to_str().ok());
            let Some(principal) = auth.authenticate(authorization) else {
                refused(server, Refused::Token);
                let mut response = text(StatusCode::UNAUTHORIZED, "a bearer token is required\n");
                response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
                return response;
            };
            let Some(accept) = websocket_accept(request.headers()) else {
                return text(
                    StatusCode::UPGRADE_REQUIRED,
                    "this is an exec-server; connect to it with a websocket\n",
                );
            };
            let upgrade = hyper::upgrade::on(&mut request);
            tokio::spawn(upgraded(server.clone(), principal, upgrade));
            let mut response = Response::new(Body::Left(Empty::new()));
            *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
            let headers = response.headers_mut();
            headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
            headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
            headers.insert(SEC_WEBSOCKET_ACCEPT, accept);
            response
        }
        _ => text(StatusCode::NOT_FOUND, "not found; GET / upgrades to a websocket\n"),
    }
}

async fn upgraded(server: Server, principal: Principal, upgrade: hyper::upgrade::OnUpgrade) {
    match upgrade.await {
        Ok(io) => {
            let config = &server.config().connection;
            let longest = config.message_bytes + config.oversize_slack;
            let (io, meter) = server.message_budget().meter(TokioIo::new(io), longest);
            meter.limit(server.config().first_message_bytes);
            let socket = ServerBuilder::new()
                .config(websocket_config())
                .limits(websocket_limits(config))
                .serve(io);
            let connection = Connection::metered_websocket(socket, meter, config);
            server.serve_as(principal, connection);
        }
        Err(error) => tracing::debug!(%error, "upgrade failed"),
    }
}

fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<Body> {
    let mut response = Response::new(Body::Right(Full::new(body.into())));
    *response.status_mut() = status;
    response
}
