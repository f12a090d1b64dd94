//! Processes that outlived the one that started them.
//!
//! A server that owns its process is the reaper of all below it: when a process it started has
//! exited, what that left behind becomes the server's own child. It is remembered under the group
//! of whoever left it, killed with that, announced to the warden, and reaped. Being our children,
//! orphans keep their pids until we reap them.
//!
//! Whose orphan is it? That of the process whose (Unix) session it is in. Else that of the process
//! that has just died: it became our child at that death, and whoever died since the last look and
//! may have left it is still there as a zombie (or was started a moment ago and is not known yet). If
//! those are of several groups, nobody's in particular, and it is killed with the server only: better to leave a daemon than to kill that of
//! another client.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};

use rustix::process::{Pid, WaitId, WaitIdOptions};

use super::descendants::{self, Stat};
use super::warden::Warden;

/// Processes that are killed together in the end: those of one client's session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Group(pub u64);

/// All orphans of a host.
#[derive(Debug, Clone, Default)]
pub(super) struct Orphans(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// The kernel's list of our children, if this process adopts orphans at all.
    children: Option<File>,
    /// Who is told of them.
    warden: Option<Warden>,
    /// Children of ours that are none (the warden).
    ignored: HashSet<Pid>,
    /// Processes that are being started: they may run, and be dead already, before we learn their
    /// pids.
    starting: Vec<Group>,
    /// What we started ourselves and did not reap yet.
    started: HashMap<Pid, Started>,
    orphans: HashMap<Pid, Orphan>,
}

#[derive(Debug)]
struct Started {
    group: Group,
    /// It has exited, and what it left behind was looked for since.
    settled: bool,
}

#[derive(Debug)]
struct Orphan {
    group: Option<Group>,
    /// Somebody is killing it, and will reap it.
    doomed: bool,
}

impl Orphans {
    /// Becomes the reaper of this process's descendants and reaps adopted ones as they exit.
    ///
    /// To be called from a runtime, by a program that has no other use for its children.
    pub(super) fn adopt_all(&self) -> io::Result<()> {
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
        let own = rustix::process::getpid().as_raw_nonzero();
        let children = File::open(format!("/proc/self/task/{own}/children"))?;
        self.lock().children = Some(children);
        let mut signals = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::child())?;
        let orphans = Arc::downgrade(&self.0);
        tokio::spawn(async move {
            while signals.recv().await.is_some() {
                let Some(state) = orphans.upgrade() else { break };
                Orphans(state).reap();
            }
        });
        Ok(())
    }

    /// Announces orphans there from now on.
    pub(super) fn announce_to(&self, warden: Warden) {
        self.lock().warden = Some(warden);
    }

    /// A child that is no orphan.
    pub(super) fn ignore(&self, pid: Pid) {
        let mut state = self.lock();
        state.ignored.insert(pid);
        // A look in between may have taken it for one.
        state.orphans.remove(&pid);
    }

    /// That child was reaped.
    pub(super) fn ignore_no_more(&self, pid: Pid) {
        self.lock().ignored.remove(&pid);
    }

    /// We are about to start a process.
    pub(super) fn starting(&self, group: Group) {
        let mut state = self.lock();
        if state.children.is_some() {
            state.starting.push(group);
        }
    }

    /// We have started it, or have not.
    pub(super) fn started(&self, group: Group, pid: Option<Pid>) {
        let mut state = self.lock();
        if let Some(at) = state.starting.iter().position(|starting| *starting == group) {
            state.starting.swap_remove(at);
            if let Some(pid) = pid {
                state.started.insert(pid, Started { group, settled: false });
            }
        }
    }

    /// A process that we started is of another group from now on.
    pub(super) fn regroup(&self, pid: Pid, group: Group) {
        if let Some(started) = self.lock().started.get_mut(&pid) {
            started.group = group;
        }
    }

    /// A process that we started has exited and is not reaped yet: look for what it left behind.
    pub(super) fn exited(&self, pid: Pid) {
        let mut state = self.lock();
        if state.children.is_some() {
            state.look();
            if let Some(started) = state.started.get_mut(&pid) {
                started.settled = true;
            }
            // Of those that were dead by then nobody is told again.
            state.bury_dead();
        }
    }

    /// A process that we started is about to be reaped.
    pub(super) fn reaped(&self, pid: Pid) {
        self.lock().started.remove(&pid);
    }

    /// Kills what processes of `group` left behind.
    pub(super) fn kill_of(&self, group: Group) {
        self.kill(|of| of == Some(group));
    }

    /// Kills every orphan.
    pub(super) fn kill_all(&self) {
        self.kill(|_| true);
    }

    /// Blocks, but nobody else: the lock is not held while something dies.
    fn kill(&self, whose: impl Fn(Option<Group>) -> bool) {
        // Killing one may hand us its children: go on until none is left.
        for _ in 0..32 {
            let doomed = self.lock().doom(&whose);
            if doomed.is_empty() {
                break;
            }
            for &pid in &doomed {
                descendants::kill_tree(pid);
                let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
                let _ = rustix::process::waitid(WaitId::Pid(pid), options);
            }
            self.lock().bury(&doomed);
        }
    }

    fn reap(&self) {
        // What is no orphan is looked after by its owner, also for what it left behind.
        self.lock().bury_dead();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl State {
    /// Finds new orphans. The kernel hands them to the main thread, which starts no process itself
    /// but the warden.
    fn look(&mut self) {
        let Some(Ok(list)) = self.children.as_ref().map(read_whole) else { return };
        let mut new = descendants::parse_pids(&list);
        new.retain(|pid| {
            !self.orphans.contains_key(pid)
                && !self.ignored.contains(pid)
                && !self.started.contains_key(pid)
        });
        if new.is_empty() {
            return;
        }
        let left_by = self.dead_group();
        for pid in new {
            let stat = Stat::of(pid);
            let session = stat.as_ref().and_then(|stat| stat.session);
            let group = session.and_then(|session| self.group_of(session)).or(left_by);
            tracing::debug!(pid = %pid.as_raw_nonzero(), ?group, "adopted an orphan");
            self.orphans.insert(pid, Orphan { group, doomed: false });
            if let Some(warden) = &self.warden
                && let Some(stat) = stat
            {
                warden.adopted(pid, stat.start);
            }
        }
    }

    /// The group of everybody who may have left an orphan just now, if it is one.
    fn dead_group(&self) -> Option<Group> {
        let started = self.started.iter().filter(|(_, started)| !started.settled);
        let started = started.map(|(&pid, started)| (pid, Some(started.group)));
        let orphans = self.orphans.iter().map(|(&pid, orphan)| (pid, orphan.group));
        let dead = started.chain(orphans).filter(|(pid, _)| is_zombie(*pid));
        let mut groups =
            dead.map(|(_, group)| group).chain(self.starting.iter().copied().map(Some));
        let first = groups.next()?;
        groups.all(|group| group == first).then_some(first)?
    }

    /// The group of the leader of a session. As long as the session has a member, its number can be
    /// no other process's pid.
    fn group_of(&self, leader: Pid) -> Option<Group> {
        let started = self.started.get(&leader).map(|started| started.group);
        started.or_else(|| self.orphans.get(&leader)?.group)
    }

    fn doom(&mut self, whose: impl Fn(Option<Group>) -> bool) -> Vec<Pid> {
        self.look();
        let chosen = self.orphans.iter_mut().filter(|(_, o)| !o.doomed && whose(o.group));
        chosen
            .map(|(&pid, orphan)| {
                orphan.doomed = true;
                pid
            })
            .collect()
    }

    /// Reaps the orphans that are dead and those that they leave behind dead.
    fn bury_dead(&mut self) {
        loop {
            let orphans = self.orphans.iter();
            let dead = orphans.filter(|(pid, orphan)| !orphan.doomed && is_zombie(**pid));
            let dead: Vec<Pid> = dead.map(|(&pid, _)| pid).collect();
            if dead.is_empty() {
                break;
            }
            self.bury(&dead);
        }
    }

    /// Reaps dead orphans, after a look at what they left behind in turn.
    fn bury(&mut self, dead: &[Pid]) {
        self.look();
        for &pid in dead {
            // First, because with the reaping the number is anybody's.
            if let Some(warden) = &self.warden {
                warden.reaped(pid);
            }
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
            let _ = rustix::process::waitid(WaitId::Pid(pid), options);
            self.orphans.remove(&pid);
        }
    }
}

/// Reads a file of the kernel's from its beginning, in as few calls as that takes.
fn read_whole(file: &File) -> io::Result<String> {
    let (mut text, mut buffer) = (Vec::new(), [0; 4096]);
    loop {
        match file.read_at(&mut buffer, text.len() as u64) {
            Ok(0) => return String::from_utf8(text).map_err(io::Error::other),
            Ok(len) => text.extend_from_slice(&buffer[..len]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Whether a child of ours has exited.
fn is_zombie(pid: Pid) -> bool {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    matches!(rustix::process::waitid(WaitId::Pid(pid), options), Ok(Some(_)))
}
