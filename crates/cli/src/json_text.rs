//! JSON for stdout, which may be a terminal.
//!
//! Invariant: no character in it controls a terminal. JSON escapes most control characters; this also escapes
//! DEL, the C1 controls and bidirectional controls, which changes nothing for a program that parses it.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::Serializer;
use serde_json::ser::{CompactFormatter, Formatter, PrettyFormatter};

use crate::style::is_unsafe;

/// One line of JSON, without its end.
pub(crate) fn line(value: &impl Serialize) -> serde_json::Result<String> {
    text(value, CompactFormatter)
}

/// Indented JSON, without its last line end.
pub(crate) fn pretty(value: &impl Serialize) -> serde_json::Result<String> {
    text(value, PrettyFormatter::new())
}

fn text(value: &impl Serialize, formatter: impl Formatter) -> serde_json::Result<String> {
    let mut out = Vec::new();
    value.serialize(&mut Serializer::with_formatter(&mut out, Escaping(formatter)))?;
    String::from_utf8(out).map_err(serde::ser::Error::custom)
}

/// A formatter that escapes more of each string.
struct Escaping<F>(F);

macro_rules! delegate {
    ($($name:ident($($arg:ident: $type:ty),*);)*) => {
        $(fn $name<W: ?Sized + Write>(&mut self, writer: &mut W $(, $arg: $type)*) -> io::Result<()> {
            self.0.$name(writer $(, $arg)*)
        })*
    };
}

impl<F: Formatter> Formatter for Escaping<F> {
    fn write_string_fragment<W: ?Sized + Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        let mut rest = fragment;
        while let Some(at) = rest.find(is_unsafe) {
            writer.write_all(&rest.as_bytes()[..at])?;
            let mut chars = rest[at..].chars();
            let mut units = [0; 2];
            for unit in chars.next().unwrap_or_default().encode_utf16(&mut units) {
                write!(writer, "\\u{unit:04x}")?;
            }
            rest = chars.as_str();
        }
        writer.write_all(rest.as_bytes())
    }

    delegate! {
        begin_array();
        end_array();
        begin_array_value(first: bool);
        end_array_value();
        begin_object();
        end_object();
        begin_object_key(first: bool);
        end_object_key();
        begin_object_value();
        end_object_value();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_parses_to_the_same_value_and_controls_no_terminal() {
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..2_000 {
            let text: String = (0..random.usize(..20))
                .map(|_| match random.u32(..4) {
                    0 => char::from_u32(random.u32(..0xa0)).unwrap_or(' '),
                    1 => char::from_u32(0x2000 + random.u32(..0x70)).unwrap_or(' '),
                    2 => char::from_u32(0xe_0000 + random.u32(..0x90)).unwrap_or(' '),
                    _ => random.char(..),
                })
                .collect();
            let value = serde_json::json!({text.clone(): [text, 1, null, {"a": true}], "b": []});
            for shown in [line(&value).unwrap(), pretty(&value).unwrap()] {
                assert!(!shown.chars().any(|c| c != '\n' && is_unsafe(c)), "{shown:?}");
                assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).unwrap(), value);
            }
            assert!(!line(&value).unwrap().contains('\n'));
        }
        assert_eq!(pretty(&serde_json::json!({"a": [1]})).unwrap(), "{\n  \"a\": [\n    1\n  ]\n}");
    }
}
