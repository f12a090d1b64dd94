//! Limits and times of a relay socket, each with its default.

use std::time::Duration;

use codex_exec_relay_core::Config as CoreConfig;
use codex_exec_rpc::ConnectionConfig;

/// How relay streams are carried.
#[derive(Debug, Clone)]
pub struct RelayConfig {
    /// The machine below: streams, windows, handshakes.
    pub core: CoreConfig,
    /// Every stream's connection.
    pub connection: ConnectionConfig,
    /// For the name lookup, TCP, TLS and the upgrade together. Default 10 s.
    pub dial_timeout: Duration,
    /// Pings on the physical websocket. Default 30 s.
    pub ping_interval: Duration,
    /// Silence after a ping that makes the websocket dead. Default 60 s.
    pub pong_timeout: Duration,
    /// Bytes a stream may have received that its owner has not taken. Default 16 MiB. Above it the
    /// socket is not read, for all streams, for at most [`Self::inbox_timeout`].
    pub inbox_bytes: usize,
    /// How long one stream may hold up the others; then it is reset. Default 1 s.
    pub inbox_timeout: Duration,
    /// The first wait before another attempt to connect; each failure doubles it. Default 1 s.
    pub backoff_initial: Duration,
    /// The longest such wait. Default 30 s.
    pub backoff_max: Duration,
    /// How long the last words of all streams may take when everything ends. Default 5 s.
    pub close_timeout: Duration,
}

impl Default for RelayConfig {
    fn default() -> Self {
        Self {
            core: CoreConfig::default(),
            connection: ConnectionConfig { keep_alive: None, ..ConnectionConfig::default() },
            dial_timeout: Duration::from_secs(10),
            ping_interval: Duration::from_secs(30),
            pong_timeout: Duration::from_secs(60),
            inbox_bytes: 16 << 20,
            inbox_timeout: Duration::from_secs(1),
            backoff_initial: Duration::from_secs(1),
            backoff_max: Duration::from_secs(30),
            close_timeout: Duration::from_secs(5),
        }
    }
}

/// Waits that double.
#[derive(Debug)]
pub(crate) struct Backoff {
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl Backoff {
    pub(crate) fn new(config: &RelayConfig) -> Self {
        let (first, longest) = (config.backoff_initial, config.backoff_max);
        Self { first, longest, next: first }
    }

    /// How long to wait now.
    pub(crate) fn next_delay(&mut self) -> Duration {
        let now = self.next;
        self.next = (now * 2).min(self.longest);
        now
    }

    /// Something succeeded.
    pub(crate) fn reset(&mut self) {
        self.next = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_doubles_to_thirty_seconds_and_resets() {
        let mut backoff = Backoff::new(&RelayConfig::default());
        let waits: Vec<u64> = (0..7).map(|_| backoff.next_delay().as_secs()).collect();
        assert_eq!(waits, [1, 2, 4, 8, 16, 30, 30]);
        backoff.reset();
        assert_eq!(backoff.next_delay().as_secs(), 1);
    }
}
