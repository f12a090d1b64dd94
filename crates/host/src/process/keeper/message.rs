//! Messages between a keeper and the server, over a socket per keeper.

use rustix::process::{Pid, Signal};

/// From the keeper, in this order: [`Failed`](Self::Failed) alone, or [`Started`](Self::Started) and
/// later [`Exited`](Self::Exited). When the keeper ends, which closes the socket, no descendant is
/// left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::process) enum Report {
    /// No process was started: this step failed with this error number.
    Failed { step: i32, errno: i32 },
    /// The program runs.
    Started { root: Pid, keeper: Pid },
    /// The program has exited; the code is 128 + signal number if a signal killed it.
    Exited {
        code: i32,
        /// A signal killed it.
        signalled: bool,
        /// No descendant is left.
        nothing_left: bool,
        used: Used,
    },
}

/// What the reaped descendants of a keeper used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::process) struct Used {
    /// CPU time, in microseconds.
    pub cpu_us: u64,
    /// Memory of the largest one, in KiB; 0 if that is not known.
    pub memory_kib: u64,
    /// Blocks of 512 bytes read from disks.
    pub blocks_in: u64,
    /// Blocks of 512 bytes written to disks.
    pub blocks_out: u64,
}

/// From the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::process) enum Control {
    /// Signal the program's group, unless it has exited, and another group.
    Signal { signal: Signal, also: Option<Pid> },
    /// The program exits by itself when the server does, and must clean up before that.
    CleansUp,
    /// Kill the program and all its descendants, until none is left.
    Kill,
}

/// Length of every message of the server, in bytes.
pub(in crate::process) const LENGTH: usize = 12;

/// Length of every report, in bytes.
pub(in crate::process) const REPORT_LENGTH: usize = LENGTH + 32;

fn encode_numbers(numbers: [i32; 3]) -> [u8; LENGTH] {
    let mut message = [0; LENGTH];
    for (bytes, number) in message.chunks_exact_mut(4).zip(numbers) {
        bytes.copy_from_slice(&number.to_ne_bytes());
    }
    message
}

fn decode_numbers(message: &[u8]) -> Option<[i32; 3]> {
    let message: &[u8; LENGTH] = message.try_into().ok()?;
    let [a, b, c, d, e, f, g, h, i, j, k, l] = *message;
    Some([[a, b, c, d], [e, f, g, h], [i, j, k, l]].map(i32::from_ne_bytes))
}

fn raw(pid: Pid) -> i32 {
    pid.as_raw_nonzero().get()
}

impl Report {
    pub(super) fn encode(self) -> [u8; REPORT_LENGTH] {
        let mut used = Used::default();
        let numbers = encode_numbers(match self {
            Self::Failed { step, errno } => [1, step, errno],
            Self::Started { root, keeper } => [2, raw(root), raw(keeper)],
            Self::Exited { code, signalled, nothing_left, used: so_far } => {
                used = so_far;
                [3, code, i32::from(nothing_left) | i32::from(signalled) << 1]
            }
        });
        let Used { cpu_us, memory_kib, blocks_in, blocks_out } = used;
        let mut message = [0; REPORT_LENGTH];
        let used = [cpu_us, memory_kib, blocks_in, blocks_out].map(u64::to_ne_bytes);
        let bytes = numbers.iter().chain(used.as_flattened());
        message.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
        message
    }

    /// `None` if the message is invalid.
    pub(super) fn decode(message: &[u8]) -> Option<Self> {
        let (numbers, used) = message.split_at_checked(LENGTH)?;
        let used: &[u8; 32] = used.try_into().ok()?;
        let (used, _) = used.as_chunks::<8>();
        let mut used = used.iter().map(|bytes| u64::from_ne_bytes(*bytes));
        let mut next = || used.next().unwrap_or_default();
        let used =
            Used { cpu_us: next(), memory_kib: next(), blocks_in: next(), blocks_out: next() };
        Some(match decode_numbers(numbers)? {
            [1, step, errno] => Self::Failed { step, errno },
            [2, root, keeper] => {
                Self::Started { root: Pid::from_raw(root)?, keeper: Pid::from_raw(keeper)? }
            }
            [3, code, flags] => {
                let (nothing_left, signalled) = (flags & 1 != 0, flags & 2 != 0);
                Self::Exited { code, signalled, nothing_left, used }
            }
            _ => return None,
        })
    }
}

impl Control {
    pub(super) fn encode(self) -> [u8; LENGTH] {
        encode_numbers(match self {
            Self::Signal { signal, also } => [1, signal.as_raw(), also.map_or(0, raw)],
            Self::CleansUp => [2, 0, 0],
            Self::Kill => [3, 0, 0],
        })
    }

    /// `None` if the message is invalid.
    pub(super) fn decode(message: &[u8]) -> Option<Self> {
        Some(match decode_numbers(message)? {
            [1, signal, also] => {
                Self::Signal { signal: Signal::from_named_raw(signal)?, also: Pid::from_raw(also) }
            }
            [2, ..] => Self::CleansUp,
            [3, ..] => Self::Kill,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_round_trip() {
        let pid = |n| Pid::from_raw(n).unwrap();
        for report in [
            Report::Failed { step: 7, errno: 2 },
            Report::Started { root: pid(5), keeper: pid(4) },
            Report::Exited {
                code: 137,
                signalled: true,
                nothing_left: true,
                used: Used { cpu_us: 1 << 40, memory_kib: 2, blocks_in: 3, blocks_out: u64::MAX },
            },
            Report::Exited {
                code: -1,
                signalled: false,
                nothing_left: false,
                used: Used::default(),
            },
        ] {
            assert_eq!(Report::decode(&report.encode()), Some(report));
        }
        for control in [
            Control::Signal { signal: Signal::INT, also: None },
            Control::Signal { signal: Signal::KILL, also: Some(pid(9)) },
            Control::CleansUp,
            Control::Kill,
        ] {
            assert_eq!(Control::decode(&control.encode()), Some(control));
        }
        assert_eq!(Report::decode(&[0; REPORT_LENGTH]), None);
        assert_eq!(Report::decode(&[1; LENGTH]), None);
        assert_eq!(Report::decode(&[1]), None);
        assert_eq!(Control::decode(&[0xff; LENGTH]), None);
    }
}
