//! The same files by other names: what is mounted more than once, and the kernel's own file systems
//! away from their places.
//!
//! Invariant: what is denied, or read-only inside of something writable, is so through every mount that
//! shows it, unless an entry names that very place. A second `/proc` shows processes of the host, and
//! is denied; the other file systems of the kernel steer it, and are never writable.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use codex_exec_server_protocol::AccessMode;

use super::facts::{Mount, Place, Resolver};
use super::order::{is_within, parent};
use super::policy::{ProtectedName, Region, ResolvedPolicy};
use super::way::Way;

/// File systems that are interfaces of the kernel rather than places for files.
const KERNEL: [&str; 30] = [
    "sysfs",
    "cgroup",
    "cgroup2",
    "debugfs",
    "tracefs",
    "securityfs",
    "bpf",
    "configfs",
    "efivarfs",
    "binfmt_misc",
    "pstore",
    "fusectl",
    "selinuxfs",
    "devtmpfs",
    "rpc_pipefs",
    // Terminals and message queues of the host.
    "devpts",
    "mqueue",
    "binder",
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

/// Adds the regions, missing names and links of every alias.
pub(super) fn close(
    policy: &mut ResolvedPolicy,
    resolver: &mut Resolver<'_>,
    ways: &mut Vec<Way>,
    mounts: &[Mount],
    table: &Table<'_>,
) {
    let kernel: Vec<(PathBuf, AccessMode, u64)> = kernel_trees(mounts).collect();
    inside_kernel_trees(policy, &kernel);
    let mut closed = kernel;
    closed.extend(second_names(policy, table));
    lower(policy, resolver, ways, closed);
    missing_names(policy, table, resolver);
    pinned_links(policy, table, resolver);
}

/// The same for the second names alone.
pub(super) fn close_names(
    policy: &mut ResolvedPolicy,
    resolver: &mut Resolver<'_>,
    ways: &mut Vec<Way>,
    table: &Table<'_>,
) {
    let closed = second_names(policy, table);
    lower(policy, resolver, ways, closed);
    pinned_links(policy, table, resolver);
}

/// Lowers the access of places that are seen through a mount.
fn lower(
    policy: &mut ResolvedPolicy,
    resolver: &mut Resolver<'_>,
    ways: &mut Vec<Way>,
    closed: Vec<(PathBuf, AccessMode, u64)>,
) {
    for (path, access, mount) in closed {
        let now = policy.access.access(&path);
        let lowers = match access {
            AccessMode::Deny => now != AccessMode::Deny,
            _ => now == AccessMode::Write,
        };
        if !lowers {
            continue;
        }
        // Every directory on the way is looked at, for it may have to keep its name.
        match resolver.resolve(&path) {
            // Another mount covers it: it is not seen by this name.
            Place::Found(found, node) if found != path || node.identity.mount != mount => {}
            Place::Found(path, node) => {
                policy.access.set(path.clone(), access);
                policy.regions.retain(|(other, _)| *other != path);
                policy.regions.push((path, Region { access, node, own: false }));
            }
            Place::Missing(..) => {}
            Place::Unreachable(obstacle) => ways.push(Way::blocked(path, obstacle)),
        }
    }
}

/// An entry that names something inside of the kernel's file systems grants no more than one that names
/// all of it.
fn inside_kernel_trees(policy: &mut ResolvedPolicy, kernel: &[(PathBuf, AccessMode, u64)]) {
    for (path, region) in &mut policy.regions {
        let tree = kernel.iter().find(|(_, _, mount)| *mount == region.node.identity.mount);
        let most = match tree {
            Some((_, most, _)) => *most,
            None => continue,
        };
        if most == AccessMode::Deny || region.access == AccessMode::Write {
            region.access = most;
            policy.access.set(path.clone(), most);
        }
    }
}

/// A name that may not come into being may not do so through another mount of its directory.
fn missing_names(policy: &mut ResolvedPolicy, table: &Table<'_>, resolver: &mut Resolver<'_>) {
    let mut found = Vec::new();
    for name in &policy.protected {
        let Ok(Some(parent)) = resolver.lookup(&name.parent) else { continue };
        for (alias, mount) in table.second_names(&name.parent, parent.identity.mount, false) {
            if shows(resolver, &alias, mount) {
                found.push(ProtectedName { parent: alias, ..name.clone() });
            }
        }
    }
    policy.protected.append(&mut found);
}

fn pinned_links(policy: &mut ResolvedPolicy, table: &Table<'_>, resolver: &mut Resolver<'_>) {
    let mut found = Vec::new();
    for (link, node) in &policy.pinned_links {
        for (alias, mount) in table.second_names(link, node.identity.mount, false) {
            let directory = parent(&alias).unwrap_or(&alias);
            if policy.access.access(directory) == AccessMode::Write
                && shows(resolver, directory, mount)
                && let Ok(Some(node)) = resolver.lookup(&alias)
            {
                found.push((alias, node));
            }
        }
    }
    policy.pinned_links.extend(found);
}

/// Whether a path is seen through this mount. Looks at every directory on the way.
fn shows(resolver: &mut Resolver<'_>, path: &Path, mount: u64) -> bool {
    matches!(
        resolver.resolve(path),
        Place::Found(found, node) if found == path && node.identity.mount == mount
    )
}

/// The kernel's file systems where they are not replaced by the sandbox's own.
fn kernel_trees(mounts: &[Mount]) -> impl Iterator<Item = (PathBuf, AccessMode, u64)> {
    let own = |path: &Path| ["/proc", "/dev"].iter().any(|own| is_within(path, Path::new(own)));
    mounts.iter().filter(move |mount| !own(&mount.point)).filter_map(|mount| {
        let access = match mount.kind.as_str() {
            "proc" => AccessMode::Deny,
            kind if KERNEL.contains(&kind) => AccessMode::Read,
            _ => return None,
        };
        Some((mount.point.clone(), access, mount.id))
    })
}

/// Where else the files of denied and read-only regions can be seen.
fn second_names(policy: &ResolvedPolicy, table: &Table<'_>) -> Vec<(PathBuf, AccessMode, u64)> {
    let mut aliases = Vec::new();
    for (path, region) in &policy.regions {
        // What is said of the whole disk is said of names, not of files.
        if region.access == AccessMode::Write || path == Path::new("/") {
            continue;
        }
        for (alias, mount) in table.second_names(path, region.node.identity.mount, true) {
            if policy.access.named(&alias).is_none() {
                aliases.push((alias, region.access, mount));
            }
        }
    }
    aliases
}

/// The mounts, by what can be asked of them.
pub(super) struct Table<'m> {
    by_id: HashMap<u64, &'m Mount>,
    /// Those of file systems that are mounted more than once.
    by_file_system: HashMap<(u32, u32), Vec<&'m Mount>>,
}

impl<'m> Table<'m> {
    pub(super) fn new(mounts: &'m [Mount]) -> Self {
        let mut by_file_system: HashMap<(u32, u32), Vec<&Mount>> = HashMap::new();
        for mount in mounts {
            by_file_system.entry(mount.file_system).or_default().push(mount);
        }
        by_file_system.retain(|_, mounts| mounts.len() > 1);
        Self { by_id: mounts.iter().map(|mount| (mount.id, mount)).collect(), by_file_system }
    }

    /// The names that a file, reached through a mount, has through others, each with its mount; and, if
    /// asked for, where parts of what is below it are mounted.
    pub(super) fn second_names(&self, path: &Path, mount: u64, parts: bool) -> Vec<(PathBuf, u64)> {
        let mut names = Vec::new();
        let Some(mount) = self.by_id.get(&mount) else { return names };
        let Some(others) = self.by_file_system.get(&mount.file_system) else { return names };
        let Ok(below) = path.strip_prefix(&mount.point) else { return names };
        let inside = join(&mount.root, below);
        for other in others.iter().filter(|other| other.id != mount.id) {
            if let Ok(below) = inside.strip_prefix(&other.root) {
                names.push((join(&other.point, below), other.id));
            } else if parts && is_within(&other.root, &inside) {
                names.push((other.point.clone(), other.id));
            }
        }
        names
    }
}

fn join(path: &Path, below: &Path) -> PathBuf {
    if below.as_os_str().is_empty() { path.to_owned() } else { path.join(below) }
}
