//! Lists a tree breadth-first, with sorted names, within limits: `fs/walk`. Links to files are skipped,
//! and links to directories too unless they are followed. Entries and errors both count towards the
//! entry limit.
//!
//! Invariant: memory and response are bounded by the request's limits, not by the tree. Directories are
//! opened relative to the root's descriptor; unless the request follows links, none is followed below
//! it, even if the tree changes meanwhile.

use std::collections::{HashSet, VecDeque};

use codex_exec_server_protocol::PathUri;
use codex_exec_server_protocol::files::{
    FsEntryKind, FsPathError, FsWalkEntry, FsWalkOptions, FsWalkParams, FsWalkResponse,
};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags};
use rustix::io::{Errno, retry_on_intr};

use super::directory::{for_each_name, join, kind_of_name, kind_of_target};
use super::error::errno_message;
use super::resolve::{LISTING, Links, Resolver};
use super::{Cancel, FileError, FilesConfig};

/// JSON overhead of an entry or an error: braces, member names, kind, comma; rounded up.
const ENTRY_OVERHEAD: usize = 40;
/// JSON overhead of the response.
const ANSWER_OVERHEAD: usize = 128;

pub(super) fn walk(
    resolver: Resolver,
    params: &FsWalkParams,
    config: &FilesConfig,
    cancel: &Cancel,
) -> Result<FsWalkResponse, FileError> {
    let FsWalkParams { path, options, .. } = params;
    check_options(options, config)?;
    let follow = options.follow_directory_symlinks;
    let flags = if follow { LISTING - OFlags::NOFOLLOW } else { LISTING };
    let root = match retry_on_intr(|| rustix::fs::open(path.as_path(), flags, Mode::empty())) {
        Ok(root) => root,
        // There is nothing below a file or a link.
        Err(Errno::NOTDIR | Errno::LOOP) if exists(path) => {
            return Ok(FsWalkResponse::default());
        }
        Err(errno) => return Err(FileError::os("walk", path, errno)),
    };
    Walk {
        resolver,
        options,
        cancel,
        root,
        queue: VecDeque::from([Directory { path: path.clone(), below: Vec::new(), depth: 0 }]),
        queued_total: 1,
        visited: HashSet::new(),
        room: config.max_scan_answer_bytes.saturating_sub(ANSWER_OVERHEAD),
        answer: FsWalkResponse::default(),
    }
    .run()
}

/// Whether a name exists, of whatever type.
fn exists(path: &PathUri) -> bool {
    rustix::fs::statat(CWD, path.as_path(), AtFlags::SYMLINK_NOFOLLOW).is_ok()
}

fn check_options(options: &FsWalkOptions, config: &FilesConfig) -> Result<(), FileError> {
    for (what, value, limit) in [
        ("maxDepth", options.max_depth, config.max_walk_depth),
        ("maxDirectories", options.max_directories, config.max_walk_directories),
        ("maxEntries", options.max_entries, config.max_walk_entries),
    ] {
        if value > limit {
            return Err(FileError::out_of_range(what, value.into(), format!("at most {limit}")));
        }
        if value == 0 && what != "maxDepth" {
            return Err(FileError::out_of_range(what, 0, "at least 1".to_owned()));
        }
    }
    Ok(())
}

struct Walk<'a> {
    resolver: Resolver,
    options: &'a FsWalkOptions,
    cancel: &'a Cancel,
    root: OwnedFd,
    queue: VecDeque<Directory>,
    /// Directories that have been queued so far.
    queued_total: usize,
    /// Device and inode of directories read, if links are followed: each is read once.
    visited: HashSet<(u64, u64)>,
    /// Bytes left in the response.
    room: usize,
    answer: FsWalkResponse,
}

struct Directory {
    path: PathUri,
    /// The path relative to the root.
    below: Vec<u8>,
    depth: u32,
}

type Name = (Vec<u8>, FileType);

impl Walk<'_> {
    fn run(mut self) -> Result<FsWalkResponse, FileError> {
        while let Some(directory) = self.queue.pop_front() {
            self.cancel.check()?;
            match self.open(&directory) {
                Ok(Some(fd)) => self.read(&directory, fd.as_fd())?,
                Ok(None) => {}
                Err(errno) => self.error(&directory.path, errno),
            }
            // Full is not truncated: the remaining directories may be empty.
            if self.room == 0 || self.is_full() && self.answer.truncated {
                break;
            }
        }
        Ok(self.answer)
    }

    /// Whether the limit of entries and errors is reached.
    fn is_full(&self) -> bool {
        self.free() == 0
    }

    fn free(&self) -> usize {
        let taken = self.answer.entries.len() + self.answer.errors.len();
        (self.options.max_entries as usize).saturating_sub(taken)
    }

    /// `None` if the directory has been read already, under another name.
    fn open(&mut self, directory: &Directory) -> Result<Option<OwnedFd>, Errno> {
        let links = Links::from(self.options.follow_directory_symlinks);
        let fd = self.resolver.open_below(self.root.as_fd(), &directory.below, LISTING, links)?;
        if links == Links::Follow {
            let stat = rustix::fs::fstat(&fd)?;
            if !self.visited.insert((stat.st_dev, stat.st_ino)) {
                return Ok(None);
            }
        }
        Ok(Some(fd))
    }

    fn read(&mut self, directory: &Directory, fd: BorrowedFd<'_>) -> Result<(), FileError> {
        let follow = self.options.follow_directory_symlinks;
        let mut names = match first_names(fd, self.free(), follow, directory, self.cancel) {
            Ok(names) => names,
            Err(FileError::Os { errno, .. }) => {
                self.error(&directory.path, Errno::from_raw_os_error(errno));
                return Ok(());
            }
            Err(other) => return Err(other),
        };
        names.sort_unstable_by(|a, b| a.0.cmp(&b.0));
        for (name, listed) in names {
            let kind = self.kind(fd, &name, listed);
            if matches!(kind, Ok(None)) {
                continue;
            }
            if self.is_full() {
                self.answer.truncated = true;
                return Ok(());
            }
            let Ok(text) = std::str::from_utf8(&name) else {
                let shown = String::from_utf8_lossy(&name);
                self.error(&join(&directory.path, shown.as_bytes())?, Errno::ILSEQ);
                continue;
            };
            let path = join(&directory.path, text.as_bytes())?;
            let kind = match kind {
                Ok(Some(kind)) => kind,
                Ok(None) => continue,
                Err(errno) => {
                    self.error(&path, errno);
                    continue;
                }
            };
            // The client could not use a path that is too long for the system.
            if path.as_bytes().len() >= 4096 {
                self.error(&path, Errno::NAMETOOLONG);
                continue;
            }
            if !self.take(path.encoded_len()) {
                return Ok(());
            }
            if kind == FsEntryKind::Directory {
                self.enqueue(directory, &name, &path);
            }
            self.answer.entries.push(FsWalkEntry { path, kind });
        }
        Ok(())
    }

    /// The kind to list an entry as; `None` for special files, dangling links and links to files.
    fn kind(
        &self,
        directory: BorrowedFd<'_>,
        name: &[u8],
        listed: FileType,
    ) -> Result<Option<FsEntryKind>, Errno> {
        let listed = match listed {
            FileType::Unknown => match kind_of_name(directory, name)? {
                Some(kind) => kind,
                None => return Ok(None),
            },
            known => known,
        };
        Ok(match listed {
            FileType::Directory => Some(FsEntryKind::Directory),
            FileType::RegularFile => Some(FsEntryKind::File),
            FileType::Symlink if self.options.follow_directory_symlinks => {
                let target = kind_of_target(directory, name, listed)?;
                (target == Some(FileType::Directory)).then_some(FsEntryKind::Directory)
            }
            _ => None,
        })
    }

    fn enqueue(&mut self, parent: &Directory, name: &[u8], path: &PathUri) {
        let pruned = self.options.prune_hidden_directories && name.starts_with(b".");
        if pruned || parent.depth >= self.options.max_depth {
            return;
        }
        if self.queued_total >= self.options.max_directories as usize {
            self.answer.truncated = true;
            return;
        }
        self.queued_total += 1;
        let mut below = Vec::with_capacity(parent.below.len() + 1 + name.len());
        below.extend_from_slice(&parent.below);
        if !below.is_empty() {
            below.push(b'/');
        }
        below.extend_from_slice(name);
        self.queue.push_back(Directory { path: path.clone(), below, depth: parent.depth + 1 });
    }

    fn error(&mut self, path: &PathUri, errno: Errno) {
        if self.is_full() {
            self.answer.truncated = true;
            return;
        }
        let message = errno_message(errno.raw_os_error());
        if self.take(path.encoded_len() + message.len()) {
            self.answer.errors.push(FsPathError { path: path.clone(), message });
        }
    }

    /// Takes space in the response; if there is not enough, truncates it.
    fn take(&mut self, bytes: usize) -> bool {
        match self.room.checked_sub(bytes + ENTRY_OVERHEAD) {
            Some(room) => {
                self.room = room;
                true
            }
            None => {
                self.room = 0;
                self.answer.truncated = true;
                false
            }
        }
    }
}

/// The names of a directory or, if there are many more than `room`, at least the first `room` of them,
/// so that a huge directory needs no more memory than a large one.
fn first_names(
    fd: BorrowedFd<'_>,
    room: usize,
    follow: bool,
    directory: &Directory,
    cancel: &Cancel,
) -> Result<Vec<Name>, FileError> {
    // Some names are not listed: keep a reserve for them, and one more to detect truncation.
    let keep = room.saturating_mul(2).saturating_add(1024);
    let mut names: Vec<Name> = Vec::new();
    let each = |name: &[u8], listed| {
        let special = matches!(
            listed,
            FileType::Fifo | FileType::Socket | FileType::CharacterDevice | FileType::BlockDevice
        );
        if !special && (follow || listed != FileType::Symlink) {
            names.push((name.to_vec(), listed));
        }
        if names.len() >= 2 * keep {
            cancel.check()?;
            names.select_nth_unstable_by(keep, |a, b| a.0.cmp(&b.0));
            names.truncate(keep);
        }
        Ok(true)
    };
    for_each_name(fd, each, |errno| FileError::os("walk", &directory.path, errno))?;
    Ok(names)
}
