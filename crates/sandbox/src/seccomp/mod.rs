//! Seccomp: compiles the tables to kernel programs, once per server.
//!
//! Invariant: programs are compiled where the plan is made and loaded in the sandbox. A program allows
//! the calls in the [table], unless the [rules on arguments](arguments) refuse them, and nothing else:
//! a call that is not listed fails with `EPERM`, one that is newer than the table with `ENOSYS`, and a
//! call of a foreign architecture kills the process. x32 call numbers are above all known ones, so they
//! fail with `ENOSYS`.

mod arguments;
mod compile;
mod controls;
mod numbers;
mod table;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use compile::Verdict;

use crate::plan::{Enforcement, Isolation, Network};

/// An instruction: the eight bytes that the kernel reads.
type Instruction = u64;

/// Selects the program for a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Filter {
    /// Which sockets there are.
    pub sockets: Sockets,
    /// There are no namespaces: the host's IPC objects are reachable and must be protected.
    pub shared_host: bool,
    /// There is no PID namespace: the host's processes are reachable and must be protected.
    pub shared_processes: bool,
    /// Landlock alone protects the files, and does not cover changes of metadata.
    pub frozen_metadata: bool,
    /// Every `connect` goes to the outer process, which decides and makes the connection.
    pub brokered: bool,
    /// The policy opens devices of the host, beyond the few that every sandbox has.
    pub host_devices: bool,
}

/// The sockets that a target can make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sockets {
    /// Those of the host's network.
    Network,
    /// Connected pairs only: no socket can connect, bind or send by name.
    Pairs,
    /// TCP and UDP in a namespace of its own, and connected pairs.
    Managed,
}

impl Filter {
    pub(crate) fn of(enforcement: &Enforcement, network: &Network, shares_pids: bool) -> Self {
        let sockets = match network {
            Network::Host => Sockets::Network,
            Network::None => Sockets::Pairs,
            Network::Managed(_) => Sockets::Managed,
        };
        let shared_host = enforcement.isolation == Isolation::LandlockOnly;
        let shared_processes = shared_host || shares_pids;
        let frozen_metadata = shared_host && enforcement.rules.is_some();
        let brokered = enforcement.is_brokered(network);
        let host_devices = enforcement.has_host_devices();
        Self { sockets, shared_host, shared_processes, frozen_metadata, brokered, host_devices }
    }
}

/// The program for a filter, compiled on first use.
pub(crate) fn program(filter: Filter) -> Result<Arc<[Instruction]>, FilterError> {
    type Compiled = OnceLock<Result<Arc<[Instruction]>, FilterError>>;
    static PROGRAMS: [Compiled; 96] = [const { OnceLock::new() }; 96];
    let index = usize::from(filter.shared_host)
        | usize::from(filter.frozen_metadata) << 1
        | usize::from(filter.brokered) << 2
        | usize::from(filter.host_devices) << 3
        | usize::from(filter.shared_processes) << 4
        | (filter.sockets as usize) << 5;
    PROGRAMS[index].get_or_init(|| compile(filter)).clone()
}

/// The tables cannot be compiled for this architecture.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the seccomp table cannot be compiled: {0}")]
pub(crate) struct FilterError(String);

/// The architecture in `struct seccomp_data` (`AUDIT_ARCH_*`).
const ARCHITECTURE: Option<u32> = if cfg!(target_endian = "big") {
    None
} else if cfg!(target_arch = "x86_64") {
    Some(0xc000_003e)
} else if cfg!(target_arch = "aarch64") {
    Some(0xc000_00b7)
} else {
    None
};

fn compile(filter: Filter) -> Result<Arc<[Instruction]>, FilterError> {
    let architecture = ARCHITECTURE.ok_or_else(|| {
        FilterError(format!("the system call numbers of {} are not known", std::env::consts::ARCH))
    })?;
    compile::compile(architecture, &ranges(&verdicts(filter))).map(Into::into)
}

/// The verdict for every call that is not plainly refused.
fn verdicts(filter: Filter) -> BTreeMap<u32, Verdict> {
    let always = table::ALLOWED.iter().flat_map(|(_, calls)| *calls);
    let unless =
        |refused: bool, calls: &'static [libc::c_long]| (if refused { &[] } else { calls }).iter();
    let allowed = always
        .chain(table::CONTROL_SELF)
        .chain(unless(filter.sockets == Sockets::Pairs, table::BY_NAME))
        .chain(unless(filter.frozen_metadata, table::METADATA))
        .chain(unless(filter.shared_host, table::IPC))
        .chain(unless(filter.shared_processes, table::CONTROL_OTHERS));
    let mut verdicts: BTreeMap<u32, Verdict> =
        allowed.map(|number| (*number as u32, Verdict::Allow)).collect();
    for (number, rule) in arguments::rules(filter) {
        match verdicts.get_mut(&(number as u32)) {
            Some(Verdict::Unless(rules)) => rules.push(rule),
            Some(verdict) => *verdict = Verdict::Unless(vec![rule]),
            // Refused whatever its arguments are.
            None => {}
        }
    }
    if filter.brokered {
        verdicts.insert(libc::SYS_connect as u32, Verdict::Broker);
    }
    verdicts.extend(table::ABSENT.iter().map(|number| (*number as u32, Verdict::Absent)));
    verdicts
}

/// The verdicts for all numbers, as ranges.
fn ranges(verdicts: &BTreeMap<u32, Verdict>) -> Vec<(u32, Verdict)> {
    let is_unassigned =
        |number| numbers::UNASSIGNED.iter().any(|(first, last)| (*first..=*last).contains(&number));
    let mut ranges: Vec<(u32, Verdict)> = Vec::new();
    for number in 0..=numbers::FIRST_UNKNOWN {
        let verdict = match verdicts.get(&number) {
            Some(verdict) => verdict.clone(),
            None if number == numbers::FIRST_UNKNOWN || is_unassigned(number) => Verdict::Absent,
            None => Verdict::Refuse,
        };
        if ranges.last().is_none_or(|(_, last)| *last != verdict) {
            ranges.push((number, verdict));
        }
    }
    ranges
}
