//! The SOCKS5 proxy (RFC 1928) without authentication: CONNECT and UDP ASSOCIATE.
//!
//! ```text
//!  greeting ──▶ method 0 ──▶ request ──▶ judged ──▶ reply 0, bytes or datagrams
//!      └▶ 255, end              └▶ reply 7     └▶ reply 2, or 5 if the target cannot be reached
//! ```

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;
use tracing::debug;

use crate::decide::{Protocol, Subject};
use crate::host::Host;
use crate::idle::Idle;
use crate::mitm::Opened;
use crate::proxy::{Client, Shared};
use crate::sniff::{Check, check_first_bytes};
use crate::target::Target;
use crate::{mitm, tunnel, udp};

const VERSION: u8 = 5;
const NO_AUTHENTICATION: u8 = 0;
const NO_METHOD: u8 = 0xff;

const SUCCEEDED: u8 = 0;
const NOT_ALLOWED: u8 = 2;
const REFUSED: u8 = 5;
const COMMAND_UNSUPPORTED: u8 = 7;

const CONNECT: u8 = 1;
const UDP_ASSOCIATE: u8 = 3;

/// A host and port as SOCKS5 writes them.
pub(crate) struct SocksAddress {
    /// `None`: a name that cannot be one.
    pub host: Option<Host>,
    pub port: u16,
}

/// Serves one connection until it ends.
pub(crate) async fn serve<S>(shared: Arc<Shared>, stream: S, client: Client)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let stream = Idle::new(stream, shared.limits.idle_timeout);
    if let Err(error) = converse(&shared, stream, &client).await {
        debug!(%error, "connection to the SOCKS5 proxy ended");
    }
}

async fn converse<S>(shared: &Arc<Shared>, mut stream: S, client: &Client) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let handshake = timeout(shared.limits.head_timeout, handshake(&mut stream)).await;
    let (command, address) = handshake.map_err(|_| io::ErrorKind::TimedOut)??;
    match command {
        CONNECT => connect(shared, stream, client, address).await,
        UDP_ASSOCIATE if shared.socks5_udp && client.is_on_loopback() => {
            udp::associate(shared, &mut stream, client).await
        }
        _ => reply(&mut stream, COMMAND_UNSUPPORTED, None).await,
    }
}

async fn handshake<S>(stream: &mut S) -> io::Result<(u8, SocksAddress)>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    expect_version(stream).await?;
    let count = stream.read_u8().await?;
    let mut methods = vec![0; count.into()];
    stream.read_exact(&mut methods).await?;
    if !methods.contains(&NO_AUTHENTICATION) {
        stream.write_all(&[VERSION, NO_METHOD]).await?;
        stream.shutdown().await?;
        return Err(io::ErrorKind::Unsupported.into());
    }
    stream.write_all(&[VERSION, NO_AUTHENTICATION]).await?;
    stream.flush().await?;
    expect_version(stream).await?;
    let command = stream.read_u8().await?;
    stream.read_u8().await?; // Reserved.
    Ok((command, read_address(stream).await?))
}

async fn expect_version<S: AsyncRead + Unpin>(stream: &mut S) -> io::Result<()> {
    match stream.read_u8().await? {
        VERSION => Ok(()),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Reads the kind of an address, the address and the port.
pub(crate) async fn read_address<S: AsyncRead + Unpin>(stream: &mut S) -> io::Result<SocksAddress> {
    let host = match stream.read_u8().await? {
        1 => Some(Host::from(Ipv4Addr::from(stream.read_u32().await?))),
        3 => {
            let mut name = vec![0; stream.read_u8().await?.into()];
            stream.read_exact(&mut name).await?;
            // A name with a port of its own would be judged as another one than it reads.
            let name =
                std::str::from_utf8(&name).ok().filter(|name| !name.contains(['[', ' ', '\t']));
            name.filter(|name| !name.contains(':') || name.parse::<Ipv6Addr>().is_ok())
                .and_then(|name| Host::parse(name).ok())
        }
        4 => Some(Host::from(Ipv6Addr::from(stream.read_u128().await?))),
        _ => return Err(io::ErrorKind::InvalidData.into()),
    };
    Ok(SocksAddress { host, port: stream.read_u16().await? })
}

async fn connect<S>(
    shared: &Arc<Shared>,
    mut stream: S,
    client: &Client,
    address: SocksAddress,
) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let Some(host) = address.host else {
        return reply(&mut stream, NOT_ALLOWED, None).await;
    };
    let mitm = shared.mitm_for(&host, address.port);
    let subject = Subject {
        protocol: Protocol::Socks5Tcp,
        host: &host,
        port: address.port,
        method: None,
        opened: mitm.is_some(),
    };
    let Ok(destination) = shared.judge(subject, client).await else {
        return reply(&mut stream, NOT_ALLOWED, None).await;
    };
    if let Some(mitm) = mitm {
        reply(&mut stream, SUCCEEDED, None).await?;
        let target = Target { host, port: address.port };
        let protocol = Protocol::Socks5Tcp;
        let opened = Opened { target, destination, protocol, client: client.clone() };
        mitm::serve(shared.clone(), mitm, stream, opened).await;
        return Ok(());
    }
    match shared.dialer.direct(&host, address.port, &destination).await {
        Ok(mut target) => {
            reply(&mut stream, SUCCEEDED, target.local_addr().ok()).await?;
            let check = Check {
                shared: shared.clone(),
                protocol: Protocol::Socks5Tcp,
                host,
                port: address.port,
                method: None,
                client: client.clone(),
            };
            let _pass = check_first_bytes(&check, &mut stream, &mut target).await?;
            tunnel::join(&mut stream, &mut target).await
        }
        Err(error) => {
            debug!(%error, "SOCKS5 target unreachable");
            reply(&mut stream, REFUSED, None).await
        }
    }
}

/// Sends a reply. After any but success the connection is over.
pub(crate) async fn reply<S>(stream: &mut S, code: u8, bound: Option<SocketAddr>) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let bound = bound.unwrap_or(SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0));
    let mut message = vec![VERSION, code, 0];
    write_address(&mut message, bound);
    stream.write_all(&message).await?;
    stream.flush().await?;
    if code != SUCCEEDED {
        stream.shutdown().await?;
    }
    Ok(())
}

/// Appends the kind of the address, the address and the port.
pub(crate) fn write_address(message: &mut Vec<u8>, address: SocketAddr) {
    match address.ip() {
        IpAddr::V4(ip) => {
            message.push(1);
            message.extend(ip.octets());
        }
        IpAddr::V6(ip) => {
            message.push(4);
            message.extend(ip.octets());
        }
    }
    message.extend(address.port().to_be_bytes());
}
