//! Renames files and creates symbolic links.

use std::os::unix::ffi::OsStrExt;

use codex_exec_server_protocol::PathUri;
use codex_exec_server_protocol::files::{FsRenameParams, FsSymlinkParams};
use rustix::fs::{AtFlags, RenameFlags};
use rustix::io::Errno;

use super::FileError;
use super::resolve::{Resolver, bytes_path};

pub(super) fn rename(resolver: Resolver, params: &FsRenameParams) -> Result<(), FileError> {
    let FsRenameParams { source_path, destination_path, overwrite, follow_symlinks, .. } = params;
    let links = (*follow_symlinks).into();
    let (from, name) = resolver.parent("rename", source_path, links)?;
    let (to, new_name) = resolver.parent("rename to", destination_path, links)?;
    let (name, new_name) = (bytes_path(name), bytes_path(new_name));
    let done = if *overwrite {
        rustix::fs::renameat(&from, name, &to, new_name)
    } else {
        match rustix::fs::renameat_with(&from, name, &to, new_name, RenameFlags::NOREPLACE) {
            // Some filesystems cannot do this in one step. Failing is better than replacing by
            // accident.
            Err(Errno::INVAL)
                if rustix::fs::statat(&to, new_name, AtFlags::SYMLINK_NOFOLLOW).is_ok() =>
            {
                Err(Errno::EXIST)
            }
            done => done,
        }
    };
    done.map_err(|errno| match errno {
        // The system does not say which path it means; usually it is the destination.
        Errno::EXIST | Errno::NOTEMPTY | Errno::ISDIR => {
            FileError::os("rename to", destination_path, errno)
        }
        _ => FileError::os("rename", source_path, errno),
    })
}

pub(super) fn symlink(resolver: Resolver, params: &FsSymlinkParams) -> Result<(), FileError> {
    let FsSymlinkParams { path, target, follow_symlinks, .. } = params;
    let target = link_target(path, target)?;
    let (directory, name) = resolver.parent("link", path, (*follow_symlinks).into())?;
    rustix::fs::symlinkat(bytes_path(&target), &directory, bytes_path(name))
        .map_err(|errno| FileError::os("link", path, errno))
}

/// The content of the link: a `file:` URI decoded, anything else unchanged.
fn link_target(path: &PathUri, target: &str) -> Result<Vec<u8>, FileError> {
    let is_uri = target.get(..5).is_some_and(|scheme| scheme.eq_ignore_ascii_case("file:"));
    if is_uri {
        let uri: PathUri = target
            .parse()
            .map_err(|error| FileError::refused(path, format!("link target: {error}")))?;
        return Ok(uri.as_path().as_os_str().as_bytes().to_vec());
    }
    if target.is_empty() || target.contains('\0') {
        return Err(FileError::refused(
            path,
            "a link target must not be empty or contain a NUL byte",
        ));
    }
    Ok(target.as_bytes().to_vec())
}
