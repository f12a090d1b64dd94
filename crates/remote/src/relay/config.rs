//! Limits and timeouts of a relay socket.

use std::sync::Arc;
use std::time::Duration;

use codex_exec_relay_core::Config as CoreConfig;
use codex_exec_rpc::{ConnectionConfig, Proxies};
use tokio::sync::watch;

/// Limits and timeouts of relay streams and their socket.
#[derive(Debug, Clone)]
pub struct RelayConfig {
    /// The relay core: streams, windows, handshakes.
    pub core: CoreConfig,
    /// The connection of each stream.
    pub connection: ConnectionConfig,
    /// Timeout for the name lookup, TCP, TLS and the upgrade together. Default 10 s.
    pub dial_timeout: Duration,
    /// Proxies to go through. Default: those of the environment.
    pub proxies: Arc<Proxies>,
    /// How often the physical websocket is pinged. Default 30 s.
    pub ping_interval: Duration,
    /// Silence after a ping that ends the websocket. Default 60 s.
    pub pong_timeout: Duration,
    /// Bytes that a stream has received and its owner has not taken (default 16 MiB). Above it the
    /// socket is not read, which delays all streams, for at most [`Self::inbox_timeout`].
    pub inbox_bytes: usize,
    /// How long one stream may delay the others before it is reset. Default 1 s.
    pub inbox_timeout: Duration,
    /// The wait before the first reconnect; each attempt doubles it, and up to a quarter is added at
    /// random. Default 1 s.
    pub backoff_initial: Duration,
    /// The longest wait before a reconnect, without the random part. Default 30 s.
    pub backoff_max: Duration,
    /// How long a connection has to last for the next wait to be the first again; a connection that ends
    /// sooner counts as a failure. Default 0: sessions on a network that drops connections again and again
    /// would end while their server waits.
    pub backoff_reset: Duration,
    /// How long streams and the socket may take to close at the end. Default 5 s.
    pub close_timeout: Duration,
    /// Set to true while an executor is connected to its rendezvous, or to the peer of the direct transport.
    /// Default `None`.
    pub connected: Option<watch::Sender<bool>>,
}

impl RelayConfig {
    /// Publishes whether the executor is connected.
    pub(crate) fn set_connected(&self, connected: bool) {
        if let Some(status) = &self.connected {
            status.send_replace(connected);
        }
    }
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
            inbox_timeout: Duration::from_secs(1),
            backoff_initial: Duration::from_secs(1),
            backoff_max: Duration::from_secs(30),
            backoff_reset: Duration::ZERO,
            close_timeout: Duration::from_secs(5),
            connected: None,
        }
    }
}

/// Exponential backoff.
#[derive(Debug)]
pub(crate) struct Backoff {
    first: Duration,
    longest: Duration,
    reset_after: Duration,
    next: Duration,
}

impl Backoff {
    pub(crate) fn new(config: &RelayConfig) -> Self {
        let (first, longest) = (config.backoff_initial, config.backoff_max);
        Self { first, longest, reset_after: config.backoff_reset, next: first }
    }

    /// The next wait; doubles the one after it.
    pub(crate) fn next_delay(&mut self) -> Duration {
        let now = self.next;
        self.next = (now * 2).min(self.longest);
        // Spreads out peers that lost their connections at the same moment.
        let mut random = [0];
        let _ = getrandom::fill(&mut random);
        now + now / 4 * u32::from(random[0]) / 255
    }

    /// Takes the duration of a connection that has ended; starts over if it was long enough.
    pub(crate) fn connection_lasted(&mut self, duration: Duration) {
        if duration >= self.reset_after {
            self.next = self.first;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_doubles_to_thirty_seconds_and_resets() {
        let config =
            RelayConfig { backoff_reset: Duration::from_secs(30), ..RelayConfig::default() };
        let mut backoff = Backoff::new(&config);
        for seconds in [1, 2, 4, 8, 16, 30, 30] {
            // A connection that drops at once does not count as a success.
            backoff.connection_lasted(Duration::from_secs(29));
            let (least, delay) = (Duration::from_secs(seconds), backoff.next_delay());
            assert!(delay >= least && delay <= least * 5 / 4, "{seconds} {delay:?}");
        }
        backoff.connection_lasted(Duration::from_secs(30));
        assert!(backoff.next_delay() < Duration::from_secs(2));

        let mut by_default = Backoff::new(&RelayConfig::default());
        for _ in 0..3 {
            by_default.connection_lasted(Duration::ZERO);
            assert!(by_default.next_delay() < Duration::from_secs(2));
        }
    }
}
