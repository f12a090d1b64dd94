//! A running program: its pid, its exit, and killing it.
//!
//! Its [keeper](super::keeper) signals it, reaps it and reports its exit, so this code never signals a
//! pid that may have been reused.

use codex_exec_server_protocol::process::ProcessSignal;
use rustix::process::{Pid, Signal};

use crate::pool;
use crate::sandbox::Cleanup;

use super::descendants;
use super::keeper::{Control, Keeper, Report, Used};
use super::leftovers::{Group, Leftovers};
use super::limits::{Limited, Prepared};

/// Exit code of a program whose keeper was killed, which kills the program too.
const KILLED: i32 = 128 + 9;

#[derive(Debug)]
pub(super) struct Child {
    /// `None` once no process is left, or after `release`.
    keeper: Option<Keeper>,
    pid: Pid,
    exit: Option<i32>,
    /// A signal killed it.
    signalled: bool,
    /// What it and its descendants used until its exit.
    used: Option<Used>,
    group: Group,
    leftovers: Leftovers,
    /// Id of its leftovers in `leftovers`.
    released: Option<u64>,
    /// What a killed sandbox may leave on the host.
    cleanup: Option<Cleanup>,
}

impl Child {
    pub(super) fn new(keeper: Keeper, group: Group, leftovers: Leftovers) -> Self {
        let pid = keeper.root();
        Self {
            keeper: Some(keeper),
            pid,
            exit: None,
            signalled: false,
            used: None,
            group,
            leftovers,
            released: None,
            cleanup: None,
        }
    }

    /// Sets what a killed sandbox may leave on the host. `Drop` removes it if the exit was not seen;
    /// after `release` that is up to the caller.
    pub(super) fn with_cleanup(mut self, cleanup: Cleanup) -> Self {
        self.cleanup = Some(cleanup);
        self
    }

    /// Marks that the program exits by itself when this process does, and must clean up before that.
    pub(super) fn set_cleans_up(&self) {
        if let Some(keeper) = &self.keeper {
            keeper.set_cleans_up();
        }
    }

    pub(super) fn pid(&self) -> Pid {
        self.pid
    }

    /// Changes the group that it is killed with.
    pub(super) fn set_group(&mut self, group: Group) {
        self.group = group;
    }

    /// Waits for the exit; returns its code, 128 + signal number if a signal killed it. Cancel safe.
    pub(super) async fn wait_exit(&mut self) -> i32 {
        while self.exit.is_none() {
            let report = match &self.keeper {
                Some(keeper) => keeper.next().await,
                None => None,
            };
            match report {
                Some(Report::Exited { code, signalled, nothing_left, used }) => {
                    (self.exit, self.signalled, self.used) = (Some(code), signalled, Some(used));
                    if nothing_left {
                        self.keeper = None;
                    }
                }
                Some(_) => {}
                None => {
                    (self.exit, self.signalled) = (Some(KILLED), true);
                    self.keeper = None;
                }
            }
        }
        self.exit.unwrap_or(KILLED)
    }

    /// Whether a signal killed it, after the exit was seen.
    pub(super) fn signalled(&self) -> bool {
        self.signalled
    }

    /// What it and its descendants used until its exit; `None` if its keeper was killed.
    pub(super) fn used(&self) -> Option<Used> {
        self.used
    }

    /// Has a limit watch over it and its descendants until none is left.
    pub(super) fn watch(&mut self, limits: Prepared) -> Limited {
        let (guard, limited) = limits.start(self.keeper.as_ref().map(Keeper::handle));
        if let Some(keeper) = &mut self.keeper {
            keeper.set_guard(guard);
        }
        limited
    }

    /// Waits until the last descendant has exited, after the exit was seen. Cancel safe.
    pub(super) async fn wait_gone(&mut self) {
        if let Some(keeper) = &self.keeper {
            keeper.wait_ended().await;
        }
        self.keeper = None;
    }

    /// Signals the process group, and the terminal's foreground group if that is another.
    pub(super) fn signal(&self, signal: ProcessSignal, foreground: Option<Pid>) {
        let signal = match signal {
            ProcessSignal::Interrupt => Signal::INT,
            ProcessSignal::Terminate => Signal::TERM,
            ProcessSignal::Kill => Signal::KILL,
            ProcessSignal::Hangup => Signal::HUP,
            ProcessSignal::Quit => Signal::QUIT,
            ProcessSignal::User1 => Signal::USR1,
            ProcessSignal::User2 => Signal::USR2,
            ProcessSignal::Stop => Signal::STOP,
            ProcessSignal::Continue => Signal::CONT,
        };
        self.send(Control::Signal { signal, also: foreground });
    }

    fn send(&self, control: Control) {
        if let Some(keeper) = &self.keeper {
            keeper.send(control);
        }
    }

    /// Starts to kill the program and its descendants; the exit is reported as usual.
    pub(super) fn begin_kill(&self) {
        let released = || self.leftovers.get(self.group, self.released?);
        if let Some(handle) = self.keeper.as_ref().map(Keeper::handle).or_else(released) {
            pool::spawn_detached(move || descendants::kill_all(vec![handle]));
        }
    }

    /// Kills the program and its descendants, on a thread that may block.
    pub(super) async fn kill(&self) {
        if let Some(keeper) = &self.keeper {
            let handle = keeper.handle();
            let _ = pool::blocking(move || descendants::kill_all(vec![handle])).await;
        }
    }

    /// Kills the program and its descendants on this thread.
    pub(super) fn kill_blocking(&self) {
        if let Some(keeper) = &self.keeper {
            descendants::kill_all(vec![keeper.handle()]);
        }
    }

    /// Hands the leftovers of an exited program to its group, which they are killed with.
    pub(super) fn release(&mut self) {
        self.cleanup = None;
        if let Some(keeper) = self.keeper.take() {
            self.released = Some(self.leftovers.add(self.group, keeper));
        }
    }
}

/// An owner that drops it without `release` leaves no process running and nothing on the host.
impl Drop for Child {
    fn drop(&mut self) {
        self.kill_blocking();
        if let Some(cleanup) = self.cleanup.take().filter(|cleanup| !cleanup.is_empty()) {
            cleanup.run();
        }
    }
}
