//! Connections for requests that passed: to the addresses that were judged, or to an upstream proxy.
//!
//! Invariant: no connection is made to an address that is not public, unless the rules allow local
//! addresses or the target is that very address (or `localhost`) and was allowed.

use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::address::is_public;
use crate::config::Config;
use crate::connector::Connector;
use crate::decide::Destination;
use crate::host::{Host, HostKind};
use crate::policy::Policy;
use crate::rules::is_local;
use crate::upstream::{UpstreamProxies, UpstreamProxy};

/// The longest head of an upstream proxy's answer to CONNECT.
const MAX_ANSWER_BYTES: usize = 8 * 1024;

pub(crate) struct Dialer {
    connector: Arc<dyn Connector>,
    upstream: Option<UpstreamProxies>,
    policy: Arc<Policy>,
    connect_timeout: Duration,
}

/// What an HTTP request is sent over.
pub(crate) struct HttpRoute {
    pub stream: TcpStream,
    /// The stream leads to this proxy, which wants the request in absolute form.
    pub proxy: Option<UpstreamProxy>,
}

impl Dialer {
    pub(crate) fn new(config: &Config, policy: Arc<Policy>) -> Self {
        Self {
            connector: config.connector.clone(),
            upstream: config.upstream.clone(),
            policy,
            connect_timeout: config.limits.connect_timeout,
        }
    }

    /// A connection to the target itself.
    pub(crate) async fn direct(
        &self,
        host: &Host,
        port: u16,
        destination: &Destination,
    ) -> io::Result<TcpStream> {
        self.limited(async {
            let addresses = self.addresses(host, destination).await?;
            self.connect(host, port, &addresses).await
        })
        .await
    }

    /// A connection for a plain HTTP request.
    pub(crate) async fn http(
        &self,
        host: &Host,
        port: u16,
        destination: &Destination,
    ) -> io::Result<HttpRoute> {
        let proxy = self.upstream.as_ref().and_then(|upstream| upstream.http.as_ref());
        self.limited(async {
            match self.route(proxy, host, destination).await? {
                Route::Proxy(proxy) => {
                    let stream = self.to_proxy(proxy).await?;
                    Ok(HttpRoute { stream, proxy: Some(proxy.clone()) })
                }
                Route::Direct(addresses) => {
                    let stream = self.connect(host, port, &addresses).await?;
                    Ok(HttpRoute { stream, proxy: None })
                }
            }
        })
        .await
    }

    /// A connection whose other end is the target, by way of a proxy if there is one.
    pub(crate) async fn tunnel(
        &self,
        host: &Host,
        port: u16,
        destination: &Destination,
    ) -> io::Result<TcpStream> {
        let proxy = self.upstream.as_ref().and_then(|upstream| upstream.https.as_ref());
        self.limited(async {
            match self.route(proxy, host, destination).await? {
                Route::Proxy(proxy) => {
                    let mut stream = self.to_proxy(proxy).await?;
                    connect_through(&mut stream, proxy, &host.authority(port)).await?;
                    Ok(stream)
                }
                Route::Direct(addresses) => self.connect(host, port, &addresses).await,
            }
        })
        .await
    }

    /// The address that a datagram to this target is sent to.
    pub(crate) async fn datagram_address(
        &self,
        host: &Host,
        port: u16,
        destination: &Destination,
    ) -> io::Result<SocketAddr> {
        self.limited(async {
            let addresses = self.addresses(host, destination).await?;
            let permitted = addresses.into_iter().find(|address| self.permits(host, *address));
            socket_address(host, port, permitted.ok_or(io::ErrorKind::AddrNotAvailable)?)
        })
        .await
    }

    async fn limited<T>(&self, dialing: impl Future<Output = io::Result<T>>) -> io::Result<T> {
        timeout(self.connect_timeout, dialing).await.map_err(|_| io::ErrorKind::TimedOut)?
    }

    async fn route<'a>(
        &self,
        proxy: Option<&'a UpstreamProxy>,
        host: &Host,
        destination: &Destination,
    ) -> io::Result<Route<'a>> {
        let (Some(proxy), Some(upstream)) = (proxy, &self.upstream) else {
            return Ok(Route::Direct(self.addresses(host, destination).await?));
        };
        match self.addresses(host, destination).await {
            Ok(addresses) if !upstream.carries(&addresses) => Ok(Route::Direct(addresses)),
            // A name that only the proxy can look up.
            _ => Ok(Route::Proxy(proxy)),
        }
    }

    async fn addresses(&self, host: &Host, destination: &Destination) -> io::Result<Vec<IpAddr>> {
        match destination {
            Destination::Pinned(addresses) => Ok(addresses.clone()),
            Destination::Anywhere => self.connector.look_up(host.as_str()).await,
        }
    }

    fn permits(&self, host: &Host, address: IpAddr) -> bool {
        // A literal is pinned to itself, and `localhost` to loopback: if the host is local, it was
        // allowed by its own name.
        self.policy.rules().allow_local_binding || is_public(address) || is_local(host)
    }

    async fn connect(&self, host: &Host, port: u16, addresses: &[IpAddr]) -> io::Result<TcpStream> {
        let mut failure = io::ErrorKind::AddrNotAvailable.into();
        for address in addresses {
            if !self.permits(host, *address) {
                failure = io::ErrorKind::PermissionDenied.into();
                continue;
            }
            match self.connector.connect(socket_address(host, port, *address)?).await {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    return Ok(stream);
                }
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }

    async fn to_proxy(&self, proxy: &UpstreamProxy) -> io::Result<TcpStream> {
        // The server's own configuration: no rule applies.
        let addresses = match proxy.host.kind() {
            HostKind::Address(address) => vec![address],
            _ => self.connector.look_up(proxy.host.as_str()).await?,
        };
        let mut failure = io::ErrorKind::AddrNotAvailable.into();
        for address in addresses {
            match self.connector.connect(SocketAddr::new(address, proxy.port)).await {
                Ok(stream) => return Ok(stream),
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }
}

enum Route<'a> {
    Direct(Vec<IpAddr>),
    Proxy(&'a UpstreamProxy),
}

/// The address with its port, and with the zone if the host has one by number.
fn socket_address(host: &Host, port: u16, address: IpAddr) -> io::Result<SocketAddr> {
    match (host.kind(), address) {
        (HostKind::Zoned(_), IpAddr::V6(address)) => {
            let zone = host.as_str().split_once('%').map(|(_, zone)| zone).unwrap_or_default();
            let zone = zone.parse().map_err(|_| io::ErrorKind::AddrNotAvailable)?;
            Ok(SocketAddrV6::new(address, port, 0, zone).into())
        }
        _ => Ok(SocketAddr::new(address, port)),
    }
}

/// Opens a tunnel through a proxy that the stream leads to. Reads the answer byte by byte: what follows
/// it belongs to the tunnel.
async fn connect_through(
    stream: &mut TcpStream,
    proxy: &UpstreamProxy,
    authority: &str,
) -> io::Result<()> {
    let authorization = match &proxy.authorization {
        Some(value) => format!("Proxy-Authorization: {}\r\n", value.as_str()),
        None => String::new(),
    };
    let request = zeroize::Zeroizing::new(format!(
        "CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n{authorization}\r\n"
    ));
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    while !answer.ends_with(b"\r\n\r\n") {
        if answer.len() == MAX_ANSWER_BYTES {
            return Err(io::ErrorKind::InvalidData.into());
        }
        answer.push(stream.read_u8().await?);
    }
    let accepted = answer.starts_with(b"HTTP/1.1 2") || answer.starts_with(b"HTTP/1.0 2");
    if accepted { Ok(()) } else { Err(io::ErrorKind::ConnectionRefused.into()) }
}
