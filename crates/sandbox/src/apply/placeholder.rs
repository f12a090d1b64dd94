//! Placeholders: empty directories that hold protected names while a sandbox runs.
//!
//! A mount needs a mount point. So the name is created on the host as a directory, recognizable by its
//! mode, and locked (shared) by every sandbox that uses it; the last one to end gets the exclusive lock
//! and removes it. The kernel drops the locks of a dead process, so a placeholder that was left behind
//! can be removed, or reused by the next sandbox. Parent directories that have to be created have the
//! same mode, and count as missing while they contain nothing else.
//!
//! On the host it is an ordinary empty directory: if a process puts something into it (`git init`), it
//! becomes an ordinary directory and stays. Inside, something read-only is mounted on it.
//!
//! Invariant: only an empty directory of this mode is removed, while its exclusive lock is held; or by the
//! attempt that created it and could not lock it.

use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::{at, sys};
use crate::plan::Placeholder;
use crate::status::{Failure, Stage};

/// An ordinary directory mode plus the sticky bit, which has no effect where only the owner can write,
/// so that other programs do not use it.
pub const MODE: u32 = 0o1755;

/// The bits that identify a placeholder. Others depend on the parent: a set-group-ID directory passes
/// its bit on, and a default ACL removes bits, until [`open`] sets the whole mode.
const IDENTIFYING_BITS: u32 = 0o1022;

/// What the owner needs to use a placeholder.
const OWNER_BITS: u32 = 0o700;

/// Maximum depth to which a directory is searched for anything but placeholders.
const MAX_NESTING: usize = 64;

/// Retries to create parent directories that other sandboxes, which have just ended, remove.
const PARENT_RETRIES: u32 = 100;

/// Attempts in total, and the pause between them, to get exclusive locks after a sandbox was killed:
/// its processes take some time to die.
const SWEEP_TRIES: u32 = 200;
const SWEEP_PAUSE: Duration = Duration::from_millis(2);

/// Attempts to get the shared lock, with the same pause.
const LOCK_TRIES: u32 = 50;

/// The placeholders that one sandbox holds.
pub(super) struct HeldPlaceholders {
    names: Vec<HeldName>,
}

enum HeldName {
    /// A placeholder, possibly shared with other sandboxes.
    Placeholder { parent: OwnedFd, lock: OwnedFd, placeholder: Placeholder },
    /// Something else exists by now.
    Existing,
    /// This user cannot create it, so neither can the target.
    Impossible,
}

impl HeldPlaceholders {
    /// Creates and locks the placeholders of missing names.
    pub(super) fn create(placeholders: &[Placeholder]) -> Result<Self, Failure> {
        if placeholders.is_empty() {
            return Ok(Self { names: Vec::new() });
        }
        let umask = rustix::process::umask(Mode::empty());
        let mut held = Self { names: Vec::with_capacity(placeholders.len()) };
        let created = placeholders.iter().try_for_each(|placeholder| {
            let name = acquire(placeholder).inspect_err(|_| remove_created_parents(placeholder));
            held.names.push(name.map_err(at(Stage::Placeholders, &placeholder.path()))?);
            Ok(())
        });
        rustix::process::umask(umask);
        match created {
            Ok(()) => Ok(held),
            Err(failure) => {
                held.release();
                Err(failure)
            }
        }
    }

    /// Whether there is a file to mount over.
    pub(super) fn exists(&self, index: usize) -> bool {
        !matches!(self.names.get(index), None | Some(HeldName::Impossible))
    }

    /// Whether it is a placeholder and not something else.
    pub(super) fn is_placeholder(&self, index: usize) -> bool {
        matches!(self.names.get(index), Some(HeldName::Placeholder { .. }))
    }

    /// The locks, which must stay open while anything runs inside.
    pub(super) fn descriptors(&self) -> Vec<i32> {
        let locks = self.names.iter().filter_map(|name| match name {
            HeldName::Placeholder { lock, .. } => Some(lock.as_raw_fd()),
            _ => None,
        });
        let mut locks: Vec<i32> = locks.collect();
        locks.sort_unstable();
        locks
    }

    /// Removes the placeholders that no other sandbox holds.
    pub(super) fn release(&self) {
        for name in &self.names {
            if let HeldName::Placeholder { parent, lock, placeholder } = name {
                if rustix::fs::flock(lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
                    remove(parent, lock, placeholder);
                }
                remove_created_parents(placeholder);
            }
        }
    }
}

fn acquire(placeholder: &Placeholder) -> rustix::io::Result<HeldName> {
    let mut tries = PARENT_RETRIES;
    loop {
        match try_acquire(placeholder) {
            // Another sandbox has just ended and removed the parent directories.
            Err(Errno::NOENT) if tries > 0 => tries -= 1,
            held => return held,
        }
    }
}

fn try_acquire(placeholder: &Placeholder) -> rustix::io::Result<HeldName> {
    let Some((last, between)) = placeholder.missing.split_last() else {
        return Ok(HeldName::Impossible);
    };
    let mut parent = sys::open_absolute(&placeholder.parent)?;
    for name in between {
        // The target could have created these directories itself.
        match rustix::fs::mkdirat(&parent, &**name, Mode::from_raw_mode(MODE)) {
            // Sets the mode.
            Ok(()) => drop(open(&parent, name)),
            Err(Errno::EXIST) => {}
            Err(errno) => return check_impossible(&parent, errno),
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        parent = rustix::fs::openat(&parent, &**name, flags, Mode::empty())?;
    }
    // Each retry means that another sandbox has just removed the name.
    loop {
        let is_new = match rustix::fs::mkdirat(&parent, &**last, Mode::from_raw_mode(MODE)) {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(errno) => return check_impossible(&parent, errno),
        };
        let lock = match open(&parent, last) {
            Ok(lock) => lock,
            Err(Errno::NOENT) => continue,
            Err(_) => return Ok(HeldName::Existing),
        };
        if !is_placeholder(&lock)? {
            return Ok(HeldName::Existing);
        }
        if let Err(errno) = lock_shared(&lock) {
            // The file system has no locks, so nobody else holds it.
            if is_new {
                let _ = rustix::fs::unlinkat(&parent, &**last, AtFlags::REMOVEDIR);
            }
            return Err(errno);
        }
        if is_still_at(&lock, &parent, last)? {
            return Ok(HeldName::Placeholder { parent, lock, placeholder: placeholder.clone() });
        }
    }
}

/// Removes the parent directories of a name, if they are empty and no sandbox holds one of them. A
/// directory that is in use by now gets an ordinary mode and stays.
fn remove_created_parents(placeholder: &Placeholder) {
    for names in (1..placeholder.missing.len()).rev() {
        let path = placeholder.path_to(names);
        let (Some(above), Some(name)) = (path.parent(), path.file_name()) else { return };
        let Ok(above) = sys::open_absolute(above) else { continue };
        let Ok(directory) = open(&above, name) else { continue };
        if !has_mode(&directory).unwrap_or(false) {
            return;
        }
        match holds_only_placeholders(&directory, MAX_NESTING) {
            Ok(true) if is_empty(&directory).unwrap_or(false) => {
                let locked =
                    rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive);
                let removed =
                    locked.and_then(|()| rustix::fs::unlinkat(&above, name, AtFlags::REMOVEDIR));
                if removed.is_err() {
                    return;
                }
            }
            Ok(false) => {
                clear_placeholder_mode(&directory);
            }
            _ => return,
        }
    }
}

/// Takes the shared lock that marks the placeholder as used. Only removal takes the exclusive lock, for
/// an instant. Any other process that holds it could just as well remove the placeholder; this code
/// does not wait for it, and at worst leaves an empty directory behind.
fn lock_shared(lock: &OwnedFd) -> rustix::io::Result<()> {
    for _ in 0..LOCK_TRIES {
        match rustix::fs::flock(lock, FlockOperation::NonBlockingLockShared) {
            Err(Errno::WOULDBLOCK) => std::thread::sleep(SWEEP_PAUSE),
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
    Ok(())
}

/// If the host does not let the user create the name, it does not inside either; unless the user owns
/// the directory and can change its mode.
fn check_impossible(parent: &OwnedFd, errno: Errno) -> rustix::io::Result<HeldName> {
    let owner = rustix::fs::fstat(parent)?.st_uid;
    match errno {
        Errno::ACCESS if owner == rustix::process::geteuid().as_raw() => Err(errno),
        Errno::ACCESS | Errno::PERM | Errno::ROFS => Ok(HeldName::Impossible),
        other => Err(other),
    }
}

/// Opens a directory. If it looks like a placeholder that its owner cannot use, as a default ACL leaves
/// it, it gets the mode of one.
fn open(parent: impl AsFd, name: &OsStr) -> rustix::io::Result<OwnedFd> {
    let directory = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open = || rustix::fs::openat(&parent, name, directory | OFlags::RDONLY, Mode::empty());
    let (opened, is_open) = match open() {
        Err(Errno::ACCESS) => {
            let closed = directory | OFlags::PATH;
            (rustix::fs::openat(&parent, name, closed, Mode::empty())?, false)
        }
        opened => (opened?, true),
    };
    let stat = rustix::fs::fstat(&opened)?;
    let is_own = is_mode(stat.st_mode) && stat.st_uid == rustix::process::geteuid().as_raw();
    if is_own && stat.st_mode & OWNER_BITS != OWNER_BITS {
        let path = format!("/proc/self/fd/{}", opened.as_raw_fd());
        rustix::fs::chmod(path, Mode::from_raw_mode(MODE))?;
    }
    if is_open { Ok(opened) } else { open() }
}

/// Whether it has the mode, and contains only other placeholders.
fn is_placeholder(directory: &OwnedFd) -> rustix::io::Result<bool> {
    Ok(has_mode(directory)? && holds_only_placeholders(directory, MAX_NESTING)?)
}

fn has_mode(directory: impl AsFd) -> rustix::io::Result<bool> {
    Ok(is_mode(rustix::fs::fstat(directory)?.st_mode))
}

/// Whether a file has the type and the mode of a placeholder, apart from what directories pass on.
pub(crate) fn is_mode(mode: u32) -> bool {
    let kind = mode & libc::S_IFMT;
    kind == libc::S_IFDIR && mode & IDENTIFYING_BITS == MODE & IDENTIFYING_BITS
}

/// Gives a directory that is in use an ordinary mode.
fn clear_placeholder_mode(directory: &OwnedFd) {
    if let Ok(stat) = rustix::fs::fstat(directory) {
        let _ = rustix::fs::fchmod(directory, Mode::from_raw_mode(stat.st_mode & 0o6777));
    }
}

/// Whether a directory contains only placeholders and their parents.
fn holds_only_placeholders(directory: &OwnedFd, deep: usize) -> rustix::io::Result<bool> {
    for entry in rustix::fs::Dir::read_from(directory)? {
        let entry = entry?;
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if name == "." || name == ".." {
            continue;
        }
        let is_one = match open(directory, name) {
            Ok(inside) => {
                deep > 0 && has_mode(&inside)? && holds_only_placeholders(&inside, deep - 1)?
            }
            // Removed since it was listed.
            Err(Errno::NOENT) => true,
            Err(_) => false,
        };
        if !is_one {
            return Ok(false);
        }
    }
    Ok(true)
}

fn is_empty(directory: &OwnedFd) -> rustix::io::Result<bool> {
    for entry in rustix::fs::Dir::read_from(directory)? {
        if !matches!(entry?.file_name().to_bytes(), b"." | b"..") {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether the name is a placeholder, or a parent of one.
pub(crate) fn exists_at(parent: impl AsFd, name: &Path) -> bool {
    open(parent, name.as_os_str())
        .is_ok_and(|directory| is_placeholder(&directory).unwrap_or(false))
}

fn is_still_at(lock: &OwnedFd, parent: &OwnedFd, name: &OsStr) -> rustix::io::Result<bool> {
    let held = rustix::fs::fstat(lock)?;
    match rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(there) => Ok(held.st_ino == there.st_ino && held.st_dev == there.st_dev),
        Err(Errno::NOENT) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Removes a placeholder. Call it with the exclusive lock held.
fn remove(parent: &OwnedFd, lock: &OwnedFd, placeholder: &Placeholder) {
    let Some(last) = placeholder.missing.last() else { return };
    if !is_still_at(lock, parent, last).unwrap_or(false) {
        return;
    }
    if !is_placeholder(lock).unwrap_or(false) {
        // A process outside has begun to use the name: give it an ordinary mode.
        if has_mode(lock).unwrap_or(false) {
            clear_placeholder_mode(lock);
        }
        return;
    }
    // Fails, as it should, if it is a parent of a placeholder of another sandbox.
    let _ = rustix::fs::unlinkat(parent, &**last, AtFlags::REMOVEDIR);
}

/// Removes the placeholders of a sandbox that was killed before it could.
pub(crate) fn sweep(placeholders: &[Placeholder]) {
    let mut tries = SWEEP_TRIES;
    for placeholder in placeholders {
        let Some((last, between)) = placeholder.missing.split_last() else { continue };
        let mut path = placeholder.parent.clone();
        path.extend(between);
        let Ok(parent) = sys::open_absolute(&path) else { continue };
        loop {
            let Ok(lock) = open(&parent, last) else { break };
            if !is_placeholder(&lock).unwrap_or(false) {
                break;
            }
            if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
                remove(&parent, &lock, placeholder);
                drop(lock);
                remove_created_parents(placeholder);
                break;
            }
            drop(lock);
            if tries == 0 {
                break;
            }
            tries -= 1;
            std::thread::sleep(SWEEP_PAUSE);
        }
    }
}
