//! A running process: its pid, its exit, its end.
//!
//! Invariant: the pid is signalled only while it is ours. It stays ours, as a zombie at least,
//! until [`Child::reap`]; and as long as it is ours its number can be no other process's pid, group
//! or session.

use std::io;
use std::os::fd::OwnedFd;

use codex_exec_server_protocol::process::ProcessSignal;
use codex_linux_sandbox::Cleanup;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};
use tokio::io::unix::AsyncFd;

use super::descendants;
use super::orphans::{Group, Orphans};
use super::readiness::register;
use super::spawn::Spawned;
use super::warden::Warden;

#[derive(Debug)]
pub(super) struct Child {
    held: Held,
    pidfd: AsyncFd<OwnedFd>,
}

/// The hold on a process that is ours to reap.
#[derive(Debug)]
struct Held {
    pid: Pid,
    reaped: bool,
    warden: Warden,
    orphans: Orphans,
    /// What it may leave on the host if it is killed.
    cleanup: Option<Cleanup>,
}

impl Child {
    pub(super) fn new(spawned: Spawned, warden: Warden, orphans: Orphans) -> io::Result<Self> {
        let pid = Pid::from_raw(spawned.pid).ok_or(io::ErrorKind::InvalidData)?;
        let held = Held { pid, reaped: false, warden, orphans, cleanup: None };
        Ok(Self { pidfd: register(spawned.pidfd)?, held })
    }

    /// The same, with what it may leave on the host if it is killed: removed if this is dropped
    /// before its exit was seen. Whoever reaps it decides for himself.
    pub(super) fn with_cleanup(mut self, cleanup: Cleanup) -> Self {
        self.held.cleanup = Some(cleanup);
        self
    }

    /// It ends by itself when we do, and has to tidy up before.
    pub(super) fn tidies_up(&self) {
        self.held.warden.tidies_up(self.held.pid);
    }

    pub(super) fn pid(&self) -> Pid {
        self.held.pid
    }

    /// It is killed with others from now on.
    pub(super) fn regroup(&self, group: Group) {
        self.held.orphans.regroup(self.held.pid, group);
    }

    /// Waits for the exit and tells its code, 128 + signal for a death by signal. The process is
    /// not reaped by this. Cancel safe.
    pub(super) async fn exited(&mut self) -> i32 {
        let pid = self.held.pid;
        loop {
            let ready = self.pidfd.readable().await;
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
            match rustix::process::waitid(WaitId::Pid(pid), options) {
                Ok(Some(status)) => {
                    // Before anybody is told, so that whoever is finds its orphans accounted for.
                    self.held.orphans.exited(pid);
                    let signal = status.terminating_signal();
                    return status
                        .exit_status()
                        .or(signal.map(|signal| 128 + signal))
                        .unwrap_or(-1);
                }
                Ok(None) => {
                    if let Ok(mut ready) = ready {
                        ready.clear_ready();
                    }
                }
                // Somebody else waited for our child; all that is left to say is that it has gone.
                Err(error) => {
                    tracing::error!(%error, pid = %pid.as_raw_nonzero(), "lost an exit status");
                    self.held.reap();
                    return -1;
                }
            }
        }
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
        if self.held.reaped {
            return;
        }
        let own = self.held.pid;
        for group in [Some(own), foreground.filter(|&group| group != own)] {
            if let Some(group) = group
                && let Err(error) = rustix::process::kill_process_group(group, signal)
            {
                tracing::debug!(%error, "could not signal a process group");
            }
        }
    }

    /// Kills the process, its group and every descendant, on a thread that may block.
    pub(super) async fn kill_tree(&self) {
        if !self.held.reaped {
            let pid = self.held.pid;
            let _ = tokio::task::spawn_blocking(move || descendants::kill_tree(pid)).await;
        }
    }

    /// The same, on this thread.
    pub(super) fn kill_tree_here(&self) {
        if !self.held.reaped {
            descendants::kill_tree(self.held.pid);
        }
    }

    /// Takes the exited process away; its pid is not ours any more.
    pub(super) fn reap(&mut self) {
        self.held.reap();
    }
}

impl Held {
    fn reap(&mut self) {
        if !std::mem::replace(&mut self.reaped, true) {
            // First, because with the reaping the number is anybody's.
            self.warden.reaped(self.pid);
            self.orphans.reaped(self.pid);
            let _ = rustix::process::waitid(WaitId::Pid(self.pid), WaitIdOptions::EXITED);
        }
    }
}

/// An owner that ends without having seen the exit leaves nothing running, and nothing behind.
impl Drop for Held {
    fn drop(&mut self) {
        if self.reaped {
            return;
        }
        descendants::kill_tree(self.pid);
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let _ = rustix::process::waitid(WaitId::Pid(self.pid), options);
        self.orphans.exited(self.pid);
        self.reap();
        if let Some(cleanup) = self.cleanup.take().filter(|cleanup| !cleanup.is_empty()) {
            cleanup.run();
        }
    }
}
