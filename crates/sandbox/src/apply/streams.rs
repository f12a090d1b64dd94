//! The standard streams that are files of the host.
//!
//! A descriptor that was opened outside leads past the sandbox's mounts: whoever owns the file can
//! change its mode through it, though it was opened for reading only.
//!
//! Invariant: a file that is a stream for reading is reached through a read-only mount, like anything
//! else that the policy does not let be written. One that the caller opened for writing is the
//! command's to write, and stays as it is.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags, SeekFrom};

use super::sys::{self, ATTR_NODEV, ATTR_NOSUID, ATTR_RDONLY};
use super::{at, during};
use crate::plan::Enforcement;
use crate::status::{Failure, Stage};

/// Opens such streams anew. To be called while the host's tree is still whole.
pub(super) fn confine(enforcement: &Enforcement) -> Result<(), Failure> {
    if enforcement.rules.is_none() {
        return Ok(());
    }
    for stream in for_reading() {
        if could_be_changed(stream) {
            let confined = reopen(stream)?;
            // SAFETY: both are open, and nobody owns the number of a standard stream.
            let moved = unsafe { libc::dup2(confined.as_raw_fd(), stream.as_raw_fd()) };
            sys::check(i64::from(moved)).map_err(during(Stage::Sources))?;
        }
    }
    Ok(())
}

/// The streams that are files or directories, open for reading.
pub(super) fn for_reading() -> Vec<BorrowedFd<'static>> {
    let all = [rustix::stdio::stdin(), rustix::stdio::stdout(), rustix::stdio::stderr()];
    let is_for_reading = |stream: &BorrowedFd<'_>| {
        let kind = rustix::fs::fstat(stream).map(|file| FileType::from_raw_mode(file.st_mode));
        matches!(kind, Ok(FileType::RegularFile | FileType::Directory))
            && rustix::fs::fcntl_getfl(stream)
                .is_ok_and(|flags| flags & OFlags::RWMODE == OFlags::RDONLY)
    };
    all.into_iter().filter(is_for_reading).collect()
}

/// Whether it has a name, and this user could change it.
fn could_be_changed(stream: BorrowedFd<'_>) -> bool {
    let user = rustix::process::geteuid();
    rustix::fs::fstat(stream)
        .is_ok_and(|file| file.st_nlink > 0 && (user.is_root() || user.as_raw() == file.st_uid))
}

fn reopen(stream: BorrowedFd<'_>) -> Result<OwnedFd, Failure> {
    let name = format!("/proc/self/fd/{}", stream.as_raw_fd());
    let path = std::fs::read_link(&name).map_err(|error| {
        Failure::new(Stage::Sources, error.raw_os_error().unwrap_or(libc::EIO), name)
    })?;
    let failed = at(Stage::Sources, &path);
    let place = sys::open_absolute(&path).map_err(&failed)?;
    let of = |fd: BorrowedFd<'_>| sys::node_of(fd).map(|node| node.identity);
    let (found, given) = (of(place.as_fd()).map_err(&failed)?, of(stream).map_err(&failed)?);
    if (found.device, found.inode) != (given.device, given.inode) {
        let words = format!("{}, which is a standard stream, has no name", path.display());
        return Err(Failure::new(Stage::Sources, libc::ENOENT, words));
    }
    let mount = sys::clone_tree(&place).map_err(&failed)?;
    sys::mount_attributes(&mount, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV, true).map_err(&failed)?;
    let flags = rustix::fs::fcntl_getfl(stream).map_err(&failed)? | OFlags::NOCTTY;
    let name = format!("/proc/self/fd/{}", mount.as_raw_fd());
    let file = rustix::fs::open(Path::new(&name), flags, Mode::empty()).map_err(&failed)?;
    if let Ok(offset) = rustix::fs::seek(stream, SeekFrom::Current(0)) {
        rustix::fs::seek(&file, SeekFrom::Start(offset)).map_err(&failed)?;
    }
    Ok(file)
}
