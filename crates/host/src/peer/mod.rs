//! Who is at the other end of a connection from this machine: a sandboxed process must not come back
//! in through the server's own listener and ask for a process without a sandbox.
//!
//! Invariant: from the moment before the first sandbox with network starts, a connection from this
//! machine is admitted only if every process that holds its other end is known, and none of them is
//! one of our sandboxes. Before that moment nothing is looked at: no sandbox can connect.

mod admission;
mod netlink;
mod owners;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Semaphore;

use crate::pool;

use admission::AdmissionPolicy;
use netlink::{Endpoint, SocketOwner};

/// Connections that are looked at at once: each look reads all of `/proc`.
const CONCURRENT_LOOKUPS: usize = 2;

/// How often, and how long apart, the holders of one socket are looked for.
const MAX_LOOKUPS: u32 = 4;
const LOOKUP_PAUSE: Duration = Duration::from_millis(10);

/// Whether connections from this machine are admitted. Clones are the same.
#[derive(Debug, Clone)]
pub struct Peers(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// A sandbox with network may have started.
    watching: AtomicBool,
    /// Orphans become children of this process, so that no descendant ever leaves the tree.
    adopts_orphans: bool,
    lookups: Semaphore,
}

/// Why a connection is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It comes from one of this server's sandboxes.
    #[error("a sandboxed process may not connect to the server that started it")]
    Sandboxed,
    /// It comes from this machine, but from no process that can be seen: one that has ended, say, and
    /// may have been sandboxed.
    #[error("cannot determine which local process is connecting")]
    Unknown,
}

impl Peers {
    pub(crate) fn new(adopts_orphans: bool) -> Self {
        let lookups = Semaphore::new(CONCURRENT_LOOKUPS);
        Self(Arc::new(Shared { watching: AtomicBool::new(false), adopts_orphans, lookups }))
    }

    /// A sandbox that has a network is about to start. To be called before it is spawned.
    pub(crate) fn sandbox_has_network(&self) {
        self.0.watching.store(true, Ordering::SeqCst);
    }

    /// Admits the peer of an accepted connection, or refuses it. Costs nothing while no sandbox with
    /// network has started, and one request to the kernel for a peer on another machine.
    pub async fn admit(&self, local: SocketAddr, peer: SocketAddr) -> Result<(), Refusal> {
        if !self.0.watching.load(Ordering::SeqCst) {
            return Ok(());
        }
        let Ok(_permit) = self.0.lookups.acquire().await else { return Err(Refusal::Unknown) };
        let adopts_orphans = self.0.adopts_orphans;
        let lookup = pool::blocking(move || check(local, peer, adopts_orphans));
        lookup.await.unwrap_or(Err(Refusal::Unknown))
    }
}

fn check(local: SocketAddr, peer: SocketAddr, adopts_orphans: bool) -> Result<(), Refusal> {
    let (here, there) = (Endpoint::from(local), Endpoint::from(peer));
    if !is_local(here.ip, there.ip) {
        return Ok(());
    }
    let unknown = |error: io::Error| {
        tracing::warn!(%error, %peer, "cannot look up the connecting process");
        Refusal::Unknown
    };
    // The peer's socket has the same two addresses, the other way round. One that has no inode belongs
    // to nobody any more.
    let SocketOwner { inode, uid } =
        netlink::find(there, here).map_err(unknown)?.ok_or(Refusal::Unknown)?;
    let own_uid = rustix::process::geteuid();
    // Another user's socket is no sandbox's: a sandboxed process has our user id, and its sockets do.
    // Not so if we are root, whose sandboxes may change the owner of a socket as of any file; but then
    // we can look into every process.
    if !own_uid.is_root() && uid != own_uid.as_raw() {
        return Ok(());
    }
    let admission = AdmissionPolicy::of_this_process(adopts_orphans).map_err(unknown)?;
    let mut lookups = 0;
    loop {
        let verdict = admission.check(&owners::find(inode, &admission).map_err(unknown)?);
        lookups += 1;
        // A holder that forks or ends meanwhile is missed. Each look stands for itself, so to look
        // again admits nobody who would not be admitted anyway.
        if verdict != Err(Refusal::Unknown) || lookups == MAX_LOOKUPS {
            return verdict;
        }
        std::thread::sleep(LOOKUP_PAUSE);
    }
}

/// Whether an address that reached `here` belongs to this machine.
fn is_local(here: IpAddr, there: IpAddr) -> bool {
    // If the kernel cannot be asked, it may well be.
    there.is_loopback() || there == here || netlink::is_local(there).unwrap_or(true)
}
