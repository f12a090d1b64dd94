//! How a path of a policy was resolved, and whether a sandboxed process could have influenced that.
//!
//! Invariant: no grant goes through a link that a sandboxed process could have created, and no denial
//! or protection is omitted because of an obstacle that a sandboxed process could remove. Both are
//! refused, naming the link or the obstacle. A link on the way to something restricted is pinned
//! instead.

use std::path::{Path, PathBuf};

use codex_exec_server_protocol::AccessMode;

use super::alias::MountTable;
use super::facts::{MissingPath, Obstacle, ResolvedPath, Resolver};
use super::metadata::MAX_MISSING;
use super::paths::parent;
use super::policy::{PolicyError, ProtectedName, ResolvedPolicy};
use super::writable_history::WritableHistory;

/// The links and obstacles on the way to one path.
#[derive(Debug, Clone)]
pub(super) struct PathTrace {
    /// The path as the entry names it.
    pub(super) name: PathBuf,
    pub(super) access: AccessMode,
    /// The resolved path, or what it would be.
    pub(super) target: Option<PathBuf>,
    /// Links that were followed.
    pub(super) links: Vec<PathBuf>,
    /// Directories that were left by `..`: a link in place of one would lead elsewhere.
    pub(super) exited: Vec<PathBuf>,
    /// Missing directories that were left by `..`: whoever creates one decides where the path leads.
    pub(super) assumed: Vec<MissingPath>,
    /// Where the resolution failed.
    pub(super) obstacle: Option<Obstacle>,
    /// Not named by the policy, but implied by what it protects. Tools outside follow these links as
    /// they are now, whoever created them, so the current target must be protected.
    pub(super) implied: bool,
}

impl PathTrace {
    /// Resolves a path and records how.
    ///
    /// A restricted path may lead through missing directories (`missing/..`): the caller restricts the
    /// target and protects the [assumed](Self::assumed_names) names. A path that is not denied leads
    /// nowhere then: a grant must not depend on what somebody creates later.
    pub(super) fn follow(
        resolver: &mut Resolver<'_>,
        path: &Path,
        access: AccessMode,
    ) -> (ResolvedPath, Self) {
        let before = (resolver.links.len(), resolver.exited.len(), resolver.assumed.len());
        let mut resolved = resolver.resolve(path);
        let links = resolver.links[before.0..].iter().map(|(link, _)| link.clone()).collect();
        let exited = resolver.exited[before.1..].to_vec();
        let assumed = resolver.assumed[before.2..].to_vec();
        if let Some(first) = assumed.first()
            && access != AccessMode::Deny
        {
            let obstacle = Obstacle { path: first.path(), errno: libc::ENOENT };
            resolved = ResolvedPath::Unreachable(obstacle);
        } else if let Some(long) = assumed.iter().find(|it| it.missing.len() > MAX_MISSING) {
            let obstacle = Obstacle { path: long.parent.clone(), errno: libc::ENAMETOOLONG };
            resolved = ResolvedPath::Unreachable(obstacle);
        }
        let (target, obstacle) = match &resolved {
            ResolvedPath::Found(path, _) => (Some(path.clone()), None),
            ResolvedPath::Missing(parent, missing) => {
                (missing.first().map(|name| parent.join(name)), None)
            }
            ResolvedPath::Unreachable(obstacle) => (None, Some(obstacle.clone())),
        };
        let name = path.to_owned();
        let implied = false;
        (resolved, Self { name, access, target, links, exited, assumed, obstacle, implied })
    }

    /// Whether the path has no links, no `..` and no obstacle.
    pub(super) fn is_direct(&self) -> bool {
        self.links.is_empty()
            && self.exited.is_empty()
            && self.assumed.is_empty()
            && self.obstacle.is_none()
    }

    /// The missing directories of a restricted path, which must stay missing: each is protected like a
    /// missing target.
    pub(super) fn assumed_names(&self) -> impl Iterator<Item = ProtectedName> + '_ {
        let restricted = self.assumed.iter().filter(|_| self.access == AccessMode::Deny);
        restricted.map(|it| ProtectedName {
            parent: it.parent.clone(),
            missing: it.missing.clone(),
            access: AccessMode::Read,
        })
    }

    /// A trace of a restricted path that cannot be resolved.
    pub(super) fn blocked(name: PathBuf, obstacle: Obstacle) -> Self {
        let access = AccessMode::Deny;
        Self {
            name,
            access,
            target: None,
            links: Vec::new(),
            exited: Vec::new(),
            assumed: Vec::new(),
            obstacle: Some(obstacle),
            implied: false,
        }
    }

    /// How the entry changes the access around it.
    fn effect(&self, policy: &ResolvedPolicy) -> Effect {
        let around =
            self.target.as_deref().and_then(parent).map(|above| policy.access.access(above));
        match (self.access, around) {
            (AccessMode::Deny, _) | (AccessMode::Read, Some(AccessMode::Write)) => {
                Effect::Restricts
            }
            (AccessMode::Read, Some(AccessMode::Read)) => Effect::None,
            // Even where everything around is writable: a named path is not protected as metadata.
            _ => Effect::Grants,
        }
    }
}

/// How an entry changes the access around it.
#[derive(Debug, PartialEq, Eq)]
enum Effect {
    Grants,
    Restricts,
    None,
}

/// Refuses traces that cannot be trusted, and pins links to restricted paths. Call it once the access
/// of every entry is known.
pub(super) fn check(
    traces: &[PathTrace],
    policy: &mut ResolvedPolicy,
    writable_history: &WritableHistory,
    resolver: &mut Resolver<'_>,
    mounts: &MountTable<'_>,
) -> Result<(), PolicyError> {
    for trace in traces {
        let effect = trace.effect(policy);
        // A restriction uses the current links, whoever created them: those that can change while the
        // sandbox runs are pinned, and the others stay.
        let restricts = effect == Effect::Restricts;
        let sandbox_could_create =
            |directory: &Path| !trace.implied && writable_history.covers(directory);
        for link in trace.links.iter().filter(|_| effect != Effect::None) {
            // Through every alias of its directory, since a link can be created through any of them.
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
                    // Looked up with every directory of the path, since each must be pinned.
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

/// The paths of a directory, through every mount that shows it.
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

/// Whether nothing inside the sandbox can remove an obstacle, so that what is behind it needs no
/// protection.
fn is_permanent(obstacle: &Obstacle, is_changeable: impl Fn(&Path) -> bool) -> bool {
    match obstacle.errno {
        // Its owner can open it, if its mode can be changed.
        libc::EACCES => !is_changeable(&obstacle.path),
        // The links have been pinned or refused.
        libc::ELOOP => true,
        // It can be replaced, if its directory is writable.
        libc::ENOTDIR | libc::ENOENT => {
            !is_changeable(parent(&obstacle.path).unwrap_or(&obstacle.path))
        }
        // Nothing is known about it.
        _ => false,
    }
}
