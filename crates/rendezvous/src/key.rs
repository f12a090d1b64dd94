//! A public key as it stands in requests and answers.
//!
//! Invariant: a [`WireKey`] is one that the Noise handshake would take.

use codex_exec_relay_core::{KeyError, NoisePublicKey, SUITE};
use ring::digest;
use serde::{Deserialize, Serialize};

use crate::secret::hex;

/// `{"suite", "x25519_public_key", "mlkem768_public_key"}`, and no other member.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Members", into = "Members")]
pub struct WireKey(NoisePublicKey);

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Members {
    suite: String,
    x25519_public_key: String,
    mlkem768_public_key: String,
}

/// Why a key was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WireKeyError {
    /// Not base64.
    #[error("a public key is not base64")]
    Base64,
    /// Not a key.
    #[error(transparent)]
    Key(#[from] KeyError),
}

impl WireKey {
    /// The key itself.
    pub fn key(&self) -> &NoisePublicKey {
        &self.0
    }

    /// A name for the key: the same for the same key only.
    pub(crate) fn fingerprint(&self) -> String {
        let mut sha = digest::Context::new(&digest::SHA256);
        sha.update(SUITE.as_bytes());
        sha.update(self.0.x25519());
        sha.update(self.0.mlkem768());
        hex(sha.finish().as_ref())
    }
}

impl From<NoisePublicKey> for WireKey {
    fn from(key: NoisePublicKey) -> Self {
        Self(key)
    }
}

impl TryFrom<Members> for WireKey {
    type Error = WireKeyError;

    fn try_from(members: Members) -> Result<Self, WireKeyError> {
        let bytes = |text: &str| {
            base64_simd::STANDARD.decode_to_vec(text).map_err(|_| WireKeyError::Base64)
        };
        let x25519 = bytes(&members.x25519_public_key)?;
        let mlkem768 = bytes(&members.mlkem768_public_key)?;
        Ok(Self(NoisePublicKey::new(&members.suite, &x25519, &mlkem768)?))
    }
}

impl From<WireKey> for Members {
    fn from(key: WireKey) -> Self {
        Self {
            suite: SUITE.to_owned(),
            x25519_public_key: base64_simd::STANDARD.encode_to_string(key.0.x25519()),
            mlkem768_public_key: base64_simd::STANDARD.encode_to_string(key.0.mlkem768()),
        }
    }
}

impl std::fmt::Debug for WireKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}
