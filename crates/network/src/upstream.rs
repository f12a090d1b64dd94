//! Proxies of the server itself, which carry requests to public hosts.

use std::fmt;
use std::net::IpAddr;

use percent_encoding::percent_decode_str;
use zeroize::Zeroizing;

use crate::address::{is_public, is_rfc1918};
use crate::host::Host;

/// An HTTP proxy. `Debug` hides its credentials.
#[derive(Clone, PartialEq, Eq)]
pub struct UpstreamProxy {
    pub(crate) host: Host,
    pub(crate) port: u16,
    /// The value of `Proxy-Authorization`.
    pub(crate) authorization: Option<Zeroizing<String>>,
}

impl UpstreamProxy {
    /// Parses `http://[user[:password]@]host[:port]`. `None` for other schemes and what is no URL.
    pub fn parse(url: &str) -> Option<Self> {
        let (scheme, rest) = url.trim().split_once("://")?;
        if !scheme.eq_ignore_ascii_case("http") {
            return None;
        }
        let authority = rest.split(['/', '?', '#']).next()?;
        let (credentials, place) = match authority.rsplit_once('@') {
            Some((credentials, place)) => (Some(credentials), place),
            None => (None, authority),
        };
        let after_host = place.rsplit_once(']').map_or(place, |(_, after)| after);
        let port = match after_host.rsplit_once(':') {
            Some((_, port)) => port.parse().ok()?,
            None => 80,
        };
        let authorization = credentials.map(|credentials| {
            let (user, password) = credentials.split_once(':').unwrap_or((credentials, ""));
            let mut plain = Zeroizing::new(percent_decode_str(user).collect::<Vec<u8>>());
            plain.push(b':');
            plain.extend(percent_decode_str(password));
            let encoded = base64_simd::STANDARD.encode_to_string(plain.as_slice());
            Zeroizing::new(format!("Basic {encoded}"))
        });
        Some(Self { host: Host::parse(place).ok()?, port, authorization })
    }
}

impl fmt::Debug for UpstreamProxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}", self.host.authority(self.port))
    }
}

/// Which proxy carries what.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UpstreamProxies {
    /// Carries plain HTTP, in absolute form.
    pub http: Option<UpstreamProxy>,
    /// Carries CONNECT.
    pub https: Option<UpstreamProxy>,
    /// Send targets in the private ranges of RFC 1918 there, too (default false). Loopback, link-local
    /// and documentation addresses are always connected to directly.
    pub private_addresses: bool,
}

impl UpstreamProxies {
    /// Reads `HTTP_PROXY`, `HTTPS_PROXY` and `ALL_PROXY` in either case; upper case wins.
    pub fn from_env(variable: impl Fn(&str) -> Option<String>) -> Self {
        let named = |name: &str| {
            [name.to_owned(), name.to_lowercase()]
                .iter()
                .filter_map(|name| variable(name))
                .find_map(|url| UpstreamProxy::parse(&url))
        };
        let http = named("HTTP_PROXY");
        let all = named("ALL_PROXY");
        let https = named("HTTPS_PROXY").or_else(|| http.clone()).or_else(|| all.clone());
        Self { http: http.or(all), https, private_addresses: false }
    }

    /// Whether a connection to these addresses goes through a proxy.
    pub(crate) fn carries(&self, addresses: &[IpAddr]) -> bool {
        addresses
            .iter()
            .all(|address| is_public(*address) || (self.private_addresses && is_rfc1918(*address)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proxies_come_from_variables() {
        let from = |variables: &[(&str, &str)]| {
            UpstreamProxies::from_env(|name| {
                variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
            })
        };
        let text = |proxy: &Option<UpstreamProxy>| format!("{proxy:?}");
        let both = from(&[("HTTP_PROXY", "http://a:1"), ("https_proxy", "http://b:2/")]);
        assert_eq!(text(&both.http), "Some(http://a:1)");
        assert_eq!(text(&both.https), "Some(http://b:2)");
        let one = from(&[("http_proxy", "http://a:1"), ("ALL_PROXY", "http://c:3")]);
        assert_eq!(
            (text(&one.http), text(&one.https)),
            ("Some(http://a:1)".into(), "Some(http://a:1)".into())
        );
        let all = from(&[("all_proxy", "HTTP://c")]);
        assert_eq!(
            (text(&all.http), text(&all.https)),
            ("Some(http://c:80)".into(), "Some(http://c:80)".into())
        );
        // Another scheme is as if it were absent.
        let other = from(&[("HTTPS_PROXY", "https://b:2"), ("ALL_PROXY", "socks5://c:3")]);
        assert_eq!(other, UpstreamProxies::default());
        assert_eq!(from(&[]), UpstreamProxies::default());
    }

    #[test]
    fn credentials_are_sent_and_never_shown() {
        let proxy = UpstreamProxy::parse("http://us%65r:p%40ss@[::1]:3128").unwrap();
        assert_eq!(proxy.authorization.as_deref().unwrap(), "Basic dXNlcjpwQHNz");
        assert_eq!(format!("{proxy:?}"), "http://[::1]:3128");
        for bad in
            ["", "a:1", "http://", "http://a:x", "http://a:99999", "http://a b", "socks5://a"]
        {
            assert_eq!(UpstreamProxy::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn only_public_targets_are_carried() {
        let addresses = |text: &str| vec![text.parse::<IpAddr>().unwrap()];
        let mut proxies = UpstreamProxies::default();
        for (text, usually, with_option) in [
            ("8.8.8.8", true, true),
            ("10.0.0.1", false, true),
            ("192.168.0.1", false, true),
            ("127.0.0.1", false, false),
            ("169.254.0.1", false, false),
            ("192.0.2.1", false, false),
            ("::1", false, false),
            ("fd00::1", false, false),
        ] {
            proxies.private_addresses = false;
            assert_eq!(proxies.carries(&addresses(text)), usually, "{text}");
            proxies.private_addresses = true;
            assert_eq!(proxies.carries(&addresses(text)), with_option, "{text}");
        }
    }
}
