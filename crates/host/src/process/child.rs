//! A running process: its pid, its exit, its end.
//!
//! Invariant: the pid is signalled only while it is ours. It stays ours, as a zombie at least,
//! until [`Child::reap`]; and as long as it is ours its number can be no other process's pid, group
//! or session.

use std::io;
use std::os::fd::OwnedFd;

use codex_exec_server_protocol::process::ProcessSignal;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};
use tokio::io::unix::AsyncFd;

use super::descendants;
use super::readiness::register;
use super::spawn::Spawned;
use super::warden::Warden;

#[derive(Debug)]
pub(super) struct Child {
    pid: Pid,
    pidfd: AsyncFd<OwnedFd>,
    reaped: bool,
    warden: Warden,
}

impl Child {
    pub(super) fn new(spawned: Spawned, warden: Warden) -> io::Result<Self> {
        warden.started(spawned.pid);
        let pid = Pid::from_raw(spawned.pid).ok_or(io::ErrorKind::InvalidData)?;
        let pidfd = register(spawned.pidfd)?;
        Ok(Self { pid, pidfd, reaped: false, warden })
    }

    pub(super) fn pid(&self) -> Pid {
        self.pid
    }

    /// Waits for the exit and tells its code, 128 + signal for a death by signal. The process is
    /// not reaped by this. Cancel safe.
    pub(super) async fn exited(&mut self) -> i32 {
        loop {
            let ready = self.pidfd.readable().await;
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
            match rustix::process::waitid(WaitId::Pid(self.pid), options) {
                Ok(Some(status)) => {
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
                    tracing::error!(%error, pid = %self.pid.as_raw_nonzero(), "lost an exit status");
                    self.reaped = true;
                    self.warden.reaped(self.pid.as_raw_nonzero().get());
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
        if self.reaped {
            return;
        }
        for group in [Some(self.pid), foreground.filter(|&group| group != self.pid)] {
            if let Some(group) = group
                && let Err(error) = rustix::process::kill_process_group(group, signal)
            {
                tracing::debug!(%error, "could not signal a process group");
            }
        }
    }

    /// Kills the process, its group and every descendant, on a thread that may block.
    pub(super) async fn kill_tree(&self) {
        if !self.reaped {
            let pid = self.pid;
            let _ = tokio::task::spawn_blocking(move || descendants::kill_tree(pid)).await;
        }
    }

    /// Takes the exited process away; its pid is not ours any more.
    pub(super) fn reap(&mut self) {
        if !std::mem::replace(&mut self.reaped, true) {
            let _ = rustix::process::waitid(WaitId::Pid(self.pid), WaitIdOptions::EXITED);
            self.warden.reaped(self.pid.as_raw_nonzero().get());
        }
    }
}

/// An owner that ends without having seen the exit leaves nothing running.
impl Drop for Child {
    fn drop(&mut self) {
        if !self.reaped {
            descendants::kill_tree(self.pid);
            self.reap();
        }
    }
}
