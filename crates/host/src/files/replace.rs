//! Replaces a file atomically.
//!
//! Invariant: until [`Replacement::commit`] the old file is untouched, and a dropped replacement leaves
//! no trace. The bytes go to an unnamed file (`O_TMPFILE`) in the same directory, so even SIGKILL
//! leaves nothing. Commit syncs the file and names it. If the name exists, Linux needs a second name to
//! rename from: only a kill between these two system calls leaves a file, `.NAME.RANDOM.tmp`, complete
//! and synced.
//!
//! On filesystems without unnamed files, the file has such a name from the start. Dropping the
//! replacement removes it, also during a panic; a killed server leaves it.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::OnceLock;

use codex_exec_server_protocol::PathUri;
use parking_lot::Mutex;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, Stat, Uid};
use rustix::io::{Errno, retry_on_intr};

use super::FileError;
use super::resolve::{self, Links, REGULAR, Resolver, bytes_path, file_type};

/// Maximum links to follow, as in the kernel.
const MAX_LINKS: usize = 40;

/// A file that will replace another.
#[derive(Debug)]
pub(super) struct Replacement {
    path: PathUri,
    directory: OwnedFd,
    name: Vec<u8>,
    file: OwnedFd,
    /// The temporary name of `file`, if it has one.
    temporary: Mutex<Option<Vec<u8>>>,
    attributes: Attributes,
}

#[derive(Debug)]
enum Attributes {
    /// Keep mode and owner of the replaced file.
    Keep(Box<Stat>),
    /// A new file with this mode.
    Mode(Mode),
    /// A new file with the default mode.
    Default,
}

impl Replacement {
    /// Creates the temporary file. `mode` applies if the path does not exist.
    pub(super) fn begin(
        resolver: Resolver,
        path: &PathUri,
        links: Links,
        mode: Option<Mode>,
    ) -> Result<Self, FileError> {
        let failed = |errno| FileError::os("replace", path, errno);
        let (mut directory, name) = resolver.parent("replace", path, links)?;
        let mut name = name.to_vec();
        if links == Links::Follow {
            (directory, name) = follow_last(directory, name).map_err(failed)?;
        }
        let attributes = match (existing_file(directory.as_fd(), &name, path, links)?, mode) {
            (Some(stat), _) => Attributes::Keep(Box::new(stat)),
            (None, Some(mode)) => Attributes::Mode(mode),
            (None, None) => Attributes::Default,
        };
        let bits = match attributes {
            Attributes::Default => Mode::from_raw_mode(0o666),
            _ => Mode::RUSR | Mode::WUSR,
        };
        let (file, temporary) = create_temporary(directory.as_fd(), &name, bits).map_err(failed)?;
        let temporary = Mutex::new(temporary);
        Ok(Self { path: path.clone(), directory, name, file, temporary, attributes })
    }

    /// The temporary file.
    pub(super) fn file(&self) -> &OwnedFd {
        &self.file
    }

    /// The replaced file, if it exists.
    pub(super) fn old(&self) -> Option<&Stat> {
        match &self.attributes {
            Attributes::Keep(old) => Some(old),
            Attributes::Mode(_) | Attributes::Default => None,
        }
    }

    /// The replaced path.
    pub(super) fn path(&self) -> &PathUri {
        &self.path
    }

    /// Syncs the file and renames it into place.
    pub(super) fn commit(&self) -> Result<(), FileError> {
        let failed = |errno| FileError::os("replace", &self.path, errno);
        self.apply_attributes()?;
        retry_on_intr(|| rustix::fs::fsync(&self.file)).map_err(failed)?;
        let mut temporary = self.temporary.lock();
        let directory = self.directory.as_fd();
        if temporary.is_none() {
            let is_new = !matches!(self.attributes, Attributes::Keep(_));
            if is_new {
                match link(&self.file, directory, &self.name) {
                    Ok(()) => return self.sync_directory(),
                    // It was created meanwhile; replace it.
                    Err(Errno::EXIST) => {}
                    Err(errno) => return Err(failed(errno)),
                }
            }
            *temporary = Some(
                with_temporary_name(&self.name, |name| link(&self.file, directory, name))
                    .map_err(failed)?
                    .1,
            );
        }
        let from = temporary.as_deref().unwrap_or_default();
        rustix::fs::renameat(directory, bytes_path(from), directory, bytes_path(&self.name))
            .map_err(failed)?;
        *temporary = None;
        drop(temporary);
        self.sync_directory()
    }

    fn apply_attributes(&self) -> Result<(), FileError> {
        let failed = |errno| FileError::os("set the mode of", &self.path, errno);
        match &self.attributes {
            Attributes::Default => Ok(()),
            Attributes::Mode(mode) => rustix::fs::fchmod(&self.file, *mode).map_err(failed),
            Attributes::Keep(old) => {
                let new = rustix::fs::fstat(&self.file).map_err(failed)?;
                let uid = (old.st_uid != new.st_uid).then(|| Uid::from_raw(old.st_uid));
                let gid = (old.st_gid != new.st_gid).then(|| Gid::from_raw(old.st_gid));
                if uid.is_some() || gid.is_some() {
                    // Replacing would change the owner; writing in place does not.
                    rustix::fs::fchown(&self.file, uid, gid).map_err(|errno| {
                        FileError::os(
                            "keep the owner of (write it without atomic)",
                            &self.path,
                            errno,
                        )
                    })?;
                }
                // After fchown, which clears set-id bits.
                resolve::inherit_mode(&self.file, Mode::from_raw_mode(old.st_mode)).map_err(failed)
            }
        }
    }

    /// Syncs the directory, to persist the new name. A directory that is writable but not readable
    /// cannot be synced.
    fn sync_directory(&self) -> Result<(), FileError> {
        let synced = rustix::fs::openat(&self.directory, ".", resolve::LISTING, Mode::empty())
            .and_then(|directory| retry_on_intr(|| rustix::fs::fsync(&directory)));
        match synced {
            Ok(()) | Err(Errno::ACCESS | Errno::INVAL | Errno::OPNOTSUPP) => Ok(()),
            Err(errno) => Err(FileError::os("sync the directory of", &self.path, errno)),
        }
    }
}

impl Drop for Replacement {
    fn drop(&mut self) {
        let temporary = self.temporary.get_mut();
        if let Some(name) = temporary.take() {
            let _ = rustix::fs::unlinkat(&self.directory, bytes_path(&name), AtFlags::empty());
        }
    }
}

/// The end of a chain of links, whether or not it exists.
fn follow_last(mut directory: OwnedFd, mut name: Vec<u8>) -> Result<(OwnedFd, Vec<u8>), Errno> {
    for _ in 0..MAX_LINKS {
        let target = match rustix::fs::readlinkat(&directory, bytes_path(&name), Vec::new()) {
            Ok(target) => target.into_bytes(),
            Err(Errno::INVAL | Errno::NOENT) => return Ok((directory, name)),
            Err(errno) => return Err(errno),
        };
        let target = target.strip_suffix(b"/").unwrap_or(&target);
        let (parent, last) = match target.iter().rposition(|&b| b == b'/') {
            Some(0) => (b"/".as_slice(), &target[1..]),
            Some(slash) => (&target[..slash], &target[slash + 1..]),
            None => (b".".as_slice(), target),
        };
        if matches!(last, b"" | b"." | b"..") {
            return Err(Errno::ISDIR);
        }
        let flags = resolve::DIRECTORY - OFlags::NOFOLLOW;
        directory = rustix::fs::openat(&directory, bytes_path(parent), flags, Mode::empty())?;
        name = last.to_vec();
    }
    Err(Errno::LOOP)
}

/// The existing file. It must be writable, as if it were written in place.
fn existing_file(
    directory: BorrowedFd<'_>,
    name: &[u8],
    path: &PathUri,
    links: Links,
) -> Result<Option<Stat>, FileError> {
    let failed = |errno| FileError::os("replace", path, errno);
    let stat = match rustix::fs::statat(directory, bytes_path(name), AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => stat,
        Err(Errno::NOENT) => return Ok(None),
        Err(errno) => return Err(failed(errno)),
    };
    match file_type(&stat) {
        FileType::RegularFile => {}
        FileType::Symlink if links == Links::Refuse => {
            return Err(FileError::SymlinkRefused { path: path.clone() });
        }
        _ => return Err(resolve::special_file_error(path, &stat)),
    }
    let flags = OFlags::WRONLY | OFlags::NOFOLLOW | REGULAR;
    match retry_on_intr(|| rustix::fs::openat(directory, bytes_path(name), flags, Mode::empty())) {
        Ok(fd) => resolve::require_regular(fd, path).map(|(_, stat)| Some(stat)),
        // A running program cannot be written in place, but can be replaced.
        Err(Errno::TXTBSY) => Ok(Some(stat)),
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(failed(errno)),
    }
}

/// Creates an empty file in `directory`, unnamed if the filesystem supports that.
fn create_temporary(
    directory: BorrowedFd<'_>,
    name: &[u8],
    bits: Mode,
) -> Result<(OwnedFd, Option<Vec<u8>>), Errno> {
    if can_link_unnamed() {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        match retry_on_intr(|| rustix::fs::openat(directory, ".", flags, bits)) {
            Ok(file) => return Ok((file, None)),
            // Not supported by this filesystem (or by this kernel, which sees a directory opened for
            // writing).
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL | Errno::NOSYS) => {}
            Err(errno) => return Err(errno),
        }
    }
    with_temporary_name(name, |temporary_name| {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
        retry_on_intr(|| rustix::fs::openat(directory, bytes_path(temporary_name), flags, bits))
    })
    .map(|(file, name)| (file, Some(name)))
}

/// Without /proc only a privileged process can name an unnamed file.
fn can_link_unnamed() -> bool {
    static PROC: OnceLock<bool> = OnceLock::new();
    *PROC.get_or_init(|| rustix::fs::stat("/proc/self/fd").is_ok())
}

/// Gives an unnamed file a free name.
fn link(file: &OwnedFd, directory: BorrowedFd<'_>, name: &[u8]) -> Result<(), Errno> {
    match rustix::fs::linkat(file, "", directory, bytes_path(name), AtFlags::EMPTY_PATH) {
        // This kernel does not permit it to this process; through /proc it is permitted.
        Err(Errno::NOENT | Errno::PERM | Errno::INVAL) => {}
        done => return done,
    }
    let itself = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::linkat(CWD, itself, directory, bytes_path(name), AtFlags::SYMLINK_FOLLOW)
}

/// Tries random names until one is free.
pub(super) fn with_temporary_name<T>(
    name: &[u8],
    mut create: impl FnMut(&[u8]) -> Result<T, Errno>,
) -> Result<(T, Vec<u8>), Errno> {
    for attempt in 0..64u32 {
        let mut temporary_name = b".".to_vec();
        // Names have at most 255 bytes; ours adds 22.
        temporary_name.extend_from_slice(&name[..name.len().min(230)]);
        let random = RandomState::new().hash_one(attempt);
        temporary_name.extend_from_slice(format!(".{random:016x}.tmp").as_bytes());
        match create(&temporary_name) {
            Ok(made) => return Ok((made, temporary_name)),
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno),
        }
    }
    Err(Errno::EXIST)
}
