//! Did the sandbox cause a failure? The rule of words and exit codes.
//!
//! Invariant: only for a sandboxed process that failed; decided once. The kernel keeps no record of
//! denials that an unprivileged server could read (Landlock's audit messages need the audit socket, a
//! seccomp notification costs a round trip per refused call and sees no file access), so words it is.

/// Words that tell of a denial, in lower case.
pub const WORDS: [&str; 7] = [
    "operation not permitted",
    "permission denied",
    "read-only file system",
    "seccomp",
    "sandbox",
    "landlock",
    "failed to write file",
];

/// Bytes that may be the beginning of a word continued in the next chunk.
const OVERLAP: usize = {
    let mut longest = 0;
    let mut at = 0;
    while at < WORDS.len() {
        if WORDS[at].len() > longest {
            longest = WORDS[at].len();
        }
        at += 1;
    }
    longest - 1
};

/// What a program killed for a forbidden system call exits with.
const SIGSYS_EXIT: i32 = 128 + libc::SIGSYS;

/// Reads output as it comes and remembers whether it speaks of a denial.
///
/// One per stream: what ends one stream and begins another is not one word.
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
    /// The end of what was read, in lower case.
    tail: Vec<u8>,
    spoken: bool,
}

impl Detector {
    /// Reads on.
    pub fn feed(&mut self, chunk: &[u8]) {
        if self.spoken || chunk.is_empty() {
            return;
        }
        // Across the seam, with as much of the chunk as a word can reach into.
        let mut seam = std::mem::take(&mut self.tail);
        seam.extend(chunk.iter().take(OVERLAP).map(u8::to_ascii_lowercase));
        self.spoken = contains_word(&seam) || contains_word(chunk);
        if chunk.len() >= OVERLAP {
            seam.clear();
            seam.extend(chunk[chunk.len() - OVERLAP..].iter().map(u8::to_ascii_lowercase));
        } else if seam.len() > OVERLAP {
            seam.drain(..seam.len() - OVERLAP);
        }
        self.tail = seam;
    }

    /// Whether a denial was spoken of.
    pub fn spoken(&self) -> bool {
        self.spoken
    }

    /// The verdict for a sandboxed process that exited so. Given several streams, ask
    /// [`denied`] with whether any of them spoke.
    pub fn denied(&self, exit_code: i32) -> bool {
        denied(exit_code, self.spoken)
    }
}

/// The verdict for a sandboxed process: its exit code, and whether its output spoke of a denial.
pub fn denied(exit_code: i32, spoken: bool) -> bool {
    exit_code != 0 && (spoken || exit_code == SIGSYS_EXIT)
}

/// Whether a sandboxed process that exited so was probably denied something.
pub fn is_denied<'a>(exit_code: i32, output: impl IntoIterator<Item = &'a [u8]>) -> bool {
    let mut detector = Detector::default();
    for chunk in output {
        detector.feed(chunk);
    }
    detector.denied(exit_code)
}

/// One pass: a word is looked for only where its first letter is.
fn contains_word(text: &[u8]) -> bool {
    text.iter().enumerate().any(|(at, byte)| {
        let first = byte.to_ascii_lowercase();
        matches!(first, b'o' | b'p' | b'r' | b's' | b'l' | b'f')
            && WORDS.iter().any(|word| {
                text.len() - at >= word.len()
                    && text[at..at + word.len()].eq_ignore_ascii_case(word.as_bytes())
            })
    })
}
