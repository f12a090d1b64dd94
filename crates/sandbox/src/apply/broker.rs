//! The broker: makes connections for the sandbox, where it has the network.
//!
//! A process that can see a socket file can connect to it, even on a read-only mount, and the service
//! behind it may act for its callers: a container engine, a session bus. So with the network enabled
//! the seccomp filter passes every `connect` to the outer process, which makes the connection: to a
//! socket file only if it is on a mount that the sandbox can write to, to an IP address as requested, and
//! with no other kind of socket.
//!
//! Invariant: what is checked is what is connected to. The socket is duplicated into this process
//! before any check, the address is a copy, and a socket file is connected to through the descriptor
//! that was checked; so other threads of the caller cannot change anything in between.
//!
//! Invariant: a connection is made with no capability that the caller lacks, so that it reaches nothing
//! that the caller could not have reached by itself.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{Mode, OFlags, ResolveFlags, StatVfsMountFlags};
use rustix::io::Errno;
use rustix::thread::{CapabilitySet, CapabilitySets};

use super::sys;

/// Maximum connections being made at once; more wait.
const MAX_CONNECTIONS: usize = 64;

/// Stack size of a connecting thread, in bytes.
const STACK: usize = 128 * 1024;

/// Maximum length of an address, in bytes.
const ADDRESS: usize = size_of::<libc::sockaddr_storage>();

/// Offset of the path in the address of a socket file.
const PATH_AT: usize = std::mem::offset_of!(libc::sockaddr_un, sun_path);

const NOTIF_RECV: libc::c_ulong = 0xc050_2100;
const NOTIF_SEND: libc::c_ulong = 0xc018_2101;
const NOTIF_ID_VALID: libc::c_ulong = 0x4008_2102;

/// Receives the calls that the filter passes on.
#[derive(Debug)]
pub(super) struct Broker {
    listener: Arc<OwnedFd>,
    /// One clone for each connection being made.
    busy: Arc<()>,
}

impl Broker {
    pub(super) fn new(listener: OwnedFd) -> Self {
        Self { listener: Arc::new(listener), busy: Arc::new(()) }
    }

    /// The seccomp listener; readable when there is a call.
    pub(super) fn listener(&self) -> &OwnedFd {
        &self.listener
    }

    /// Whether another call can be handled now.
    pub(super) fn has_room(&self) -> bool {
        Arc::strong_count(&self.busy) <= MAX_CONNECTIONS
    }

    /// Receives one call and replies from a new thread, since connecting may take long.
    pub(super) fn handle_next(&self) {
        let Ok(call) = Call::receive(&self.listener) else { return };
        let (listener, busy) = (self.listener.clone(), self.busy.clone());
        let reply = move || {
            call.reply(&listener, call.connect(&listener));
            drop(busy);
        };
        if std::thread::Builder::new().stack_size(STACK).spawn(reply).is_err() {
            call.reply(&self.listener, Err(Errno::AGAIN));
        }
    }
}

/// A `connect` that waits for its reply.
#[derive(Debug, Clone, Copy)]
struct Call {
    id: u64,
    thread: u32,
    socket: i32,
    address: u64,
    length: u32,
}

impl Call {
    fn receive(listener: &OwnedFd) -> rustix::io::Result<Self> {
        // SAFETY: plain data; the kernel wants it to be zero.
        let mut call = unsafe { std::mem::zeroed::<libc::seccomp_notif>() };
        // SAFETY: the structure is the one this request stores to, and lives across the call.
        let result = unsafe { libc::ioctl(listener.as_raw_fd(), NOTIF_RECV, &raw mut call) };
        sys::check(i64::from(result))?;
        let [socket, address, length, ..] = call.data.args;
        Ok(Self {
            id: call.id,
            thread: call.pid,
            socket: socket as i32,
            address,
            length: length as u32,
        })
    }

    /// Checks that the thread still waits, so that its id was not reused.
    fn is_waiting(&self, listener: &OwnedFd) -> rustix::io::Result<()> {
        // SAFETY: the request reads a number, which lives across the call.
        let result =
            unsafe { libc::ioctl(listener.as_raw_fd(), NOTIF_ID_VALID, &raw const self.id) };
        sys::check(i64::from(result)).map(drop)
    }

    fn reply(&self, listener: &OwnedFd, result: rustix::io::Result<()>) {
        let error = result.err().map_or(0, |errno| -errno.raw_os_error());
        let reply = libc::seccomp_notif_resp { id: self.id, val: 0, error, flags: 0 };
        // SAFETY: the request reads this structure, which lives across the call. If the caller has gone
        // there is no one to reply to.
        unsafe { libc::ioctl(listener.as_raw_fd(), NOTIF_SEND, &raw const reply) };
    }

    fn connect(&self, listener: &OwnedFd) -> rustix::io::Result<()> {
        let length = self.length as usize;
        if length > ADDRESS {
            return Err(Errno::INVAL);
        }
        let Caller { process, capabilities } = Caller::of(self.thread)?;
        let mut address = [0; ADDRESS];
        let memory = File::open(format!("/proc/{process}/mem")).map_err(|error| errno(&error))?;
        memory.read_exact_at(&mut address[..length], self.address).map_err(|_| Errno::FAULT)?;
        let root = open(format!("/proc/{process}/root"))?;
        let directory = std::fs::read_link(format!("/proc/{}/cwd", self.thread))
            .map_err(|error| errno(&error))?;
        let socket = sys::take_descriptor(process as i32, self.socket)?;
        // Everything above belongs to this process.
        self.is_waiting(listener)?;
        restrict_capabilities(capabilities)?;
        match domain(&socket)? {
            libc::AF_UNIX => {}
            libc::AF_INET | libc::AF_INET6 => return connect(&socket, &address[..length]),
            libc::AF_NETLINK => return is_kernel(&address[..length]),
            _ => return Err(Errno::PERM),
        }
        let path = socket_file(&address[..length]).ok_or(Errno::PERM)?;
        let file = open_in(&root, &directory.join(path))?;
        let flags = rustix::fs::fstatvfs(&file)?.f_flag;
        if flags.contains(StatVfsMountFlags::RDONLY) {
            return Err(Errno::ACCESS);
        }
        let name = format!("/proc/self/fd/{}", file.as_raw_fd());
        let mut address = (libc::AF_UNIX as libc::sa_family_t).to_ne_bytes().to_vec();
        address.extend(name.into_bytes());
        address.push(0);
        connect(&socket, &address)
    }
}

/// The process of a calling thread, and the thread's capabilities.
#[derive(Debug, PartialEq, Eq)]
struct Caller {
    process: u32,
    capabilities: CapabilitySet,
}

impl Caller {
    fn of(thread: u32) -> rustix::io::Result<Self> {
        let status =
            std::fs::read(format!("/proc/{thread}/status")).map_err(|error| errno(&error))?;
        Self::parse(&status).ok_or(Errno::SRCH)
    }

    /// Reads a status file. The name of the program in it is any bytes; line breaks are escaped.
    fn parse(status: &[u8]) -> Option<Self> {
        let field = |name: &[u8]| {
            let value =
                status.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(name))?;
            std::str::from_utf8(value.trim_ascii()).ok()
        };
        let process = field(b"Tgid:")?.parse().ok()?;
        let capabilities = u64::from_str_radix(field(b"CapEff:")?, 16).ok()?;
        Some(Self { process, capabilities: CapabilitySet::from_bits_retain(capabilities) })
    }
}

/// Drops the capabilities of this thread that the caller lacks. Before that, they were needed to look
/// into the caller.
fn restrict_capabilities(caller: CapabilitySet) -> rustix::io::Result<()> {
    let keep = rustix::thread::capabilities(None)?.effective & caller;
    let sets =
        CapabilitySets { effective: keep, permitted: keep, inheritable: CapabilitySet::empty() };
    rustix::thread::set_capabilities(None, sets)
}

/// Accepts the kernel as the peer of a netlink socket, to which every such socket is connected from the
/// start. Connecting it here would give it the host's id of this process as its address.
fn is_kernel(address: &[u8]) -> rustix::io::Result<()> {
    let family = address.first_chunk().ok_or(Errno::INVAL)?;
    match i32::from(libc::sa_family_t::from_ne_bytes(*family)) {
        libc::AF_UNSPEC => return Ok(()),
        libc::AF_NETLINK => {}
        _ => return Err(Errno::INVAL),
    }
    let address = address.get(..size_of::<libc::sockaddr_nl>()).ok_or(Errno::INVAL)?;
    let peer = &address[std::mem::offset_of!(libc::sockaddr_nl, nl_pid)..];
    if peer.iter().all(|byte| *byte == 0) { Ok(()) } else { Err(Errno::PERM) }
}

/// The path in the address of a socket file; `None` for an address without a file. It is unknown
/// whether such a socket belongs to the sandbox.
fn socket_file(address: &[u8]) -> Option<&OsStr> {
    let path = address.get(PATH_AT..)?;
    let family = libc::sa_family_t::from_ne_bytes(*address.first_chunk()?);
    let end = path.iter().position(|byte| *byte == 0).unwrap_or(path.len());
    (i32::from(family) == libc::AF_UNIX && end > 0).then(|| OsStr::from_bytes(&path[..end]))
}

/// Opens a path in the caller's tree. If the path contains `..`, the kernel fails with `EAGAIN`
/// whenever something is renamed meanwhile.
fn open_in(root: &OwnedFd, path: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let mut tries = 0;
    loop {
        match rustix::fs::openat2(root, path, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN) if tries < 1_000 => tries += 1,
            other => return other,
        }
    }
}

fn open(path: String) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(OsString::from(path), flags, Mode::empty())
}

fn domain(socket: impl AsFd) -> rustix::io::Result<i32> {
    let mut domain: libc::c_int = 0;
    let mut size = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the option is a number, stored to one that lives across the call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_DOMAIN,
            (&raw mut domain).cast(),
            &raw mut size,
        )
    };
    sys::check(i64::from(result)).map(|_| domain)
}

fn connect(socket: &OwnedFd, address: &[u8]) -> rustix::io::Result<()> {
    // SAFETY: the address lives across the call, which reads as much as its length says.
    let result = unsafe {
        libc::connect(socket.as_raw_fd(), address.as_ptr().cast(), address.len() as libc::socklen_t)
    };
    sys::check(i64::from(result)).map(drop)
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_of_a_program_may_be_any_bytes() {
        let names: [&[u8]; 4] = [b"sh", b"\xe6\x97\xa5\xe6\x9c", b"Tgid:\\n", b"\xff\xfe CapEff:"];
        for name in names {
            let status = [b"Name:\t", name, b"\nTgid:\t42\nCapEff:\t000000000000000a\n"].concat();
            let capabilities = CapabilitySet::DAC_OVERRIDE | CapabilitySet::FOWNER;
            assert_eq!(
                Caller::parse(&status),
                Some(Caller { process: 42, capabilities }),
                "{name:?}"
            );
        }
        assert_eq!(Caller::parse(b"Name:\tsh\nTgid:\t42\n"), None, "capabilities are unknown");
        assert_eq!(Caller::of(std::process::id()).unwrap().process, std::process::id());
    }

    #[test]
    fn netlink_sockets_connect_to_the_kernel_only() {
        let address = |family: i32, port: u32, groups: u32| {
            let family = (family as libc::sa_family_t).to_ne_bytes();
            [&family[..], &[0; 2], &port.to_ne_bytes(), &groups.to_ne_bytes()].concat()
        };
        assert_eq!(is_kernel(&address(libc::AF_NETLINK, 0, 0)), Ok(()));
        assert_eq!(is_kernel(&address(libc::AF_UNSPEC, 7, 7)), Ok(()), "disconnects");
        for bit in 0..32 {
            assert_eq!(is_kernel(&address(libc::AF_NETLINK, 1 << bit, 0)), Err(Errno::PERM));
            assert_eq!(is_kernel(&address(libc::AF_NETLINK, 0, 1 << bit)), Err(Errno::PERM));
        }
        for length in 0..12 {
            let cut = &address(libc::AF_NETLINK, 0, 0)[..length];
            assert_eq!(is_kernel(cut), Err(Errno::INVAL), "{length}");
        }
        assert_eq!(is_kernel(&address(libc::AF_INET, 0, 0)), Err(Errno::INVAL));
    }
}
