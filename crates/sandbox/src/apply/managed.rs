//! The managed network, inside: sets up the namespace of this process and hands its sockets to the
//! server.
//!
//! Invariant: nothing leads out of the namespace but what the server was given. This process closes its
//! copies, and drops the capability to change the namespace before the target exists.

use std::ffi::{CStr, c_ulong};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    bind, listen, sendmsg, socket_with,
};

use super::{during, sys};
use crate::network::{Counts, MAX_DESCRIPTORS, TUN_ADDRESS_V4, TUN_ADDRESS_V6, TUN_MTU};
use crate::plan::ManagedNamespace;
use crate::status::{Failure, Stage};

/// Connections that wait for the server; the kernel may allow fewer.
const BACKLOG: i32 = 4096;

const DNS: u16 = 53;

const LOOPBACK: &CStr = c"lo";
const TUN: &CStr = c"tun0";
const TUN_DEVICE: &CStr = c"/dev/net/tun";
const TUNSETIFF: c_ulong = 0x4004_54ca;

/// Step `Network`. Call it while this process has every capability in its namespaces, and the host's
/// `/dev` is still visible.
pub(super) fn hand_over(namespace: &ManagedNamespace, socket: &OwnedFd) -> Result<(), Failure> {
    let failed = during(Stage::Network);
    let control = control_socket(AddressFamily::INET).map_err(&failed)?;
    Interface { name: LOOPBACK, control: &control }.set_up().map_err(&failed)?;
    let mut fds = Vec::new();
    for &port in &namespace.ports {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        fds.push(listener(address).map_err(at_address(address))?);
    }
    let tun = namespace.transparent.then(|| tun(&control));
    let tun_errno = match &tun {
        Some(Err(errno)) => errno.raw_os_error(),
        _ => 0,
    };
    let tun = tun.and_then(Result::ok);
    let has_tun = tun.is_some();
    fds.extend(tun);
    let mut nameservers = 0;
    for &address in &namespace.nameservers {
        let address = SocketAddr::from((address, DNS));
        match (datagrams(address), listener(address)) {
            (Ok(udp), Ok(tcp)) => {
                fds.extend([udp, tcp]);
                nameservers += 1;
            }
            // The kernel has no IPv6.
            (Err(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL), _) if address.is_ipv6() => {}
            (Err(errno), _) | (_, Err(errno)) => return Err(at_address(address)(errno)),
        }
    }
    let counts =
        Counts { listeners: namespace.ports.len() as u8, tun: has_tun, tun_errno, nameservers };
    send(socket, counts, &fds).map_err(failed)
}

fn at_address(address: SocketAddr) -> impl Fn(Errno) -> Failure {
    move |errno| Failure::new(Stage::Network, errno.raw_os_error(), address.to_string())
}

fn send(socket: &OwnedFd, counts: Counts, fds: &[OwnedFd]) -> rustix::io::Result<()> {
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(Errno::TOOBIG);
    }
    let text = counts.encode();
    let parts = [IoSlice::new(&text)];
    rustix::io::retry_on_intr(|| sendmsg(socket, &parts, &mut ancillary, SendFlags::NOSIGNAL))?;
    Ok(())
}

fn listener(address: SocketAddr) -> rustix::io::Result<OwnedFd> {
    let socket = bound(address, SocketType::STREAM)?;
    listen(&socket, BACKLOG)?;
    Ok(socket)
}

fn datagrams(address: SocketAddr) -> rustix::io::Result<OwnedFd> {
    bound(address, SocketType::DGRAM)
}

fn bound(address: SocketAddr, kind: SocketType) -> rustix::io::Result<OwnedFd> {
    let family = match address.ip() {
        IpAddr::V4(_) => AddressFamily::INET,
        IpAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, kind, flags, None)?;
    bind(&socket, &address)?;
    Ok(socket)
}

/// A socket for configuring interfaces.
fn control_socket(family: AddressFamily) -> rustix::io::Result<OwnedFd> {
    socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
}

/// Makes a TUN interface that every address without another route leads to.
fn tun(control: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let tun = rustix::fs::open(TUN_DEVICE, flags, Mode::empty())?;
    let interface = Interface { name: TUN, control };
    let mut request = interface.request();
    request.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI) as libc::c_short;
    control_interface(&tun, TUNSETIFF, &mut request)?;
    interface.set_mtu()?;
    interface.set_address_v4()?;
    interface.set_up()?;
    interface.route_v4()?;
    // Without IPv6 its addresses are unreachable, which is right for a kernel that has none.
    let _ = interface.address_and_route_v6();
    Ok(tun)
}

/// A network interface of this namespace.
struct Interface<'a> {
    name: &'static CStr,
    control: &'a OwnedFd,
}

/// `struct in6_ifreq`.
#[repr(C)]
struct AddressRequestV6 {
    address: [u8; 16],
    prefix_length: u32,
    interface: libc::c_int,
}

/// `struct in6_rtmsg`.
#[repr(C)]
struct RouteRequestV6 {
    destination: [u8; 16],
    source: [u8; 16],
    gateway: [u8; 16],
    kind: u32,
    destination_length: u16,
    source_length: u16,
    metric: u32,
    info: c_ulong,
    flags: u32,
    interface: libc::c_int,
}

impl Interface<'_> {
    /// A request about this interface.
    fn request(&self) -> libc::ifreq {
        // SAFETY: plain data.
        let mut request = unsafe { std::mem::zeroed::<libc::ifreq>() };
        for (to, from) in request.ifr_name.iter_mut().zip(self.name.to_bytes()) {
            *to = *from as libc::c_char;
        }
        request
    }

    fn set_up(&self) -> rustix::io::Result<()> {
        let mut request = self.request();
        request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
        control_interface(self.control, libc::SIOCSIFFLAGS as c_ulong, &mut request)
    }

    fn set_mtu(&self) -> rustix::io::Result<()> {
        let mut request = self.request();
        request.ifr_ifru.ifru_mtu = libc::c_int::from(TUN_MTU);
        control_interface(self.control, libc::SIOCSIFMTU as c_ulong, &mut request)
    }

    /// The kernel gives a point-to-point interface the whole address, without a subnet.
    fn set_address_v4(&self) -> rustix::io::Result<()> {
        let mut request = self.request();
        request.ifr_ifru.ifru_addr = address_v4(TUN_ADDRESS_V4);
        control_interface(self.control, libc::SIOCSIFADDR as c_ulong, &mut request)
    }

    fn route_v4(&self) -> rustix::io::Result<()> {
        // SAFETY: plain data, in which a null pointer stands for no device.
        let mut route = unsafe { std::mem::zeroed::<libc::rtentry>() };
        route.rt_dst = address_v4(Ipv4Addr::UNSPECIFIED);
        route.rt_genmask = address_v4(Ipv4Addr::UNSPECIFIED);
        route.rt_flags = libc::RTF_UP;
        // The kernel only reads it.
        route.rt_dev = self.name.as_ptr().cast_mut();
        // SAFETY: the request reads this structure and the name, which live across the call.
        let result =
            unsafe { libc::ioctl(self.control.as_raw_fd(), libc::SIOCADDRT as _, &raw mut route) };
        sys::check(i64::from(result)).map(drop)
    }

    fn address_and_route_v6(&self) -> rustix::io::Result<()> {
        let mut request = self.request();
        control_interface(self.control, libc::SIOCGIFINDEX as c_ulong, &mut request)?;
        // SAFETY: the call has stored the index, which is a number whatever it is.
        let interface = unsafe { request.ifr_ifru.ifru_ifindex };
        let control = control_socket(AddressFamily::INET6)?;
        let address =
            AddressRequestV6 { address: TUN_ADDRESS_V6.octets(), prefix_length: 128, interface };
        let route = RouteRequestV6 {
            destination: [0; 16],
            source: [0; 16],
            gateway: [0; 16],
            kind: 0,
            destination_length: 0,
            source_length: 0,
            metric: 1,
            info: 0,
            flags: u32::from(libc::RTF_UP),
            interface,
        };
        // SAFETY: each request reads its structure, which lives across the call.
        unsafe {
            let fd = control.as_raw_fd();
            let set = libc::ioctl(fd, libc::SIOCSIFADDR as _, &raw const address);
            sys::check(i64::from(set))?;
            let routed = libc::ioctl(fd, libc::SIOCADDRT as _, &raw const route);
            sys::check(i64::from(routed)).map(drop)
        }
    }
}

/// An IPv4 address as interface requests take it.
fn address_v4(address: Ipv4Addr) -> libc::sockaddr {
    // SAFETY: plain data.
    let mut found = unsafe { std::mem::zeroed::<libc::sockaddr>() };
    found.sa_family = libc::AF_INET as libc::sa_family_t;
    // After the port, which is zero.
    for (to, from) in found.sa_data[2..].iter_mut().zip(address.octets()) {
        *to = from as libc::c_char;
    }
    found
}

fn control_interface(
    fd: &OwnedFd,
    code: c_ulong,
    request: &mut libc::ifreq,
) -> rustix::io::Result<()> {
    // SAFETY: every request that is made here reads or writes this structure, which lives across the
    // call.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), code as _, &raw mut *request) };
    sys::check(i64::from(result)).map(drop)
}
