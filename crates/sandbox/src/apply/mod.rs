//! Apply: carries out the plan as system calls, in order.
//!
//! Three processes. The *outer* process is the server's child: it stays on the host, creates the
//! placeholders and the namespaces, waits, and cleans up. The *inner* process is PID 1 of the new PID
//! namespace: it builds the tree, confines itself, starts the target and reaps. The *target* is the
//! command. Each step is a [`Stage`], in order.
//!
//! Invariant: a failed step ends everything before the target has run, with a [`Failure`] on the status
//! pipe.

mod broker;
mod execute;
mod foreground;
mod inner;
pub(crate) mod landlock;
mod managed;
pub(crate) mod network;
mod outer;
pub(crate) mod placeholder;
mod privileges;
pub(crate) mod probe;
pub(crate) mod proof;
pub(crate) mod spare;
mod streams;
pub(crate) mod sys;
mod tree;

use std::os::fd::{FromRawFd, OwnedFd};
use std::path::Path;

use rustix::io::{Errno, FdFlags};

pub(crate) use placeholder::sweep;

use crate::plan::{Isolation, Network, Plan};
use crate::reentry::{self, Helper};
use crate::status::{Failure, Stage};

/// Exit code for a failure before the target runs.
const FAILED: i32 = 126;

/// Adds the step and the path to the error of a failed call.
fn at<'a>(stage: Stage, what: &'a Path) -> impl Fn(Errno) -> Failure + 'a {
    move |errno| Failure::new(stage, errno.raw_os_error(), what.display().to_string())
}

/// Adds the step to the error of a failed call.
fn during(stage: Stage) -> impl Fn(Errno) -> Failure {
    move |errno| Failure::new(stage, errno.raw_os_error(), "")
}

/// The pipe for failures.
struct Status(OwnedFd);

impl Status {
    fn fail(&self, failure: &Failure) -> ! {
        // The server may have stopped reading.
        let _ = rustix::io::write(&self.0, &failure.encode());
        sys::exit_now(FAILED)
    }
}

/// Body of the re-entered process.
pub(crate) fn main(helpers: &[Helper], mode: reentry::Mode) -> ! {
    if mode == reentry::Mode::Spare {
        spare::wait_for_launch();
    }
    let [plan, status] = [reentry::PLAN, reentry::STATUS].map(inherited);
    let Some(status) = status.map(Status) else {
        eprintln!("this is a part of the exec server and is not meant to be run by hand");
        sys::exit_now(2)
    };
    let plan = match plan.as_ref().map(read_plan) {
        Some(Ok(plan)) => plan,
        Some(Err(failure)) => status.fail(&failure),
        None => status.fail(&Failure::new(Stage::ReadPlan, libc::EBADF, "")),
    };
    sys::block_signals();
    let result = match plan.enforcement.isolation {
        Isolation::Namespaces => {
            let passed =
                |number| plan.passed.contains(&number).then(|| inherited(number)).flatten();
            let is_managed = matches!(plan.network, Network::Managed(_));
            let inherited = outer::Inherited {
                lifeline: passed(reentry::LIFELINE),
                // The same number.
                network: if is_managed { None } else { passed(reentry::NETWORK) },
                handover: if is_managed { passed(reentry::HANDOVER) } else { None },
                user: passed(reentry::USER),
                foreground: mode == reentry::Mode::Foreground,
            };
            outer::run(&plan, &status, &inherited, helpers)
        }
        Isolation::LandlockOnly => execute::in_place(&plan, helpers),
    };
    match result {
        Ok(code) => sys::exit_now(code),
        Err(failure) => status.fail(&failure),
    }
}

/// A descriptor that the server passed at a fixed number.
fn inherited(number: i32) -> Option<OwnedFd> {
    // SAFETY: only the flags are asked for; a closed number is answered with an error.
    let there = unsafe { libc::fcntl(number, libc::F_GETFD) } >= 0;
    // SAFETY: it is open, and by the contract of re-entry nothing else in this process owns it.
    let fd = there.then(|| unsafe { OwnedFd::from_raw_fd(number) })?;
    rustix::io::fcntl_setfd(&fd, FdFlags::CLOEXEC).ok()?;
    Some(fd)
}

fn read_plan(fd: &OwnedFd) -> Result<Plan, Failure> {
    let failed = during(Stage::ReadPlan);
    let size = rustix::fs::fstat(fd).map_err(&failed)?.st_size as usize;
    let mut bytes = vec![0; size];
    let mut filled = 0;
    while filled < size {
        // Read from the start; the file offset is shared with the writer.
        match rustix::io::pread(fd, &mut bytes[filled..], filled as u64).map_err(&failed)? {
            0 => break,
            read => filled += read,
        }
    }
    Plan::decode(&bytes[..filled])
        .map_err(|error| Failure::new(Stage::ReadPlan, 0, error.to_string()))
}
