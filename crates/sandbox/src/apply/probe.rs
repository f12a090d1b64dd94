//! Tries in a child process what a sandbox needs.
//!
//! Invariant: the child may be forked from a process with many threads, so it only makes system calls.

use super::sys::{self, ATTR_NODEV, ATTR_NOSUID, ATTR_RDONLY};

/// Which namespaces could be created.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct NamespaceSupport {
    pub(crate) user: bool,
    pub(crate) mount: bool,
    pub(crate) pid: bool,
    pub(crate) network: bool,
    pub(crate) pid_max: bool,
}

const USER: i32 = libc::CLONE_NEWUSER;
const MOUNT: i32 = USER | libc::CLONE_NEWNS;
const PID: i32 = MOUNT | libc::CLONE_NEWPID;
const NETWORK: i32 = USER | libc::CLONE_NEWNET | libc::CLONE_NEWIPC;

pub(crate) fn namespaces() -> NamespaceSupport {
    let pid = in_namespaces(PID, || {
        let Ok(mount) = sys::new_mount(c"proc", &[], ATTR_NOSUID | ATTR_NODEV) else { return 1 };
        let flags = rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::CLOEXEC;
        let mode = rustix::fs::Mode::empty();
        // The limit of the whole machine cannot be set from here; that of this namespace can.
        let bound = rustix::fs::openat(&mount, c"sys/kernel/pid_max", flags, mode)
            .and_then(|file| rustix::io::write(&file, b"4096"));
        if bound.is_ok() { 0 } else { 2 }
    });
    NamespaceSupport {
        user: in_namespaces(USER, || 0) == Some(0),
        mount: in_namespaces(MOUNT, || {
            let root = sys::open_absolute(std::path::Path::new("/"));
            let changed = root.and_then(|root| sys::mount_attributes(&root, ATTR_RDONLY, true));
            i32::from(changed.is_err())
        }) == Some(0),
        pid: matches!(pid, Some(0 | 2)),
        network: in_namespaces(NETWORK, || 0) == Some(0),
        pid_max: pid == Some(0),
    }
}

/// Whether seccomp filters exist: with a null program, the kernel reports EFAULT only if it supports
/// filters.
pub(crate) fn seccomp() -> bool {
    // SAFETY: a null program is refused before anything changes.
    let result = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            0,
            std::ptr::null::<libc::c_void>(),
        )
    };
    sys::check(result) == Err(rustix::io::Errno::FAULT)
}

/// The result of `try_it` in a child in these namespaces; `None` if there can be no such child.
fn in_namespaces(namespaces: i32, try_it: impl FnOnce() -> i32) -> Option<i32> {
    // SAFETY: the child makes system calls and leaves.
    match unsafe { sys::fork_into(namespaces as u64, 0) } {
        Ok(Some((pid, _pidfd))) => Some(super::outer::wait(pid)),
        Ok(None) => sys::exit_now(try_it()),
        Err(_) => None,
    }
}
