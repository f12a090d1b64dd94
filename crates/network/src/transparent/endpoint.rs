//! Our end of one TCP connection: a state machine of its own, driven by the packets that arrive, by the
//! task that serves the connection, and by its timers.
//!
//! Each connection has an interface and a socket set of `smoltcp` to itself, so a packet costs the same
//! however many connections there are.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use parking_lot::Mutex;
use smoltcp::iface::{Config, Interface, PollResult, SocketHandle, SocketSet};
use smoltcp::phy::{
    Checksum, ChecksumCapabilities, Device, DeviceCapabilities, Medium, RxToken, TxToken,
};
use smoltcp::socket::tcp::{Socket, SocketBuffer, State};
use smoltcp::wire::{HardwareAddress, IpAddress, IpCidr, IpListenEndpoint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

use super::link::{Link, MAX_PACKET};
use super::packet::Flow;

/// How long a peer may leave what we sent without an answer.
const PEER_TIMEOUT: Duration = Duration::from_secs(60);
/// The most segments that are sent in one go.
const MAX_BURST: usize = 1024;

/// Our end of a connection.
pub(super) struct Endpoint {
    link: Arc<Link>,
    inner: Mutex<Inner>,
}

struct Inner {
    interface: Interface,
    sockets: SocketSet<'static>,
    handle: SocketHandle,
    /// What the time of `smoltcp` counts from.
    epoch: Instant,
    reader: Option<Waker>,
    writer: Option<Waker>,
    driver: Option<Waker>,
    /// When the driver acts next.
    due: Option<Instant>,
    /// When bytes last moved between the connection and its task.
    moved: Instant,
    /// The client has ended its direction.
    received_fin: bool,
    /// We have ended ours.
    closed: bool,
    /// The SYN has been delivered. If the socket listens afterwards, it was not taken, or reset.
    started: bool,
}

/// How a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    /// Both directions, in order.
    Closed,
    /// Reset, or the peer is silent.
    Reset,
}

impl Endpoint {
    /// An endpoint that waits for the SYN of this flow, which is to be delivered next.
    pub(super) fn new(link: Arc<Link>, flow: &Flow, buffer: usize) -> Self {
        let mut config = Config::new(HardwareAddress::Ip);
        config.random_seed = fastrand::u64(..);
        let epoch = Instant::now();
        let mut port = Port { packet: None, link: &link };
        let mut interface = Interface::new(config, &mut port, smoltcp::time::Instant::ZERO);
        let address = IpAddress::from(flow.destination.ip());
        // The whole Internet is one network here, with every address reachable.
        interface.update_ip_addrs(|addresses| {
            let _ = addresses.push(IpCidr::new(address, 0));
        });
        let buffer = buffer.max(8 * 1024);
        let storage = || SocketBuffer::new(vec![0; buffer]);
        let mut socket = Socket::new(storage(), storage());
        socket.set_nagle_enabled(false);
        socket.set_ack_delay(None);
        socket.set_timeout(Some(PEER_TIMEOUT.into()));
        // Cannot fail: the socket is new, and port 0 is no flow's.
        let listening =
            socket.listen(IpListenEndpoint { addr: Some(address), port: flow.destination.port() });
        debug_assert!(listening.is_ok());
        let mut sockets = SocketSet::new(Vec::with_capacity(1));
        let handle = sockets.add(socket);
        let inner = Inner {
            interface,
            sockets,
            handle,
            epoch,
            reader: None,
            writer: None,
            driver: None,
            due: None,
            moved: epoch,
            received_fin: false,
            closed: false,
            started: false,
        };
        Self { link, inner: Mutex::new(inner) }
    }

    /// Takes a packet of this connection. What it causes is sent by [`Endpoint::pump`].
    pub(super) fn deliver(&self, packet: &[u8]) {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        let mut port = Port { packet: Some(packet), link: &self.link };
        let now = inner.now();
        inner.interface.poll_ingress_single(now, &mut port, &mut inner.sockets);
        inner.started = true;
        let state = inner.state();
        inner.received_fin |=
            matches!(state, State::CloseWait | State::Closing | State::LastAck | State::TimeWait);
    }

    /// Sends what is to be sent, and wakes who can go on.
    pub(super) fn pump(&self) {
        let mut inner = self.inner.lock();
        inner.send(&self.link);
        inner.wake();
    }

    /// Passes received bytes to `take`, which says how many it took. `None`: the client has ended its
    /// direction.
    pub(super) fn poll_receive<R>(
        &self,
        cx: &mut Context<'_>,
        take: impl FnOnce(&[u8]) -> (usize, R),
    ) -> Poll<io::Result<Option<R>>> {
        let mut inner = self.inner.lock();
        let state = inner.state();
        let opening = matches!(state, State::SynReceived | State::Listen);
        let socket = inner.socket();
        if socket.can_recv() && !opening {
            let taken = socket.recv(|data| take(data));
            inner.moved = Instant::now();
            inner.send(&self.link);
            return Poll::Ready(taken.map(Some).map_err(|_| io::ErrorKind::ConnectionReset.into()));
        }
        match state {
            _ if inner.received_fin => Poll::Ready(Ok(None)),
            State::SynReceived | State::Established | State::FinWait1 | State::FinWait2 => {
                inner.reader = Some(cx.waker().clone());
                Poll::Pending
            }
            _ => Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())),
        }
    }

    /// Has `fill` put bytes into the free part of the send buffer; it says how many.
    pub(super) fn poll_send<R>(
        &self,
        cx: &mut Context<'_>,
        fill: impl FnOnce(&mut [u8]) -> (usize, R),
    ) -> Poll<io::Result<R>> {
        let mut inner = self.inner.lock();
        ready!(inner.poll_room(cx))?;
        let filled = inner.socket().send(fill);
        inner.moved = Instant::now();
        inner.send(&self.link);
        Poll::Ready(filled.map_err(|_| io::ErrorKind::BrokenPipe.into()))
    }

    /// Waits until bytes can be sent.
    pub(super) fn poll_room(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.inner.lock().poll_room(cx)
    }

    /// Ends our direction once everything is sent.
    pub(super) fn close(&self) {
        let mut inner = self.inner.lock();
        inner.closed = true;
        inner.socket().close();
        inner.send(&self.link);
        inner.wake();
    }

    /// Resets the connection unless it is over.
    pub(super) fn abort(&self) {
        let mut inner = self.inner.lock();
        if inner.ended().is_none() {
            inner.socket().abort();
            inner.send(&self.link);
            inner.wake();
        }
    }

    /// When bytes last moved.
    pub(super) fn moved(&self) -> Instant {
        self.inner.lock().moved
    }

    /// Runs the connection's timers until it is over.
    pub(super) async fn drive(&self) -> Ended {
        let mut alarm: Option<Pin<Box<Sleep>>> = None;
        poll_fn(|cx| {
            let mut inner = self.inner.lock();
            loop {
                if let Some(ended) = inner.ended() {
                    return Poll::Ready(ended);
                }
                inner.driver = Some(cx.waker().clone());
                let Some(due) = inner.due else { return Poll::Pending };
                let alarm = match &mut alarm {
                    Some(alarm) => {
                        if alarm.deadline() != due {
                            alarm.as_mut().reset(due);
                        }
                        alarm
                    }
                    none => none.insert(Box::pin(sleep_until(due))),
                };
                ready!(alarm.as_mut().poll(cx));
                inner.due = None;
                inner.send(&self.link);
                inner.wake();
            }
        })
        .await
    }
}

impl Inner {
    fn socket(&mut self) -> &mut Socket<'static> {
        self.sockets.get_mut(self.handle)
    }

    fn state(&self) -> State {
        self.sockets.get::<Socket<'_>>(self.handle).state()
    }

    fn now(&self) -> smoltcp::time::Instant {
        let micros = i64::try_from(self.epoch.elapsed().as_micros()).unwrap_or(i64::MAX);
        smoltcp::time::Instant::from_micros(micros)
    }

    /// A connection in TIME-WAIT counts as over: what comes late is answered with a reset.
    fn ended(&self) -> Option<Ended> {
        match self.state() {
            State::TimeWait => Some(Ended::Closed),
            State::Closed if self.received_fin && self.closed => Some(Ended::Closed),
            State::Closed => Some(Ended::Reset),
            // A reset in SYN-RECEIVED leads back to LISTEN.
            State::Listen if self.started => Some(Ended::Reset),
            _ => None,
        }
    }

    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.state() {
            State::Established | State::CloseWait if self.socket().can_send() => {
                Poll::Ready(Ok(()))
            }
            State::SynReceived | State::Established | State::CloseWait => {
                self.writer = Some(cx.waker().clone());
                Poll::Pending
            }
            _ => Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
        }
    }

    /// Sends what is to be sent now, and has the driver act when more is.
    fn send(&mut self, link: &Link) {
        let mut port = Port { packet: None, link };
        let now = self.now();
        for _ in 0..MAX_BURST {
            let sent = self.interface.poll_egress(now, &mut port, &mut self.sockets);
            if sent == PollResult::None {
                break;
            }
        }
        let Some(next) = self.interface.poll_at(now, &self.sockets) else { return };
        let micros = u64::try_from(next.total_micros()).unwrap_or(0);
        // Not at once, whatever is left to do: others have a turn first.
        let next = (self.epoch + Duration::from_micros(micros))
            .max(Instant::now() + Duration::from_millis(1));
        if self.due.is_none_or(|due| next < due) {
            self.due = Some(next);
            if let Some(driver) = self.driver.take() {
                driver.wake();
            }
        }
    }

    fn wake(&mut self) {
        let ended = self.ended().is_some();
        let socket = self.sockets.get::<Socket<'_>>(self.handle);
        let readable = socket.can_recv() || self.received_fin;
        let writable = socket.can_send();
        let mut woken = [None, None, None];
        if readable || ended {
            woken[0] = self.reader.take();
        }
        if writable || ended || self.closed {
            woken[1] = self.writer.take();
        }
        if ended {
            woken[2] = self.driver.take();
        }
        for waker in woken.into_iter().flatten() {
            waker.wake();
        }
    }
}

/// The connection as a stream of bytes.
pub(super) struct Stream(pub Arc<Endpoint>);

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let taken = self.0.poll_receive(cx, |data| {
            let length = data.len().min(buffer.remaining());
            buffer.put_slice(&data[..length]);
            (length, ())
        });
        taken.map_ok(|_| ())
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.0.poll_send(cx, |room| {
            let length = room.len().min(data.len());
            room[..length].copy_from_slice(&data[..length]);
            (length, length)
        })
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.close();
        Poll::Ready(Ok(()))
    }
}

/// What `smoltcp` takes for a device: at most one packet in, any number out.
struct Port<'a> {
    packet: Option<&'a [u8]>,
    link: &'a Link,
}

struct Received<'a>(&'a [u8]);
struct Sending<'a>(&'a Link);

impl Device for Port<'_> {
    type RxToken<'a>
        = Received<'a>
    where
        Self: 'a;
    type TxToken<'a>
        = Sending<'a>
    where
        Self: 'a;

    fn receive(
        &mut self,
        _: smoltcp::time::Instant,
    ) -> Option<(Self::RxToken<'_>, Self::TxToken<'_>)> {
        self.packet.take().map(|packet| (Received(packet), Sending(self.link)))
    }

    fn transmit(&mut self, _: smoltcp::time::Instant) -> Option<Self::TxToken<'_>> {
        Some(Sending(self.link))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        // The client says what its side of the device takes, as the greatest segment.
        capabilities.max_transmission_unit = MAX_PACKET;
        // Nothing is lost between the kernel's sums and here.
        let mut checksum = ChecksumCapabilities::ignored();
        checksum.ipv4 = Checksum::Tx;
        checksum.tcp = Checksum::Tx;
        capabilities.checksum = checksum;
        capabilities
    }
}

impl RxToken for Received<'_> {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(self.0)
    }
}

thread_local! {
    /// The packet that is being written.
    static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

impl TxToken for Sending<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, length: usize, f: F) -> R {
        SCRATCH.with_borrow_mut(|scratch| {
            if scratch.len() < length {
                scratch.resize(length, 0);
            }
            let result = f(&mut scratch[..length]);
            self.0.send(&scratch[..length]);
            result
        })
    }
}
