//! Which processor who runs on.
//!
//! A wake-up on the same processor costs a fifth of one across two, and the kernel leaves a pair of
//! processes wherever chance has put them. For times of a few microseconds that chance decides more
//! than the program does; so there the client stays on one processor, and the servers, that which is
//! measured and the floor alike, with all they start, on another: as on two machines.

use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::Context;
use parking_lot::{Mutex, MutexGuard};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Where servers are started while a client keeps apart.
static ELSEWHERE: Mutex<Option<CpuSet>> = Mutex::new(None);

/// While it lives, this thread and the servers it starts run on different processors.
#[derive(Debug)]
pub struct Apart {
    before: CpuSet,
}

/// Keeps this thread apart from what it starts. On a machine with one processor that changes
/// nothing.
pub fn apart() -> anyhow::Result<Apart> {
    let before = sched_getaffinity(None)?;
    let mut allowed = (0..CpuSet::MAX_CPU).filter(|&cpu| before.is_set(cpu));
    let first = allowed.next().context("no processor")?;
    let mut elsewhere = CpuSet::new();
    elsewhere.set(allowed.next().unwrap_or(first));
    let mut here = CpuSet::new();
    here.set(first);
    sched_setaffinity(None, &here)?;
    *lock() = Some(elsewhere);
    Ok(Apart { before })
}

impl Drop for Apart {
    fn drop(&mut self) {
        *lock() = None;
        let _ = sched_setaffinity(None, &self.before);
    }
}

/// Has a server started where it belongs.
pub fn elsewhere(command: &mut Command) {
    let Some(elsewhere) = *lock() else { return };
    // SAFETY: a bare system call on a copied value, allowed between fork and exec.
    unsafe { command.pre_exec(move || Ok(sched_setaffinity(None, &elsewhere)?)) };
}

fn lock() -> MutexGuard<'static, Option<CpuSet>> {
    ELSEWHERE.lock()
}
