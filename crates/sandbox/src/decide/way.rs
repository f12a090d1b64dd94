//! The way to what a policy names, and whether somebody inside a sandbox could have laid it.
//!
//! Invariant: no grant goes through a link that a sandboxed process could have put there, and no
//! denial or protection is left out because its way is blocked by something that a sandboxed process
//! could remove. Both are refused, naming what is in the way. A link on the way to something that is
//! taken away keeps its place instead: it is pinned.

use std::path::{Path, PathBuf};

use codex_exec_server_protocol::AccessMode;

use super::alias::Table;
use super::facts::{Obstacle, Place, Resolver};
use super::order::parent;
use super::policy::{PolicyError, ResolvedPolicy};
use super::written::Written;

/// What was met on the way to one entry, where it is not plain.
#[derive(Debug, Clone)]
pub(super) struct Way {
    /// As the entry names it.
    pub(super) name: PathBuf,
    pub(super) access: AccessMode,
    /// What it leads to, or would.
    pub(super) place: Option<PathBuf>,
    /// Links that were followed.
    pub(super) links: Vec<PathBuf>,
    /// Directories that were entered and left again by `..`: a link in the place of one would lead
    /// elsewhere.
    pub(super) left: Vec<PathBuf>,
    /// What it could not be followed beyond.
    pub(super) obstacle: Option<Obstacle>,
    /// Not named by the policy, but found in what it protects: tools outside follow it as it is now,
    /// whoever laid it, so what it leads to now is what has to be protected.
    pub(super) found: bool,
}

impl Way {
    /// Resolves a path, and remembers how.
    pub(super) fn follow(
        resolver: &mut Resolver<'_>,
        path: &Path,
        access: AccessMode,
    ) -> (Place, Self) {
        let before = (resolver.links.len(), resolver.left.len());
        let found = resolver.resolve(path);
        let links = resolver.links[before.0..].iter().map(|(link, _)| link.clone()).collect();
        let left = resolver.left[before.1..].to_vec();
        let (place, obstacle) = match &found {
            Place::Found(path, _) => (Some(path.clone()), None),
            Place::Missing(parent, missing) => {
                (missing.first().map(|name| parent.join(name)), None)
            }
            Place::Unreachable(obstacle) => (None, Some(obstacle.clone())),
        };
        let name = path.to_owned();
        (found, Self { name, access, place, links, left, obstacle, found: false })
    }

    /// Whether every component of it was what it seems.
    pub(super) fn is_plain(&self) -> bool {
        self.links.is_empty() && self.left.is_empty() && self.obstacle.is_none()
    }

    /// The way to something that is denied or protected, blocked as it is.
    pub(super) fn blocked(name: PathBuf, obstacle: Obstacle) -> Self {
        let access = AccessMode::Deny;
        let (links, left) = (Vec::new(), Vec::new());
        Self { name, access, place: None, links, left, obstacle: Some(obstacle), found: false }
    }

    /// What the entry does to what is said of the place around it.
    fn effect(&self, policy: &ResolvedPolicy) -> Effect {
        let around =
            self.place.as_deref().and_then(parent).map(|above| policy.access.access(above));
        match (self.access, around) {
            (AccessMode::Deny, _) | (AccessMode::Read, Some(AccessMode::Write)) => {
                Effect::TakesAway
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
    TakesAway,
    None,
}

/// Refuses the ways that cannot be trusted, and pins the links to what is denied. To be asked once the
/// access of every entry is known.
pub(super) fn check(
    ways: &[Way],
    policy: &mut ResolvedPolicy,
    written: &Written,
    resolver: &mut Resolver<'_>,
    mounts: &Table<'_>,
) -> Result<(), PolicyError> {
    for way in ways {
        let effect = way.effect(policy);
        // What takes something away goes by the way as it is now, whoever laid it: what can change while
        // the sandbox runs is pinned, and the rest stays.
        let takes_away = effect == Effect::TakesAway;
        let could_be_laid = |directory: &Path| !way.found && written.covers(directory);
        for link in way.links.iter().filter(|_| effect != Effect::None) {
            // By every name that its directory has: a link is laid by any of them.
            for directory in names(parent(link).unwrap_or(link), resolver, mounts) {
                let is_writable = policy.access.access(&directory) == AccessMode::Write;
                if is_writable && takes_away {
                    let link = directory.join(link.file_name().unwrap_or_default());
                    if let Place::Found(..) | Place::Missing(..) = resolver.resolve(&directory)
                        && let Ok(Some(node)) = resolver.lookup(&link)
                    {
                        policy.pinned_links.insert(link, node);
                    }
                } else if !takes_away && (is_writable || could_be_laid(&directory)) {
                    return Err(PolicyError::Link { name: way.name.clone(), link: link.clone() });
                }
            }
        }
        for directory in way.left.iter().filter(|_| effect != Effect::None) {
            for above in names(parent(directory).unwrap_or(directory), resolver, mounts) {
                let is_writable = policy.access.access(&above) == AccessMode::Write;
                if is_writable && takes_away {
                    let kept = above.join(directory.file_name().unwrap_or_default());
                    // Looked at, with every directory on the way: each has to keep its name.
                    if let Place::Found(kept, _) = resolver.resolve(&kept)
                        && let Ok(Some(_)) = resolver.lookup(&kept)
                    {
                        policy.kept_directories.insert(kept);
                    }
                } else if !takes_away && (is_writable || could_be_laid(&above)) {
                    let (name, link) = (way.name.clone(), directory.clone());
                    return Err(PolicyError::Link { name, link });
                }
            }
        }
        if let Some(obstacle) = &way.obstacle {
            let is_changeable = |path: &Path| {
                policy.access.access(path) == AccessMode::Write || could_be_laid(path)
            };
            if !stays(obstacle, is_changeable) {
                return Err(PolicyError::Unreachable {
                    name: way.name.clone(),
                    at: obstacle.path.clone(),
                    why: std::io::Error::from_raw_os_error(obstacle.errno).to_string(),
                });
            }
        }
    }
    Ok(())
}

/// The names of a directory, through every mount that shows it.
fn names(directory: &Path, resolver: &mut Resolver<'_>, mounts: &Table<'_>) -> Vec<PathBuf> {
    let mut names = vec![directory.to_owned()];
    if let Ok(Some(node)) = resolver.lookup(directory) {
        let others = mounts.second_names(directory, node.identity.mount);
        names.extend(others.into_iter().map(|(name, _)| name));
    }
    names
}

/// Whether nobody inside can clear an obstacle, so that what lies behind it needs no protection.
fn stays(obstacle: &Obstacle, is_changeable: impl Fn(&Path) -> bool) -> bool {
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
