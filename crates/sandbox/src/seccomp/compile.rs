//! Compiles verdicts to a kernel program.
//!
//! When a program is loaded, the kernel runs it for every call number, to cache those that are allowed
//! with any arguments. A linear list of comparisons would be one of the slowest steps of a start, and
//! would delay each call whose arguments are checked. So the program is a search tree over ranges of
//! numbers, followed by the rules on arguments, which calls with equal rules share.

use std::collections::BTreeMap;

use super::arguments::{Condition, Rule};
use super::{FilterError, Instruction};

/// What to do with a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    Allow,
    /// Fail with `EPERM`.
    Refuse,
    /// Fail with `ENOSYS`, upon which programs fall back to an older call.
    Absent,
    /// Fail with `EPERM` if one of the rules applies.
    Unless(Vec<Rule>),
    /// Notify the listening process.
    Broker,
}

pub(super) const LOAD: u16 = 0x20;
pub(super) const AND: u16 = 0x54;
pub(super) const JUMP: u16 = 0x05;
pub(super) const JUMP_EQUAL: u16 = 0x15;
pub(super) const JUMP_AT_LEAST: u16 = 0x35;
pub(super) const RETURN: u16 = 0x06;

/// Offsets in `struct seccomp_data`.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
/// The low half of the first argument, on little-endian machines.
const ARGUMENTS: u32 = 16;

const ALLOW: u32 = libc::SECCOMP_RET_ALLOW;
const EPERM: u32 = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
const ENOSYS: u32 = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;
const KILL: u32 = libc::SECCOMP_RET_KILL_PROCESS;

/// Compiles ranges, each given by its first number and its verdict; the first range starts at zero.
pub(super) fn compile(
    architecture: u32,
    ranges: &[(u32, Verdict)],
) -> Result<Vec<Instruction>, FilterError> {
    let mut program = vec![
        pack(LOAD, 0, 0, ARCHITECTURE),
        pack(JUMP_EQUAL, 1, 0, architecture),
        pack(RETURN, 0, 0, KILL),
        pack(LOAD, 0, 0, NUMBER),
    ];
    let mut argument_checks = Vec::new();
    branch(ranges, &mut program, &mut argument_checks);
    let mut blocks: BTreeMap<Vec<u64>, usize> = BTreeMap::new();
    for (at, rules) in argument_checks {
        let block = block(rules)?;
        let start = *blocks.entry(block).or_insert_with_key(|block| {
            program.extend(block);
            program.len() - block.len()
        });
        program[at] = pack(JUMP, 0, 0, (start - at - 1) as u32);
    }
    // The kernel's limit (BPF_MAXINSNS).
    if program.len() > 4096 {
        return Err(FilterError("the program is too long".to_owned()));
    }
    Ok(program)
}

/// Emits a subtree. Records leaves that check arguments in `argument_checks`; their jumps are filled in
/// once the position of their rules is known.
fn branch<'r>(
    ranges: &'r [(u32, Verdict)],
    program: &mut Vec<Instruction>,
    argument_checks: &mut Vec<(usize, &'r [Rule])>,
) {
    if let [(_, verdict)] = ranges {
        program.push(match verdict {
            Verdict::Allow => pack(RETURN, 0, 0, ALLOW),
            Verdict::Refuse => pack(RETURN, 0, 0, EPERM),
            Verdict::Absent => pack(RETURN, 0, 0, ENOSYS),
            Verdict::Broker => pack(RETURN, 0, 0, libc::SECCOMP_RET_USER_NOTIF),
            Verdict::Unless(rules) => {
                argument_checks.push((program.len(), rules));
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
    branch(low, program, argument_checks);
    let skipped = program.len() - at - 1;
    if let Ok(near) = u8::try_from(skipped) {
        program.remove(at);
        program[at - 1] = pack(JUMP_AT_LEAST, near, 0, high[0].0);
        for (place, _) in argument_checks.iter_mut().filter(|(place, _)| *place > at) {
            *place -= 1;
        }
    } else {
        program[at] = pack(JUMP, 0, 0, skipped as u32);
    }
    branch(high, program, argument_checks);
}

/// Emits the argument checks: each rule in turn, then allow.
fn block(rules: &[Rule]) -> Result<Vec<Instruction>, FilterError> {
    let mut block = Vec::new();
    for rule in rules {
        block.extend(refusal(rule)?);
    }
    block.push(pack(RETURN, 0, 0, ALLOW));
    Ok(block)
}

/// A comparison whose jump target is not known yet.
struct PendingJump {
    at: usize,
    value: u32,
    on_equal: bool,
}

/// Refuses the call if all conditions hold; else continues after the rule.
fn refusal(rule: Rule) -> Result<Vec<Instruction>, FilterError> {
    let far = |distance: usize| {
        u8::try_from(distance).map_err(|_| FilterError("a rule is too long".to_owned()))
    };
    let mut program = Vec::new();
    let mut pending = Vec::new();
    let mut loaded = None;
    for &Condition { argument, mask, values, one_of } in rule {
        if loaded != Some(argument) {
            program.push(pack(LOAD, 0, 0, ARGUMENTS + 8 * u32::from(argument)));
        }
        loaded = Some(argument);
        if mask != u32::MAX {
            program.push(pack(AND, 0, 0, mask));
            loaded = None;
        }
        for (position, &value) in values.iter().enumerate() {
            let rest = values.len() - 1 - position;
            if one_of && rest > 0 {
                program.push(pack(JUMP_EQUAL, far(rest)?, 0, value));
            } else {
                pending.push(PendingJump { at: program.len(), value, on_equal: !one_of });
                program.push(0);
            }
        }
    }
    program.push(pack(RETURN, 0, 0, EPERM));
    for PendingJump { at, value, on_equal } in pending {
        let distance = far(program.len() - at - 1)?;
        let (equal, other) = if on_equal { (distance, 0) } else { (0, distance) };
        program[at] = pack(JUMP_EQUAL, equal, other, value);
    }
    Ok(program)
}

/// Packs a `struct sock_filter` in memory order.
fn pack(code: u16, jt: u8, jf: u8, k: u32) -> Instruction {
    let [c0, c1] = code.to_ne_bytes();
    let [k0, k1, k2, k3] = k.to_ne_bytes();
    u64::from_ne_bytes([c0, c1, jt, jf, k0, k1, k2, k3])
}
