//! Bytes that travel as base64 text in JSON.
//!
//! Invariant: bytes are decoded once, directly from the message, and encoded once, directly into the
//! outgoing one (see [`crate::encode`]), without an intermediate `String`.

use std::fmt;
use std::ops::Deref;

use bytes::Bytes;
use serde::de::{self, Deserialize, Deserializer, Visitor};
use serde::ser::{Serialize, Serializer};

/// A byte string, base64 (standard alphabet, padded) on the wire.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct Base64Bytes(pub Bytes);

impl Base64Bytes {
    /// Appends the base64 text of these bytes, without quotes.
    pub fn encode_into(&self, out: &mut Vec<u8>) {
        base64_simd::STANDARD.encode_append(&self.0, out);
    }

    /// The length of the base64 text.
    pub fn encoded_len(&self) -> usize {
        base64_simd::STANDARD.encoded_length(self.0.len())
    }
}

impl Deref for Base64Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl From<Vec<u8>> for Base64Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes.into())
    }
}

impl From<Bytes> for Base64Bytes {
    fn from(bytes: Bytes) -> Self {
        Self(bytes)
    }
}

impl From<&[u8]> for Base64Bytes {
    fn from(bytes: &[u8]) -> Self {
        Self(Bytes::copy_from_slice(bytes))
    }
}

/// Shows the length only: the content of terminals and files may be secret.
impl fmt::Debug for Base64Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "<{} bytes>", self.0.len())
    }
}

impl Serialize for Base64Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&base64_simd::STANDARD.encode_to_string(&self.0))
    }
}

impl<'de> Deserialize<'de> for Base64Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = Base64Bytes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("base64 text")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Base64Bytes, E> {
                base64_simd::STANDARD
                    .decode_to_vec(text)
                    .map(Base64Bytes::from)
                    .map_err(|_| E::custom("invalid base64 (standard alphabet, padded)"))
            }
        }
        deserializer.deserialize_str(Text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn invalid_base64_is_rejected() {
        for text in ["!!", "aGk", "aGk=x", "aG k=", "-_-_"] {
            let json = serde_json::to_string(text).unwrap();
            let error = serde_json::from_str::<Base64Bytes>(&json).unwrap_err();
            assert!(error.to_string().contains("base64"), "{text}: {error}");
        }
    }

    #[test]
    fn debug_shows_only_the_length() {
        assert_eq!(format!("{:?}", Base64Bytes::from(b"secret".to_vec())), "<6 bytes>");
    }

    proptest! {
        #[test]
        fn round_trip(bytes: Vec<u8>) {
            let bytes = Base64Bytes::from(bytes);
            let json = serde_json::to_string(&bytes).unwrap();
            prop_assert_eq!(json.len(), bytes.encoded_len() + 2);
            let mut direct = Vec::new();
            bytes.encode_into(&mut direct);
            prop_assert_eq!(json.trim_matches('"').as_bytes(), &direct[..]);
            prop_assert_eq!(serde_json::from_str::<Base64Bytes>(&json).unwrap(), bytes);
        }
    }
}
