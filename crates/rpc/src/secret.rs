//! Text that must never be shown.
//!
//! Invariant: `Debug` does not give the text away, there is no `Display`, and the memory is wiped when
//! the secret is dropped.

use std::fmt;

use http::HeaderValue;
use serde::{Deserialize, Deserializer};
use zeroize::Zeroizing;

/// A token, a key, an authorization, or a URL that carries one.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Zeroizing<String>);

impl Secret {
    /// The text itself. The caller must not log it.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Whether the text is empty or only whitespace.
    pub fn is_blank(&self) -> bool {
        self.0.trim().is_empty()
    }

    /// `prefix` and the text as the value of a header; `None` if no header can carry it.
    pub fn header(&self, prefix: &str) -> Option<HeaderValue> {
        let text = Zeroizing::new(format!("{prefix}{}", self.expose()));
        let mut value = HeaderValue::from_str(&text).ok()?;
        value.set_sensitive(true);
        Some(value)
    }
}

impl From<String> for Secret {
    fn from(text: String) -> Self {
        Self(Zeroizing::new(text))
    }
}

impl From<&str> for Secret {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer).map(Self::from)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

#[cfg(test)]
mod tests {
    use zeroize::ZeroizeOnDrop;

    use super::*;

    #[test]
    fn debug_shows_neither_a_secret_nor_its_length() {
        let (secret, longer) = (Secret::from("hunter2"), Secret::from("a longer one".to_owned()));
        assert_eq!(format!("{secret:?}"), format!("{longer:?}"));
        for shown in [
            format!("{secret:#?}"),
            format!("{:?}", Some(&secret)),
            format!("{:?}", secret.header("Bearer ").unwrap()),
        ] {
            assert!(!shown.contains("hunter2"), "{shown}");
        }
    }

    #[test]
    fn secret_is_exposed_on_request_and_wiped_on_drop() {
        fn is_wiped(_: &impl ZeroizeOnDrop) {}
        let secret: Secret = serde_json::from_str(r#""hunter2""#).unwrap();
        assert_eq!(secret.expose(), "hunter2");
        assert_eq!(secret.header("Bearer ").unwrap(), "Bearer hunter2");
        assert!(Secret::from("line\nbreak").header("").is_none());
        assert!(Secret::from(" \n").is_blank() && !secret.is_blank());
        is_wiped(&secret.0);
    }
}
