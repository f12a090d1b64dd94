//! Notifies once when a missing path appears or a present one changes.
//!
//! Invariant: watches are set before the paths are checked, so a change in between is seen. For each
//! missing path the nearest existing directory is watched; a slow periodic check covers what the kernel
//! does not report (network filesystems, targets of links).

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};

use codex_exec_server_protocol::files::{
    FsMissingChangedNotification, FsWatchMissingParams, FsWatchMissingResponse,
};
use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use rustix::fs::Stat;

use super::watch::{is_missing, watcher};
use super::{Cancel, Event, FileError, FileNotification, FilesConfig, Outcome};

/// Runs until it has sent its notification, or is cancelled. Responds with [`Event::Started`].
pub(super) fn watch_missing(
    params: &FsWatchMissingParams,
    config: &FilesConfig,
    cancel: &Cancel,
    emit: &dyn Fn(Event) -> ControlFlow<()>,
) -> Result<(), FileError> {
    let limit = config.max_missing_paths;
    if params.missing.len() > limit {
        let (what, count) = ("number of missing paths", params.missing.len() as u64);
        return Err(FileError::out_of_range(what, count, format!("at most {limit}")));
    }
    let started =
        |watching| emit(Event::Started(Outcome::WatchMissing(FsWatchMissingResponse { watching })));
    if params.missing.is_empty() && params.present.is_none() {
        let _ = started(false);
        return Ok(());
    }
    let before = params.present.as_ref().map(|path| path_state(path.as_path()));
    let touched = Arc::new(AtomicBool::new(false));
    let (wake, woken) = sync_channel(1);
    let watcher = {
        let (wake, touched) = (wake.clone(), touched.clone());
        let present = params.present.as_ref().map(|path| path.as_path().to_owned());
        watcher(move |event: notify::Result<notify::Event>| {
            let changes = |kind: &EventKind| !matches!(kind, EventKind::Access(_));
            if let (Ok(event), Some(present)) = (&event, &present)
                && changes(&event.kind)
                && event.paths.iter().any(|path| path.starts_with(present))
            {
                touched.store(true, Ordering::Release);
            }
            // If the channel is full, the receiver is about to check everything anyway.
            let _ = wake.try_send(());
        })
    };
    let Ok(watcher) = watcher else {
        let _ = started(false);
        return Ok(());
    };
    let mut watched = Watched { watcher, directories: HashSet::new() };
    if !watched.watch_missing_parents(params) {
        let _ = started(false);
        return Ok(());
    }
    if started(true).is_break() {
        return Ok(());
    }
    cancel.on_cancel(move || {
        let _ = wake.try_send(());
    });
    loop {
        if cancel.is_cancelled() {
            return Ok(());
        }
        let appeared = params.missing.iter().any(|path| path_state(path.as_path()).is_some());
        let changed = touched.load(Ordering::Acquire)
            || params.present.as_ref().map(|path| path_state(path.as_path())) != before;
        if appeared || changed {
            let watch_id = params.watch_id;
            let changed = FsMissingChangedNotification { watch_id };
            let _ = emit(Event::Notify(FileNotification::MissingChanged(changed)));
            return Ok(());
        }
        // New directories allow a closer watch; check again before waiting.
        let watched_before = watched.directories.len();
        watched.watch_missing_parents(params);
        if watched.directories.len() != watched_before {
            continue;
        }
        match woken.recv_timeout(config.missing_recheck) {
            Ok(()) | Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
    }
}

/// Identifies the state of a path.
#[derive(PartialEq, Eq)]
struct PathState {
    file: (u64, u64, u32),
    size: i64,
    modified: (i64, u64),
    changed: (i64, u64),
}

fn path_state(path: &Path) -> Option<PathState> {
    let stat: Stat = rustix::fs::stat(path).ok()?;
    Some(PathState {
        file: (stat.st_dev, stat.st_ino, stat.st_mode),
        size: stat.st_size,
        modified: (stat.st_mtime, stat.st_mtime_nsec),
        changed: (stat.st_ctime, stat.st_ctime_nsec),
    })
}

struct Watched {
    watcher: RecommendedWatcher,
    directories: HashSet<PathBuf>,
}

impl Watched {
    /// Watches all directories that should be watched now. False if none can be watched; those that
    /// cannot, for lack of permission for example, are covered by the periodic check.
    fn watch_missing_parents(&mut self, params: &FsWatchMissingParams) -> bool {
        let mut directories: HashSet<PathBuf> =
            params.missing.iter().filter_map(|path| nearest(path.as_path())).collect();
        if let Some(present) = &params.present {
            directories.insert(present.as_path().to_owned());
            directories.extend(nearest(present.as_path()));
        }
        let mut gone = false;
        for directory in directories {
            if self.directories.contains(&directory) {
                continue;
            }
            match self.watcher.watch(&directory, RecursiveMode::NonRecursive) {
                Ok(()) => drop(self.directories.insert(directory)),
                // Removed meanwhile: check again before waiting.
                Err(error) if is_missing(&error) => gone = true,
                Err(_) => {}
            }
        }
        gone || !self.directories.is_empty()
    }
}

/// The nearest existing directory above.
fn nearest(path: &Path) -> Option<PathBuf> {
    // No longer path can be looked up.
    let short = |path: &&Path| path.as_os_str().len() < libc::PATH_MAX as usize;
    path.ancestors().skip(1).filter(short).find(|above| above.is_dir()).map(Path::to_owned)
}
