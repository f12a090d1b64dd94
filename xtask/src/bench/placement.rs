//! CPU placement of the client and the servers.
//!
//! A wake-up on the same processor costs a fifth of one across two, and the kernel leaves a pair of processes
//! where chance has put them. For times of a few microseconds that decides more than the program does. Such
//! benchmarks pin the client to one processor and the servers, both the measured one and the floor, with
//! their children, to another, as on two machines.

use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::Context;
use parking_lot::{Mutex, MutexGuard};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The processor of servers while a client is isolated.
static SERVER_CPUS: Mutex<Option<CpuSet>> = Mutex::new(None);

/// While it lives, this thread and the servers it starts run on different processors.
#[derive(Debug)]
pub(crate) struct CpuIsolation {
    before: CpuSet,
}

/// Pins this thread to one processor and the servers it starts to another. Has no effect on a machine with
/// one processor.
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

/// Pins a server, if a client is isolated.
pub(crate) fn pin_server(command: &mut Command) {
    let Some(server_cpus) = *lock() else { return };
    // SAFETY: a bare system call on a copied value, allowed between fork and exec.
    unsafe { command.pre_exec(move || Ok(sched_setaffinity(None, &server_cpus)?)) };
}

fn lock() -> MutexGuard<'static, Option<CpuSet>> {
    SERVER_CPUS.lock()
}
