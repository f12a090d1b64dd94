//! The system's random source, for the relay core.

use codex_exec_relay_core::{Entropy, EntropyError};

/// The system's random source.
pub fn entropy() -> Box<dyn Entropy> {
    Box::new(|dest: &mut [u8]| getrandom::fill(dest).map_err(|_| EntropyError))
}
