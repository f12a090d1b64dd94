//! Placeholders: names that may not come into being, held by an empty directory while a sandbox runs.
//!
//! A mount needs something to be mounted on. So the name is created on the host, recognizable by its
//! mode, and locked (shared) by every sandbox that uses it; whoever ends last gets the exclusive lock
//! and removes it. The kernel drops the locks of a process that dies in any way, so a placeholder
//! that was left behind is free to be removed, or taken over by the next sandbox. Directories that have to
//! be made on the way to it have the same mode, and count as missing while they hold nothing else.
//!
//! On the host it is an empty directory like any other: whoever puts something into it (`git init`) makes
//! it real, and it stays. Inside, something read-only is mounted on it.
//!
//! Invariant: nothing is ever removed but an empty directory of such a mode whose exclusive lock is held.

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

/// As directories usually are, and sticky, which means nothing where only the owner can write: nobody
/// else makes one.
pub const MODE: u32 = 0o1755;

/// The bits that a placeholder is known by. The others come from where it is made: a set-group-ID
/// directory passes its bit on, a default access list takes others away.
const IDENTIFYING_BITS: u32 = 0o1022;

/// As many directories below each other as are looked into for whether they hold names only.
const MAX_NESTING: usize = 64;

/// How often a way is made again that others remove: each time one of them has just ended.
const PARENT_RETRIES: u32 = 100;

/// How often in all, and how long apart, exclusive locks are tried for after a sandbox was killed: its
/// processes are dying, which takes the kernel some time.
const SWEEP_TRIES: u32 = 200;
const SWEEP_PAUSE: Duration = Duration::from_millis(2);

/// How often the shared lock is tried for, as long apart.
const LOCK_TRIES: u32 = 50;

/// The placeholders of one sandbox.
pub(super) struct HeldPlaceholders {
    names: Vec<HeldName>,
}

enum HeldName {
    /// Ours, with others perhaps.
    Placeholder { parent: OwnedFd, lock: OwnedFd, placeholder: Placeholder },
    /// Something real is there by now.
    Existing,
    /// Cannot be created by this user, so neither by the target.
    Impossible,
}

impl HeldPlaceholders {
    /// Creates and locks what is not there.
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

    /// Whether there is something at this name to be mounted over.
    pub(super) fn exists(&self, index: usize) -> bool {
        !matches!(self.names.get(index), None | Some(HeldName::Impossible))
    }

    /// Whether it is a placeholder rather than something real.
    pub(super) fn is_placeholder(&self, index: usize) -> bool {
        matches!(self.names.get(index), Some(HeldName::Placeholder { .. }))
    }

    /// The locks, which have to stay open for as long as anything runs inside.
    pub(super) fn descriptors(&self) -> Vec<i32> {
        let locks = self.names.iter().filter_map(|name| match name {
            HeldName::Placeholder { lock, .. } => Some(lock.as_raw_fd()),
            _ => None,
        });
        let mut locks: Vec<i32> = locks.collect();
        locks.sort_unstable();
        locks
    }

    /// Removes what nobody else holds.
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
            // Another sandbox has ended, and has removed the way that both need.
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
        // Directories that the target could have made itself.
        match rustix::fs::mkdirat(&parent, &**name, Mode::from_raw_mode(MODE)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return check_impossible(&parent, errno),
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        parent = rustix::fs::openat(&parent, &**name, flags, Mode::empty())?;
    }
    // Each round is lost only to another sandbox that has just removed the name.
    loop {
        match rustix::fs::mkdirat(&parent, &**last, Mode::from_raw_mode(MODE)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return check_impossible(&parent, errno),
        }
        let lock = match open(&parent, last) {
            Ok(lock) => lock,
            Err(Errno::NOENT) => continue,
            Err(_) => return Ok(HeldName::Existing),
        };
        if !is_placeholder(&lock)? {
            return Ok(HeldName::Existing);
        }
        lock_shared(&lock)?;
        if is_still_at(&lock, &parent, last)? {
            return Ok(HeldName::Placeholder { parent, lock, placeholder: placeholder.clone() });
        }
    }
}

/// Removes the directories on the way to a name, as far as nobody uses them: they are empty, and no
/// sandbox holds the name of one. What has become somebody's is left as they would have made it.
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

/// Takes the lock that says the placeholder is in use. Only its removal holds it exclusively, for an
/// instant. Whoever else does, a process that can write around the placeholder, could take the
/// placeholder away just as well; it is not waited for, and at worst leaves an empty directory behind.
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

/// Whom the host does not let create the name, it does not let create it inside either; unless they own
/// the directory, and can let themselves.
fn check_impossible(parent: &OwnedFd, errno: Errno) -> rustix::io::Result<HeldName> {
    let owner = rustix::fs::fstat(parent)?.st_uid;
    match errno {
        Errno::ACCESS if owner == rustix::process::geteuid().as_raw() => Err(errno),
        Errno::ACCESS | Errno::PERM | Errno::ROFS => Ok(HeldName::Impossible),
        other => Err(other),
    }
}

fn open(parent: impl AsFd, name: &OsStr) -> rustix::io::Result<OwnedFd> {
    let directory = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open = || rustix::fs::openat(&parent, name, directory | OFlags::RDONLY, Mode::empty());
    match open() {
        // A default access list may leave its owner no right to it.
        Err(Errno::ACCESS) => {
            let closed =
                rustix::fs::openat(&parent, name, directory | OFlags::PATH, Mode::empty())?;
            let stat = rustix::fs::fstat(&closed)?;
            if !has_mode(&closed)? || stat.st_uid != rustix::process::geteuid().as_raw() {
                return Err(Errno::ACCESS);
            }
            let path = format!("/proc/self/fd/{}", closed.as_raw_fd());
            rustix::fs::chmod(path, Mode::from_raw_mode(MODE))?;
            open()
        }
        opened => opened,
    }
}

/// By its mode, and by holding nothing but others of its kind.
fn is_placeholder(directory: &OwnedFd) -> rustix::io::Result<bool> {
    Ok(has_mode(directory)? && holds_only_placeholders(directory, MAX_NESTING)?)
}

fn has_mode(directory: impl AsFd) -> rustix::io::Result<bool> {
    Ok(rustix::fs::fstat(directory)?.st_mode & IDENTIFYING_BITS == MODE & IDENTIFYING_BITS)
}

/// Somebody uses it: leaves it as they would have made it.
fn clear_placeholder_mode(directory: &OwnedFd) {
    if let Ok(stat) = rustix::fs::fstat(directory) {
        let _ = rustix::fs::fchmod(directory, Mode::from_raw_mode(stat.st_mode & 0o6777));
    }
}

/// Whether nothing is in a directory but placeholders and ways to them.
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

/// Whether at a name there is a placeholder, or a way to one, rather than somebody's directory.
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

/// With the exclusive lock held.
fn remove(parent: &OwnedFd, lock: &OwnedFd, placeholder: &Placeholder) {
    let Some(last) = placeholder.missing.last() else { return };
    if !is_still_at(lock, parent, last).unwrap_or(false) {
        return;
    }
    if !is_placeholder(lock).unwrap_or(false) {
        // Someone outside has begun to use the name: leave it as they would have made it.
        if has_mode(lock).unwrap_or(false) {
            clear_placeholder_mode(lock);
        }
        return;
    }
    // Fails, and rightly, where it is on the way to a name that another sandbox holds.
    let _ = rustix::fs::unlinkat(parent, &**last, AtFlags::REMOVEDIR);
}

/// Removes placeholders of a sandbox that was killed before it could.
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
