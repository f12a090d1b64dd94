//! Secrets: random names, tokens and the signing key.
//!
//! Invariant: no `Debug` here shows a secret, and signatures are compared in constant time.

use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::path::Path;

pub use codex_exec_rpc::Secret;
use ring::{digest, hmac};
use zeroize::Zeroizing;

use crate::journal::create_beside;

/// The key that signs tickets: one per data directory, or one per cluster.
#[derive(Clone)]
pub struct SigningKey(Zeroizing<[u8; 32]>);

impl SigningKey {
    /// A new key.
    pub fn generate() -> io::Result<Self> {
        let mut key = Zeroizing::new([0; 32]);
        fill(&mut *key)?;
        Ok(Self(key))
    }

    /// A key from its bytes; `None` unless there are 32.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        Some(Self(Zeroizing::new(bytes.try_into().ok()?)))
    }

    pub(crate) fn expose(&self) -> &[u8; 32] {
        &self.0
    }

    /// Reads the key from this file, or creates both.
    pub fn open(path: &Path) -> io::Result<Self> {
        match OpenOptions::new().read(true).open(path) {
            Ok(mut file) => {
                let mut bytes = Zeroizing::new(Vec::new());
                file.read_to_end(&mut bytes)?;
                return Self::from_bytes(&bytes).ok_or_else(|| {
                    let what = format!("{} is not a valid key file; remove it", path.display());
                    io::Error::new(io::ErrorKind::InvalidData, what)
                });
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        // Written to a second file and renamed, so that a crash leaves a complete key or none.
        let key = Self::generate()?;
        let (mut file, beside) = create_beside(path)?;
        file.write_all(key.expose())?;
        file.sync_all()?;
        std::fs::rename(&beside, path)?;
        Ok(key)
    }

    /// The signature of `message`.
    pub(crate) fn sign(&self, message: &[u8]) -> [u8; 32] {
        let mut signature = [0; 32];
        signature.copy_from_slice(hmac::sign(&self.key(), message).as_ref());
        signature
    }

    /// Whether `signature` is that of `message`, in constant time.
    pub(crate) fn verifies(&self, message: &[u8], signature: &[u8]) -> bool {
        hmac::verify(&self.key(), message, signature).is_ok()
    }

    fn key(&self) -> hmac::Key {
        hmac::Key::new(hmac::HMAC_SHA256, &*self.0)
    }
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SigningKey")
    }
}

/// Random bytes from the system.
pub(crate) fn fill(bytes: &mut [u8]) -> io::Result<()> {
    getrandom::fill(bytes).map_err(|error| io::Error::other(error.to_string()))
}

/// A random name: a prefix and 16 bytes in hex.
pub(crate) fn random_name(prefix: &str) -> io::Result<String> {
    let mut bytes = [0; 16];
    fill(&mut bytes)?;
    Ok(format!("{prefix}{}", hex(&bytes)))
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    use fmt::Write as _;
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut out, byte| {
        let _ = write!(out, "{byte:02x}");
        out
    })
}

/// SHA-256 in hex.
pub(crate) fn digest(bytes: &[u8]) -> String {
    hex(digest::digest(&digest::SHA256, bytes).as_ref())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signing_key_is_created_once_with_mode_0600() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        let first = SigningKey::open(&path).unwrap();
        let second = SigningKey::open(&path).unwrap();
        assert_eq!(first.expose(), second.expose());
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        std::fs::write(&path, "short").unwrap();
        SigningKey::open(&path).unwrap_err();
    }

    #[test]
    fn signature_verifies_only_its_message_and_key() {
        let key = SigningKey::generate().unwrap();
        let signature = key.sign(b"message");
        assert!(key.verifies(b"message", &signature));
        assert!(!key.verifies(b"messagf", &signature));
        assert!(!key.verifies(b"message", &signature[..31]));
        assert!(!SigningKey::generate().unwrap().verifies(b"message", &signature));
    }
}
