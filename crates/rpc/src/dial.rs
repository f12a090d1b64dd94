//! Dialling out: a `ws://`, `wss://`, `unix:` or `vsock:` URL becomes a [`Connection`].
//!
//! Invariant: neither errors nor `Debug` ever show the bearer token, nor a password, query or
//! fragment of the URL.

use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use http::{HeaderMap, HeaderValue, Uri, header};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpSocket, TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore};
use tokio_websockets::{
    ClientBuilder, Error as WebsocketError, Limits, MaybeTlsStream, WebSocketStream, upgrade,
};

use crate::connection::{Connection, ConnectionConfig};
use crate::loopback::disable_pacing_on_loopback;
use crate::net_stream::NetStream;
use crate::proxy::{Proxies, Proxy};
use crate::socket::websocket_config;
use crate::tls::{self, TlsError};
use crate::websocket::websocket_limits;

/// The variable with the name of a PEM file: certificate authorities to trust besides the system's.
const CA_VARIABLE: &str = "CODEX_CA_CERTIFICATE";

/// A non-blocking connection is being made.
const EINPROGRESS: i32 = rustix::io::Errno::INPROGRESS.raw_os_error();

/// Where to dial, and how.
#[derive(Clone)]
pub struct WebsocketDial {
    /// `ws://HOST:PORT/…`, `wss://HOST/…`, `unix:PATH` or `vsock:CID:PORT`.
    pub url: String,
    /// Sent as `Authorization: Bearer …` on the upgrade.
    pub bearer_token: Option<String>,
    /// For the name lookup, TCP, TLS and the upgrade together. Default 10 s.
    pub timeout: Duration,
    /// `SO_RCVBUF` of the socket, in bytes; `None` leaves it to the system. A client requests again
    /// what was in this buffer when a connection died, so keep it well below what the peer retains.
    /// Default 1 MiB.
    pub receive_buffer: Option<u32>,
    /// TLS configuration; `None` trusts the system's root certificates.
    pub tls: Option<Arc<ClientConfig>>,
    /// Proxies to go through, by a tunnel. Default none.
    pub proxies: Arc<Proxies>,
    /// Further headers of the upgrade. Default none.
    pub headers: HeaderMap,
}

impl WebsocketDial {
    /// Dials `url` without a token, with the default limits.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            bearer_token: None,
            timeout: Duration::from_secs(10),
            receive_buffer: Some(1 << 20),
            tls: None,
            proxies: Proxies::none(),
            headers: HeaderMap::new(),
        }
    }

    /// The URL without user, password, query and fragment, for logs and errors.
    pub fn redacted_url(&self) -> String {
        if local_address(&self.url).is_some() {
            return self.url.clone();
        }
        let end = self.url.find(['?', '#']).unwrap_or(self.url.len());
        let url = &self.url[..end];
        let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
        let authority = rest.find('/').unwrap_or(rest.len());
        let host = rest[..authority].rfind('@').map_or(0, |at| at + 1);
        format!("{scheme}://{}", &rest[host..])
    }
}

impl fmt::Debug for WebsocketDial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WebsocketDial")
            .field("url", &self.redacted_url())
            .field("bearer_token", &self.bearer_token.as_ref().map(|_| "…"))
            .field("timeout", &self.timeout)
            .field("receive_buffer", &self.receive_buffer)
            .finish_non_exhaustive()
    }
}

/// Why dialling failed.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// The URL is not a websocket URL.
    #[error(
        "invalid websocket URL `{url}` ({reason}); expected ws://HOST:PORT, wss://HOST, unix:PATH or \
         vsock:CID:PORT"
    )]
    Url {
        /// The URL, [redacted](WebsocketDial::redacted_url).
        url: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The token cannot be sent in a header.
    #[error(
        "the bearer token contains characters that an HTTP header cannot carry; check its source"
    )]
    Token,
    /// The host name does not resolve.
    #[error("cannot resolve host `{host}`: {source}; check the name and the network")]
    Resolve {
        /// The host of the URL.
        host: String,
        /// The resolver's error.
        source: io::Error,
    },
    /// No TCP connection.
    #[error("cannot reach {address}: {source}; check that the server runs and listens there")]
    Tcp {
        /// The address that was tried last.
        address: String,
        /// The system's error.
        source: io::Error,
    },
    /// The TLS handshake failed.
    #[error(
        "TLS to `{host}` failed: {source}; pass --ca-file or set CODEX_CA_CERTIFICATE to trust your own authority, or \
         use ws:// or http:// for a server without TLS"
    )]
    Tls {
        /// The host of the URL.
        host: String,
        /// The TLS library's error.
        source: io::Error,
    },
    /// The proxy of the environment cannot be used.
    #[error("cannot connect through the proxy {proxy}: {reason}")]
    Proxy {
        /// `HOST:PORT`, or the variable that should name a proxy.
        proxy: String,
        /// What went wrong.
        reason: String,
    },
    /// The server refused the upgrade with status 401 or 403.
    #[error(
        "the server refused the connection (HTTP {status}): the bearer token is missing or wrong"
    )]
    Refused {
        /// 401 or 403.
        status: u16,
    },
    /// The server does not speak websocket.
    #[error("the server at {address} does not speak websocket: {reason}; check the port")]
    NotWebsocket {
        /// `HOST:PORT`.
        address: String,
        /// What it did instead.
        reason: String,
        /// The HTTP status of its response, if there was one.
        status: Option<u16>,
    },
    /// No connection within [`WebsocketDial::timeout`].
    #[error("no connection to {address} within {} s; check the address and the network", after.as_secs_f32())]
    Timeout {
        /// `HOST:PORT`.
        address: String,
        /// The timeout.
        after: Duration,
    },
}

impl DialError {
    /// The HTTP status that the server sent instead of a websocket upgrade.
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Refused { status } => Some(*status),
            Self::NotWebsocket { status, .. } => *status,
            _ => None,
        }
    }

    /// Whether dialling again would fail the same way.
    pub fn is_permanent(&self) -> bool {
        matches!(self, Self::Url { .. } | Self::Token | Self::Refused { .. })
    }
}

/// The stream that dialling opens: a transport, or TLS with the server over it.
pub type DialledStream = MaybeTlsStream<TransportStream>;

/// A socket to the server or to a proxy, or TLS to an `https://` proxy.
pub type TransportStream = MaybeTlsStream<NetStream>;

impl Connection {
    /// Dials a websocket and wraps it. The connection is up when this returns.
    pub async fn dial(dial: &WebsocketDial, config: &ConnectionConfig) -> Result<Self, DialError> {
        let socket = dial.connect(websocket_limits(config)).await?;
        Ok(Self::websocket(socket, config))
    }
}

impl WebsocketDial {
    /// Dials and returns the bare websocket, for callers that do not exchange text messages.
    pub async fn connect(
        &self,
        limits: Limits,
    ) -> Result<WebSocketStream<DialledStream>, DialError> {
        let target = Target::parse(self)?;
        self.with_timeout(&target, upgraded(self, &target, limits)).await
    }

    /// Opens TCP, and TLS for `wss`, without the upgrade; plain HTTP starts here too.
    pub async fn open_stream(&self) -> Result<DialledStream, DialError> {
        let target = Target::parse(self)?;
        self.with_timeout(&target, stream(self, &target)).await
    }

    /// Dials the proxy that forwards requests without TLS, if there is one. Returns the value of
    /// `Proxy-Authorization` with it.
    #[cfg(feature = "http-client")]
    pub(crate) async fn open_forwarding(
        &self,
    ) -> Result<Option<(TransportStream, Option<HeaderValue>)>, DialError> {
        let target = Target::parse(self)?;
        match self.proxy_for(&target)? {
            Some(proxy) if !target.tls => {
                let stream = self.with_timeout(&target, to_proxy(self, proxy)).await?;
                Ok(Some((stream, proxy.authorization.clone())))
            }
            _ => Ok(None),
        }
    }

    fn proxy_for(&self, target: &Target) -> Result<Option<&Proxy>, DialError> {
        if target.local.is_some() {
            return Ok(None);
        }
        self.proxies.for_host(&target.host, target.tls).map_err(|variable| DialError::Proxy {
            proxy: variable.to_owned(),
            reason: "its value is not a proxy URL; expected http://HOST:PORT".to_owned(),
        })
    }

    async fn with_timeout<T>(
        &self,
        target: &Target,
        work: impl Future<Output = Result<T, DialError>>,
    ) -> Result<T, DialError> {
        match tokio::time::timeout(self.timeout, work).await {
            Ok(result) => result,
            Err(_) => Err(DialError::Timeout { address: target.address(), after: self.timeout }),
        }
    }
}

/// A TLS configuration that trusts exactly these certificates.
pub fn tls_from_roots(
    roots: impl IntoIterator<Item = CertificateDer<'static>>,
) -> Result<Arc<ClientConfig>, rustls::Error> {
    Ok(Arc::new(client_config(roots)?.with_no_client_auth()))
}

/// A TLS configuration that trusts what the system and `CODEX_CA_CERTIFICATE` name, and shows the server the
/// certificate and its chain in one PEM file, with the key in another.
pub fn tls_with_identity(certificate: &Path, key: &Path) -> Result<Arc<ClientConfig>, String> {
    let chain = tls::certificates(certificate).map_err(|error| error.to_string())?;
    let key = tls::private_key(key).map_err(|error| error.to_string())?;
    let roots = roots_with(std::env::var_os(CA_VARIABLE).as_deref())?;
    let builder = client_config(roots).map_err(|error| error.to_string())?;
    let config = builder.with_client_auth_cert(chain, key);
    config.map(Arc::new).map_err(|error| TlsError::unusable(certificate, &error).to_string())
}

fn client_config(
    roots: impl IntoIterator<Item = CertificateDer<'static>>,
) -> Result<rustls::ConfigBuilder<ClientConfig, rustls::client::WantsClientCert>, rustls::Error> {
    let mut store = RootCertStore::empty();
    store.add_parsable_certificates(roots);
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    Ok(builder.with_root_certificates(store))
}

struct Target {
    uri: Uri,
    /// Without the brackets of an IPv6 address.
    host: String,
    port: u16,
    tls: bool,
    /// A socket that is not reached by a host name; then the other members are only for the upgrade.
    local: Option<LocalAddress>,
}

/// A socket without a host name.
enum LocalAddress {
    Unix(PathBuf),
    Vsock { cid: u32, port: u32 },
}

/// The address of a `unix:` or `vsock:` URL; `None` for others.
fn local_address(url: &str) -> Option<Result<LocalAddress, &'static str>> {
    if let Some(path) = url.strip_prefix("unix:") {
        let path = path.strip_prefix("//").unwrap_or(path);
        return Some(match path {
            "" => Err("no path"),
            path => Ok(LocalAddress::Unix(path.into())),
        });
    }
    let parts = url.strip_prefix("vsock:")?.split_once(':');
    let number = |text: &str| text.parse().ok();
    let address = parts.and_then(|(cid, port)| {
        Some(LocalAddress::Vsock { cid: number(cid)?, port: number(port)? })
    });
    Some(address.ok_or("no context id or port"))
}

impl Target {
    fn parse(dial: &WebsocketDial) -> Result<Self, DialError> {
        let bad =
            |reason: &str| DialError::Url { url: dial.redacted_url(), reason: reason.to_owned() };
        if let Some(local) = local_address(&dial.url) {
            let local = Some(local.map_err(bad)?);
            let uri = Uri::from_static("ws://localhost/");
            return Ok(Self { uri, host: "localhost".to_owned(), port: 80, tls: false, local });
        }
        let uri: Uri = dial.url.parse().map_err(|e: http::uri::InvalidUri| bad(&e.to_string()))?;
        let tls = match uri.scheme_str() {
            Some("ws") => false,
            Some("wss") => true,
            Some(other) => return Err(bad(&format!("the scheme is `{other}`"))),
            None => return Err(bad("no scheme")),
        };
        let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(|| bad("no host"))?;
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let port = uri.port_u16().unwrap_or(if tls { 443 } else { 80 });
        if port == 0 {
            return Err(bad("port 0 is only for listening"));
        }
        Ok(Self { uri, host, port, tls, local: None })
    }

    /// The address for errors.
    fn address(&self) -> String {
        match &self.local {
            None => format!("{}:{}", self.host, self.port),
            Some(LocalAddress::Unix(path)) => format!("unix:{}", path.display()),
            Some(LocalAddress::Vsock { cid, port }) => format!("vsock:{cid}:{port}"),
        }
    }
}

async fn upgraded(
    dial: &WebsocketDial,
    target: &Target,
    limits: Limits,
) -> Result<WebSocketStream<DialledStream>, DialError> {
    let mut builder =
        ClientBuilder::from_uri(target.uri.clone()).config(websocket_config()).limits(limits);
    if let Some(token) = &dial.bearer_token {
        let mut value =
            HeaderValue::try_from(format!("Bearer {token}")).map_err(|_| DialError::Token)?;
        value.set_sensitive(true);
        builder = builder.add_header(header::AUTHORIZATION, value).map_err(|_| DialError::Token)?;
    }
    for (name, value) in &dial.headers {
        builder = builder.add_header(name.clone(), value.clone()).map_err(|_| DialError::Token)?;
    }
    let stream = stream(dial, target).await?;
    match builder.connect_on(stream).await {
        Ok((socket, _)) => Ok(socket),
        Err(WebsocketError::Upgrade(upgrade::Error::DidNotSwitchProtocols(
            status @ (401 | 403),
        ))) => Err(DialError::Refused { status }),
        Err(error) => {
            let status = match &error {
                WebsocketError::Upgrade(upgrade::Error::DidNotSwitchProtocols(status)) => {
                    Some(*status)
                }
                _ => None,
            };
            let address = target.address();
            Err(DialError::NotWebsocket { address, reason: error.to_string(), status })
        }
    }
}

async fn stream(dial: &WebsocketDial, target: &Target) -> Result<DialledStream, DialError> {
    if let Some(local) = &target.local {
        let stream = match local {
            LocalAddress::Unix(path) => unix(path, dial.bearer_token.is_some()).await,
            LocalAddress::Vsock { cid, port } => vsock(*cid, *port).await,
        };
        let failed = |source| DialError::Tcp { address: target.address(), source };
        return Ok(MaybeTlsStream::Plain(MaybeTlsStream::Plain(stream.map_err(failed)?)));
    }
    let stream = match dial.proxy_for(target)? {
        None => MaybeTlsStream::Plain(NetStream::Tcp(tcp(dial, &target.host, target.port).await?)),
        Some(proxy) => {
            let mut stream = to_proxy(dial, proxy).await?;
            let tunnel = proxy.tunnel(&mut stream, &target.host, target.port).await;
            tunnel.map_err(|reason| DialError::Proxy { proxy: proxy.address(), reason })?;
            stream
        }
    };
    if target.tls {
        Ok(MaybeTlsStream::Rustls(secure(dial, &target.host, stream).await?))
    } else {
        Ok(MaybeTlsStream::Plain(stream))
    }
}

async fn to_proxy(dial: &WebsocketDial, proxy: &Proxy) -> Result<TransportStream, DialError> {
    let stream = NetStream::Tcp(tcp(dial, &proxy.host, proxy.port).await?);
    if proxy.tls {
        Ok(MaybeTlsStream::Rustls(secure(dial, &proxy.host, stream).await?))
    } else {
        Ok(MaybeTlsStream::Plain(stream))
    }
}

/// Connects to a Unix socket. A token goes only to a server of this user or of root: in a directory that others
/// can write to, the socket may be theirs.
async fn unix(path: &Path, sends_token: bool) -> io::Result<NetStream> {
    let stream = UnixStream::connect(path).await?;
    let uid = stream.peer_cred()?.uid();
    if sends_token && uid != 0 && uid != rustix::process::geteuid().as_raw() {
        let reason = format!("the server runs as another user ({uid}), who must not get the token");
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
    }
    Ok(NetStream::Unix(stream))
}

async fn vsock(cid: u32, port: u32) -> io::Result<NetStream> {
    let kind = socket2::Type::STREAM.nonblocking();
    let socket = socket2::Socket::new(socket2::Domain::VSOCK, kind, None)?;
    let address = socket2::SockAddr::vsock(cid, port);
    match socket.connect(&address) {
        Err(error) if error.raw_os_error() != Some(EINPROGRESS) => return Err(error),
        _ => {}
    }
    let NetStream::Unix(stream) = NetStream::from_socket(socket)? else {
        return Err(io::ErrorKind::Unsupported.into());
    };
    stream.writable().await?;
    match stream.take_error()? {
        Some(error) => Err(error),
        None => Ok(NetStream::Unix(stream)),
    }
}

/// Tries each address of the host in turn.
async fn tcp(dial: &WebsocketDial, host: &str, port: u16) -> Result<TcpStream, DialError> {
    let addresses = tokio::net::lookup_host((host, port))
        .await
        .map_err(|source| DialError::Resolve { host: host.to_owned(), source })?;
    let mut last = None;
    for address in addresses {
        match tcp_to(dial, address).await {
            Ok(stream) => return Ok(stream),
            Err(source) => last = Some(DialError::Tcp { address: address.to_string(), source }),
        }
    }
    Err(last.unwrap_or_else(|| DialError::Resolve {
        host: host.to_owned(),
        source: io::Error::new(io::ErrorKind::NotFound, "the name has no address"),
    }))
}

async fn tcp_to(dial: &WebsocketDial, address: SocketAddr) -> io::Result<TcpStream> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    if let Some(bytes) = dial.receive_buffer {
        socket.set_recv_buffer_size(bytes)?;
    }
    socket.set_nodelay(true)?;
    disable_pacing_on_loopback(&socket, address);
    socket.connect(address).await
}

async fn secure<S: AsyncRead + AsyncWrite + Unpin>(
    dial: &WebsocketDial,
    host: &str,
    stream: S,
) -> Result<TlsStream<S>, DialError> {
    let failed = |source| DialError::Tls { host: host.to_owned(), source };
    let config = match &dial.tls {
        Some(config) => config.clone(),
        None => system_tls().map_err(|error| failed(io::Error::other(error)))?,
    };
    let name = ServerName::try_from(host.to_owned())
        .map_err(|error| failed(io::Error::new(io::ErrorKind::InvalidInput, error)))?;
    TlsConnector::from(config).connect(name, stream).await.map_err(failed)
}

/// The certificates of [`trust_only`].
static ONLY: OnceLock<Vec<CertificateDer<'static>>> = OnceLock::new();

/// Makes every later connection of this process that has no TLS configuration of its own trust only the authorities
/// in this PEM file. Call it before the first connection; a second call with success has no effect.
pub fn trust_only(file: &Path) -> Result<(), String> {
    let found = CertificateDer::pem_file_iter(file).and_then(Iterator::collect);
    let found: Vec<_> =
        found.map_err(|error| format!("cannot read {} as PEM: {error}", file.display()))?;
    if found.is_empty() {
        return Err(format!("{} contains no certificate", file.display()));
    }
    // Usable, or nothing is trusted.
    tls_from_roots(found.clone())
        .map_err(|error| format!("cannot use {}: {error}", file.display()))?;
    let _ = ONLY.set(found);
    Ok(())
}

/// The system's root certificates and those of `CODEX_CA_CERTIFICATE`, or those of [`trust_only`]; read once.
fn system_tls() -> Result<Arc<ClientConfig>, String> {
    static SYSTEM: OnceLock<Result<Arc<ClientConfig>, String>> = OnceLock::new();
    SYSTEM.get_or_init(|| tls_with(std::env::var_os(CA_VARIABLE).as_deref())).clone()
}

fn tls_with(own: Option<&OsStr>) -> Result<Arc<ClientConfig>, String> {
    tls_from_roots(roots_with(own)?).map_err(|error| error.to_string())
}

/// The system's root certificates and those in this file, if its name is not empty.
fn roots_with(own: Option<&OsStr>) -> Result<Vec<CertificateDer<'static>>, String> {
    if let Some(only) = ONLY.get() {
        return Ok(only.clone());
    }
    let own = match own.filter(|path| !path.is_empty()) {
        None => Vec::new(),
        Some(path) => {
            let unusable = |reason: String| format!("cannot use {CA_VARIABLE} {path:?}: {reason}");
            let found = CertificateDer::pem_file_iter(path).and_then(Iterator::collect);
            let found: Vec<_> = found.map_err(|error| unusable(error.to_string()))?;
            if found.is_empty() {
                return Err(unusable("it contains no PEM certificate".to_owned()));
            }
            found
        }
    };
    let system = rustls_native_certs::load_native_certs().certs;
    if system.is_empty() && own.is_empty() {
        return Err(format!(
            "the system has no root certificates; set {CA_VARIABLE} or SSL_CERT_FILE"
        ));
    }
    Ok(system.into_iter().chain(own).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_and_errors_hide_secrets() {
        let mut dial = WebsocketDial::new("wss://user:pass@host:1/path?token=secret#x");
        dial.bearer_token = Some("hunter2".into());
        let shown = format!("{dial:?}");
        assert!(shown.contains("wss://host:1/path"), "{shown}");
        for secret in ["pass", "secret", "hunter2", "user"] {
            assert!(!shown.replace("wss://host:1/path", "").contains(secret), "{shown}");
        }
    }

    #[test]
    fn invalid_dial_url_error_states_the_reason() {
        for (url, why) in [
            ("http://h", "scheme is `http`"),
            ("h:1", "scheme"),
            ("ws://127.0.0.1:0", "port 0"),
            ("ws://", "ws://"),
            ("", "websocket URL"),
            ("unix:", "no path"),
            ("vsock:1", "context id or port"),
            ("vsock:x:1", "context id or port"),
        ] {
            let error = Target::parse(&WebsocketDial::new(url)).err().unwrap();
            assert!(error.to_string().contains(why), "{url}: {error}");
            assert!(error.is_permanent());
        }
    }
}
