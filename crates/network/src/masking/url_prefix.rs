//! The URLs that a secret may be sent to.

use crate::host::{Host, HostKind};
use crate::target::port_of;

/// An `https` origin and the beginning of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct UrlPrefix {
    /// In normal form; without the `*.` of a wildcard.
    host: String,
    wildcard: bool,
    port: u16,
    /// Begins with a slash.
    path: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct InvalidPrefix;

impl UrlPrefix {
    /// Parses `https://HOST[:PORT][/PATH]`; the host may begin with `*.`.
    pub(super) fn parse(url: &str) -> Result<Self, InvalidPrefix> {
        let (scheme, rest) = url.trim().split_once("://").ok_or(InvalidPrefix)?;
        if !scheme.eq_ignore_ascii_case("https") || rest.contains(['@', '?', '#', '\\']) {
            return Err(InvalidPrefix);
        }
        let at = rest.find('/').unwrap_or(rest.len());
        let (authority, path) = rest.split_at(at);
        let (wildcard, authority) = match authority.strip_prefix("*.") {
            Some(rest) => (true, rest),
            None => (false, authority),
        };
        let host = Host::parse(authority).map_err(|_| InvalidPrefix)?;
        if wildcard && host.kind() != HostKind::Name {
            return Err(InvalidPrefix);
        }
        let port = port_of(authority, 443).ok_or(InvalidPrefix)?;
        let path = if path.is_empty() { "/" } else { path };
        if !is_plain(path) {
            return Err(InvalidPrefix);
        }
        Ok(Self { host: host.as_str().to_owned(), wildcard, port, path: path.to_owned() })
    }

    /// The same place, with every path.
    pub(super) fn origin(&self) -> String {
        let wildcard = if self.wildcard { "*." } else { "" };
        let host =
            if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        format!("https://{wildcard}{host}:{}/", self.port)
    }

    pub(super) fn is_at(&self, host: &Host, port: u16) -> bool {
        let named = match self.wildcard {
            false => host.as_str() == self.host,
            true => host.as_str().strip_suffix(&self.host).is_some_and(|rest| rest.ends_with('.')),
        };
        named && port == self.port
    }

    /// Whether the path of a request, without its query, is below this prefix.
    pub(super) fn covers(&self, host: &Host, port: u16, path: &str) -> bool {
        let below = || match path.strip_prefix(&self.path) {
            // A name that merely begins like the last one of the prefix is another one.
            Some(rest) => self.path.ends_with('/') || rest.is_empty() || rest.starts_with('/'),
            None => false,
        };
        self.is_at(host, port) && (self.path == "/" || (is_plain(path) && below()))
    }
}

/// A path that no server reads as another one: without dot segments, in whatever spelling, and without
/// escaped or doubled separators.
fn is_plain(path: &str) -> bool {
    let lower = path.to_ascii_lowercase();
    let is_dots = |segment: &str| matches!(segment.replace("%2e", ".").as_str(), "." | "..");
    !lower.split('/').any(is_dots)
        && !["//", "\\", "%2f", "%5c", "%25", "%00", ";"].iter().any(|text| lower.contains(text))
}
