//! Limits and times of a relay socket, each with its default.

use std::sync::Arc;
use std::time::Duration;

use codex_exec_relay_core::Config as CoreConfig;
use codex_exec_rpc::{ConnectionConfig, Proxies};

/// How relay streams are carried.
#[derive(Debug, Clone)]
pub struct RelayConfig {
    /// The machine below: streams, windows, handshakes.
    pub core: CoreConfig,
    /// Every stream's connection.
    pub connection: ConnectionConfig,
    /// For the name lookup, TCP, TLS and the upgrade together. Default 10 s.
    pub dial_timeout: Duration,
    /// Proxies to go through. Default: those of the environment.
    pub proxies: Arc<Proxies>,
    /// Pings on the physical websocket. Default 30 s.
    pub ping_interval: Duration,
    /// Silence after a ping that makes the websocket dead. Default 60 s.
    pub pong_timeout: Duration,
    /// Bytes a stream may have received that its owner has not taken. Default 16 MiB. Above it the
    /// socket is not read, for all streams, for at most [`Self::inbox_patience`].
    pub inbox_bytes: usize,
    /// How long one stream may hold up the others; then it is reset. Default 1 s.
    pub inbox_patience: Duration,
    /// The first wait before another attempt to connect; each doubles it, and up to a quarter is added
    /// at random. Default 1 s.
    pub backoff_first: Duration,
    /// The longest such wait. Default 30 s.
    pub backoff_longest: Duration,
    /// A connection that lasted this long makes the next wait the first again; one that ends sooner counts
    /// as a failure. Default 30 s.
    pub backoff_reset: Duration,
    /// How long the last words of all streams may take when everything ends. Default 5 s.
    pub farewell: Duration,
}

impl Default for RelayConfig {
    fn default() -> Self {
        Self {
            core: CoreConfig::default(),
            connection: ConnectionConfig { keep_alive: None, ..ConnectionConfig::default() },
            dial_timeout: Duration::from_secs(10),
            proxies: Proxies::from_env(),
            ping_interval: Duration::from_secs(30),
            pong_timeout: Duration::from_secs(60),
            inbox_bytes: 16 << 20,
            inbox_patience: Duration::from_secs(1),
            backoff_first: Duration::from_secs(1),
            backoff_longest: Duration::from_secs(30),
            backoff_reset: Duration::from_secs(30),
            farewell: Duration::from_secs(5),
        }
    }
}

/// Waits that double.
#[derive(Debug)]
pub(crate) struct Backoff {
    first: Duration,
    longest: Duration,
    reset: Duration,
    next: Duration,
}

impl Backoff {
    pub(crate) fn new(config: &RelayConfig) -> Self {
        let (first, longest) = (config.backoff_first, config.backoff_longest);
        Self { first, longest, reset: config.backoff_reset, next: first }
    }

    /// How long to wait now.
    pub(crate) fn wait(&mut self) -> Duration {
        let now = self.next;
        self.next = (now * 2).min(self.longest);
        // Peers that were cut off together should not come back together.
        let mut random = [0];
        let _ = getrandom::fill(&mut random);
        now + now / 4 * u32::from(random[0]) / 255
    }

    /// A connection ended that lasted so long.
    pub(crate) fn lasted(&mut self, time: Duration) {
        if time >= self.reset {
            self.next = self.first;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_to_thirty_seconds_and_begin_again() {
        let mut backoff = Backoff::new(&RelayConfig::default());
        for seconds in [1, 2, 4, 8, 16, 30, 30] {
            // A connection that is dropped at once does not count as a success.
            backoff.lasted(Duration::from_secs(29));
            let (least, waited) = (Duration::from_secs(seconds), backoff.wait());
            assert!(waited >= least && waited <= least * 5 / 4, "{seconds} {waited:?}");
        }
        backoff.lasted(Duration::from_secs(30));
        assert!(backoff.wait() < Duration::from_secs(2));
    }
}
