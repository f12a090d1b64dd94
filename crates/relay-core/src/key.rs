//! Noise identities and public keys.
//!
//! Invariant: a [`NoisePublicKey`] has the right suite, the right lengths and an ML-KEM part that is valid
//! by FIPS 203; a [`NoiseIdentity`] wipes its secrets when its last clone is dropped; neither prints a
//! secret.

use std::fmt;
use std::sync::Arc;

use clatter::KeyPair;
use clatter::bytearray::ByteArray;
use clatter::crypto::dh::X25519;
use clatter::crypto::kem::rust_crypto_ml_kem::MlKem768;
use clatter::traits::{Dh, Kem};

use crate::entropy::{Entropy, EntropyError, HandshakeRng};

/// The only supported suite, as the registry spells it.
///
/// The Noise protocol name that is hashed into the handshake is the library's own
/// (`Noise_hybridIK_25519+MLKEM768_AESGCM_SHA256`); this one is a label.
pub const SUITE: &str = "Noise_hybridIK_X25519+MLKEM768_AESGCM_SHA256";
/// Bytes of an X25519 public key.
pub const X25519_LEN: usize = 32;
/// Bytes of an ML-KEM-768 public key.
pub const MLKEM768_LEN: usize = 1184;

/// ML-KEM works modulo this; a coefficient at or above it is not canonical.
const MLKEM_Q: u16 = 3329;
/// The 12-bit coefficients come first in an ML-KEM-768 key, then a 32-byte seed.
const MLKEM768_COEFFICIENT_BYTES: usize = 1152;

pub(crate) type DhPair = KeyPair<<X25519 as Dh>::PubKey, <X25519 as Dh>::PrivateKey>;
pub(crate) type KemPublic = <MlKem768 as Kem>::PubKey;
pub(crate) type KemPair = KeyPair<KemPublic, <MlKem768 as Kem>::SecretKey>;

/// The public half of a Noise identity.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct NoisePublicKey {
    x25519: [u8; X25519_LEN],
    mlkem768: Box<[u8]>,
}

/// Why a public key was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// The key is of another suite.
    #[error("the suite is not {SUITE}")]
    Suite,
    /// The X25519 part has this many bytes.
    #[error("an x25519 public key has {X25519_LEN} bytes, not {0}")]
    X25519Length(usize),
    /// The ML-KEM-768 part has this many bytes.
    #[error("an ml-kem-768 public key has {MLKEM768_LEN} bytes, not {0}")]
    Mlkem768Length(usize),
    /// A coefficient of the ML-KEM-768 part is not below the modulus (FIPS 203, 7.2).
    #[error("the ml-kem-768 public key is not canonical")]
    Mlkem768Range,
}

impl NoisePublicKey {
    /// Takes the three members of a key as the registry gives them, decoded.
    pub fn new(suite: &str, x25519: &[u8], mlkem768: &[u8]) -> Result<Self, KeyError> {
        if suite != SUITE {
            return Err(KeyError::Suite);
        }
        let x25519 = x25519.try_into().map_err(|_| KeyError::X25519Length(x25519.len()))?;
        if mlkem768.len() != MLKEM768_LEN {
            return Err(KeyError::Mlkem768Length(mlkem768.len()));
        }
        check_mlkem768(mlkem768)?;
        Ok(Self { x25519, mlkem768: mlkem768.into() })
    }

    /// The suite's name.
    pub fn suite(&self) -> &'static str {
        SUITE
    }

    /// The X25519 part.
    pub fn x25519(&self) -> &[u8; X25519_LEN] {
        &self.x25519
    }

    /// The ML-KEM-768 part, [`MLKEM768_LEN`] bytes.
    pub fn mlkem768(&self) -> &[u8] {
        &self.mlkem768
    }

    pub(crate) fn kem_public(&self) -> KemPublic {
        KemPublic::from_slice(&self.mlkem768)
    }
}

/// The modulus check of FIPS 203, section 7.2. The library leaves it to its caller.
pub(crate) fn check_mlkem768(key: &[u8]) -> Result<(), KeyError> {
    let canonical = key[..MLKEM768_COEFFICIENT_BYTES].chunks_exact(3).all(|three| {
        let low = u16::from(three[0]) | u16::from(three[1] & 0x0f) << 8;
        let high = u16::from(three[1] >> 4) | u16::from(three[2]) << 4;
        low < MLKEM_Q && high < MLKEM_Q
    });
    if canonical { Ok(()) } else { Err(KeyError::Mlkem768Range) }
}

impl fmt::Debug for NoisePublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NoisePublicKey(")?;
        for byte in &self.x25519[..8] {
            write!(f, "{byte:02x}")?;
        }
        f.write_str("…)")
    }
}

struct Secrets {
    dh: DhPair,
    kem: KemPair,
}

/// A static key pair of each kind. Clones share the secrets.
#[derive(Clone)]
pub struct NoiseIdentity(Arc<Secrets>);

impl NoiseIdentity {
    /// Makes a new identity out of `entropy`.
    pub fn generate(entropy: &mut dyn Entropy) -> Result<Self, EntropyError> {
        let mut rng = HandshakeRng::from_entropy(entropy)?;
        let dh = X25519::genkey_rng(&mut rng).map_err(|_| EntropyError)?;
        let kem = MlKem768::genkey_rng(&mut rng).map_err(|_| EntropyError)?;
        Ok(Self(Arc::new(Secrets { dh, kem })))
    }

    /// The public half.
    pub fn public_key(&self) -> NoisePublicKey {
        NoisePublicKey { x25519: self.0.dh.public, mlkem768: self.0.kem.public.as_slice().into() }
    }

    pub(crate) fn dh(&self) -> DhPair {
        self.0.dh.clone()
    }

    pub(crate) fn kem(&self) -> KemPair {
        self.0.kem.clone()
    }
}

impl fmt::Debug for NoiseIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("NoiseIdentity").field(&self.public_key()).finish()
    }
}
