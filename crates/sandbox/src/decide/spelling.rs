//! Other spellings of a name: a file system of another machine or program may find `Secret` as `secret`, too,
//! which the kernel then takes for another name.
//!
//! Invariant: where that is so, nothing is protected by its name: a policy that restricts anything there is
//! refused. The kernel's own file systems that ignore case are not concerned: every spelling leads to the same
//! entry of its cache, and so to the same mount.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use codex_exec_server_protocol::AccessMode;

use super::access::exceeds;
use super::facts::{Facts, Mount};
use super::kernel_trees;
use super::paths::{is_within, parent};
use super::policy::{PolicyError, Region, ResolvedPolicy};

/// File systems whose names the kernel itself compares.
const OF_THE_KERNEL: [&str; 21] = [
    "autofs",
    "bcachefs",
    "btrfs",
    "ecryptfs",
    "erofs",
    "exfat",
    "ext2",
    "ext3",
    "ext4",
    "f2fs",
    "hugetlbfs",
    "iso9660",
    "jfs",
    "ramfs",
    "reiserfs",
    "rootfs",
    "squashfs",
    "tmpfs",
    "vfat",
    "xfs",
    "zfs",
];

/// Refuses a policy that restricts a name which has other spellings.
pub(super) fn check(
    policy: &ResolvedPolicy,
    facts: &dyn Facts,
    mounts: &[Mount],
) -> Result<(), PolicyError> {
    if !mounts.iter().any(is_foreign) {
        return Ok(());
    }
    let mut checked = HashSet::new();
    for path in restricted(policy) {
        // The mount that has the name, not one at it.
        let directory = parent(&path).unwrap_or(&path);
        let around = mounts.iter().filter(|mount| is_within(directory, &mount.point));
        let Some(mount) = around.max_by_key(|mount| mount.point.as_os_str().len()) else {
            continue;
        };
        if is_foreign(mount) {
            Tree::new(mount, facts).check_names(&path, &mut checked)?;
        }
    }
    if policy.has_patterns {
        let seen = |mount: &&Mount| {
            let granted = |(path, region): &(PathBuf, Region)| {
                region.access != AccessMode::Deny && is_within(path, &mount.point)
            };
            policy.access.access(&mount.point) != AccessMode::Deny
                || policy.regions.iter().any(granted)
        };
        for mount in mounts.iter().filter(|mount| is_foreign(mount)).filter(seen) {
            Tree::new(mount, facts).check_patterns()?;
        }
    }
    Ok(())
}

fn is_foreign(mount: &Mount) -> bool {
    let kind = mount.kind.as_str();
    !OF_THE_KERNEL.contains(&kind) && !kernel_trees::is_one(kind)
}

/// Every name that must not be reached, or created, by another spelling.
fn restricted(policy: &ResolvedPolicy) -> impl Iterator<Item = PathBuf> {
    let is_less = |path: &Path, access| {
        let around = parent(path).map(|above| policy.access.access(above));
        around.is_some_and(|around| exceeds(around, access))
    };
    let regions = policy.regions.iter().filter(move |(path, region)| is_less(path, region.access));
    let missing = policy.protected.iter().map(|name| {
        let mut path = name.parent.clone();
        path.extend(&name.missing);
        path
    });
    regions
        .map(|(path, _)| path.clone())
        .chain(missing)
        .chain(policy.pinned_links.keys().cloned())
        .chain(policy.pinned_directories.iter().cloned())
}

/// A mounted file system.
struct Tree<'a> {
    mount: &'a Path,
    /// Of layers, which are alike in all directories; the plan can be used again if none is listed.
    is_layered: bool,
    facts: &'a dyn Facts,
}

impl<'a> Tree<'a> {
    fn new(mount: &'a Mount, facts: &'a dyn Facts) -> Self {
        Self { mount: &mount.point, is_layered: mount.kind == "overlay", facts }
    }

    /// Checks each name of the path below the mount.
    fn check_names(&self, path: &Path, checked: &mut HashSet<PathBuf>) -> Result<(), PolicyError> {
        let mut here = path;
        while here != self.mount {
            let (Some(directory), Some(name)) = (parent(here), here.file_name()) else { break };
            if !checked.insert(here.to_owned()) {
                break;
            }
            let tells = |other: OsString| distinguishes(directory, name, &other, self.facts);
            match respelled(name).map(tells) {
                None | Some(Some(true)) => {}
                // A missing name: what others in its directory are like decides.
                Some(None) if self.any_distinguished(directory) == Some(true) => {}
                Some(None | Some(false)) => {
                    let (name, at) = (path.to_owned(), directory.to_owned());
                    return Err(PolicyError::Spelling { name, at });
                }
            }
            here = directory;
        }
        Ok(())
    }

    /// Patterns are matched with names as they are listed: not with what else leads to the same files.
    fn check_patterns(&self) -> Result<(), PolicyError> {
        match self.any_distinguished(self.mount) {
            Some(false) => Err(PolicyError::PatternSpelling { at: self.mount.to_owned() }),
            // Without names nothing matches.
            Some(true) | None => Ok(()),
        }
    }

    /// Whether spellings are told apart in a directory: by its names, or else where its own name is, up to the
    /// mount. (File systems that decide by directory let a new one be like the one around it.)
    fn any_distinguished(&self, directory: &Path) -> Option<bool> {
        let tells = |directory: &Path, name: &OsStr| {
            distinguishes(directory, name, &respelled(name)?, self.facts)
        };
        let above = parent(directory).filter(|_| directory != self.mount);
        if self.is_layered
            && let (Some(above), Some(name)) = (above, directory.file_name())
            && let Some(known) = tells(above, name)
        {
            return Some(known);
        }
        let names = self.facts.list(directory).unwrap_or_default();
        let known = names.iter().find_map(|(name, _)| tells(directory, name));
        known.or_else(|| self.any_distinguished(above?))
    }
}

/// Whether another spelling of a name is another name; `None` if there is no such name, which does not tell.
fn distinguishes(directory: &Path, name: &OsStr, other: &OsStr, facts: &dyn Facts) -> Option<bool> {
    facts.lookup(&directory.join(name)).ok()?;
    match facts.lookup(&directory.join(other)) {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Some(true),
        Err(_) => return None,
    }
    let listed = facts.list(directory).ok()?;
    let is_listed = |name: &OsStr| listed.iter().any(|(listed, _)| listed == name);
    Some(is_listed(name) && is_listed(other))
}

/// The name with the case of its letters changed; `None` if it has no letters with case.
fn respelled(name: &OsStr) -> Option<OsString> {
    let other = match name.to_str() {
        Some(text) => OsString::from(text.chars().flat_map(flipped).collect::<String>()),
        None => {
            let bytes = name.as_bytes().iter();
            let flip = |byte: &u8| match byte.is_ascii_alphabetic() {
                true => byte ^ 0x20,
                false => *byte,
            };
            OsString::from_vec(bytes.map(flip).collect())
        }
    };
    (other != name).then_some(other)
}

/// The letter in its other case.
fn flipped(letter: char) -> Vec<char> {
    match letter.is_lowercase() {
        true => letter.to_uppercase().collect(),
        false => letter.to_lowercase().collect(),
    }
}
