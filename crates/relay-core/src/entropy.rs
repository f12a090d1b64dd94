//! Randomness as an input.
//!
//! The relay core has no random source; its driver injects one. Stream ids, key generation and the
//! ephemeral keys of every handshake use nothing else, so a seeded source gives the same bytes every time.

use std::cell::Cell;

use clatter::bytearray::{ByteArray, SensitiveByteArray};
use clatter::crypto::hash::Sha256;
use clatter::rand_core::{self, CryptoRng, RngCore};
use clatter::traits::Hash;
use zeroize::Zeroize;

/// The random source failed; nothing was made from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the random source failed")]
pub struct EntropyError;

/// A cryptographically secure source of random bytes.
///
/// Implemented for closures, so a driver writes `|dest: &mut [u8]| fill(dest)`.
pub trait Entropy: Send {
    /// Fills `dest` entirely, or fails.
    fn fill(&mut self, dest: &mut [u8]) -> Result<(), EntropyError>;
}

impl<F> Entropy for F
where
    F: FnMut(&mut [u8]) -> Result<(), EntropyError> + Send,
{
    fn fill(&mut self, dest: &mut [u8]) -> Result<(), EntropyError> {
        self(dest)
    }
}

const SEED_LEN: usize = 32;

/// The generator of one handshake: HMAC-SHA256 in counter mode under a seed from
/// the injected source, wiped when the handshake ends.
///
/// The Noise library makes its generator with `Default` and offers no other way in, so the seed
/// is passed through a thread-local for the length of the constructor call ([`with_seed`]) and
/// nowhere else.
#[derive(Clone)]
pub(crate) struct HandshakeRng {
    seed: SensitiveByteArray<[u8; SEED_LEN]>,
    counter: u64,
}

thread_local! {
    static NEXT_SEED: Cell<Option<[u8; SEED_LEN]>> = const { Cell::new(None) };
}

impl HandshakeRng {
    pub(crate) fn from_entropy(entropy: &mut dyn Entropy) -> Result<Self, EntropyError> {
        let mut seed = [0; SEED_LEN];
        entropy.fill(&mut seed)?;
        let rng = Self::from_seed(&seed);
        seed.zeroize();
        Ok(rng)
    }

    fn from_seed(seed: &[u8; SEED_LEN]) -> Self {
        Self { seed: SensitiveByteArray::from_slice(seed), counter: 0 }
    }
}

/// Runs `build`, in which exactly one [`HandshakeRng`] is made by `Default`, seeded from `entropy`.
pub(crate) fn with_seed<T>(
    entropy: &mut dyn Entropy,
    build: impl FnOnce() -> T,
) -> Result<T, EntropyError> {
    let mut seed = [0; SEED_LEN];
    entropy.fill(&mut seed)?;
    NEXT_SEED.set(Some(seed));
    seed.zeroize();
    let built = build();
    if let Some(mut left) = NEXT_SEED.take() {
        left.zeroize();
    }
    Ok(built)
}

impl Default for HandshakeRng {
    /// # Panics
    /// Outside [`with_seed`]: a generator without a seed must never come to exist.
    fn default() -> Self {
        match NEXT_SEED.take() {
            Some(mut seed) => {
                let rng = Self::from_seed(&seed);
                seed.zeroize();
                rng
            }
            None => panic!("a handshake generator needs a seed"),
        }
    }
}

impl RngCore for HandshakeRng {
    fn next_u32(&mut self) -> u32 {
        let mut bytes = [0; 4];
        self.fill_bytes(&mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn next_u64(&mut self) -> u64 {
        let mut bytes = [0; 8];
        self.fill_bytes(&mut bytes);
        u64::from_le_bytes(bytes)
    }

    fn fill_bytes(&mut self, dest: &mut [u8]) {
        for chunk in dest.chunks_mut(SEED_LEN) {
            let mut block = Sha256::hmac(self.seed.as_slice(), &self.counter.to_be_bytes());
            self.counter += 1;
            chunk.copy_from_slice(&block.as_slice()[..chunk.len()]);
            block.zeroize();
        }
    }

    fn try_fill_bytes(&mut self, dest: &mut [u8]) -> Result<(), rand_core::Error> {
        self.fill_bytes(dest);
        Ok(())
    }
}

impl CryptoRng for HandshakeRng {}
