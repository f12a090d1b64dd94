//! Seccomp: the table compiled to kernel programs, once per server.
//!
//! Invariant: compiling happens where the plan is made, loading in the sandbox; the two programs of a
//! plan together refuse everything in the [table] and every call of a foreign architecture.

mod table;

use std::collections::BTreeMap;
use std::sync::LazyLock;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Len, SeccompCmpOp as Op, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};

/// An instruction as the eight bytes the kernel reads.
type Instruction = u64;

/// The programs for a plan, in the order in which they are loaded.
pub(crate) fn programs(network_restricted: bool) -> Result<Vec<Vec<Instruction>>, FilterError> {
    static OPEN: LazyLock<Result<Vec<Instruction>, FilterError>> = LazyLock::new(|| compile(false));
    static CLOSED: LazyLock<Result<Vec<Instruction>, FilterError>> =
        LazyLock::new(|| compile(true));
    let main = if network_restricted { &CLOSED } else { &OPEN };
    Ok(vec![numbers(), LazyLock::force(main).clone()?])
}

/// The table cannot be compiled for this architecture.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the seccomp table cannot be compiled: {0}")]
pub struct FilterError(String);

impl<E: std::error::Error> From<Box<E>> for FilterError {
    fn from(error: Box<E>) -> Self {
        Self(error.to_string())
    }
}

fn failed(error: impl std::fmt::Display) -> FilterError {
    FilterError(error.to_string())
}

fn compile(network_restricted: bool) -> Result<Vec<Instruction>, FilterError> {
    let filter = SeccompFilter::new(
        rules(network_restricted)?,
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EPERM as u32),
        TargetArch::try_from(std::env::consts::ARCH).map_err(failed)?,
    )
    .map_err(failed)?;
    let program: BpfProgram = filter.try_into().map_err(failed)?;
    Ok(program.into_iter().map(|i| pack(i.code, i.jt, i.jf, i.k)).collect())
}

fn rules(network_restricted: bool) -> Result<BTreeMap<i64, Vec<SeccompRule>>, FilterError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for call in table::REFUSED.iter().flat_map(|(_, calls)| calls.iter()) {
        rules.insert(*call, Vec::new());
    }
    let when = |argument: u8, op: Op, value: u64| {
        SeccompCondition::new(argument, Len::Dword, op, value).map_err(failed)
    };
    let rule = |conditions| SeccompRule::new(conditions).map_err(failed);
    for ioctl in table::REFUSED_IOCTLS {
        rules.entry(libc::SYS_ioctl).or_default().push(rule(vec![when(1, Op::Eq, *ioctl)?])?);
    }
    for flag in table::NAMESPACE_FLAGS {
        let flag = *flag as u32 as u64;
        rules.entry(libc::SYS_clone).or_default().push(rule(vec![when(
            0,
            Op::MaskedEq(flag),
            flag,
        )?])?);
    }
    let families: &[i32] =
        if network_restricted { &[libc::AF_UNIX] } else { table::ENABLED_FAMILIES };
    for call in [libc::SYS_socket, libc::SYS_socketpair] {
        let mut others = Vec::new();
        for family in families {
            others.push(when(0, Op::Ne, *family as u64)?);
        }
        rules.entry(call).or_default().push(rule(others)?);
        if network_restricted {
            for kind in (0..16).filter(|kind| !table::RESTRICTED_UNIX_TYPES.contains(kind)) {
                rules.entry(call).or_default().push(rule(vec![when(
                    1,
                    Op::MaskedEq(0xf),
                    kind as u64,
                )?])?);
            }
        }
    }
    if network_restricted {
        for call in table::RESTRICTED_CALLS {
            rules.insert(*call, Vec::new());
        }
    }
    Ok(rules)
}

/// The part that compares call numbers themselves, which the compiler has no words for: `clone3` is
/// answered `ENOSYS`, and so is the second set of numbers x86-64 has for 32-bit pointers, which
/// would otherwise be a way around every number in the table.
fn numbers() -> Vec<Instruction> {
    const LOAD_NUMBER: u16 = 0x20;
    const JUMP_EQUAL: u16 = 0x15;
    const JUMP_AT_LEAST: u16 = 0x35;
    const RETURN: u16 = 0x06;
    const X32: u32 = 0x4000_0000;
    vec![
        pack(LOAD_NUMBER, 0, 0, 0),
        pack(JUMP_EQUAL, 1, 0, libc::SYS_clone3 as u32),
        pack(JUMP_AT_LEAST, 0, 1, X32),
        pack(RETURN, 0, 0, libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
        pack(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
    ]
}

/// `struct sock_filter` in memory order.
fn pack(code: u16, jt: u8, jf: u8, k: u32) -> Instruction {
    let [c0, c1] = code.to_ne_bytes();
    let [k0, k1, k2, k3] = k.to_ne_bytes();
    u64::from_ne_bytes([c0, c1, jt, jf, k0, k1, k2, k3])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_programs_compile_and_fit() {
        for restricted in [false, true] {
            let programs = programs(restricted).unwrap();
            assert_eq!(programs.len(), 2);
            assert!(programs.iter().all(|program| (5..=4096).contains(&program.len())));
        }
        assert_ne!(programs(false).unwrap()[1], programs(true).unwrap()[1]);
    }
}
