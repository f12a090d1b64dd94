//! Three netlink queries: who owns the socket at the other end of a TCP connection, which socket is at the other
//! end of a Unix connection, and is an address local?
//!
//! Each is one message out and one in. The kernel replies during the send, so nothing here waits.
//!
//! Invariant: only the kernel answers. Any process with the rights to can send to a netlink socket; so the
//! socket is connected to the kernel, which keeps other senders out, and a reply counts only if its sender is
//! the kernel and it carries this socket's port id and a sequence number that was drawn at random.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, bind, connect,
    getsockname, netlink, recvfrom, send, socket_with,
};

/// Message types and flags of `linux/netlink.h`, `linux/sock_diag.h` and `linux/rtnetlink.h`.
const ERROR: u16 = 2;
const REQUEST: u16 = 1;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NEW_ROUTE: u16 = 24;
const GET_ROUTE: u16 = 26;
const ROUTE_DESTINATION: u16 = 1;
/// `RTN_UNICAST`.
const ROUTE_TO_ANOTHER_HOST: u8 = 1;
const LISTENING: u8 = 10;

/// Flags and attributes of `linux/unix_diag.h`.
const SHOW_PEER: u32 = 4;
const UNIX_PEER: u16 = 2;

/// The protocol number is 0, for which `rustix` has no name.
const ROUTE: Option<Protocol> = None;

const HEADER: usize = 16;

/// Port id of the kernel.
const KERNEL: u32 = 0;

/// Maximum messages of other senders that are skipped.
const MAX_FOREIGN: usize = 64;

/// One end of a connection. IPv4-mapped IPv6 addresses are converted to IPv4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Endpoint {
    pub ip: IpAddr,
    port: u16,
    /// Interface of a link-local address.
    scope: u32,
}

impl From<SocketAddr> for Endpoint {
    fn from(address: SocketAddr) -> Self {
        let scope = match address {
            SocketAddr::V6(address) => address.scope_id(),
            SocketAddr::V4(_) => 0,
        };
        Self { ip: address.ip().to_canonical(), port: address.port(), scope }
    }
}

/// The owner of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SocketOwner {
    pub inode: u32,
    pub uid: u32,
}

/// A socket that was looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lookup {
    /// At least one process has it open.
    Held(SocketOwner),
    /// It is there, and no process has it open any more.
    Closed,
    /// This machine has no such socket.
    Absent,
}

/// Finds the local TCP socket that is bound to `from` and connected to `to`.
pub(super) fn find(from: Endpoint, to: Endpoint) -> io::Result<Lookup> {
    let mut id = Vec::with_capacity(48);
    id.extend(from.port.to_be_bytes());
    id.extend(to.port.to_be_bytes());
    id.extend(words(from.ip));
    id.extend(words(to.ip));
    id.extend(from.scope.to_ne_bytes());
    // No cookie: any socket.
    id.extend([0xff; 8]);
    let any_state = u32::MAX.to_ne_bytes();
    let mut request = vec![family(from.ip), libc::IPPROTO_TCP as u8, 0, 0];
    request.extend(any_state);
    request.extend(&id);
    let reply = match query(Some(netlink::SOCK_DIAG), SOCK_DIAG_BY_FAMILY, &request) {
        Ok(reply) => reply.expect(SOCK_DIAG_BY_FAMILY)?,
        Err(Errno::NOENT) => return Ok(Lookup::Absent),
        Err(errno) => return Err(errno.into()),
    };
    let (family, state) = (reply.byte(0)?, reply.byte(1)?);
    let (uid, inode) = (reply.word(64)?, reply.word(68)?);
    // If there is no such connection the kernel returns a listener at that address, which does not
    // count.
    let is_it = state != LISTENING
        && reply.bytes(4, 4)? == &id[..4]
        && address(family, reply.bytes(8, 16)?) == Some(from.ip)
        && address(family, reply.bytes(24, 16)?) == Some(to.ip);
    Ok(match (is_it, inode) {
        (false, _) => Lookup::Absent,
        (true, 0) => Lookup::Closed,
        (true, _) => Lookup::Held(SocketOwner { inode, uid }),
    })
}

/// Finds the socket that the Unix socket with this inode is connected to; `None` if it is closed, or in
/// another network namespace.
pub(super) fn find_unix_peer(inode: u32) -> io::Result<Option<u32>> {
    let mut request = vec![libc::AF_UNIX as u8, 0, 0, 0];
    let any_state = u32::MAX.to_ne_bytes();
    request.extend(any_state);
    request.extend(inode.to_ne_bytes());
    request.extend(SHOW_PEER.to_ne_bytes());
    // No cookie: any socket.
    request.extend([0xff; 8]);
    let reply = match query(Some(netlink::SOCK_DIAG), SOCK_DIAG_BY_FAMILY, &request) {
        Ok(reply) => reply.expect(SOCK_DIAG_BY_FAMILY)?,
        Err(Errno::NOENT) => return Ok(None),
        Err(errno) => return Err(errno.into()),
    };
    if reply.byte(0)? != libc::AF_UNIX as u8 || reply.word(4)? != inode {
        return Err(malformed());
    }
    // The attributes follow a head of 16 bytes, each aligned to four bytes.
    let mut at = 16;
    while let Ok(head) = reply.word(at) {
        let head = head.to_ne_bytes();
        let length = usize::from(u16::from_ne_bytes([head[0], head[1]]));
        let kind = u16::from_ne_bytes([head[2], head[3]]);
        if kind == UNIX_PEER {
            return Ok(Some(reply.word(at + 4)?).filter(|peer| *peer != 0));
        }
        at += length.max(4).next_multiple_of(4);
    }
    Ok(None)
}

/// Whether packets to this address stay on this machine, as far as the routing table tells: an anycast
/// address is one of this machine's, and others that are not sent to one host belong to no other machine.
pub(super) fn is_local(ip: IpAddr) -> io::Result<bool> {
    let octets = match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    let mut request = vec![family(ip), octets.len() as u8 * 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    request.extend((4 + octets.len() as u16).to_ne_bytes());
    request.extend(ROUTE_DESTINATION.to_ne_bytes());
    request.extend(octets);
    match query(ROUTE, GET_ROUTE, &request) {
        Ok(reply) => Ok(reply.expect(NEW_ROUTE)?.byte(7)? != ROUTE_TO_ANOTHER_HOST),
        // No route at all.
        Err(Errno::NETUNREACH | Errno::HOSTUNREACH | Errno::ACCESS | Errno::INVAL) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

fn family(ip: IpAddr) -> u8 {
    match ip {
        IpAddr::V4(_) => libc::AF_INET as u8,
        IpAddr::V6(_) => libc::AF_INET6 as u8,
    }
}

/// Four 32-bit words in network order; an IPv4 address uses the first.
fn words(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => {
            let [a, b, c, d] = ip.octets();
            Ipv6Addr::from([a, b, c, d, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]).octets()
        }
        IpAddr::V6(ip) => ip.octets(),
    }
}

/// The inverse of [`words`]. An IPv6 socket reports an IPv4 peer as an IPv4-mapped address.
fn address(family: u8, words: &[u8]) -> Option<IpAddr> {
    if family == libc::AF_INET as u8 {
        let octets: [u8; 4] = words.get(..4)?.try_into().ok()?;
        return Some(octets.into());
    }
    let octets: [u8; 16] = words.try_into().ok()?;
    Some(IpAddr::from(octets).to_canonical())
}

/// A netlink reply without its header.
struct Reply {
    kind: u16,
    content: Vec<u8>,
}

impl Reply {
    fn expect(self, kind: u16) -> io::Result<Self> {
        if self.kind == kind { Ok(self) } else { Err(malformed()) }
    }

    fn bytes(&self, at: usize, count: usize) -> io::Result<&[u8]> {
        self.content.get(at..at + count).ok_or_else(malformed)
    }

    fn byte(&self, at: usize) -> io::Result<u8> {
        self.bytes(at, 1).map(|bytes| bytes[0])
    }

    fn word(&self, at: usize) -> io::Result<u32> {
        word(&self.content, at).ok_or_else(malformed)
    }
}

fn malformed() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "malformed netlink answer")
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes: [u8; 4] = bytes.get(at..at + 4)?.try_into().ok()?;
    Some(u32::from_ne_bytes(bytes))
}

fn query(protocol: Option<Protocol>, kind: u16, request: &[u8]) -> rustix::io::Result<Reply> {
    let socket = Socket::open(protocol)?;
    connect(&socket.fd, &SocketAddrNetlink::new(KERNEL, 0))?;
    let length = HEADER + request.len();
    let mut message = Vec::with_capacity(length);
    message.extend((length as u32).to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend(REQUEST.to_ne_bytes());
    message.extend(socket.sequence.to_ne_bytes());
    message.extend(socket.port.to_ne_bytes());
    message.extend(request);
    send(&socket.fd, &message, SendFlags::empty())?;
    socket.receive()
}

/// A netlink socket for one query.
struct Socket {
    fd: OwnedFd,
    /// Its address.
    port: u32,
    /// The number of its query.
    sequence: u32,
}

impl Socket {
    fn open(protocol: Option<Protocol>) -> rustix::io::Result<Self> {
        let fd =
            socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, protocol)?;
        // The kernel chooses the port.
        bind(&fd, &SocketAddrNetlink::new(0, 0))?;
        let port = SocketAddrNetlink::try_from(getsockname(&fd)?)?.pid();
        let sequence = getrandom::u32().map_err(|_| Errno::IO)?;
        Ok(Self { fd, port, sequence })
    }

    /// Receives the kernel's reply; skips messages of other senders, a few of which can have arrived before
    /// the socket was connected.
    fn receive(&self) -> rustix::io::Result<Reply> {
        for _ in 0..MAX_FOREIGN {
            let mut reply = vec![0; 8 << 10];
            let (received, _, sender) =
                recvfrom(&self.fd, reply.as_mut_slice(), RecvFlags::DONTWAIT)?;
            let sender = sender.ok_or(Errno::BADMSG)?;
            if SocketAddrNetlink::try_from(sender)?.pid() == KERNEL {
                reply.truncate(received);
                return self.parse(reply);
            }
        }
        Err(Errno::BADMSG)
    }

    fn parse(&self, mut reply: Vec<u8>) -> rustix::io::Result<Reply> {
        let length = word(&reply, 0).ok_or(Errno::BADMSG)? as usize;
        let sequence = word(&reply, 8).ok_or(Errno::BADMSG)?;
        let port = word(&reply, 12).ok_or(Errno::BADMSG)?;
        let is_ours = sequence == self.sequence && port == self.port;
        if !is_ours || length > reply.len() || length < HEADER {
            return Err(Errno::BADMSG);
        }
        reply.truncate(length);
        let kind = u16::from_ne_bytes([reply[4], reply[5]]);
        let content = reply.split_off(HEADER);
        if kind == ERROR {
            let code = word(&content, 0).ok_or(Errno::BADMSG)?.cast_signed();
            return Err(Errno::from_raw_os_error(code.saturating_neg()));
        }
        Ok(Reply { kind, content })
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::os::unix::fs::MetadataExt;

    use rustix::net::sendto;

    use super::*;

    fn inode(socket: &impl AsFd) -> u32 {
        let file = std::fs::File::from(socket.as_fd().try_clone_to_owned().unwrap());
        file.metadata().unwrap().ino().try_into().unwrap()
    }

    /// The peer's inode as the kernel reports it, and as it is, for a connection to this address.
    fn peer_of_connection(listen: &str, to: &str) -> Option<(u32, u32)> {
        let listener = TcpListener::bind(listen).ok()?;
        let port = listener.local_addr().unwrap().port();
        let client = TcpStream::connect(format!("{to}:{port}")).ok()?;
        let (accepted, peer) = listener.accept().unwrap();
        let found = find(peer.into(), accepted.local_addr().unwrap().into()).unwrap();
        let Lookup::Held(owner) = found else { panic!("the client's socket: {found:?}") };
        Some((owner.inode, inode(&client)))
    }

    #[test]
    fn peer_socket_is_found_for_every_address_family() {
        let pairs = [
            ("127.0.0.1:0", "127.0.0.1"),
            ("0.0.0.0:0", "127.0.0.2"),
            ("[::1]:0", "[::1]"),
            ("[::]:0", "[::1]"),
            ("[::]:0", "127.0.0.1"),
            ("[::]:0", "[::ffff:127.0.0.1]"),
        ];
        let found: Vec<_> =
            pairs.iter().filter_map(|(listen, to)| peer_of_connection(listen, to)).collect();
        assert!(found.len() >= 2, "IPv4 at least");
        for (found, expected) in found {
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn the_peer_of_a_unix_socket_is_found_until_it_closes() {
        use std::os::unix::net::{UnixListener, UnixStream};
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let client = UnixStream::connect(&path).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        assert_eq!(find_unix_peer(inode(&accepted)).unwrap(), Some(inode(&client)));
        assert_eq!(find_unix_peer(inode(&client)).unwrap(), Some(inode(&accepted)));
        assert_eq!(find_unix_peer(inode(&listener)).unwrap(), None);
        drop(client);
        assert_eq!(find_unix_peer(inode(&accepted)).unwrap(), None, "its peer is gone");
    }

    #[test]
    fn socket_without_a_holder_is_closed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let here = listener.local_addr().unwrap();
        let client = TcpStream::connect(here).unwrap();
        let (_accepted, peer) = listener.accept().unwrap();
        assert!(matches!(find(peer.into(), here.into()).unwrap(), Lookup::Held(_)));
        drop(client);
        assert_eq!(find(peer.into(), here.into()).unwrap(), Lookup::Closed);
        // The kernel would return the listener at this address.
        let unused = SocketAddr::new(here.ip(), 1);
        assert_eq!(find(here.into(), unused.into()).unwrap(), Lookup::Absent);
    }

    /// A reply as the kernel would send it to this socket.
    fn forge(to: &Socket, sequence: u32, port: u32) -> Vec<u8> {
        let length = (HEADER + 72) as u32;
        let mut message = length.to_ne_bytes().to_vec();
        message.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        message.extend([0; 2]);
        message.extend((to.sequence ^ sequence).to_ne_bytes());
        message.extend((to.port ^ port).to_ne_bytes());
        message.extend([7; 72]);
        message
    }

    /// Any user may send to any socket of this protocol.
    const ANYBODY: Option<Protocol> = Some(netlink::USERSOCK);

    #[test]
    fn forged_reply_is_not_accepted() {
        let attacker = Socket::open(ANYBODY).unwrap();
        let forge_to = |socket: &Socket| {
            let to = SocketAddrNetlink::new(socket.port, 0);
            sendto(&attacker.fd, &forge(socket, 0, 0), SendFlags::empty(), &to)
        };
        let open = Socket::open(ANYBODY).unwrap();
        for _ in 0..3 {
            forge_to(&open).expect("the forged reply arrives");
        }
        let received = open.receive().map(|reply| reply.kind);
        assert_eq!(received, Err(Errno::AGAIN), "all of them are skipped");
        for _ in 0..MAX_FOREIGN {
            forge_to(&open).unwrap();
        }
        assert_eq!(open.receive().map(|reply| reply.kind), Err(Errno::BADMSG), "and not for ever");

        let connected = Socket::open(ANYBODY).unwrap();
        connect(&connected.fd, &SocketAddrNetlink::new(KERNEL, 0)).unwrap();
        assert_eq!(forge_to(&connected), Err(Errno::CONNREFUSED));
    }

    #[test]
    fn reply_to_another_query_is_not_accepted() {
        let socket = Socket::open(ANYBODY).unwrap();
        let kind = |message| socket.parse(message).map(|reply| reply.kind);
        assert_eq!(kind(forge(&socket, 0, 0)), Ok(SOCK_DIAG_BY_FAMILY));
        for bit in 0..32 {
            assert_eq!(kind(forge(&socket, 1 << bit, 0)), Err(Errno::BADMSG));
            assert_eq!(kind(forge(&socket, 0, 1 << bit)), Err(Errno::BADMSG));
        }
        for length in 0..HEADER + 72 {
            assert_eq!(kind(forge(&socket, 0, 0)[..length].to_vec()), Err(Errno::BADMSG));
        }
    }

    #[test]
    fn local_addresses_are_recognized() {
        for local in ["127.0.0.1", "127.3.2.1"] {
            assert!(is_local(local.parse().unwrap()).unwrap(), "{local}");
        }
        for other in ["192.0.2.1", "2001:db8::1", "fe80::dead:beef"] {
            assert!(!is_local(other.parse().unwrap()).unwrap(), "{other}");
        }
    }
}
