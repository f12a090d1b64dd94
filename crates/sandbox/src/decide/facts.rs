//! What deciding needs to know of the file system, behind one small trait.
//!
//! Invariant: nothing in `decide` or `plan` asks the machine anything except through [`Facts`], so
//! both can be tested against a tree that exists only in memory. A [`Resolver`] asks for each path
//! once, so a policy of many entries costs one lookup per distinct path.

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Component, Path, PathBuf};

use super::paths::parent;

/// What a name in a directory stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum NodeKind {
    /// A directory.
    Directory,
    /// A regular file.
    File,
    /// A symbolic link, itself.
    Link,
    /// A device, socket or fifo.
    Other,
}

/// Which file it is, however it is called: renaming keeps it, replacing changes it.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
pub struct Identity {
    /// Device number, major and minor.
    pub device: (u32, u32),
    /// Inode number.
    pub inode: u64,
    /// The mount it was reached through.
    pub mount: u64,
}

/// A file system object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Node {
    /// What it is.
    pub kind: NodeKind,
    /// Which one it is.
    pub identity: Identity,
}

/// The questions that are asked of a file system. No method follows a link in the last component.
pub trait Facts {
    /// What is at this path.
    fn lookup(&self, path: &Path) -> io::Result<Node>;
    /// Where this link points.
    fn read_link(&self, path: &Path) -> io::Result<PathBuf>;
    /// The names in a directory, `.` and `..` left out.
    fn list(&self, path: &Path) -> io::Result<Vec<(OsString, NodeKind)>>;
    /// The names in a directory that are links, in order.
    fn links(&self, path: &Path) -> io::Result<Vec<OsString>> {
        let names = self.list(path)?.into_iter();
        let links = names.filter(|(_, kind)| *kind == NodeKind::Link).map(|(name, _)| name);
        let mut links: Vec<OsString> = links.collect();
        links.sort();
        Ok(links)
    }
    /// The first bytes of a small file.
    fn read_start(&self, path: &Path) -> io::Result<Vec<u8>>;
    /// Everything that is mounted.
    fn mounts(&self) -> io::Result<Vec<Mount>> {
        Ok(Vec::new())
    }
}

/// A mount, as the kernel's table tells of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Its number, as in [`Identity::mount`].
    pub id: u64,
    /// The file system it shows. Mounts of the same file system show the same files.
    pub file_system: (u32, u32),
    /// The directory of the file system that it shows.
    pub root: PathBuf,
    /// Where it is.
    pub point: PathBuf,
    /// The type of the file system.
    pub kind: String,
}

/// What a path could not be followed beyond.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Obstacle {
    /// The directory that may not be entered, the file that is no directory, the link too many.
    pub path: PathBuf,
    /// What the system said.
    pub errno: i32,
}

impl Obstacle {
    /// The answer to looking something up in a directory.
    pub(super) fn looking_up(directory: &Path, error: &io::Error) -> Self {
        Self { path: directory.to_owned(), errno: error.raw_os_error().unwrap_or(libc::EIO) }
    }
}

/// Where a path leads once every link in it has been followed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ResolvedPath {
    /// It exists, under this name without links.
    Found(PathBuf, Node),
    /// It does not: the last directory on the way that exists, and the names missing below it.
    Missing(PathBuf, Vec<OsString>),
    /// A component is not a directory or may not be entered, or the links go round in circles.
    Unreachable(Obstacle),
}

/// Follows paths, remembering every answer for as long as one policy is being prepared.
pub struct Resolver<'a> {
    facts: &'a dyn Facts,
    known: HashMap<OsString, Option<Node>>,
    /// Directories that are reached without links.
    link_free: HashSet<OsString>,
    /// The last of them that was asked for: many paths of a policy are beside each other.
    last_link_free: OsString,
    /// Every link met on the way, with its target, in the order met.
    pub links: Vec<(PathBuf, PathBuf)>,
    /// Every directory that was entered and left again by `..`, in the order met.
    pub exited: Vec<PathBuf>,
}

impl std::fmt::Debug for Resolver<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Resolver").field("known", &self.known.len()).finish_non_exhaustive()
    }
}

/// As many links as the kernel follows in one path.
const MAX_LINKS: usize = 40;

impl<'a> Resolver<'a> {
    /// A resolver that knows nothing yet.
    pub fn new(facts: &'a dyn Facts) -> Self {
        Self {
            facts,
            known: HashMap::new(),
            link_free: HashSet::new(),
            last_link_free: OsString::new(),
            links: Vec::new(),
            exited: Vec::new(),
        }
    }

    /// The facts behind it.
    pub fn facts(&self) -> &'a dyn Facts {
        self.facts
    }

    /// What is at this path, links not followed; `Ok(None)` if nothing is.
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

    /// Everything that was found, by its path.
    pub fn into_known(self) -> HashMap<OsString, Option<Node>> {
        self.known
    }

    /// Follows every link of an absolute path. What it finds has one spelling.
    pub fn resolve(&mut self, path: &Path) -> ResolvedPath {
        // In a directory that is known to be reached without links, one look is enough: at the name
        // itself, for a slash after it would follow a link.
        if is_normal(path)
            && let Some(directory) = parent(path)
            && self.is_link_free(directory)
            // Not worth remembering: few paths are named twice.
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
        while let Some(name) = pending.pop() {
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
                    let mut missing = vec![name];
                    // What comes after `..` is not below the missing name, and is not reached without.
                    if pending.iter().all(|name| name != "..") {
                        missing.extend(pending.into_iter().rev());
                    }
                    return ResolvedPath::Missing(here, missing);
                }
                Err(error) => {
                    here.pop();
                    return ResolvedPath::Unreachable(Obstacle::looking_up(&here, &error));
                }
            }
        }
        ResolvedPath::Found(here, node)
    }

    /// What is at a directory on the way.
    fn directory(&mut self, path: &Path) -> Result<Node, Obstacle> {
        match self.lookup(path) {
            Ok(Some(node)) => Ok(node),
            Ok(None) => Err(Obstacle { path: path.to_owned(), errno: libc::ENOENT }),
            Err(error) => Err(Obstacle::looking_up(parent(path).unwrap_or(path), &error)),
        }
    }
}

/// Whether a path is spelled as a walk would spell it: no slash at its end, and no `.`, `..` or empty name.
fn is_normal(path: &Path) -> bool {
    let names = path.as_os_str().as_encoded_bytes().split(|&byte| byte == b'/').skip(1);
    names.into_iter().all(|name| !matches!(name, b"" | b"." | b".."))
}

/// The names of a path, `..` among them.
fn names(path: &Path) -> impl Iterator<Item = &OsStr> {
    path.components().filter_map(|component| match component {
        Component::Normal(name) => Some(name),
        Component::ParentDir => Some(OsStr::new("..")),
        _ => None,
    })
}
