//! This side's files, as far as transfers need them.

use std::path::{Path, PathBuf};

use codex_exec_server_protocol::PathUri;

use crate::error::ExecServerError;

/// A relative path of the server as one of this side.
pub(super) fn relative(path: &PathUri, root: &PathUri) -> Result<PathBuf, ExecServerError> {
    let tail = match root.as_bytes() {
        b"/" => path.as_bytes().strip_prefix(b"/"),
        root => path.as_bytes().strip_prefix(root).and_then(|tail| tail.strip_prefix(b"/")),
    };
    // A server decides what is in a listing, not where it is written here.
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

/// A path of the server for people.
pub(super) fn shown(path: &PathUri) -> String {
    String::from_utf8_lossy(path.as_bytes()).into_owned()
}

/// The path below `root` on the server for a relative one of this side.
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

/// Permission bits, where there are any.
#[cfg(unix)]
pub(super) fn mode(metadata: &std::fs::Metadata) -> Option<u32> {
    use std::os::unix::fs::PermissionsExt;
    Some(metadata.permissions().mode() & 0o7777)
}

#[cfg(not(unix))]
pub(super) fn mode(_: &std::fs::Metadata) -> Option<u32> {
    None
}

/// Sets permission bits, where there are any.
#[cfg(unix)]
pub(super) fn set_mode(file: &std::fs::File, mode: u32) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    file.set_permissions(std::fs::Permissions::from_mode(mode & 0o777))
}

#[cfg(not(unix))]
pub(super) fn set_mode(_: &std::fs::File, _: u32) -> std::io::Result<()> {
    Ok(())
}

/// Sets permission bits of a directory, where there are any.
#[cfg(unix)]
pub(super) fn set_directory_mode(path: &Path, mode: u32) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode & 0o777))
}

#[cfg(not(unix))]
pub(super) fn set_directory_mode(_: &Path, _: u32) -> std::io::Result<()> {
    Ok(())
}

/// Whether a file is still what it was.
pub(super) fn same(before: &std::fs::Metadata, after: &std::fs::Metadata) -> bool {
    before.len() == after.len() && before.modified().ok() == after.modified().ok()
}
