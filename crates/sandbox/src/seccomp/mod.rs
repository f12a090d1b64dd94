//! Seccomp: the tables compiled to kernel programs, once per server.
//!
//! Invariant: compiling happens where the plan is made, loading in the sandbox. A program allows what is
//! in the [table], unless the [rules on arguments](arguments) say otherwise, and nothing else: a call
//! that is not listed fails with `EPERM`, one that is newer than the table with `ENOSYS`, and a call
//! of a foreign architecture ends the process. Those of x86-64's second set of numbers, for 32-bit
//! pointers, are above all that are known and so fail with `ENOSYS`.

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

use crate::plan::{Enforcement, Isolation};

/// An instruction as the eight bytes the kernel reads.
type Instruction = u64;

/// Which of the programs a target gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Filter {
    /// No socket reaches or is reached by name.
    pub network_restricted: bool,
    /// There are no namespaces: processes and IPC objects of the host are in reach and have to be left
    /// alone.
    pub shared_host: bool,
    /// Landlock alone guards the files, and does not see changes of their metadata.
    pub frozen_metadata: bool,
    /// Every `connect` is handed to the outer process, which decides and makes the connection.
    pub brokered: bool,
    /// The policy opens devices of the host, beyond the few that every sandbox has.
    pub host_devices: bool,
}

impl Filter {
    pub(crate) fn of(enforcement: &Enforcement, network_restricted: bool) -> Self {
        let shared_host = enforcement.isolation == Isolation::LandlockOnly;
        let frozen_metadata = shared_host && enforcement.rules.is_some();
        let brokered = enforcement.is_brokered(network_restricted);
        let host_devices = enforcement.has_host_devices();
        Self { network_restricted, shared_host, frozen_metadata, brokered, host_devices }
    }
}

/// The program for a plan. Each is compiled when it is first asked for.
pub(crate) fn program(filter: Filter) -> Result<Arc<[Instruction]>, FilterError> {
    type Compiled = OnceLock<Result<Arc<[Instruction]>, FilterError>>;
    static PROGRAMS: [Compiled; 32] = [const { OnceLock::new() }; 32];
    let index = usize::from(filter.network_restricted)
        | usize::from(filter.shared_host) << 1
        | usize::from(filter.frozen_metadata) << 2
        | usize::from(filter.brokered) << 3
        | usize::from(filter.host_devices) << 4;
    PROGRAMS[index].get_or_init(|| compile(filter)).clone()
}

/// The tables cannot be compiled for this architecture.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the seccomp table cannot be compiled: {0}")]
pub(crate) struct FilterError(String);

/// The architecture as the kernel tells it to a program (`AUDIT_ARCH_*`).
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

/// Every call that is not refused.
fn verdicts(filter: Filter) -> BTreeMap<u32, Verdict> {
    let always = table::ALLOWED.iter().flat_map(|(_, calls)| *calls);
    let unless =
        |refused: bool, calls: &'static [libc::c_long]| (if refused { &[] } else { calls }).iter();
    let allowed = always
        .chain(table::STEERING_SELF)
        .chain(unless(filter.network_restricted, table::BY_NAME))
        .chain(unless(filter.frozen_metadata, table::METADATA))
        .chain(unless(filter.shared_host, table::IPC))
        .chain(unless(filter.shared_host, table::STEERING_OTHERS));
    let mut verdicts: BTreeMap<u32, Verdict> =
        allowed.map(|number| (*number as u32, Verdict::Allow)).collect();
    for (number, rule) in arguments::rules(filter) {
        match verdicts.get_mut(&(number as u32)) {
            Some(Verdict::Unless(rules)) => rules.push(rule),
            Some(verdict) => *verdict = Verdict::Unless(vec![rule]),
            // Refused whatever its arguments.
            None => {}
        }
    }
    if filter.brokered && !filter.network_restricted {
        verdicts.insert(libc::SYS_connect as u32, Verdict::Broker);
    }
    verdicts.extend(table::ABSENT.iter().map(|number| (*number as u32, Verdict::Absent)));
    verdicts
}

/// The verdicts on all numbers, wherever they change.
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
