//! Percent-encoding for parts of a URL.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, PercentEncode, utf8_percent_encode};

/// Everything but the unreserved characters of RFC 3986.
const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Escapes everything but unreserved characters. Use it for a path segment, so that an id cannot add
/// segments, and for a value of a query or form.
pub fn escape(text: &str) -> PercentEncode<'_> {
    utf8_percent_encode(text, RESERVED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_unreserved_characters_stay() {
        assert_eq!(escape("aZ09-._~").to_string(), "aZ09-._~");
        assert_eq!(escape("../a b?c#d&e=f+g%").to_string(), "..%2Fa%20b%3Fc%23d%26e%3Df%2Bg%25");
        assert_eq!(escape("\u{e9}\u{0}").to_string(), "%C3%A9%00");
    }
}
