//! The end of the output so far, if that is in the middle of a character or of an escape sequence.
//!
//! A terminal that joins there needs those bytes too: without them it would print the rest of the sequence.

/// Bytes of an unfinished sequence that are kept.
const MAX_TAIL: usize = 4096;

const ESC: u8 = 0x1b;
const CAN: u8 = 0x18;
const SUB: u8 = 0x1a;

/// An unfinished character or sequence; empty if there is none.
#[derive(Debug, Default)]
pub(crate) struct Tail {
    bytes: Vec<u8>,
}

impl Tail {
    /// Adds output.
    pub(crate) fn push(&mut self, output: &[u8]) {
        let start = output.iter().rposition(|byte| *byte == ESC);
        match start {
            Some(at) => {
                self.bytes.clear();
                self.extend(&output[at..]);
            }
            None if self.bytes.is_empty() => {
                let from = unfinished_character(output);
                self.bytes.extend_from_slice(&output[from..]);
                return;
            }
            None => self.extend(output),
        }
        if self.bytes.first() != Some(&ESC) {
            let from = unfinished_character(&self.bytes);
            self.bytes.drain(..from);
        } else if let Some(end) = end_of_sequence(&self.bytes) {
            self.bytes.drain(..end);
            let from = unfinished_character(&self.bytes);
            self.bytes.drain(..from);
        }
    }

    /// A sequence that is too long is replaced by one that means nothing and has the same end.
    fn extend(&mut self, output: &[u8]) {
        if self.bytes.first() == Some(&ESC) && self.bytes.len() + output.len() > MAX_TAIL {
            let mut whole = std::mem::take(&mut self.bytes);
            whole.extend_from_slice(output);
            if let Some(end) = end_of_sequence(&whole) {
                self.bytes = whole.split_off(end);
                let from = unfinished_character(&self.bytes);
                self.bytes.drain(..from);
                return;
            }
            self.bytes = match whole.get(1) {
                Some(b']') => b"\x1b]9999;".to_vec(),
                Some(b'P' | b'X' | b'^' | b'_') => b"\x1b_".to_vec(),
                _ => whole[..2].to_vec(),
            };
            return;
        }
        self.bytes.extend_from_slice(output);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The unfinished bytes, without controls, which took effect already.
    pub(crate) fn bytes(&self) -> impl Iterator<Item = u8> + '_ {
        self.bytes.iter().copied().filter(|byte| *byte >= 0x20 || *byte == ESC)
    }
}

/// The length of the sequence at the start of `bytes`; `None` if it is unfinished.
fn end_of_sequence(bytes: &[u8]) -> Option<usize> {
    let after = |from: usize, is_end: fn(u8) -> bool| {
        let end = bytes[from..].iter().position(|byte| is_end(*byte))?;
        Some(from + end + 1)
    };
    match bytes.get(1)? {
        b'[' => after(2, |byte| matches!(byte, 0x40..=0x7e | CAN | SUB)),
        b']' => after(2, |byte| matches!(byte, 0x07 | CAN | SUB)),
        b'P' | b'X' | b'^' | b'_' => after(2, |byte| matches!(byte, CAN | SUB)),
        _ => after(1, |byte| matches!(byte, 0x30..=0x7e | CAN | SUB)),
    }
}

/// Where an unfinished character begins at the end of `bytes`.
fn unfinished_character(bytes: &[u8]) -> usize {
    let from = bytes.len().saturating_sub(3);
    for at in (from..bytes.len()).rev() {
        let needed = match bytes[at] {
            0xc2..=0xdf => 2,
            0xe0..=0xef => 3,
            0xf0..=0xf4 => 4,
            0x80..=0xbf => continue,
            _ => break,
        };
        if bytes.len() - at < needed
            && std::str::from_utf8(&bytes[at..]).is_err_and(|e| e.error_len().is_none())
        {
            return at;
        }
        break;
    }
    bytes.len()
}
