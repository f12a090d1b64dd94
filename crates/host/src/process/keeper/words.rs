//! What a keeper and the server say to each other, over a socket of their own: one message a word.

use rustix::process::{Pid, Signal};

/// The keeper's words, in this order: [`Failed`](Self::Failed) alone, or [`Started`](Self::Started)
/// and later [`Exited`](Self::Exited). Its end, which closes the socket, means that nothing is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::process) enum Word {
    /// No process was started: at this step, for this error number.
    Failed { step: i32, errno: i32 },
    /// The program runs.
    Started { root: Pid, keeper: Pid },
    /// The program has exited, with 128 + signal for a death by signal.
    Exited {
        code: i32,
        /// And nothing of it is left.
        last: bool,
    },
}

/// The server's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::process) enum Wish {
    /// A signal to the group of the program, if that has not exited, and to another group.
    Signal { signal: Signal, also: Option<Pid> },
    /// The program ends by itself when the server does, and has to tidy up before.
    TidiesUp,
}

/// The length of every message.
pub(in crate::process) const LENGTH: usize = 12;

fn message(words: [i32; 3]) -> [u8; LENGTH] {
    let mut message = [0; LENGTH];
    for (bytes, word) in message.chunks_exact_mut(4).zip(words) {
        bytes.copy_from_slice(&word.to_ne_bytes());
    }
    message
}

fn words(message: &[u8]) -> Option<[i32; 3]> {
    let message: &[u8; LENGTH] = message.try_into().ok()?;
    let [a, b, c, d, e, f, g, h, i, j, k, l] = *message;
    Some([[a, b, c, d], [e, f, g, h], [i, j, k, l]].map(i32::from_ne_bytes))
}

fn raw(pid: Pid) -> i32 {
    pid.as_raw_nonzero().get()
}

impl Word {
    pub(super) fn message(self) -> [u8; LENGTH] {
        message(match self {
            Self::Failed { step, errno } => [1, step, errno],
            Self::Started { root, keeper } => [2, raw(root), raw(keeper)],
            Self::Exited { code, last } => [3, code, i32::from(last)],
        })
    }

    /// `None` if it is none.
    pub(super) fn read(message: &[u8]) -> Option<Self> {
        Some(match words(message)? {
            [1, step, errno] => Self::Failed { step, errno },
            [2, root, keeper] => {
                Self::Started { root: Pid::from_raw(root)?, keeper: Pid::from_raw(keeper)? }
            }
            [3, code, last] => Self::Exited { code, last: last != 0 },
            _ => return None,
        })
    }
}

impl Wish {
    pub(super) fn message(self) -> [u8; LENGTH] {
        message(match self {
            Self::Signal { signal, also } => [1, signal.as_raw(), also.map_or(0, raw)],
            Self::TidiesUp => [2, 0, 0],
        })
    }

    /// `None` if it is none.
    pub(super) fn read(message: &[u8]) -> Option<Self> {
        Some(match words(message)? {
            [1, signal, also] => {
                Self::Signal { signal: Signal::from_named_raw(signal)?, also: Pid::from_raw(also) }
            }
            [2, ..] => Self::TidiesUp,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_understood_as_they_were_meant() {
        let pid = |n| Pid::from_raw(n).unwrap();
        for word in [
            Word::Failed { step: 7, errno: 2 },
            Word::Started { root: pid(5), keeper: pid(4) },
            Word::Exited { code: 137, last: true },
            Word::Exited { code: -1, last: false },
        ] {
            assert_eq!(Word::read(&word.message()), Some(word));
        }
        for wish in [
            Wish::Signal { signal: Signal::INT, also: None },
            Wish::Signal { signal: Signal::KILL, also: Some(pid(9)) },
            Wish::TidiesUp,
        ] {
            assert_eq!(Wish::read(&wish.message()), Some(wish));
        }
        assert_eq!(Word::read(&[0; LENGTH]), None);
        assert_eq!(Word::read(&[1]), None);
        assert_eq!(Wish::read(&[0xff; LENGTH]), None);
    }
}
