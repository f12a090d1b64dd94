//! The facts of this machine's file system.
//!
//! Invariant: looks, never touches: no method opens a device, follows a link in the last component or
//! changes anything.

use std::ffi::OsString;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, statx};

use crate::apply::placeholder;
use crate::decide::facts::{Facts, Identity, Node, NodeKind};

/// A `.git` pointer file is one line; nobody needs more of it.
const POINTER_FILE: u64 = 8 * 1024;

/// The file system of this machine, as this process sees it.
#[derive(Debug, Clone, Copy, Default)]
pub struct HostFacts;

impl Facts for HostFacts {
    fn lookup(&self, path: &Path) -> io::Result<Node> {
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
        let stat = statx(CWD, path, flags, WANTED)?;
        // What another sandbox put there to hold a name stands for that name being absent.
        if u32::from(stat.stx_mode) == libc::S_IFDIR | placeholder::MODE
            && placeholder::stands_at(path)
        {
            return Err(io::ErrorKind::NotFound.into());
        }
        Ok(node(&stat))
    }

    fn read_link(&self, path: &Path) -> io::Result<PathBuf> {
        std::fs::read_link(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<(OsString, NodeKind)>> {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(path)? {
            let entry = entry?;
            let kind = entry.file_type()?;
            let kind = if kind.is_dir() {
                NodeKind::Directory
            } else if kind.is_symlink() {
                NodeKind::Link
            } else if kind.is_file() {
                NodeKind::File
            } else {
                NodeKind::Other
            };
            names.push((entry.file_name(), kind));
        }
        Ok(names)
    }

    fn read_start(&self, path: &Path) -> io::Result<Vec<u8>> {
        let file = std::fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(path)?;
        let mut bytes = Vec::new();
        file.take(POINTER_FILE).read_to_end(&mut bytes)?;
        Ok(bytes)
    }
}

/// What an [`Identity`] and a kind are made of.
pub(crate) const WANTED: StatxFlags =
    StatxFlags::TYPE.union(StatxFlags::MODE).union(StatxFlags::INO).union(StatxFlags::MNT_ID);

pub(crate) fn node(stat: &rustix::fs::Statx) -> Node {
    let kind = match FileType::from_raw_mode(u32::from(stat.stx_mode)) {
        FileType::Directory => NodeKind::Directory,
        FileType::RegularFile => NodeKind::File,
        FileType::Symlink => NodeKind::Link,
        _ => NodeKind::Other,
    };
    Node {
        kind,
        identity: Identity {
            device: (stat.stx_dev_major, stat.stx_dev_minor),
            inode: stat.stx_ino,
            mount: stat.stx_mnt_id,
        },
    }
}
