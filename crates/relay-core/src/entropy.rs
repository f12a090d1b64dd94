//! Randomness as an input.
//!
//! The relay core has no random source; its driver injects one. Stream ids, key generation and the
//! ephemeral keys of every handshake use nothing else, so a seeded source gives the same bytes every time.

use std::cell::Cell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use chacha20::ChaCha20Rng;
use chacha20::rand_core::{Rng, SeedableRng};
use clatter::rand_core::{self, CryptoRng, RngCore};
use zeroize::{Zeroize, Zeroizing};

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

/// The generator of one handshake: ChaCha20 under a seed from the injected source, wiped when the handshake
/// ends.
///
/// The Noise library makes its generator with `Default` and offers no other way in, so the seed
/// is passed through a thread-local for the length of the constructor call ([`with_seed`]) and
/// nowhere else. It also wants an older `RngCore` than the generator implements, and `Clone`: clones share
/// their state, so that no two of them ever draw the same bytes.
#[derive(Clone)]
pub(crate) struct HandshakeRng(Arc<Mutex<ChaCha20Rng>>);

thread_local! {
    static NEXT_SEED: Cell<Option<[u8; SEED_LEN]>> = const { Cell::new(None) };
}

impl HandshakeRng {
    pub(crate) fn from_entropy(entropy: &mut dyn Entropy) -> Result<Self, EntropyError> {
        let mut seed = Zeroizing::new([0; SEED_LEN]);
        entropy.fill(&mut *seed)?;
        Ok(Self::from_seed(&seed))
    }

    fn from_seed(seed: &[u8; SEED_LEN]) -> Self {
        Self(Arc::new(Mutex::new(ChaCha20Rng::from_seed(*seed))))
    }

    fn generator(&self) -> MutexGuard<'_, ChaCha20Rng> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs `build`, in which exactly one [`HandshakeRng`] is made by `Default`, seeded from `entropy`.
pub(crate) fn with_seed<T>(
    entropy: &mut dyn Entropy,
    build: impl FnOnce() -> T,
) -> Result<T, EntropyError> {
    let mut seed = Zeroizing::new([0; SEED_LEN]);
    entropy.fill(&mut *seed)?;
    NEXT_SEED.set(Some(*seed));
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
            Some(seed) => Self::from_seed(&Zeroizing::new(seed)),
            None => panic!("a handshake generator needs a seed"),
        }
    }
}

impl RngCore for HandshakeRng {
    fn next_u32(&mut self) -> u32 {
        self.generator().next_u32()
    }

    fn next_u64(&mut self) -> u64 {
        self.generator().next_u64()
    }

    fn fill_bytes(&mut self, dest: &mut [u8]) {
        self.generator().fill_bytes(dest);
    }

    fn try_fill_bytes(&mut self, dest: &mut [u8]) -> Result<(), rand_core::Error> {
        self.generator().fill_bytes(dest);
        Ok(())
    }
}

impl CryptoRng for HandshakeRng {}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(mut next: u8) -> impl FnMut(&mut [u8]) -> Result<(), EntropyError> + Send {
        move |dest| {
            dest.fill_with(|| {
                next = next.wrapping_add(1);
                next
            });
            Ok(())
        }
    }

    /// RFC 8439, appendix A.1, vectors 1 and 2: the key stream under the zero key and nonce.
    #[test]
    fn generator_is_chacha20() {
        let zeros = &mut |dest: &mut [u8]| {
            dest.fill(0);
            Ok(())
        };
        let mut bytes = [0; 80];
        HandshakeRng::from_entropy(zeros).unwrap().fill_bytes(&mut bytes);
        assert_eq!(bytes[..8], [0x76, 0xb8, 0xe0, 0xad, 0xa0, 0xf1, 0x3d, 0x90]);
        assert_eq!(bytes[64..72], [0x9f, 0x07, 0xe7, 0xbe, 0x55, 0x51, 0x38, 0x7a]);
    }

    #[test]
    fn each_handshake_has_its_own_seed_and_none_is_left() {
        let mut entropy = source(0);
        let mut draw = || with_seed(&mut entropy, HandshakeRng::default).unwrap().next_u64();
        assert_ne!(draw(), draw());
        assert!(NEXT_SEED.take().is_none());
        with_seed(&mut entropy, || ()).unwrap();
        assert!(NEXT_SEED.take().is_none(), "an unused seed is wiped");
        std::panic::catch_unwind(HandshakeRng::default).map(drop).unwrap_err();
    }

    #[test]
    fn clones_never_draw_the_same_bytes() {
        let mut one = HandshakeRng::from_entropy(&mut source(0)).unwrap();
        let mut other = one.clone();
        let mut alone = HandshakeRng::from_entropy(&mut source(0)).unwrap();
        let drawn = [one.next_u64(), other.next_u64(), one.next_u64()];
        assert_eq!(drawn, [alone.next_u64(), alone.next_u64(), alone.next_u64()]);
    }

    #[test]
    fn failing_source_makes_nothing() {
        let mut failing = |_: &mut [u8]| Err(EntropyError);
        assert!(HandshakeRng::from_entropy(&mut failing).is_err());
        assert!(with_seed(&mut failing, || unreachable!()).is_err());
    }
}
