//! Listen URLs.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

/// The default listen URL: loopback, on a free port that the system picks.
pub const DEFAULT_LISTEN_URL: &str = "ws://127.0.0.1:0";

/// The context id of every machine for itself.
pub(crate) const VSOCK_LOOPBACK: u32 = 1;

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ListenUrl {
    /// `ws://IP:PORT`.
    WebSocket(SocketAddr),
    /// `wss://IP:PORT`: websockets over TLS.
    Tls(SocketAddr),
    /// `unix:PATH`: websockets on a Unix socket, for the server's user and root.
    Unix(PathBuf),
    /// `vsock:PORT` or `vsock:CID:PORT`: websockets between a virtual machine and its host.
    Vsock {
        /// The context id to listen on; `None` is every one of this machine.
        cid: Option<u32>,
        /// The port.
        port: u32,
    },
    /// `stdio`: one connection on stdin and stdout, one message per line.
    Stdio,
}

/// An invalid listen URL.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "unsupported --listen URL `{url}`; expected ws://IP:PORT, wss://IP:PORT, unix:PATH, vsock:PORT or stdio"
)]
pub struct ExecServerListenUrlParseError {
    /// The URL as given.
    pub url: String,
}

impl FromStr for ListenUrl {
    type Err = ExecServerListenUrlParseError;

    fn from_str(url: &str) -> Result<Self, Self::Err> {
        let invalid = || ExecServerListenUrlParseError { url: url.to_owned() };
        if matches!(url, "stdio" | "stdio://") {
            return Ok(Self::Stdio);
        }
        let address = |rest: &str| rest.strip_suffix('/').unwrap_or(rest).parse().ok();
        let parsed = if let Some(rest) = url.strip_prefix("ws://") {
            address(rest).map(Self::WebSocket)
        } else if let Some(rest) = url.strip_prefix("wss://") {
            address(rest).map(Self::Tls)
        } else if let Some(rest) = url.strip_prefix("unix:") {
            let path = rest.strip_prefix("//").unwrap_or(rest);
            (!path.is_empty()).then(|| Self::Unix(path.into()))
        } else if let Some(rest) = url.strip_prefix("vsock:") {
            vsock(rest)
        } else {
            None
        };
        parsed.ok_or_else(invalid)
    }
}

fn vsock(text: &str) -> Option<ListenUrl> {
    let (cid, port) = match text.split_once(':') {
        Some((cid, port)) => (Some(cid.parse().ok()?), port),
        None => (None, text),
    };
    Some(ListenUrl::Vsock { cid, port: port.parse().ok()? })
}

impl fmt::Display for ListenUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WebSocket(address) => write!(f, "ws://{address}"),
            Self::Tls(address) => write!(f, "wss://{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Vsock { cid: None, port } => write!(f, "vsock:{port}"),
            Self::Vsock { cid: Some(cid), port } => write!(f, "vsock:{cid}:{port}"),
            Self::Stdio => f.write_str("stdio"),
        }
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
        assert_eq!(parse("wss://1.2.3.4:1"), Ok(ListenUrl::Tls("1.2.3.4:1".parse().unwrap())));
        assert_eq!(parse("unix:a b/c"), Ok(ListenUrl::Unix("a b/c".into())));
        assert_eq!(parse("unix:///a"), Ok(ListenUrl::Unix("/a".into())));
        assert_eq!(parse("vsock:5"), Ok(ListenUrl::Vsock { cid: None, port: 5 }));
        assert_eq!(parse("vsock:1:5"), Ok(ListenUrl::Vsock { cid: Some(1), port: 5 }));
        for bad in [
            "",
            "ws://localhost:1",
            "ws://1.2.3.4",
            "tcp://1.2.3.4:1",
            "unix:",
            "unix://",
            "vsock:",
            "vsock:x",
            "vsock:1:",
        ] {
            let error = parse(bad).unwrap_err().to_string();
            assert!(error.starts_with(&format!("unsupported --listen URL `{bad}`")), "{error}");
        }
    }

    #[test]
    fn a_listen_url_is_shown_as_it_parses() {
        for url in
            ["ws://[::1]:80", "wss://1.2.3.4:1", "unix:/a/b", "vsock:5", "vsock:1:5", "stdio"]
        {
            assert_eq!(url.parse::<ListenUrl>().unwrap().to_string(), url);
        }
    }
}
