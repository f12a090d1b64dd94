//! Guesses whether the sandbox caused a failure, from output and exit code.
//!
//! Invariant: applies only to a sandboxed process that failed; the way the output is split into chunks
//! makes no difference. An unprivileged server has no record of denials to read: Landlock's audit
//! messages need the audit socket, and seccomp notifications cost a round trip per refused call and
//! cover no file access. So the decision rests on the program's output.

/// Phrases that indicate a denial anywhere in the output, in lower case.
pub const PHRASES: [&str; 4] = [
    "operation not permitted",
    "permission denied",
    "read-only file system",
    "failed to write file",
];

/// Words that indicate a denial, unless they are part of a path: a project may have such a name.
pub const WORDS: [&str; 3] = ["seccomp", "sandbox", "landlock"];

/// Bytes of a chunk that may begin a phrase that ends in the next chunk.
const OVERLAP: usize = {
    // No word is as long as the longest phrase.
    let mut longest = 0;
    let mut at = 0;
    while at < PHRASES.len() {
        if PHRASES[at].len() > longest {
            longest = PHRASES[at].len();
        }
        at += 1;
    }
    longest - 1
};

/// Exit code of a program that was killed for a forbidden system call.
const SIGSYS_EXIT: i32 = 128 + libc::SIGSYS;

/// Scans output as it arrives for signs of a denial.
///
/// Use one per stream: a word does not continue in another stream.
///
/// ```
/// use codex_linux_sandbox::denial::Detector;
/// let mut detector = Detector::default();
/// detector.feed(b"touch: /etc/x: Read-only fi");
/// detector.feed(b"le system\n");
/// assert!(detector.denied(1));
/// assert!(!detector.denied(0));
/// ```
#[derive(Debug, Clone, Default)]
pub struct Detector {
    /// The end of the scanned output, in lower case.
    tail: Vec<u8>,
    /// The text after the last separator.
    token: Token,
    detected: bool,
}

/// Text without separators, such as a path.
#[derive(Debug, Clone, Copy, Default)]
struct Token {
    has_word: bool,
    is_path: bool,
}

impl Token {
    fn indicates_denial(self) -> bool {
        self.has_word && !self.is_path
    }
}

impl Detector {
    /// Scans a chunk.
    pub fn feed(&mut self, chunk: &[u8]) {
        if self.detected || chunk.is_empty() {
            return;
        }
        // Check across the boundary, with as much of the chunk as a phrase can reach into.
        let mut seam = std::mem::take(&mut self.tail);
        let before = seam.len();
        seam.extend(chunk.iter().take(OVERLAP).map(u8::to_ascii_lowercase));
        self.detected = contains_phrase(&seam) || contains_phrase(chunk);
        // A word has no separators, so one across the boundary belongs to the current token.
        self.token.has_word |=
            (0..before).any(|at| word_at(&seam, at).is_some_and(|length| at + length > before));
        self.detected |= self.read_tokens(chunk);
        if chunk.len() >= OVERLAP {
            seam.clear();
            seam.extend(chunk[chunk.len() - OVERLAP..].iter().map(u8::to_ascii_lowercase));
        } else if seam.len() > OVERLAP {
            seam.drain(..seam.len() - OVERLAP);
        }
        self.tail = seam;
    }

    /// Scans tokens; returns whether one that ends in this chunk indicates a denial.
    fn read_tokens(&mut self, chunk: &[u8]) -> bool {
        for (at, byte) in chunk.iter().enumerate() {
            match byte {
                b'/' => self.token.is_path = true,
                b's' | b'S' | b'l' | b'L' => {
                    self.token.has_word |= word_at(chunk, at).is_some();
                }
                byte if is_separator(*byte) => {
                    if self.token.indicates_denial() {
                        return true;
                    }
                    self.token = Token::default();
                }
                _ => {}
            }
        }
        false
    }

    /// Whether the sandbox probably caused this exit of a sandboxed process: the exit code is not 0, and
    /// the output indicates a denial or a forbidden system call killed the process.
    pub fn denied(&self, exit_code: i32) -> bool {
        let detected = self.detected || self.token.indicates_denial();
        exit_code != 0 && (detected || exit_code == SIGSYS_EXIT)
    }
}

/// Searches for a phrase only at its possible first letters, in one pass.
fn contains_phrase(text: &[u8]) -> bool {
    text.iter().enumerate().any(|(at, byte)| {
        matches!(byte.to_ascii_lowercase(), b'o' | b'p' | b'r' | b'f')
            && PHRASES.iter().any(|phrase| is_at(text, at, phrase))
    })
}

/// Length of the word that starts here.
fn word_at(text: &[u8], at: usize) -> Option<usize> {
    WORDS.iter().find(|word| is_at(text, at, word)).map(|word| word.len())
}

fn is_at(text: &[u8], at: usize, word: &str) -> bool {
    text.len() - at >= word.len() && text[at..at + word.len()].eq_ignore_ascii_case(word.as_bytes())
}

/// Characters that separate paths and words in messages.
fn is_separator(byte: u8) -> bool {
    byte.is_ascii_whitespace()
        || matches!(byte, 0 | b'\'' | b'"' | b'`' | b':' | b',' | b';')
        || matches!(byte, b'(' | b')' | b'[' | b']' | b'<' | b'>' | b'=')
}
