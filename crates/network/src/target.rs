//! The target of an HTTP request: the one place where its authority is read.
//!
//! Invariant: what is judged is what is connected to and what the `Host` header says. A request whose
//! request line and `Host` disagree has no target.

use http::header::HOST;
use http::uri::Authority;
use http::{HeaderMap, Uri};

use crate::host::Host;

/// Where an HTTP request is to go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    pub host: Host,
    pub port: u16,
}

/// Why a request has no target. The messages are sent to the program, with status 400.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoTarget {
    #[error("missing host")]
    MissingHost,
    #[error("multiple Host headers")]
    SeveralHosts,
    #[error("Host header does not match request target")]
    Mismatch,
    #[error("unsupported request scheme")]
    Scheme,
}

impl Target {
    /// Reads an absolute-form or origin-form request, with the port 80 where none is written.
    pub(crate) fn of_request(uri: &Uri, headers: &HeaderMap) -> Result<Self, NoTarget> {
        let mut hosts = headers.get_all(HOST).iter();
        let header = hosts.next();
        if hosts.next().is_some() {
            return Err(NoTarget::SeveralHosts);
        }
        let header = header.map(|value| {
            let text = value.to_str().map_err(|_| NoTarget::MissingHost)?;
            if text.contains('@') {
                return Err(NoTarget::MissingHost);
            }
            Self::parse(text)
        });
        let Some(authority) = uri.authority() else {
            return header.unwrap_or(Err(NoTarget::MissingHost));
        };
        if !matches!(uri.scheme_str(), Some("http" | "ws")) {
            return Err(NoTarget::Scheme);
        }
        let target = Self::of_authority(authority)?;
        match header {
            Some(Ok(named)) if named != target => Err(NoTarget::Mismatch),
            Some(Err(error)) => Err(error),
            _ => Ok(target),
        }
    }

    /// Reads the authority-form target of CONNECT. User information in front of the host is ignored.
    pub(crate) fn of_connect(uri: &Uri) -> Result<Self, NoTarget> {
        Self::of_authority(uri.authority().ok_or(NoTarget::MissingHost)?)
    }

    fn of_authority(authority: &Authority) -> Result<Self, NoTarget> {
        let text = authority.as_str();
        // What a URL parser takes for the host is what follows the last `@`.
        Self::parse(text.rsplit_once('@').map_or(text, |(_, place)| place))
    }

    fn parse(text: &str) -> Result<Self, NoTarget> {
        let host = Host::parse(text).map_err(|_| NoTarget::MissingHost)?;
        let port = port_of(text, 80).ok_or(NoTarget::MissingHost)?;
        Ok(Self { host, port })
    }

    /// The `Host` header of a request to this target.
    pub(crate) fn host_header(&self) -> String {
        let authority = self.host.authority(self.port);
        match authority.strip_suffix(":80") {
            Some(without) => without.to_owned(),
            None => authority,
        }
    }
}

/// The port of an authority without user information, or the default. `None`: the port is invalid.
pub(crate) fn port_of(authority: &str, default: u16) -> Option<u16> {
    let after_host = authority.rsplit_once(']').map_or(authority, |(_, after)| after);
    match after_host.split_once(':') {
        None | Some((_, "")) => Some(default),
        Some((_, port)) if port.bytes().all(|b| b.is_ascii_digit()) => port.parse().ok(),
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(uri: &str, hosts: &[&str]) -> Result<String, NoTarget> {
        let mut headers = HeaderMap::new();
        for host in hosts {
            headers.append(HOST, host.parse().unwrap());
        }
        let target = Target::of_request(&uri.parse().unwrap(), &headers)?;
        Ok(target.host.authority(target.port))
    }

    #[test]
    fn request_line_and_host_have_to_agree() {
        assert_eq!(target("http://a.com/x", &["a.com"]).unwrap(), "a.com:80");
        assert_eq!(target("http://a.com:80/x", &["A.com."]).unwrap(), "a.com:80");
        assert_eq!(target("http://a.com:8/x", &[]).unwrap(), "a.com:8");
        assert_eq!(target("/x", &["a.com:8"]).unwrap(), "a.com:8");
        assert_eq!(target("http://127.1/x", &["127.0.0.1"]).unwrap(), "127.0.0.1:80");
        assert_eq!(target("http://[::1]:9/x", &["[::1]:9"]).unwrap(), "[::1]:9");
        assert_eq!(target("http://bad.com@a.com/", &["a.com"]).unwrap(), "a.com:80");
        assert_eq!(target("http://a.com:80@bad.com/", &["a.com"]), Err(NoTarget::Mismatch));
        assert_eq!(target("http://a.com/", &["bad.com"]), Err(NoTarget::Mismatch));
        assert_eq!(target("http://a.com/", &["a.com:81"]), Err(NoTarget::Mismatch));
        assert_eq!(target("http://a.com/", &["a.com", "a.com"]), Err(NoTarget::SeveralHosts));
        assert_eq!(target("/", &["a.com", "bad.com"]), Err(NoTarget::SeveralHosts));
        assert_eq!(target("/", &[]), Err(NoTarget::MissingHost));
        assert_eq!(target("/", &["u@a.com"]), Err(NoTarget::MissingHost));
        assert_eq!(target("http://a.com/", &["u@a.com"]), Err(NoTarget::MissingHost));
        assert_eq!(target("/", &["a.com:99999"]), Err(NoTarget::MissingHost));
        assert_eq!(target("/", &["a.com:+80"]), Err(NoTarget::MissingHost));
        assert_eq!(target("/", &["a.com/b"]), Err(NoTarget::MissingHost));
        assert_eq!(target("/", &["a.com, bad.com"]), Err(NoTarget::MissingHost));
        assert_eq!(target("/", &["a..b"]), Err(NoTarget::MissingHost));
        assert_eq!(target("https://a.com/", &["a.com"]), Err(NoTarget::Scheme));
        assert_eq!(target("ftp://a.com/", &["a.com"]), Err(NoTarget::Scheme));
    }

    #[test]
    fn connect_names_its_target_alone() {
        let connect = |text: &str| {
            Target::of_connect(&Uri::builder().authority(text).build().unwrap())
                .map(|target| target.host.authority(target.port))
        };
        assert_eq!(connect("a.com:443").unwrap(), "a.com:443");
        assert_eq!(connect("[::1]:1").unwrap(), "[::1]:1");
        assert_eq!(connect("a.com").unwrap(), "a.com:80");
        assert_eq!(connect("u@a.com:443").unwrap(), "a.com:443");
        assert_eq!(connect("a.com:443@bad.com:1").unwrap(), "bad.com:1");
    }
}
