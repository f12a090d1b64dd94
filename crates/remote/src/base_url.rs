//! The base URL of an HTTP service, and whether a credential may be sent there.
//!
//! Invariant: a [`BaseUrl`] has the scheme http or https, a host, no user, no query, no fragment and no
//! trailing slash, so logs and errors may show it.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use codex_exec_rpc::escape;
use http::Uri;

/// The URL to which a service's paths are appended.
#[derive(Clone, PartialEq, Eq)]
pub struct BaseUrl {
    text: String,
    host: String,
    https: bool,
}

/// Why a text is not a base URL.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid base URL ({reason}); expected https://HOST or https://HOST/PATH")]
pub struct BaseUrlError {
    reason: &'static str,
}

impl FromStr for BaseUrl {
    type Err = BaseUrlError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = |reason| BaseUrlError { reason };
        let text = text.trim().trim_end_matches('/');
        if text.contains(['?', '#']) {
            return Err(bad("it has a query or a fragment"));
        }
        let uri: Uri = text.parse().map_err(|_| bad("it cannot be parsed"))?;
        let https = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err(bad("its scheme is neither http nor https")),
        };
        let authority = uri.authority().ok_or_else(|| bad("it has no host"))?;
        if authority.as_str().contains('@') {
            return Err(bad("it contains a user name"));
        }
        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() {
            return Err(bad("it has no host"));
        }
        Ok(Self { text: text.to_owned(), host: host.to_ascii_lowercase(), https })
    }
}

impl BaseUrl {
    /// The URL of a path of this service. Each segment is escaped, so that an id cannot change the path.
    pub fn join(&self, segments: &[&str]) -> String {
        let mut url = self.text.clone();
        for segment in segments {
            url.push('/');
            url.extend(escape(segment));
        }
        url
    }

    /// The host, in lower case, without the brackets of an IPv6 address.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Whether the host is this machine.
    pub fn is_loopback(&self) -> bool {
        self.host == "localhost" || self.host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
    }

    /// Whether the scheme is https.
    pub fn is_https(&self) -> bool {
        self.https
    }

    /// Whether requests are protected on the way: by https, or because the host is this machine.
    pub fn is_private(&self) -> bool {
        self.https || self.is_loopback()
    }

    /// Whether the URL is https and its host is under openai.com or openai.org.
    pub fn is_openai(&self) -> bool {
        let under = |domain: &str| {
            self.host
                .strip_suffix(domain)
                .is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        };
        self.https && (under("openai.com") || under("openai.org"))
    }

    /// Whether the host is one of these.
    pub fn is_among(&self, hosts: &[String]) -> bool {
        hosts.iter().any(|host| host.eq_ignore_ascii_case(&self.host))
    }
}

impl fmt::Display for BaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for BaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(text: &str) -> BaseUrl {
        text.parse().unwrap()
    }

    #[test]
    fn base_url_trims_slashes_and_escapes_segments() {
        let base = url("https://h.example/api//");
        assert_eq!(base.join(&["a b", "../c"]), "https://h.example/api/a%20b/..%2Fc");
        assert_eq!(base.to_string(), "https://h.example/api");
    }

    #[test]
    fn invalid_base_urls_are_rejected() {
        for bad in
            ["", "h", "ftp://h", "https://", "https://u:p@h", "https://h?x=1", "https://h/#x"]
        {
            bad.parse::<BaseUrl>().unwrap_err();
        }
    }

    #[test]
    fn openai_hosts_match_whole_labels_over_https() {
        for yes in ["https://openai.com", "https://api.OpenAI.org:8443/x"] {
            assert!(url(yes).is_openai(), "{yes}");
        }
        for no in
            ["http://api.openai.com", "https://evilopenai.com", "https://openai.com.evil.example"]
        {
            assert!(!url(no).is_openai(), "{no}");
        }
        for yes in ["http://127.0.0.1:1", "http://127.9.9.9", "http://[::1]:8", "http://localhost"]
        {
            assert!(url(yes).is_loopback(), "{yes}");
        }
        assert!(!url("http://localhost.evil.example").is_loopback());
    }
}
