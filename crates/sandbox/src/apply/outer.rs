//! The outer process: the server's child, which stays on the host.
//!
//! Invariant: it lives until the last process of the sandbox is gone, whatever catchable signal its
//! group receives, so that the exit code is the target's and nothing is left behind; and the sandbox
//! never outlives it (the inner process dies with its parent).

use std::fs;
use std::io;
use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::pipe::PipeFlags;

use super::broker::Broker;
use super::foreground::Forwarded;
use super::placeholder::Held;
use super::{Status, during, inner, sys};
use crate::plan::Plan;
use crate::reentry::Helper;
use crate::status::{Failure, Stage};

const NAMESPACES: i32 =
    libc::CLONE_NEWUSER | libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWIPC;

/// What the server gave besides the plan.
pub(super) struct Given {
    /// Its end means that the server is gone.
    pub(super) lifeline: Option<OwnedFd>,
    /// The empty network.
    pub(super) network: Option<OwnedFd>,
    /// The user namespace it belongs to.
    pub(super) user: Option<OwnedFd>,
    /// Signals for the target are sent to this process alone, not to its group.
    pub(super) alone: bool,
}

pub(super) fn run(
    plan: &Plan,
    status: &Status,
    given: &Given,
    helpers: &[Helper],
) -> Result<i32, Failure> {
    if given.lifeline.is_some() {
        // The server's end is told by the lifeline, so that there is time to tidy up.
        sys::prctl(libc::PR_SET_PDEATHSIG, 0).map_err(during(Stage::Namespaces))?;
    }
    let held = Held::create(&plan.enforcement.tree.placeholders)?;
    let Inner { pid, pidfd, tell_ready, calls, stops } =
        start(plan, status, given, &held, helpers).inspect_err(|_| held.release())?;
    let _ = rustix::io::write(&tell_ready, b"!");
    // From here on only the inner process may speak, and only it and the target hold the streams.
    close_given();
    let forwarded = stops.and_then(|stops| Forwarded::new(stops, pid).ok());
    let broker = calls.as_ref().and_then(|calls| take_calls(calls, pid));
    if broker.is_some() {
        let _ = rustix::io::write(&tell_ready, b"!");
    } else if calls.is_some() {
        // It has ended, or would wait for ever.
        let _ = rustix::process::pidfd_send_signal(&pidfd, rustix::process::Signal::KILL);
    }
    let (lifeline, forwarded) = (given.lifeline.as_ref(), forwarded.as_ref());
    Watch { pidfd: &pidfd, lifeline, forwarded, broker: broker.as_ref() }.until_over();
    let code = wait(pid);
    held.release();
    drop(tell_ready);
    sys::exit_now(code)
}

/// The inner process.
struct Inner {
    pid: i32,
    pidfd: OwnedFd,
    /// Tells it that its ids are mapped, and by its end that this process has gone.
    tell_ready: OwnedFd,
    /// Tells the number of its descriptor at which connections are asked for, if they are.
    calls: Option<OwnedFd>,
    /// Tells whenever the target has stopped, if that is to be known.
    stops: Option<OwnedFd>,
}

/// Forks the inner process into its namespaces.
fn start(
    plan: &Plan,
    status: &Status,
    given: &Given,
    held: &Held,
    helpers: &[Helper],
) -> Result<Inner, Failure> {
    let changeable = super::streams::changeable();
    let (ready, tell_ready) =
        rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(during(Stage::Namespaces))?;
    let calls = match plan.enforcement.is_brokered(plan.network_restricted) {
        true => {
            Some(rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(during(Stage::Namespaces))?)
        }
        false => None,
    };
    let stops = match given.alone {
        true => {
            Some(rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(during(Stage::Namespaces))?)
        }
        false => None,
    };
    let network = match &given.network {
        _ if !plan.network_restricted => 0,
        None => libc::CLONE_NEWNET,
        Some(network) => {
            super::network::enter(network, given.user.as_ref())?;
            0
        }
    };
    // SAFETY: this process has one thread.
    let forked = unsafe { sys::fork_into((NAMESPACES | network) as u64, libc::SIGCHLD) };
    let (pid, pidfd) = match forked.map_err(during(Stage::Namespaces))? {
        Some(child) => child,
        None => {
            drop(tell_ready);
            let calls = calls.as_ref().map(|(_, tell)| tell);
            let stops = stops.as_ref().map(|(_, tell)| tell);
            match inner::run(plan, &ready, calls, stops, changeable, held, helpers) {
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
    let (calls, stops) = (calls.map(|(calls, _)| calls), stops.map(|(stops, _)| stops));
    Ok(Inner { pid, pidfd, tell_ready, calls, stops })
}

/// Takes the descriptor at which the inner process has connections asked for. None if it ended before.
fn take_calls(calls: &OwnedFd, pid: i32) -> Option<Broker> {
    let mut number = [0; size_of::<i32>()];
    let read = rustix::io::retry_on_intr(|| rustix::io::read(calls, &mut number)).ok()?;
    let number = (read == number.len()).then(|| i32::from_ne_bytes(number))?;
    sys::take_descriptor(pid, number).ok().map(Broker::new)
}

/// Gives the streams and the status pipe away: the target alone decides when they end.
fn close_given() {
    for number in [0, 1, 2, crate::reentry::STATUS] {
        // SAFETY: the numbers are the ones this process was given; it uses none of them any more, and
        // leaves by `_exit`, so that no owner of them is ever dropped.
        unsafe { libc::close(number) };
    }
}

/// What this process waits for while the sandbox runs.
struct Watch<'a> {
    pidfd: &'a OwnedFd,
    lifeline: Option<&'a OwnedFd>,
    forwarded: Option<&'a Forwarded>,
    broker: Option<&'a Broker>,
}

/// What came of waiting.
struct Woken {
    /// The inner process is gone.
    ended: bool,
    /// The server is.
    server_gone: bool,
    /// Connections are asked for.
    asked: bool,
    /// The target has stopped.
    stopped: bool,
}

impl Watch<'_> {
    /// Until the inner process is gone, or the server: then it has to go too.
    fn until_over(&self) {
        if self.lifeline.is_none() && self.broker.is_none() {
            return;
        }
        loop {
            let calls = self.broker.filter(|broker| broker.has_room());
            let Ok(woken) = self.wait(calls) else { continue };
            if let Some(forwarded) = self.forwarded {
                forwarded.hand_on(self.pidfd);
                if woken.stopped {
                    forwarded.tell_of_stop();
                }
            }
            if let Some(calls) = calls.filter(|_| woken.asked) {
                calls.take();
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

    /// Until something happens; connections count only while there is room for more.
    fn wait(&self, calls: Option<&Broker>) -> rustix::io::Result<Woken> {
        // Each has its place, whether there is one or not.
        let absent = (self.pidfd, PollFlags::empty());
        let mut fds = [
            (self.pidfd, PollFlags::IN),
            self.lifeline.map_or(absent, |fd| (fd, PollFlags::empty())),
            self.forwarded.map_or(absent, |forwarded| (&forwarded.fd, PollFlags::IN)),
            calls.map_or(absent, |calls| (calls.calls(), PollFlags::IN)),
            self.forwarded.map_or(absent, |forwarded| (&forwarded.stops, PollFlags::IN)),
        ]
        .map(|(fd, flags)| PollFd::new(fd, flags));
        // Without room for a call it is looked again soon.
        let full = self.broker.is_some() && calls.is_none();
        let soon = rustix::event::Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
        poll(&mut fds, full.then_some(&soon))?;
        let [ended, server, _, asked, stopped] = fds.map(|fd| fd.revents());
        let gone = PollFlags::HUP | PollFlags::ERR;
        Ok(Woken {
            ended: ended.contains(PollFlags::IN),
            server_gone: self.lifeline.is_some() && server.intersects(gone),
            asked: asked.contains(PollFlags::IN),
            stopped: self.forwarded.is_some() && stopped.contains(PollFlags::IN),
        })
    }
}

/// The exit code of a child, 128 and the signal for one that was killed.
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

/// What a wait status is as an exit code.
pub(super) fn exit_code(status: i32) -> i32 {
    if libc::WIFSIGNALED(status) { 128 + libc::WTERMSIG(status) } else { libc::WEXITSTATUS(status) }
}

/// Every id stands for itself. All of them where this process may say so (root), else its own.
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

/// The ids of this process's own namespace, each onto itself.
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
