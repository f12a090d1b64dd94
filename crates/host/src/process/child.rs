//! A running program: its pid, its exit, its end.
//!
//! Its [keeper](super::keeper) signals it, reaps it and tells its exit, so that no number is signalled
//! here that may have become another process's.

use codex_exec_server_protocol::process::ProcessSignal;
use rustix::process::{Pid, Signal};

use crate::pool;
use crate::sandbox::Cleanup;

use super::descendants;
use super::keeper::{Keeper, Wish, Word};
use super::left::{Group, Left};

/// What is told of a program whose keeper was killed, which takes it along.
const KILLED: i32 = 128 + 9;

#[derive(Debug)]
pub(super) struct Child {
    /// `None` once nothing is left, or what is left is nobody's here.
    keeper: Option<Keeper>,
    pid: Pid,
    exit: Option<i32>,
    group: Group,
    left: Left,
    /// Under which number what it left behind is remembered.
    released: Option<u64>,
    /// What it may leave on the host if it is killed.
    cleanup: Option<Cleanup>,
}

impl Child {
    pub(super) fn new(keeper: Keeper, group: Group, left: Left) -> Self {
        let pid = keeper.root();
        Self { keeper: Some(keeper), pid, exit: None, group, left, released: None, cleanup: None }
    }

    /// The same, with what it may leave on the host if it is killed: removed if this is dropped
    /// before its exit was seen. Whoever releases it decides for himself.
    pub(super) fn with_cleanup(mut self, cleanup: Cleanup) -> Self {
        self.cleanup = Some(cleanup);
        self
    }

    /// It ends by itself when we do, and has to tidy up before.
    pub(super) fn tidies_up(&self) {
        if let Some(keeper) = &self.keeper {
            keeper.tidies_up();
        }
    }

    pub(super) fn pid(&self) -> Pid {
        self.pid
    }

    /// It is killed with others from now on.
    pub(super) fn regroup(&mut self, group: Group) {
        self.group = group;
    }

    /// Waits for the exit and tells its code, 128 + signal for a death by signal. Cancel safe.
    pub(super) async fn exited(&mut self) -> i32 {
        while self.exit.is_none() {
            let word = match &self.keeper {
                Some(keeper) => keeper.next().await,
                None => None,
            };
            match word {
                Some(Word::Exited { code, last }) => {
                    self.exit = Some(code);
                    if last {
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
    pub(super) async fn gone(&mut self) {
        if let Some(keeper) = &self.keeper {
            keeper.ended().await;
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
        self.wish(Wish::Signal { signal, also: foreground });
    }

    fn wish(&self, wish: Wish) {
        if let Some(keeper) = &self.keeper {
            keeper.wish(wish);
        }
    }

    /// Begins to kill the program and everything that is left of it; its end is told as any other.
    pub(super) fn begin_kill(&self) {
        let left = || self.left.one(self.group, self.released?);
        if let Some(grip) = self.keeper.as_ref().map(Keeper::grip).or_else(left) {
            pool::detached(move || descendants::end(vec![grip]));
        }
    }

    /// Kills the program and everything that is left of it, on a thread that may block.
    pub(super) async fn kill(&self) {
        if let Some(keeper) = &self.keeper {
            let grip = keeper.grip();
            let _ = pool::blocking(move || descendants::end(vec![grip])).await;
        }
    }

    /// The same, on this thread.
    pub(super) fn kill_here(&self) {
        if let Some(keeper) = &self.keeper {
            descendants::end(vec![keeper.grip()]);
        }
    }

    /// The program has exited, and nobody asks for what it left behind any more: that is killed with
    /// its group.
    pub(super) fn release(&mut self) {
        self.cleanup = None;
        if let Some(keeper) = self.keeper.take() {
            self.released = Some(self.left.add(self.group, keeper));
        }
    }
}

/// An owner that ends without having released it leaves nothing running, and nothing behind.
impl Drop for Child {
    fn drop(&mut self) {
        self.kill_here();
        if let Some(cleanup) = self.cleanup.take().filter(|cleanup| !cleanup.is_empty()) {
            cleanup.run();
        }
    }
}
