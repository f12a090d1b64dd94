//! A timer with exponential backoff that gives up after a number of expiries.
//!
//! It counts expiries rather than elapsed time, so a clock that jumps ahead (a machine that slept) costs
//! one expiry and not the stream.

use std::time::{Duration, Instant};

use crate::config::Config;

#[derive(Default)]
pub(crate) struct RetryTimer {
    at: Option<Instant>,
    fired: u32,
}

/// What an expiry means.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expiry {
    NotDue,
    Retry,
    GiveUp,
}

impl RetryTimer {
    pub(crate) fn at(&self) -> Option<Instant> {
        self.at
    }

    /// Starts the timer if `wanted` and not running; stops it if not `wanted`.
    pub(crate) fn set(&mut self, wanted: bool, first: Duration, now: Instant) {
        if !wanted {
            *self = Self::default();
        } else if self.at.is_none() {
            self.at = Some(now + first);
        }
    }

    /// Starts over, since there was progress.
    pub(crate) fn restart(&mut self) {
        *self = Self::default();
    }

    /// Checks the timer; `next` gives the wait after this many expiries.
    pub(crate) fn on_timeout(
        &mut self,
        config: &Config,
        now: Instant,
        next: impl FnOnce(u32) -> Duration,
    ) -> Expiry {
        if self.at.is_none_or(|at| at > now) {
            return Expiry::NotDue;
        }
        self.fired += 1;
        if self.fired >= config.max_retries {
            self.at = None;
            return Expiry::GiveUp;
        }
        self.at = Some(now + next(self.fired));
        Expiry::Retry
    }
}

/// The first wait, doubled for every expiry.
pub(crate) fn exponential_backoff(config: &Config) -> impl FnOnce(u32) -> Duration {
    let (first, max) = (config.initial_retransmit, config.max_retransmit);
    move |fired| first.saturating_mul(1 << fired.min(16)).min(max)
}
