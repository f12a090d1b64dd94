//! SOCKS5 UDP ASSOCIATE: a relay for datagrams, each judged by its target, as long as the TCP
//! connection that asked for it lasts.
//!
//! Invariant: datagrams are taken from the one client that spoke first, on loopback; answers are
//! passed on only from addresses that a datagram was sent to.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite};
use tokio::net::UdpSocket;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::decide::{Protocol, Subject};
use crate::policy::Pass;
use crate::proxy::{Client, Shared};
use crate::socks::{read_address, reply, write_address};

/// The longest datagram that UDP can carry.
const MAX_DATAGRAM: usize = 65_535;

/// Relays datagrams until the TCP connection ends.
pub(crate) async fn associate<S>(
    shared: &Arc<Shared>,
    stream: &mut S,
    client: &Client,
) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    // On loopback only: a port on every interface would relay for the whole network.
    let near = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let far = Far {
        v4: UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).await?,
        v6: UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0)).await.ok(),
    };
    reply(stream, 0, near.local_addr().ok()).await?;
    let mut relay = Relay {
        shared: shared.clone(),
        client: client.clone(),
        near,
        far,
        peer: None,
        targets: VecDeque::new(),
        judging: JoinSet::new(),
    };
    let mut buffer = [0; 64];
    tokio::select! {
        () = relay.run() => Ok(()),
        ended = async {
            // Nothing more is to come here; what does is ignored.
            while stream.read(&mut buffer).await? > 0 {}
            Ok(())
        } => ended,
    }
}

/// Sockets to targets of either family.
struct Far {
    v4: UdpSocket,
    v6: Option<UdpSocket>,
}

struct Relay {
    shared: Arc<Shared>,
    client: Client,
    near: UdpSocket,
    far: Far,
    /// Where the client sends from: the source of the first datagram.
    peer: Option<SocketAddr>,
    /// What was sent to, the newest last.
    targets: VecDeque<Target>,
    judging: JoinSet<Option<Judged>>,
}

/// Where a datagram was sent to, as long as the rules allow it.
struct Target {
    address: SocketAddr,
    cut: CancellationToken,
    _pass: Pass,
}

/// A datagram that passed.
struct Judged {
    target: Target,
    payload: Vec<u8>,
}

impl Relay {
    async fn run(&mut self) {
        let mut outward = vec![0; MAX_DATAGRAM];
        let mut inward = [vec![0; MAX_DATAGRAM], vec![0; MAX_DATAGRAM]];
        loop {
            let [v4, v6] = &mut inward;
            tokio::select! {
                received = self.near.recv_from(&mut outward) => {
                    // An error here is about a datagram that was sent before.
                    let Ok((length, from)) = received else { continue };
                    self.take(&outward[..length], from);
                }
                Some(judged) = self.judging.join_next() => {
                    if let Ok(Some(judged)) = judged {
                        self.send(judged).await;
                    }
                }
                received = self.far.v4.recv_from(v4) => {
                    if let Ok((length, from)) = received {
                        self.pass_back(&v4[..length], from).await;
                    }
                }
                received = receive(self.far.v6.as_ref(), v6) => {
                    if let Ok((length, from)) = received {
                        self.pass_back(&v6[..length], from).await;
                    }
                }
            }
        }
    }

    /// Has a datagram of the client judged.
    fn take(&mut self, datagram: &[u8], from: SocketAddr) {
        if *self.peer.get_or_insert(from) != from {
            return;
        }
        if self.judging.len() >= self.shared.limits.udp_judged {
            debug!("datagram dropped: too many are being judged");
            return;
        }
        let (shared, client, datagram) =
            (self.shared.clone(), self.client.clone(), datagram.to_vec());
        self.judging.spawn(async move { judge(&shared, &client, &datagram).await });
    }

    async fn send(&mut self, judged: Judged) {
        let Judged { target, payload } = judged;
        let address = target.address;
        let socket = match (address.ip(), &self.far.v6) {
            (IpAddr::V4(_), _) => &self.far.v4,
            (IpAddr::V6(_), Some(v6)) => v6,
            (IpAddr::V6(_), None) => return,
        };
        self.targets.retain(|known| known.address != address && !known.cut.is_cancelled());
        if self.targets.len() >= self.shared.limits.udp_targets {
            self.targets.pop_front();
        }
        self.targets.push_back(target);
        let connector = &self.shared.connector;
        if let Err(error) = connector.send(socket, &payload, address).await {
            debug!(%error, "datagram not sent");
        }
    }

    async fn pass_back(&self, payload: &[u8], from: SocketAddr) {
        let is_target = |target: &Target| target.address == from && !target.cut.is_cancelled();
        let Some(peer) = self.peer.filter(|_| self.targets.iter().any(is_target)) else { return };
        let mut message = vec![0, 0, 0];
        write_address(&mut message, from);
        message.extend(payload);
        if let Err(error) = self.near.send_to(&message, peer).await {
            debug!(%error, "datagram not passed back");
        }
    }
}

/// A socket that is absent never receives.
async fn receive(socket: Option<&UdpSocket>, buffer: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
    match socket {
        Some(socket) => socket.recv_from(buffer).await,
        None => std::future::pending().await,
    }
}

/// Reads the header of a datagram and judges its target. `None`: dropped.
async fn judge(shared: &Shared, client: &Client, datagram: &[u8]) -> Option<Judged> {
    // Two reserved bytes, and the number of a fragment: they are not put together.
    let mut rest = datagram.strip_prefix(&[0, 0, 0])?;
    let address = read_address(&mut rest).await.ok()?;
    let host = address.host?;
    let subject = Subject {
        protocol: Protocol::Socks5Udp,
        host: &host,
        port: address.port,
        method: None,
        opened: false,
    };
    let cut = CancellationToken::new();
    let (destination, pass) = shared.judge.judge(subject, client.address(), &cut).await.ok()?;
    let address = shared.dialer.datagram_address(&host, address.port, &destination).await.ok()?;
    Some(Judged { target: Target { address, cut, _pass: pass }, payload: rest.to_vec() })
}
