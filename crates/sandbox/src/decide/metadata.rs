//! Protected metadata: what belongs to the tools around a project, not to what runs inside it.
//!
//! Invariant: below every writable root the top-level [`NAMES`] stay read-only unless an entry names
//! them; in a workspace root they cannot come into being either. What `.git` leads to, by a link, a
//! pointer file or a `commondir` file, is protected with it, whether it exists yet or not; and so is what
//! the links lead to that are right inside of one of them, or among a repository's hooks. Otherwise a
//! command could leave a hook behind that runs later, outside the sandbox. Where one of them leads to a
//! writable directory that the root itself is in, nothing can be protected without taking the root away:
//! such a policy is refused.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use codex_exec_server_protocol::AccessMode;

use super::facts::{Node, NodeKind, Obstacle, Place, Resolver};
use super::order::is_within;
use super::policy::{PolicyError, ProtectedName, Region, ResolvedPolicy};
use super::way::Way;

/// The protected names.
pub const NAMES: [&str; 3] = [".git", ".agents", ".codex"];

/// As many names as may be missing on the way to something: each becomes a directory for a while.
pub(super) const MOST_MISSING: usize = 64;

/// Where in a git directory links are looked for besides right inside: where hooks, attributes and the
/// names of other object stores are.
const IN_GIT: [&str; 3] = ["hooks", "info", "objects/info"];

/// The names in a git directory by which git finds what it runs or trusts.
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

/// As many links as are followed in one directory: each may cost a mount.
const MOST_LINKS: usize = 1_024;

/// Adds the read-only regions and protected names of every writable root. Returns all that is protected
/// and that no entry names, in a writable place or not: it may be seen in one through another mount.
/// `unnamed` has an access for another reason than an entry.
pub(super) fn protect(
    policy: &mut ResolvedPolicy,
    workspace_roots: &[PathBuf],
    unnamed: &[PathBuf],
    resolver: &mut Resolver<'_>,
    ways: &mut Vec<Way>,
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
    // Decided on the entries alone, before any of the additions below.
    let mut found = Protected {
        resolver,
        ways,
        root: PathBuf::new(),
        places: Vec::new(),
        missing: Vec::new(),
        around: Vec::new(),
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
                    found.ways.push(Way::blocked(path.clone(), obstacle));
                }
            }
        }
    }
    let Protected { mut places, mut missing, around, .. } = found;
    let given_up = around.into_iter().find(|(_, at)| policy.access.access(at) == AccessMode::Write);
    if let Some((name, at)) = given_up {
        let why =
            "it is writable, holds the root that the name is in, and is used by that name outside";
        return Err(PolicyError::Unreachable { name, at, why: why.to_owned() });
    }
    policy.protected.append(&mut missing);
    places.retain(|(path, _)| policy.access.named(path).is_none() || unnamed.contains(path));
    let is_writable =
        |(path, _): &&(PathBuf, Node)| policy.access.access(path) == AccessMode::Write;
    let writable: Vec<(PathBuf, Node)> = places.iter().filter(is_writable).cloned().collect();
    for (path, node) in writable {
        policy.access.insert(path.clone(), AccessMode::Read);
        policy.regions.push((path, Region { access: AccessMode::Read, node, own: false }));
    }
    Ok(places)
}

fn unreadable(name: &Path, at: &Path, error: &io::Error) -> PolicyError {
    PolicyError::Unreachable {
        name: name.to_owned(),
        at: at.to_owned(),
        why: io::Error::from_raw_os_error(error.raw_os_error().unwrap_or(libc::EIO)).to_string(),
    }
}

/// What has to be protected, as it is found.
struct Protected<'r, 'f> {
    resolver: &'r mut Resolver<'f>,
    ways: &'r mut Vec<Way>,
    /// The root whose names are looked at.
    root: PathBuf,
    places: Vec<(PathBuf, Node)>,
    missing: Vec<ProtectedName>,
    /// Names by which a directory is used that the root itself is in, and that directory.
    around: Vec<(PathBuf, PathBuf)>,
}

impl Protected<'_, '_> {
    /// One of the names, which exists.
    fn name(&mut self, path: &Path, node: Node) -> Result<(), PolicyError> {
        let is_git = path.file_name() == Some(OsStr::new(".git"));
        let (place, node) = if node.kind == NodeKind::Link {
            match self.follow_used(path) {
                Some(found) => found,
                None => return Ok(()),
            }
        } else {
            self.places.push((path.to_owned(), node));
            (path.to_owned(), node)
        };
        if !is_git {
            return match node.kind {
                NodeKind::Directory => self.links_in(&place, |_| true),
                _ => Ok(()),
            };
        }
        match node.kind {
            NodeKind::Directory => self.git_directory(&place),
            NodeKind::File => {
                let text = self.read(&place)?;
                let Some(text) = text.strip_prefix(b"gitdir:") else { return Ok(()) };
                // git takes it from where the name is; others from where the file is, which is somewhere
                // else if the name is a link.
                let mut around: Vec<&Path> =
                    [path, &place].into_iter().filter_map(Path::parent).collect();
                around.dedup();
                for target in paths(text) {
                    for around in &around {
                        if let Some((directory, _)) = self.follow_used(&around.join(target)) {
                            self.git_directory(&directory)?;
                        }
                    }
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// A directory of git's: what its links lead to, and the directory that it shares with others.
    fn git_directory(&mut self, directory: &Path) -> Result<(), PolicyError> {
        self.links_in_git(directory)?;
        self.common_directory(directory)
    }

    fn links_in_git(&mut self, directory: &Path) -> Result<(), PolicyError> {
        self.links_in(directory, |name| GIT_NAMES.iter().any(|known| name == *known))?;
        for inside in IN_GIT {
            let path = directory.join(inside);
            if let Place::Found(place, _) = self.resolver.resolve(&path) {
                if place != path {
                    self.follow_used(&path);
                }
                self.links_in(&place, |_| false)?;
            }
        }
        // The root may be a directory that git uses by its name: the hooks, say.
        let inside = self.root.strip_prefix(directory).ok();
        if inside.is_some_and(|inside| GIT_NAMES.iter().any(|known| inside == Path::new(known))) {
            self.around.push((self.root.clone(), self.root.clone()));
        }
        Ok(())
    }

    /// Protects what the links right inside of a directory lead to, some of which are used by their names.
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
            // Its mode cannot be changed inside. Whoever could before could also write to it.
            Err(error) if error.raw_os_error() == Some(libc::EACCES) => return Ok(()),
            Err(error) => return Err(unreadable(directory, directory, &error)),
        };
        if links.len() > MOST_LINKS {
            return Err(PolicyError::Unreachable {
                name: directory.to_owned(),
                at: directory.to_owned(),
                why: format!("it holds more than {MOST_LINKS} links"),
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

    /// A worktree's directory names the one it shares with others, where hooks and configuration are.
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

    /// The same for a path that tools outside use by its name, so that it must not lead to what stays
    /// writable.
    fn follow_used(&mut self, path: &Path) -> Option<(PathBuf, Node)> {
        let found = self.follow(path)?;
        if is_within(&self.root, &found.0) {
            self.around.push((path.to_owned(), found.0.clone()));
        }
        Some(found)
    }

    /// Protects what a path leads to, and the links on its way; `None` if it leads nowhere yet.
    fn follow(&mut self, path: &Path) -> Option<(PathBuf, Node)> {
        // As for something denied: the links stay, and what blocks the way must not give way.
        let (place, mut way) = Way::follow(self.resolver, path, AccessMode::Deny);
        way.place = None;
        way.found = true;
        let found = match place {
            Place::Found(path, node) => Some((path, node)),
            Place::Missing(parent, missing) if missing.len() > MOST_MISSING => {
                way.obstacle = Some(Obstacle { path: parent, errno: libc::ENAMETOOLONG });
                None
            }
            Place::Missing(parent, missing) => {
                self.missing.push(ProtectedName { parent, missing, access: AccessMode::Read });
                None
            }
            Place::Unreachable(_) => None,
        };
        self.places.extend(found.clone());
        self.ways.push(way);
        found
    }
}

/// The paths that a pointer may mean: what git takes it for, which is all but the line ends after it,
/// blanks included; and the first line without blanks, as others may read it.
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
