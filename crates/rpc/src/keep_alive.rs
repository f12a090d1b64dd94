//! When to ping a peer and when to give it up, as a timer that its owner polls.

use std::time::Duration;

use tokio::time::Instant;

/// How much silence leads to a ping, and to the end of the connection.
#[derive(Debug, Clone, Copy)]
pub struct KeepAlive {
    /// Silence after which a ping is sent. Default 30 s.
    pub idle: Duration,
    /// Silence after the ping that ends the connection. Default 60 s.
    pub timeout: Duration,
}

impl Default for KeepAlive {
    fn default() -> Self {
        Self { idle: Duration::from_secs(30), timeout: Duration::from_secs(60) }
    }
}

/// The keep-alive clock of one connection.
#[derive(Debug)]
pub struct KeepAliveTimer {
    config: KeepAlive,
    periodic: bool,
    next_ping: Option<Instant>,
    /// When the first unanswered ping was sent.
    pinged: Option<Instant>,
}

/// What is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Due {
    Nothing,
    Ping,
    /// The peer has been silent for too long.
    GiveUp,
}

impl KeepAliveTimer {
    /// Pings a peer that has been silent for [`KeepAlive::idle`].
    pub fn when_idle(config: KeepAlive) -> Self {
        let next_ping = Some(Instant::now() + config.idle);
        Self { config, periodic: false, next_ping, pinged: None }
    }

    /// Pings every [`KeepAlive::idle`], whether or not the peer is silent.
    pub fn periodic(config: KeepAlive) -> Self {
        Self { periodic: true, ..Self::when_idle(config) }
    }

    /// Silence after a ping that ends the connection.
    pub(crate) fn timeout(&self) -> Duration {
        self.config.timeout
    }

    /// Notes that something arrived from the peer.
    pub(crate) fn heard(&mut self, now: Instant) {
        self.pinged = None;
        if !self.periodic {
            self.next_ping = Some(now + self.config.idle);
        }
    }

    /// Forgets an unanswered ping: this side does not read, so the peer's silence means nothing.
    pub(crate) fn on_not_reading(&mut self, now: Instant) {
        self.pinged = None;
        self.next_ping.get_or_insert(now + self.config.idle);
    }

    /// When to call [`Self::due`].
    pub(crate) fn deadline(&self) -> Instant {
        let given_up = self.pinged.map(|pinged| pinged + self.config.timeout);
        let next = [self.next_ping, given_up].into_iter().flatten().min();
        next.unwrap_or_else(|| unreachable!("a peer that is not to be pinged has been pinged"))
    }

    /// What is due now. The timer counts a ping as sent when it returns [`Due::Ping`].
    pub(crate) fn due(&mut self, now: Instant) -> Due {
        if self.pinged.is_some_and(|pinged| now >= pinged + self.config.timeout) {
            return Due::GiveUp;
        }
        if self.next_ping.is_none_or(|at| now < at) {
            return Due::Nothing;
        }
        self.next_ping = self.periodic.then(|| now + self.config.idle);
        self.pinged.get_or_insert(now);
        Due::Ping
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE: u64 = 30;
    const TIMEOUT: u64 = 60;

    fn random(seed: &mut u64) -> u64 {
        *seed =
            seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *seed >> 33
    }

    /// The rules, second by second: (seconds of the pings, second at which the peer is given up).
    fn model(periodic: bool, heard: &[u64]) -> (Vec<u64>, Option<u64>) {
        let (mut pings, mut since, mut unanswered) = (Vec::new(), 0, None);
        for second in 0..=1000 {
            if heard.contains(&second) {
                unanswered = None;
                since = if periodic { since } else { second };
                continue;
            }
            if unanswered.is_some_and(|pinged| second >= pinged + TIMEOUT) {
                return (pings, Some(second));
            }
            if second >= since + IDLE && (periodic || unanswered.is_none()) {
                pings.push(second);
                unanswered.get_or_insert(second);
                since = if periodic { second } else { since };
            }
        }
        (pings, None)
    }

    #[tokio::test(start_paused = true)]
    async fn timer_pings_and_gives_up_as_the_model_does() {
        let config =
            KeepAlive { idle: Duration::from_secs(IDLE), timeout: Duration::from_secs(TIMEOUT) };
        let (mut given_up, mut kept) = (0, 0);
        for seed in 0..400 {
            let (mut state, periodic) = (seed, seed & 1 == 0);
            let most = [10, 50, 80, 120][(seed / 2 % 4) as usize];
            let mut heard = Vec::new();
            while heard.last().is_none_or(|last| *last < 1000) {
                heard.push(heard.last().unwrap_or(&0) + 1 + random(&mut state) % most);
            }
            let mut timer = if periodic {
                KeepAliveTimer::periodic(config)
            } else {
                KeepAliveTimer::when_idle(config)
            };
            let start = Instant::now();
            let at = |second: u64| start + Duration::from_secs(second);
            let (mut pings, mut end) = (Vec::new(), None);
            for second in 0..=1000 {
                if heard.contains(&second) {
                    timer.heard(at(second));
                    continue;
                }
                let is_time = at(second) >= timer.deadline();
                match timer.due(at(second)) {
                    Due::Nothing => assert!(!is_time, "seed {seed}: a deadline for nothing"),
                    Due::Ping => pings.push(second),
                    Due::GiveUp => end = Some(second),
                }
                assert!(is_time || pings.last() != Some(&second), "seed {seed}: too early");
                if end.is_some() {
                    break;
                }
            }
            assert_eq!((pings, end), model(periodic, &heard), "seed {seed}");
            *if end.is_some() { &mut given_up } else { &mut kept } += 1;
        }
        assert!(given_up > 50 && kept > 50, "{given_up} {kept}");
    }
}
