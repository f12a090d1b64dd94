//! Drops privileges: number of processes, capabilities, system calls.
//!
//! Invariant: after these steps neither this process nor any descendant can regain what was dropped.

use std::os::fd::{FromRawFd, OwnedFd};

use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets};

use super::{during, sys};
use crate::plan::{Operation, Tree};
use crate::status::{Failure, Stage};

/// Capabilities that root keeps inside: using files as their owner could. Otherwise a server that runs
/// as root could not write to a project of another user, although the policy allows it.
///
/// Not `CHOWN`: no file changes its owner inside. Not `FSETID`: writing to a set-id file clears those
/// bits.
const ROOT_CAPABILITIES: CapabilitySet = CapabilitySet::DAC_OVERRIDE.union(CapabilitySet::FOWNER);

/// Step `Limits`. Counts the user's processes in this user namespace only, but each of them counts for
/// the user outside too: allow at most half of the user's limit, to leave some to the server and to
/// other sandboxes. Root is never counted; the limit of the PID namespace covers that.
pub(super) fn limit_processes(processes: u32) -> Result<(), Failure> {
    let limit = match half_of_own(Resource::Nproc) {
        Some(half) => half.min(processes.into()),
        None => processes.into(),
    };
    setrlimit(Resource::Nproc, Rlimit { current: Some(limit), maximum: Some(limit) })
        .map_err(during(Stage::Limits))
}

/// Half of this process's limit; `None` if there is none.
fn half_of_own(resource: Resource) -> Option<u64> {
    let limits = rustix::process::getrlimit(resource);
    limits.current.or(limits.maximum).map(|limit| limit / 2)
}

/// Step `Limits`. Pending signals and timers are counted per user: allow half of the user's limit, to
/// leave some to other sandboxes. In its own user namespace, only what is pending inside counts.
pub(super) fn limit_signals() -> Result<(), Failure> {
    let half = half_of_own(Resource::Sigpending);
    if half.is_none() {
        return Ok(());
    }
    setrlimit(Resource::Sigpending, Rlimit { current: half, maximum: half })
        .map_err(during(Stage::Limits))
}

/// Step `Capabilities`. The bounding set can stay: with `no_new_privs` no program gains capabilities.
pub(super) fn drop_capabilities(tree: &Tree) -> Result<(), Failure> {
    let failed = during(Stage::Capabilities);
    // Processes with `DAC_OVERRIDE` could enter a masked directory.
    let masks = tree.operations.iter().any(|operation| {
        matches!(
            operation,
            Operation::Mask { directory: true, is_server_file: false, .. }
                | Operation::Skeleton { listable: false, .. }
        )
    }) || tree.placeholders.iter().any(|placeholder| placeholder.hidden);
    let keep = if rustix::process::geteuid().is_root() && !masks {
        let held = rustix::thread::capabilities(None).map_err(&failed)?;
        ROOT_CAPABILITIES & held.permitted
    } else {
        CapabilitySet::empty()
    };
    let sets =
        CapabilitySets { effective: keep, permitted: keep, inheritable: CapabilitySet::empty() };
    rustix::thread::set_capabilities(None, sets).map_err(failed)
}

/// Step `Seccomp`.
pub(super) fn load_seccomp(program: &[u64]) -> Result<(), Failure> {
    load(program, 0).map(drop)
}

/// Step `Seccomp`, with a listener for the calls that the program passes on.
pub(super) fn load_seccomp_with_listener(program: &[u64]) -> Result<OwnedFd, Failure> {
    let listener = load(program, libc::SECCOMP_FILTER_FLAG_NEW_LISTENER)?;
    // SAFETY: with this flag the answer is a new descriptor, which nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(listener as i32) })
}

fn load(program: &[u64], flags: libc::c_ulong) -> Result<i64, Failure> {
    let header = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_ptr().cast_mut().cast::<libc::sock_filter>(),
    };
    // SAFETY: an instruction is eight bytes in the layout of `sock_filter`, and aligned for it; program
    // and header live across the call, which reads them only.
    let loaded = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const header)
    };
    sys::check(loaded).map_err(during(Stage::Seccomp))
}
