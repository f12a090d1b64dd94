//! Local files, for transfers.

use std::fs::Metadata;
use std::io;
use std::path::{Path, PathBuf};

use codex_exec_server_protocol::PathUri;

use crate::error::ExecServerError;

/// The length at which the kernel refuses a path, in bytes. It also ends a tree without end.
pub(super) const MAX_PATH: usize = 4096;

/// Fails if the path leads out of `root`, whose own links are resolved, by a link of this machine. The
/// server cannot create one meanwhile: a download creates no links.
pub(super) fn require_below(root: &Path, path: &Path) -> io::Result<()> {
    let leads_out = || {
        let message = "it leads out of the destination by a symbolic link; remove the link first";
        io::Error::new(io::ErrorKind::PermissionDenied, message)
    };
    let parent = path.parent().map(Path::canonicalize).transpose()?;
    if !parent.is_some_and(|parent| parent.starts_with(root)) {
        return Err(leads_out());
    }
    match path.symlink_metadata() {
        Ok(metadata) if metadata.is_symlink() => match path.canonicalize() {
            Ok(target) if target.starts_with(root) => Ok(()),
            _ => Err(leads_out()),
        },
        _ => Ok(()),
    }
}

/// The permission bits that new files of this process do not get. If they are unknown, those of everyone
/// but the owner.
pub(super) fn umask() -> u32 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let umask = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    umask.and_then(|bits| u32::from_str_radix(bits.trim(), 8).ok()).unwrap_or(0o077)
}

#[cfg(unix)]
pub(super) fn native(bytes: &[u8]) -> PathBuf {
    use std::os::unix::ffi::OsStrExt;
    PathBuf::from(std::ffi::OsStr::from_bytes(bytes))
}

#[cfg(not(unix))]
pub(super) fn native(bytes: &[u8]) -> PathBuf {
    PathBuf::from(String::from_utf8_lossy(bytes).into_owned())
}

/// A path on the server, for messages.
pub(super) fn display(path: &PathUri) -> String {
    String::from_utf8_lossy(path.as_bytes()).into_owned()
}

/// The path on the server, below `root`, of a relative local path.
pub(super) fn below(root: &PathUri, relative: &Path) -> Result<PathUri, ExecServerError> {
    let mut path = root.clone();
    for part in relative.components() {
        path = path
            .join(name(part.as_os_str()))
            .map_err(|error| ExecServerError::Invalid(error.to_string()))?;
    }
    Ok(path)
}

#[cfg(unix)]
fn name(part: &std::ffi::OsStr) -> Vec<u8> {
    use std::os::unix::ffi::OsStrExt;
    part.as_bytes().to_vec()
}

#[cfg(not(unix))]
fn name(part: &std::ffi::OsStr) -> Vec<u8> {
    part.to_string_lossy().into_owned().into_bytes()
}

/// Permission bits, if the system has them.
#[cfg(unix)]
pub(super) fn mode(metadata: &Metadata) -> Option<u32> {
    use std::os::unix::fs::PermissionsExt;
    Some(metadata.permissions().mode() & 0o7777)
}

#[cfg(not(unix))]
pub(super) fn mode(_: &Metadata) -> Option<u32> {
    None
}

/// Sets permission bits, if the system has them.
#[cfg(unix)]
pub(super) fn set_mode(file: &std::fs::File, mode: u32) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    file.set_permissions(std::fs::Permissions::from_mode(mode))
}

#[cfg(not(unix))]
pub(super) fn set_mode(_: &std::fs::File, _: u32) -> io::Result<()> {
    Ok(())
}

/// Gives a file the owner and mode of the file that it replaces.
#[cfg(unix)]
pub(super) fn copy_attributes(file: &std::fs::File, old: &Metadata) -> io::Result<()> {
    use std::os::unix::fs::{MetadataExt, fchown};
    let new = file.metadata()?;
    let uid = (old.uid() != new.uid()).then_some(old.uid());
    let gid = (old.gid() != new.gid()).then_some(old.gid());
    if uid.is_some() || gid.is_some() {
        // Without this, replacing would silently change the owner.
        fchown(file, uid, gid).map_err(|error| {
            let message = format!("cannot give the new file the owner of the old one: {error}");
            io::Error::new(error.kind(), message)
        })?;
    }
    // After the owner: changing that clears set-id bits.
    set_mode(file, old.mode() & 0o7777)
}

#[cfg(not(unix))]
pub(super) fn copy_attributes(_: &std::fs::File, _: &Metadata) -> io::Result<()> {
    Ok(())
}

/// Fails unless the file is a regular file, which a download can replace.
pub(super) fn require_regular(metadata: &Metadata) -> io::Result<()> {
    if metadata.is_file() {
        return Ok(());
    }
    let (kind, what) = match metadata.is_dir() {
        true => (io::ErrorKind::IsADirectory, "a directory"),
        false => (io::ErrorKind::InvalidInput, special_file_kind(metadata.file_type())),
    };
    Err(io::Error::new(kind, format!("it is {what}, not a regular file")))
}

#[cfg(unix)]
fn special_file_kind(kind: std::fs::FileType) -> &'static str {
    use std::os::unix::fs::FileTypeExt;
    match () {
        () if kind.is_fifo() => "a FIFO",
        () if kind.is_socket() => "a socket",
        () if kind.is_char_device() => "a character device",
        () if kind.is_block_device() => "a block device",
        () => "a special file",
    }
}

#[cfg(not(unix))]
fn special_file_kind(_: std::fs::FileType) -> &'static str {
    "a special file"
}

/// Fails if the file cannot be written, so that a download does not replace it either. Allows a running
/// program.
pub(super) fn require_writable(path: &Path) -> io::Result<()> {
    match std::fs::OpenOptions::new().write(true).open(path) {
        Err(error) if error.kind() != io::ErrorKind::ExecutableFileBusy => Err(error),
        _ => Ok(()),
    }
}

#[cfg(unix)]
pub(super) fn is_same_file(a: &Metadata, b: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    (a.dev(), a.ino()) == (b.dev(), b.ino())
}

#[cfg(not(unix))]
pub(super) fn is_same_file(_: &Metadata, _: &Metadata) -> bool {
    true
}

/// Sets permission bits of a directory, if the system has them.
#[cfg(unix)]
pub(super) fn set_directory_mode(path: &Path, mode: u32) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode & 0o777))
}

#[cfg(not(unix))]
pub(super) fn set_directory_mode(_: &Path, _: u32) -> io::Result<()> {
    Ok(())
}

/// Whether the file is the same and has not changed.
#[cfg(unix)]
pub(super) fn is_unchanged(before: &Metadata, after: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    let version = |of: &Metadata| {
        let times = (of.mtime(), of.mtime_nsec(), of.ctime(), of.ctime_nsec());
        (of.dev(), of.ino(), of.len(), times)
    };
    version(before) == version(after)
}

#[cfg(not(unix))]
pub(super) fn is_unchanged(before: &Metadata, after: &Metadata) -> bool {
    before.len() == after.len() && before.modified().ok() == after.modified().ok()
}
