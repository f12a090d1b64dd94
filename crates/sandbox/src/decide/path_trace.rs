//! The way to what a policy names, and whether somebody inside a sandbox could have laid it.
//!
//! Invariant: no grant goes through a link that a sandboxed process could have put there, and no
//! denial or protection is left out because its way is blocked by something that a sandboxed process
//! could remove. Both are refused, naming what is in the way. A link on the way to something that is
//! taken away keeps its place instead: it is pinned.

use std::path::{Path, PathBuf};

use codex_exec_server_protocol::AccessMode;

use super::alias::MountTable;
use super::facts::{Obstacle, ResolvedPath, Resolver};
use super::paths::parent;
use super::policy::{PolicyError, ResolvedPolicy};
use super::writable_history::WritableHistory;

/// What was met on the way to one entry, where it is not plain.
#[derive(Debug, Clone)]
pub(super) struct PathTrace {
    /// As the entry names it.
    pub(super) name: PathBuf,
    pub(super) access: AccessMode,
    /// What it leads to, or would.
    pub(super) target: Option<PathBuf>,
    /// Links that were followed.
    pub(super) links: Vec<PathBuf>,
    /// Directories that were entered and left again by `..`: a link in the place of one would lead
    /// elsewhere.
    pub(super) exited: Vec<PathBuf>,
    /// What it could not be followed beyond.
    pub(super) obstacle: Option<Obstacle>,
    /// Not named by the policy, but found in what it protects: tools outside follow it as it is now,
    /// whoever laid it, so what it leads to now is what has to be protected.
    pub(super) implied: bool,
}

impl PathTrace {
    /// Resolves a path, and remembers how.
    pub(super) fn follow(
        resolver: &mut Resolver<'_>,
        path: &Path,
        access: AccessMode,
    ) -> (ResolvedPath, Self) {
        let before = (resolver.links.len(), resolver.exited.len());
        let implied = resolver.resolve(path);
        let links = resolver.links[before.0..].iter().map(|(link, _)| link.clone()).collect();
        let exited = resolver.exited[before.1..].to_vec();
        let (target, obstacle) = match &implied {
            ResolvedPath::Found(path, _) => (Some(path.clone()), None),
            ResolvedPath::Missing(parent, missing) => {
                (missing.first().map(|name| parent.join(name)), None)
            }
            ResolvedPath::Unreachable(obstacle) => (None, Some(obstacle.clone())),
        };
        let name = path.to_owned();
        (implied, Self { name, access, target, links, exited, obstacle, implied: false })
    }

    /// Whether every component of it was what it seems.
    pub(super) fn is_direct(&self) -> bool {
        self.links.is_empty() && self.exited.is_empty() && self.obstacle.is_none()
    }

    /// The way to something that is denied or protected, blocked as it is.
    pub(super) fn blocked(name: PathBuf, obstacle: Obstacle) -> Self {
        let access = AccessMode::Deny;
        let (links, exited) = (Vec::new(), Vec::new());
        Self { name, access, target: None, links, exited, obstacle: Some(obstacle), implied: false }
    }

    /// What the entry does to what is said of the place around it.
    fn effect(&self, policy: &ResolvedPolicy) -> Effect {
        let around =
            self.target.as_deref().and_then(parent).map(|above| policy.access.access(above));
        match (self.access, around) {
            (AccessMode::Deny, _) | (AccessMode::Read, Some(AccessMode::Write)) => {
                Effect::Restricts
            }
            (AccessMode::Read, Some(AccessMode::Read)) => Effect::None,
            // Even where all around is writable: what is named is not protected as metadata.
            _ => Effect::Grants,
        }
    }
}

/// What an entry does to the access around it.
#[derive(Debug, PartialEq, Eq)]
enum Effect {
    Grants,
    Restricts,
    None,
}

/// Refuses the ways that cannot be trusted, and pins the links to what is denied. To be asked once the
/// access of every entry is known.
pub(super) fn check(
    traces: &[PathTrace],
    policy: &mut ResolvedPolicy,
    writable_history: &WritableHistory,
    resolver: &mut Resolver<'_>,
    mounts: &MountTable<'_>,
) -> Result<(), PolicyError> {
    for trace in traces {
        let effect = trace.effect(policy);
        // What takes something away goes by the way as it is now, whoever laid it: what can change while
        // the sandbox runs is pinned, and the rest stays.
        let restricts = effect == Effect::Restricts;
        let sandbox_could_create =
            |directory: &Path| !trace.implied && writable_history.covers(directory);
        for link in trace.links.iter().filter(|_| effect != Effect::None) {
            // By every name that its directory has: a link is laid by any of them.
            for directory in directory_aliases(parent(link).unwrap_or(link), resolver, mounts) {
                let is_writable = policy.access.access(&directory) == AccessMode::Write;
                if is_writable && restricts {
                    let link = directory.join(link.file_name().unwrap_or_default());
                    if let ResolvedPath::Found(..) | ResolvedPath::Missing(..) =
                        resolver.resolve(&directory)
                        && let Ok(Some(node)) = resolver.lookup(&link)
                    {
                        policy.pinned_links.insert(link, node);
                    }
                } else if !restricts && (is_writable || sandbox_could_create(&directory)) {
                    return Err(PolicyError::Link { name: trace.name.clone(), link: link.clone() });
                }
            }
        }
        for directory in trace.exited.iter().filter(|_| effect != Effect::None) {
            for above in directory_aliases(parent(directory).unwrap_or(directory), resolver, mounts)
            {
                let is_writable = policy.access.access(&above) == AccessMode::Write;
                if is_writable && restricts {
                    let pinned = above.join(directory.file_name().unwrap_or_default());
                    // Looked at, with every directory on the way: each has to keep its name.
                    if let ResolvedPath::Found(pinned, _) = resolver.resolve(&pinned)
                        && let Ok(Some(_)) = resolver.lookup(&pinned)
                    {
                        policy.pinned_directories.insert(pinned);
                    }
                } else if !restricts && (is_writable || sandbox_could_create(&above)) {
                    let (name, link) = (trace.name.clone(), directory.clone());
                    return Err(PolicyError::Link { name, link });
                }
            }
        }
        if let Some(obstacle) = &trace.obstacle {
            let is_changeable = |path: &Path| {
                policy.access.access(path) == AccessMode::Write || sandbox_could_create(path)
            };
            if !is_permanent(obstacle, is_changeable) {
                return Err(PolicyError::Unreachable {
                    name: trace.name.clone(),
                    at: obstacle.path.clone(),
                    why: std::io::Error::from_raw_os_error(obstacle.errno).to_string(),
                });
            }
        }
    }
    Ok(())
}

/// The names of a directory, through every mount that shows it.
fn directory_aliases(
    directory: &Path,
    resolver: &mut Resolver<'_>,
    mounts: &MountTable<'_>,
) -> Vec<PathBuf> {
    let mut directory_aliases = vec![directory.to_owned()];
    if let Ok(Some(node)) = resolver.lookup(directory) {
        let others = mounts.aliases(directory, node.identity.mount);
        directory_aliases.extend(others.into_iter().map(|(name, _)| name));
    }
    directory_aliases
}

/// Whether nobody inside can clear an obstacle, so that what lies behind it needs no protection.
fn is_permanent(obstacle: &Obstacle, is_changeable: impl Fn(&Path) -> bool) -> bool {
    match obstacle.errno {
        // Its owner can open it, where its mode can be changed.
        libc::EACCES => !is_changeable(&obstacle.path),
        // The links on the way are pinned, or were refused.
        libc::ELOOP => true,
        // It can be replaced, where names can be changed.
        libc::ENOTDIR | libc::ENOENT => {
            !is_changeable(parent(&obstacle.path).unwrap_or(&obstacle.path))
        }
        // Nothing is known of what is there.
        _ => false,
    }
}
