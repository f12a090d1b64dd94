//! The way out: lookups, connections and datagrams. A trait, so that tests can be the Internet.

use std::io;
use std::net::{IpAddr, SocketAddr};

use futures_util::future::BoxFuture;
use tokio::net::{TcpStream, UdpSocket, lookup_host};

/// Looks up names and makes connections for a proxy.
pub trait Connector: Send + Sync {
    /// The addresses of a name, in the order in which they are to be tried.
    fn look_up<'a>(&'a self, name: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>>;

    /// Connects to exactly this address.
    fn connect(&self, address: SocketAddr) -> BoxFuture<'_, io::Result<TcpStream>>;

    /// Sends a datagram to exactly this address.
    fn send<'a>(
        &'a self,
        socket: &'a UdpSocket,
        datagram: &'a [u8],
        address: SocketAddr,
    ) -> BoxFuture<'a, io::Result<usize>> {
        Box::pin(socket.send_to(datagram, address))
    }
}

/// The system's resolver and network.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemConnector;

impl Connector for SystemConnector {
    fn look_up<'a>(&'a self, name: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        Box::pin(async move {
            let mut addresses: Vec<_> =
                lookup_host((name, 0)).await?.map(|address| address.ip()).collect();
            let mut seen = std::collections::HashSet::new();
            addresses.retain(|address| seen.insert(*address));
            Ok(addresses)
        })
    }

    fn connect(&self, address: SocketAddr) -> BoxFuture<'_, io::Result<TcpStream>> {
        Box::pin(TcpStream::connect(address))
    }
}
