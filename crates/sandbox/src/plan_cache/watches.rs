//! Being told by the kernel: what happens in a directory, and to the mounts.
//!
//! Invariant: whatever changed a name in a watched directory, or a mount, before the question is
//! asked is in the answer, or the answer is that something was missed.

use std::collections::{HashMap, HashSet};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// All that gives a name another meaning, or takes away the right to look it up.
const WATCHED_EVENTS: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MOVED_FROM)
    .union(WatchFlags::MOVED_TO)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::ONLYDIR);

/// File systems that change only through this kernel, which then tells of it: ext, XFS, Btrfs, F2FS,
/// tmpfs, ramfs and overlays. On others (of the network, of a program) names are looked up every time.
const REPORTING_FILE_SYSTEMS: [u32; 7] =
    [0xef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010, 0x0102_1994, 0x8584_58f6, 0x794c_7630];

/// A directory in which so much happens between two questions costs more to be told of than to look at.
const NOISY_EVENTS: u32 = 256;

/// Watches in use in this process, of the share of the user's that it takes.
static IN_USE: AtomicUsize = AtomicUsize::new(0);

/// An eighth of what the user may have: others need some too.
fn watch_budget() -> usize {
    static SHARE: OnceLock<usize> = OnceLock::new();
    *SHARE.get_or_init(|| {
        let limit = std::fs::read_to_string("/proc/sys/fs/inotify/max_user_watches");
        limit.ok().and_then(|limit| limit.trim().parse::<usize>().ok()).unwrap_or(0) / 8
    })
}

/// What happened since it was asked last.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Changes {
    /// Nothing.
    None,
    /// This.
    Some {
        /// Something in the directories of these watches.
        watches: Vec<Changed>,
        /// Something with the mounts, so that any name may lead elsewhere.
        mounts: bool,
    },
    /// Nobody knows.
    Missed,
}

/// A watch that has something to tell.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Changed {
    /// Which one.
    pub(super) watch: i32,
    /// It watches no more.
    pub(super) removed: bool,
}

/// Some watched directories, and the mounts of this process.
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

    /// Whether changes in this directory are told of at all.
    pub(super) fn reports_changes(directory: impl AsFd) -> bool {
        rustix::fs::fstatfs(directory)
            .is_ok_and(|about| REPORTING_FILE_SYSTEMS.contains(&(about.f_type as u32)))
    }

    /// Watches exactly this directory, whatever its name leads to by now.
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

    /// What happened since this was asked last.
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

    /// Every watch with events, once; `None` if some were lost.
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
        // Watches of a plan that was let go have their last words here too.
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

    /// Watches nothing any more. To close instead would have the kernel wait for all processors.
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
