//! Removes a file or a tree.
//!
//! Invariant: no link is followed below the path's parent. Every name is removed relative to the
//! descriptor of its directory, every directory is opened with `O_NOFOLLOW`, and going back up is
//! verified by device and inode. So a tree that is rearranged meanwhile can make the removal fail, but
//! never redirect it. At most [`MAX_OPEN_LEVELS`] descriptors are held open, at any depth.

use codex_exec_server_protocol::PathUri;
use codex_exec_server_protocol::files::FsRemoveParams;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::{Errno, retry_on_intr};

use super::directory::for_each_name;
use super::resolve::{LISTING, Links, Resolver, bytes_path, file_type};
use super::{Cancel, FileError, preserve};

/// Directory levels that are held open on the way down; higher levels are reopened on the way up.
const MAX_OPEN_LEVELS: usize = 32;

/// Retries for directories that are filled again while they are removed.
const MAX_RETRIES: u32 = 1000;

/// Names read from a directory before they are removed: a listing is undefined while its directory
/// changes, so it is repeated until the directory is empty.
const BATCH: usize = 4096;

pub(super) fn remove(
    resolver: Resolver,
    params: &FsRemoveParams,
    cancel: &Cancel,
) -> Result<(), FileError> {
    let FsRemoveParams { force, follow_symlinks, .. } = params;
    cancel.check()?;
    match remove_path(resolver, params, (*follow_symlinks).into(), cancel) {
        Err(FileError::Os { errno, .. }) if *force && errno == Errno::NOENT.raw_os_error() => {
            Ok(())
        }
        done => done,
    }
}

fn remove_path(
    resolver: Resolver,
    params: &FsRemoveParams,
    links: Links,
    cancel: &Cancel,
) -> Result<(), FileError> {
    let path = &params.path;
    let failed = |errno| FileError::os("remove", path, errno);
    let (parent, name) = resolver.parent("remove", path, links)?;
    let stat =
        rustix::fs::statat(&parent, bytes_path(name), AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
    match file_type(&stat) {
        FileType::Symlink if links == Links::Refuse => {
            Err(FileError::SymlinkRefused { path: path.clone() })
        }
        FileType::Directory if params.recursive => {
            remove_tree(parent.as_fd(), name, params, cancel)
        }
        FileType::Directory => {
            if params.preserve {
                check(&enter(parent.as_fd(), name, path)?, path)?;
            }
            rustix::fs::unlinkat(&parent, bytes_path(name), AtFlags::REMOVEDIR).map_err(failed)
        }
        _ => rustix::fs::unlinkat(&parent, bytes_path(name), AtFlags::empty()).map_err(failed),
    }
}

/// A directory between the top and the current one.
struct Level {
    name: Vec<u8>,
    identity: (u64, u64),
    /// `None` if it was closed to save descriptors.
    fd: Option<OwnedFd>,
    /// Subdirectories that are still to be removed.
    subdirectories: Vec<Vec<u8>>,
}

fn remove_tree(
    parent: BorrowedFd<'_>,
    name: &[u8],
    params: &FsRemoveParams,
    cancel: &Cancel,
) -> Result<(), FileError> {
    let path = &params.path;
    let top = enter(parent, name, path)?;
    if params.preserve {
        check(&top, path)?;
    }
    let mut levels = vec![top];
    let mut retries = 0;
    while let Some(level) = levels.last_mut() {
        cancel.check()?;
        let fd = match &level.fd {
            Some(fd) => fd.as_fd(),
            None => unreachable!("the level in work is open"),
        };
        if level.subdirectories.is_empty() {
            level.subdirectories = remove_files(fd, path, cancel)?;
        }
        if let Some(next) = level.subdirectories.pop() {
            match enter(fd, &next, path) {
                Ok(next) => levels.push(next),
                // Gone, or no directory any more; the next listing shows what is there.
                Err(FileError::Os { errno, .. })
                    if matches!(
                        Errno::from_raw_os_error(errno),
                        Errno::NOENT | Errno::NOTDIR | Errno::LOOP
                    ) =>
                {
                    remove_name(fd, &next, AtFlags::empty(), path)?;
                }
                Err(error) => return Err(error),
            }
            if levels.len() > MAX_OPEN_LEVELS {
                let old = levels.len() - MAX_OPEN_LEVELS;
                levels[old - 1].fd = None;
            }
            continue;
        }
        // The directory is empty: go up and remove it.
        let Some(done) = levels.pop() else { break };
        if let Some(above) = levels.last_mut()
            && above.fd.is_none()
        {
            above.fd = Some(reopen_parent(&done, above.identity, path)?);
        }
        let fd = levels.last().and_then(|above| above.fd.as_ref()).map_or(parent, AsFd::as_fd);
        if remove_name(fd, &done.name, AtFlags::REMOVEDIR, path)? {
            continue;
        }
        // The directory was filled meanwhile; retry, but not for ever.
        retries += 1;
        match levels.last_mut() {
            Some(above) if retries < MAX_RETRIES => above.subdirectories.push(done.name),
            None if retries < MAX_RETRIES => levels.push(enter(parent, name, path)?),
            _ => return Err(FileError::os("remove", path, Errno::NOTEMPTY)),
        }
    }
    Ok(())
}

fn enter(parent: BorrowedFd<'_>, name: &[u8], path: &PathUri) -> Result<Level, FileError> {
    let failed = |errno| FileError::os("remove", path, errno);
    let fd = retry_on_intr(|| rustix::fs::openat(parent, bytes_path(name), LISTING, Mode::empty()))
        .map_err(failed)?;
    let identity = identity(fd.as_fd()).map_err(failed)?;
    Ok(Level { name: name.to_vec(), identity, fd: Some(fd), subdirectories: Vec::new() })
}

/// Refuses a directory that must not be removed by mistake.
fn check(level: &Level, path: &PathUri) -> Result<(), FileError> {
    match &level.fd {
        Some(fd) => preserve::check(fd.as_fd(), path),
        None => unreachable!("the level in work is open"),
    }
}

/// Opens the parent directory and verifies that it is the expected one.
fn reopen_parent(below: &Level, above: (u64, u64), path: &PathUri) -> Result<OwnedFd, FileError> {
    let failed = |errno| FileError::os("remove", path, errno);
    let Some(below) = &below.fd else { return Err(failed(Errno::BADF)) };
    let fd = rustix::fs::openat(below, "..", LISTING - OFlags::NOFOLLOW, Mode::empty())
        .map_err(failed)?;
    if identity(fd.as_fd()).map_err(failed)? != above {
        return Err(FileError::refused(path, "the tree was moved while it was removed"));
    }
    Ok(fd)
}

fn identity(fd: BorrowedFd<'_>) -> Result<(u64, u64), Errno> {
    let stat = rustix::fs::fstat(fd)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// Removes everything except directories, and returns those (some, if there are many).
fn remove_files(
    fd: BorrowedFd<'_>,
    path: &PathUri,
    cancel: &Cancel,
) -> Result<Vec<Vec<u8>>, FileError> {
    loop {
        cancel.check()?;
        let (mut files, mut directories) = (Vec::new(), Vec::new());
        rustix::fs::seek(fd, rustix::fs::SeekFrom::Start(0))
            .map_err(|errno| FileError::os("remove", path, errno))?;
        let each = |name: &[u8], listed| {
            let listed = match listed {
                FileType::Unknown => {
                    rustix::fs::statat(fd, bytes_path(name), AtFlags::SYMLINK_NOFOLLOW)
                        .map_or(FileType::Unknown, |stat| file_type(&stat))
                }
                listed => listed,
            };
            match listed {
                FileType::Directory => directories.push(name.to_vec()),
                _ => files.push(name.to_vec()),
            }
            Ok(files.len() < BATCH && directories.len() < BATCH)
        };
        for_each_name(fd, each, |errno| FileError::os("remove", path, errno))?;
        for name in &files {
            // If it has become a directory, the next listing shows it.
            remove_name(fd, name, AtFlags::empty(), path)?;
        }
        if files.is_empty() || !directories.is_empty() {
            return Ok(directories);
        }
    }
}

/// False if the name is not of the kind that `flags` removes, or is not empty.
fn remove_name(
    directory: BorrowedFd<'_>,
    name: &[u8],
    flags: AtFlags,
    path: &PathUri,
) -> Result<bool, FileError> {
    match rustix::fs::unlinkat(directory, bytes_path(name), flags) {
        Ok(()) | Err(Errno::NOENT) => Ok(true),
        Err(Errno::ISDIR | Errno::NOTDIR | Errno::NOTEMPTY | Errno::EXIST) => Ok(false),
        Err(errno) => Err(FileError::os("remove", path, errno)),
    }
}
