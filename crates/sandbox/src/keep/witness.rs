//! The answers a plan was made from, and whether they would be the same again.
//!
//! Invariant: a plan follows from its policy and from these answers alone, so it holds as long as each
//! of them does. An answer about a name in a watched directory was given by that very directory, after
//! the watch was set; it is taken for unchanged only while the kernel tells of no change in that
//! directory, and while the directory's own name leads to it, which is an answer like any other. All
//! other questions are asked again each time.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;

use super::watch::{Changes, Watches};
use crate::apply::sys;
use crate::decide::facts::{Facts, Identity, Mount, Node, NodeKind};
use crate::decide::order::parent;
use crate::host::{self, HostFacts, Look};

type Answer<T> = Result<T, Errno>;

/// A question about a name, and what was answered.
#[derive(Debug)]
enum Asked {
    Lookup(Answer<Node>),
    Link(Answer<PathBuf>),
    /// The links in a directory, asked by the name `.`.
    Links(Answer<Vec<OsString>>),
    Start(Answer<Vec<u8>>),
}

/// What a look showed; and whether the directory around it tells of every change. What holds the place
/// of a missing name can become something else by being written into.
fn answer(look: rustix::io::Result<Look>) -> (Answer<Node>, bool) {
    match look {
        Ok(Look { node, marked }) => (node.ok_or(Errno::NOENT), !marked),
        Err(errno) => (Err(errno), true),
    }
}

fn read_link(directory: BorrowedFd<'_>, name: &Path) -> Answer<PathBuf> {
    let target = rustix::fs::readlinkat(directory, name, Vec::new())?;
    Ok(OsString::from_vec(target.into_bytes()).into())
}

fn read_start(path: &Path) -> Answer<Vec<u8>> {
    HostFacts::default().read_start(path).map_err(|error| errno(&error))
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

/// A directory that the kernel tells of.
#[derive(Debug)]
struct Directory {
    path: PathBuf,
    identity: Identity,
    /// By the last name of the path.
    asked: Vec<(OsString, Asked)>,
    /// Something may have happened in it.
    changed: bool,
}

impl Directory {
    /// This very directory, if its name still leads to it.
    fn open(&self) -> Option<OwnedFd> {
        let fd = open(&self.path).ok()?;
        (sys::node_of(&fd).ok()?.identity == self.identity).then_some(fd)
    }

    /// Whether everything that was asked is answered the same now.
    fn holds(&mut self) -> bool {
        if self.asked.is_empty() {
            return true;
        }
        let Some(fd) = self.open() else { return false };
        let mut told_of = true;
        for (name, asked) in &self.asked {
            let name = Path::new(name);
            let same = match asked {
                Asked::Lookup(before) => {
                    let (now, next_is_told_of) = answer(host::look(fd.as_fd(), name));
                    told_of &= next_is_told_of;
                    now == *before
                }
                Asked::Link(before) => read_link(fd.as_fd(), name) == *before,
                Asked::Links(before) => host::links(fd.as_fd(), name) == *before,
                Asked::Start(before) => read_start(&self.path.join(name)) == *before,
            };
            if !same {
                return false;
            }
        }
        self.changed = !told_of;
        true
    }

    /// Moves what was asked to where it is asked by the whole path.
    fn give_up(&mut self, always: &mut Vec<(PathBuf, Asked)>) {
        always.extend(self.asked.drain(..).map(|(name, asked)| (self.path.join(name), asked)));
    }
}

fn open(directory: &Path) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::open(directory, flags, Mode::empty())
}

/// What a plan rests on.
#[derive(Debug)]
pub(super) struct Witness {
    watches: Watches,
    directories: Vec<Directory>,
    by_watch: HashMap<i32, Vec<usize>>,
    /// Asked again each time.
    always: Vec<(PathBuf, Asked)>,
}

impl Witness {
    /// Whether every question would be answered the same now.
    pub(super) fn holds(&mut self) -> bool {
        match self.watches.changes() {
            Changes::None => {}
            Changes::Missed => return false,
            // Other names may lead to what the plan protects.
            Changes::Told { mounts: true, .. } => return false,
            Changes::Told { watches, .. } => {
                for told in watches {
                    for &index in self.by_watch.get(&told.watch).into_iter().flatten() {
                        let directory = &mut self.directories[index];
                        directory.changed = true;
                        if told.gone {
                            directory.give_up(&mut self.always);
                        }
                    }
                }
            }
        }
        self.directories.iter_mut().filter(|directory| directory.changed).all(Directory::holds)
            && self.look_again()
    }

    /// Asks what is asked each time.
    fn look_again(&self) -> bool {
        let facts = HostFacts::default();
        self.always.iter().all(|(path, asked)| match asked {
            Asked::Lookup(before) => answer(facts.look(path)).0 == *before,
            Asked::Link(before) => read_link(CWD, path) == *before,
            Asked::Links(before) => host::links(CWD, path) == *before,
            Asked::Start(before) => read_start(path) == *before,
        })
    }

    /// How much is remembered.
    pub(super) fn size(&self) -> usize {
        self.always.len() + self.directories.iter().map(|d| 1 + d.asked.len()).sum::<usize>()
    }

    /// The watches, with nothing watched.
    pub(super) fn into_watches(mut self) -> Watches {
        self.watches.clear();
        self.watches
    }
}

/// Facts of this machine that are remembered as they are given.
#[derive(Debug)]
pub(super) struct Recording(RefCell<State>);

#[derive(Debug)]
struct State {
    witness: Witness,
    /// Where each directory is in the witness; `None` for one that is not watched.
    places: HashMap<OsString, Option<usize>>,
    looked: HashMap<OsString, Answer<Node>>,
    /// Whether the kernel tells of changes, by device.
    devices: HashMap<(u32, u32), bool>,
    /// The directory that was asked last.
    open: Option<(usize, OwnedFd)>,
    /// Something was asked that cannot be asked again cheaply, or a name changed its meaning while
    /// being asked about.
    spoilt: bool,
}

impl Recording {
    pub(super) fn new(watches: Watches) -> Self {
        let witness = Witness {
            watches,
            directories: Vec::new(),
            by_watch: HashMap::new(),
            always: Vec::new(),
        };
        Self(RefCell::new(State {
            witness,
            places: HashMap::new(),
            looked: HashMap::new(),
            devices: HashMap::new(),
            open: None,
            spoilt: false,
        }))
    }

    /// What was asked; or the watches, if that is not worth keeping.
    pub(super) fn finish(self) -> Result<Witness, Watches> {
        let State { witness, spoilt, .. } = self.0.into_inner();
        if spoilt { Err(witness.into_watches()) } else { Ok(witness) }
    }
}

impl State {
    fn lookup(&mut self, path: &Path) -> Answer<Node> {
        if let Some(known) = self.looked.get(path.as_os_str()) {
            return *known;
        }
        let answer = match self.within(path) {
            Some((index, fd, name)) => {
                let (answer, told_of) = answer(host::look(fd, name));
                if !told_of {
                    self.witness.directories[index].changed = true;
                }
                self.remember(index, name, Asked::Lookup(answer));
                answer
            }
            None => {
                let (answer, _) = answer(host::look(CWD, path));
                self.witness.always.push((path.to_owned(), Asked::Lookup(answer)));
                answer
            }
        };
        self.looked.insert(path.as_os_str().to_owned(), answer);
        answer
    }

    fn remember(&mut self, index: usize, name: &Path, asked: Asked) {
        self.witness.directories[index].asked.push((name.as_os_str().to_owned(), asked));
    }

    /// The watched directory that a path is in, open, and the name in it.
    fn within<'p>(&mut self, path: &'p Path) -> Option<(usize, BorrowedFd<'_>, &'p Path)> {
        let bytes = path.as_os_str().as_bytes();
        let slash = bytes.iter().rposition(|&byte| byte == b'/')?;
        let name = Path::new(OsStr::from_bytes(&bytes[slash + 1..]));
        if matches!(name.as_os_str().as_bytes(), b"" | b"." | b"..") {
            return None;
        }
        let index = self.place(parent(path)?)?;
        Some((index, self.opened(index)?, name))
    }

    /// A watched directory, open.
    fn opened(&mut self, index: usize) -> Option<BorrowedFd<'_>> {
        if self.open.as_ref().is_none_or(|(open, _)| *open != index) {
            let Some(fd) = self.witness.directories[index].open() else {
                self.spoilt = true;
                return None;
            };
            self.open = Some((index, fd));
        }
        Some(self.open.as_ref()?.1.as_fd())
    }

    /// The place of a directory in the witness, which is made if it can be watched.
    fn place(&mut self, path: &Path) -> Option<usize> {
        if let Some(&known) = self.places.get(path.as_os_str()) {
            return known;
        }
        let place = self.watch(path);
        self.places.insert(path.as_os_str().to_owned(), place);
        place
    }

    fn watch(&mut self, path: &Path) -> Option<usize> {
        let node = self.lookup(path).ok().filter(|node| node.kind == NodeKind::Directory)?;
        let fd = open(path).ok()?;
        let device = node.identity.device;
        if !*self.devices.entry(device).or_insert_with(|| Watches::is_told_of(&fd))
            || sys::node_of(&fd).ok()?.identity != node.identity
        {
            return None;
        }
        let watch = self.witness.watches.add(&fd).ok()?;
        let index = self.witness.directories.len();
        self.witness.directories.push(Directory {
            path: path.to_owned(),
            identity: node.identity,
            asked: Vec::new(),
            changed: false,
        });
        self.witness.by_watch.entry(watch).or_default().push(index);
        self.open = Some((index, fd));
        Some(index)
    }
}

impl Facts for Recording {
    fn lookup(&self, path: &Path) -> io::Result<Node> {
        Ok(self.0.borrow_mut().lookup(path)?)
    }

    fn read_link(&self, path: &Path) -> io::Result<PathBuf> {
        let state = &mut *self.0.borrow_mut();
        let (index, answer) = match state.within(path) {
            Some((index, fd, name)) => (Some((index, name)), read_link(fd, name)),
            None => (None, read_link(CWD, path)),
        };
        let asked = Asked::Link(answer.clone());
        match index {
            Some((index, name)) => state.remember(index, name, asked),
            None => state.witness.always.push((path.to_owned(), asked)),
        }
        Ok(answer?)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<(OsString, NodeKind)>> {
        self.0.borrow_mut().spoilt = true;
        HostFacts::default().list(path)
    }

    fn links(&self, path: &Path) -> io::Result<Vec<OsString>> {
        let state = &mut *self.0.borrow_mut();
        let here = Path::new(".");
        let watched = state.place(path).and_then(|index| Some((index, state.opened(index)?)));
        let answer = match watched {
            Some((index, fd)) => {
                let answer = host::links(fd, here);
                state.remember(index, here, Asked::Links(answer.clone()));
                answer
            }
            None => {
                let answer = host::links(CWD, path);
                state.witness.always.push((path.to_owned(), Asked::Links(answer.clone())));
                answer
            }
        };
        Ok(answer?)
    }

    /// Not remembered: the kernel tells of every change to the mounts.
    fn mounts(&self) -> io::Result<Vec<Mount>> {
        HostFacts::default().mounts()
    }

    fn read_start(&self, path: &Path) -> io::Result<Vec<u8>> {
        let answer = read_start(path);
        let always = &mut self.0.borrow_mut().witness.always;
        always.push((path.to_owned(), Asked::Start(answer.clone())));
        Ok(answer?)
    }
}
