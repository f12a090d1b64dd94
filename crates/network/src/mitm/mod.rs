//! Tunnels that the proxy opens: it is the TLS server of the program and a TLS client of the target,
//! judges the requests in between and puts secrets back.
//!
//! Invariant: a request goes to the host that the tunnel was judged for, over TLS with a certificate
//! that the roots vouch for, or nowhere.

mod authority;
mod files;
mod roots;

use std::convert::Infallible;
use std::io;
use std::sync::Arc;

use http::header::HOST;
use http::uri::Scheme;
use http::{Request, Response, StatusCode, Uri};
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tracing::debug;

pub use authority::{AuthorityError, CertificateAuthority};
pub use files::CaFiles;
pub use roots::Roots;

use crate::audit::About;
use crate::decide::{Destination, Finding, Mode, Protocol, Refusal, method_refused};
use crate::exchange::{ForwardError, Sender, TaskExecutor, pass_on};
use crate::host::Host;
use crate::http::{Body, blocked, text};
use crate::masking::Bindings;
use crate::proxy::{Client, Shared};
use crate::target::{Target, port_of};

/// What a proxy opens tunnels with.
#[derive(Debug, Clone)]
pub struct Mitm {
    /// Signs the certificates that programs see.
    pub authority: Arc<CertificateAuthority>,
    /// Verifies targets: [`Roots::client_config`].
    pub upstream_tls: Arc<rustls::ClientConfig>,
    /// The secrets that are put back. A tunnel to a host without one is opened in limited mode only.
    pub bindings: Bindings,
}

impl Mitm {
    /// Whether a tunnel to this target is opened.
    pub(crate) fn opens(&self, mode: Mode, host: &Host, port: u16) -> bool {
        mode == Mode::Limited || self.bindings.concern(host, port)
    }
}

/// A tunnel that passed.
pub(crate) struct Opened {
    pub target: Target,
    pub destination: Destination,
    pub protocol: Protocol,
    pub client: Client,
}

struct Tunnel {
    shared: Arc<Shared>,
    mitm: Mitm,
    opened: Opened,
    /// The connection to the target that the next request may use.
    sender: Mutex<Option<Sender>>,
}

/// Serves the requests inside a tunnel until it ends.
pub(crate) async fn serve<S>(shared: Arc<Shared>, mitm: Mitm, stream: S, opened: Opened)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let config = match mitm.authority.server_config(&opened.target.host) {
        Ok(config) => config,
        Err(error) => return debug!(%error, "no certificate for a host"),
    };
    let accepted =
        timeout(shared.limits.head_timeout, TlsAcceptor::from(config).accept(stream)).await;
    let Ok(Ok(stream)) = accepted else {
        return debug!("a program did not accept the proxy's certificate, or spoke no TLS");
    };
    let speaks_h2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
    let tunnel =
        Arc::new(Tunnel { shared: shared.clone(), mitm, opened, sender: Mutex::default() });
    let service = hyper::service::service_fn(move |request| {
        let tunnel = tunnel.clone();
        async move { Ok::<_, Infallible>(tunnel.handle(request).await) }
    });
    let stream = TokioIo::new(stream);
    let ended = if speaks_h2 {
        let mut builder = hyper::server::conn::http2::Builder::new(TaskExecutor(shared.clone()));
        builder.timer(TokioTimer::new()).max_header_list_size(64 * 1024);
        builder.serve_connection(stream, service).await
    } else {
        let mut builder = hyper::server::conn::http1::Builder::new();
        builder
            .preserve_header_case(true)
            .timer(TokioTimer::new())
            .header_read_timeout(shared.limits.head_timeout)
            .max_buf_size(shared.limits.http_buffer);
        builder.serve_connection(stream, service).with_upgrades().await
    };
    if let Err(error) = ended {
        debug!(%error, "an opened tunnel ended");
    }
}

impl Tunnel {
    async fn handle(&self, mut request: Request<Incoming>) -> Response<Body> {
        let Opened { target, protocol, client, .. } = &self.opened;
        if !self.is_for_target(&request) {
            return text(StatusCode::BAD_REQUEST, "host mismatch");
        }
        let mode = self.shared.judge.mode();
        let refused = method_refused(Some(request.method().as_str()));
        if let Some(reason) = refused.filter(|_| mode == Mode::Limited) {
            let refusal = Refusal::by_mode(reason);
            let about = About {
                protocol: *protocol,
                host: Some(&target.host),
                port: target.port,
                method: Some(request.method().as_str()),
                client: client.address(),
            };
            self.shared.judge.report(&Finding::by_mode(&refusal), &about);
            return blocked(target, *protocol, &refusal);
        }
        let path = request.uri().path().to_owned();
        self.mitm.bindings.apply(&target.host, target.port, &path, request.headers_mut());
        self.pass_on(request, mode).await.unwrap_or_else(|error| {
            debug!(%error, "mitm upstream error");
            text(StatusCode::BAD_GATEWAY, "mitm upstream error")
        })
    }

    /// Whether a request names the host that the tunnel was judged for, and no other.
    fn is_for_target(&self, request: &Request<Incoming>) -> bool {
        let is_target = |text: &str| {
            let port = port_of(text, 443);
            !text.contains('@')
                && Host::parse(text).is_ok_and(|host| host == self.opened.target.host)
                && port == Some(self.opened.target.port)
        };
        let headers = request.headers().get_all(HOST);
        let named: Vec<_> =
            headers.iter().map(|value| value.to_str().unwrap_or_default()).collect();
        let authority = request.uri().authority().map(http::uri::Authority::as_str);
        let hosts = named.iter().copied().chain(authority);
        named.len() <= 1 && hosts.clone().next().is_some() && hosts.into_iter().all(is_target)
    }

    async fn pass_on(
        &self,
        mut request: Request<Incoming>,
        mode: Mode,
    ) -> Result<Response<Body>, ForwardError> {
        let idle = self.sender.lock().take().filter(Sender::is_usable);
        let mut sender = match idle {
            Some(sender) => sender,
            None => self.dial().await?,
        };
        let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
        let uri = match sender {
            Sender::Http1(_) => path.parse()?,
            Sender::Http2(_) => {
                let mut parts = http::uri::Parts::default();
                parts.scheme = Some(Scheme::HTTPS);
                parts.authority = Some(self.authority().parse()?);
                parts.path_and_query = Some(path.parse()?);
                Uri::from_parts(parts)?
            }
        };
        *request.uri_mut() = uri;
        let header = self.authority();
        let upgrades = mode == Mode::Full;
        let (shared, client) = (&self.shared, &self.opened.client);
        // Concurrent requests over HTTP/2 share the connection from now on.
        if let Sender::Http2(shared_by_all) = &sender {
            *self.sender.lock() = Some(Sender::Http2(shared_by_all.clone()));
        }
        let response =
            pass_on(shared, request, &header, None, upgrades, client, &mut sender).await?;
        if let Sender::Http1(_) = &sender {
            *self.sender.lock() = Some(sender);
        }
        Ok(response)
    }

    /// The target as the value of `Host`.
    fn authority(&self) -> String {
        let authority = self.opened.target.host.authority(self.opened.target.port);
        authority.strip_suffix(":443").map(str::to_owned).unwrap_or(authority)
    }

    async fn dial(&self) -> Result<Sender, ForwardError> {
        let Opened { target, destination, protocol, .. } = &self.opened;
        let dialer = &self.shared.dialer;
        let stream = match protocol {
            Protocol::Socks5Tcp => dialer.direct(&target.host, target.port, destination).await?,
            _ => dialer.tunnel(&target.host, target.port, destination).await?,
        };
        let name = ServerName::try_from(target.host.as_str().to_owned())
            .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        let connector = TlsConnector::from(self.mitm.upstream_tls.clone());
        let connected =
            timeout(self.shared.limits.connect_timeout, connector.connect(name, stream));
        let stream = connected.await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        match stream.get_ref().1.alpn_protocol() {
            Some(b"h2") => Sender::http2(&self.shared, stream).await,
            _ => Sender::http1(&self.shared, stream).await,
        }
    }
}
