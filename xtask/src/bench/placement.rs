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
static SERVER_CPUS: Mutex<Option<CpuSet>> = Mutex::new(None);

/// While it lives, this thread and the servers it starts run on different processors.
#[derive(Debug)]
pub(crate) struct CpuIsolation {
    before: CpuSet,
}

/// Keeps this thread apart from what it starts. On a machine with one processor that changes
/// nothing.
pub(crate) fn isolate_client() -> anyhow::Result<CpuIsolation> {
    let before = sched_getaffinity(None)?;
    let mut allowed = (0..CpuSet::MAX_CPU).filter(|&cpu| before.is_set(cpu));
    let first = allowed.next().context("no processor")?;
    let mut server_cpus = CpuSet::new();
    server_cpus.set(allowed.next().unwrap_or(first));
    let mut here = CpuSet::new();
    here.set(first);
    sched_setaffinity(None, &here)?;
    *lock() = Some(server_cpus);
    Ok(CpuIsolation { before })
}

impl Drop for CpuIsolation {
    fn drop(&mut self) {
        *lock() = None;
        let _ = sched_setaffinity(None, &self.before);
    }
}

/// Has a server started where it belongs.
pub(crate) fn pin_server(command: &mut Command) {
    let Some(server_cpus) = *lock() else { return };
    // SAFETY: a bare system call on a copied value, allowed between fork and exec.
    unsafe { command.pre_exec(move || Ok(sched_setaffinity(None, &server_cpus)?)) };
}

fn lock() -> MutexGuard<'static, Option<CpuSet>> {
    SERVER_CPUS.lock()
}
