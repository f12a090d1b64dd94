//! Rate limits for failures, calls and frames.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::IpAddr;
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep_until};

use crate::config::Config;

/// How many keys are tracked; above it, idle keys are dropped.
const MAX_KEYS: usize = 10_000;

/// What a limit per minute applies to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Limited {
    /// A wrong token or URL from this address.
    Failure(IpAddr),
    /// A call with the token of this id.
    Call(String),
}

/// The limits per minute of the whole service: each node also counts what the others have let through.
#[derive(Debug)]
pub(crate) struct Limits {
    failures: RateLimiter<IpAddr>,
    calls: RateLimiter<String>,
}

impl Limits {
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            failures: RateLimiter::new(config.failures_per_minute),
            calls: RateLimiter::new(config.calls_per_minute),
        }
    }

    /// Counts this; `false` if the limit is reached.
    pub(crate) fn try_take(&self, limited: &Limited) -> bool {
        match limited {
            Limited::Failure(from) => self.failures.try_take(*from),
            Limited::Call(token) => self.calls.try_take(token.clone()),
        }
    }
}

/// A token bucket per key: `limit` per minute, with a burst of the same size.
#[derive(Debug)]
pub(crate) struct RateLimiter<K> {
    limit: u32,
    buckets: Mutex<HashMap<K, Bucket>>,
}

#[derive(Debug, Clone, Copy)]
struct Bucket {
    left: f64,
    at: Instant,
}

impl<K: Hash + Eq> RateLimiter<K> {
    pub(crate) fn new(limit: u32) -> Self {
        Self { limit, buckets: Mutex::new(HashMap::new()) }
    }

    /// Takes one token; `false` if none is left.
    pub(crate) fn try_take(&self, key: K) -> bool {
        let now = Instant::now();
        let limit = f64::from(self.limit);
        let mut buckets = self.buckets.lock();
        if buckets.len() >= MAX_KEYS {
            buckets.retain(|_, bucket| bucket.refill(limit, now) < limit);
            if buckets.len() >= MAX_KEYS {
                // No key is idle: start over rather than grow.
                buckets.clear();
            }
        }
        let bucket = buckets.entry(key).or_insert(Bucket { left: limit, at: now });
        bucket.refill(limit, now);
        let some_left = bucket.left >= 1.0;
        if some_left {
            bucket.left -= 1.0;
        }
        some_left
    }
}

impl Bucket {
    fn refill(&mut self, limit: f64, now: Instant) -> f64 {
        let minutes = now.saturating_duration_since(self.at).as_secs_f64() / 60.0;
        self.left = (self.left + minutes * limit).min(limit);
        self.at = now;
        self.left
    }
}

/// Limits calls per second; more wait.
#[derive(Debug)]
pub(crate) struct Throttle {
    per_second: u32,
    left: u32,
    until: Instant,
}

impl Throttle {
    pub(crate) fn new(per_second: u32) -> Self {
        Self { per_second: per_second.max(1), left: 0, until: Instant::now() }
    }

    pub(crate) async fn wait(&mut self) {
        if self.left == 0 {
            // Checked once per second's worth, so that not every frame reads the clock.
            sleep_until(self.until).await;
            self.left = self.per_second;
            self.until = Instant::now() + Duration::from_secs(1);
        }
        self.left -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn rate_limiter_refills_per_minute() {
        let rate = RateLimiter::new(3);
        assert!((0..3).all(|_| rate.try_take("a")));
        assert!(!rate.try_take("a"));
        assert!(rate.try_take("b"));
        tokio::time::advance(Duration::from_secs(20)).await;
        assert!(rate.try_take("a"));
        assert!(!rate.try_take("a"));
    }

    #[tokio::test(start_paused = true)]
    async fn throttle_spreads_calls_over_seconds() {
        let start = Instant::now();
        let mut pace = Throttle::new(10);
        for _ in 0..25 {
            pace.wait().await;
        }
        assert_eq!(start.elapsed().as_secs(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn rate_limiter_keys_are_bounded() {
        let rate = RateLimiter::new(3);
        (0..30_000).for_each(|key| assert!(rate.try_take(key)));
        assert!(rate.buckets.lock().len() <= MAX_KEYS);
    }
}
