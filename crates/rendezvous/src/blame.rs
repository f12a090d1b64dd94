//! Whose handshakes an environment refuses. Pure, with time as input.
//!
//! An environment closes its socket after a few handshakes that failed on it, whoever sent them: it sees
//! streams, not harnesses. The service sees who claimed a stream, so it cuts off the token whose handshakes
//! fail, before the environment cuts off everyone.
//!
//! ```text
//!              `allowed` failures            time over
//!   free ────────────────────────▶ cut off ───────────▶ on probation ──┐
//!                                     ▲        one more failure        │
//!                                     └────────────────────────────────┘ cut off for twice the time
//! ```
//!
//! Invariant: between two sockets of its environment, a token gets at most `allowed` failures, and one more for
//! each time that it was cut off.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

/// How long a token is cut off at most.
const LONGEST: Duration = Duration::from_secs(3600);

/// The tokens whose handshakes failed since the environment's socket connected.
#[derive(Debug)]
pub(crate) struct Blame {
    allowed: u32,
    first: Duration,
    by_token: HashMap<String, Record>,
}

#[derive(Debug, Clone, Copy)]
struct Record {
    failures: u32,
    cut_off: Option<Instant>,
}

impl Blame {
    /// Cuts a token off for `first` after `allowed` failures.
    pub(crate) fn new(allowed: u32, first: Duration) -> Self {
        Self { allowed: allowed.max(1), first, by_token: HashMap::new() }
    }

    /// The environment has a new socket, which counts from the start.
    pub(crate) fn clear(&mut self, now: Instant) {
        // A new socket is no reason to serve a token that is cut off.
        self.by_token.retain(|_, record| record.cut_off.is_some_and(|until| until > now));
        for record in self.by_token.values_mut() {
            record.failures = self.allowed;
        }
    }

    /// A handshake of this token failed. Returns whether the token is cut off from now on.
    pub(crate) fn failed(&mut self, token: &str, now: Instant) -> bool {
        let record = self.by_token.entry(token.to_owned());
        let record = record.or_insert(Record { failures: 0, cut_off: None });
        record.failures = record.failures.saturating_add(1);
        let Some(times) = record.failures.checked_sub(self.allowed) else { return false };
        let time = self.first.saturating_mul(1 << times.min(16)).min(LONGEST);
        record.cut_off = Some(now + time);
        true
    }

    /// Whether this token is cut off.
    pub(crate) fn is_cut_off(&self, token: &str, now: Instant) -> bool {
        let record = self.by_token.get(token);
        record.is_some_and(|record| record.cut_off.is_some_and(|until| now < until))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Duration = Duration::from_secs(60);

    /// Random failures of a few tokens, against the invariant, counted by hand.
    #[test]
    fn no_token_gets_more_failures_than_it_was_cut_off_for() {
        let start = Instant::now();
        for seed in 0..300 {
            let mut random = fastrand::Rng::with_seed(seed);
            let allowed = random.u32(1..6);
            let mut blame = Blame::new(allowed, FIRST);
            let mut now = start;
            // Failures since the environment's socket, the times it was cut off, and until when.
            let mut model = [(0_u32, 0_u32, start); 3];
            for step in 0..200 {
                now += Duration::from_secs(random.u64(..90));
                if random.u8(..40) == 0 {
                    blame.clear(now);
                    for (failures, times, until) in &mut model {
                        let still = *until > now;
                        (*failures, *times) = if still { (allowed, 1) } else { (0, 0) };
                    }
                }
                let n = random.usize(..model.len());
                let (failures, times, until) = &mut model[n];
                let token = ["a", "b", "c"][n];
                let is_cut_off = blame.is_cut_off(token, now);
                assert_eq!(is_cut_off, now < *until, "seed {seed}, step {step}");
                // One that is cut off sends nothing.
                if is_cut_off {
                    continue;
                }
                let cut = blame.failed(token, now);
                *failures += 1;
                assert_eq!(cut, *failures >= allowed, "seed {seed}, step {step}");
                if cut {
                    let time = FIRST * 2_u32.pow((*failures - allowed).min(10));
                    *until = now + time.min(LONGEST);
                    *times += 1;
                }
                assert!(*failures <= allowed + times.saturating_sub(1), "seed {seed}, step {step}");
            }
        }
    }
}
