//! Atomic replacement of a local file.
//!
//! Invariant: nothing changes before [`Replacement::commit`], and only a regular file, or nothing, is
//! ever replaced. A link is followed: its target is replaced, in the target's directory. The bytes go to
//! an unnamed file if the filesystem supports that, so that even a kill leaves nothing; otherwise, and for
//! the moment of a replacement, to a file `.codex-download-RANDOM`. A kill can leave that one; the next
//! download into the directory removes it ([`remove_leftovers`]).

use std::fs::{File, Metadata};
use std::io;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use super::local;

/// How the name of an unfinished download begins.
const PREFIX: &str = ".codex-download-";

/// The number of links that the kernel follows.
const MAX_LINKS: usize = 40;

/// A new file that has not replaced its target yet.
pub(super) struct Replacement {
    /// The path with its links resolved.
    target: PathBuf,
    /// The file to replace.
    old: Option<Metadata>,
    new: Unfinished,
}

enum Unfinished {
    #[cfg(target_os = "linux")]
    Unnamed(File),
    Named(NamedTempFile),
}

impl Replacement {
    /// Creates the temporary file; fails if the target cannot be replaced.
    pub(super) fn begin(path: &Path) -> io::Result<Self> {
        let target = resolve_links(path)?;
        let directory = match target.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        if !directory.is_dir() {
            let message = format!("there is no directory {}; create it first", directory.display());
            return Err(io::Error::new(io::ErrorKind::NotFound, message));
        }
        let old = if_exists(std::fs::symlink_metadata(&target))?;
        let followed = if_exists(std::fs::metadata(path))?;
        if let Some(followed) = &followed {
            local::require_regular(followed)?;
        }
        match (&old, &followed) {
            (None, None) => {}
            (Some(old), Some(followed)) if local::is_same_file(old, followed) => {
                local::require_writable(&target)?;
            }
            // The file behind a descriptor in /proc may have been renamed or removed.
            _ => {
                return Err(io::Error::other("it is a link to a file that was renamed or removed"));
            }
        }
        #[cfg(target_os = "linux")]
        if let Some(file) = unnamed::create(directory) {
            return Ok(Self { target, old, new: Unfinished::Unnamed(file) });
        }
        let new = tempfile::Builder::new().prefix(PREFIX).tempfile_in(directory)?;
        #[cfg(target_os = "linux")]
        leftovers::mark_used(new.as_file());
        Ok(Self { target, old, new: Unfinished::Named(new) })
    }

    /// The file to write to.
    pub(super) fn file(&self) -> &File {
        match &self.new {
            #[cfg(target_os = "linux")]
            Unfinished::Unnamed(file) => file,
            Unfinished::Named(file) => file.as_file(),
        }
    }

    /// Replaces the target. The new file gets the mode and owner of the old one; `mode`, without set-id and
    /// sticky bits and those of the umask, is for a target that did not exist.
    pub(super) fn commit(self, mode: u32) -> io::Result<()> {
        // Until here, only the owner can read the file.
        match &self.old {
            Some(old) => local::copy_attributes(self.file(), old)?,
            None => local::set_mode(self.file(), mode & 0o777 & !local::umask())?,
        }
        if let Some(now) = if_exists(std::fs::symlink_metadata(&self.target))? {
            local::require_regular(&now)?;
        }
        match self.new {
            #[cfg(target_os = "linux")]
            Unfinished::Unnamed(file) => unnamed::install(&file, &self.target, self.old.is_none()),
            Unfinished::Named(file) => {
                file.persist(&self.target).map(drop).map_err(|error| error.error)
            }
        }
    }
}

fn if_exists(metadata: io::Result<Metadata>) -> io::Result<Option<Metadata>> {
    match metadata {
        Ok(metadata) => Ok(Some(metadata)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The end of a chain of links, which need not exist.
fn resolve_links(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        match std::fs::read_link(&path) {
            Ok(target) => {
                path = path.parent().map(|parent| parent.join(&target)).unwrap_or(target);
            }
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::InvalidInput
                ) =>
            {
                return Ok(path);
            }
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other("too many levels of symbolic links"))
}

/// Removes what killed downloads left in the directory. Failures are ignored: nothing depends on it.
pub(super) fn remove_leftovers(directory: &Path) {
    #[cfg(target_os = "linux")]
    leftovers::remove(directory);
    #[cfg(not(target_os = "linux"))]
    let _ = directory;
}

/// Files of killed downloads. A running one holds a lock on its file, which its death releases.
#[cfg(target_os = "linux")]
mod leftovers {
    use std::fs::{File, OpenOptions};
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
    use std::path::Path;
    use std::time::Duration;

    use rustix::fs::{FlockOperation, OFlags, flock};

    use super::PREFIX;

    /// The age from which a file is removed: no download takes that long between creating and locking it.
    const MIN_AGE: Duration = Duration::from_secs(60);

    /// Locks the file until this program closes it or ends. Without locks, it is never removed.
    pub(super) fn mark_used(file: &File) {
        let _ = flock(file, FlockOperation::NonBlockingLockShared);
    }

    pub(super) fn remove(directory: &Path) {
        let Ok(entries) = std::fs::read_dir(directory) else { return };
        for entry in entries.flatten() {
            if entry.file_name().as_bytes().starts_with(PREFIX.as_bytes())
                && is_left_over(&entry.path()).unwrap_or(false)
            {
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }

    /// Whether it is an old regular file of this user that no download holds.
    fn is_left_over(path: &Path) -> std::io::Result<bool> {
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file =
            OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path)?;
        let metadata = file.metadata()?;
        let old = metadata.modified()?.elapsed().is_ok_and(|age| age >= MIN_AGE);
        let own = metadata.uid() == rustix::process::geteuid().as_raw();
        Ok(metadata.is_file()
            && own
            && old
            && flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok())
    }
}

/// Files without a name (`O_TMPFILE`).
#[cfg(target_os = "linux")]
mod unnamed {
    use std::fs::{File, OpenOptions};
    use std::io;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::OpenOptionsExt;
    use std::path::Path;

    use rustix::fs::{AtFlags, CWD, OFlags};

    use super::PREFIX;

    /// `None` if the filesystem has no unnamed files, or without /proc, which is needed to name them.
    pub(super) fn create(directory: &Path) -> Option<File> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .mode(0o600)
            .custom_flags(OFlags::TMPFILE.bits().cast_signed())
            .open(directory)
            .ok()?;
        Path::new(&fd_path(&file)).exists().then_some(file)
    }

    fn fd_path(file: &File) -> String {
        format!("/proc/self/fd/{}", file.as_raw_fd())
    }

    fn link(file: &File, path: &Path) -> io::Result<()> {
        Ok(rustix::fs::linkat(CWD, fd_path(file), CWD, path, AtFlags::SYMLINK_FOLLOW)?)
    }

    /// Gives the file its name. To replace an existing file, Linux needs a temporary name to rename from.
    pub(super) fn install(file: &File, path: &Path, is_new: bool) -> io::Result<()> {
        if is_new {
            match link(file, path) {
                // The target was created meanwhile; replace it.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                done => return done,
            }
        }
        super::leftovers::mark_used(file);
        loop {
            let temporary = path.with_file_name(format!("{PREFIX}{:016x}", fastrand::u64(..)));
            match link(file, &temporary) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                linked => linked?,
            }
            return std::fs::rename(&temporary, path).inspect_err(|_| {
                let _ = std::fs::remove_file(&temporary);
            });
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;

    #[test]
    fn leftovers_of_killed_downloads_are_removed_and_nothing_else() {
        let root = tempfile::tempdir().unwrap();
        let path = |name: &str| root.path().join(name);
        let hour_ago = SystemTime::now() - Duration::from_secs(3600);
        let create = |name: &str, modified: SystemTime| {
            let file = File::create(path(name)).unwrap();
            file.set_modified(modified).unwrap();
            file
        };
        drop(create(".codex-download-left", hour_ago));
        drop(create(".codex-download-new", SystemTime::now()));
        drop(create(".download-other", hour_ago));
        drop(create("data", hour_ago));
        std::os::unix::fs::symlink("data", path(".codex-download-link")).unwrap();
        std::fs::create_dir(path(".codex-download-directory")).unwrap();
        let used = create(".codex-download-used", hour_ago);
        leftovers::mark_used(&used);
        remove_leftovers(root.path());
        let mut names: Vec<_> = std::fs::read_dir(root.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        let kept =
            ["directory", "link", "new", "used"].map(|name| format!(".codex-download-{name}"));
        assert_eq!(names, [&kept[..], &[".download-other".to_owned(), "data".to_owned()]].concat());
        drop(used);
        remove_leftovers(root.path());
        assert!(!path(".codex-download-used").exists(), "its download has ended");
    }
}
