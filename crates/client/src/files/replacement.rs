//! Atomic replacement of a local file.
//!
//! Invariant: nothing changes before [`Replacement::commit`], and only a regular file, or nothing, is
//! ever replaced. A link is followed: its target is replaced, in the target's directory. The bytes go to
//! an unnamed file if the filesystem supports that, so that even a kill leaves nothing; otherwise to a
//! file `.download-RANDOM`, which a kill leaves.

use std::fs::{File, Metadata};
use std::io;
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use super::local;

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
        let new = tempfile::Builder::new().prefix(".download-").tempfile_in(directory)?;
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

/// Files without a name (`O_TMPFILE`).
#[cfg(target_os = "linux")]
mod unnamed {
    use std::fs::{File, OpenOptions};
    use std::io;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::OpenOptionsExt;
    use std::path::Path;

    use rustix::fs::{AtFlags, CWD, OFlags};

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
        loop {
            let temporary = path.with_file_name(format!(".download-{:016x}", fastrand::u64(..)));
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
