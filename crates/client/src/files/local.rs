//! Local files, for transfers.

use std::fs::Metadata;
use std::io;
use std::path::{Path, PathBuf};

use codex_exec_server_protocol::PathUri;

use crate::error::ExecServerError;

/// The local path, relative to `root`, of a path on the server.
pub(super) fn relative(path: &PathUri, root: &PathUri) -> Result<PathBuf, ExecServerError> {
    let tail = match root.as_bytes() {
        b"/" => path.as_bytes().strip_prefix(b"/"),
        root => path.as_bytes().strip_prefix(root).and_then(|tail| tail.strip_prefix(b"/")),
    };
    // The server's listing must not decide where this machine writes.
    let tail = tail.filter(|tail| !tail.is_empty()).ok_or_else(|| {
        ExecServerError::protocol("walking a directory", format!("{path} is not below {root}"))
    })?;
    Ok(native(tail))
}

#[cfg(unix)]
fn native(bytes: &[u8]) -> PathBuf {
    use std::os::unix::ffi::OsStrExt;
    PathBuf::from(std::ffi::OsStr::from_bytes(bytes))
}

#[cfg(not(unix))]
fn native(bytes: &[u8]) -> PathBuf {
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
