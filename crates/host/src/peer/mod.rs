//! Identifies the process at the other end of a local connection: a sandboxed process must not reach
//! the server's own listener and start a process without a sandbox.
//!
//! Invariant: from just before the first sandbox with network access starts, a connection whose other end
//! is a socket of this machine is admitted only if every process that holds that socket is known and none of
//! them runs in one of our sandboxes, or is this process, whose proxies connect for sandboxes. Before that no
//! sandbox can connect, so there is no check.

mod admission;
mod netlink;
mod owners;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Semaphore;

use crate::pool;

use admission::AdmissionPolicy;
use netlink::{Endpoint, Lookup, SocketOwner};

/// Lookups that run at once: each reads all of `/proc`.
const CONCURRENT_LOOKUPS: usize = 2;

/// Attempts to find the holders of one socket, and the pause between them.
const MAX_LOOKUPS: u32 = 4;
const LOOKUP_PAUSE: Duration = Duration::from_millis(10);

/// Decides whether to admit connections from this machine. Clones share their state.
#[derive(Debug, Clone)]
pub struct Peers(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// A sandbox with network access may have started.
    watching: AtomicBool,
    /// Orphaned descendants become children of this process, so no descendant leaves the process tree.
    adopts_orphans: bool,
    lookups: Semaphore,
}

/// Why a connection was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The peer runs in one of this server's sandboxes.
    #[error("a sandboxed process may not connect to the server that started it")]
    Sandboxed,
    /// The peer is this server itself, perhaps for a process with a managed network.
    #[error("a server may not connect to itself")]
    Proxied,
    /// The peer on a Unix socket is another user's process.
    #[error("the user {uid} may not connect to this server")]
    AnotherUser {
        /// Its user id.
        uid: u32,
    },
    /// The peer is on this machine, but its process cannot be found. It may have exited, and it may
    /// have been sandboxed.
    #[error("cannot determine which local process is connecting")]
    Unknown,
}

impl Peers {
    pub(crate) fn new(adopts_orphans: bool) -> Self {
        let lookups = Semaphore::new(CONCURRENT_LOOKUPS);
        Self(Arc::new(Shared { watching: AtomicBool::new(false), adopts_orphans, lookups }))
    }

    /// Call it before spawning a sandbox with network access, of its own or through proxies of this process.
    pub(crate) fn sandbox_has_network(&self) {
        self.0.watching.store(true, Ordering::SeqCst);
    }

    /// Admits or refuses the peer of an accepted TCP connection. Costs nothing until a sandbox with network
    /// access has started, and two netlink requests for a peer on another machine.
    pub async fn admit(&self, socket: impl AsFd) -> Result<(), Refusal> {
        if !self.0.watching.load(Ordering::SeqCst) {
            return Ok(());
        }
        let Ok(_permit) = self.0.lookups.acquire().await else { return Err(Refusal::Unknown) };
        let adopts_orphans = self.0.adopts_orphans;
        let socket = socket.as_fd().try_clone_to_owned().map_err(|_| Refusal::Unknown)?;
        let lookup = pool::blocking(move || check(&socket, adopts_orphans));
        lookup.await.unwrap_or(Err(Refusal::Unknown))
    }

    /// Admits or refuses the peer of an accepted Unix socket: the user of this process and root are admitted,
    /// and, once a sandbox with network access has started, only if no sandbox holds the other end. Returns the
    /// user id of the peer.
    pub async fn admit_unix(&self, socket: impl AsFd) -> Result<u32, Refusal> {
        let credentials = rustix::net::sockopt::socket_peercred(&socket);
        let uid = credentials.map_err(|_| Refusal::Unknown)?.uid;
        let own_uid = rustix::process::geteuid();
        if uid != own_uid && !uid.is_root() {
            return Err(Refusal::AnotherUser { uid: uid.as_raw() });
        }
        // A sandboxed process has our user id, as the kernel shows it: root is not in a sandbox of ours, unless
        // we are root.
        if !self.0.watching.load(Ordering::SeqCst) || uid != own_uid {
            return Ok(uid.as_raw());
        }
        let Ok(_permit) = self.0.lookups.acquire().await else { return Err(Refusal::Unknown) };
        let adopts_orphans = self.0.adopts_orphans;
        let socket = socket.as_fd().try_clone_to_owned().map_err(|_| Refusal::Unknown)?;
        let lookup = pool::blocking(move || check_unix(&socket, adopts_orphans));
        lookup.await.unwrap_or(Err(Refusal::Unknown)).map(|()| uid.as_raw())
    }
}

/// The user id of this process.
pub fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// How many descriptors this process may have open.
pub fn descriptor_limit() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.and_then(|limit| limit.try_into().ok()).unwrap_or(usize::MAX)
}

fn check_unix(socket: &OwnedFd, adopts_orphans: bool) -> Result<(), Refusal> {
    let unknown = |error: io::Error| {
        tracing::warn!(%error, "cannot look up the process that connects to a Unix socket");
        Refusal::Unknown
    };
    let inode = rustix::fs::fstat(socket).map_err(|errno| unknown(errno.into()))?.st_ino;
    let inode = u32::try_from(inode).map_err(|_| Refusal::Unknown)?;
    let peer = netlink::find_unix_peer(inode).map_err(unknown)?.ok_or(Refusal::Unknown)?;
    judge(peer, adopts_orphans)
}

fn check(socket: &OwnedFd, adopts_orphans: bool) -> Result<(), Refusal> {
    let unknown = |error: io::Error| {
        tracing::warn!(%error, "cannot look up the connecting process");
        Refusal::Unknown
    };
    let (here, there) = endpoints(socket).map_err(unknown)?;
    // The peer's socket has the same two addresses, swapped. If this machine has such a socket, that is the
    // peer, whatever its address: a process can choose one that the routing table does not call local.
    let SocketOwner { inode, uid } = match netlink::find(there, here).map_err(unknown)? {
        Lookup::Held(owner) => owner,
        // Closed before it was looked up. What it sent is there to be read, and its sender is not known.
        Lookup::Closed => return Err(Refusal::Unknown),
        Lookup::Absent if is_local(here.ip, there.ip) => return Err(Refusal::Unknown),
        // On another machine, or reset before it was looked up: then this end is no longer connected.
        Lookup::Absent => return endpoints(socket).map(drop).map_err(|_| Refusal::Unknown),
    };
    let own_uid = rustix::process::geteuid();
    // A sandboxed process has our user id, and so do its sockets: another user's socket is not from a
    // sandbox. Root's sandboxes may change the owner of a socket like that of any file; but root can
    // inspect every process.
    if !own_uid.is_root() && uid != own_uid.as_raw() {
        return Ok(());
    }
    judge(inode, adopts_orphans)
}

/// Judges a socket of this machine by the processes that hold it.
fn judge(inode: u32, adopts_orphans: bool) -> Result<(), Refusal> {
    let unknown = |error: io::Error| {
        tracing::warn!(%error, "cannot look up the connecting process");
        Refusal::Unknown
    };
    let admission = AdmissionPolicy::of_this_process(adopts_orphans).map_err(unknown)?;
    let mut lookups = 0;
    loop {
        let verdict = admission.check(&owners::find(inode, &admission).map_err(unknown)?);
        lookups += 1;
        // A lookup misses a holder that forks or exits meanwhile. Each lookup decides on its own, so
        // repeating one admits nothing that a single lookup would not.
        if verdict != Err(Refusal::Unknown) || lookups == MAX_LOOKUPS {
            return verdict;
        }
        std::thread::sleep(LOOKUP_PAUSE);
    }
}

/// The two ends of a connection; an error once it was reset.
fn endpoints(socket: &OwnedFd) -> io::Result<(Endpoint, Endpoint)> {
    let here = SocketAddr::try_from(rustix::net::getsockname(socket)?)?;
    let there = rustix::net::getpeername(socket)?.ok_or(io::ErrorKind::NotConnected)?;
    Ok((here.into(), SocketAddr::try_from(there)?.into()))
}

/// Whether an address that reached `here` belongs to this machine.
fn is_local(here: IpAddr, there: IpAddr) -> bool {
    // If the kernel cannot say, assume it is local.
    there.is_loopback() || there == here || netlink::is_local(there).unwrap_or(true)
}
