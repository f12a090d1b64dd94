//! How a client notices that its server is silent, although no connection has failed: the server was killed
//! behind a relay, or the network loses everything. Pure: the owner passes the time and acts.
//!
//! ```text
//! heard ──every──▶ probe ──▶ report (at report_after) ──▶ give up (at give_up_after)
//!   ▲                                                           any message leads back
//!   └───────────────────────────────────────────────────────────────────────────┘
//! ```

use std::time::Duration;

use tokio::time::Instant;

/// When a silent server is asked, reported and given up.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Heartbeat {
    /// Silence after which the client sends a small request. Default 1 s.
    pub every: Duration,
    /// Silence after which the status is
    /// [`Unresponsive`](crate::ConnectionStatus::Unresponsive). Default 2.5 s.
    pub report_after: Duration,
    /// Silence after which the client drops the connection and makes another. Default 15 s.
    pub give_up_after: Duration,
}

impl Default for Heartbeat {
    fn default() -> Self {
        Self {
            every: Duration::from_secs(1),
            report_after: Duration::from_millis(2500),
            give_up_after: Duration::from_secs(15),
        }
    }
}

/// The silence of one connection.
#[derive(Debug)]
pub(crate) struct Silence {
    config: Heartbeat,
    heard: Instant,
    stage: Stage,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Heard,
    Probed,
    Reported,
}

/// What is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Due {
    Nothing,
    Probe,
    /// Report silence since this time.
    Report(Instant),
    GiveUp,
}

impl Silence {
    pub(crate) fn new(config: Heartbeat, now: Instant) -> Self {
        Self { config, heard: now, stage: Stage::Heard }
    }

    /// Notes a message; true if the silence before it was reported.
    pub(crate) fn heard(&mut self, now: Instant) -> bool {
        self.heard = now;
        std::mem::replace(&mut self.stage, Stage::Heard) == Stage::Reported
    }

    /// When something is due.
    pub(crate) fn deadline(&self) -> Instant {
        self.heard
            + match self.stage {
                Stage::Heard => self.config.every,
                Stage::Probed => self.config.report_after,
                Stage::Reported => self.config.give_up_after,
            }
    }

    /// What is due now; counts as done.
    pub(crate) fn due(&mut self, now: Instant) -> Due {
        if now < self.deadline() {
            return Due::Nothing;
        }
        match self.stage {
            Stage::Heard => {
                self.stage = Stage::Probed;
                Due::Probe
            }
            Stage::Probed => {
                self.stage = Stage::Reported;
                Due::Report(self.heard)
            }
            Stage::Reported => Due::GiveUp,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Random messages: at every tenth of a second, the stage is the one that the silence so far implies.
    #[tokio::test(start_paused = true)]
    async fn silence_is_probed_reported_and_given_up_at_its_times() {
        let start = Instant::now();
        let at = |tenth: u64| start + Duration::from_millis(tenth * 100);
        let mut ends = [0; 2];
        for seed in 0..200 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut silence = Silence::new(Heartbeat::default(), start);
            let (mut last, mut probed, mut reported, mut gave_up) = (0, false, false, false);
            for now in 1..600 {
                if random.u64(..).is_multiple_of([15, 40, 120][(seed % 3) as usize]) {
                    assert_eq!(silence.heard(at(now)), reported, "seed {seed}");
                    (last, probed, reported) = (now, false, false);
                    continue;
                }
                // Several can be due at once if the owner was late.
                loop {
                    match silence.due(at(now)) {
                        Due::Nothing => break,
                        Due::Probe => probed = true,
                        Due::Report(since) => {
                            assert_eq!(since, at(last), "seed {seed}");
                            reported = true;
                        }
                        Due::GiveUp => {
                            gave_up = true;
                            break;
                        }
                    }
                }
                let silent = now - last;
                assert_eq!(
                    (probed, reported),
                    (silent >= 10, silent >= 25),
                    "seed {seed} at {now}"
                );
                assert_eq!(gave_up, silent >= 150, "seed {seed} at {now}");
                if gave_up {
                    break;
                }
            }
            ends[usize::from(gave_up)] += 1;
        }
        assert!(ends[0] > 20 && ends[1] > 20, "{ends:?}");
    }
}
