//! Watches directories and the mount table for changes.
//!
//! Invariant: [`Watches::changes`] reports every earlier change of a name in a watched directory, or of
//! a mount; or it reports that some were missed.

use std::collections::{HashMap, HashSet};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// Events that can change the meaning of a name, or the permission to look it up.
const WATCHED_EVENTS: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MOVED_FROM)
    .union(WatchFlags::MOVED_TO)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::ONLYDIR);

/// File systems that change only through this kernel, which then reports it: ext, XFS, Btrfs, F2FS,
/// tmpfs, ramfs and overlayfs. On others (network, FUSE) names are looked up every time.
const REPORTING_FILE_SYSTEMS: [u32; 7] =
    [0xef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010, 0x0102_1994, 0x8584_58f6, 0x794c_7630];

/// A directory with more events than this between two checks is cheaper to look up than to watch.
const NOISY_EVENTS: u32 = 256;

/// Watches in use by this process, within its budget.
static IN_USE: AtomicUsize = AtomicUsize::new(0);

/// An eighth of the user's limit, to leave the rest to other programs.
fn watch_budget() -> usize {
    static SHARE: OnceLock<usize> = OnceLock::new();
    *SHARE.get_or_init(|| {
        let limit = std::fs::read_to_string("/proc/sys/fs/inotify/max_user_watches");
        limit.ok().and_then(|limit| limit.trim().parse::<usize>().ok()).unwrap_or(0) / 8
    })
}

/// Changes since the last check.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Changes {
    /// No changes.
    None,
    /// Some changes.
    Some {
        /// The watches with events.
        watches: Vec<Changed>,
        /// The mounts changed, so any path may lead elsewhere.
        mounts: bool,
    },
    /// Events were lost.
    Missed,
}

/// A watch with events.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Changed {
    /// Watch descriptor.
    pub(super) watch: i32,
    /// The watch was removed.
    pub(super) removed: bool,
}

/// Watched directories, and the mount table of this process.
#[derive(Debug)]
pub(super) struct Watches {
    inotify: OwnedFd,
    mounts: OwnedFd,
    watched: HashSet<i32>,
}

impl Watches {
    pub(super) fn new() -> rustix::io::Result<Self> {
        let inotify = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let mounts = rustix::fs::open("/proc/thread-self/mountinfo", flags, Mode::empty())?;
        Ok(Self { inotify, mounts, watched: HashSet::new() })
    }

    /// Whether the kernel reports all changes in this directory.
    pub(super) fn reports_changes(directory: impl AsFd) -> bool {
        rustix::fs::fstatfs(directory)
            .is_ok_and(|about| REPORTING_FILE_SYSTEMS.contains(&(about.f_type as u32)))
    }

    /// Watches this open directory, whatever its path leads to by now.
    pub(super) fn add(&mut self, directory: impl AsFd) -> rustix::io::Result<i32> {
        if IN_USE.load(Ordering::Relaxed) >= watch_budget() {
            return Err(Errno::NOSPC);
        }
        let name = format!("/proc/thread-self/fd/{}", directory.as_fd().as_raw_fd());
        let watch = inotify::add_watch(&self.inotify, name, WATCHED_EVENTS)?;
        if self.watched.insert(watch) {
            IN_USE.fetch_add(1, Ordering::Relaxed);
        }
        Ok(watch)
    }

    /// Returns the changes since the last call.
    pub(super) fn changes(&mut self) -> Changes {
        let mut fds =
            [PollFd::new(&self.inotify, PollFlags::IN), PollFd::new(&self.mounts, PollFlags::PRI)];
        match poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
            Ok(0) => return Changes::None,
            Ok(_) => {}
            Err(_) => return Changes::Missed,
        }
        let [events, mounts] = fds.map(|fd| !fd.revents().is_empty());
        let changed = if events { self.drain() } else { Some(Vec::new()) };
        changed.map_or(Changes::Missed, |watches| Changes::Some { watches, mounts })
    }

    /// All watches with events; `None` if events were lost.
    fn drain(&mut self) -> Option<Vec<Changed>> {
        let mut buffer = [MaybeUninit::uninit(); 16 * 1024];
        let mut events: HashMap<i32, (u32, bool)> = HashMap::new();
        let mut reader = inotify::Reader::new(&self.inotify, &mut buffer);
        loop {
            match reader.next() {
                Ok(event) if event.events().contains(ReadFlags::QUEUE_OVERFLOW) => return None,
                Ok(event) => {
                    let (times, removed) = events.entry(event.wd()).or_default();
                    *times += 1;
                    *removed |= event.events().contains(ReadFlags::IGNORED);
                }
                Err(Errno::WOULDBLOCK) => break,
                Err(Errno::INTR) => {}
                Err(_) => return None,
            }
        }
        // Removed watches may still have events in the queue.
        events.retain(|watch, _| self.watched.contains(watch));
        let changed = events.into_iter().map(|(watch, (times, removed))| {
            let noisy = times > NOISY_EVENTS;
            if noisy && !removed {
                let _ = inotify::remove_watch(&self.inotify, watch);
            }
            if (noisy || removed) && self.watched.remove(&watch) {
                IN_USE.fetch_sub(1, Ordering::Relaxed);
            }
            Changed { watch, removed: noisy || removed }
        });
        Some(changed.collect())
    }

    /// Removes all watches. Closing the instance would make the kernel wait for all processors.
    pub(super) fn clear(&mut self) {
        for watch in self.watched.drain() {
            let _ = inotify::remove_watch(&self.inotify, watch);
            IN_USE.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Watches {
    fn drop(&mut self) {
        IN_USE.fetch_sub(self.watched.len(), Ordering::Relaxed);
    }
}
