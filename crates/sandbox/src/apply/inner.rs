//! The inner process: first of its PID namespace. Builds the sandbox around itself, starts the
//! target, reaps.
//!
//! Invariant: it is confined by everything the target is confined by, before the target exists; the
//! target inherits, it is not trusted to lock itself in.

use std::os::fd::{AsRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, poll};

use super::placeholder::Held;
use super::{during, execute, landlock, outer, privileges, streams, sys, tree};
use crate::plan::{Plan, Target};
use crate::reentry::Helper;
use crate::status::{Failure, Stage};

pub(super) fn run(
    plan: &Plan,
    ready: &OwnedFd,
    calls: Option<&OwnedFd>,
    stops: Option<&OwnedFd>,
    changeable: [bool; 3],
    held: &Held,
    helpers: &[Helper],
) -> Result<i32, Failure> {
    die_with_parent(ready)?;
    let enforcement = &plan.enforcement;
    let terminal = streams::terminal();
    let reopened = streams::confine(enforcement, changeable)?;
    let proved = tree::build(enforcement, held, terminal)?;
    privileges::limit_processes(enforcement.processes)?;
    privileges::limit_signals()?;
    if let Target::Program(program) = &plan.target {
        execute::enter(&program.cwd)?;
    }
    sys::prctl(libc::PR_SET_NO_NEW_PRIVS, 1).map_err(during(Stage::NoNewPrivileges))?;
    landlock::enter(plan)?;
    privileges::drop_capabilities(&enforcement.tree)?;
    match calls {
        Some(calls) => {
            let listener = privileges::load_seccomp_with_listener(&plan.seccomp)?;
            hand_over(&listener, calls, ready)?;
        }
        None => privileges::load_seccomp(&plan.seccomp)?,
    }
    // Nobody inside may look into this process, though it holds nothing of value. Not before the outer
    // process, which may have no more rights over it, has taken what it needs.
    sys::prctl(libc::PR_SET_DUMPABLE, 0).map_err(during(Stage::Capabilities))?;
    match &plan.target {
        Target::Program(program) => {
            sys::close_from(3, true).map_err(during(Stage::Descriptors))?;
            let target = execute::spawn(program)?;
            // The target has the streams, and has closed the status pipe: so here too. The locks stay,
            // for they have to outlive an outer process that is killed; and files, which have no end that
            // somebody could wait for.
            let mut kept = held.descriptors();
            kept.extend(stops.map(AsRawFd::as_raw_fd));
            kept.extend(reopened.descriptors());
            kept.sort_unstable();
            sys::close_all_but(&kept).map_err(during(Stage::Descriptors))?;
            let code = reap(target, stops);
            reopened.advance();
            sys::exit_now(code)
        }
        Target::Helper { name, env } => {
            let helper = execute::find_helper(helpers, name)?;
            execute::set_environment(env);
            let kept = [0, 1, 2, proved.number()];
            proved.keep();
            sys::close_all_but(&kept).map_err(during(Stage::Descriptors))?;
            sys::exit_now((helper.run)())
        }
        Target::Refusal { message } => {
            sys::close_all_but(&[0, 1, 2]).map_err(during(Stage::Descriptors))?;
            sys::exit_now(execute::refuse(message))
        }
    }
}

/// Waits until the ids are mapped, and makes sure to be killed when the outer process is.
fn die_with_parent(ready: &OwnedFd) -> Result<(), Failure> {
    let failed = during(Stage::Identities);
    sys::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as u64).map_err(&failed)?;
    let mut byte = [0];
    let told = rustix::io::read(ready, &mut byte).map_err(&failed)?;
    // The outer process may have died before the line above the last: its end of the pipe, which it
    // keeps for life, tells.
    let mut fds = [PollFd::new(ready, PollFlags::empty())];
    let polled = poll(&mut fds, Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 }));
    polled.map_err(&failed)?;
    if told == 0 || fds[0].revents().contains(PollFlags::HUP) {
        sys::exit_now(super::FAILED);
    }
    Ok(())
}

/// Tells the outer process the number of the descriptor at which connections are asked for, and waits
/// until it has taken it.
fn hand_over(listener: &OwnedFd, calls: &OwnedFd, ready: &OwnedFd) -> Result<(), Failure> {
    let failed = during(Stage::Seccomp);
    let number = listener.as_raw_fd().to_ne_bytes();
    rustix::io::write(calls, &number).map_err(&failed)?;
    match rustix::io::read(ready, &mut [0]).map_err(&failed)? {
        0 => sys::exit_now(super::FAILED),
        _ => Ok(()),
    }
}

/// Reaps whatever dies until the target has; then this process ends and the kernel kills the rest. Tells
/// whenever the target has stopped, if anybody is to know.
fn reap(target: i32, stops: Option<&OwnedFd>) -> i32 {
    let flags = libc::WNOHANG | libc::__WALL | if stops.is_some() { libc::WUNTRACED } else { 0 };
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
        if let Some(stops) = stops.filter(|_| pid == target) {
            let _ = rustix::io::write(stops, b"!");
        }
        if pid > 0 {
            continue;
        }
        // SAFETY: both live across the call. Every signal is blocked, so none is missed in between.
        let signal = unsafe { libc::sigwaitinfo(&raw const set, &raw mut information) };
        if signal > 0 && signal != libc::SIGCHLD {
            pass_on(target, signal, &information);
        }
    }
}

/// The server signals the group of its child. A target that is still in that group has got the
/// signal itself; one that has made its own group, as a shell with job control does, has not. A
/// queued signal was sent to the outer process alone, so the target has not got it in any case. When the
/// shell of a stopped job ends, or its terminal, the kernel tells the job's group only.
fn pass_on(target: i32, signal: i32, information: &libc::siginfo_t) {
    // SAFETY: for a signal sent by a process the sender is stored.
    let sender = unsafe { information.si_pid() };
    let hangs_up =
        information.si_code == libc::SI_KERNEL && matches!(signal, libc::SIGHUP | libc::SIGCONT);
    let from_outside = hangs_up || information.si_code <= 0 && sender == 0;
    // SAFETY: no pointers. A group outside of this namespace reads as 0.
    let group = unsafe { libc::getpgid(target) };
    let receiver = match group {
        1.. => -group,
        _ if information.si_code == libc::SI_QUEUE => target,
        _ => return,
    };
    if from_outside {
        // SAFETY: no pointers.
        unsafe { libc::kill(receiver, signal) };
    }
}
