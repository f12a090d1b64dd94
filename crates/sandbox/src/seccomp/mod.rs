//! Seccomp: the table compiled to kernel programs, once per server.
//!
//! Invariant: compiling happens where the plan is made, loading in the sandbox. The program refuses
//! everything in the [table] and every call of a foreign architecture.
//!
//! The kernel runs a program for every number there is when it is loaded, so a list of comparisons
//! one by one would be among the most expensive steps of a start. Hence two parts: a search tree over
//! the numbers, which decides all but a few at once, and what `seccompiler` makes of the few whose
//! arguments have to be looked at.

mod table;

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Len, SeccompCmpOp as Op, SeccompCondition,
    SeccompFilter, SeccompRule, TargetArch,
};

/// An instruction as the eight bytes the kernel reads.
type Instruction = u64;

/// The program for a plan.
pub(crate) fn program(network_restricted: bool) -> Result<Arc<[Instruction]>, FilterError> {
    type Compiled = LazyLock<Result<Arc<[Instruction]>, FilterError>>;
    static OPEN: Compiled = LazyLock::new(|| compile(false));
    static CLOSED: Compiled = LazyLock::new(|| compile(true));
    LazyLock::force(if network_restricted { &CLOSED } else { &OPEN }).clone()
}

/// The table cannot be compiled for this architecture.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the seccomp table cannot be compiled: {0}")]
pub struct FilterError(String);

fn failed(error: impl std::fmt::Display) -> FilterError {
    FilterError(error.to_string())
}

fn compile(network_restricted: bool) -> Result<Arc<[Instruction]>, FilterError> {
    let by_arguments = by_arguments(network_restricted)?;
    let mut verdicts: BTreeMap<u32, Verdict> =
        by_arguments.keys().map(|number| (*number as u32, Verdict::ByArguments)).collect();
    verdicts.extend(refused(network_restricted).map(|number| (number, Verdict::Refuse)));
    verdicts.insert(libc::SYS_clone3 as u32, Verdict::Absent);
    let filter = SeccompFilter::new(
        by_arguments,
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EPERM as u32),
        TargetArch::try_from(std::env::consts::ARCH).map_err(failed)?,
    )
    .map_err(failed)?;
    let program: BpfProgram = filter.try_into().map_err(failed)?;
    // It begins by comparing the architecture; so does the tree.
    let [load_architecture, compare, ..] = &program[..] else {
        return Err(failed("the program is empty"));
    };
    let mut whole = tree(load_architecture.k, compare.k, &verdicts);
    whole.extend(program.iter().map(|i| pack(i.code, i.jt, i.jf, i.k)));
    Ok(whole.into())
}

/// What is refused by number alone.
fn refused(network_restricted: bool) -> impl Iterator<Item = u32> {
    let always = table::REFUSED.iter().flat_map(|(_, calls)| calls.iter());
    let restricted = if network_restricted { table::RESTRICTED_CALLS } else { &[] };
    always.chain(restricted).map(|number| *number as u32)
}

/// What is refused with some arguments.
fn by_arguments(network_restricted: bool) -> Result<BTreeMap<i64, Vec<SeccompRule>>, FilterError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
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
            for (mask, value) in table::REFUSED_UNIX_TYPES {
                rules.entry(call).or_default().push(rule(vec![when(
                    1,
                    Op::MaskedEq(*mask),
                    *value,
                )?])?);
            }
        }
    }
    Ok(rules)
}

const LOAD: u16 = 0x20;
const JUMP: u16 = 0x05;
const JUMP_EQUAL: u16 = 0x15;
const JUMP_AT_LEAST: u16 = 0x35;
const RETURN: u16 = 0x06;

/// What is to be done about a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Allow,
    /// `EPERM`.
    Refuse,
    /// `ENOSYS`, upon which C libraries take an older call.
    Absent,
    /// Goes on to the program that follows.
    ByArguments,
}

/// The tree, to be followed by the program for [`Verdict::ByArguments`].
///
/// The second set of numbers x86-64 has, for 32-bit pointers, is absent: it would be a way around
/// every number in the table.
fn tree(offset: u32, architecture: u32, verdicts: &BTreeMap<u32, Verdict>) -> Vec<Instruction> {
    const X32: u32 = 0x4000_0000;
    // Where the verdict changes, from the number 0 on.
    let mut ranges: Vec<(u32, Verdict)> = vec![(0, Verdict::Allow)];
    for (&number, &verdict) in verdicts {
        ranges.retain(|(start, _)| *start != number);
        if ranges.last().is_none_or(|(_, last)| *last != verdict) {
            ranges.push((number, verdict));
        }
        ranges.push((number + 1, Verdict::Allow));
    }
    ranges.push((X32, Verdict::Absent));
    let mut program = vec![
        pack(LOAD, 0, 0, offset),
        pack(JUMP_EQUAL, 1, 0, architecture),
        // A foreign one goes straight to the program that follows, which ends it.
        0,
        pack(LOAD, 0, 0, 0),
    ];
    let mut goes_on = vec![2];
    branch(&ranges, &mut program, &mut goes_on);
    for at in goes_on {
        program[at] = pack(JUMP, 0, 0, (program.len() - at - 1) as u32);
    }
    program
}

fn branch(ranges: &[(u32, Verdict)], program: &mut Vec<Instruction>, goes_on: &mut Vec<usize>) {
    if let [(_, verdict)] = ranges {
        program.push(match verdict {
            Verdict::Allow => pack(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
            Verdict::Refuse => pack(RETURN, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
            Verdict::Absent => pack(RETURN, 0, 0, libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
            Verdict::ByArguments => {
                goes_on.push(program.len());
                0
            }
        });
        return;
    }
    let (low, high) = ranges.split_at(ranges.len() / 2);
    // A conditional jump reaches 255 instructions, an unconditional one any number.
    program.push(pack(JUMP_AT_LEAST, 0, 1, high[0].0));
    let at = program.len();
    program.push(0);
    branch(low, program, goes_on);
    let skipped = program.len() - at - 1;
    if let Ok(near) = u8::try_from(skipped) {
        program.remove(at);
        program[at - 1] = pack(JUMP_AT_LEAST, near, 0, high[0].0);
        for place in goes_on.iter_mut().filter(|place| **place > at) {
            *place -= 1;
        }
    } else {
        program[at] = pack(JUMP, 0, 0, skipped as u32);
    }
    branch(high, program, goes_on);
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

    /// Runs a program as the kernel would, for a call without arguments.
    fn run(program: &[Instruction], architecture: u32, number: u32) -> u32 {
        let (mut at, mut accumulator) = (0, 0u32);
        loop {
            let bytes = program[at].to_ne_bytes();
            let code = u16::from_ne_bytes([bytes[0], bytes[1]]);
            let (yes, no) = (usize::from(bytes[2]), usize::from(bytes[3]));
            let k = u32::from_ne_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]);
            at += 1;
            let jump = |condition: bool| if condition { yes } else { no };
            match code {
                LOAD => {
                    accumulator = [number, architecture].get(k as usize / 4).copied().unwrap_or(0);
                }
                JUMP => at += k as usize,
                JUMP_EQUAL => at += jump(accumulator == k),
                JUMP_AT_LEAST => at += jump(accumulator >= k),
                0x54 => accumulator &= k,
                RETURN => return k,
                other => panic!("instruction {other:#x}"),
            }
        }
    }

    #[test]
    fn the_program_says_what_the_table_says() {
        for restricted in [false, true] {
            let program = program(restricted).unwrap();
            assert!(program.len() < 400, "{}", program.len());
            let own = u32::from_ne_bytes(program[1].to_ne_bytes()[4..].try_into().unwrap());
            let by_arguments = by_arguments(restricted).unwrap();
            let refused: Vec<u32> = refused(restricted).collect();
            for number in (0..600).filter(|number| !by_arguments.contains_key(&i64::from(*number)))
            {
                let expected = if i64::from(number) == libc::SYS_clone3 {
                    libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32
                } else if refused.contains(&number) {
                    libc::SECCOMP_RET_ERRNO | libc::EPERM as u32
                } else {
                    libc::SECCOMP_RET_ALLOW
                };
                assert_eq!(run(&program, own, number), expected, "{number}");
            }
            // With all arguments zero a socket is of no family, and the others are harmless.
            for number in [libc::SYS_socket, libc::SYS_socketpair] {
                let verdict = run(&program, own, number as u32);
                assert_eq!(verdict, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32);
            }
            for number in [libc::SYS_clone, libc::SYS_ioctl] {
                assert_eq!(run(&program, own, number as u32), libc::SECCOMP_RET_ALLOW);
            }
            let x32 = run(&program, own, 0x4000_0000 | 521);
            assert_eq!(x32, libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32);
            assert_eq!(run(&program, own ^ 1, 0), libc::SECCOMP_RET_KILL_PROCESS);
        }
        assert_ne!(program(false).unwrap(), program(true).unwrap());
    }
}
