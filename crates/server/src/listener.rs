//! The websocket listener: a socket of any kind, HTTP up to the upgrade, the protocol after it.
//!
//! Invariant: what a peer costs before it has authenticated and initialized is bounded (see `entry`).

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use codex_exec_host::peer;
use codex_exec_host::process::register_descriptor;
use codex_exec_rpc::{
    Connection, NetStream, disable_pacing_on_loopback, websocket_accept, websocket_config,
    websocket_limits,
};
use http_body_util::{Empty, Full};
use hyper::body::Incoming;
use hyper::header::{
    AUTHORIZATION, CONNECTION, HeaderValue, ORIGIN, SEC_WEBSOCKET_ACCEPT, UPGRADE, WWW_AUTHENTICATE,
};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use socket2::{Domain, SockAddr, SockRef, Socket, Type};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_websockets::ServerBuilder;

use crate::auth::{Principal, WebSocketAuth};
use crate::entry::{self, Origin, Pass};
use crate::listen_url::{ListenUrl, VSOCK_LOOPBACK};
use crate::metrics::Refused;
use crate::server::Server;
use crate::service_manager::InheritedSocket;
use crate::socket_file::{self, BACKLOG, SocketFile};
use crate::tls::{Tls, key_digest};

/// Every context id of this machine.
const ANY_CID: u32 = u32::MAX;

/// Accepts websocket connections until the server shuts down.
#[derive(Debug)]
pub struct WebSocketListener {
    socket: AsyncFd<OwnedFd>,
    kind: Kind,
    auth: Arc<WebSocketAuth>,
    /// The file of a Unix socket that this listener made.
    file: Option<SocketFile>,
}

/// What a listener's sockets speak below HTTP, and how their peers are known.
#[derive(Debug, Clone)]
enum Kind {
    Tcp,
    Tls(Arc<Tls>),
    Unix,
    Vsock,
}

impl WebSocketListener {
    /// Listens on TCP at `address`; `auth` decides who may connect.
    pub async fn bind(address: SocketAddr, auth: WebSocketAuth) -> io::Result<Self> {
        Self::new(tcp(address)?, Kind::Tcp, Arc::new(auth), None)
    }

    /// Listens on a Unix socket at `path`, for processes of this user and of root. The file of a server that no
    /// longer listens is replaced; it is removed when the listener is dropped.
    pub fn bind_unix(path: &Path) -> io::Result<Self> {
        let (socket, file) = socket_file::listen(path)?;
        Self::new(socket, Kind::Unix, Arc::default(), Some(file))
    }

    /// Listens on `url`, whose kind is not stdio.
    pub(crate) fn listen(
        url: &ListenUrl,
        auth: &Arc<WebSocketAuth>,
        tls: Option<&Arc<Tls>>,
    ) -> io::Result<Self> {
        match url {
            ListenUrl::WebSocket(address) => {
                Self::new(tcp(*address)?, Kind::Tcp, auth.clone(), None)
            }
            ListenUrl::Tls(address) => {
                let tls = tls.ok_or(io::ErrorKind::InvalidInput)?.clone();
                Self::new(tcp(*address)?, Kind::Tls(tls), auth.clone(), None)
            }
            ListenUrl::Unix(path) => Self::bind_unix(path),
            ListenUrl::Vsock { cid, port } => {
                let socket = Socket::new(Domain::VSOCK, Type::STREAM, None)?;
                socket.bind(&SockAddr::vsock(cid.unwrap_or(ANY_CID), *port))?;
                socket.listen(BACKLOG)?;
                Self::new(socket, Kind::Vsock, auth.clone(), None)
            }
            ListenUrl::Stdio => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Uses a listening socket that the service manager passed. A TCP socket speaks TLS if there is a
    /// certificate, unless it is named `ws`.
    pub(crate) fn inherit(
        inherited: InheritedSocket,
        auth: &Arc<WebSocketAuth>,
        tls: Option<&Arc<Tls>>,
    ) -> io::Result<Self> {
        let invalid = |reason| io::Error::new(io::ErrorKind::InvalidInput, reason);
        let socket = Socket::from(inherited.socket);
        if socket.r#type()? != Type::STREAM || !socket.is_listener()? {
            return Err(invalid("it is not a listening stream socket (a unit needs Accept=no)"));
        }
        let kind = match socket.domain()? {
            Domain::IPV4 | Domain::IPV6 => match tls.filter(|_| inherited.name != "ws") {
                Some(tls) => Kind::Tls(tls.clone()),
                None if inherited.name == "wss" => {
                    return Err(invalid("it is named wss, but there is no --tls-cert"));
                }
                None => Kind::Tcp,
            },
            Domain::UNIX => Kind::Unix,
            Domain::VSOCK => Kind::Vsock,
            _ => return Err(invalid("its address family is not supported")),
        };
        let auth = if matches!(kind, Kind::Unix) { Arc::default() } else { auth.clone() };
        Self::new(socket, kind, auth, None)
    }

    fn new(
        socket: Socket,
        kind: Kind,
        auth: Arc<WebSocketAuth>,
        file: Option<SocketFile>,
    ) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        let socket = register_descriptor(socket.into())?;
        Ok(Self { socket, kind, auth, file })
    }

    /// The bound TCP address, with the port that the system chose for port 0. Fails for other sockets.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        let address = SockRef::from(self.socket.get_ref()).local_addr()?;
        address.as_socket().ok_or_else(|| io::ErrorKind::Unsupported.into())
    }

    /// The address for clients.
    pub fn url(&self) -> io::Result<ListenUrl> {
        let address = SockRef::from(self.socket.get_ref()).local_addr()?;
        let unsupported = || io::Error::from(io::ErrorKind::Unsupported);
        Ok(match &self.kind {
            Kind::Tcp => ListenUrl::WebSocket(address.as_socket().ok_or_else(unsupported)?),
            Kind::Tls(_) => ListenUrl::Tls(address.as_socket().ok_or_else(unsupported)?),
            Kind::Unix => match address.as_pathname() {
                Some(path) => ListenUrl::Unix(std::path::absolute(path)?),
                None => return Err(io::Error::other("the Unix socket has no path")),
            },
            Kind::Vsock => {
                let (cid, port) = address.as_vsock_address().ok_or_else(unsupported)?;
                ListenUrl::Vsock { cid: (cid != ANY_CID).then_some(cid), port }
            }
        })
    }

    /// Whether others than this machine can connect without showing who they are.
    pub(crate) fn is_open_to_others(&self) -> io::Result<bool> {
        let authenticates = match &self.kind {
            Kind::Unix => true,
            Kind::Tls(tls) if tls.authenticates_clients() => true,
            _ => !matches!(*self.auth, WebSocketAuth::Open),
        };
        Ok(!authenticates
            && match self.url()? {
                ListenUrl::WebSocket(address) | ListenUrl::Tls(address) => {
                    !address.ip().to_canonical().is_loopback()
                }
                ListenUrl::Vsock { cid, .. } => cid != Some(VSOCK_LOOPBACK),
                _ => false,
            })
    }

    /// Whether `--ws-auth` applies to it.
    pub(crate) fn checks_tokens(&self) -> bool {
        !matches!(self.kind, Kind::Unix)
    }

    /// The file of its socket, which no sandbox may open.
    pub(crate) fn socket_path(&self) -> Option<PathBuf> {
        if let Some(file) = &self.file {
            return Some(file.path().to_owned());
        }
        SockRef::from(self.socket.get_ref()).local_addr().ok()?.as_pathname().map(Path::to_owned)
    }

    /// Serves incoming connections on the server's lanes. Returns when the server begins to shut down.
    pub async fn serve(self, server: &Server) {
        let gate = server.gate();
        let limit = peer::descriptor_limit();
        let reserved = gate.config().reserved_descriptors.min(limit / 4);
        loop {
            let accepted = tokio::select! {
                accepted = self.accept() => accepted,
                () = server.shutting_down() => return,
            };
            let (socket, origin) = match accepted {
                Ok(accepted) => accepted,
                // Out of descriptors, or the peer has already gone: the next accept may succeed.
                Err(error) => {
                    tracing::warn!(%error, "accept failed");
                    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                    continue;
                }
            };
            // The kernel gives the lowest free number, so all below it are in use.
            let number = usize::try_from(socket.as_raw_fd()).unwrap_or(usize::MAX);
            let entered = match number >= limit - reserved {
                true => Err(entry::Full::Descriptors),
                false => tokio::select! {
                    entered = gate.enter(origin) => entered,
                    () = server.shutting_down() => return,
                },
            };
            match entered {
                Ok(pass) => {
                    let visitor = Visitor {
                        server: server.clone(),
                        auth: self.auth.clone(),
                        kind: self.kind.clone(),
                        pass: Arc::new(pass),
                    };
                    let handshake = visitor.handshake(socket);
                    server.connections().spawn_on(handshake, &server.lanes().next());
                }
                Err(full) => {
                    if !matches!(self.kind, Kind::Tls(_)) {
                        let _ = socket.send(BUSY);
                    }
                    gate.refused(full);
                    server.count_refused(Refused::Limit);
                }
            }
        }
    }

    async fn accept(&self) -> io::Result<(Socket, Origin)> {
        loop {
            let mut ready = self.socket.readable().await?;
            let accepted = ready.try_io(|socket| SockRef::from(socket.get_ref()).accept());
            let Ok(accepted) = accepted else { continue };
            let (socket, address) = accepted?;
            let origin = match self.kind {
                Kind::Tcp | Kind::Tls(_) => {
                    address.as_socket().map_or(Origin::Local, |address| Origin::of(address.ip()))
                }
                Kind::Unix => Origin::Local,
                Kind::Vsock => match address.as_vsock_address() {
                    Some((VSOCK_LOOPBACK, _)) | None => Origin::Local,
                    Some((cid, _)) => Origin::Machine(cid),
                },
            };
            socket.set_nonblocking(true)?;
            return Ok((socket, origin));
        }
    }
}

/// The response to a connection that is closed at once.
const BUSY: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";

fn tcp(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    disable_pacing_on_loopback(&socket, address);
    socket.listen(BACKLOG)?;
    Ok(socket)
}

/// A peer that has not authenticated yet.
struct Visitor {
    server: Server,
    auth: Arc<WebSocketAuth>,
    kind: Kind,
    pass: Arc<Pass>,
}

impl Visitor {
    /// Speaks HTTP on a new connection until it becomes a websocket or closes.
    async fn handshake(self, socket: Socket) {
        let (server, pass) = (self.server.clone(), self.pass.clone());
        tokio::select! {
            () = self.greet(socket) => {}
            () = pass.must_leave() => tracing::debug!("closed a connection without a websocket"),
            () = server.shutting_down() => {}
        }
    }

    async fn greet(self, socket: Socket) {
        let stream = match self.kind {
            Kind::Tcp | Kind::Tls(_) => TcpStream::from_std(socket.into()).map(NetStream::Tcp),
            Kind::Unix | Kind::Vsock => NetStream::from_socket(OwnedFd::from(socket)),
        };
        let stream = match stream {
            Ok(stream) => stream,
            Err(error) => return tracing::warn!(%error, "cannot serve a connection"),
        };
        let (refusal, user) = match &stream {
            NetStream::Tcp(tcp) => {
                let Some(admitted) = self.admit(tcp).await else { return };
                (admitted.err(), None)
            }
            NetStream::Unix(_) if matches!(self.kind, Kind::Vsock) => (None, None),
            NetStream::Unix(unix) => match self.server.host().peers().admit_unix(unix).await {
                Ok(uid) => (None, Some(Principal::User { uid })),
                Err(refusal) => (Some(refusal), None),
            },
        };
        if let Some(refusal) = refusal {
            tracing::warn!("refused a connection: {refusal}");
            self.server.count_refused(Refused::Admission);
        }
        match self.kind.clone() {
            Kind::Tls(tls) => {
                let timeout = self.server.config().handshake_timeout;
                let accepted = tokio::time::timeout(timeout, tls.acceptor().accept(stream)).await;
                let Ok(Ok(stream)) = accepted else {
                    return tracing::debug!("TLS handshake failed");
                };
                let certificates = stream.get_ref().1.peer_certificates();
                let key = certificates.and_then(<[_]>::first).and_then(key_digest);
                if tls.authenticates_clients() && key.is_none() {
                    return tracing::warn!("refused a client whose certificate cannot be read");
                }
                self.speak_http(stream, refusal, user, key).await;
            }
            _ => self.speak_http(stream, refusal, user, None).await,
        }
    }

    /// Sets options of a TCP socket, and looks up which process of this machine is at the other end. `None` if
    /// the peer has already gone.
    async fn admit(&self, socket: &TcpStream) -> Option<Result<(), peer::Refusal>> {
        let peer = socket.peer_addr().ok()?;
        tracing::debug!(%peer, "accepted");
        let admitted = self.server.host().peers().admit(socket).await;
        // Without this, three small messages in a row cost 40 ms each round trip.
        let _ = socket.set_nodelay(true);
        // A lost socket must not lose more output than a process retains.
        let unsent = self.server.config().unsent_bytes;
        if let Err(error) = SockRef::from(socket).set_tcp_notsent_lowat(unsent) {
            tracing::debug!(%error, "cannot set the send buffer size");
        }
        Some(admitted)
    }

    async fn speak_http(
        self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        refusal: Option<peer::Refusal>,
        user: Option<Principal>,
        key: Option<[u8; 32]>,
    ) {
        let timeout = self.server.config().handshake_timeout;
        let service = service_fn(move |request| {
            let response = match refusal {
                Some(refusal) => text(StatusCode::FORBIDDEN, format!("{refusal}\n")),
                None => self.respond(user.as_ref(), key, request),
            };
            async move { Ok::<_, std::convert::Infallible>(response) }
        });
        let http = hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(timeout)
            .max_buf_size(16 << 10)
            .serve_connection(TokioIo::new(stream), service)
            .with_upgrades();
        if let Err(error) = http.await {
            tracing::debug!(%error, "HTTP connection ended");
        }
    }

    fn respond(
        &self,
        user: Option<&Principal>,
        key: Option<[u8; 32]>,
        mut request: Request<Incoming>,
    ) -> Response<Body> {
        // No page in a browser may reach the server; browsers always send Origin.
        if request.headers().contains_key(ORIGIN) {
            self.server.count_refused(Refused::Origin);
            return text(StatusCode::FORBIDDEN, "requests with an Origin header are refused\n");
        }
        match (request.method(), request.uri().path()) {
            (&Method::GET, "/readyz") if self.server.is_draining() => {
                text(StatusCode::SERVICE_UNAVAILABLE, "draining\n")
            }
            (&Method::GET, "/readyz") => text(StatusCode::OK, "ok\n"),
            (&Method::GET, "/") => {
                let authorization = request.headers().get(AUTHORIZATION);
                let authorization = authorization.and_then(|value| value.to_str().ok());
                let principal = match user {
                    Some(user) => Some(user.clone()),
                    None => self.auth.authenticate(authorization),
                };
                let Some(principal) = principal else {
                    self.server.count_refused(Refused::Token);
                    let mut response =
                        text(StatusCode::UNAUTHORIZED, "a bearer token is required\n");
                    let bearer = HeaderValue::from_static("Bearer");
                    response.headers_mut().insert(WWW_AUTHENTICATE, bearer);
                    return response;
                };
                let principal = match key {
                    Some(key) => Principal::Certified { key, token: Box::new(principal) },
                    None => principal,
                };
                let Some(accept) = websocket_accept(request.headers()) else {
                    return text(
                        StatusCode::UPGRADE_REQUIRED,
                        "this is an exec-server; connect to it with a websocket\n",
                    );
                };
                let upgrade = hyper::upgrade::on(&mut request);
                let (server, pass) = (self.server.clone(), self.pass.clone());
                tokio::spawn(upgraded(server, principal, pass, upgrade));
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
}

type Body = http_body_util::Either<Empty<Bytes>, Full<Bytes>>;

async fn upgraded(
    server: Server,
    principal: Principal,
    pass: Arc<Pass>,
    upgrade: hyper::upgrade::OnUpgrade,
) {
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
            server.serve_as(principal, Some(pass), connection);
        }
        Err(error) => tracing::debug!(%error, "upgrade failed"),
    }
}

fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<Body> {
    let mut response = Response::new(Body::Right(Full::new(body.into())));
    *response.status_mut() = status;
    response
}
