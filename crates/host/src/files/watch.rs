//! Watches a file or a tree and reports changes in batches: `fs/watch`.
//!
//! Invariant: no change is lost silently, and none is held outside of the [`ChangeMemory`]. If the kernel,
//! that memory or a batch overflows, the notification says `overflow`; a watch that cannot continue says why in `ended`. The content that a
//! new directory had before it was watched is found by listing it. Unreadable subdirectories are
//! skipped, as in a walk; the rest of the tree is still watched.

use std::collections::{BTreeMap, HashSet};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use codex_exec_server_protocol::PathUri;
use codex_exec_server_protocol::files::{
    FsChange, FsChangeKind, FsChangedNotification, FsDone, FsWatchParams,
};
use notify::event::{AccessKind, AccessMode, CreateKind, ModifyKind, RenameMode};
use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};

use super::{
    Cancel, ChangeMemory, ChangeShare, Event, FileError, FileNotification, FilesConfig, Outcome,
};

/// Memory of an event of the kernel, or of a change, besides its path.
const OVERHEAD: usize = 256;
/// JSON overhead of a change: braces, member names, kind, comma; rounded up.
const JSON_OVERHEAD: usize = 40;
/// A shorter delay would report each write of a save separately, and leave no time for new watches.
const MIN_DEBOUNCE: Duration = Duration::from_millis(10);

/// Runs until it is cancelled or the path is gone. Responds with [`Event::Started`].
pub(super) fn watch(
    params: &FsWatchParams,
    config: &FilesConfig,
    memory: &Arc<ChangeMemory>,
    cancel: &Cancel,
    emit: &dyn Fn(Event) -> ControlFlow<()>,
) -> Result<(), FileError> {
    let debounce = params
        .debounce_ms
        .map_or(config.default_watch_debounce, |ms| Duration::from_millis(ms.into()));
    if debounce > config.max_watch_debounce {
        let allowed = format!("at most {}", config.max_watch_debounce.as_millis());
        return Err(FileError::out_of_range("debounceMs", debounce.as_millis() as u64, allowed));
    }
    let target = Target::of(&params.path, params.recursive)?;
    let mut source = Source::open(&target, &params.path, memory, cancel)?;
    if emit(Event::Started(Outcome::Watch(FsDone {}))).is_break() {
        return Ok(());
    }
    let mut batch = Batch::new(target, params.watch_id, config, memory);
    batch.run(&mut source, debounce.max(MIN_DEBOUNCE), cancel, emit);
    Ok(())
}

/// What to watch. A file is watched through its directory, so that the watch survives when the file is
/// replaced by a rename, as most editors do.
struct Target {
    watched: PathBuf,
    identity: (u64, u64),
    only: Option<PathBuf>,
    recursive: bool,
}

impl Target {
    fn of(path: &PathUri, recursive: bool) -> Result<Self, FileError> {
        let native = path.as_path();
        let failed = |error: &std::io::Error| FileError::io("watch", path, error);
        let is_directory = std::fs::metadata(native).map_err(|e| failed(&e))?.is_dir();
        let (watched, only) = match native.parent() {
            Some(parent) if !is_directory => (parent.to_owned(), Some(native.to_owned())),
            _ => (native.to_owned(), None),
        };
        let identity = identity(&watched).map_err(|e| failed(&e))?;
        Ok(Self { watched, identity, recursive: recursive && only.is_none(), only })
    }

    fn concerns(&self, path: &Path) -> bool {
        self.only.as_deref().is_none_or(|only| only == path)
    }

    fn is_gone(&self) -> bool {
        identity(&self.watched).ok() != Some(self.identity)
    }
}

fn identity(path: &Path) -> std::io::Result<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).map(|found| (found.dev(), found.ino()))
}

/// Events of the kernel, in a queue that is bounded by the memory for changes.
struct Source {
    events: Receiver<Message>,
    overflow: Arc<AtomicBool>,
    /// Watches until dropped.
    watcher: RecommendedWatcher,
    /// A directory is unreadable, so its siblings are watched one by one, and new directories must be
    /// added.
    one_by_one: bool,
}

enum Message {
    Event(notify::Result<notify::Event>, ChangeShare),
    Stop,
}

impl Source {
    fn open(
        target: &Target,
        path: &PathUri,
        memory: &Arc<ChangeMemory>,
        cancel: &Cancel,
    ) -> Result<Self, FileError> {
        let (sender, events) = channel();
        let overflow = Arc::new(AtomicBool::new(false));
        let mut watcher = {
            let (sender, overflow, memory) = (sender.clone(), overflow.clone(), memory.clone());
            watcher(move |event| match memory.take(event_bytes(&event)) {
                Some(share) => drop(sender.send(Message::Event(event, share))),
                // If the queue is empty, the memory is with others, and this wakes the receiver.
                None if !overflow.swap(true, Ordering::AcqRel) => drop(sender.send(Message::Stop)),
                None => {}
            })
        }
        .map_err(|error| notify_error(path, &error))?;
        let mut one_by_one = false;
        let mode =
            if target.recursive { RecursiveMode::Recursive } else { RecursiveMode::NonRecursive };
        match watcher.watch(&target.watched, mode) {
            Err(error) if target.recursive && is_denied(&error) => {
                one_by_one = true;
                watcher
                    .watch(&target.watched, RecursiveMode::NonRecursive)
                    .and_then(|()| watch_below(&mut watcher, &target.watched, cancel))
            }
            watched => watched,
        }
        .map_err(|error| notify_error(path, &error))?;
        stop_on_cancel(cancel, sender);
        Ok(Self { events, overflow, watcher, one_by_one })
    }

    /// Watches a new directory, if recursive watches do not include it.
    fn add(&mut self, directory: &Path, cancel: &Cancel) -> notify::Result<()> {
        watch_tree(&mut self.watcher, directory, cancel)
    }
}

/// Watches a directory and what is below it; skips unreadable and removed directories.
fn watch_tree(
    watcher: &mut RecommendedWatcher,
    directory: &Path,
    cancel: &Cancel,
) -> notify::Result<()> {
    match watcher.watch(directory, RecursiveMode::Recursive) {
        Err(error) if is_denied(&error) => {}
        Err(error) if is_missing(&error) => return Ok(()),
        watched => return watched,
    }
    match watcher.watch(directory, RecursiveMode::NonRecursive) {
        Err(error) if is_denied(&error) || is_missing(&error) => Ok(()),
        Err(error) => Err(error),
        Ok(()) => watch_below(watcher, directory, cancel),
    }
}

fn watch_below(
    watcher: &mut RecommendedWatcher,
    directory: &Path,
    cancel: &Cancel,
) -> notify::Result<()> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Ok(()) };
    for entry in entries.flatten() {
        if cancel.is_cancelled() {
            break;
        }
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            watch_tree(watcher, &entry.path(), cancel)?;
        }
    }
    Ok(())
}

fn is_denied(error: &notify::Error) -> bool {
    matches!(&error.kind, notify::ErrorKind::Io(io)
        if io.kind() == std::io::ErrorKind::PermissionDenied)
}

pub(super) fn is_missing(error: &notify::Error) -> bool {
    match &error.kind {
        notify::ErrorKind::PathNotFound => true,
        notify::ErrorKind::Io(io) => io.kind() == std::io::ErrorKind::NotFound,
        _ => false,
    }
}

fn stop_on_cancel(cancel: &Cancel, sender: Sender<Message>) {
    cancel.on_cancel(move || drop(sender.send(Message::Stop)));
}

/// Memory of an event, estimated.
fn event_bytes(event: &notify::Result<notify::Event>) -> usize {
    let paths = event.as_ref().map_or(&[][..], |event| &event.paths);
    OVERHEAD + paths.iter().map(|path| path.as_os_str().len()).sum::<usize>()
}

/// A watcher that does not follow links below the watched path.
pub(super) fn watcher(
    handler: impl FnMut(notify::Result<notify::Event>) + Send + 'static,
) -> notify::Result<RecommendedWatcher> {
    RecommendedWatcher::new(handler, notify::Config::default().with_follow_symlinks(false))
}

pub(super) fn notify_error(path: &PathUri, error: &notify::Error) -> FileError {
    match &error.kind {
        notify::ErrorKind::PathNotFound => FileError::os("watch", path, rustix::io::Errno::NOENT),
        notify::ErrorKind::MaxFilesWatch => FileError::limit(path, limit_reached()),
        notify::ErrorKind::Io(io) => match rustix::io::Errno::from_io_error(io) {
            Some(rustix::io::Errno::NOSPC | rustix::io::Errno::MFILE) => {
                FileError::limit(path, limit_reached())
            }
            _ => FileError::io("watch", path, io),
        },
        _ => FileError::refused(path, error.to_string()),
    }
}

fn limit_reached() -> &'static str {
    "the system's limit of file watches is reached; raise fs.inotify.max_user_watches or \
     max_user_instances"
}

/// Changes since the last notification.
struct Batch<'a> {
    target: Target,
    config: &'a FilesConfig,
    watch_id: i64,
    changes: BTreeMap<PathUri, FsChangeKind>,
    /// Bytes of `changes` as JSON.
    change_bytes: usize,
    /// What all of this takes.
    memory: &'a Arc<ChangeMemory>,
    share: ChangeShare,
    overflow: bool,
    ended: Option<String>,
    /// New directories, to list now and once more when they are surely watched.
    new_directories: Vec<(PathBuf, bool)>,
    /// What the first listing has reported.
    reported: HashSet<PathUri>,
    /// What `new_directories` and `reported` take since that listing.
    listed: ChangeShare,
}

impl<'a> Batch<'a> {
    fn new(
        target: Target,
        watch_id: i64,
        config: &'a FilesConfig,
        memory: &'a Arc<ChangeMemory>,
    ) -> Self {
        Self {
            target,
            config,
            watch_id,
            changes: BTreeMap::new(),
            change_bytes: 0,
            memory,
            share: ChangeShare::none(memory),
            overflow: false,
            ended: None,
            new_directories: Vec::new(),
            reported: HashSet::new(),
            listed: ChangeShare::none(memory),
        }
    }

    fn run(
        &mut self,
        source: &mut Source,
        debounce: Duration,
        cancel: &Cancel,
        emit: &dyn Fn(Event) -> ControlFlow<()>,
    ) {
        let mut due: Option<Instant> = None;
        loop {
            let message = match due {
                None => source.events.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(due) => {
                    source.events.recv_timeout(due.saturating_duration_since(Instant::now()))
                }
            };
            if cancel.is_cancelled() {
                return;
            }
            match message {
                Ok(Message::Event(event, share)) => {
                    // Most of what is recorded is this event's.
                    drop(share);
                    self.record(event);
                }
                Ok(Message::Stop) | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    self.ended = Some("the system ended the watch".into());
                }
            }
            self.overflow |= source.overflow.swap(false, Ordering::AcqRel);
            let now = Instant::now();
            if self.ended.is_none() && due.is_none_or(|due| now < due) {
                if due.is_none() && self.has_news() {
                    due = Some(now + debounce);
                }
                continue;
            }
            self.look_into_new_directories(source, cancel);
            if self.send(emit).is_break() {
                return;
            }
            due = self.has_news().then(|| now + debounce);
        }
    }

    fn has_news(&self) -> bool {
        !self.changes.is_empty()
            || self.overflow
            || self.ended.is_some()
            || !self.new_directories.is_empty()
    }

    fn record(&mut self, event: notify::Result<notify::Event>) {
        let event = match event {
            Ok(event) => event,
            Err(error) => {
                if let notify::ErrorKind::MaxFilesWatch = error.kind {
                    self.ended = Some(limit_reached().into());
                }
                self.overflow = true;
                return;
            }
        };
        if event.need_rescan() {
            self.overflow = true;
            return;
        }
        let kind = match event.kind {
            EventKind::Create(_) | EventKind::Modify(ModifyKind::Name(RenameMode::To)) => {
                FsChangeKind::Created
            }
            EventKind::Remove(_) | EventKind::Modify(ModifyKind::Name(RenameMode::From)) => {
                FsChangeKind::Removed
            }
            // Its two halves have been reported.
            EventKind::Modify(ModifyKind::Name(RenameMode::Both)) => return,
            EventKind::Modify(_) | EventKind::Access(AccessKind::Close(AccessMode::Write)) => {
                FsChangeKind::Modified
            }
            EventKind::Access(_) => return,
            EventKind::Any | EventKind::Other => FsChangeKind::Modified,
        };
        for path in event.paths {
            if kind != FsChangeKind::Created && path == self.target.watched && self.target.is_gone()
            {
                self.ended = Some("the watched directory is gone".into());
            }
            if kind == FsChangeKind::Created
                && self.target.recursive
                && event.kind != EventKind::Create(CreateKind::File)
                && std::fs::symlink_metadata(&path).is_ok_and(|found| found.is_dir())
            {
                if self.share.grow(path.as_os_str().len() + OVERHEAD) {
                    self.new_directories.push((path.clone(), false));
                } else {
                    self.overflow = true;
                }
            }
            self.change(&path, kind);
        }
    }

    fn change(&mut self, path: &Path, kind: FsChangeKind) {
        if !self.target.concerns(path) {
            return;
        }
        let Ok(path) = PathUri::try_from(path) else { return };
        if let Some(before) = self.changes.get_mut(&path) {
            *before = merge(*before, kind);
            return;
        }
        let bytes = self.change_bytes + path.encoded_len() + JSON_OVERHEAD;
        if self.changes.len() >= self.config.max_watch_changes
            || bytes > self.config.max_watch_change_bytes
            || !self.share.grow(path.as_bytes().len() + OVERHEAD)
        {
            self.overflow = true;
            return;
        }
        self.change_bytes = bytes;
        self.changes.insert(path, kind);
    }

    fn look_into_new_directories(&mut self, source: &mut Source, cancel: &Cancel) {
        let mut left = self.config.max_watch_changes;
        // What the listings keep until the next one.
        let mut share = ChangeShare::none(self.memory);
        let mut again = Vec::new();
        let mut reported = HashSet::new();
        for (directory, seen) in std::mem::take(&mut self.new_directories) {
            if left == 0 {
                self.overflow = true;
                break;
            }
            if source.one_by_one && !seen {
                self.add(&directory, source, cancel);
            }
            let mut below = vec![directory.clone()];
            while let Some(at) = below.pop() {
                let entries = match std::fs::read_dir(&at) {
                    Ok(entries) => entries,
                    Err(error) => {
                        // An unreadable directory prevents a recursive watch of its parent.
                        let denied = error.kind() == std::io::ErrorKind::PermissionDenied;
                        if denied && !seen && !source.one_by_one {
                            source.one_by_one = true;
                            self.add(&directory, source, cancel);
                        }
                        continue;
                    }
                };
                for entry in entries.flatten() {
                    if left == 0 {
                        self.overflow = true;
                        break;
                    }
                    left -= 1;
                    let path = entry.path();
                    if !share.grow(2 * (path.as_os_str().len() + OVERHEAD)) {
                        self.overflow = true;
                        break;
                    }
                    if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                        below.push(path.clone());
                    }
                    let Ok(uri) = PathUri::try_from(path.as_path()) else { continue };
                    if !self.reported.contains(&uri) && !self.changes.contains_key(&uri) {
                        self.change(&path, FsChangeKind::Created);
                    }
                    reported.insert(uri);
                }
            }
            if !seen && share.grow(directory.as_os_str().len() + OVERHEAD) {
                again.push((directory, true));
            } else if !seen {
                self.overflow = true;
            }
        }
        self.new_directories = again;
        self.reported = reported;
        self.listed = share;
    }

    fn add(&mut self, directory: &Path, source: &mut Source, cancel: &Cancel) {
        if let Err(error) = source.add(directory, cancel) {
            self.record(Err(error));
        }
    }

    fn send(&mut self, emit: &dyn Fn(Event) -> ControlFlow<()>) -> ControlFlow<()> {
        if self.changes.is_empty() && !self.overflow && self.ended.is_none() {
            return ControlFlow::Continue(());
        }
        let changes = std::mem::take(&mut self.changes)
            .into_iter()
            .map(|(path, kind)| FsChange { path, kind })
            .collect();
        let ended = self.ended.take();
        let last = ended.is_some();
        let overflow = std::mem::take(&mut self.overflow);
        let watch_id = self.watch_id;
        let changed = FsChangedNotification { watch_id, changes, overflow, ended };
        self.change_bytes = 0;
        let sent = emit(Event::Notify(FileNotification::Changed(changed)));
        // Held while the notification waits for its turn.
        self.share = ChangeShare::none(self.memory);
        sent?;
        if last { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

/// Merges two changes of one path in a batch.
fn merge(before: FsChangeKind, after: FsChangeKind) -> FsChangeKind {
    match (before, after) {
        (FsChangeKind::Created, FsChangeKind::Modified) => FsChangeKind::Created,
        (FsChangeKind::Removed, FsChangeKind::Created | FsChangeKind::Modified) => {
            FsChangeKind::Modified
        }
        (_, after) => after,
    }
}
