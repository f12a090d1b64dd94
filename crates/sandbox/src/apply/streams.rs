//! Confines standard streams that are files of the host.
//!
//! A descriptor that was opened outside bypasses the sandbox's mounts: through it the owner of the file can
//! change its mode, and a process that may write the file can change its times, its attributes and, by
//! opening it again in `/proc`, its content, however the descriptor was opened. And a directory gives access
//! to everything below it, denied or not.
//!
//! Invariant: a stream that is a file opened for reading, a device or a named pipe is reopened through
//! a read-only mount, on which devices and pipes can be written but nothing can be changed, whoever owns it. A
//! directory is refused, and so is a stream with access mode 3 (neither reading nor writing), because through
//! `/proc` it could be reopened for either. A file opened for writing is the command's to write, and
//! stays. What cannot be reopened by its path is refused if this user could change it.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, SeekFrom};
use rustix::io::Errno;

use super::sys::{self, ATTR_NODEV, ATTR_NOSUID, ATTR_RDONLY};
use super::{at, during};
use crate::plan::{Enforcement, Grant, Operation};
use crate::status::{Failure, Stage};

/// The file system type of unnamed pipes.
const PIPEFS: i64 = 0x5049_5045;

/// Reopened streams.
#[derive(Debug, Default)]
pub(super) struct Reopened {
    /// Files, each with the caller's descriptor.
    files: Vec<(OwnedFd, OwnedFd)>,
    /// The mounts that streams were reopened through. Closing one dissolves it, for which the kernel waits
    /// for all processors; so they stay open until the target runs.
    mounts: Vec<OwnedFd>,
}

impl Reopened {
    pub(super) fn descriptors(&self) -> impl Iterator<Item = i32> {
        self.files.iter().flat_map(|(given, confined)| [given.as_raw_fd(), confined.as_raw_fd()])
    }

    /// Moves the caller's file offsets to where the command has read, as if it had used those
    /// descriptors.
    pub(super) fn advance(&self) {
        for (given, confined) in &self.files {
            if let Ok(offset) = rustix::fs::seek(confined, SeekFrom::Current(0)) {
                let _ = rustix::fs::seek(given, SeekFrom::Start(offset));
            }
        }
    }
}

/// Reopens such streams. Call it while the host's tree is still visible.
pub(super) fn confine(
    enforcement: &Enforcement,
    changeable: [Changeable; 3],
) -> Result<Reopened, Failure> {
    let mut reopened = Reopened::default();
    if enforcement.rules.is_none() {
        return Ok(reopened);
    }
    for (stream, changeable) in all().into_iter().zip(changeable) {
        if is_open_for_nothing(stream) {
            let message = "a standard stream is open for neither reading nor writing (access mode 3 or \
                           O_PATH)";
            return Err(Failure::new(Stage::Sources, libc::EBADF, message));
        }
        let Some(kind) = kind(stream) else { continue };
        if kind == FileType::Directory {
            let message = "a standard stream is a directory, which would bypass the policy";
            return Err(Failure::new(Stage::Sources, libc::EISDIR, message));
        }
        // Without a name nothing else finds it.
        let has_name = rustix::fs::fstat(stream).is_ok_and(|file| file.st_nlink > 0);
        if !has_name || (is_null(stream) && has_own_null(enforcement)) {
            continue;
        }
        match reopen(stream, kind) {
            Ok((confined, mount)) => {
                let given = rustix::io::fcntl_dupfd_cloexec(stream, 3);
                let given = given.map_err(during(Stage::Sources))?;
                // SAFETY: both are open, and nothing owns the number of a standard stream.
                let moved = unsafe { libc::dup2(confined.as_raw_fd(), stream.as_raw_fd()) };
                sys::check(i64::from(moved)).map_err(during(Stage::Sources))?;
                if kind == FileType::RegularFile {
                    reopened.files.push((given, confined));
                }
                reopened.mounts.push(mount);
            }
            // A terminal of another mount namespace (a container's console) has no path in this one.
            Err(_) if rustix::termios::isatty(stream) => {}
            // Such as a file that root opened, in a directory of its own.
            Err(_) if changeable == Changeable::No => {}
            Err(failure) => return Err(failure),
        }
    }
    Ok(reopened)
}

/// Replaces streams that are the host's `/dev/null` by the sandbox's own, which is on a read-only mount
/// already: most processes have one, and a mount for each would cost more. Call it once the tree is built.
pub(super) fn confine_null(enforcement: &Enforcement) -> Result<(), Failure> {
    if enforcement.rules.is_none() || !has_own_null(enforcement) {
        return Ok(());
    }
    let failed = at(Stage::Sources, Path::new(NULL));
    for stream in all().into_iter().filter(|stream| is_null(*stream)) {
        let flags = rustix::fs::fcntl_getfl(stream).map_err(&failed)?;
        let asked = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let null = rustix::fs::open(NULL, asked, Mode::empty()).map_err(&failed)?;
        if !is_null(null.as_fd()) {
            return Err(failed(Errno::NODEV));
        }
        // SAFETY: both are open, and nothing owns the number of a standard stream.
        let moved = unsafe { libc::dup2(null.as_raw_fd(), stream.as_raw_fd()) };
        sys::check(i64::from(moved)).map_err(&failed)?;
    }
    Ok(())
}

const NULL: &str = "/dev/null";

/// Whether the tree has a `/dev/null` of its own.
fn has_own_null(enforcement: &Enforcement) -> bool {
    enforcement.tree.operations.iter().any(|operation| {
        matches!(operation, Operation::Bind { path, device: true, .. } if path == Path::new(NULL))
    })
}

/// Whether it is the null device.
fn is_null(stream: BorrowedFd<'_>) -> bool {
    rustix::fs::fstat(stream).is_ok_and(|file| {
        FileType::from_raw_mode(file.st_mode) == FileType::CharacterDevice
            && file.st_rdev == rustix::fs::makedev(1, 3)
    })
}

/// The terminal among the streams, as a mount: the sandbox does not see the host's `/dev/pts`, so the
/// terminal needs another path. `None` if there is no terminal, or it has no path here.
pub(super) fn terminal() -> Option<OwnedFd> {
    let stream = all().into_iter().find(|stream| rustix::termios::isatty(stream))?;
    let path_descriptor = path_descriptor(stream).ok()?;
    let mount = sys::clone_tree(&path_descriptor).ok()?;
    sys::mount_attributes(&mount, TERMINAL_ATTRIBUTES, true).ok()?;
    Some(mount)
}

/// Its mode and owner cannot be changed, though it can be written to.
pub(super) const TERMINAL_ATTRIBUTES: u64 = ATTR_RDONLY | ATTR_NOSUID;

/// The streams that need a Landlock rule to be reopened through `/dev`, since they are in no directory
/// of the tree. Each rule grants only what the stream was opened for: a device is writable on any
/// mount, and a stream opened for writing must not be read.
pub(super) fn granted() -> impl Iterator<Item = (BorrowedFd<'static>, Grant)> {
    all().into_iter().filter_map(|stream| {
        let flags = rustix::fs::fcntl_getfl(stream).ok()?;
        let reads = flags & OFlags::RWMODE == OFlags::RDONLY;
        match kind(stream) {
            Some(_) => Some((stream, if reads { Grant::Read } else { Grant::Device })),
            None => is_output_file(stream).then_some((stream, Grant::Output)),
        }
    })
}

/// Whether it is a named file that the caller has opened for writing.
fn is_output_file(stream: BorrowedFd<'_>) -> bool {
    rustix::fs::fstat(stream).is_ok_and(|file| {
        FileType::from_raw_mode(file.st_mode) == FileType::RegularFile && file.st_nlink > 0
    })
}

fn all() -> [BorrowedFd<'static>; 3] {
    [rustix::stdio::stdin(), rustix::stdio::stdout(), rustix::stdio::stderr()]
}

/// Whether it can be neither read nor written: access mode 3 allows only ioctls, and `O_PATH` names a file of
/// any kind, so that its attributes can be changed.
fn is_open_for_nothing(stream: BorrowedFd<'_>) -> bool {
    rustix::fs::fcntl_getfl(stream)
        .is_ok_and(|flags| flags & OFlags::RWMODE == OFlags::RWMODE || flags.contains(OFlags::PATH))
}

/// The type of a stream that must be confined; `None` for others.
fn kind(stream: BorrowedFd<'_>) -> Option<FileType> {
    let kind = FileType::from_raw_mode(rustix::fs::fstat(stream).ok()?.st_mode);
    match kind {
        FileType::RegularFile => {
            let flags = rustix::fs::fcntl_getfl(stream).ok()?;
            (flags & OFlags::RWMODE == OFlags::RDONLY).then_some(kind)
        }
        FileType::Fifo => {
            let has_name = rustix::fs::fstatfs(stream).is_ok_and(|about| about.f_type != PIPEFS);
            has_name.then_some(kind)
        }
        FileType::Directory | FileType::CharacterDevice | FileType::BlockDevice => Some(kind),
        _ => None,
    }
}

/// Whether this user may change a stream's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Changeable {
    Yes,
    No,
}

/// Whether this user could change the file of each stream: its owner, root, and a user for whom the kernel
/// allows writing (by group, mode or list). Call it before there is a user namespace, inside which all
/// unmapped users look alike, possibly like this one.
pub(super) fn changeable() -> [Changeable; 3] {
    let user = rustix::process::geteuid();
    all().map(|stream| {
        // The null device is replaced in any case.
        if kind(stream).is_none() || is_null(stream) {
            return Changeable::Yes;
        }
        let owns = |file: rustix::fs::Stat| user.is_root() || user.as_raw() == file.st_uid;
        match rustix::fs::fstat(stream).is_ok_and(|file| !owns(file)) && !may_write(stream) {
            true => Changeable::No,
            false => Changeable::Yes,
        }
    })
}

/// Whether the kernel would let this process open the file for writing. Only a denial of permission says that
/// it would not.
fn may_write(stream: BorrowedFd<'_>) -> bool {
    let name = format!("/proc/self/fd/{}", stream.as_raw_fd());
    let flags = rustix::fs::AtFlags::EACCESS;
    let asked = rustix::fs::accessat(rustix::fs::CWD, name, rustix::fs::Access::WRITE_OK, flags);
    asked != Err(Errno::ACCESS)
}

/// Opens the path of a stream, for naming it.
fn path_descriptor(stream: BorrowedFd<'_>) -> Result<OwnedFd, Failure> {
    let path = path(stream)?;
    let failed = at(Stage::Sources, &path);
    let path_descriptor = sys::open_absolute(&path).map_err(&failed)?;
    let of = |fd: BorrowedFd<'_>| sys::node_of(fd).map(|node| node.identity);
    let (found, given) =
        (of(path_descriptor.as_fd()).map_err(&failed)?, of(stream).map_err(&failed)?);
    if (found.device, found.inode) != (given.device, given.inode) {
        let message = format!("{}, which is a standard stream, has no name", path.display());
        return Err(Failure::new(Stage::Sources, libc::ENOENT, message));
    }
    Ok(path_descriptor)
}

fn path(stream: BorrowedFd<'_>) -> Result<PathBuf, Failure> {
    let name = format!("/proc/self/fd/{}", stream.as_raw_fd());
    std::fs::read_link(&name).map_err(|error| {
        Failure::new(Stage::Sources, error.raw_os_error().unwrap_or(libc::EIO), name)
    })
}

/// The stream through a mount of its own, and that mount.
fn reopen(stream: BorrowedFd<'_>, kind: FileType) -> Result<(OwnedFd, OwnedFd), Failure> {
    let (path, path_descriptor) = (path(stream)?, path_descriptor(stream)?);
    let failed = at(Stage::Sources, &path);
    let mount = sys::clone_tree(&path_descriptor).map_err(&failed)?;
    let is_device = matches!(kind, FileType::CharacterDevice | FileType::BlockDevice);
    let attributes = ATTR_RDONLY | ATTR_NOSUID | if is_device { 0 } else { ATTR_NODEV };
    sys::mount_attributes(&mount, attributes, true).map_err(&failed)?;
    let flags = rustix::fs::fcntl_getfl(stream).map_err(&failed)?;
    let name = format!("/proc/self/fd/{}", mount.as_raw_fd());
    // Opening a pipe would wait for its other end.
    let asked = flags | OFlags::NOCTTY | OFlags::NONBLOCK;
    let file = match rustix::fs::open(Path::new(&name), asked, Mode::empty()) {
        // The pipe has no reader: writing to it would fail.
        Err(Errno::NXIO) if kind == FileType::Fifo => {
            let gone = "the named pipe on a standard stream has no reader";
            return Err(Failure::new(Stage::Sources, libc::ENXIO, gone));
        }
        opened => opened.map_err(&failed)?,
    };
    rustix::fs::fcntl_setfl(&file, flags).map_err(&failed)?;
    if let Ok(offset) = rustix::fs::seek(stream, SeekFrom::Current(0)) {
        // A device may not be seekable.
        let _ = rustix::fs::seek(&file, SeekFrom::Start(offset));
    }
    Ok((file, mount))
}
