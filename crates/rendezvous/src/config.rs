//! Every limit and timeout of the service, with its default.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use codex_exec_relay_core::FrameLimits;

/// Limits and timeouts. Start from `Config::default()` and change fields.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Config {
    /// The base URL that clients are given, such as `https://rendezvous.example.com`. Default `None`: the
    /// `Host` of each request.
    pub public_url: Option<PublicUrl>,
    /// The time of day; expiry depends on nothing else.
    pub clock: Clock,

    /// How long a URL is valid for its first use. Default 5 min.
    pub url_lifetime: Duration,
    /// How long after a disconnect an environment or a harness may reconnect with the same URL. Default
    /// 10 min.
    pub reconnect_window: Duration,
    /// How long an authorization of a harness's key is valid. Default 2 min.
    pub authorization_lifetime: Duration,
    /// How long streams that acknowledge wait for a dropped socket to reconnect. Default 60 s.
    pub grace: Duration,

    /// Size limits of a frame (default 256 KiB); longer frames are dropped.
    pub frame: FrameLimits,
    /// The longest websocket message, in bytes (default 1 MiB); a longer one ends its socket.
    pub message_bytes: usize,
    /// Streams per environment (default 1,024); more are reset.
    pub streams_per_environment: usize,
    /// Streams per harness socket (default 64); more are reset.
    pub streams_per_harness: usize,
    /// Harness sockets per environment (default 256); more are refused with 409.
    pub harnesses_per_environment: usize,
    /// Open connections of all kinds, HTTP included (default 20,000); more are closed at once.
    pub connections: usize,
    /// Open connections of one address (of IPv6: of one /64) on which no websocket had a valid pass yet
    /// (default 256); more are closed at once.
    pub unauthenticated_per_address: usize,
    /// Frames read from one socket per second (default 50,000); more wait.
    pub frames_per_second: u32,
    /// Bytes that may wait for one socket (default 1 MiB); above it the sender's socket is not read.
    pub queue_bytes: usize,
    /// How long a socket may take nothing while a frame waits for it, before it is closed. Default 10 s.
    pub stall_timeout: Duration,
    /// Bytes in flight from one node to another for one harness. Default 512 KiB.
    pub wire_bytes: usize,
    /// How often peer nodes are pinged. Default 5 s.
    pub peer_ping: Duration,
    /// How often the connected harnesses are recorded, so that they may reconnect with the same URL after
    /// a crash of the service. Default 60 s.
    pub harness_record_interval: Duration,

    /// Silence after which a socket is pinged. Default 30 s.
    pub ping_after: Duration,
    /// How long a pong may take before the socket is closed. Default 60 s.
    pub pong_within: Duration,
    /// How long a request may take to arrive, headers and body. Default 15 s.
    pub request_timeout: Duration,
    /// The longest request body, in bytes. Default 64 KiB.
    pub body_bytes: usize,
    /// Failed authentications per minute and address, above which the response is 429. Default 30.
    pub failures_per_minute: u32,
    /// Handshakes of one token that an environment may refuse (default 4) before the token's harnesses are cut
    /// off from this environment. After eight of them, of any token, an environment closes its socket.
    pub failed_handshakes: u32,
    /// How long they are cut off (default 60 s); twice as long after each further failure, up to an hour. The
    /// response is 429.
    pub cut_off: Duration,
    /// Registrations and connections per minute and token. Default 600.
    pub calls_per_minute: u32,

    /// How often the tokens of open sockets are checked (default 250 ms); requests always see the latest
    /// tokens.
    pub revocation_interval: Duration,
    /// How long streams may continue after a shutdown begins. Default 5 s.
    pub drain: Duration,
    /// How long the closing handshake of a socket may take. Default 2 s.
    pub close_timeout: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            public_url: None,
            clock: Clock::default(),
            url_lifetime: Duration::from_secs(300),
            reconnect_window: Duration::from_secs(600),
            authorization_lifetime: Duration::from_secs(120),
            grace: Duration::from_secs(60),
            frame: FrameLimits::default(),
            message_bytes: 1 << 20,
            streams_per_environment: 1024,
            streams_per_harness: 64,
            harnesses_per_environment: 256,
            connections: 20_000,
            unauthenticated_per_address: 256,
            frames_per_second: 50_000,
            queue_bytes: 1 << 20,
            stall_timeout: Duration::from_secs(10),
            wire_bytes: 512 << 10,
            peer_ping: Duration::from_secs(5),
            harness_record_interval: Duration::from_secs(60),
            ping_after: Duration::from_secs(30),
            pong_within: Duration::from_secs(60),
            request_timeout: Duration::from_secs(15),
            body_bytes: 64 << 10,
            failures_per_minute: 30,
            failed_handshakes: 4,
            cut_off: Duration::from_secs(60),
            calls_per_minute: 600,
            revocation_interval: Duration::from_millis(250),
            drain: Duration::from_secs(5),
            close_timeout: Duration::from_secs(2),
        }
    }
}

/// The time of day, injected.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> SystemTime + Send + Sync>);

impl Clock {
    /// A clock that calls `now`.
    pub fn new(now: impl Fn() -> SystemTime + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    /// Seconds since 1970.
    pub fn now(&self) -> u64 {
        (self.0)().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self::new(SystemTime::now)
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clock")
    }
}

/// The public base URL: `http://` or `https://`, without a trailing slash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublicUrl(String);

/// The text is not a valid public URL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid public URL: expected http or https without a query, such as \
     https://rendezvous.example.com"
)]
pub struct PublicUrlError;

impl std::str::FromStr for PublicUrl {
    type Err = PublicUrlError;

    fn from_str(text: &str) -> Result<Self, PublicUrlError> {
        let uri: hyper::Uri = text.parse().map_err(|_| PublicUrlError)?;
        let scheme = uri.scheme_str().filter(|scheme| matches!(*scheme, "http" | "https"));
        let authority = uri.authority().filter(|authority| !authority.as_str().contains('@'));
        match (scheme, authority, uri.query()) {
            (Some(_), Some(_), None) if !text.contains('#') => {
                Ok(Self(text.trim_end_matches('/').to_owned()))
            }
            _ => Err(PublicUrlError),
        }
    }
}

impl PublicUrl {
    /// The URL as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The same URL with a websocket scheme.
    pub(crate) fn websocket(&self) -> String {
        match self.0.strip_prefix("https://") {
            Some(rest) => format!("wss://{rest}"),
            None => format!("ws://{}", self.0.trim_start_matches("http://")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn public_url_accepts_only_http_and_https() {
        let url: PublicUrl = "https://r.example.com/x/".parse().unwrap();
        assert_eq!(url.as_str(), "https://r.example.com/x");
        assert_eq!(url.websocket(), "wss://r.example.com/x");
        let url: PublicUrl = "http://[::1]:80".parse().unwrap();
        assert_eq!(url.websocket(), "ws://[::1]:80");
        for bad in ["", "r.example.com", "wss://x", "https://u:p@x", "https://x?y", "https://x#y"] {
            bad.parse::<PublicUrl>().unwrap_err();
        }
    }
}
