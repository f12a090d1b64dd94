//! `~.` and `~?` at the beginning of a line: words to this program inside what is typed to another.

/// What was typed, apart.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Typed {
    /// For the other side.
    Keys(Vec<u8>),
    /// Leave.
    Detach,
    /// Show what can be typed.
    Help,
}

/// Finds the words.
#[derive(Debug)]
pub(crate) struct Escapes {
    /// The next key is the first of a line.
    at_start: bool,
    /// A tilde that may be the beginning of a word.
    tilde: bool,
}

/// What `~?` shows.
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
    /// Takes what was typed apart, in order.
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
                        // What follows is as if the line had just begun.
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
    fn words_are_found_at_the_beginning_of_a_line_only() {
        let parse = |typed: &str| Escapes::default().parse(typed.as_bytes());
        assert_eq!(parse("~."), [Typed::Detach]);
        assert_eq!(parse("ls ~.\r~?"), [keys("ls ~.\r"), Typed::Help]);
        assert_eq!(parse("~~."), [keys("~.")]);
        assert_eq!(parse("~/bin\r"), [keys("~/bin\r")]);
        assert_eq!(parse("a\r~.b"), [keys("a\r"), Typed::Detach, keys("b")]);
    }

    #[test]
    fn a_word_may_come_in_pieces() {
        let mut escapes = Escapes::default();
        assert_eq!(escapes.parse(b"x\r"), [keys("x\r")]);
        assert_eq!(escapes.parse(b"~"), []);
        assert_eq!(escapes.parse(b"."), [Typed::Detach]);
        assert_eq!(escapes.parse(b"~"), []);
        assert_eq!(escapes.parse(b"q"), [keys("~q")]);
    }
}
