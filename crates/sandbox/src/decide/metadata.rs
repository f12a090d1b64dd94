//! Protected metadata: what belongs to the tools around a project, not to what runs inside it.
//!
//! Invariant: below every writable root the top-level [`NAMES`] stay read-only unless an entry names
//! them; in a workspace root they cannot come into being either. Otherwise a command could leave a
//! hook behind that runs later, outside the sandbox.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use codex_exec_server_protocol::AccessMode;

use super::facts::{Node, NodeKind, Place, Resolver};
use super::policy::{ProtectedName, Region, ResolvedPolicy};

/// The protected names.
pub const NAMES: [&str; 3] = [".git", ".agents", ".codex"];

/// Adds the read-only regions and protected names of every writable root.
pub(super) fn protect(
    policy: &mut ResolvedPolicy,
    workspace_roots: &[PathBuf],
    resolver: &mut Resolver<'_>,
) {
    let is_writable = |root: &&PathBuf| policy.access.access(root) == AccessMode::Write;
    let workspaces: HashSet<PathBuf> =
        workspace_roots.iter().filter(is_writable).cloned().collect();
    let writable = policy
        .regions
        .iter()
        .filter(|(_, region)| region.access == AccessMode::Write && region.is_directory())
        .map(|(path, _)| path)
        .filter(|path| !workspaces.contains(*path));
    let roots: Vec<&PathBuf> = writable.chain(&workspaces).collect();
    // Decided on the entries alone, before any of the additions below.
    let mut added: Vec<(PathBuf, Node)> = Vec::new();
    let (mut protected, mut pinned) = (Vec::new(), Vec::new());
    let mut path = PathBuf::new();
    for root in roots {
        path.clone_from(root);
        path.push("name");
        for name in NAMES {
            path.set_file_name(name);
            if policy.access.named(&path).is_some() {
                continue;
            }
            let found = match resolver.facts().lookup(&path) {
                Ok(node) => Some(node),
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                Err(_) => continue,
            };
            match found {
                None if workspaces.contains(root) => protected.push(ProtectedName {
                    parent: root.clone(),
                    missing: vec![OsString::from(name)],
                    access: AccessMode::Read,
                }),
                None => {}
                Some(node) if node.kind == NodeKind::Link => {
                    if let Place::Found(target, node) = resolver.resolve(&path) {
                        added.push((target, node));
                    }
                    pinned.push((path.clone(), node));
                }
                Some(node) => {
                    if name == ".git"
                        && node.kind == NodeKind::File
                        && let Some(target) = pointed_to(&path, resolver)
                    {
                        added.push(target);
                    }
                    added.push((path.clone(), node));
                }
            }
        }
    }
    policy.protected.append(&mut protected);
    policy.pinned_links.extend(pinned);
    let stays_writable = |(path, _): &(PathBuf, Node)| {
        policy.access.access(path) != AccessMode::Write || policy.access.named(path).is_some()
    };
    added.retain(|place| !stays_writable(place));
    for (path, node) in added {
        let region = Region { access: AccessMode::Read, node, named: true };
        policy.access.insert(path.clone(), AccessMode::Read);
        policy.regions.push((path, region));
    }
}

/// The directory a `.git` pointer file (`gitdir: PATH`) leads to.
fn pointed_to(file: &Path, resolver: &mut Resolver<'_>) -> Option<(PathBuf, Node)> {
    let text = resolver.facts().read_start(file).ok()?;
    let line = text.strip_prefix(b"gitdir:")?.split(|&b| b == b'\n' || b == b'\r').next()?;
    let target = line.trim_ascii();
    if target.is_empty() {
        return None;
    }
    let target = file.parent()?.join(OsStr::from_bytes(target));
    match resolver.resolve(&target) {
        Place::Found(path, node) => Some((path, node)),
        _ => None,
    }
}
