//! Reads quoted words that a shell printed to be read again: `'…'`, `"…"`, `$'…'` and backslashes.

/// The words of one line, without their quotes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Line(pub(super) Vec<Vec<u8>>);

/// Splits text into lines of words; a quoted newline ends no line. `None` if a quote is not closed, or if a
/// word has an expansion, which no shell prints here.
pub(super) fn lines(text: &[u8]) -> Option<Vec<Line>> {
    let mut reader = Reader { rest: text };
    let (mut lines, mut words, mut word) = (Vec::new(), Vec::new(), None::<Vec<u8>>);
    while let Some(byte) = reader.next() {
        match byte {
            b' ' | b'\t' => words.extend(word.take()),
            b'\n' => {
                words.extend(word.take());
                if !words.is_empty() {
                    lines.push(Line(std::mem::take(&mut words)));
                }
            }
            _ => reader.part(byte, word.get_or_insert_default())?,
        }
    }
    words.extend(word);
    if !words.is_empty() {
        lines.push(Line(words));
    }
    Some(lines)
}

/// `text` in quotes, as every shell reads it.
pub(super) fn quoted(text: &[u8]) -> Vec<u8> {
    let mut out = vec![b'\''];
    for &byte in text {
        match byte {
            b'\'' => out.extend(br"'\''"),
            byte => out.push(byte),
        }
    }
    out.push(b'\'');
    out
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl Reader<'_> {
    fn next(&mut self) -> Option<u8> {
        let (&first, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(first)
    }

    /// Reads the part of a word that `first` begins.
    fn part(&mut self, first: u8, word: &mut Vec<u8>) -> Option<()> {
        match first {
            b'\'' => loop {
                match self.next()? {
                    b'\'' => return Some(()),
                    byte => word.push(byte),
                }
            },
            b'"' => loop {
                match self.next()? {
                    b'"' => return Some(()),
                    b'$' | b'`' => return None,
                    b'\\' => match self.next()? {
                        b'\n' => {}
                        byte @ (b'$' | b'`' | b'"' | b'\\') => word.push(byte),
                        byte => word.extend([b'\\', byte]),
                    },
                    byte => word.push(byte),
                }
            },
            b'$' if self.rest.first() == Some(&b'\'') => {
                self.next();
                loop {
                    match self.next()? {
                        b'\'' => return Some(()),
                        b'\\' => self.escape(word)?,
                        byte => word.push(byte),
                    }
                }
            }
            b'$' | b'`' => None,
            b'\\' => {
                match self.next()? {
                    b'\n' => {}
                    byte => word.push(byte),
                }
                Some(())
            }
            byte => {
                word.push(byte);
                Some(())
            }
        }
    }

    /// Reads an escape in `$'…'`, after its backslash.
    fn escape(&mut self, word: &mut Vec<u8>) -> Option<()> {
        let byte = match self.next()? {
            b'a' => 7,
            b'b' => 8,
            b'e' | b'E' => 27,
            b'f' => 12,
            b'n' => b'\n',
            b'r' => b'\r',
            b't' => b'\t',
            b'v' => 11,
            b'x' => self.number(16, 2, None)? as u8,
            first @ b'0'..=b'7' => self.number(8, 2, Some(first))? as u8,
            wide @ (b'u' | b'U') => {
                let digits = if wide == b'u' { 4 } else { 8 };
                let character = char::from_u32(self.number(16, digits, None)?)?;
                word.extend(character.encode_utf8(&mut [0; 4]).as_bytes());
                return Some(());
            }
            byte @ (b'\\' | b'\'' | b'"' | b'?') => byte,
            _ => return None,
        };
        word.push(byte);
        Some(())
    }

    /// A number of up to `more` digits, after its `first` if that was read.
    fn number(&mut self, radix: u32, more: usize, first: Option<u8>) -> Option<u32> {
        let digit = |byte: u8| char::from(byte).to_digit(radix);
        let mut number = first.and_then(digit);
        for _ in 0..more {
            let Some(next) = self.rest.first().copied().and_then(digit) else { break };
            self.next();
            number = Some(number.unwrap_or(0) * radix + next);
        }
        number
    }
}
