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
use super::order::is_within;
use super::policy::{PolicyError, Region, ResolvedPolicy};
use super::way::Way;

/// File systems that are interfaces of the kernel rather than places for files.
const KERNEL: [&str; 15] = [
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
];

/// Adds the regions of every alias.
pub(super) fn close(
    policy: &mut ResolvedPolicy,
    resolver: &mut Resolver<'_>,
    ways: &mut Vec<Way>,
) -> Result<(), PolicyError> {
    let mounts =
        resolver.facts().mounts().map_err(|error| PolicyError::Mounts(error.to_string()))?;
    let aliases: Vec<(PathBuf, AccessMode, u64)> =
        kernel_trees(&mounts).chain(second_names(policy, &mounts)).collect();
    for (path, access, mount) in aliases {
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
                policy.regions.push((path, Region { access, node }));
            }
            Place::Missing(..) => {}
            Place::Unreachable(obstacle) => ways.push(Way {
                name: path,
                access: AccessMode::Deny,
                links: Vec::new(),
                obstacle: Some(obstacle),
            }),
        }
    }
    Ok(())
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
fn second_names(policy: &ResolvedPolicy, mounts: &[Mount]) -> Vec<(PathBuf, AccessMode, u64)> {
    let mut by_file_system: HashMap<(u32, u32), Vec<&Mount>> = HashMap::new();
    for mount in mounts {
        by_file_system.entry(mount.file_system).or_default().push(mount);
    }
    by_file_system.retain(|_, mounts| mounts.len() > 1);
    let mut aliases = Vec::new();
    if by_file_system.is_empty() {
        return aliases;
    }
    let by_id: HashMap<u64, &Mount> = mounts.iter().map(|mount| (mount.id, mount)).collect();
    for (path, region) in &policy.regions {
        // What is said of the whole disk is said of names, not of files.
        if region.access == AccessMode::Write || path == Path::new("/") {
            continue;
        }
        let Some(mount) = by_id.get(&region.node.identity.mount) else { continue };
        let Some(others) = by_file_system.get(&mount.file_system) else { continue };
        let Ok(below) = path.strip_prefix(&mount.point) else { continue };
        let inside = join(&mount.root, below);
        for other in others.iter().filter(|other| other.id != mount.id) {
            let alias = if let Ok(below) = inside.strip_prefix(&other.root) {
                join(&other.point, below)
            } else if is_within(&other.root, &inside) {
                other.point.clone()
            } else {
                continue;
            };
            if policy.access.named(&alias).is_none() {
                aliases.push((alias, region.access, other.id));
            }
        }
    }
    aliases
}

fn join(path: &Path, below: &Path) -> PathBuf {
    if below.as_os_str().is_empty() { path.to_owned() } else { path.join(below) }
}
