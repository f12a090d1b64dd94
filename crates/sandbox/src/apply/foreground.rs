//! A sandbox in the foreground: it uses the streams, terminal, process group and signals of this
//! process, like a command started by a shell.
//!
//! Invariant: the sandbox ends when this process does, and a signal to this process reaches the target.
//! While the target is stopped so is this process, so that the shell gets its terminal back; and the
//! target resumes when this process does. Nothing inside can signal the rest of the group: Landlock
//! confines signals, and before Linux 6.12 the sandbox gets its own session and group.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::Pid;

use super::{landlock, outer, sys};
use crate::launch::Launch;
use crate::network::{NetworkDescriptors, NetworkReceiver};
use crate::reentry;
use crate::status::Failure;

/// The first Landlock version that confines signals.
const SIGNAL_SCOPING_ABI: u32 = 6;

impl Launch {
    /// Runs the sandbox to completion as part of this process's job. Returns the exit code, 128 +
    /// signal number if a signal killed it; or why it did not run.
    ///
    /// For a program that does nothing else: it blocks signals until it returns, and no other thread
    /// must receive them.
    pub fn run_in_foreground(self) -> io::Result<Result<i32, Failure>> {
        self.serve_in_foreground(drop)
    }

    /// Like [`Launch::run_in_foreground`], for a request with a managed network: calls `serve` with its
    /// sockets once the command runs. Signals are blocked in this thread then, and so in every thread that
    /// `serve` starts.
    pub fn serve_in_foreground(
        mut self,
        serve: impl FnOnce(NetworkDescriptors),
    ) -> io::Result<Result<i32, Failure>> {
        self.args.push(reentry::FOREGROUND.into());
        let own_session = landlock::abi() < SIGNAL_SCOPING_ABI;
        let terminal = Foreground::of_this_group();
        let signals = Signals::hold();
        let child = self.spawn(own_session)?;
        let Self { descriptors, status, cleanup, network, .. } = self;
        drop(descriptors);
        let failure = status.wait()?;
        let network = network.filter(|_| failure.is_none()).map(NetworkReceiver::receive);
        // Without it the command was killed before it ran; its exit says so.
        if let Some(Ok(network)) = network {
            serve(network);
        }
        let code = signals.forward_until_exit(&child, own_session);
        if code.is_killed {
            cleanup.run();
        }
        terminal.reclaim(code.is_killed);
        Ok(failure.map_or(Ok(code.number), Err))
    }

    fn spawn(&self, own_session: bool) -> io::Result<Child> {
        let mut command = Command::new(self.program.name_after_fork());
        command.arg0(&self.args[0]).args(&self.args[1..]).current_dir("/");
        command.env_clear().envs(self.env.iter().map(|(name, value)| (name, value)));
        let end = self.descriptors.iter().map(|passed| passed.number + 1).max().unwrap_or(0);
        let mut moves: Vec<(RawFd, RawFd)> =
            self.descriptors.iter().map(|passed| (passed.fd.as_raw_fd(), passed.number)).collect();
        let place = move || {
            // Move the descriptors away from the target numbers first.
            for (fd, _) in &mut moves {
                // SAFETY: no pointers; a closed number is answered with an error.
                *fd = check(unsafe { libc::fcntl(*fd, libc::F_DUPFD_CLOEXEC, end) })?;
            }
            for (fd, number) in &moves {
                // SAFETY: no pointers.
                check(unsafe { libc::dup2(*fd, *number) })?;
            }
            if own_session {
                // SAFETY: always defined.
                check(unsafe { libc::setsid() })?;
            }
            Ok(())
        };
        // SAFETY: between fork and exec it makes system calls only, and allocates nothing.
        unsafe { command.pre_exec(place) }.spawn()
    }
}

fn check(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// How a child ended.
struct Exit {
    number: i32,
    is_killed: bool,
}

/// Blocks the signals of this process, to receive them one by one. Those by which a terminal stops a
/// job keep their effect, and SIGCONT takes effect in any case.
struct Signals {
    held: libc::sigset_t,
    before: libc::sigset_t,
}

impl Signals {
    fn hold() -> Self {
        // SAFETY: the sets are filled before they are used, and the default action is always valid.
        unsafe {
            // If SIGCHLD were ignored, there would be nothing to wait for.
            libc::signal(libc::SIGCHLD, libc::SIG_DFL);
            let (mut held, mut before) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&raw mut held);
            for stopping in [libc::SIGTSTP, libc::SIGTTIN, libc::SIGTTOU] {
                libc::sigdelset(&raw mut held, stopping);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const held, &raw mut before);
            Self { held, before }
        }
    }

    fn forward_until_exit(&self, child: &Child, own_session: bool) -> Exit {
        let pid = child.id() as i32;
        let mut holder = None;
        loop {
            let mut status = 0;
            // SAFETY: the status lives across the call.
            let waited = unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) };
            if waited == pid {
                let is_killed = libc::WIFSIGNALED(status);
                return Exit { number: outer::exit_code(status), is_killed };
            }
            // SAFETY: plain data that the call below fills in.
            let mut info = unsafe { std::mem::zeroed::<libc::siginfo_t>() };
            // SAFETY: both live across the call; all of the set is blocked, so none is missed.
            let signal = unsafe { libc::sigwaitinfo(&raw const self.held, &raw mut info) };
            if signal == STOPPED && info.si_code == libc::SI_QUEUE {
                // SAFETY: a queued signal has a sender and a value.
                let (sender, target) = unsafe { (info.si_pid(), info.si_value().sival_ptr) };
                if sender == pid && is_stopped(target as usize as i32) {
                    holder = stop();
                }
                continue;
            }
            if signal == libc::SIGCONT {
                self.discard_stop_signals();
                resume_target(pid, holder.take());
                continue;
            }
            // A terminal signals the whole group.
            let is_ours_alone = info.si_code <= 0 || own_session;
            if signal > 0 && signal != libc::SIGCHLD && is_ours_alone {
                // SAFETY: no pointers; the child was not reaped, so the number is its own.
                unsafe { libc::kill(pid, signal) };
            }
        }
    }

    /// Discards stop reports from before this process was resumed: the target is resumed too.
    fn discard_stop_signals(&self) {
        let none = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the set is filled before it is used; nothing is written; all of it is blocked.
        unsafe {
            let mut stops = std::mem::zeroed();
            libc::sigemptyset(&raw mut stops);
            libc::sigaddset(&raw mut stops, STOPPED);
            libc::sigtimedwait(&raw const stops, std::ptr::null_mut(), &raw const none);
        }
    }
}

/// The signal by which the outer process reports, with the target's pid, that the target has stopped.
/// By default it is ignored.
const STOPPED: i32 = libc::SIGURG;

/// What SIGCONT travels as on the way in, queued, with SIGCONT as its value (outer) or error (inner): unlike SIGCONT,
/// it does not merge with one that the shell has sent to the group.
pub(super) fn resume_signal() -> i32 {
    libc::SIGRTMAX()
}

/// Stops this process because the target has stopped, so that the shell takes its terminal back. When
/// resumed, returns the previous foreground group, if that is a group inside.
fn stop() -> Option<Pid> {
    let holder = rustix::termios::tcgetpgrp(rustix::stdio::stdin()).ok();
    // SAFETY: no pointers.
    unsafe { libc::kill(libc::getpid(), libc::SIGSTOP) };
    holder.filter(|holder| Some(*holder) != own_group())
}

/// Resumes the target, and gives it the terminal back if this group has it.
fn resume_target(child: i32, holder: Option<Pid>) {
    if let (Some(holder), TerminalHolder::ThisGroup) = (holder, TerminalHolder::current()) {
        give_terminal(holder);
    }
    let value = libc::sigval { sival_ptr: libc::SIGCONT as usize as *mut libc::c_void };
    // SAFETY: no pointers: the value is a number; the child was not reaped, so the number is its own.
    unsafe {
        // The shell has resumed it only if it belongs to the job.
        libc::kill(child, libc::SIGCONT);
        libc::sigqueue(child, resume_signal(), value);
    }
}

fn is_stopped(pid: i32) -> bool {
    let text = std::fs::read(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name in parentheses may contain anything.
    let state = text.iter().rposition(|&byte| byte == b')').and_then(|end| text.get(end + 2));
    state == Some(&b'T')
}

impl Drop for Signals {
    fn drop(&mut self) {
        // SAFETY: the set was stored by the call in `hold`.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, std::ptr::null_mut());
        }
    }
}

/// Whether this group was the terminal's foreground group. A shell inside may change that, and cannot
/// restore it, because it has no id for the group outside.
struct Foreground(bool);

/// Checks whether the processes inside are gone after the sandbox was killed, and the pause between
/// them.
const MAX_CHECKS: u32 = 100;
const CHECK_PAUSE: Duration = Duration::from_millis(2);

impl Foreground {
    fn of_this_group() -> Self {
        let foreground = rustix::termios::tcgetpgrp(rustix::stdio::stdin()).ok();
        Self(foreground.is_some() && foreground == own_group())
    }

    /// Takes the terminal back from a group inside, which is gone or, if the sandbox was killed, about
    /// to be. A living group is outside: the shell has taken the terminal itself, because this job was
    /// stopped or is in the background, and must keep it.
    fn reclaim(self, is_dying: bool) {
        if !self.0 {
            return;
        }
        let checks = if is_dying { MAX_CHECKS } else { 1 };
        for attempt in 1..=checks {
            match TerminalHolder::current() {
                TerminalHolder::Empty => return take_terminal(),
                TerminalHolder::Another if attempt < checks => std::thread::sleep(CHECK_PAUSE),
                TerminalHolder::ThisGroup | TerminalHolder::Another => return,
            }
        }
    }
}

/// The terminal's foreground group.
enum TerminalHolder {
    ThisGroup,
    /// A group without processes.
    Empty,
    /// Another group, or an unknown one.
    Another,
}

impl TerminalHolder {
    fn current() -> Self {
        // Fails for a group without an id in this PID namespace.
        let Ok(group) = rustix::termios::tcgetpgrp(rustix::stdio::stdin()) else {
            return Self::Another;
        };
        if Some(group) == own_group() {
            return Self::ThisGroup;
        }
        match rustix::process::test_kill_process_group(group) {
            Err(Errno::SRCH) => Self::Empty,
            _ => Self::Another,
        }
    }
}

fn take_terminal() {
    if let Some(own) = own_group() {
        give_terminal(own);
    }
}

fn give_terminal(group: Pid) {
    // From the background this would stop the process, unless SIGTTOU is ignored.
    // SAFETY: both actions are always valid.
    let before = unsafe { libc::signal(libc::SIGTTOU, libc::SIG_IGN) };
    let _ = rustix::termios::tcsetpgrp(rustix::stdio::stdin(), group);
    // SAFETY: what it was before.
    unsafe { libc::signal(libc::SIGTTOU, before) };
}

/// `None` if the group leader is outside the PID namespace.
fn own_group() -> Option<Pid> {
    // SAFETY: takes nothing and gives a number, which rustix takes for never 0.
    Pid::from_raw(unsafe { libc::getpgrp() })
}

/// Forwards signals sent to the outer process alone to the target.
pub(super) struct SignalForwarder {
    pub(super) fd: OwnedFd,
    /// Readable when the target has stopped.
    pub(super) stop_pipe: OwnedFd,
    inner: i32,
    /// The process that started this one and signals it.
    parent: i32,
}

impl SignalForwarder {
    /// Call it while every signal is blocked.
    pub(super) fn new(stop_pipe: OwnedFd, inner: i32) -> rustix::io::Result<Self> {
        use std::os::fd::FromRawFd;
        // SAFETY: the set is filled before it is used; the descriptor is new and owned by nothing else.
        unsafe {
            let mut set = std::mem::zeroed::<libc::sigset_t>();
            libc::sigfillset(&raw mut set);
            libc::sigdelset(&raw mut set, libc::SIGCHLD);
            let flags = libc::SFD_CLOEXEC | libc::SFD_NONBLOCK;
            let fd = libc::signalfd(-1, &raw const set, flags);
            sys::check(i64::from(fd))?;
            let parent = libc::getppid();
            Ok(Self { fd: OwnedFd::from_raw_fd(fd), stop_pipe, inner, parent })
        }
    }

    /// Forwards pending signals to the inner process, marked as queued: it also receives the signals of
    /// its group, unmarked. SIGCONT goes as [`resume_signal`].
    pub(super) fn forward(&self, inner: &impl AsRawFd) {
        let mut bytes = [0; size_of::<libc::signalfd_siginfo>()];
        while rustix::io::read(&self.fd, &mut bytes) == Ok(bytes.len()) {
            // SAFETY: the kernel has filled in the whole structure, which is plain data.
            let info = unsafe {
                std::ptr::read_unaligned(bytes.as_ptr().cast::<libc::signalfd_siginfo>())
            };
            // Signals from the kernel, for the terminal for example, go to the whole group.
            if info.ssi_code > 0 {
                continue;
            }
            // A shell resumes the whole group. The target resumes once it has its terminal again.
            if info.ssi_signo as i32 == libc::SIGCONT {
                continue;
            }
            let is_resume = info.ssi_signo as i32 == resume_signal()
                && info.ssi_pid as i32 == self.parent
                && info.ssi_int == libc::SIGCONT;
            // SAFETY: plain data, of which only these two members are read.
            let mut mark = unsafe { std::mem::zeroed::<libc::siginfo_t>() };
            (mark.si_signo, mark.si_code) = (info.ssi_signo as i32, libc::SI_QUEUE);
            if is_resume {
                mark.si_errno = libc::SIGCONT;
            }
            // SAFETY: the structure lives across the call.
            unsafe {
                libc::syscall(
                    libc::SYS_pidfd_send_signal,
                    inner.as_raw_fd(),
                    mark.si_signo,
                    &raw const mark,
                    0,
                )
            };
        }
    }

    /// Reports to the parent that the target has stopped, unless it has been resumed since.
    pub(super) fn report_stop(&self) {
        let _ = rustix::io::read(&self.stop_pipe, &mut [0; 64]);
        let Some(target) = self.target().filter(|target| is_stopped(*target)) else { return };
        let value = libc::sigval { sival_ptr: target as usize as *mut libc::c_void };
        // SAFETY: no pointers: the value is a number.
        unsafe { libc::sigqueue(self.parent, STOPPED, value) };
    }

    /// The first child of the inner process.
    fn target(&self) -> Option<i32> {
        let children = format!("/proc/{0}/task/{0}/children", self.inner);
        std::fs::read_to_string(children).ok()?.split_ascii_whitespace().next()?.parse().ok()
    }
}
