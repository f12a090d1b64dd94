//! Metadata, canonical paths and permission bits.

use codex_exec_server_protocol::PathUri;
use codex_exec_server_protocol::files::{
    FsCanonicalizeParams, FsCanonicalizeResponse, FsGetMetadataParams, FsGetMetadataResponse,
    FsSetModeParams,
};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Statx, StatxFlags};
use rustix::io::Errno;

use super::FileError;
use super::resolve::{self, Links, REGULAR, Resolver, bytes_path};

pub(super) fn get_metadata(
    resolver: Resolver,
    params: &FsGetMetadataParams,
) -> Result<FsGetMetadataResponse, FileError> {
    let path = &params.path;
    let failed = |errno| FileError::os("stat", path, errno);
    if !params.follow_symlinks {
        let fd = resolver.open("stat", path, OFlags::PATH, Mode::empty(), Links::Refuse)?;
        return stat(fd.as_fd(), b"", AtFlags::EMPTY_PATH).map_err(failed);
    }
    // One call is enough unless the path is a link.
    let itself = stat(CWD, path.as_bytes(), AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
    if !itself.is_symlink {
        return Ok(itself);
    }
    let target = stat(CWD, path.as_bytes(), AtFlags::empty()).map_err(failed)?;
    Ok(FsGetMetadataResponse { is_symlink: true, ..target })
}

fn stat(dir: BorrowedFd<'_>, path: &[u8], flags: AtFlags) -> Result<FsGetMetadataResponse, Errno> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    match rustix::fs::statx(dir, bytes_path(path), flags, wanted) {
        Ok(found) => Ok(from_statx(&found)),
        // Old kernels, and sandboxes whose filter does not know `statx`.
        Err(Errno::NOSYS | Errno::PERM) => {
            let found = rustix::fs::statat(dir, bytes_path(path), flags)?;
            let kind = FileType::from_raw_mode(found.st_mode);
            Ok(FsGetMetadataResponse {
                is_directory: kind == FileType::Directory,
                is_file: kind == FileType::RegularFile,
                is_symlink: kind == FileType::Symlink,
                size: u64::try_from(found.st_size).unwrap_or(0),
                created_at_ms: 0,
                modified_at_ms: millis(found.st_mtime, found.st_mtime_nsec as u32),
                mode: Some(found.st_mode & 0o7777),
                uid: Some(found.st_uid),
                gid: Some(found.st_gid),
                inode: Some(found.st_ino),
                nlink: Some(found.st_nlink as u64),
                device: Some(found.st_dev),
            })
        }
        Err(errno) => Err(errno),
    }
}

fn from_statx(found: &Statx) -> FsGetMetadataResponse {
    let kind = FileType::from_raw_mode(found.stx_mode.into());
    let has_birth = StatxFlags::from_bits_retain(found.stx_mask).contains(StatxFlags::BTIME);
    let birth = found.stx_btime;
    FsGetMetadataResponse {
        is_directory: kind == FileType::Directory,
        is_file: kind == FileType::RegularFile,
        is_symlink: kind == FileType::Symlink,
        size: found.stx_size,
        created_at_ms: if has_birth { millis(birth.tv_sec, birth.tv_nsec) } else { 0 },
        modified_at_ms: millis(found.stx_mtime.tv_sec, found.stx_mtime.tv_nsec),
        mode: Some(u32::from(found.stx_mode) & 0o7777),
        uid: Some(found.stx_uid),
        gid: Some(found.stx_gid),
        inode: Some(found.stx_ino),
        nlink: Some(found.stx_nlink.into()),
        device: Some(rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor)),
    }
}

fn millis(seconds: i64, nanos: u32) -> i64 {
    seconds.saturating_mul(1000).saturating_add(i64::from(nanos / 1_000_000))
}

pub(super) fn canonicalize(
    params: &FsCanonicalizeParams,
) -> Result<FsCanonicalizeResponse, FileError> {
    let path = &params.path;
    let found = std::fs::canonicalize(path.as_path())
        .map_err(|error| FileError::io("resolve", path, &error))?;
    let path = PathUri::try_from(found.as_path())
        .map_err(|error| FileError::refused(path, error.to_string()))?;
    Ok(FsCanonicalizeResponse { path })
}

pub(super) fn set_mode(resolver: Resolver, params: &FsSetModeParams) -> Result<(), FileError> {
    let FsSetModeParams { path, mode, follow_symlinks, .. } = params;
    let mode = resolve::permission_bits(*mode)?;
    let failed = |errno| FileError::os("set the mode of", path, errno);
    if *follow_symlinks {
        return rustix::fs::chmod(path.as_path(), mode).map_err(failed);
    }
    // A descriptor of the file, which need not be readable. The kernel does not chmod through such a
    // descriptor, but it does through its name in /proc.
    let fd = resolver.open("set the mode of", path, OFlags::PATH, Mode::empty(), Links::Refuse)?;
    match rustix::fs::chmod(format!("/proc/self/fd/{}", fd.as_raw_fd()), mode) {
        Err(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS) if no_proc() => {
            let fd = resolver.open(
                "set the mode of",
                path,
                OFlags::RDONLY | REGULAR,
                Mode::empty(),
                Links::Refuse,
            )?;
            rustix::fs::fchmod(&fd, mode).map_err(failed)
        }
        done => done.map_err(failed),
    }
}

fn no_proc() -> bool {
    rustix::fs::stat("/proc/self/fd").is_err()
}
