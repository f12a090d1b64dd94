//! Random changes of an input: of bytes, of numbers, of words, of lines and of brackets.

use fastrand::Rng;

/// Numbers at which parsers go wrong, as text.
const NUMBERS: [&str; 12] = [
    "0",
    "-1",
    "1",
    "255",
    "256",
    "65535",
    "65536",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "1e999",
    "-0.0",
];

/// The longest input that is made.
pub(crate) const MAX_LEN: usize = 64 << 10;

/// Changes `input` a few times, with parts of `other` and words of the corpus.
pub(crate) fn mutate(rng: &mut Rng, input: &[u8], other: &[u8], words: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = input.to_vec();
    for _ in 0..1 << rng.u32(..4) {
        change(rng, &mut bytes, other, words);
    }
    bytes.truncate(MAX_LEN);
    bytes
}

fn change(rng: &mut Rng, bytes: &mut Vec<u8>, other: &[u8], words: &[Vec<u8>]) {
    let place = range(rng, bytes.len(), 8);
    match rng.u8(..14) {
        0 if !bytes.is_empty() => bytes[place.start.min(place.end - 1)] ^= 1 << rng.u8(..8),
        1 if !bytes.is_empty() => bytes[place.start.min(place.end - 1)] = rng.u8(..),
        2 => drop(bytes.splice(place, [rng.u8(..)])),
        3 => drop(bytes.drain(place)),
        4 => bytes.truncate(place.start),
        5 => {
            let part = bytes[range(rng, bytes.len(), 64)].to_vec();
            bytes.splice(place.start..place.start, part);
        }
        6 => {
            let part = other[range(rng, other.len(), other.len())].to_vec();
            let place = range(rng, bytes.len(), bytes.len());
            bytes.splice(place, part);
        }
        7 | 8 => {
            if let Some(word) = rng.choice(words) {
                let place = word_at(rng, bytes).unwrap_or(place);
                bytes.splice(place, word.iter().copied());
            }
        }
        9 => {
            let place = number_at(rng, bytes).unwrap_or(place);
            let number = NUMBERS[rng.usize(..NUMBERS.len())];
            bytes.splice(place, number.bytes());
        }
        10 => swap_lines(rng, bytes),
        11 => nest(rng, bytes),
        12 if !bytes.is_empty() => {
            // A length or a number of several bytes.
            let at = place.start.min(bytes.len() - 1);
            let count = (1 << rng.u32(..3)).min(bytes.len() - at);
            bytes[at..at + count].fill([0, 0xff, 0x7f, 0x80, 1][rng.usize(..5)]);
        }
        _ => {
            let run = 1 << rng.u32(..12);
            let byte = bytes.get(place.start).copied().unwrap_or(b'a');
            bytes.splice(place.start..place.start, std::iter::repeat_n(byte, run));
        }
    }
}

/// A random range of at most `most` bytes; never empty unless there are none.
fn range(rng: &mut Rng, len: usize, most: usize) -> std::ops::Range<usize> {
    if len == 0 {
        return 0..0;
    }
    let start = rng.usize(..len);
    start..(start + rng.usize(1..=most.max(1))).min(len)
}

fn word_at(rng: &mut Rng, bytes: &[u8]) -> Option<std::ops::Range<usize>> {
    run_at(rng, bytes, |byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'/'))
}

fn number_at(rng: &mut Rng, bytes: &[u8]) -> Option<std::ops::Range<usize>> {
    run_at(rng, bytes, |byte| byte.is_ascii_digit())
}

/// The first run of such bytes at or after a random place.
fn run_at(
    rng: &mut Rng,
    bytes: &[u8],
    belongs: impl Fn(u8) -> bool,
) -> Option<std::ops::Range<usize>> {
    let from = rng.usize(..bytes.len().max(1));
    let start = from + bytes.get(from..)?.iter().position(|byte| belongs(*byte))?;
    let length = bytes[start..].iter().position(|byte| !belongs(*byte));
    Some(start..start + length.unwrap_or(bytes.len() - start))
}

/// Swaps, repeats or drops lines.
fn swap_lines(rng: &mut Rng, bytes: &mut Vec<u8>) {
    let mut lines: Vec<_> = bytes.split_inclusive(|byte| *byte == b'\n').collect();
    if lines.len() > 1 {
        let (a, b) = (rng.usize(..lines.len()), rng.usize(..lines.len()));
        match rng.u8(..3) {
            0 => lines.swap(a, b),
            1 => lines.insert(a, lines[b]),
            _ => drop(lines.remove(a)),
        }
        *bytes = lines.concat();
    }
}

/// Puts the input, or a part of it, into brackets, some of them many times.
fn nest(rng: &mut Rng, bytes: &mut Vec<u8>) {
    let place = range(rng, bytes.len(), bytes.len());
    let depth = 1 << rng.u32(..9);
    let (open, close) = [("[", "]"), ("{\"a\":", "}"), ("\"", "\"")][rng.usize(..3)];
    bytes.splice(place.end..place.end, close.repeat(depth).bytes());
    bytes.splice(place.start..place.start, open.repeat(depth).bytes());
}
