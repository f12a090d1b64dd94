//! The output of a command: the newest bytes, numbered from the first byte that the command wrote.
//!
//! Invariant: `start` plus the length is the number of bytes that were written; at most `limit` of them are kept.

/// Output by offset.
#[derive(Debug)]
pub(crate) struct OutputLog {
    bytes: Vec<u8>,
    start: u64,
    limit: usize,
}

/// A piece of output, as text.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Excerpt {
    pub(crate) text: String,
    /// The offset of its first byte: later than the one asked for if older output was dropped.
    pub(crate) from: u64,
    /// The offset to read on at.
    pub(crate) next: u64,
}

/// The most bytes of a character in UTF-8: a piece is never shorter, so that every read makes progress.
const LONGEST_CHARACTER: usize = 4;

impl OutputLog {
    pub(crate) fn new(limit: usize) -> Self {
        Self { bytes: Vec::new(), start: 0, limit: limit.max(1) }
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        // Twice the limit before anything moves, so that a byte moves once on average.
        if self.bytes.len() >= 2 * self.limit {
            let drop = self.bytes.len() - self.limit;
            self.bytes.drain(..drop);
            self.start += drop as u64;
        }
    }

    /// How many bytes were written.
    pub(crate) fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    /// Up to `max` bytes from `offset` on. A character that the end cuts stays for the next call, unless
    /// the output is `complete`. Bytes that are not UTF-8 become U+FFFD.
    pub(crate) fn read(&self, offset: u64, max: usize, complete: bool) -> Excerpt {
        let from = offset.clamp(self.start, self.end());
        let skip = usize::try_from(from - self.start).unwrap_or(usize::MAX);
        let rest = self.bytes.get(skip..).unwrap_or_default();
        let mut piece = &rest[..rest.len().min(max.max(LONGEST_CHARACTER))];
        let is_last = complete && piece.len() == rest.len();
        if !is_last && let Some(tail) = incomplete_tail(piece) {
            piece = &piece[..piece.len() - tail];
        }
        let text = String::from_utf8_lossy(piece).into_owned();
        Excerpt { text, from, next: from + piece.len() as u64 }
    }

    /// The last line that has something in it, cut to a length that fits a status line.
    pub(crate) fn last_line(&self) -> String {
        let tail = &self.bytes[self.bytes.len().saturating_sub(1024)..];
        let tail = String::from_utf8_lossy(tail);
        let line = tail.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
        line.trim().chars().filter(|c| !c.is_control()).take(120).collect()
    }
}

/// How many bytes at the end begin a character that is not complete.
fn incomplete_tail(bytes: &[u8]) -> Option<usize> {
    let end = &bytes[bytes.len().saturating_sub(3)..];
    (1..=end.len()).find(|&len| {
        let tail = &end[end.len() - len..];
        std::str::from_utf8(tail)
            .is_err_and(|error| error.error_len().is_none() && error.valid_up_to() == 0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever is written and read in whatever pieces, the pieces are the output without what was dropped.
    #[test]
    fn excerpts_join_to_the_output() {
        for seed in 0..300 {
            let mut random = fastrand::Rng::with_seed(seed);
            let limit = random.usize(8..200);
            let mut log = OutputLog::new(limit);
            let (mut all, mut read, mut next) = (String::new(), Vec::new(), 0);
            for _ in 0..random.usize(1..40) {
                let text: String = (0..random.usize(0..20))
                    .map(|_| if random.bool() { 'a' } else { random.char('ß'..) })
                    .collect();
                all.push_str(&text);
                for chunk in text.as_bytes().chunks(random.usize(1..5)) {
                    log.push(chunk);
                }
                assert_eq!(log.end(), all.len() as u64);
                assert!(log.bytes.len() < 2 * limit);
                if random.bool() {
                    let excerpt = log.read(next, random.usize(4..64), false);
                    assert!(excerpt.from >= next);
                    if excerpt.from == next {
                        // Nothing was dropped, so no character is broken.
                        let expected = &all.as_bytes()[usize::try_from(excerpt.from).unwrap()
                            ..usize::try_from(excerpt.next).unwrap()];
                        assert_eq!(excerpt.text.as_bytes(), expected, "seed {seed}");
                    }
                    next = excerpt.next;
                    read.push(excerpt);
                }
            }
            for pair in read.windows(2) {
                assert!(pair[1].from >= pair[0].next);
            }
        }
    }

    #[test]
    fn broken_text_is_shown_and_not_waited_for() {
        let mut log = OutputLog::new(100);
        log.push(b"a\xff\xe2\x82");
        assert_eq!(log.read(0, 100, false).text, "a\u{fffd}");
        assert_eq!(log.read(2, 100, false), Excerpt { text: String::new(), from: 2, next: 2 });
        assert_eq!(log.read(2, 100, true).next, 4);
    }
}
