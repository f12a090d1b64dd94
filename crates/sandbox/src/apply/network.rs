//! The empty network: one network namespace for all sandboxes of a server that have no network.
//!
//! Making a network namespace costs more than all the rest of a sandbox, and one without a usable
//! interface is like any other. So the server has one made, and every sandbox without network enters
//! it. There is nothing in it to meet in: its loopback is down, and the seccomp program of everyone in
//! it refuses every socket that could be bound or connected.
//!
//! Invariant: nobody in it has a capability over it. It belongs to the server's own user namespace, or
//! to one made for the purpose that no sandboxed process is in.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::pipe::PipeFlags;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::{during, outer, sys};
use crate::status::{Failure, Stage};

/// The empty network of a server.
#[derive(Debug, Clone)]
pub(crate) struct EmptyNetwork {
    /// The network namespace.
    pub(crate) network: Arc<OwnedFd>,
    /// The user namespace it belongs to, which has to be entered first; none for root.
    pub(crate) user: Option<Arc<OwnedFd>>,
}

impl EmptyNetwork {
    /// Has one made by a child process, which then ends. `None` where it cannot be: every sandbox
    /// makes its own then.
    pub(crate) fn make() -> Option<Self> {
        let root = rustix::process::geteuid().is_root();
        let user = if root { 0 } else { libc::CLONE_NEWUSER };
        // It ends by itself when its parent does: a death signal would come too late for a parent that is
        // killed before the child has asked for it.
        let (end, parent) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).ok()?;
        // SAFETY: the child closes a descriptor of its own and makes two system calls, the second of
        // which never returns.
        let forked = unsafe { sys::fork_into((libc::CLONE_NEWNET | user) as u64, 0) };
        let (pid, pidfd) = match forked {
            Ok(Some(child)) => child,
            Ok(None) => {
                drop(parent);
                let _ = rustix::io::retry_on_intr(|| rustix::io::read(&end, &mut [0; 1]));
                sys::exit_now(0)
            }
            Err(_) => return None,
        };
        let open = |kind: &str| File::open(format!("/proc/{pid}/ns/{kind}")).ok();
        let made = || {
            if !root {
                outer::map_identities(pid).ok()?;
            }
            let network = Arc::new(OwnedFd::from(open("net")?));
            let user = if root { None } else { Some(Arc::new(OwnedFd::from(open("user")?))) };
            Some(Self { network, user })
        };
        let made = made();
        let _ = rustix::process::pidfd_send_signal(&pidfd, rustix::process::Signal::KILL);
        outer::wait(pid);
        made
    }
}

/// Enters a server's empty network.
pub(super) fn enter(network: &OwnedFd, user: Option<&OwnedFd>) -> Result<(), Failure> {
    let enter = || -> Result<(), Errno> {
        use std::os::fd::AsFd;
        if let Some(user) = user {
            move_into_link_name_space(user.as_fd(), Some(LinkNameSpaceType::User))?;
            // Entering made this process opaque, to its own child's id maps too.
            sys::prctl(libc::PR_SET_DUMPABLE, 1)?;
        }
        move_into_link_name_space(network.as_fd(), Some(LinkNameSpaceType::Network))
    };
    enter().map_err(during(Stage::Namespaces))
}
