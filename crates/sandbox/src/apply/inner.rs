//! The inner process, PID 1 of its PID namespace if it has one: builds the sandbox around itself, starts the target,
//! reaps.
//!
//! Invariant: every restriction of the target applies to this process before the target exists; the
//! target inherits them and is not trusted to set them.

use std::os::fd::{AsRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::placeholder::HeldPlaceholders;
use super::{
    during, execute, foreground, landlock, managed, outer, privileges, streams, sys, tree,
};
use crate::plan::{Network, Plan, Target};
use crate::reentry::Helper;
use crate::status::{Failure, Stage};

/// What connects this process to others, besides the streams.
pub(super) struct Pipes<'a> {
    /// Says that the ids are mapped, and that the listener was taken.
    pub(super) ready: &'a OwnedFd,
    /// Takes the sockets of a managed network to the server.
    pub(super) handover: Option<&'a OwnedFd>,
    /// Takes the number of the seccomp listener to the outer process.
    pub(super) listener_pipe: Option<&'a OwnedFd>,
    /// Reports each stop of the target.
    pub(super) stop_pipe: Option<&'a OwnedFd>,
}

pub(super) fn run(
    plan: &Plan,
    Pipes { ready, handover, listener_pipe, stop_pipe }: Pipes<'_>,
    changeable: [streams::Changeable; 3],
    held: &HeldPlaceholders,
    helpers: &[Helper],
) -> Result<i32, Failure> {
    die_with_parent(ready)?;
    let enforcement = &plan.enforcement;
    if let Network::Managed(namespace) = &plan.network {
        let socket = handover.ok_or_else(|| during(Stage::Network)(Errno::BADF))?;
        managed::hand_over(namespace, socket)?;
    }
    let terminal = streams::terminal();
    let reopened = streams::confine(enforcement, changeable)?;
    if plan.shares_pids {
        let own = rustix::process::getpid();
        rustix::process::set_child_subreaper(Some(own)).map_err(during(Stage::Namespaces))?;
    }
    let proven = tree::build(enforcement, held, terminal, plan.shares_pids)?;
    streams::confine_null(enforcement)?;
    privileges::limit_processes(enforcement.processes)?;
    privileges::limit_signals()?;
    if let Target::Program(program) = &plan.target {
        execute::enter(&program.cwd)?;
    }
    sys::prctl(libc::PR_SET_NO_NEW_PRIVS, 1).map_err(during(Stage::NoNewPrivileges))?;
    landlock::enter(plan)?;
    privileges::drop_capabilities(&enforcement.tree)?;
    match listener_pipe {
        Some(listener_pipe) => {
            let listener = privileges::load_seccomp_with_listener(&plan.seccomp)?;
            send_listener(&listener, listener_pipe, ready)?;
        }
        None => privileges::load_seccomp(&plan.seccomp)?,
    }
    // Nothing inside may inspect this process. Not earlier, because the outer process may need the
    // right to take the listener.
    sys::prctl(libc::PR_SET_DUMPABLE, 0).map_err(during(Stage::Capabilities))?;
    match &plan.target {
        Target::Program(program) => {
            sys::close_from(3, true).map_err(during(Stage::Descriptors))?;
            let target = execute::spawn(program)?;
            // Close the streams, which belong to the target, and the status pipe, which the target has
            // closed. The locks stay open, because they must outlive a killed outer process; so do
            // files, whose end no reader waits for.
            let mut open = held.descriptors();
            open.extend(stop_pipe.map(AsRawFd::as_raw_fd));
            open.extend(reopened.descriptors());
            open.sort_unstable();
            sys::close_all_but(&open).map_err(during(Stage::Descriptors))?;
            let code = reap(target, stop_pipe, plan.shares_pids);
            reopened.advance();
            sys::exit_now(code)
        }
        Target::Helper { name, env } => {
            let helper = execute::find_helper(helpers, name)?;
            execute::set_environment(env);
            let open = [0, 1, 2, proven.number()];
            proven.watch();
            sys::close_all_but(&open).map_err(during(Stage::Descriptors))?;
            sys::exit_now((helper.run)())
        }
        Target::Refusal { message } => {
            sys::close_all_but(&[0, 1, 2]).map_err(during(Stage::Descriptors))?;
            sys::exit_now(execute::refuse(message))
        }
    }
}

/// Waits until the ids are mapped, and asks to be killed with the outer process.
fn die_with_parent(ready: &OwnedFd) -> Result<(), Failure> {
    let failed = during(Stage::Identities);
    sys::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as u64).map_err(&failed)?;
    let mut byte = [0];
    let told = rustix::io::read(ready, &mut byte).map_err(&failed)?;
    // The outer process may have died before PDEATHSIG was set; it holds its end of the pipe open for
    // life, so HUP shows that.
    let mut fds = [PollFd::new(ready, PollFlags::empty())];
    let polled = poll(&mut fds, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 }));
    polled.map_err(&failed)?;
    if told == 0 || fds[0].revents().contains(PollFlags::HUP) {
        sys::exit_now(super::FAILED);
    }
    Ok(())
}

/// Sends the number of the seccomp listener to the outer process, and waits until it has duplicated the
/// descriptor.
fn send_listener(listener: &OwnedFd, pipe: &OwnedFd, ready: &OwnedFd) -> Result<(), Failure> {
    let failed = during(Stage::Seccomp);
    let number = listener.as_raw_fd().to_ne_bytes();
    rustix::io::write(pipe, &number).map_err(&failed)?;
    match rustix::io::read(ready, &mut [0]).map_err(&failed)? {
        0 => sys::exit_now(super::FAILED),
        _ => Ok(()),
    }
}

/// Reaps until the target has exited; then this process ends and the kernel kills the rest. Reports
/// each stop of the target, if requested.
fn reap(target: i32, stop_pipe: Option<&OwnedFd>, shares_pids: bool) -> i32 {
    let flags =
        libc::WNOHANG | libc::__WALL | if stop_pipe.is_some() { libc::WUNTRACED } else { 0 };
    // SAFETY: the set is filled before it is used; the information is plain data.
    let (set, mut information) = unsafe {
        let mut set = std::mem::zeroed::<libc::sigset_t>();
        libc::sigfillset(&raw mut set);
        (set, std::mem::zeroed::<libc::siginfo_t>())
    };
    loop {
        let mut status = 0;
        // SAFETY: the status lives across the call.
        let pid = unsafe { libc::waitpid(-1, &raw mut status, flags) };
        let stopped = libc::WIFSTOPPED(status);
        if pid == target && !stopped {
            return outer::exit_code(status);
        }
        if let Some(stop_pipe) = stop_pipe.filter(|_| pid == target) {
            let _ = rustix::io::write(stop_pipe, b"!");
        }
        if pid > 0 {
            continue;
        }
        // SAFETY: both live across the call. Every signal is blocked, so none is missed in between.
        let signal = unsafe { libc::sigwaitinfo(&raw const set, &raw mut information) };
        let is_marked = information.si_code == libc::SI_QUEUE;
        let is_resume = is_marked
            && signal == foreground::resume_signal()
            && information.si_errno == libc::SIGCONT;
        let signal = if is_resume { libc::SIGCONT } else { signal };
        // A shell resumes the whole job, and the process outside passes that on once the terminal is ready. A second
        // resumption, by the shell's own signal or by that one, could undo the target's next stop.
        let is_shells = signal == libc::SIGCONT && !is_marked && information.si_code <= 0;
        if is_shells && stop_pipe.is_some() {
            continue;
        }
        if signal > 0 && signal != libc::SIGCHLD {
            forward_signal(target, signal, &information, shares_pids);
        }
    }
}

/// Forwards a signal to the target. The server signals the group of its child: a target in that group
/// has received the signal already; one with its own group, such as a shell with job control, has not.
/// A queued signal was sent to the outer process alone, so the target never has it. When the shell of a
/// stopped job ends, or its terminal, the kernel signals only the job's group.
fn forward_signal(target: i32, signal: i32, information: &libc::siginfo_t, shares_pids: bool) {
    // SAFETY: for a signal sent by a process the sender is stored.
    let sender = unsafe { information.si_pid() };
    let hangs_up =
        information.si_code == libc::SI_KERNEL && matches!(signal, libc::SIGHUP | libc::SIGCONT);
    // With shared pids the sender may be inside. It could have signalled the target itself.
    let from_outside = hangs_up || information.si_code <= 0 && (sender == 0 || shares_pids);
    // SAFETY: no pointers. A group outside of this namespace reads as 0.
    let (group, own_group) = unsafe { (libc::getpgid(target), libc::getpgrp()) };
    let receiver = match group {
        1.. if group != own_group => -group,
        _ if information.si_code == libc::SI_QUEUE => target,
        _ => return,
    };
    if from_outside {
        // SAFETY: no pointers.
        unsafe { libc::kill(receiver, signal) };
    }
}
