//! Protects metadata of the tools around a project from the commands that run in it.
//!
//! Invariant: below every writable root the top-level [`NAMES`] stay read-only unless an entry names
//! them; in a workspace root they cannot be created either. Also protected, whether it exists or not,
//! is what `.git` leads to by a link, a pointer file or a `commondir` file, and the targets of links
//! directly inside these or among a repository's hooks. Otherwise a command could leave a hook that
//! runs later, outside the sandbox. If one of them leads to a writable directory around the root
//! itself, protecting it would take the root away: the policy is refused.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use codex_exec_server_protocol::AccessMode;

use super::facts::{Node, NodeKind, Obstacle, ResolvedPath, Resolver, can_enter};
use super::path_trace::PathTrace;
use super::paths::is_within;
use super::policy::{PolicyError, ProtectedName, Region, ResolvedPolicy};

/// The protected names.
pub(crate) const NAMES: [&str; 3] = [".git", ".agents", ".codex"];

/// Maximum missing names in a path: each becomes a directory for a while.
pub(super) const MAX_MISSING: usize = 64;

/// Subdirectories of a git directory that are also searched for links: hooks, attributes and names of
/// other object stores.
const IN_GIT: [&str; 3] = ["hooks", "info", "objects/info"];

/// Names in a git directory that git uses for what it runs or trusts.
const GIT_NAMES: [&str; 13] = [
    "HEAD",
    "commondir",
    "config",
    "config.worktree",
    "gitdir",
    "hooks",
    "info",
    "modules",
    "objects",
    "objects/info",
    "packed-refs",
    "refs",
    "worktrees",
];

/// Maximum links to follow in one directory: each may cost a mount.
const MAX_LINKS: usize = 1_024;

/// Adds the read-only regions and protected names of every writable root. Returns all protected paths
/// that no entry names, writable or not: they may be writable through another mount. The paths in
/// `unnamed` have an access that no entry has set.
pub(super) fn protect(
    policy: &mut ResolvedPolicy,
    workspace_roots: &[PathBuf],
    unnamed: &[PathBuf],
    resolver: &mut Resolver<'_>,
    traces: &mut Vec<PathTrace>,
) -> Result<Vec<(PathBuf, Node)>, PolicyError> {
    // Permission to write everywhere is no grant of the workspace: it is given by a user who approved a
    // command, and the entries that come with it say what still holds.
    let is_granted = |root: &&PathBuf| {
        let named = root.ancestors().find(|above| policy.access.named(above).is_some());
        named.is_some_and(|above| above.parent().is_some())
    };
    let is_writable =
        |root: &&PathBuf| policy.access.access(root) == AccessMode::Write && is_granted(root);
    let workspaces: HashSet<PathBuf> =
        workspace_roots.iter().filter(is_writable).cloned().collect();
    let writable = policy
        .regions
        .iter()
        .filter(|(_, region)| region.access == AccessMode::Write && region.is_directory())
        .map(|(path, _)| path)
        .filter(|path| !workspaces.contains(*path));
    let roots: Vec<&PathBuf> = writable.chain(&workspaces).collect();
    // Decide on the entries alone, before the additions below.
    let mut found = Protected {
        resolver,
        traces,
        root: PathBuf::new(),
        paths: Vec::new(),
        missing: Vec::new(),
        enclosing: Vec::new(),
    };
    let mut path = PathBuf::new();
    for root in roots {
        found.root.clone_from(root);
        path.clone_from(root);
        path.push("name");
        for name in NAMES {
            path.set_file_name(name);
            if policy.access.named(&path).is_some() && !unnamed.contains(&path) {
                continue;
            }
            match found.resolver.facts().lookup(&path) {
                Ok(node) => found.name(&path, node)?,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    if workspaces.contains(root) {
                        found.missing.push(ProtectedName {
                            parent: root.clone(),
                            missing: vec![OsString::from(name)],
                            access: AccessMode::Read,
                        });
                    }
                }
                Err(error) => {
                    let obstacle = Obstacle::looking_up(root, &error);
                    found.traces.push(PathTrace::blocked(path.clone(), obstacle));
                }
            }
        }
    }
    let Protected { mut paths, mut missing, enclosing, .. } = found;
    let exposed =
        enclosing.into_iter().find(|(_, at)| policy.access.access(at) == AccessMode::Write);
    if let Some((name, at)) = exposed {
        let why =
            "it is writable, holds the root that the name is in, and is used by that name outside";
        return Err(PolicyError::Unreachable { name, at, why: why.to_owned() });
    }
    policy.protected.append(&mut missing);
    paths.retain(|(path, _)| policy.access.named(path).is_none() || unnamed.contains(path));
    let is_writable =
        |(path, _): &&(PathBuf, Node)| policy.access.access(path) == AccessMode::Write;
    let writable: Vec<(PathBuf, Node)> = paths.iter().filter(is_writable).cloned().collect();
    for (path, node) in writable {
        policy.access.insert(path.clone(), AccessMode::Read);
        policy
            .regions
            .push((path, Region { access: AccessMode::Read, node, is_server_file: false }));
    }
    Ok(paths)
}

fn unreadable(name: &Path, at: &Path, error: &io::Error) -> PolicyError {
    PolicyError::Unreachable {
        name: name.to_owned(),
        at: at.to_owned(),
        why: io::Error::from_raw_os_error(error.raw_os_error().unwrap_or(libc::EIO)).to_string(),
    }
}

/// Collects what must be protected.
struct Protected<'r, 'f> {
    resolver: &'r mut Resolver<'f>,
    traces: &'r mut Vec<PathTrace>,
    /// The current root.
    root: PathBuf,
    paths: Vec<(PathBuf, Node)>,
    missing: Vec<ProtectedName>,
    /// Names that lead to a directory around the root, with that directory.
    enclosing: Vec<(PathBuf, PathBuf)>,
}

impl Protected<'_, '_> {
    /// Protects one of the names, which exists.
    fn name(&mut self, path: &Path, node: Node) -> Result<(), PolicyError> {
        let is_git = path.file_name() == Some(OsStr::new(".git"));
        let (target, node) = if node.kind == NodeKind::Link {
            match self.follow_used(path) {
                Some(found) => found,
                None => return Ok(()),
            }
        } else {
            self.paths.push((path.to_owned(), node));
            (path.to_owned(), node)
        };
        if !is_git {
            return match node.kind {
                NodeKind::Directory => self.links_in(&target, |_| true),
                _ => Ok(()),
            };
        }
        match node.kind {
            NodeKind::Directory => self.git_directory(&target),
            NodeKind::File => {
                let text = self.read(&target)?;
                let Some(text) = text.strip_prefix(b"gitdir:") else { return Ok(()) };
                // git resolves it relative to the name's directory; other tools relative to the file's,
                // which differs if the name is a link.
                let mut enclosing: Vec<&Path> =
                    [path, &target].into_iter().filter_map(Path::parent).collect();
                enclosing.dedup();
                for target in paths(text) {
                    for enclosing in &enclosing {
                        if let Some((directory, _)) = self.follow_used(&enclosing.join(target)) {
                            self.git_directory(&directory)?;
                        }
                    }
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Protects a git directory: the targets of its links, and its common directory.
    fn git_directory(&mut self, directory: &Path) -> Result<(), PolicyError> {
        self.links_in_git(directory)?;
        self.common_directory(directory)
    }

    fn links_in_git(&mut self, directory: &Path) -> Result<(), PolicyError> {
        self.links_in(directory, |name| GIT_NAMES.iter().any(|known| name == *known))?;
        for inside in IN_GIT {
            let path = directory.join(inside);
            match self.resolver.resolve(&path) {
                ResolvedPath::Found(target, _) => {
                    if target != path {
                        self.follow_used(&path);
                    }
                    self.links_in(&target, |_| false)?;
                }
                // A link to a missing target.
                ResolvedPath::Missing(..) if self.resolver.facts().lookup(&path).is_ok() => {
                    self.follow_used(&path);
                }
                ResolvedPath::Missing(..) | ResolvedPath::Unreachable(_) => {}
            }
        }
        // The root may be a directory that git uses, such as the hooks.
        let inside = self.root.strip_prefix(directory).ok();
        if inside.is_some_and(|inside| GIT_NAMES.iter().any(|known| inside == Path::new(known))) {
            self.enclosing.push((self.root.clone(), self.root.clone()));
        }
        Ok(())
    }

    /// Protects the targets of links in a directory; `is_used` tells which names tools use.
    fn links_in(
        &mut self,
        directory: &Path,
        is_used: impl Fn(&OsStr) -> bool,
    ) -> Result<(), PolicyError> {
        let facts = self.resolver.facts();
        if !facts.lookup(directory).is_ok_and(|node| node.kind == NodeKind::Directory) {
            return Ok(());
        }
        let links = match facts.links(directory) {
            Ok(links) => links,
            Err(error) if error.raw_os_error() == Some(libc::EACCES) => {
                // Tools of this user follow links that they know the names of.
                if can_enter(facts, directory) {
                    let why = "it can be entered but not listed, so what its links lead to cannot be \
                               protected; make it listable, or name the metadata directory in an entry";
                    return Err(PolicyError::Unreachable {
                        name: directory.to_owned(),
                        at: directory.to_owned(),
                        why: why.to_owned(),
                    });
                }
                // Its mode cannot be changed inside; a process that could change it before could also
                // write to it.
                return Ok(());
            }
            Err(error) => return Err(unreadable(directory, directory, &error)),
        };
        if links.len() > MAX_LINKS {
            return Err(PolicyError::Unreachable {
                name: directory.to_owned(),
                at: directory.to_owned(),
                why: format!("it holds more than {MAX_LINKS} links"),
            });
        }
        for link in links {
            let path = directory.join(&link);
            match is_used(&link) {
                true => self.follow_used(&path),
                false => self.follow(&path),
            };
        }
        Ok(())
    }

    /// Protects the common directory of a worktree, which contains hooks and configuration.
    fn common_directory(&mut self, directory: &Path) -> Result<(), PolicyError> {
        let file = directory.join("commondir");
        match self.resolver.facts().lookup(&file) {
            Ok(_) => {}
            Err(error)
                if matches!(error.raw_os_error(), None | Some(libc::ENOENT | libc::ENOTDIR)) =>
            {
                return Ok(());
            }
            Err(error) => return Err(unreadable(&file, directory, &error)),
        }
        let Some((file, _)) = self.follow(&file) else { return Ok(()) };
        let text = self.read(&file)?;
        for target in paths(&text) {
            if let Some((shared, _)) = self.follow_used(&directory.join(target)) {
                self.links_in_git(&shared)?;
            }
        }
        Ok(())
    }

    fn read(&self, path: &Path) -> Result<Vec<u8>, PolicyError> {
        self.resolver.facts().read_start(path).map_err(|error| unreadable(path, path, &error))
    }

    /// Like `follow`, for a path that tools outside use by name: it must not lead to something that
    /// stays writable.
    fn follow_used(&mut self, path: &Path) -> Option<(PathBuf, Node)> {
        let found = self.follow(path)?;
        if is_within(&self.root, &found.0) {
            self.enclosing.push((path.to_owned(), found.0.clone()));
        }
        Some(found)
    }

    /// Protects the target of a path and the links on the way; `None` if it does not exist yet.
    fn follow(&mut self, path: &Path) -> Option<(PathBuf, Node)> {
        // As for a denied path: links are pinned, and obstacles must be permanent.
        let (target, mut trace) = PathTrace::follow(self.resolver, path, AccessMode::Deny);
        trace.target = None;
        trace.implied = true;
        let found = match target {
            ResolvedPath::Found(path, node) => Some((path, node)),
            ResolvedPath::Missing(parent, missing) if missing.len() > MAX_MISSING => {
                trace.obstacle = Some(Obstacle { path: parent, errno: libc::ENAMETOOLONG });
                None
            }
            ResolvedPath::Missing(parent, missing) => {
                self.missing.push(ProtectedName { parent, missing, access: AccessMode::Read });
                None
            }
            ResolvedPath::Unreachable(_) => None,
        };
        self.paths.extend(found.clone());
        self.missing.extend(trace.assumed_names());
        self.traces.push(trace);
        found
    }
}

/// The paths that a pointer may mean: for git, everything up to the trailing line ends, including
/// spaces; for other tools, the first line without surrounding spaces.
fn paths(text: &[u8]) -> impl Iterator<Item = &OsStr> {
    let exact = text.strip_prefix(b" ").unwrap_or(text);
    let ends = exact.iter().rev().take_while(|byte| matches!(byte, b'\n' | b'\r')).count();
    let exact = &exact[..exact.len() - ends];
    let plain = text.split(|byte| matches!(byte, b'\n' | b'\r')).next().unwrap_or_default();
    let plain = Some(plain.trim_ascii()).filter(|plain| *plain != exact);
    [Some(exact), plain]
        .into_iter()
        .flatten()
        .filter(|path| !path.is_empty())
        .map(OsStr::from_bytes)
}
