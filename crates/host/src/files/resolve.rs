//! Opens paths, with or without following symbolic links.
//!
//! Invariant: with `Links::Refuse` no link is followed in any component, even if the tree changes
//! meanwhile: the kernel resolves the whole path under `RESOLVE_NO_SYMLINKS`, or each component is
//! opened with `O_NOFOLLOW` relative to the one before. There is no check before use. Intermediate
//! directories are opened with `O_PATH`, which needs only search permission.

use std::path::Path;

use codex_exec_server_protocol::PathUri;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::{Errno, retry_on_intr};

use super::FileError;

/// How to treat symbolic links in a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Links {
    Follow,
    Refuse,
}

impl From<bool> for Links {
    fn from(follow_symlinks: bool) -> Self {
        if follow_symlinks { Self::Follow } else { Self::Refuse }
    }
}

/// An intermediate directory; its entries cannot be read.
pub(super) const DIRECTORY: OFlags =
    OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// A directory to list.
pub(super) const LISTING: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::NONBLOCK)
    .union(OFlags::CLOEXEC);

/// For regular files: opening a FIFO, socket or device in its place neither blocks nor makes it our
/// terminal.
pub(super) const REGULAR: OFlags = OFlags::NONBLOCK.union(OFlags::NOCTTY).union(OFlags::CLOEXEC);

/// Opens paths.
#[derive(Debug, Clone, Copy)]
pub(super) struct Resolver {
    openat2: bool,
}

/// Why a path could not be opened without following links.
enum NoLinks {
    Link,
    Os(Errno),
}

impl Resolver {
    /// Probes once whether `openat2` works (a seccomp filter may block it).
    pub(super) fn new(use_openat2: bool) -> Self {
        let probe = || {
            rustix::fs::openat2(CWD, "/", DIRECTORY, Mode::empty(), ResolveFlags::NO_SYMLINKS)
                .is_ok()
        };
        Self { openat2: use_openat2 && probe() }
    }

    /// Opens a path. `flags` must not contain `NOFOLLOW`; use `links`.
    pub(super) fn open(
        self,
        action: &str,
        path: &PathUri,
        flags: OFlags,
        mode: Mode,
        links: Links,
    ) -> Result<OwnedFd, FileError> {
        let flags = flags | OFlags::CLOEXEC;
        match links {
            Links::Follow => retry_on_intr(|| rustix::fs::open(path.as_path(), flags, mode))
                .map_err(|errno| FileError::os(action, path, errno)),
            Links::Refuse => {
                self.open_no_links(CWD, path.as_path(), flags, mode).map_err(|why| match why {
                    NoLinks::Link => FileError::SymlinkRefused { path: path.clone() },
                    NoLinks::Os(errno) => FileError::os(action, path, errno),
                })
            }
        }
    }

    /// Opens the parent directory of a path, and returns it with the last component. Refuses the root,
    /// which has none.
    pub(super) fn parent<'a>(
        self,
        action: &str,
        path: &'a PathUri,
        links: Links,
    ) -> Result<(OwnedFd, &'a [u8]), FileError> {
        let name = path.file_name();
        if name.is_empty() {
            return Err(FileError::refused(path, format!("cannot {action} the root directory")));
        }
        let parent = match &path.as_bytes()[..path.as_bytes().len() - name.len() - 1] {
            b"" => b"/".as_slice(),
            parent => parent,
        };
        let parent = bytes_path(parent);
        let opened = match links {
            Links::Follow => {
                let flags = DIRECTORY - OFlags::NOFOLLOW;
                retry_on_intr(|| rustix::fs::open(parent, flags, Mode::empty()))
                    .map_err(NoLinks::Os)
            }
            Links::Refuse => {
                let flags = DIRECTORY - OFlags::NOFOLLOW;
                self.open_no_links(CWD, parent, flags, Mode::empty())
            }
        };
        match opened {
            Ok(fd) => Ok((fd, name)),
            Err(NoLinks::Link) => Err(FileError::SymlinkRefused { path: path.clone() }),
            Err(NoLinks::Os(errno)) => Err(FileError::os(action, path, errno)),
        }
    }

    /// Opens a path below a directory; follows links, or refuses them with `ELOOP`.
    pub(super) fn open_below(
        self,
        root: BorrowedFd<'_>,
        below: &[u8],
        flags: OFlags,
        links: Links,
    ) -> Result<OwnedFd, Errno> {
        let path = if below.is_empty() { b".".as_slice() } else { below };
        match links {
            Links::Follow => retry_on_intr(|| {
                rustix::fs::openat(root, bytes_path(path), flags - OFlags::NOFOLLOW, Mode::empty())
            }),
            Links::Refuse => self
                .open_no_links(root, bytes_path(path), flags - OFlags::NOFOLLOW, Mode::empty())
                .map_err(|why| match why {
                    NoLinks::Link => Errno::LOOP,
                    NoLinks::Os(errno) => errno,
                }),
        }
    }

    fn open_no_links(
        self,
        start: BorrowedFd<'_>,
        path: &Path,
        flags: OFlags,
        mode: Mode,
    ) -> Result<OwnedFd, NoLinks> {
        // openat2 refuses a mode without `O_CREAT`.
        let creates = flags.contains(OFlags::CREATE);
        let mode = if creates { mode } else { Mode::empty() };
        if self.openat2 {
            return retry_on_intr(|| {
                rustix::fs::openat2(start, path, flags, mode, ResolveFlags::NO_SYMLINKS)
            })
            .map_err(|errno| match errno {
                Errno::LOOP => NoLinks::Link,
                errno => NoLinks::Os(errno),
            });
        }
        walk_no_links(start, path, flags, mode)
    }
}

/// Does what `openat2` does with `RESOLVE_NO_SYMLINKS`, for kernels without it.
fn walk_no_links(
    start: BorrowedFd<'_>,
    path: &Path,
    flags: OFlags,
    mode: Mode,
) -> Result<OwnedFd, NoLinks> {
    use std::os::unix::ffi::OsStrExt;
    let bytes = path.as_os_str().as_bytes();
    // As in the kernel, so that both ways agree on the limit.
    if bytes.len() >= 4096 {
        return Err(NoLinks::Os(Errno::NAMETOOLONG));
    }
    let open = |dir: BorrowedFd<'_>, name: &[u8], flags: OFlags, mode: Mode| {
        let name = bytes_path(name);
        retry_on_intr(|| rustix::fs::openat(dir, name, flags | OFlags::NOFOLLOW, mode)).map_err(
            |errno| match errno {
                // O_NOFOLLOW fails with ELOOP, with O_DIRECTORY ENOTDIR. Look again only to name the
                // error; if it is a directory by now, it was not one before.
                Errno::LOOP => NoLinks::Link,
                Errno::NOTDIR if is_link_or_directory(dir, name) => NoLinks::Link,
                errno => NoLinks::Os(errno),
            },
        )
    };
    let mut names = bytes.split(|&b| b == b'/').filter(|name| !name.is_empty()).peekable();
    let mut at = match bytes.first() {
        Some(b'/') => retry_on_intr(|| rustix::fs::openat(start, "/", DIRECTORY, Mode::empty())),
        _ => retry_on_intr(|| rustix::fs::openat(start, ".", DIRECTORY, Mode::empty())),
    }
    .map_err(NoLinks::Os)?;
    while let Some(name) = names.next() {
        if names.peek().is_none() {
            let last = open(at.as_fd(), name, flags, mode)?;
            // O_PATH with O_NOFOLLOW and without O_DIRECTORY opens a link itself.
            if flags.contains(OFlags::PATH) {
                let stat = rustix::fs::fstat(&last).map_err(NoLinks::Os)?;
                if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink {
                    return Err(NoLinks::Link);
                }
            }
            return Ok(last);
        }
        at = open(at.as_fd(), name, DIRECTORY, Mode::empty())?;
    }
    // The path is the start itself; open it again with the requested flags.
    open(at.as_fd(), b".", flags, mode)
}

fn is_link_or_directory(dir: BorrowedFd<'_>, name: &Path) -> bool {
    rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|stat| matches!(file_type(&stat), FileType::Symlink | FileType::Directory))
}

/// Requires a regular file; returns it with its `fstat`.
pub(super) fn require_regular(fd: OwnedFd, path: &PathUri) -> Result<(OwnedFd, Stat), FileError> {
    let stat = rustix::fs::fstat(&fd).map_err(|errno| FileError::os("stat", path, errno))?;
    match file_type(&stat) {
        FileType::RegularFile => Ok((fd, stat)),
        _ => Err(special_file_error(path, &stat)),
    }
}

/// Opens a regular file for reading; refuses anything else.
pub(super) fn open_to_read(
    resolver: Resolver,
    path: &PathUri,
    links: Links,
) -> Result<(OwnedFd, Stat), FileError> {
    reject_special_files(path, links)?;
    let opened = resolver.open("open", path, OFlags::RDONLY | REGULAR, Mode::empty(), links);
    require_regular(opened.map_err(|error| explain_special_file(error, path))?, path)
}

/// Refuses special files before opening them: opening a device can have side effects (rewind a tape,
/// arm a watchdog), and opening a FIFO wakes the process at its other end. `fstat` after the open still
/// decides.
pub(super) fn reject_special_files(path: &PathUri, links: Links) -> Result<(), FileError> {
    let flags = match links {
        Links::Follow => AtFlags::empty(),
        Links::Refuse => AtFlags::SYMLINK_NOFOLLOW,
    };
    match rustix::fs::statat(CWD, path.as_path(), flags) {
        Ok(stat) => match file_type(&stat) {
            // The open refuses a link.
            FileType::RegularFile | FileType::Symlink => Ok(()),
            _ => Err(special_file_error(path, &stat)),
        },
        Err(_) => Ok(()),
    }
}

/// Replaces the error of an open that failed because of the file's type.
pub(super) fn explain_special_file(error: FileError, path: &PathUri) -> FileError {
    match &error {
        FileError::Os { errno, .. } => match Errno::from_raw_os_error(*errno) {
            Errno::ISDIR => not_regular(path, FileType::Directory),
            // A FIFO without a reader, a socket, a device without a driver.
            Errno::NXIO | Errno::NODEV => not_regular(path, FileType::Unknown),
            _ => error,
        },
        _ => error,
    }
}

/// The error for a file that is not regular.
pub(super) fn special_file_error(path: &PathUri, stat: &Stat) -> FileError {
    let found = file_type(stat);
    if found == FileType::CharacterDevice && stat.st_rdev == 0 {
        // A sandbox mounts this nonexistent device over a denied file. Report it as denied.
        return FileError::os("open", path, Errno::ACCESS);
    }
    not_regular(path, found)
}

fn not_regular(path: &PathUri, found: FileType) -> FileError {
    let found = match found {
        FileType::Directory => "a directory",
        FileType::Symlink => "a symbolic link",
        FileType::Fifo => "a FIFO",
        FileType::Socket => "a socket",
        FileType::CharacterDevice => "a character device",
        FileType::BlockDevice => "a block device",
        _ => "a special file",
    };
    FileError::NotRegularFile { path: path.clone(), found: found.into() }
}

pub(super) fn file_type(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

/// Checks the permission bits of a request.
pub(super) fn permission_bits(mode: u32) -> Result<Mode, FileError> {
    if mode > 0o7777 {
        return Err(FileError::out_of_range("mode", u64::from(mode), "0 … 4095 (0o7777)"));
    }
    Ok(Mode::from_raw_mode(mode))
}

/// Sets the mode of the original on a copy or a replacement. Where set-id bits are refused, as in a
/// sandbox, it omits them, as writing in place does.
pub(super) fn inherit_mode(file: impl AsFd, mode: Mode) -> Result<(), Errno> {
    let set_id = Mode::SUID | Mode::SGID;
    match rustix::fs::fchmod(&file, mode) {
        Err(Errno::PERM) if mode.intersects(set_id) => rustix::fs::fchmod(&file, mode - set_id),
        done => done,
    }
}

pub(super) fn bytes_path(bytes: &[u8]) -> &Path {
    use std::os::unix::ffi::OsStrExt;
    Path::new(std::ffi::OsStr::from_bytes(bytes))
}
