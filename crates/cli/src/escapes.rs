//! Escape sequences at the beginning of a line, `~.` and `~?`: commands to this program among the keys
//! typed to another.

/// A part of what was typed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Typed {
    /// Keys for the process.
    Keys(Vec<u8>),
    /// Detach.
    Detach,
    /// Show the escape sequences.
    Help,
}

/// Finds escape sequences.
#[derive(Debug)]
pub(crate) struct Escapes {
    /// The next key starts a line.
    at_start: bool,
    /// The last key was a tilde that may start an escape sequence.
    tilde: bool,
}

/// The text that `~?` shows.
pub(crate) const HELP: &str = "\
~.   detach; on a server the process keeps running
~?   show these keys
~~   type a tilde
They work at the start of a line, after Enter.";

impl Default for Escapes {
    fn default() -> Self {
        Self { at_start: true, tilde: false }
    }
}

impl Escapes {
    /// Splits what was typed into keys and escape sequences, in order.
    pub(crate) fn parse(&mut self, typed: &[u8]) -> Vec<Typed> {
        let mut found = Vec::new();
        let mut keys = Vec::new();
        let flush = |keys: &mut Vec<u8>, found: &mut Vec<Typed>| {
            if !keys.is_empty() {
                found.push(Typed::Keys(std::mem::take(keys)));
            }
        };
        for &key in typed {
            if std::mem::take(&mut self.tilde) {
                match key {
                    b'.' | b'?' => {
                        flush(&mut keys, &mut found);
                        found.push(if key == b'.' { Typed::Detach } else { Typed::Help });
                        // The next key counts as the first of a line.
                        self.at_start = true;
                        continue;
                    }
                    b'~' => {}
                    _ => keys.push(b'~'),
                }
            } else if self.at_start && key == b'~' {
                self.tilde = true;
                continue;
            }
            keys.push(key);
            self.at_start = matches!(key, b'\r' | b'\n');
        }
        flush(&mut keys, &mut found);
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(text: &str) -> Typed {
        Typed::Keys(text.as_bytes().to_vec())
    }

    #[test]
    fn escapes_count_only_at_the_beginning_of_a_line() {
        let parse = |typed: &str| Escapes::default().parse(typed.as_bytes());
        assert_eq!(parse("~."), [Typed::Detach]);
        assert_eq!(parse("ls ~.\r~?"), [keys("ls ~.\r"), Typed::Help]);
        assert_eq!(parse("~~."), [keys("~.")]);
        assert_eq!(parse("~/bin\r"), [keys("~/bin\r")]);
        assert_eq!(parse("a\r~.b"), [keys("a\r"), Typed::Detach, keys("b")]);
    }

    #[test]
    fn an_escape_split_over_two_reads_is_found() {
        let mut escapes = Escapes::default();
        assert_eq!(escapes.parse(b"x\r"), [keys("x\r")]);
        assert_eq!(escapes.parse(b"~"), []);
        assert_eq!(escapes.parse(b"."), [Typed::Detach]);
        assert_eq!(escapes.parse(b"~"), []);
        assert_eq!(escapes.parse(b"q"), [keys("~q")]);
    }
}
