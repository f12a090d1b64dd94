//! The kernel's file systems: interfaces, not storage.
//!
//! Invariant: none is ever writable. What shows or takes what belongs to other processes is denied: a second
//! `/proc`, and trees whose files are used up, or start something, by being read.

use std::path::Path;

use codex_exec_server_protocol::AccessMode;

use super::alias::Lowered;
use super::facts::{Facts, Mount, can_enter};
use super::paths::is_within;

/// Reading a file of these has effects: it takes events from other readers, starts or stops tracing, or answers
/// for a daemon.
const CONSUMED: [&str; 3] = ["debugfs", "tracefs", "rpc_pipefs"];

/// These have devices: terminals of others, disks.
const DEVICES: [&str; 3] = ["devtmpfs", "devpts", "binder"];

const OTHERS: [&str; 24] = [
    "sysfs",
    "cgroup",
    "cgroup2",
    "securityfs",
    "bpf",
    "configfs",
    "efivarfs",
    "binfmt_misc",
    "pstore",
    "fusectl",
    "selinuxfs",
    // Message queues of the host.
    "mqueue",
    "cpuset",
    "functionfs",
    "gadgetfs",
    "ibmasmfs",
    "nfsd",
    "ocfs2_dlmfs",
    "openpromfs",
    "resctrl",
    "s390_hypfs",
    "smackfs",
    "spufs",
    "xenfs",
];

/// The kernel's file systems, where the sandbox does not replace them, and the most that a policy may grant.
/// A tree that the server itself cannot enter needs no denial.
pub(super) fn lowered(mounts: &[Mount], facts: &dyn Facts) -> Vec<Lowered> {
    let elsewhere = mounts.iter().filter(|mount| !is_replaced(&mount.point));
    let lowered = elsewhere.filter_map(|mount| {
        let access = match mount.kind.as_str() {
            "proc" => AccessMode::Deny,
            kind if CONSUMED.contains(&kind) && can_enter(facts, &mount.point) => AccessMode::Deny,
            kind if is_one(kind) => AccessMode::Read,
            _ => return None,
        };
        Some((mount.point.clone(), access, mount.id))
    });
    lowered.collect()
}

/// Whether this is the type of a file system of the kernel.
pub(super) fn is_one(kind: &str) -> bool {
    kind == "proc" || [&CONSUMED[..], &DEVICES, &OTHERS].iter().any(|kinds| kinds.contains(&kind))
}

/// Whether a sandbox has its own tree here.
fn is_replaced(path: &Path) -> bool {
    ["/proc", "/dev"].iter().any(|tree| is_within(path, Path::new(tree)))
}

/// Whether a mount must stay out of a grant around it where only Landlock enforces: a sandbox with namespaces
/// has its own `/proc` and `/dev`, and opens no device on any other mount.
pub(crate) fn must_stay_apart(mount: &Mount, facts: &dyn Facts) -> bool {
    let kind = mount.kind.as_str();
    !is_replaced(&mount.point)
        && (kind == "proc" || [CONSUMED, DEVICES].concat().contains(&kind))
        && can_enter(facts, &mount.point)
}
