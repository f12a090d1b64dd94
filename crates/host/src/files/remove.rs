//! Removing a name, or a tree.
//!
//! Invariant: no link is ever followed below the path's parent. Every name is removed relative to
//! the descriptor of its directory, every directory is entered with `O_NOFOLLOW`, and the way back
//! up is checked by device and inode; so a tree that is rearranged meanwhile can make the removal
//! fail, but never lead it elsewhere. At most [`MAX_OPEN_LEVELS`] descriptors are held, at any depth.

use codex_exec_server_protocol::PathUri;
use codex_exec_server_protocol::files::FsRemoveParams;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::{Errno, retry_on_intr};

use super::directory::for_each_name;
use super::resolve::{LISTING, Links, Resolver, bytes_path, file_type};
use super::{Cancel, FileError};

/// Directories whose descriptors are kept on the way down; those above are opened again on the way
/// back.
const MAX_OPEN_LEVELS: usize = 32;

/// How often a directory that fills up again while it is removed is tried again.
const MAX_RETRIES: u32 = 1000;

/// Names read from a directory before they are removed: the kernel does not say what a listing
/// shows while its directory changes, so it is listed again until it is empty.
const BATCH: usize = 4096;

pub(super) fn remove(
    resolver: Resolver,
    params: &FsRemoveParams,
    cancel: &Cancel,
) -> Result<(), FileError> {
    let FsRemoveParams { path, recursive, force, follow_symlinks, .. } = params;
    cancel.check()?;
    match remove_path(resolver, path, *recursive, (*follow_symlinks).into(), cancel) {
        Err(FileError::Os { errno, .. }) if *force && errno == Errno::NOENT.raw_os_error() => {
            Ok(())
        }
        done => done,
    }
}

fn remove_path(
    resolver: Resolver,
    path: &PathUri,
    recursive: bool,
    links: Links,
    cancel: &Cancel,
) -> Result<(), FileError> {
    let failed = |errno| FileError::os("remove", path, errno);
    let (parent, name) = resolver.parent("remove", path, links)?;
    let stat =
        rustix::fs::statat(&parent, bytes_path(name), AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
    match file_type(&stat) {
        FileType::Symlink if links == Links::Refuse => {
            Err(FileError::SymlinkRefused { path: path.clone() })
        }
        FileType::Directory if recursive => remove_tree(parent.as_fd(), name, path, cancel),
        FileType::Directory => {
            rustix::fs::unlinkat(&parent, bytes_path(name), AtFlags::REMOVEDIR).map_err(failed)
        }
        _ => rustix::fs::unlinkat(&parent, bytes_path(name), AtFlags::empty()).map_err(failed),
    }
}

/// A directory on the way from the top to where the removal is.
struct Level {
    name: Vec<u8>,
    identity: (u64, u64),
    /// `None` if it was closed to save descriptors.
    fd: Option<OwnedFd>,
    /// Subdirectories that were found and are still to be removed.
    subdirectories: Vec<Vec<u8>>,
}

fn remove_tree(
    parent: BorrowedFd<'_>,
    name: &[u8],
    path: &PathUri,
    cancel: &Cancel,
) -> Result<(), FileError> {
    let mut levels = vec![enter(parent, name, path)?];
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
                // Gone, or something else by now: if it is something, the next listing shows it.
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
        // Nothing is left in it: back up, and remove it by its name.
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
        // Something was put into it meanwhile; once more, but not for ever.
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

/// Opens the directory above, and makes sure it is the one we came from.
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

/// Removes what is no directory, and returns the directories (some, if there are many).
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
            // A directory by now: the next listing shows it.
            remove_name(fd, name, AtFlags::empty(), path)?;
        }
        if files.is_empty() || !directories.is_empty() {
            return Ok(directories);
        }
    }
}

/// False if there is something else of that name than `flags` is for, or something in it.
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
