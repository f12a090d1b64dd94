//! Directories whose removal is nearly always a mistake.
//!
//! `fs/remove` with `preserve` refuses the root, a home directory, the server's working directory, mount
//! points, and every directory that contains one of them. What is judged is the opened directory rather
//! than its name: a link or a second name leads to the same verdict.

use std::fmt;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use codex_exec_server_protocol::PathUri;
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::FileError;
use crate::machine;
use crate::sandbox::mountinfo;

/// Why a directory is preserved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Preserved {
    /// The root directory.
    Root,
    /// A home directory of the server's user.
    Home,
    /// The server's working directory.
    WorkingDirectory,
    /// A mount point.
    MountPoint,
}

impl fmt::Display for Preserved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Root => "the root directory",
            Self::Home => "the home directory",
            Self::WorkingDirectory => "the server's working directory",
            Self::MountPoint => "a mount point",
        })
    }
}

/// Refuses an opened directory that is, or contains, a preserved one.
pub(super) fn check(directory: BorrowedFd<'_>, path: &PathUri) -> Result<(), FileError> {
    let failed = |error: &std::io::Error| FileError::io("remove", path, error);
    let opened = format!("/proc/self/fd/{}", directory.as_raw_fd());
    let real = std::fs::read_link(opened).map_err(|error| failed(&error))?;
    // A directory that the process cannot name: removed, or outside of its root.
    if !real.is_absolute() || real.as_os_str().as_encoded_bytes().ends_with(b" (deleted)") {
        return Err(FileError::os("remove", path, Errno::NOENT));
    }
    let table = std::fs::read("/proc/self/mountinfo").map_err(|error| failed(&error))?;
    let Some(mounts) = mountinfo::parse(&table) else {
        return Err(FileError::refused(path, "the mount table cannot be read"));
    };
    match preserved(&real, &places(mounts)) {
        None => Ok(()),
        Some((what, place)) => Err(FileError::Preserved {
            path: path.clone(),
            what,
            place: PathUri::try_from(place).unwrap_or_else(|_| path.clone()),
        }),
    }
}

/// The first place that is `directory` or lies below it.
fn preserved<'p>(
    directory: &Path,
    places: &'p [(Preserved, PathBuf)],
) -> Option<(Preserved, &'p Path)> {
    let found = places.iter().find(|(_, place)| place.starts_with(directory))?;
    Some((found.0, &found.1))
}

/// All preserved places, with links resolved; the one that a person would name comes first.
fn places(mounts: Vec<mountinfo::Line<'_>>) -> Vec<(Preserved, PathBuf)> {
    let homes = machine::homes().into_iter().map(|home| (Preserved::Home, home));
    let cwd = std::env::current_dir().ok().map(|cwd| (Preserved::WorkingDirectory, cwd));
    let named = homes.chain(cwd).map(|(what, place)| {
        let real = place.canonicalize().unwrap_or(place);
        (what, real)
    });
    let mounts = mounts.into_iter().map(|mount| (Preserved::MountPoint, mount.point));
    let root = (Preserved::Root, PathBuf::from("/"));
    std::iter::once(root).chain(named).chain(mounts).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_contains_a_preserved_place_is_preserved() {
        let places = [
            (Preserved::Root, PathBuf::from("/")),
            (Preserved::Home, PathBuf::from("/home/me")),
            (Preserved::MountPoint, PathBuf::from("/srv/data/disk")),
        ];
        let verdict = |path: &str| preserved(Path::new(path), &places).map(|(what, _)| what);
        assert_eq!(verdict("/"), Some(Preserved::Root));
        assert_eq!(verdict("/home"), Some(Preserved::Home));
        assert_eq!(verdict("/home/me"), Some(Preserved::Home));
        assert_eq!(verdict("/srv/data"), Some(Preserved::MountPoint));
        assert_eq!(verdict("/home/me/build"), None);
        assert_eq!(verdict("/home/m"), None, "part of a name is not a directory");
        assert_eq!(verdict("/srv/data/disk/sub"), None);
    }
}
