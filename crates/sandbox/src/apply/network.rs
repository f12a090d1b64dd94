//! The empty network: one network namespace for all sandboxes of a server that have no network.
//!
//! Creating a network namespace costs more than the rest of a sandbox, and all namespaces without a
//! usable interface are alike. So the server creates one, and every sandbox without network enters it.
//! Sandboxes cannot communicate in it: its loopback is down, and their seccomp filters refuse every
//! socket that could be bound or connected.
//!
//! Invariant: no process in it has capabilities over it. It belongs to the server's own user namespace,
//! or to one created for it that no sandboxed process is in.

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
    /// The user namespace that owns it, to be entered first; `None` for root.
    pub(crate) user: Option<Arc<OwnedFd>>,
}

impl EmptyNetwork {
    /// Creates one in a child process, which then exits. `None` if that fails; then every sandbox
    /// creates its own.
    pub(crate) fn make() -> Option<Self> {
        let root = rustix::process::geteuid().is_root();
        let user = if root { 0 } else { libc::CLONE_NEWUSER };
        // The child exits when the pipe closes: a parent-death signal would not be set yet if the
        // parent is killed early.
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
            // Entering cleared the dumpable flag, which this process needs to write its child's id
            // maps.
            sys::prctl(libc::PR_SET_DUMPABLE, 1)?;
        }
        move_into_link_name_space(network.as_fd(), Some(LinkNameSpaceType::Network))
    };
    enter().map_err(during(Stage::Namespaces))
}
