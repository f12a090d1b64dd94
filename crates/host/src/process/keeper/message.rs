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
        /// No descendant is left.
        nothing_left: bool,
    },
}

/// From the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::process) enum Control {
    /// Signal the program's group, unless it has exited, and another group.
    Signal { signal: Signal, also: Option<Pid> },
    /// The program exits by itself when the server does, and must clean up before that.
    CleansUp,
}

/// Length of every message, in bytes.
pub(in crate::process) const LENGTH: usize = 12;

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
    pub(super) fn encode(self) -> [u8; LENGTH] {
        encode_numbers(match self {
            Self::Failed { step, errno } => [1, step, errno],
            Self::Started { root, keeper } => [2, raw(root), raw(keeper)],
            Self::Exited { code, nothing_left } => [3, code, i32::from(nothing_left)],
        })
    }

    /// `None` if the message is invalid.
    pub(super) fn decode(message: &[u8]) -> Option<Self> {
        Some(match decode_numbers(message)? {
            [1, step, errno] => Self::Failed { step, errno },
            [2, root, keeper] => {
                Self::Started { root: Pid::from_raw(root)?, keeper: Pid::from_raw(keeper)? }
            }
            [3, code, nothing_left] => Self::Exited { code, nothing_left: nothing_left != 0 },
            _ => return None,
        })
    }
}

impl Control {
    pub(super) fn encode(self) -> [u8; LENGTH] {
        encode_numbers(match self {
            Self::Signal { signal, also } => [1, signal.as_raw(), also.map_or(0, raw)],
            Self::CleansUp => [2, 0, 0],
        })
    }

    /// `None` if the message is invalid.
    pub(super) fn decode(message: &[u8]) -> Option<Self> {
        Some(match decode_numbers(message)? {
            [1, signal, also] => {
                Self::Signal { signal: Signal::from_named_raw(signal)?, also: Pid::from_raw(also) }
            }
            [2, ..] => Self::CleansUp,
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
            Report::Exited { code: 137, nothing_left: true },
            Report::Exited { code: -1, nothing_left: false },
        ] {
            assert_eq!(Report::decode(&report.encode()), Some(report));
        }
        for control in [
            Control::Signal { signal: Signal::INT, also: None },
            Control::Signal { signal: Signal::KILL, also: Some(pid(9)) },
            Control::CleansUp,
        ] {
            assert_eq!(Control::decode(&control.encode()), Some(control));
        }
        assert_eq!(Report::decode(&[0; LENGTH]), None);
        assert_eq!(Report::decode(&[1]), None);
        assert_eq!(Control::decode(&[0xff; LENGTH]), None);
    }
}
