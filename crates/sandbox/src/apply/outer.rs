//! The outer process: the server's child, which stays on the host.
//!
//! Invariant: it lives until the last process of the sandbox is gone, whatever catchable signal its
//! group receives, so that it returns the target's exit code and leaves nothing behind; and the sandbox
//! never outlives it (the inner process dies with its parent).

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::pipe::PipeFlags;

use super::broker::Broker;
use super::foreground::SignalForwarder;
use super::placeholder::HeldPlaceholders;
use super::{Status, during, inner, sys};
use crate::plan::{Network, Plan};
use crate::reentry::Helper;
use crate::status::{Failure, Stage};

const NAMESPACES: i32 = libc::CLONE_NEWUSER | libc::CLONE_NEWNS | libc::CLONE_NEWIPC;

/// Descriptors and settings from the server, besides the plan.
pub(super) struct Inherited {
    /// Closes when the server is gone.
    pub(super) lifeline: Option<OwnedFd>,
    /// The empty network namespace.
    pub(super) network: Option<OwnedFd>,
    /// The user namespace that owns it.
    pub(super) user: Option<OwnedFd>,
    /// The socket that a managed network is handed over on.
    pub(super) handover: Option<OwnedFd>,
    /// Signals for the target go to this process alone, not to its group.
    pub(super) foreground: bool,
}

pub(super) fn run(
    plan: &Plan,
    status: &Status,
    inherited: &Inherited,
    helpers: &[Helper],
) -> Result<i32, Failure> {
    if inherited.lifeline.is_some() {
        // The lifeline reports the end of the server, which leaves time to clean up.
        sys::prctl(libc::PR_SET_PDEATHSIG, 0).map_err(during(Stage::Namespaces))?;
    }
    if plan.shares_pids {
        // Without a PID namespace no process inside is the one whose end kills the others.
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
            .map_err(during(Stage::Namespaces))?;
    }
    let held = HeldPlaceholders::create(&plan.enforcement.tree.placeholders)?;
    let Inner { pid, pidfd, ready_sender, listener_pipe, stop_pipe } =
        start(plan, status, inherited, &held, helpers).inspect_err(|_| held.release())?;
    let _ = rustix::io::write(&ready_sender, b"!");
    // From here on only the inner process reports failures, and only it and the target hold the
    // streams.
    close_streams(inherited.handover.as_ref());
    let forwarder = stop_pipe.and_then(|stop_pipe| SignalForwarder::new(stop_pipe, pid).ok());
    let broker =
        listener_pipe.as_ref().and_then(|listener_pipe| receive_listener(listener_pipe, pid));
    if broker.is_some() {
        let _ = rustix::io::write(&ready_sender, b"!");
    } else if listener_pipe.is_some() {
        // The inner process has ended, or would wait for ever.
        let _ = rustix::process::pidfd_send_signal(&pidfd, rustix::process::Signal::KILL);
    }
    let (lifeline, forwarder) = (inherited.lifeline.as_ref(), forwarder.as_ref());
    Supervisor { pidfd: &pidfd, lifeline, forwarder, broker: broker.as_ref() }.run();
    let code = wait(pid);
    if plan.shares_pids {
        kill_children();
    }
    held.release();
    drop(ready_sender);
    sys::exit_now(code)
}

/// The inner process.
struct Inner {
    pid: i32,
    pidfd: OwnedFd,
    /// Signals that the ids are mapped; closes when this process is gone.
    ready_sender: OwnedFd,
    /// Receives the number of the seccomp listener, if there is one.
    listener_pipe: Option<OwnedFd>,
    /// Reports each stop of the target, if requested.
    stop_pipe: Option<OwnedFd>,
}

/// Forks the inner process into its namespaces.
fn start(
    plan: &Plan,
    status: &Status,
    inherited: &Inherited,
    held: &HeldPlaceholders,
    helpers: &[Helper],
) -> Result<Inner, Failure> {
    let changeable = super::streams::changeable();
    let (ready, ready_sender) =
        rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(during(Stage::Namespaces))?;
    let listener_pipe = match plan.enforcement.is_brokered(&plan.network) {
        true => {
            Some(rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(during(Stage::Namespaces))?)
        }
        false => None,
    };
    let stop_pipe = match inherited.foreground {
        true => {
            Some(rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(during(Stage::Namespaces))?)
        }
        false => None,
    };
    let network = match (&plan.network, &inherited.network) {
        (Network::Host, _) => 0,
        (Network::None, Some(network)) => {
            super::network::enter(network, inherited.user.as_ref())?;
            0
        }
        (Network::None, None) | (Network::Managed(_), _) => libc::CLONE_NEWNET,
    };
    let pids = if plan.shares_pids { 0 } else { libc::CLONE_NEWPID };
    // SAFETY: this process has one thread.
    let forked = unsafe { sys::fork_into((NAMESPACES | pids | network) as u64, libc::SIGCHLD) };
    let (pid, pidfd) = match forked.map_err(during(Stage::Namespaces))? {
        Some(child) => child,
        None => {
            drop(ready_sender);
            let listener_pipe = listener_pipe.as_ref().map(|(_, sender)| sender);
            let stop_pipe = stop_pipe.as_ref().map(|(_, sender)| sender);
            let pipes = inner::Pipes {
                ready: &ready,
                handover: inherited.handover.as_ref(),
                listener_pipe,
                stop_pipe,
            };
            match inner::run(plan, pipes, changeable, held, helpers) {
                Ok(code) => sys::exit_now(code),
                Err(failure) => status.fail(&failure),
            }
        }
    };
    if let Err(error) = map_identities(pid) {
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        let _ = rustix::process::pidfd_send_signal(&pidfd, rustix::process::Signal::KILL);
        wait(pid);
        return Err(Failure::new(Stage::Identities, errno, ""));
    }
    let (listener_pipe, stop_pipe) = (
        listener_pipe.map(|(listener_pipe, _)| listener_pipe),
        stop_pipe.map(|(stop_pipe, _)| stop_pipe),
    );
    Ok(Inner { pid, pidfd, ready_sender, listener_pipe, stop_pipe })
}

/// Duplicates the seccomp listener of the inner process. `None` if that has ended.
fn receive_listener(listener_pipe: &OwnedFd, pid: i32) -> Option<Broker> {
    let mut number = [0; size_of::<i32>()];
    let read = rustix::io::retry_on_intr(|| rustix::io::read(listener_pipe, &mut number)).ok()?;
    let number = (read == number.len()).then(|| i32::from_ne_bytes(number))?;
    sys::take_descriptor(pid, number).ok().map(Broker::new)
}

/// Closes the streams and the status pipe, which only the target holds open, and the socket of the
/// managed network.
fn close_streams(handover: Option<&OwnedFd>) {
    let numbers = [0, 1, 2, crate::reentry::STATUS];
    for number in numbers.into_iter().chain(handover.map(AsRawFd::as_raw_fd)) {
        // SAFETY: the numbers are the ones this process was given; it uses none of them any more, and
        // leaves by `_exit`, so that no owner of them is ever dropped.
        unsafe { libc::close(number) };
    }
}

/// What this process waits for while the sandbox runs.
struct Supervisor<'a> {
    pidfd: &'a OwnedFd,
    lifeline: Option<&'a OwnedFd>,
    forwarder: Option<&'a SignalForwarder>,
    broker: Option<&'a Broker>,
}

/// Why a wait ended.
struct WakeReasons {
    /// The inner process is gone.
    ended: bool,
    /// The server is gone.
    server_gone: bool,
    /// A process inside wants to connect.
    connections_pending: bool,
    /// The target has stopped.
    stopped: bool,
}

impl Supervisor<'_> {
    /// Runs until the inner process is gone, or until the server is; then it kills the inner process.
    fn run(&self) {
        if self.lifeline.is_none() && self.broker.is_none() {
            return;
        }
        loop {
            let broker = self.broker.filter(|broker| broker.has_room());
            let Ok(woken) = self.wait(broker) else { continue };
            if let Some(forwarder) = self.forwarder {
                forwarder.forward(self.pidfd);
                if woken.stopped {
                    forwarder.report_stop();
                }
            }
            if let Some(broker) = broker.filter(|_| woken.connections_pending) {
                broker.handle_next();
            }
            if woken.ended {
                return;
            }
            if woken.server_gone {
                let kill = rustix::process::Signal::KILL;
                let _ = rustix::process::pidfd_send_signal(self.pidfd, kill);
                return;
            }
        }
    }

    /// Waits for an event; for connections only while the broker has room.
    fn wait(&self, broker: Option<&Broker>) -> rustix::io::Result<WakeReasons> {
        // Each has a fixed index, present or not.
        let absent = (self.pidfd, PollFlags::empty());
        let mut fds = [
            (self.pidfd, PollFlags::IN),
            self.lifeline.map_or(absent, |fd| (fd, PollFlags::empty())),
            self.forwarder.map_or(absent, |forwarder| (&forwarder.fd, PollFlags::IN)),
            broker.map_or(absent, |broker| (broker.listener(), PollFlags::IN)),
            self.forwarder.map_or(absent, |forwarder| (&forwarder.stop_pipe, PollFlags::IN)),
        ]
        .map(|(fd, flags)| PollFd::new(fd, flags));
        // Without room for a call, check again soon.
        let full = self.broker.is_some() && broker.is_none();
        let soon = rustix::event::Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
        poll(&mut fds, full.then_some(&soon))?;
        let [ended, server, _, connections_pending, stopped] = fds.map(|fd| fd.revents());
        let gone = PollFlags::HUP | PollFlags::ERR;
        Ok(WakeReasons {
            ended: ended.contains(PollFlags::IN),
            server_gone: self.lifeline.is_some() && server.intersects(gone),
            connections_pending: connections_pending.contains(PollFlags::IN),
            stopped: self.forwarder.is_some() && stopped.contains(PollFlags::IN),
        })
    }
}

/// Kills what the inner process has left, until this process has no children.
fn kill_children() {
    loop {
        // A process that forks before it is killed leaves another one, which comes next.
        let children = fs::read_to_string("/proc/thread-self/children").unwrap_or_default();
        for pid in children.split_ascii_whitespace().filter_map(|pid| pid.parse::<i32>().ok()) {
            // SAFETY: no pointers. This process has not reaped it, so the pid is still its own.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        // SAFETY: a null status is allowed.
        let waited = unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::__WALL) };
        if waited < 0 && io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return;
        }
    }
}

/// Waits for a child and returns its exit code, 128 + signal number if it was killed.
pub(super) fn wait(pid: i32) -> i32 {
    let mut status = 0;
    loop {
        // SAFETY: the status lives across the call.
        let waited = unsafe { libc::waitpid(pid, &raw mut status, libc::__WALL) };
        if waited == pid {
            return exit_code(status);
        }
        if waited < 0 && io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return super::FAILED;
        }
    }
}

/// Converts a wait status to an exit code.
pub(super) fn exit_code(status: i32) -> i32 {
    if libc::WIFSIGNALED(status) { 128 + libc::WTERMSIG(status) } else { libc::WEXITSTATUS(status) }
}

/// Maps ids to themselves: all ids if this process may do that (root), else its own.
pub(super) fn map_identities(pid: i32) -> io::Result<()> {
    let write = |name: &str, text: &str| fs::write(format!("/proc/{pid}/{name}"), text);
    let (user, group) = (rustix::process::geteuid(), rustix::process::getegid());
    if user.is_root()
        && let (Ok(users), Ok(groups)) =
            (identity_map("/proc/self/uid_map"), identity_map("/proc/self/gid_map"))
        && write("uid_map", &users).is_ok()
    {
        return write("gid_map", &groups).or_else(|_| own_group(pid, group));
    }
    write("uid_map", &format!("{} {} 1\n", user.as_raw(), user.as_raw()))?;
    own_group(pid, group)
}

fn own_group(pid: i32, group: rustix::process::Gid) -> io::Result<()> {
    fs::write(format!("/proc/{pid}/setgroups"), "deny")?;
    fs::write(format!("/proc/{pid}/gid_map"), format!("{0} {0} 1\n", group.as_raw()))
}

/// An identity map of all ids of this process's namespace.
fn identity_map(path: &str) -> io::Result<String> {
    let mut map = String::new();
    for line in fs::read_to_string(path)?.lines() {
        let mut words = line.split_ascii_whitespace();
        if let (Some(inside), Some(_), Some(count)) = (words.next(), words.next(), words.next()) {
            map.push_str(&format!("{inside} {inside} {count}\n"));
        }
    }
    Ok(map)
}
