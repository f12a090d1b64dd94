//! Fingerprints of public keys.

use codex_exec_relay_core::{NoisePublicKey, SUITE};
use ring::digest;

use crate::secret::hex;

/// The SHA-256 of the suite and both parts of the key, in hex.
pub(crate) fn fingerprint(key: &NoisePublicKey) -> String {
    let mut sha = digest::Context::new(&digest::SHA256);
    sha.update(SUITE.as_bytes());
    sha.update(key.x25519());
    sha.update(key.mlkem768());
    hex(sha.finish().as_ref())
}
