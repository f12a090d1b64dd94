//! The managed network, as the server sees it: what to ask for, and the sockets that come back.
//!
//! A sandbox with a managed network has a network namespace of its own, in which nothing but loopback is
//! up. Before the target exists, the inner process makes the sockets that the server serves there, and
//! sends them to the server over a Unix socket. A socket stays in the namespace that it was made in,
//! whichever process accepts on it; so no process relays anything, and inside there is nothing but ports
//! that answer.
//!
//! Invariant: the target runs only if the sockets are on their way to the server. If the sandbox ends
//! before it has sent them, the socket closes.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SocketFlags,
    SocketType, recvmsg, socketpair,
};

use crate::plan::ManagedNamespace;

/// Maximum ports of one managed network.
pub const MAX_LOOPBACK_PORTS: usize = 128;

/// Maximum nameservers that are served on loopback.
const MAX_NAMESERVERS: usize = 8;

/// Maximum descriptors in the message; the kernel's limit is 253.
pub(crate) const MAX_DESCRIPTORS: usize = MAX_LOOPBACK_PORTS + 1 + 2 * MAX_NAMESERVERS;

/// Where the host's nameservers are configured.
const RESOLV_CONF: &str = "/etc/resolv.conf";

/// A network for one target that leads to the server alone.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ManagedNetwork {
    /// Ports of 127.0.0.1 that the server serves inside: distinct, not 0, at most
    /// [`MAX_LOOPBACK_PORTS`].
    pub loopback_ports: Vec<u16>,
    /// Also route every other address to the server, as packets of a TUN interface, and serve the
    /// loopback addresses that the target may take for nameservers.
    pub transparent: bool,
}

impl ManagedNetwork {
    /// What the inner process has to make; or why that is impossible.
    pub(crate) fn namespace(&self) -> Result<ManagedNamespace, &'static str> {
        let ports = &self.loopback_ports;
        if ports.len() > MAX_LOOPBACK_PORTS {
            return Err("more than 128 loopback ports");
        }
        if ports.contains(&0) {
            return Err("loopback port 0");
        }
        let mut sorted = ports.clone();
        sorted.sort_unstable();
        if sorted.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err("a loopback port is named twice");
        }
        let mut nameservers = Vec::new();
        if self.transparent {
            let text = std::fs::read(RESOLV_CONF).unwrap_or_default();
            nameservers = loopback_nameservers(&String::from_utf8_lossy(&text));
            // A proxy that is asked for on that port has it.
            nameservers.retain(|address| *address != Ipv4Addr::LOCALHOST || !ports.contains(&53));
        }
        Ok(ManagedNamespace { ports: ports.clone(), transparent: self.transparent, nameservers })
    }
}

/// The loopback addresses that a resolver asks: those of the configuration, and 127.0.0.1, which
/// resolvers take where they cannot read one.
fn loopback_nameservers(configuration: &str) -> Vec<IpAddr> {
    let mut found = vec![IpAddr::from(Ipv4Addr::LOCALHOST)];
    for line in configuration.lines() {
        let mut words = line.split_ascii_whitespace();
        let address = words.next().filter(|word| *word == "nameserver").and(words.next());
        let address = address.and_then(|address| address.parse::<IpAddr>().ok());
        if let Some(address) = address.filter(IpAddr::is_loopback)
            && !found.contains(&address)
            && found.len() < MAX_NAMESERVERS
        {
            found.push(address);
        }
    }
    found
}

/// What the server serves in a managed network. Everything is non-blocking and close-on-exec, and keeps
/// the namespace alive while it is open.
#[derive(Debug)]
pub struct NetworkDescriptors {
    /// A listener for each of [`ManagedNetwork::loopback_ports`], in that order. Connections that were
    /// made already wait in its queue.
    pub listeners: Vec<TcpListener>,
    /// The packets of all other addresses (`IFF_TUN`, `IFF_NO_PI`, MTU [`TUN_MTU`]); `None` if the network
    /// is not transparent, or if this machine offers no TUN device.
    pub tun: Option<OwnedFd>,
    /// Why there is no TUN interface, although the network is transparent. The rest works without it.
    pub tun_error: Option<io::Error>,
    /// Port 53 of the loopback nameservers, if the network is transparent.
    pub dns_udp: Vec<UdpSocket>,
    /// The same addresses, over TCP.
    pub dns_tcp: Vec<TcpListener>,
}

/// MTU of the TUN interface, in bytes.
pub const TUN_MTU: u16 = u16::MAX;

/// Address of the TUN interface: the source of the target's packets.
pub const TUN_ADDRESS_V4: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);

/// The same for IPv6.
pub const TUN_ADDRESS_V6: std::net::Ipv6Addr =
    std::net::Ipv6Addr::new(0xfd63, 0x6f64, 0x6578, 0, 0, 0, 0, 1);

/// The text of the message: how many descriptors of each kind follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) listeners: u8,
    /// Whether there is a TUN descriptor.
    pub(crate) tun: bool,
    /// The error number of the TUN interface, if it failed; else 0.
    pub(crate) tun_errno: i32,
    /// Pairs of a UDP socket and a TCP listener.
    pub(crate) nameservers: u8,
}

impl Counts {
    pub(crate) const LENGTH: usize = 7;

    pub(crate) fn encode(self) -> [u8; Self::LENGTH] {
        let [a, b, c, d] = self.tun_errno.to_le_bytes();
        [self.listeners, u8::from(self.tun), self.nameservers, a, b, c, d]
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let &[listeners, tun @ (0 | 1), nameservers, a, b, c, d] = bytes else { return None };
        let tun_errno = i32::from_le_bytes([a, b, c, d]);
        Some(Self { listeners, tun: tun == 1, tun_errno, nameservers })
    }

    fn descriptors(self) -> usize {
        usize::from(self.listeners) + usize::from(self.tun) + 2 * usize::from(self.nameservers)
    }
}

/// The server's end of the socket that a managed network is handed over on.
#[derive(Debug)]
pub struct NetworkReceiver {
    socket: OwnedFd,
    /// Requested ports.
    listeners: usize,
}

impl NetworkReceiver {
    /// A receiver, and the end for the sandbox.
    pub(crate) fn new(namespace: &ManagedNamespace) -> rustix::io::Result<(Self, OwnedFd)> {
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let (socket, theirs) = socketpair(AddressFamily::UNIX, kind, flags, None)?;
        Ok((Self { socket, listeners: namespace.ports.len() }, theirs))
    }

    /// Receives what the sandbox has sent. Call it once the status pipe says that the target runs: the
    /// sandbox has sent it by then. Does not block; fails if there is nothing, which means that the
    /// sandbox was killed before its target ran.
    pub fn receive(self) -> io::Result<NetworkDescriptors> {
        let mut text = [0; Counts::LENGTH + 1];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let received = rustix::io::retry_on_intr(|| {
            recvmsg(&self.socket, &mut [IoSliceMut::new(&mut text)], &mut ancillary, flags)
        });
        let ended = || io::Error::new(io::ErrorKind::UnexpectedEof, "the sandbox has ended");
        let received = match received {
            Ok(received) if received.bytes > 0 => received,
            Ok(_) | Err(Errno::AGAIN | Errno::CONNRESET) => return Err(ended()),
            Err(errno) => return Err(errno.into()),
        };
        let mut fds = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                fds.extend(descriptors);
            }
        }
        let counts = text.get(..received.bytes).and_then(Counts::decode);
        let is_complete = |counts: &Counts| {
            fds.len() == counts.descriptors() && usize::from(counts.listeners) == self.listeners
        };
        // This process may have no room for all descriptors.
        let cut = received.flags.contains(ReturnFlags::CTRUNC);
        let Some(counts) = counts.filter(|counts| is_complete(counts) && !cut) else {
            let message = "the network of the sandbox arrived incomplete; are too many files open?";
            return Err(io::Error::other(message));
        };
        Ok(sort(counts, fds))
    }
}

/// Sorts the descriptors of a complete message.
fn sort(counts: Counts, fds: Vec<OwnedFd>) -> NetworkDescriptors {
    let mut fds = fds.into_iter();
    let listeners = fds.by_ref().take(counts.listeners.into()).map(TcpListener::from).collect();
    let tun = if counts.tun { fds.next() } else { None };
    let (mut dns_udp, mut dns_tcp) = (Vec::new(), Vec::new());
    while let (Some(udp), Some(tcp)) = (fds.next(), fds.next()) {
        dns_udp.push(UdpSocket::from(udp));
        dns_tcp.push(TcpListener::from(tcp));
    }
    let tun_error = (counts.tun_errno != 0).then(|| io::Error::from_raw_os_error(counts.tun_errno));
    NetworkDescriptors { listeners, tun, tun_error, dns_udp, dns_tcp }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn counts_round_trip() {
        for (listeners, tun, tun_errno, nameservers) in
            [(0, false, 0, 0), (128, true, 0, 8), (2, false, libc::EACCES, 1)]
        {
            let counts = Counts { listeners, tun, tun_errno, nameservers };
            assert_eq!(Counts::decode(&counts.encode()), Some(counts));
            assert!(counts.descriptors() <= MAX_DESCRIPTORS);
        }
        for bytes in [&b""[..], &[0; 6], &[0; 8], &[1, 2, 0, 0, 0, 0, 0]] {
            assert_eq!(Counts::decode(bytes), None);
        }
    }

    #[test]
    fn only_loopback_nameservers_are_served() {
        let localhost = IpAddr::from(Ipv4Addr::LOCALHOST);
        let address = |text: &str| text.parse::<IpAddr>().unwrap();
        for (configuration, expected) in [
            ("", vec![]),
            ("nameserver 127.0.0.53\noptions edns0\n", vec!["127.0.0.53"]),
            ("# nameserver 127.0.0.2\n;nameserver 127.0.0.3\nnameserver 10.0.0.1", vec![]),
            ("\tnameserver\t::1 # local\r\nnameserver 127.0.0.1", vec!["::1"]),
            ("nameserver 127.0.0.9\nnameserver 127.0.0.9", vec!["127.0.0.9"]),
            ("nameserver 127.0.0.300\nnameserver\nnameservers 127.0.0.4", vec![]),
        ] {
            let mut all = vec![localhost];
            all.extend(expected.into_iter().map(address));
            assert_eq!(loopback_nameservers(configuration), all, "{configuration:?}");
        }
        let many: String = (1..40).map(|n| format!("nameserver 127.0.0.{n}\n")).collect();
        assert_eq!(loopback_nameservers(&many).len(), MAX_NAMESERVERS);
    }

    #[test]
    fn impossible_networks_are_refused() {
        let network =
            |ports: Vec<u16>| ManagedNetwork { loopback_ports: ports, transparent: false };
        assert!(network(vec![]).namespace().is_ok());
        assert!(network((1..=128).collect()).namespace().is_ok());
        for ports in [vec![0], vec![7, 8, 7], (1..=129).collect()] {
            assert!(network(ports).namespace().is_err());
        }
        let both = ManagedNetwork { loopback_ports: vec![53], transparent: true };
        assert!(!both.namespace().unwrap().nameservers.contains(&Ipv4Addr::LOCALHOST.into()));
    }

    #[test]
    fn a_sandbox_that_ends_early_is_an_error() {
        let namespace = ManagedNetwork::default().namespace().unwrap();
        let (receiver, theirs) = NetworkReceiver::new(&namespace).unwrap();
        drop(theirs);
        assert_eq!(receiver.receive().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        // Nor does it wait for one that has not sent anything.
        let (receiver, _theirs) = NetworkReceiver::new(&namespace).unwrap();
        assert_eq!(receiver.receive().unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
