//! When the sandbox caused a failure.

use codex_linux_sandbox::denial::{Detector, PHRASES, WORDS};
use proptest::prelude::*;

#[test]
fn output_and_exit_code_decide() {
    for (code, output, denied) in [
        (1, "touch: cannot touch 'x': Read-only file system", true),
        (1, "bash: /etc/x: Permission denied", true),
        (1, "OPERATION NOT PERMITTED", true),
        (1, "error: failed to write file `x`", true),
        (1, "Landlock", true),
        (2, "Operation not permitted", true),
        (126, "sh: x: Permission denied", true),
        (127, "sandbox", true),
        (1, "error: sandbox: denied", true),
        (1, "blocked (sandboxed)", true),
        (1, "/usr/bin/x: the sandbox says no", true),
        // A path may have any name, and may still be denied.
        (1, "ls: cannot access '/srv/sandbox/x': No such file or directory", false),
        (1, "/home/u/landlock-demo/src/seccomp.rs:3: error", false),
        (1, "error: sandbox/x.c(12): no", false),
        (1, "cat: /srv/sandbox/x: Permission denied", true),
        (0, "Permission denied", false),
        (1, "assertion failed", false),
        (2, "ls: cannot access '/nope': No such file or directory", false),
        (126, "", false),
        (127, "sh: 1: nope: not found", false),
        (128 + libc::SIGSYS, "", true),
        (128 + libc::SIGKILL, "", false),
        (1, "", false),
    ] {
        let mut detector = Detector::default();
        detector.feed(output.as_bytes());
        assert_eq!(detector.denied(code), denied, "{code} {output}");
    }
}

proptest! {
    /// However the output is split, the verdict is that of the whole.
    #[test]
    fn chunk_boundaries_do_not_matter(
        before in "[a-zA-Z/ \n]{0,30}",
        word in proptest::option::of(0..PHRASES.len() + WORDS.len()),
        after in "[a-z/ \n]{0,30}",
        cuts in proptest::collection::vec(0usize..100, 0..8),
    ) {
        let all: Vec<&str> = PHRASES.into_iter().chain(WORDS).collect();
        let word = word.map_or("", |index| all[index]);
        let whole = format!("{before}{word}{after}");
        let lower = whole.to_lowercase();
        let expected = PHRASES.iter().any(|phrase| lower.contains(phrase))
            || lower
                .split([' ', '\n'])
                .any(|token| !token.contains('/') && WORDS.iter().any(|w| token.contains(w)));
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(whole.len())).collect();
        cuts.push(0);
        cuts.push(whole.len());
        cuts.sort_unstable();
        let mut detector = Detector::default();
        for pair in cuts.windows(2) {
            detector.feed(&whole.as_bytes()[pair[0]..pair[1]]);
        }
        prop_assert_eq!(detector.denied(1), expected);
        prop_assert!(!detector.denied(0));
    }
}
