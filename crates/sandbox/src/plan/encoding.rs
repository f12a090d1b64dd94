//! Encodes a plan for the memory file that the re-entered process reads.
//!
//! Invariant: both ends are the same executable. The version number only turns a replaced executable
//! (an upgrade under a running server) into a clear error.

use super::Plan;

/// Increment it with every change of [`Plan`].
const VERSION: u8 = 6;

/// Why bytes are not a valid plan.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// Written by another version of this executable.
    #[error("the plan was written by another version of this program; restart the server")]
    Version,
    /// Damaged.
    #[error("the plan cannot be read")]
    Damaged(#[source] rmp_serde::decode::Error),
}

impl Plan {
    /// Encodes the plan.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![VERSION];
        // Writing to a vector cannot fail, and every type of the plan can be encoded.
        let written = rmp_serde::encode::write(&mut bytes, self);
        if written.is_ok() { bytes } else { Vec::new() }
    }

    /// Decodes a plan.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        match bytes.split_first() {
            Some((&VERSION, rest)) => rmp_serde::from_slice(rest).map_err(DecodeError::Damaged),
            _ => Err(DecodeError::Version),
        }
    }
}

/// Encodes paths as bytes; serde's own encoding requires UTF-8.
pub(super) mod path {
    use std::ffi::{OsStr, OsString};
    use std::fmt;
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    use std::path::{Path, PathBuf};

    use serde::de::{Deserializer, Error, Visitor};
    use serde::ser::Serializer;

    pub(in super::super) fn serialize<S: Serializer>(
        path: &Path,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(path.as_os_str().as_bytes())
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<PathBuf, D::Error> {
        struct Bytes;
        impl Visitor<'_> for Bytes {
            type Value = PathBuf;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the bytes of a path")
            }

            fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<PathBuf, E> {
                Ok(OsStr::from_bytes(bytes).into())
            }

            fn visit_byte_buf<E: Error>(self, bytes: Vec<u8>) -> Result<PathBuf, E> {
                Ok(OsString::from_vec(bytes).into())
            }
        }
        deserializer.deserialize_bytes(Bytes)
    }
}
