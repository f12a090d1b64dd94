//! Facts about this machine's file system.
//!
//! Invariant: read-only: no method opens a device, follows a link in the last component or changes
//! anything.

use std::cell::RefCell;
use std::ffi::{OsStr, OsString};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, StatxFlags, statx};

use crate::apply::placeholder;
use crate::decide::facts::{Facts, Identity, Mount, Node, NodeKind};
use crate::decide::paths::{is_within, parent};
use crate::mountinfo;

/// Maximum bytes of a `.git` pointer file, which has one line.
const POINTER_FILE: u64 = 8 * 1024;

/// The file system of this machine, as this process sees it.
///
/// Policies often name many paths in one directory. A directory that is used twice in a row is held
/// open, and entries in it, or one level below, are looked up from there: resolving the path is most of
/// the cost of a lookup. If the directory is replaced meanwhile, building the sandbox finds another
/// file than planned, as with any change after the lookup.
#[derive(Debug, Default)]
pub struct HostFacts {
    open_directory: RefCell<OpenDirectory>,
}

#[derive(Debug, Default)]
struct OpenDirectory {
    directory: PathBuf,
    open: Option<OwnedFd>,
}

impl OpenDirectory {
    /// A shorter path: relative to the open directory.
    fn relative_path<'p>(&mut self, path: &'p Path) -> Option<(BorrowedFd<'_>, &'p Path)> {
        if let Some(rest) = self.below(path) {
            return Some((self.open.as_ref()?.as_fd(), rest));
        }
        let directory = parent(path)?;
        if directory.as_os_str() == self.directory.as_os_str() {
            // Used for the second time.
            if self.open.is_none() {
                let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
                self.open = rustix::fs::open(directory, flags, Mode::empty()).ok();
            }
            let rest = self.below(path)?;
            return Some((self.open.as_ref()?.as_fd(), rest));
        }
        // A path below the open directory does not replace it.
        if self.open.is_none() || !is_within(directory, &self.directory) {
            self.directory.clear();
            self.directory.push(directory);
            self.open = None;
        }
        None
    }

    /// The rest of the path, if it is one or two names below the open directory.
    fn below<'p>(&self, path: &'p Path) -> Option<&'p Path> {
        self.open.as_ref()?;
        if !is_within(path, &self.directory) {
            return None;
        }
        let bytes = path.as_os_str().as_bytes();
        let above = self.directory.as_os_str().len();
        let rest = bytes.get(if above == 1 { 1 } else { above + 1 }..)?;
        let names = 1 + rest.iter().filter(|&&byte| byte == b'/').count();
        (!rest.is_empty() && names <= 2).then(|| Path::new(OsStr::from_bytes(rest)))
    }
}

impl HostFacts {
    /// Looks up a path.
    pub(crate) fn lookup_node(&self, path: &Path) -> rustix::io::Result<LookResult> {
        match self.open_directory.borrow_mut().relative_path(path) {
            Some((directory, rest)) => lookup_node(directory, rest),
            None => lookup_node(CWD, path),
        }
    }
}

impl Facts for HostFacts {
    fn lookup(&self, path: &Path) -> io::Result<Node> {
        self.lookup_node(path)?.node.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn read_link(&self, path: &Path) -> io::Result<PathBuf> {
        std::fs::read_link(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<(OsString, NodeKind)>> {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(path)? {
            let entry = entry?;
            let kind = entry.file_type()?;
            let kind = if kind.is_dir() {
                NodeKind::Directory
            } else if kind.is_symlink() {
                NodeKind::Link
            } else if kind.is_file() {
                NodeKind::File
            } else {
                NodeKind::Other
            };
            names.push((entry.file_name(), kind));
        }
        Ok(names)
    }

    fn links(&self, path: &Path) -> io::Result<Vec<OsString>> {
        Ok(links(CWD, path)?)
    }

    fn read_start(&self, path: &Path) -> io::Result<Vec<u8>> {
        let file = std::fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(path)?;
        let mut bytes = Vec::new();
        file.take(POINTER_FILE).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    fn mounts(&self) -> io::Result<Vec<Mount>> {
        let table = std::fs::read(MOUNTS)?;
        let lines = mountinfo::parse(&table).ok_or(io::ErrorKind::InvalidData)?;
        let mounts = lines.into_iter().map(|line| Mount {
            id: line.id,
            file_system: line.file_system,
            root: line.root,
            point: line.point,
            kind: String::from_utf8_lossy(line.kind).into_owned(),
        });
        Ok(mounts.collect())
    }
}

/// The table of this process's mounts.
const MOUNTS: &str = "/proc/thread-self/mountinfo";

/// The names in a directory that are links, sorted.
pub(crate) fn links(around: BorrowedFd<'_>, directory: &Path) -> rustix::io::Result<Vec<OsString>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = rustix::fs::openat(around, directory, flags, Mode::empty())?;
    let mut links = Vec::new();
    for entry in rustix::fs::Dir::read_from(&directory)? {
        let entry = entry?;
        let kind = match entry.file_type() {
            // Not every file system reports the type with the name.
            FileType::Unknown => {
                match rustix::fs::statat(&directory, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW) {
                    Ok(stat) => FileType::from_raw_mode(stat.st_mode),
                    // Removed since it was listed.
                    Err(rustix::io::Errno::NOENT) => continue,
                    Err(errno) => return Err(errno),
                }
            }
            kind => kind,
        };
        if kind == FileType::Symlink {
            links.push(OsStr::from_bytes(entry.file_name().to_bytes()).to_owned());
        }
    }
    links.sort();
    Ok(links)
}

/// The result of a lookup.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LookResult {
    /// The file; `None` also for a placeholder of another sandbox, which stands for an absent name.
    pub(crate) node: Option<Node>,
    /// It has the mode of a placeholder, whether or not it is one.
    pub(crate) looks_like_placeholder: bool,
}

/// Looks up a name in a directory.
pub(crate) fn lookup_node(
    directory: BorrowedFd<'_>,
    name: &Path,
) -> rustix::io::Result<LookResult> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    let stat = statx(directory, name, flags, WANTED)?;
    let looks_like_placeholder = placeholder::is_mode(stat.stx_mode.into());
    let absent = looks_like_placeholder && placeholder::exists_at(directory, name);
    Ok(LookResult { node: (!absent).then(|| node(&stat)), looks_like_placeholder })
}

/// The fields needed for an [`Identity`] and a kind.
pub(crate) const WANTED: StatxFlags =
    StatxFlags::TYPE.union(StatxFlags::MODE).union(StatxFlags::INO).union(StatxFlags::MNT_ID);

pub(crate) fn node(stat: &rustix::fs::Statx) -> Node {
    let kind = match FileType::from_raw_mode(u32::from(stat.stx_mode)) {
        FileType::Directory => NodeKind::Directory,
        FileType::RegularFile => NodeKind::File,
        FileType::Symlink => NodeKind::Link,
        _ => NodeKind::Other,
    };
    Node {
        kind,
        identity: Identity {
            device: (stat.stx_dev_major, stat.stx_dev_minor),
            inode: stat.stx_ino,
            mount: stat.stx_mnt_id,
        },
    }
}
