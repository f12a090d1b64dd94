//! Who may use the server over HTTP.
//!
//! Invariant: a web page cannot. Its requests carry an `Origin`, which has to be on this machine, and a name
//! that it points at this machine (DNS rebinding) is not the `Host` of a loopback listener. A listener that
//! other machines reach requires a token. Nor can a command that a tool started in a sandbox, if the caller says
//! which processes those are ([`HttpGuard::admitting`]).

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use futures_util::future::BoxFuture;
use hyper::StatusCode;
use hyper::header::{AUTHORIZATION, HOST, HeaderMap, ORIGIN};
use subtle::ConstantTimeEq;
use tokio::net::TcpStream;

/// Whether the process at the other end of a connection may connect.
type Admission = dyn Fn(&TcpStream) -> BoxFuture<'_, bool> + Send + Sync;

/// Checks every connection, and every request before anything else is read of it.
#[derive(Clone)]
pub struct HttpGuard {
    token: Option<String>,
    is_loopback: bool,
    admission: Option<Arc<Admission>>,
}

impl std::fmt::Debug for HttpGuard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HttpGuard").field("is_loopback", &self.is_loopback).finish_non_exhaustive()
    }
}

impl HttpGuard {
    /// The guard of a listener at this address; `None` if it is not on loopback and has no token.
    pub fn new(address: SocketAddr, token: Option<String>) -> Option<Self> {
        let is_loopback = address.ip().is_loopback();
        let token = token.filter(|token| !token.is_empty());
        (is_loopback || token.is_some()).then_some(Self { token, is_loopback, admission: None })
    }

    /// Asks this about each connection too, whatever token its requests have.
    #[must_use]
    pub fn admitting(
        mut self,
        admission: impl Fn(&TcpStream) -> BoxFuture<'_, bool> + Send + Sync + 'static,
    ) -> Self {
        self.admission = Some(Arc::new(admission));
        self
    }

    /// Whether the peer may make requests.
    pub(crate) async fn admits(&self, peer: &TcpStream) -> bool {
        match &self.admission {
            Some(admission) => admission(peer).await,
            None => true,
        }
    }

    /// Why a request is refused, if it is.
    pub(crate) fn check(&self, headers: &HeaderMap) -> Result<(), (StatusCode, &'static str)> {
        if let Some(origin) = headers.get(ORIGIN) {
            let host = origin.to_str().ok().and_then(|origin| origin.split_once("://"));
            if !host.is_some_and(|(_, host)| is_local(host)) {
                return Err((StatusCode::FORBIDDEN, "requests of web pages are refused"));
            }
        }
        if self.is_loopback {
            let host = headers.get(HOST).and_then(|host| host.to_str().ok());
            if !host.is_some_and(is_local) {
                return Err((StatusCode::FORBIDDEN, "the Host header has to name this machine"));
            }
        }
        let Some(token) = &self.token else { return Ok(()) };
        let given = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        let given = given.and_then(|value| value.split_once(' '));
        match given {
            Some((scheme, given))
                if scheme.eq_ignore_ascii_case("bearer")
                    && bool::from(given.trim().as_bytes().ct_eq(token.as_bytes())) =>
            {
                Ok(())
            }
            _ => Err((StatusCode::UNAUTHORIZED, "the bearer token is missing or wrong")),
        }
    }
}

/// Whether `HOST` or `HOST:PORT` is a loopback name or address.
fn is_local(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => match rest.split_once(']') {
            Some((address, port)) if port.is_empty() || is_port(port) => address,
            _ => return false,
        },
        None => match host.split_once(':') {
            Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
            Some(_) => return false,
            None => host,
        },
    };
    name.eq_ignore_ascii_case("localhost")
        || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

fn is_port(text: &str) -> bool {
    text.strip_prefix(':').is_some_and(|port| port.bytes().all(|b| b.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let pairs = pairs.iter();
        pairs.map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    #[test]
    fn web_pages_and_rebound_names_are_refused() {
        let guard = HttpGuard::new("127.0.0.1:1".parse().unwrap(), None).unwrap();
        let check = |pairs: &[(&'static str, &str)]| guard.check(&headers(pairs)).is_ok();
        for host in ["localhost", "LOCALHOST:8", "127.0.0.1:8", "127.9.9.9", "[::1]:8", "[::1]"] {
            assert!(check(&[("host", host)]), "{host}");
            assert!(check(&[("host", host), ("origin", &format!("http://{host}"))]), "{host}");
        }
        for host in [
            "evil.example",
            "localhost.evil.example:8",
            "127.0.0.1.evil.example",
            "127.0.0.1:8@evil",
            "[::2]:8",
            "[::1]x",
            "",
            "10.0.0.1",
            "user@localhost",
        ] {
            assert!(!check(&[("host", host)]), "{host}");
            let origin = format!("https://{host}");
            assert!(!check(&[("host", "localhost"), ("origin", &origin)]), "{host}");
        }
        assert!(!check(&[]), "no Host");
        assert!(!check(&[("host", "localhost"), ("origin", "null")]));
    }

    #[test]
    fn other_machines_need_a_token() {
        let open: SocketAddr = "0.0.0.0:1".parse().unwrap();
        assert!(HttpGuard::new(open, None).is_none());
        assert!(HttpGuard::new(open, Some(String::new())).is_none());
        let guard = HttpGuard::new(open, Some("secret".to_owned())).unwrap();
        assert!(!format!("{guard:?}").contains("secret"));
        let check = |value: &str| guard.check(&headers(&[("host", "x"), ("authorization", value)]));
        check("Bearer secret").unwrap();
        check("bearer  secret").unwrap();
        for wrong in ["secret", "Bearer", "Bearer secre", "Bearer secrets", "Basic secret"] {
            assert_eq!(check(wrong).unwrap_err().0, StatusCode::UNAUTHORIZED, "{wrong}");
        }
    }
}
