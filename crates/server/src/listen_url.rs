//! Listen URLs.

use std::net::SocketAddr;
use std::str::FromStr;

/// The default listen URL: loopback, on a free port that the system picks.
pub const DEFAULT_LISTEN_URL: &str = "ws://127.0.0.1:0";

/// Where a server listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListenUrl {
    /// `ws://IP:PORT`.
    WebSocket(SocketAddr),
    /// `stdio`: one connection on stdin and stdout, one message per line.
    Stdio,
}

/// An invalid listen URL.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unsupported --listen URL `{url}`; expected ws://IP:PORT or stdio")]
pub struct ExecServerListenUrlParseError {
    /// The URL as given.
    pub url: String,
}

impl FromStr for ListenUrl {
    type Err = ExecServerListenUrlParseError;

    fn from_str(url: &str) -> Result<Self, Self::Err> {
        if matches!(url, "stdio" | "stdio://") {
            return Ok(Self::Stdio);
        }
        url.strip_prefix("ws://")
            .map(|address| address.strip_suffix('/').unwrap_or(address))
            .and_then(|address| address.parse().ok())
            .map(Self::WebSocket)
            .ok_or_else(|| ExecServerListenUrlParseError { url: url.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listen_urls_are_parsed_or_refused_by_name() {
        assert_eq!("stdio".parse(), Ok(ListenUrl::Stdio));
        assert_eq!("stdio://".parse(), Ok(ListenUrl::Stdio));
        let parse = |url: &str| url.parse::<ListenUrl>();
        let address = |text: &str| Ok(ListenUrl::WebSocket(text.parse().unwrap()));
        assert_eq!(parse(DEFAULT_LISTEN_URL), address("127.0.0.1:0"));
        assert_eq!(parse("ws://[::1]:80/"), address("[::1]:80"));
        for bad in ["", "ws://localhost:1", "ws://1.2.3.4", "wss://1.2.3.4:1", "tcp://1.2.3.4:1"] {
            let error = parse(bad).unwrap_err().to_string();
            assert_eq!(
                error,
                format!("unsupported --listen URL `{bad}`; expected ws://IP:PORT or stdio")
            );
        }
    }
}
