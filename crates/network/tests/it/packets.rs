//! A client of the transparent network that speaks IP itself: packets in, packets out, without a device.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::{Mutex, Once};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use codex_exec_network::{Namespace, Proxy};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::socket::tcp::{Socket, SocketBuffer, State};
use smoltcp::wire::{HardwareAddress, IpCidr};
use tokio::net::unix::pipe;

pub(crate) const V4: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
pub(crate) const V6: Ipv6Addr = Ipv6Addr::new(0xfd63, 0x6f64, 0x6578, 0, 0, 0, 0, 1);

/// Everything that is waited for comes within this time, or the test fails.
const PATIENCE: Duration = Duration::from_secs(30);

static PANICKED: Mutex<Vec<ThreadId>> = Mutex::new(Vec::new());

/// Takes note of panics from now on, those in tasks included, which the runtime would swallow.
pub(crate) fn watch_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            PANICKED.lock().unwrap().push(std::thread::current().id());
            hook(panic);
        }));
    });
}

/// Whether a task of this test panicked: they all run on its thread.
pub(crate) fn panicked() -> bool {
    PANICKED.lock().unwrap().contains(&std::thread::current().id())
}

/// A namespace with one program in it: this one.
pub(crate) struct Client {
    wire: Wire,
    interface: Interface,
    pub sockets: SocketSet<'static>,
    epoch: Instant,
    next_port: u16,
}

struct Wire {
    descriptor: pipe::Receiver,
    segments: VecDeque<Vec<u8>>,
    /// Packets of other protocols than TCP.
    others: Vec<Vec<u8>>,
    mtu: usize,
    /// A port, and the sequence number of the SYN-ACK that came for it. Its segments go nowhere else.
    watched: Option<(u16, Option<u32>)>,
}

impl Wire {
    fn send(&self, packet: &[u8]) {
        let _ = rustix::io::write(&self.descriptor, packet);
    }

    /// Reads what is there. `false`: the other side is gone.
    fn fill(&mut self) -> bool {
        let mut buffer = vec![0; 65_536];
        loop {
            match self.descriptor.try_read(&mut buffer) {
                Ok(0) => return false,
                Ok(length) => {
                    let packet = buffer[..length].to_vec();
                    let protocol = if packet[0] >> 4 == 4 { packet[9] } else { packet[6] };
                    if protocol == 6
                        && let Some((port, found)) = &mut self.watched
                        && packet[22..24] == port.to_be_bytes()
                    {
                        if packet[33] == 0x12 {
                            let sequence = packet[24..28].try_into().unwrap();
                            *found = Some(u32::from_be_bytes(sequence));
                        }
                        continue;
                    }
                    match protocol {
                        6 => self.segments.push_back(packet),
                        _ => self.others.push(packet),
                    }
                }
                // Said once, if the other side closed with packets unread; those of its own follow.
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
                Err(error) => return error.kind() == std::io::ErrorKind::WouldBlock,
            }
        }
    }
}

impl Client {
    /// A client whose device has this MTU, and the descriptor of its other side.
    pub(crate) fn new(mtu: usize) -> (Self, OwnedFd) {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (near, far) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        let descriptor = pipe::Receiver::from_owned_fd_unchecked(near).unwrap();
        let mut wire =
            Wire { descriptor, segments: VecDeque::new(), others: Vec::new(), mtu, watched: None };
        let mut config = Config::new(HardwareAddress::Ip);
        config.random_seed = fastrand::u64(..);
        let mut interface = Interface::new(config, &mut wire, smoltcp::time::Instant::ZERO);
        interface.update_ip_addrs(|addresses| {
            addresses.push(IpCidr::new(V4.into(), 0)).unwrap();
            addresses.push(IpCidr::new(V6.into(), 0)).unwrap();
        });
        let client = Self {
            wire,
            interface,
            sockets: SocketSet::new(Vec::new()),
            epoch: Instant::now(),
            next_port: fastrand::u16(20_000..50_000),
        };
        (client, far)
    }

    /// A client of this proxy.
    pub(crate) fn of(proxy: &Proxy) -> Self {
        let (client, tun) = Self::new(9000);
        let namespace = Namespace::new(tun);
        proxy.handle().serve_namespace(namespace).unwrap();
        client
    }

    pub(crate) fn connect(&mut self, target: SocketAddr) -> SocketHandle {
        let storage = || SocketBuffer::new(vec![0; 64 * 1024]);
        let mut socket = Socket::new(storage(), storage());
        socket.set_nagle_enabled(false);
        self.next_port += 1;
        let local: IpAddr = if target.is_ipv4() { V4.into() } else { V6.into() };
        socket.connect(self.interface.context(), target, (local, self.next_port)).unwrap();
        self.sockets.add(socket)
    }

    pub(crate) fn socket(&mut self, handle: SocketHandle) -> &mut Socket<'static> {
        self.sockets.get_mut(handle)
    }

    /// Moves packets until `done` says what it waited for.
    pub(crate) async fn until<T>(&mut self, mut done: impl FnMut(&mut Self) -> Option<T>) -> T {
        let started = Instant::now();
        loop {
            let now = smoltcp::time::Instant::from_micros(
                i64::try_from(self.epoch.elapsed().as_micros()).unwrap(),
            );
            let alive = self.wire.fill();
            self.interface.poll(now, &mut self.wire, &mut self.sockets);
            if let Some(result) = done(self) {
                return result;
            }
            assert!(alive, "the other side of the device is gone");
            assert!(started.elapsed() < PATIENCE, "nothing more happened");
            let delay = self.interface.poll_delay(now, &self.sockets);
            let delay = delay.map_or(Duration::from_millis(100), Duration::from);
            tokio::select! {
                _ = self.wire.descriptor.readable() => {}
                () = tokio::time::sleep(delay) => {}
                // Events that are no packets, such as a record of the audit.
                () = tokio::time::sleep(Duration::from_millis(5)) => {}
            }
        }
    }

    /// Whether a connection is accepted; if not, it was refused.
    pub(crate) async fn accepted(&mut self, handle: SocketHandle) -> bool {
        self.until(|client| match client.socket(handle).state() {
            State::Established => Some(true),
            State::Closed => Some(false),
            _ => None,
        })
        .await
    }

    /// Waits for the end of a connection in any way, and returns what came before it.
    pub(crate) async fn read_to_end(&mut self, handle: SocketHandle) -> Vec<u8> {
        let mut received = Vec::new();
        self.until(|client| {
            let socket = client.socket(handle);
            while socket.can_recv() {
                received.extend(socket.recv(|data| (data.len(), data.to_vec())).unwrap());
            }
            (!socket.may_recv()).then_some(())
        })
        .await;
        received
    }

    /// Sends bytes in pieces of at most `piece`, each in a segment of its own.
    pub(crate) async fn send(&mut self, handle: SocketHandle, bytes: &[u8], piece: usize) {
        for piece in bytes.chunks(piece) {
            self.until(|client| {
                let socket = client.socket(handle);
                if !socket.may_send() {
                    return Some(());
                }
                (socket.send_capacity() - socket.send_queue() >= piece.len()).then(|| {
                    socket.send_slice(piece).unwrap();
                })
            })
            .await;
        }
    }

    /// Sends a packet as it is.
    pub(crate) fn send_packet(&self, packet: &[u8]) {
        self.wire.send(packet);
    }

    /// The next packet that is not TCP.
    pub(crate) async fn next_other(&mut self) -> Vec<u8> {
        self.until(|client| (!client.wire.others.is_empty()).then(|| client.wire.others.remove(0)))
            .await
    }

    /// Waits for the SYN-ACK to a port that no socket of ours has, and returns its sequence number.
    pub(crate) async fn synchronized(&mut self, port: u16) -> u32 {
        self.wire.watched = Some((port, None));
        self.until(|client| client.wire.watched.and_then(|(_, found)| found)).await
    }

    /// Sends a datagram and waits for the packet that answers it.
    pub(crate) async fn datagram(&mut self, target: SocketAddr, payload: &[u8]) -> Vec<u8> {
        self.send_packet(&datagram(target, payload));
        self.next_other().await
    }

    /// The addresses of a name over UDP, from a nameserver that does not exist. `None`: no such name.
    pub(crate) async fn look_up(&mut self, name: &str, v6: bool) -> Option<IpAddr> {
        let server: SocketAddr =
            if v6 { "[2001:db8::53]:53" } else { "192.0.2.53:53" }.parse().unwrap();
        let query = query(name, if v6 { 28 } else { 1 });
        let mut packet = self.datagram(server, &query).await;
        // Errors about earlier connections may come before.
        while packet[if packet[0] >> 4 == 6 { 6 } else { 9 }] != 17 {
            packet = self.next_other().await;
        }
        let answer = &packet[if v6 { 48 } else { 28 }..];
        assert_eq!(answer[..2], query[..2]);
        if answer[3] & 0xf == 3 {
            return None;
        }
        assert_eq!((answer[3] & 0xf, answer[7]), (0, 1), "{answer:?}");
        let data = &answer[query.len() + 12..];
        Some(match v6 {
            false => <[u8; 4]>::try_from(data).unwrap().into(),
            true => <[u8; 16]>::try_from(data).unwrap().into(),
        })
    }
}

pub(crate) fn query(name: &str, kind: u16) -> Vec<u8> {
    let mut message = vec![fastrand::u8(..), fastrand::u8(..), 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.split('.') {
        message.push(u8::try_from(label.len()).unwrap());
        message.extend(label.as_bytes());
    }
    message.push(0);
    message.extend(kind.to_be_bytes());
    message.extend([0, 1]);
    message
}

/// A packet around a payload; checksums are left to the receiver's trust.
pub(crate) fn packet(target: IpAddr, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let length = payload.len() as u16;
    let mut packet = match target {
        IpAddr::V4(target) => {
            let mut header = vec![0x45, 0];
            header.extend((length + 20).to_be_bytes());
            header.extend([0, 0, 0, 0, 64, protocol, 0, 0]);
            header.extend(V4.octets());
            header.extend(target.octets());
            header
        }
        IpAddr::V6(target) => {
            let mut header = vec![0x60, 0, 0, 0];
            header.extend(length.to_be_bytes());
            header.extend([protocol, 64]);
            header.extend(V6.octets());
            header.extend(target.octets());
            header
        }
    };
    packet.extend(payload);
    packet
}

fn datagram(target: SocketAddr, payload: &[u8]) -> Vec<u8> {
    let mut datagram = 40_000u16.to_be_bytes().to_vec();
    datagram.extend(target.port().to_be_bytes());
    datagram.extend((payload.len() as u16 + 8).to_be_bytes());
    datagram.extend([0, 0]);
    datagram.extend(payload);
    packet(target.ip(), 17, &datagram)
}

pub(crate) struct Received(Vec<u8>);
pub(crate) struct Sending<'a>(&'a Wire);

impl Device for Wire {
    type RxToken<'a> = Received;
    type TxToken<'a> = Sending<'a>;

    fn receive(&mut self, _: smoltcp::time::Instant) -> Option<(Received, Sending<'_>)> {
        let packet = self.segments.pop_front()?;
        Some((Received(packet), Sending(self)))
    }

    fn transmit(&mut self, _: smoltcp::time::Instant) -> Option<Sending<'_>> {
        Some(Sending(self))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = self.mtu;
        capabilities
    }
}

impl RxToken for Received {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(&self.0)
    }
}

impl TxToken for Sending<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, length: usize, f: F) -> R {
        let mut packet = vec![0; length];
        let result = f(&mut packet);
        self.0.send(&packet);
        result
    }
}
