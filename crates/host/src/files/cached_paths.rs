//! Whether a request can be answered without waiting for a disk or a network.
//!
//! Passing a small request to another thread and its response back costs more than most small requests.
//! So a request that is known not to block runs at once: the kernel finds the whole path in its caches
//! (`RESOLVE_CACHED`), the filesystem is local, and the file's content is in memory (`RWF_NOWAIT`).
//! Everything else goes to a thread that may block.

use std::collections::HashMap;

use codex_exec_server_protocol::PathUri;
use parking_lot::Mutex;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, StatxFlags};
use rustix::io::Errno;

use super::resolve::Links;

/// Which of the known filesystems are local.
#[derive(Debug, Default)]
pub(super) struct CachedPaths {
    /// Whether the filesystem is local.
    local: Mutex<HashMap<Mount, bool>>,
    /// A file on an unknown filesystem, to be classified by a thread that may block.
    unclassified: Mutex<Option<OwnedFd>>,
}

/// Identifies a filesystem; the kernel can tell without accessing it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Mount {
    id: u64,
    device: (u32, u32),
}

impl CachedPaths {
    /// Whether `path` can be opened and inspected without waiting.
    pub(super) fn contains(&self, path: &PathUri, links: Links) -> bool {
        let resolve = match links {
            Links::Follow => ResolveFlags::CACHED,
            Links::Refuse => ResolveFlags::CACHED | ResolveFlags::NO_SYMLINKS,
        };
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let opened = rustix::fs::openat2(CWD, path.as_path(), flags, Mode::empty(), resolve);
        let Ok(found) = opened else { return false };
        let Ok(mount) = Mount::of(&found) else { return false };
        let local = self.local.lock().get(&mount).copied();
        if local.is_none() {
            *self.unclassified.lock() = Some(found);
        }
        local == Some(true)
    }

    /// Classifies the last unknown filesystem. May block.
    pub(super) fn classify_pending(&self) {
        let Some(found) = self.unclassified.lock().take() else { return };
        if let (Ok(mount), Ok(about)) = (Mount::of(&found), rustix::fs::fstatfs(&found)) {
            self.local.lock().insert(mount, is_local(about.f_type as u64));
        }
    }
}

impl Mount {
    fn of(file: impl AsFd) -> Result<Self, Errno> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let about = rustix::fs::statx(file, "", flags, StatxFlags::MNT_ID)?;
        Ok(Self { id: about.stx_mnt_id, device: (about.stx_dev_major, about.stx_dev_minor) })
    }
}

/// Whether a filesystem with this magic number is in memory or on a local disk.
fn is_local(magic: u64) -> bool {
    const BTRFS: u64 = 0x9123_683e;
    const EROFS: u64 = 0xe0f5_e1e2;
    const EXT: u64 = 0xef53;
    const F2FS: u64 = 0xf2f5_2010;
    const OVERLAY: u64 = 0x794c_7630;
    const RAMFS: u64 = 0x8584_58f6;
    const SQUASHFS: u64 = 0x7371_7368;
    const TMPFS: u64 = 0x0102_1994;
    const XFS: u64 = 0x5846_5342;
    const ZFS: u64 = 0x2fc1_2fc1;
    matches!(magic, BTRFS | EROFS | EXT | F2FS | OVERLAY | RAMFS | SQUASHFS | TMPFS | XFS | ZFS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uri(path: &std::path::Path) -> PathUri {
        PathUri::try_from(path).unwrap()
    }

    #[test]
    fn paths_are_cached_once_their_filesystem_is_known_to_be_local() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        std::fs::write(&file, "x").unwrap();
        std::os::unix::fs::symlink(&file, directory.path().join("link")).unwrap();
        let link = uri(&directory.path().join("link"));
        let cached_paths = CachedPaths::default();
        assert!(!cached_paths.contains(&uri(&file), Links::Follow), "not met yet");
        cached_paths.classify_pending();
        // A cached lookup fails while anything is being renamed, and when the kernel has to record that
        // a link was followed, which an ordinary lookup does once.
        let contains = |path: &PathUri| {
            (0..10_000).any(|_| {
                std::fs::metadata(path.as_path()).unwrap();
                cached_paths.contains(path, Links::Follow)
            })
        };
        assert!(contains(&uri(&file)));
        assert!(contains(&link));
        assert!(!cached_paths.contains(&link, Links::Refuse));
        assert!(!cached_paths.contains(&uri(&directory.path().join("none")), Links::Follow));
    }

    #[test]
    fn kernel_filesystems_are_never_cached() {
        let cached_paths = CachedPaths::default();
        let path = uri(std::path::Path::new("/proc/self/status"));
        for _ in 0..2 {
            assert!(!cached_paths.contains(&path, Links::Follow));
            cached_paths.classify_pending();
        }
    }
}
