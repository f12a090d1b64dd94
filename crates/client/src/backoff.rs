//! When to dial again. Pure: it takes randomness as an argument and only computes times.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Whether, how often and how long a client reconnects.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ReconnectPolicy {
    /// Whether to reconnect. Default true; if false, a dropped connection ends the session for this
    /// client.
    pub enabled: bool,
    /// The longest wait before the first attempt. Default 50 ms.
    pub first_delay: Duration,
    /// The longest wait before any attempt; each wait is up to twice the previous one. Default 5 s.
    pub max_delay: Duration,
    /// How long after the loss the client gives up. Default 120 s: a server detects a silent socket after
    /// 90 s and by default keeps the session for 30 s more.
    pub give_up_after: Duration,
    /// How long one attempt may take. Default 10 s.
    pub attempt_timeout: Duration,
    /// The source of the randomness in the waits. Default: a random number generator.
    pub jitter: Jitter,
}

/// The source of the randomness in the waits.
#[derive(Clone)]
pub struct Jitter(Arc<dyn Fn() -> f64 + Send + Sync>);

impl Jitter {
    /// Uses this function, which returns numbers from 0 to 1.
    pub fn new(next: impl Fn() -> f64 + Send + Sync + 'static) -> Self {
        Self(Arc::new(next))
    }
}

impl Default for Jitter {
    fn default() -> Self {
        Self::new(fastrand::f64)
    }
}

impl fmt::Debug for Jitter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Jitter")
    }
}

impl ReconnectPolicy {
    /// A policy that does not reconnect.
    pub fn never() -> Self {
        Self { enabled: false, ..Self::default() }
    }

    /// The wait before attempt number `attempt`, from 0: between half of the longest and the longest.
    pub fn delay(&self, attempt: u32) -> Duration {
        let longest = self
            .first_delay
            .saturating_mul(2u32.saturating_pow(attempt.min(20)))
            .min(self.max_delay);
        longest.mul_f64(0.5 + 0.5 * (self.jitter.0)().clamp(0.0, 1.0))
    }
}

impl Default for ReconnectPolicy {
    fn default() -> Self {
        Self {
            enabled: true,
            first_delay: Duration::from_millis(50),
            max_delay: Duration::from_secs(5),
            give_up_after: Duration::from_secs(120),
            attempt_timeout: Duration::from_secs(10),
            jitter: Jitter::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_the_longest_and_jitter_only_shortens_them() {
        let with = |jitter: f64| ReconnectPolicy {
            jitter: Jitter::new(move || jitter),
            ..ReconnectPolicy::default()
        };
        let (all, half) = (with(1.0), with(0.0));
        let millis = |policy: &ReconnectPolicy, n| policy.delay(n).as_millis();
        assert_eq!(
            [0, 1, 2, 6, 7, 1000].map(|n| millis(&all, n)),
            [50, 100, 200, 3200, 5000, 5000]
        );
        assert_eq!([0, 1, 7].map(|n| millis(&half, n)), [25, 50, 2500]);
    }
}
