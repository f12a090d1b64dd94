//! The transparent network: serves every TCP connection and DNS query of a network namespace, for
//! programs that ignore proxy variables.
//!
//! ```text
//!  TUN ──▶ link.rs ──▶ stack.rs ──▶ packet.rs   replies that belong to no connection
//!                         │  └────▶ dns.rs ◀──▶ names.rs   synthetic addresses, pinned to names
//!                         ▼                         ▲
//!            endpoint.rs (our end of TCP) ◀── connection.rs ──▶ judge, dial; crate::sniff: TLS, HTTP/1
//! ```
//!
//! A program asks for a name and gets a synthetic address; when it connects there, the name is judged and
//! looked up, as a proxy would. Why it is built this way: docs/design/2026-11-18-transparent-network.md.

mod connection;
mod dns;
mod endpoint;
pub(crate) mod fuzzing;
mod link;
mod names;
mod packet;
mod stack;

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, UdpSocket};
use tracing::{debug, warn};

pub use names::{SYNTHETIC_V4, SYNTHETIC_V6};

use self::link::Link;
use self::names::Names;
use self::stack::Stack;
use crate::host::Host;
use crate::proxy::{Client, ProxyHandle, Shared};

/// The longest query that is read.
const MAX_QUERY: usize = 4096;

/// What a network namespace is served through. All of it is made inside the namespace and handed over.
#[derive(Debug)]
pub struct Namespace {
    /// A TUN device without packet information (`IFF_TUN | IFF_NO_PI`), with any MTU. The default routes
    /// of the namespace lead to it.
    pub tun: OwnedFd,
    /// Sockets at port 53 of nameservers that the namespace has on loopback.
    pub dns_udp: Vec<std::net::UdpSocket>,
    /// Listeners at the same addresses.
    pub dns_tcp: Vec<std::net::TcpListener>,
}

impl Namespace {
    /// A namespace with nothing but this device.
    pub fn new(tun: OwnedFd) -> Self {
        Self { tun, dns_udp: Vec::new(), dns_tcp: Vec::new() }
    }
}

impl ProxyHandle {
    /// Serves a namespace until the proxy ends or the device is gone: TCP connections by the rules of the
    /// proxy, DNS with synthetic addresses ([`SYNTHETIC_V4`], [`SYNTHETIC_V6`]), nothing else.
    ///
    /// Must be called within a tokio runtime.
    pub fn serve_namespace(&self, namespace: Namespace) -> io::Result<()> {
        let shared = self.shared();
        let search = shared.search_domains.iter();
        let search = search.filter_map(|domain| Host::parse(domain).ok()).collect();
        let names = Arc::new(Names::new(shared.limits.transparent_names, search));
        let stack = Stack::new(shared.clone(), names.clone(), Link::new(namespace.tun)?);
        for socket in namespace.dns_udp {
            socket.set_nonblocking(true)?;
            let socket = UdpSocket::from_std(socket)?;
            shared.spawn(answer_datagrams(shared.clone(), names.clone(), socket));
        }
        for listener in namespace.dns_tcp {
            listener.set_nonblocking(true)?;
            let listener = TcpListener::from_std(listener)?;
            shared.spawn(answer_connections(shared.clone(), names.clone(), listener));
        }
        shared.spawn(async move {
            if let Err(error) = stack.run().await {
                debug!(%error, "network device of a namespace is gone");
            }
        });
        Ok(())
    }
}

async fn answer_datagrams(shared: Arc<Shared>, names: Arc<Names>, socket: UdpSocket) {
    let mut buffer = vec![0; MAX_QUERY];
    loop {
        // An error here is about a datagram that was sent before.
        let Ok((length, from)) = socket.recv_from(&mut buffer).await else { continue };
        let answer = dns::answer(&buffer[..length], &names, &shared.policy.rules());
        if let Some(answer) = answer
            && let Err(error) = socket.send_to(&answer, from).await
        {
            debug!(%error, "DNS answer not sent");
        }
    }
}

async fn answer_connections(shared: Arc<Shared>, names: Arc<Names>, listener: TcpListener) {
    loop {
        let (stream, address): (_, SocketAddr) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                warn!(%error, "cannot accept a DNS connection; retrying in 100 ms");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Some(place) = shared.try_place() else { continue };
        let client = Client::new(Some(address), place);
        let (owner, names) = (shared.clone(), names.clone());
        shared.spawn_for(&client.clone(), async move {
            let _client = client;
            if let Err(error) = connection::serve_dns(owner, names, stream).await {
                debug!(%error, "DNS connection ended");
            }
        });
    }
}
