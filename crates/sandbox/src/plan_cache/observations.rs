//! The file system observations that a plan depends on, and whether they still hold.
//!
//! Invariant: a plan depends only on its policy and these observations, so it is current while all of
//! them hold. An observation of a name in a watched directory was made in that directory after the
//! watch was set; it counts as unchanged while the kernel reports no change in the directory, and while
//! the directory's own name leads to it, which is another observation. All other observations are
//! repeated each time.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;

use super::watches::{Changes, Watches};
use crate::apply::sys;
use crate::decide::facts::{Facts, Identity, Mount, Node, NodeKind};
use crate::decide::paths::parent;
use crate::host::{self, HostFacts, LookResult};

type LookupResult<T> = Result<T, Errno>;

/// A lookup of a name, and its result.
#[derive(Debug)]
enum Observation {
    Lookup(LookupResult<Node>),
    Link(LookupResult<PathBuf>),
    /// The links in a directory, recorded under the name `.`.
    Links(LookupResult<Vec<OsString>>),
    Start(LookupResult<Vec<u8>>),
}

/// The result of a lookup, and whether the watch of its directory reports every change. A placeholder
/// can change by being written into, which the watch does not report.
fn result(look: rustix::io::Result<LookResult>) -> (LookupResult<Node>, bool) {
    match look {
        Ok(LookResult { node, looks_like_placeholder }) => {
            (node.ok_or(Errno::NOENT), !looks_like_placeholder)
        }
        Err(errno) => (Err(errno), true),
    }
}

fn read_link(directory: BorrowedFd<'_>, name: &Path) -> LookupResult<PathBuf> {
    let target = rustix::fs::readlinkat(directory, name, Vec::new())?;
    Ok(OsString::from_vec(target.into_bytes()).into())
}

fn read_start(path: &Path) -> LookupResult<Vec<u8>> {
    HostFacts::default().read_start(path).map_err(|error| errno(&error))
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

/// A watched directory.
#[derive(Debug)]
struct Directory {
    path: PathBuf,
    identity: Identity,
    /// By the last component of the path.
    observed: Vec<(OsString, Observation)>,
    /// The kernel may have reported a change.
    changed: bool,
}

impl Directory {
    /// Opens the directory, if its path still leads to it.
    fn open(&self) -> Option<OwnedFd> {
        let fd = open(&self.path).ok()?;
        (sys::node_of(&fd).ok()?.identity == self.identity).then_some(fd)
    }

    /// Whether every observation still holds.
    fn is_current(&mut self) -> bool {
        if self.observed.is_empty() {
            return true;
        }
        let Some(fd) = self.open() else { return false };
        let mut is_reported = true;
        for (name, observed) in &self.observed {
            let name = Path::new(name);
            let same = match observed {
                Observation::Lookup(before) => {
                    let (now, next_is_reported) = result(host::lookup_node(fd.as_fd(), name));
                    is_reported &= next_is_reported;
                    now == *before
                }
                Observation::Link(before) => read_link(fd.as_fd(), name) == *before,
                Observation::Links(before) => host::links(fd.as_fd(), name) == *before,
                Observation::Start(before) => read_start(&self.path.join(name)) == *before,
            };
            if !same {
                return false;
            }
        }
        self.changed = !is_reported;
        true
    }

    /// Moves the observations to those that are repeated by their whole path.
    fn unwatch(&mut self, unwatched: &mut Vec<(PathBuf, Observation)>) {
        unwatched.extend(
            self.observed.drain(..).map(|(name, observed)| (self.path.join(name), observed)),
        );
    }
}

fn open(directory: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::open(directory, flags, Mode::empty())
}

/// Everything that a plan depends on.
#[derive(Debug)]
pub(super) struct Observations {
    watches: Watches,
    directories: Vec<Directory>,
    by_watch: HashMap<i32, Vec<usize>>,
    /// Observations that are repeated each time.
    unwatched: Vec<(PathBuf, Observation)>,
}

impl Observations {
    /// Whether every observation still holds.
    pub(super) fn is_current(&mut self) -> bool {
        match self.watches.changes() {
            Changes::None => {}
            Changes::Missed => return false,
            // Other paths may lead to what the plan protects.
            Changes::Some { mounts: true, .. } => return false,
            Changes::Some { watches, .. } => {
                for change in watches {
                    for &index in self.by_watch.get(&change.watch).into_iter().flatten() {
                        let directory = &mut self.directories[index];
                        directory.changed = true;
                        if change.removed {
                            directory.unwatch(&mut self.unwatched);
                        }
                    }
                }
            }
        }
        self.directories.iter_mut().filter(|directory| directory.changed).all(Directory::is_current)
            && self.recheck_unwatched()
    }

    /// Repeats the observations that have no watch.
    fn recheck_unwatched(&self) -> bool {
        let facts = HostFacts::default();
        self.unwatched.iter().all(|(path, observed)| match observed {
            Observation::Lookup(before) => result(facts.lookup_node(path)).0 == *before,
            Observation::Link(before) => read_link(CWD, path) == *before,
            Observation::Links(before) => host::links(CWD, path) == *before,
            Observation::Start(before) => read_start(path) == *before,
        })
    }

    /// Number of observations.
    pub(super) fn size(&self) -> usize {
        self.unwatched.len() + self.directories.iter().map(|d| 1 + d.observed.len()).sum::<usize>()
    }

    /// Removes all watches and returns the inotify instance.
    pub(super) fn into_watches(mut self) -> Watches {
        self.watches.clear();
        self.watches
    }
}

/// Facts of this machine that record every lookup.
#[derive(Debug)]
pub(super) struct RecordingFacts(RefCell<State>);

#[derive(Debug)]
struct State {
    observations: Observations,
    /// Index of each directory in the observations; `None` if it is not watched.
    directory_indexes: HashMap<OsString, Option<usize>>,
    lookups: HashMap<OsString, LookupResult<Node>>,
    /// Whether the kernel reports changes, by device.
    devices: HashMap<(u32, u32), bool>,
    /// The last directory used.
    open: Option<(usize, OwnedFd)>,
    /// A lookup cannot be repeated cheaply, or a directory was replaced while recording.
    uncacheable: bool,
}

impl RecordingFacts {
    pub(super) fn new(watches: Watches) -> Self {
        let observations = Observations {
            watches,
            directories: Vec::new(),
            by_watch: HashMap::new(),
            unwatched: Vec::new(),
        };
        Self(RefCell::new(State {
            observations,
            directory_indexes: HashMap::new(),
            lookups: HashMap::new(),
            devices: HashMap::new(),
            open: None,
            uncacheable: false,
        }))
    }

    /// The observations; or the watches, if the plan cannot be cached.
    pub(super) fn finish(self) -> Result<Observations, Watches> {
        let State { observations, uncacheable, .. } = self.0.into_inner();
        if uncacheable { Err(observations.into_watches()) } else { Ok(observations) }
    }
}

impl State {
    fn lookup(&mut self, path: &Path) -> LookupResult<Node> {
        if let Some(known) = self.lookups.get(path.as_os_str()) {
            return *known;
        }
        let result = match self.within(path) {
            Some((index, fd, name)) => {
                let (result, is_reported) = result(host::lookup_node(fd, name));
                if !is_reported {
                    self.observations.directories[index].changed = true;
                }
                self.record(index, name, Observation::Lookup(result));
                result
            }
            None => {
                let (result, _) = result(host::lookup_node(CWD, path));
                self.observations.unwatched.push((path.to_owned(), Observation::Lookup(result)));
                result
            }
        };
        self.lookups.insert(path.as_os_str().to_owned(), result);
        result
    }

    fn record(&mut self, index: usize, name: &Path, observed: Observation) {
        self.observations.directories[index].observed.push((name.as_os_str().to_owned(), observed));
    }

    /// The watched directory of a path, opened, and the name in it.
    fn within<'p>(&mut self, path: &'p Path) -> Option<(usize, BorrowedFd<'_>, &'p Path)> {
        let bytes = path.as_os_str().as_bytes();
        let slash = bytes.iter().rposition(|&byte| byte == b'/')?;
        let name = Path::new(OsStr::from_bytes(&bytes[slash + 1..]));
        if matches!(name.as_os_str().as_bytes(), b"" | b"." | b"..") {
            return None;
        }
        let index = self.directory_index(parent(path)?)?;
        Some((index, self.opened(index)?, name))
    }

    /// Opens a watched directory.
    fn opened(&mut self, index: usize) -> Option<BorrowedFd<'_>> {
        if self.open.as_ref().is_none_or(|(open, _)| *open != index) {
            let Some(fd) = self.observations.directories[index].open() else {
                self.uncacheable = true;
                return None;
            };
            self.open = Some((index, fd));
        }
        Some(self.open.as_ref()?.1.as_fd())
    }

    /// The index of a directory, which is watched if possible.
    fn directory_index(&mut self, path: &Path) -> Option<usize> {
        if let Some(&known) = self.directory_indexes.get(path.as_os_str()) {
            return known;
        }
        let directory_index = self.watch(path);
        self.directory_indexes.insert(path.as_os_str().to_owned(), directory_index);
        directory_index
    }

    fn watch(&mut self, path: &Path) -> Option<usize> {
        let node = self.lookup(path).ok().filter(|node| node.kind == NodeKind::Directory)?;
        let fd = open(path).ok()?;
        let device = node.identity.device;
        if !*self.devices.entry(device).or_insert_with(|| Watches::reports_changes(&fd))
            || sys::node_of(&fd).ok()?.identity != node.identity
        {
            return None;
        }
        let watch = self.observations.watches.add(&fd).ok()?;
        let index = self.observations.directories.len();
        self.observations.directories.push(Directory {
            path: path.to_owned(),
            identity: node.identity,
            observed: Vec::new(),
            changed: false,
        });
        self.observations.by_watch.entry(watch).or_default().push(index);
        self.open = Some((index, fd));
        Some(index)
    }
}

impl Facts for RecordingFacts {
    fn lookup(&self, path: &Path) -> io::Result<Node> {
        Ok(self.0.borrow_mut().lookup(path)?)
    }

    fn read_link(&self, path: &Path) -> io::Result<PathBuf> {
        let state = &mut *self.0.borrow_mut();
        let (index, result) = match state.within(path) {
            Some((index, fd, name)) => (Some((index, name)), read_link(fd, name)),
            None => (None, read_link(CWD, path)),
        };
        let observed = Observation::Link(result.clone());
        match index {
            Some((index, name)) => state.record(index, name, observed),
            None => state.observations.unwatched.push((path.to_owned(), observed)),
        }
        Ok(result?)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<(OsString, NodeKind)>> {
        self.0.borrow_mut().uncacheable = true;
        HostFacts::default().list(path)
    }

    fn links(&self, path: &Path) -> io::Result<Vec<OsString>> {
        let state = &mut *self.0.borrow_mut();
        let here = Path::new(".");
        let watched =
            state.directory_index(path).and_then(|index| Some((index, state.opened(index)?)));
        let result = match watched {
            Some((index, fd)) => {
                let result = host::links(fd, here);
                state.record(index, here, Observation::Links(result.clone()));
                result
            }
            None => {
                let result = host::links(CWD, path);
                state
                    .observations
                    .unwatched
                    .push((path.to_owned(), Observation::Links(result.clone())));
                result
            }
        };
        Ok(result?)
    }

    /// Not recorded: the kernel reports every change of the mounts.
    fn mounts(&self) -> io::Result<Vec<Mount>> {
        HostFacts::default().mounts()
    }

    fn read_start(&self, path: &Path) -> io::Result<Vec<u8>> {
        let result = read_start(path);
        let unwatched = &mut self.0.borrow_mut().observations.unwatched;
        unwatched.push((path.to_owned(), Observation::Start(result.clone())));
        Ok(result?)
    }
}
