//! Limits and timeouts of a relay socket.

use std::time::Duration;

use codex_exec_relay_core::Config as CoreConfig;
use codex_exec_rpc::ConnectionConfig;

/// Limits and timeouts of relay streams and their socket.
#[derive(Debug, Clone)]
pub struct RelayConfig {
    /// The relay core: streams, windows, handshakes.
    pub core: CoreConfig,
    /// The connection of each stream.
    pub connection: ConnectionConfig,
    /// Timeout for the name lookup, TCP, TLS and the upgrade together. Default 10 s.
    pub dial_timeout: Duration,
    /// How often the physical websocket is pinged. Default 30 s.
    pub ping_interval: Duration,
    /// Silence after a ping that ends the websocket. Default 60 s.
    pub pong_timeout: Duration,
    /// Bytes that a stream has received and its owner has not taken (default 16 MiB). Above it the
    /// socket is not read, which delays all streams, for at most [`Self::inbox_timeout`].
    pub inbox_bytes: usize,
    /// How long one stream may delay the others before it is reset. Default 1 s.
    pub inbox_timeout: Duration,
    /// The wait before the first reconnect; each failure doubles it. Default 1 s.
    pub backoff_initial: Duration,
    /// The longest wait before a reconnect. Default 30 s.
    pub backoff_max: Duration,
    /// How long streams and the socket may take to close at the end. Default 5 s.
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

/// Exponential backoff.
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

    /// The next wait; doubles the one after it.
    pub(crate) fn next_delay(&mut self) -> Duration {
        let now = self.next;
        self.next = (now * 2).min(self.longest);
        now
    }

    /// Starts over after a success.
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
