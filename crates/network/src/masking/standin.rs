//! Stand-ins: values that look like a secret to the programs that check, and are none.

use regex::Regex;
use regex_syntax::hir::{Class, Hir, HirKind};

/// How secrets of one kind begin, and how long they usually are.
pub(super) struct Prefix {
    pub text: &'static str,
    pub usual: usize,
}

/// What every stand-in of a well-known kind has after its prefix, for people who look at it.
const MARK: &str = "masked";
/// Random characters that a stand-in has at least, so that no two are the same.
const FEWEST_RANDOM: usize = 16;
/// What an unbounded repetition of a pattern is repeated at most, beyond its least.
const MOST_REPEATS: u32 = 48;
const TRIES: usize = 64;

/// The prefix of the secret, a mark and random characters, as long as the secret. A secret that begins
/// like none of its kind gets the last prefix and the usual length.
pub(super) fn prefixed(secret: &str, prefixes: &[Prefix]) -> Option<String> {
    let own = prefixes.iter().find(|prefix| secret.starts_with(prefix.text));
    let prefix = own.or(prefixes.last())?;
    let length = if own.is_some() { secret.len() } else { prefix.usual };
    let fixed = prefix.text.len() + MARK.len();
    let random = length.saturating_sub(fixed).max(FEWEST_RANDOM);
    let random: String = std::iter::repeat_with(fastrand::alphanumeric).take(random).collect();
    Some(format!("{}{MARK}{random}", prefix.text))
}

/// A random string that the pattern matches as a whole, other than the secret.
pub(super) fn matching(regex: &Regex, pattern: &str, secret: &str) -> Option<String> {
    let hir = regex_syntax::parse(pattern).ok()?;
    (0..TRIES).find_map(|_| {
        let mut text = String::new();
        write_random(&hir, &mut text);
        (text != secret && !text.is_empty() && regex.is_match(&text)).then_some(text)
    })
}

fn write_random(hir: &Hir, text: &mut String) {
    match hir.kind() {
        // What a look demands may not hold: the whole is checked afterwards.
        HirKind::Empty | HirKind::Look(_) => {}
        HirKind::Literal(literal) => text.push_str(&String::from_utf8_lossy(&literal.0)),
        HirKind::Class(class) => text.extend(random_of(class)),
        HirKind::Repetition(repetition) => {
            let most = repetition.max.unwrap_or(u32::MAX);
            let most = most.min(repetition.min.saturating_add(MOST_REPEATS));
            // An unbounded one is to be long: short strings would soon be the same.
            let least = match repetition.max {
                None => repetition.min.saturating_add(MOST_REPEATS / 2),
                Some(_) => repetition.min,
            };
            for _ in 0..fastrand::u32(least..=most) {
                write_random(&repetition.sub, text);
            }
        }
        HirKind::Capture(capture) => write_random(&capture.sub, text),
        HirKind::Concat(parts) => parts.iter().for_each(|part| write_random(part, text)),
        HirKind::Alternation(choices) => {
            write_random(&choices[fastrand::usize(..choices.len())], text);
        }
    }
}

/// A character of a class: one that can be printed and sent in a header, if it has any.
fn random_of(class: &Class) -> Option<char> {
    let within = |start: u32, end: u32, low: u32, high: u32| {
        let (start, end) = (start.max(low), end.min(high));
        (start <= end).then_some((start, end))
    };
    let ranges: Vec<(u32, u32)> = match class {
        Class::Unicode(class) => {
            class.iter().map(|range| (u32::from(range.start()), u32::from(range.end()))).collect()
        }
        Class::Bytes(class) => {
            class.iter().map(|range| (u32::from(range.start()), u32::from(range.end()))).collect()
        }
    };
    let printable: Vec<_> =
        ranges.iter().filter_map(|(start, end)| within(*start, *end, 0x21, 0x7e)).collect();
    let ranges = if printable.is_empty() { ranges } else { printable };
    let count: u32 = ranges.iter().map(|(start, end)| end - start + 1).sum();
    let mut index = fastrand::u32(..count.max(1));
    for (start, end) in ranges {
        let size = end - start + 1;
        if index < size {
            return char::from_u32(start + index);
        }
        index -= size;
    }
    None
}
