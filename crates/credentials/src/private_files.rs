//! Whether other users can change or read what this program keeps.
//!
//! Invariant: nothing is read from, or written to, a directory that another user can write, because that user
//! could replace every file in it.

use std::fs::{self, File, Metadata, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Another user could change, or has been able to read, what this program keeps.
#[derive(Debug, thiserror::Error)]
pub enum ExposedError {
    /// A directory that others can write.
    #[error("others can write the directory {}; run chmod go-w on it", .0.display())]
    Directory(PathBuf),
    /// A directory or file of another user.
    #[error("{} belongs to another user; remove it, or run as that user", .0.display())]
    Owner(PathBuf),
    /// A file that others can write.
    #[error("others can write {}, so it may not be yours; check it and run chmod 600 on it", .0.display())]
    Writable(PathBuf),
    /// A file that others can read and that cannot be made private.
    #[error("others can read {}, and its permissions cannot be changed: {source}", path.display())]
    Readable {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// Fails if another user could change what is in the directory. One that does not exist is fine.
pub fn check_directory(path: &Path) -> Result<(), ExposedError> {
    let Ok(metadata) = fs::metadata(path) else { return Ok(()) };
    check_owner(path, &metadata)?;
    match metadata.mode() & 0o022 {
        0 => Ok(()),
        _ => Err(ExposedError::Directory(path.to_owned())),
    }
}

/// Fails if another user could have written the open file. If others can only read it, makes it private and
/// logs a warning.
pub(crate) fn make_private(path: &Path, file: &File) -> Result<(), ExposedError> {
    let unreadable = |source| ExposedError::Readable { path: path.to_owned(), source };
    let metadata = file.metadata().map_err(unreadable)?;
    check_owner(path, &metadata)?;
    if metadata.mode() & 0o022 != 0 {
        return Err(ExposedError::Writable(path.to_owned()));
    }
    if metadata.mode() & 0o077 != 0 {
        file.set_permissions(Permissions::from_mode(0o600)).map_err(unreadable)?;
        tracing::warn!(
            "others could read {}; it is private now; sign in again if you do not trust them",
            path.display()
        );
    }
    Ok(())
}

/// Fails if another user could have written the open file.
pub fn check_file(path: &Path, file: &File) -> Result<(), ExposedError> {
    let unreadable = |source| ExposedError::Readable { path: path.to_owned(), source };
    let metadata = file.metadata().map_err(unreadable)?;
    check_owner(path, &metadata)?;
    match metadata.mode() & 0o022 {
        0 => Ok(()),
        _ => Err(ExposedError::Writable(path.to_owned())),
    }
}

fn check_owner(path: &Path, metadata: &Metadata) -> Result<(), ExposedError> {
    let own = rustix::process::geteuid().as_raw();
    match metadata.uid() {
        0 => Ok(()),
        uid if uid == own => Ok(()),
        _ => Err(ExposedError::Owner(path.to_owned())),
    }
}

/// Creates a file that did not exist, with mode 0600; never opens one through a link.
pub fn create_new(path: &Path) -> io::Result<File> {
    // `create_new` is O_CREAT | O_EXCL, which does not follow a link at the end of the path.
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_are_refused_exactly_if_others_can_write_them() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("d");
        check_directory(&directory).unwrap();
        fs::create_dir(&directory).unwrap();
        for mode in 0o700..=0o777 {
            fs::set_permissions(&directory, Permissions::from_mode(mode)).unwrap();
            assert_eq!(check_directory(&directory).is_ok(), mode & 0o022 == 0, "{mode:o}");
        }
    }

    #[test]
    fn files_are_mended_if_others_can_read_them_and_refused_if_they_can_write_them() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("f");
        fs::write(&path, "x").unwrap();
        for mode in 0o600..=0o677 {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            let done = make_private(&path, &File::open(&path).unwrap());
            let now = fs::metadata(&path).unwrap().mode() & 0o777;
            match mode & 0o022 {
                0 => assert_eq!((done.is_ok(), now & 0o077), (true, 0), "{mode:o}"),
                _ => assert!(matches!(done, Err(ExposedError::Writable(_))), "{mode:o}"),
            }
        }
    }

    #[test]
    fn a_new_file_is_never_made_through_a_link() {
        let root = tempfile::tempdir().unwrap();
        let (link, target) = (root.path().join("link"), root.path().join("target"));
        std::os::unix::fs::symlink(&target, &link).unwrap();
        create_new(&link).unwrap_err();
        fs::write(&target, "x").unwrap();
        create_new(&link).unwrap_err();
        assert_eq!(fs::read(&target).unwrap(), b"x");
    }
}
