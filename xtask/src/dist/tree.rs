//! A tree of files that is written as an archive or into a directory. Names, order, owner and time are all that an
//! archive says of it, so the same tree gives the same bytes.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use anyhow::ensure;
use flate2::{Compression, GzBuilder};
use tar::{EntryType, Header};

/// Files by path, without a slash in front; a directory comes before what is in it.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    entries: BTreeMap<String, Entry>,
}

#[derive(Debug)]
enum Entry {
    Directory { mode: u32 },
    File { mode: u32, bytes: Vec<u8> },
    Link { target: String },
}

impl Tree {
    /// Adds a file that anyone can read.
    pub(crate) fn file(&mut self, path: &str, bytes: impl Into<Vec<u8>>) {
        self.add(path, Entry::File { mode: 0o644, bytes: bytes.into() });
    }

    /// Adds a file that anyone can run.
    pub(crate) fn program(&mut self, path: &str, bytes: impl Into<Vec<u8>>) {
        self.add(path, Entry::File { mode: 0o755, bytes: bytes.into() });
    }

    /// Adds a file for its owner alone.
    pub(crate) fn secret(&mut self, path: &str, bytes: impl Into<Vec<u8>>) {
        self.add(path, Entry::File { mode: 0o600, bytes: bytes.into() });
    }

    pub(crate) fn link(&mut self, path: &str, target: &str) {
        self.add(path, Entry::Link { target: target.to_owned() });
    }

    /// Adds a directory for its owner alone.
    pub(crate) fn private_directory(&mut self, path: &str) {
        self.add(path, Entry::Directory { mode: 0o700 });
    }

    fn add(&mut self, path: &str, entry: Entry) {
        for (slash, _) in path.match_indices('/') {
            self.entries
                .entry(path[..slash].to_owned())
                .or_insert(Entry::Directory { mode: 0o755 });
        }
        self.entries.insert(path.to_owned(), entry);
    }

    /// The bytes of all files.
    pub(crate) fn size(&self) -> usize {
        let size =
            |entry: &Entry| if let Entry::File { bytes, .. } = entry { bytes.len() } else { 0 };
        self.entries.values().map(size).sum()
    }

    /// A compressed tar archive, with this in front of every path.
    pub(crate) fn to_tar_gz(&self, prefix: &str, epoch: u64) -> anyhow::Result<Vec<u8>> {
        let mut archive =
            tar::Builder::new(GzBuilder::new().write(Vec::new(), Compression::best()));
        for (path, entry) in &self.entries {
            let mut header = Header::new_gnu();
            header.set_mtime(epoch);
            header.set_uid(0);
            header.set_gid(0);
            header.set_username("root")?;
            header.set_groupname("root")?;
            header.set_size(0);
            let path = format!("{prefix}{path}");
            match entry {
                Entry::Directory { mode } => {
                    header.set_entry_type(EntryType::Directory);
                    header.set_mode(*mode);
                    archive.append_data(&mut header, format!("{path}/"), &[][..])?;
                }
                Entry::File { mode, bytes } => {
                    header.set_mode(*mode);
                    header.set_size(bytes.len().try_into()?);
                    archive.append_data(&mut header, path, bytes.as_slice())?;
                }
                Entry::Link { target } => {
                    header.set_entry_type(EntryType::Symlink);
                    header.set_mode(0o777);
                    archive.append_link(&mut header, path, target)?;
                }
            }
        }
        Ok(archive.into_inner()?.finish()?)
    }

    /// Writes the tree into a directory, which has to be new. Modes are those of the tree, whatever the umask.
    pub(crate) fn write_to(&self, directory: &Path) -> anyhow::Result<()> {
        ensure!(!directory.exists(), "{} exists", directory.display());
        fs::create_dir_all(directory)?;
        for (path, entry) in &self.entries {
            let path = directory.join(path);
            let mode = match entry {
                Entry::Directory { mode } => {
                    fs::create_dir(&path)?;
                    mode
                }
                Entry::File { mode, bytes } => {
                    fs::write(&path, bytes)?;
                    mode
                }
                Entry::Link { target } => {
                    symlink(target, path)?;
                    continue;
                }
            };
            fs::set_permissions(&path, Permissions::from_mode(*mode))?;
        }
        Ok(())
    }
}

/// Compresses a text that is installed compressed.
pub(crate) fn gzip(text: &[u8]) -> anyhow::Result<Vec<u8>> {
    let mut gzip = GzBuilder::new().write(Vec::new(), Compression::best());
    gzip.write_all(text)?;
    Ok(gzip.finish()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_depends_on_the_tree_and_the_time_alone() {
        let mut one = Tree::default();
        one.program("bin/x", "program");
        one.link("bin/y", "x");
        one.secret("etc/s", "secret");
        let mut other = Tree::default();
        other.secret("etc/s", "secret");
        other.link("bin/y", "x");
        other.program("bin/x", "program");
        let archive = one.to_tar_gz("p/", 1).unwrap();
        assert_eq!(archive, other.to_tar_gz("p/", 1).unwrap());
        assert_ne!(archive, other.to_tar_gz("p/", 2).unwrap());
        let mut names = Vec::new();
        let mut read = tar::Archive::new(flate2::read::GzDecoder::new(archive.as_slice()));
        for entry in read.entries().unwrap() {
            let entry = entry.unwrap();
            let header = entry.header();
            assert_eq!((header.uid().unwrap(), header.mtime().unwrap()), (0, 1));
            names.push((entry.path().unwrap().display().to_string(), header.mode().unwrap()));
        }
        let expected = [
            ("p/bin/", 0o755),
            ("p/bin/x", 0o755),
            ("p/bin/y", 0o777),
            ("p/etc/", 0o755),
            ("p/etc/s", 0o600),
        ];
        assert_eq!(names, expected.map(|(name, mode)| (name.to_owned(), mode)));
    }
}
