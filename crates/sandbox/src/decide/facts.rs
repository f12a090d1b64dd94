//! What deciding needs to know about the file system, as a trait.
//!
//! Invariant: `decide` and `plan` access the machine only through [`Facts`], so both can be tested with
//! a tree in memory. A [`Resolver`] looks up each path once, so a policy costs one lookup per distinct
//! path.

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Component, Path, PathBuf};

use super::paths::parent;

/// The type of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum NodeKind {
    /// A directory.
    Directory,
    /// A regular file.
    File,
    /// A symbolic link itself.
    Link,
    /// A device, socket or FIFO.
    Other,
}

/// Identifies a file independently of its name: renaming keeps it, replacing changes it.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
pub struct Identity {
    /// Device number, major and minor.
    pub device: (u32, u32),
    /// Inode number.
    pub inode: u64,
    /// Id of the mount it was reached through.
    pub mount: u64,
}

/// A file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Node {
    /// Its type.
    pub kind: NodeKind,
    /// Its identity.
    pub identity: Identity,
}

/// Access to a file system. No method follows a link in the last component.
pub trait Facts {
    /// Looks up a path.
    fn lookup(&self, path: &Path) -> io::Result<Node>;
    /// Reads a link.
    fn read_link(&self, path: &Path) -> io::Result<PathBuf>;
    /// The names in a directory, without `.` and `..`.
    fn list(&self, path: &Path) -> io::Result<Vec<(OsString, NodeKind)>>;
    /// The names in a directory that are links, sorted.
    fn links(&self, path: &Path) -> io::Result<Vec<OsString>> {
        let names = self.list(path)?.into_iter();
        let links = names.filter(|(_, kind)| *kind == NodeKind::Link).map(|(name, _)| name);
        let mut links: Vec<OsString> = links.collect();
        links.sort();
        Ok(links)
    }
    /// The first bytes of a small file.
    fn read_start(&self, path: &Path) -> io::Result<Vec<u8>>;
    /// The mount table.
    fn mounts(&self) -> io::Result<Vec<Mount>> {
        Ok(Vec::new())
    }
}

/// Whether a directory can be entered, so that names in it can be looked up although it cannot be listed.
/// Only a denial of permission says that it cannot.
pub(super) fn can_enter(facts: &dyn Facts, directory: &Path) -> bool {
    // Any name does: the kernel checks the directory before it looks for the name.
    match facts.lookup(&directory.join("x")) {
        Ok(_) => true,
        Err(error) => error.raw_os_error() != Some(libc::EACCES),
    }
}

/// An entry of the mount table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Mount id, as in [`Identity::mount`].
    pub id: u64,
    /// Device of the file system. Mounts of the same file system show the same files.
    pub file_system: (u32, u32),
    /// The directory of the file system that is mounted.
    pub root: PathBuf,
    /// The mount point.
    pub point: PathBuf,
    /// The type of the file system.
    pub kind: String,
}

/// Where the resolution of a path failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Obstacle {
    /// The directory that cannot be entered, the file that is no directory, or the link too many.
    pub path: PathBuf,
    /// Error number of the system.
    pub errno: i32,
}

impl Obstacle {
    /// A failed lookup in a directory.
    pub(super) fn looking_up(directory: &Path, error: &io::Error) -> Self {
        Self { path: directory.to_owned(), errno: error.raw_os_error().unwrap_or(libc::EIO) }
    }
}

/// The result of resolving all links in a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ResolvedPath {
    /// The path exists; its link-free form.
    Found(PathBuf, Node),
    /// The path does not exist: the last existing directory, and the missing names below it.
    Missing(PathBuf, Vec<OsString>),
    /// A component is not a directory or cannot be entered, or there are too many links.
    Unreachable(Obstacle),
}

/// Resolves paths, caching lookups while one policy is prepared.
pub struct Resolver<'a> {
    facts: &'a dyn Facts,
    known: HashMap<OsString, Option<Node>>,
    /// Directories whose path contains no links.
    link_free: HashSet<OsString>,
    /// The last one used: many paths of a policy are in the same directory.
    last_link_free: OsString,
    /// Every link followed, with its target, in order.
    pub links: Vec<(PathBuf, PathBuf)>,
    /// Every directory that was left by `..`, in order.
    pub exited: Vec<PathBuf>,
    /// Every missing directory that was left by `..`, in order.
    pub assumed: Vec<MissingPath>,
}

/// A path that does not exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingPath {
    /// The last existing directory, link-free.
    pub parent: PathBuf,
    /// The missing names below it.
    pub missing: Vec<OsString>,
}

impl MissingPath {
    /// The whole path.
    pub(super) fn path(&self) -> PathBuf {
        let mut path = self.parent.clone();
        path.extend(&self.missing);
        path
    }
}

impl std::fmt::Debug for Resolver<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Resolver").field("known", &self.known.len()).finish_non_exhaustive()
    }
}

/// Maximum links in one path, as in the kernel.
const MAX_LINKS: usize = 40;

impl<'a> Resolver<'a> {
    /// A resolver without cached lookups.
    pub fn new(facts: &'a dyn Facts) -> Self {
        Self {
            facts,
            known: HashMap::new(),
            link_free: HashSet::new(),
            last_link_free: OsString::new(),
            links: Vec::new(),
            exited: Vec::new(),
            assumed: Vec::new(),
        }
    }

    /// The underlying facts.
    pub fn facts(&self) -> &'a dyn Facts {
        self.facts
    }

    /// Looks up a path without following links; `Ok(None)` if it does not exist.
    pub fn lookup(&mut self, path: &Path) -> io::Result<Option<Node>> {
        if let Some(known) = self.known.get(path.as_os_str()) {
            return Ok(*known);
        }
        let node = match self.facts.lookup(path) {
            Ok(node) => Some(node),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        self.known.insert(path.as_os_str().to_owned(), node);
        Ok(node)
    }

    /// All lookups, by path.
    pub fn into_known(self) -> HashMap<OsString, Option<Node>> {
        self.known
    }

    /// Resolves all links of an absolute path.
    ///
    /// A missing name that a `..` follows is assumed to be a directory, and recorded: the path leads
    /// nowhere now, but to what is behind the `..` as soon as somebody creates the name, be it as a
    /// placeholder.
    pub fn resolve(&mut self, path: &Path) -> ResolvedPath {
        // In a directory that is known to be link-free, one lookup of the name is enough; a trailing
        // slash would follow a link.
        if is_normal(path)
            && let Some(directory) = parent(path)
            && self.is_link_free(directory)
            // Not cached: few paths are named twice.
            && let Ok(node) = self.facts.lookup(path)
            && node.kind != NodeKind::Link
        {
            return ResolvedPath::Found(path.to_owned(), node);
        }
        let resolved = self.follow(path);
        if let ResolvedPath::Found(real, _) = &resolved
            && let Some(directory) = parent(real)
        {
            self.link_free.insert(directory.as_os_str().to_owned());
        }
        resolved
    }

    fn is_link_free(&mut self, directory: &Path) -> bool {
        if self.last_link_free == directory.as_os_str() {
            return true;
        }
        let is_one = self.link_free.contains(directory.as_os_str());
        if is_one {
            self.last_link_free.clear();
            self.last_link_free.push(directory);
        }
        is_one
    }

    fn follow(&mut self, path: &Path) -> ResolvedPath {
        let mut pending: Vec<OsString> = names(path).map(OsStr::to_owned).collect();
        pending.reverse();
        let mut here = PathBuf::from("/");
        let mut node = match self.directory(&here) {
            Ok(root) => root,
            Err(obstacle) => return ResolvedPath::Unreachable(obstacle),
        };
        let mut links = 0;
        // The names below `here` that do not exist.
        let mut missing: Vec<OsString> = Vec::new();
        while let Some(name) = pending.pop() {
            if !missing.is_empty() {
                if name == ".." {
                    let (parent, missing_names) = (here.clone(), missing.clone());
                    self.assumed.push(MissingPath { parent, missing: missing_names });
                    missing.pop();
                } else {
                    missing.push(name);
                }
                continue;
            }
            if name == ".." {
                self.exited.push(here.clone());
                here.pop();
                node = match self.directory(&here) {
                    Ok(parent) => parent,
                    Err(obstacle) => return ResolvedPath::Unreachable(obstacle),
                };
                continue;
            }
            if node.kind != NodeKind::Directory {
                return ResolvedPath::Unreachable(Obstacle { path: here, errno: libc::ENOTDIR });
            }
            here.push(&name);
            match self.lookup(&here) {
                Ok(Some(found)) if found.kind == NodeKind::Link => {
                    links += 1;
                    let target = match self.facts.read_link(&here) {
                        Ok(target) if links <= MAX_LINKS => target,
                        Ok(_) => {
                            return ResolvedPath::Unreachable(Obstacle {
                                path: here,
                                errno: libc::ELOOP,
                            });
                        }
                        Err(error) => {
                            return ResolvedPath::Unreachable(Obstacle::looking_up(&here, &error));
                        }
                    };
                    self.links.push((here.clone(), target.clone()));
                    if target.is_absolute() {
                        here = PathBuf::from("/");
                    } else {
                        here.pop();
                    }
                    node = match self.directory(&here) {
                        Ok(parent) => parent,
                        Err(obstacle) => return ResolvedPath::Unreachable(obstacle),
                    };
                    let mut names: Vec<OsString> = names(&target).map(OsStr::to_owned).collect();
                    names.reverse();
                    pending.extend(names);
                }
                Ok(Some(found)) => node = found,
                Ok(None) => {
                    here.pop();
                    missing.push(name);
                }
                Err(error) => {
                    here.pop();
                    return ResolvedPath::Unreachable(Obstacle::looking_up(&here, &error));
                }
            }
        }
        match missing.is_empty() {
            true => ResolvedPath::Found(here, node),
            false => ResolvedPath::Missing(here, missing),
        }
    }

    /// Looks up a directory of the path.
    fn directory(&mut self, path: &Path) -> Result<Node, Obstacle> {
        match self.lookup(path) {
            Ok(Some(node)) => Ok(node),
            Ok(None) => Err(Obstacle { path: path.to_owned(), errno: libc::ENOENT }),
            Err(error) => Err(Obstacle::looking_up(parent(path).unwrap_or(path), &error)),
        }
    }
}

/// Whether a path is in normal form: no trailing slash, and no `.`, `..` or empty component.
fn is_normal(path: &Path) -> bool {
    let names = path.as_os_str().as_encoded_bytes().split(|&byte| byte == b'/').skip(1);
    names.into_iter().all(|name| !matches!(name, b"" | b"." | b".."))
}

/// The components of a path, including `..`.
fn names(path: &Path) -> impl Iterator<Item = &OsStr> {
    path.components().filter_map(|component| match component {
        Component::Normal(name) => Some(name),
        Component::ParentDir => Some(OsStr::new("..")),
        _ => None,
    })
}
