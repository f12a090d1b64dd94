//! Lists a tree breadth-first, with sorted names, within limits: `fs/walk`. Links to files are skipped,
//! and links to directories too unless they are followed. Every name except a dangling link counts
//! towards the entry limit, listed or not.
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
use super::resolve::{LISTING, Links, Resolver, bytes_path};
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
        Err(errno) => return root_not_opened(path, errno),
    };
    let root_stat = rustix::fs::fstat(&root).map_err(|errno| FileError::os("walk", path, errno))?;
    Walk {
        resolver,
        options,
        cancel,
        root,
        queue: VecDeque::from([Directory { path: path.clone(), below: Vec::new(), depth: 0 }]),
        queued_total: 1,
        visited: HashSet::from([(root_stat.st_dev, root_stat.st_ino)]),
        names_left: options.max_entries as usize,
        room: config.max_scan_answer_bytes.saturating_sub(ANSWER_OVERHEAD),
        answer: FsWalkResponse::default(),
    }
    .run()
}

/// The response if the root cannot be opened. A root that is not a directory, or a link that is not
/// followed, has no entries; a directory without read permission is one error in the response.
fn root_not_opened(path: &PathUri, errno: Errno) -> Result<FsWalkResponse, FileError> {
    let failed = |errno| FileError::os("walk", path, errno);
    let root = rustix::fs::statat(CWD, path.as_path(), AtFlags::empty()).map_err(failed)?;
    match (errno, FileType::from_raw_mode(root.st_mode)) {
        (Errno::NOTDIR | Errno::LOOP, _) => Ok(FsWalkResponse::default()),
        (Errno::ACCESS | Errno::PERM, FileType::Directory) => {
            let message = errno_message(errno.raw_os_error());
            let errors = vec![FsPathError { path: path.clone(), message }];
            Ok(FsWalkResponse { errors, ..FsWalkResponse::default() })
        }
        _ => Err(failed(errno)),
    }
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
    /// Device and inode of the directories queued so far, if links are followed: each is read once.
    visited: HashSet<(u64, u64)>,
    /// Names left to read.
    names_left: usize,
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
                Ok(fd) => self.read(&directory, fd.as_fd())?,
                Err(errno) => self.error(&directory.path, errno),
            }
            // No names left is not truncated: the remaining directories may be empty.
            if self.room == 0 || self.names_left == 0 && self.answer.truncated {
                break;
            }
        }
        Ok(self.answer)
    }

    fn open(&self, directory: &Directory) -> Result<OwnedFd, Errno> {
        let links = Links::from(self.options.follow_directory_symlinks);
        self.resolver.open_below(self.root.as_fd(), &directory.below, LISTING, links)
    }

    fn read(&mut self, directory: &Directory, fd: BorrowedFd<'_>) -> Result<(), FileError> {
        let mut names = match first_names(fd, self.names_left, directory, self.cancel) {
            Ok(names) => names,
            Err(FileError::Os { errno, .. }) => {
                self.error(&directory.path, Errno::from_raw_os_error(errno));
                return Ok(());
            }
            Err(other) => return Err(other),
        };
        names.sort_unstable_by(|a, b| a.0.cmp(&b.0));
        for (name, listed) in names {
            if self.names_left == 0 {
                self.answer.truncated = true;
                return Ok(());
            }
            self.names_left -= 1;
            let Ok(text) = std::str::from_utf8(&name) else {
                let shown = String::from_utf8_lossy(&name);
                self.error(&join(&directory.path, shown.as_bytes())?, Errno::ILSEQ);
                continue;
            };
            let path = join(&directory.path, text.as_bytes())?;
            let kind = match self.kind(fd, &name, listed) {
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
                self.enqueue(directory, fd, &name, &path);
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

    fn enqueue(&mut self, parent: &Directory, fd: BorrowedFd<'_>, name: &[u8], path: &PathUri) {
        let pruned = self.options.prune_hidden_directories && name.starts_with(b".");
        if pruned || parent.depth >= self.options.max_depth {
            return;
        }
        if self.options.follow_directory_symlinks
            && let Ok(stat) = rustix::fs::statat(fd, bytes_path(name), AtFlags::empty())
            && !self.visited.insert((stat.st_dev, stat.st_ino))
        {
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

/// The names of a directory except dangling links or, if there are many more than `room`, at least the
/// first `room` of them and one more, so that a huge directory needs no more memory than a large one.
fn first_names(
    fd: BorrowedFd<'_>,
    room: usize,
    directory: &Directory,
    cancel: &Cancel,
) -> Result<Vec<Name>, FileError> {
    // One more to detect truncation, and a reserve so that cuts are rare.
    let keep = room.saturating_add(1024);
    let mut names: Vec<Name> = Vec::new();
    let each = |name: &[u8], listed| {
        let leads = match listed {
            FileType::Symlink | FileType::Unknown => {
                matches!(kind_of_target(fd, name, listed), Ok(Some(_)))
            }
            _ => true,
        };
        if leads {
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
