//! A running program: its pid, its exit, its end.
//!
//! Its [keeper](super::keeper) signals it, reaps it and tells its exit, so that no number is signalled
//! here that may have become another process's.

use codex_exec_server_protocol::process::ProcessSignal;
use rustix::process::{Pid, Signal};

use crate::pool;
use crate::sandbox::Cleanup;

use super::descendants;
use super::keeper::{Control, Keeper, Report};
use super::leftovers::{Group, Leftovers};

/// What is told of a program whose keeper was killed, which takes it along.
const KILLED: i32 = 128 + 9;

#[derive(Debug)]
pub(super) struct Child {
    /// `None` once nothing is left, or what is left is nobody's here.
    keeper: Option<Keeper>,
    pid: Pid,
    exit: Option<i32>,
    group: Group,
    leftovers: Leftovers,
    /// Under which number what it left behind is remembered.
    released: Option<u64>,
    /// What it may leave on the host if it is killed.
    cleanup: Option<Cleanup>,
}

impl Child {
    pub(super) fn new(keeper: Keeper, group: Group, leftovers: Leftovers) -> Self {
        let pid = keeper.root();
        Self {
            keeper: Some(keeper),
            pid,
            exit: None,
            group,
            leftovers,
            released: None,
            cleanup: None,
        }
    }

    /// The same, with what it may leave on the host if it is killed: removed if this is dropped
    /// before its exit was seen. Whoever releases it decides for himself.
    pub(super) fn with_cleanup(mut self, cleanup: Cleanup) -> Self {
        self.cleanup = Some(cleanup);
        self
    }

    /// It ends by itself when we do, and has to tidy up before.
    pub(super) fn set_cleans_up(&self) {
        if let Some(keeper) = &self.keeper {
            keeper.set_cleans_up();
        }
    }

    pub(super) fn pid(&self) -> Pid {
        self.pid
    }

    /// It is killed with others from now on.
    pub(super) fn set_group(&mut self, group: Group) {
        self.group = group;
    }

    /// Waits for the exit and tells its code, 128 + signal for a death by signal. Cancel safe.
    pub(super) async fn wait_exit(&mut self) -> i32 {
        while self.exit.is_none() {
            let report = match &self.keeper {
                Some(keeper) => keeper.next().await,
                None => None,
            };
            match report {
                Some(Report::Exited { code, nothing_left }) => {
                    self.exit = Some(code);
                    if nothing_left {
                        self.keeper = None;
                    }
                }
                Some(_) => {}
                None => {
                    self.exit = Some(KILLED);
                    self.keeper = None;
                }
            }
        }
        self.exit.unwrap_or(KILLED)
    }

    /// Waits until nothing is left of it, once its exit was seen. Cancel safe.
    pub(super) async fn wait_gone(&mut self) {
        if let Some(keeper) = &self.keeper {
            keeper.wait_ended().await;
        }
        self.keeper = None;
    }

    /// Signals the process group, and that in the foreground of its terminal if it is another.
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

    /// Begins to kill the program and everything that is left of it; its end is told as any other.
    pub(super) fn begin_kill(&self) {
        let released = || self.leftovers.get(self.group, self.released?);
        if let Some(handle) = self.keeper.as_ref().map(Keeper::handle).or_else(released) {
            pool::spawn_detached(move || descendants::kill_all(vec![handle]));
        }
    }

    /// Kills the program and everything that is left of it, on a thread that may block.
    pub(super) async fn kill(&self) {
        if let Some(keeper) = &self.keeper {
            let handle = keeper.handle();
            let _ = pool::blocking(move || descendants::kill_all(vec![handle])).await;
        }
    }

    /// The same, on this thread.
    pub(super) fn kill_blocking(&self) {
        if let Some(keeper) = &self.keeper {
            descendants::kill_all(vec![keeper.handle()]);
        }
    }

    /// The program has exited, and nobody asks for what it left behind any more: that is killed with
    /// its group.
    pub(super) fn release(&mut self) {
        self.cleanup = None;
        if let Some(keeper) = self.keeper.take() {
            self.released = Some(self.leftovers.add(self.group, keeper));
        }
    }
}

/// An owner that ends without having released it leaves nothing running, and nothing behind.
impl Drop for Child {
    fn drop(&mut self) {
        self.kill_blocking();
        if let Some(cleanup) = self.cleanup.take().filter(|cleanup| !cleanup.is_empty()) {
            cleanup.run();
        }
    }
}
