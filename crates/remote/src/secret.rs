//! Text that must never be shown.
//!
//! Invariant: neither `Debug` nor `Display` gives the text away; it is wiped when dropped.

use std::fmt;

use http::HeaderValue;
use serde::{Deserialize, Deserializer};
use zeroize::Zeroizing;

/// A token, a key, an authorization, or a URL that carries one.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Zeroizing<String>);

impl Secret {
    /// The text itself. Whoever asks for it sees to it that it is not logged.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Whether there is any text but blanks.
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
