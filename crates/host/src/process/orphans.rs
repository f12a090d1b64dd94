//! Processes that outlived the one that started them.
//!
//! A server that owns its process is the reaper of all below it: when a process it started has
//! exited, what that left behind becomes the server's own child. It is remembered under its owner,
//! killed with it, and reaped. Being our children, orphans keep their pids until we reap them.
//!
//! Whose orphan is it? That of the process whose (Unix) session it is in; else that of the only one
//! that has exited since the last look; else nobody's in particular, and it is killed with the
//! server only: better to leave a daemon than to kill that of another client. Orphans are kept by
//! [`Group`], not by process: they live as long as the group that started them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use rustix::process::{Pid, WaitId, WaitIdOptions};

use super::descendants;

/// Processes that are killed together in the end: those of one client's session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Group(pub u64);

/// All orphans of a host.
#[derive(Debug, Clone, Default)]
pub(super) struct Orphans(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// Whether this process adopts orphans at all.
    adopting: bool,
    /// Children of ours that are none (the warden).
    ignored: Vec<Pid>,
    /// Every adopted orphan and the group it is kept under.
    owners: HashMap<Pid, Option<Group>>,
    /// Processes that exited since the last look. Not reaped before it, so their pids are theirs.
    exited: Vec<(Pid, Group)>,
}

impl Orphans {
    /// Becomes the reaper of this process's descendants and reaps adopted ones as they exit.
    ///
    /// To be called from a runtime, by a program that has no other use for its children.
    pub(super) fn adopt_all(&self) -> std::io::Result<()> {
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
        self.lock().adopting = true;
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

    /// A child that is no orphan.
    pub(super) fn ignore(&self, pid: Pid) {
        let mut state = self.lock();
        state.ignored.push(pid);
    }

    /// A process that we started has exited and is not reaped yet: look for what it left behind.
    pub(super) fn exited(&self, process: Pid, group: Group) {
        let mut state = self.lock();
        if state.adopting {
            state.exited.push((process, group));
            state.look();
        }
    }

    /// Kills what processes of `group` left behind.
    pub(super) fn kill_of(&self, group: Group) {
        self.kill(|of| of == Some(group));
    }

    /// Kills every orphan.
    pub(super) fn kill_all(&self) {
        self.kill(|_| true);
    }

    fn kill(&self, whose: impl Fn(Option<Group>) -> bool) {
        // Killing one may hand us its children: go on until none is left.
        for _ in 0..32 {
            let mut state = self.lock();
            state.look();
            let doomed: Vec<Pid> =
                state.owners.iter().filter(|&(_, of)| whose(*of)).map(|(&pid, _)| pid).collect();
            if doomed.is_empty() {
                break;
            }
            for &pid in &doomed {
                // Its descendants first, while they hang below it.
                descendants::kill_tree(pid);
                let _ = rustix::process::waitid(WaitId::Pid(pid), WaitIdOptions::EXITED);
                state.gone(pid);
            }
        }
    }

    fn reap(&self) {
        let mut state = self.lock();
        state.look();
        let known: Vec<Pid> = state.owners.keys().copied().collect();
        for pid in known {
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
            if let Ok(Some(_)) = rustix::process::waitid(WaitId::Pid(pid), options) {
                state.gone(pid);
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl State {
    /// Finds new orphans. The kernel hands them to the main thread, which starts no process itself
    /// but the warden.
    fn look(&mut self) {
        if !self.adopting {
            return;
        }
        let own = rustix::process::getpid().as_raw_nonzero();
        let Ok(list) = std::fs::read_to_string(format!("/proc/self/task/{own}/children")) else {
            return;
        };
        for pid in descendants::parse_pids(&list) {
            if self.owners.contains_key(&pid) || self.ignored.contains(&pid) {
                continue;
            }
            let session = rustix::process::getsid(Some(pid)).ok();
            let by_session = self.exited.iter().find(|(leader, _)| Some(*leader) == session);
            let group = match (by_session, self.exited.as_slice()) {
                (Some((_, group)), _) | (None, [(_, group)]) => Some(*group),
                _ => None,
            };
            self.owners.insert(pid, group);
        }
        self.exited.clear();
    }

    /// An orphan was reaped; what it leaves behind is its group's too.
    fn gone(&mut self, pid: Pid) {
        if let Some(group) = self.owners.remove(&pid).flatten() {
            self.exited.push((pid, group));
        }
        self.look();
    }
}
