//! The proxies of the environment, and tunnels through them.
//!
//! `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY` are read in upper case, then in lower case.
//! A proxy that cannot be used is an error, never a direct connection.
//!
//! Invariant: neither errors nor `Debug` show the user name or password of a proxy.

use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, OnceLock};

use http::{HeaderValue, Uri};
use percent_encoding::percent_decode_str;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// The longest response to `CONNECT`, in bytes.
const MAX_RESPONSE_BYTES: usize = 16 << 10;

/// Which proxy a connection takes, if any.
#[derive(Debug, Clone, Default)]
pub struct Proxies {
    plain: Option<Setting>,
    tls: Option<Setting>,
    bypass: Vec<Bypass>,
}

#[derive(Debug, Clone)]
enum Setting {
    Proxy(Proxy),
    /// The variable whose value is not the URL of a usable proxy.
    Invalid(&'static str),
}

/// A proxy that speaks HTTP.
#[derive(Clone)]
pub struct Proxy {
    /// Without the brackets of an IPv6 address.
    pub(crate) host: String,
    pub(crate) port: u16,
    /// Whether the proxy itself is reached by TLS.
    pub(crate) tls: bool,
    /// `Proxy-Authorization`.
    pub(crate) authorization: Option<HeaderValue>,
}

/// An entry of `NO_PROXY`.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Bypass {
    Everything,
    /// An address and the number of its leading bits to compare.
    Network(IpAddr, u8),
    /// A domain and all below it, in lower case, without a leading dot.
    Domain(String),
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Proxy")
            .field("host", &self.host)
            .field("port", &self.port)
            .field("tls", &self.tls)
            .finish_non_exhaustive()
    }
}

impl Proxies {
    /// No proxy: every connection is direct.
    pub fn none() -> Arc<Self> {
        Arc::default()
    }

    /// The proxies of this process's environment, read once.
    pub fn from_env() -> Arc<Self> {
        static ENVIRONMENT: OnceLock<Arc<Proxies>> = OnceLock::new();
        ENVIRONMENT.get_or_init(|| Arc::new(Self::from_lookup(|n| std::env::var(n).ok()))).clone()
    }

    /// The proxies of the environment that `variable` looks up. Empty variables count as unset.
    pub fn from_lookup(variable: impl Fn(&str) -> Option<String>) -> Self {
        let get = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
        let either = |upper: &'static str, lower: &'static str| {
            get(upper).map(|v| (upper, v)).or_else(|| get(lower).map(|v| (lower, v)))
        };
        // In a CGI program, HTTP_PROXY is the `Proxy` header of the client's request.
        let plain = match variable("REQUEST_METHOD") {
            Some(_) => get("http_proxy").map(|value| ("http_proxy", value)),
            None => either("HTTP_PROXY", "http_proxy"),
        };
        let all = either("ALL_PROXY", "all_proxy");
        let setting = |found: Option<(&'static str, String)>| {
            found.or_else(|| all.clone()).map(|(name, value)| match Proxy::parse(value.trim()) {
                Some(proxy) => Setting::Proxy(proxy),
                None => Setting::Invalid(name),
            })
        };
        let bypass = either("NO_PROXY", "no_proxy").map_or(String::new(), |(_, value)| value);
        Self {
            plain: setting(plain),
            tls: setting(either("HTTPS_PROXY", "https_proxy")),
            bypass: bypass.split(',').filter_map(|entry| Bypass::parse(entry.trim())).collect(),
        }
    }

    /// The proxy for connections to this host, with TLS or without; fails with the name
    /// of the variable that names no usable proxy.
    pub fn for_host(&self, host: &str, tls: bool) -> Result<Option<&Proxy>, &'static str> {
        let setting = if tls { &self.tls } else { &self.plain };
        let Some(setting) = setting else { return Ok(None) };
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let address: Option<IpAddr> = host.parse().ok();
        let host = host.trim_end_matches('.').to_ascii_lowercase();
        if self.bypass.iter().any(|entry| entry.covers(&host, address)) {
            return Ok(None);
        }
        match setting {
            Setting::Proxy(proxy) => Ok(Some(proxy)),
            Setting::Invalid(name) => Err(name),
        }
    }
}

impl Proxy {
    /// `http://[USER[:PASSWORD]@]HOST[:PORT]`, the same with `https`, or without a scheme.
    fn parse(text: &str) -> Option<Self> {
        let uri: Uri = match text.contains("://") {
            true => text.parse().ok()?,
            false => format!("http://{text}").parse().ok()?,
        };
        let tls = match uri.scheme_str()? {
            "http" => false,
            "https" => true,
            _ => return None,
        };
        let authority = uri.authority()?;
        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() {
            return None;
        }
        let authorization = match authority.as_str().rsplit_once('@') {
            Some((user_info, _)) => Some(basic(user_info)?),
            None => None,
        };
        let port = authority.port_u16().unwrap_or(if tls { 443 } else { 80 });
        Some(Self { host: host.to_owned(), port, tls, authorization })
    }

    /// `HOST:PORT`, for errors.
    pub(crate) fn address(&self) -> String {
        authority(&self.host, self.port)
    }

    /// Opens a tunnel to `host` through the proxy at the other end of `stream`. Fails with the reason.
    pub(crate) async fn tunnel(
        &self,
        stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
        host: &str,
        port: u16,
    ) -> Result<(), String> {
        let target = authority(host, port);
        let mut request = format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n").into_bytes();
        if let Some(authorization) = &self.authorization {
            request.extend_from_slice(b"Proxy-Authorization: ");
            request.extend_from_slice(authorization.as_bytes());
            request.extend_from_slice(b"\r\n");
        }
        request.extend_from_slice(b"\r\n");
        let broken = |error: std::io::Error| format!("the connection broke off: {error}");
        stream.write_all(&request).await.map_err(broken)?;
        let mut response = Vec::new();
        let head = loop {
            if let Some(end) = memchr::memmem::find(&response, b"\r\n\r\n") {
                break end + 4;
            }
            if response.len() >= MAX_RESPONSE_BYTES {
                return Err("its response to CONNECT is too long".to_owned());
            }
            if stream.read_buf(&mut response).await.map_err(broken)? == 0 {
                return Err("it closed the connection before it responded to CONNECT".to_owned());
            }
        };
        let line = response.split(|&byte| byte == b'\r').next().unwrap_or_default();
        let mut words = line.split(|&byte| byte == b' ');
        if !words.next().is_some_and(|version| version.starts_with(b"HTTP/1.")) {
            return Err("it does not speak HTTP".to_owned());
        }
        let status = words.next().and_then(|status| std::str::from_utf8(status).ok());
        match status.and_then(|status| status.parse::<u16>().ok()) {
            // The server at the other end does not send first.
            Some(200..=299) if response.len() > head => {
                Err("it sent data before the tunnel was used".to_owned())
            }
            Some(200..=299) => Ok(()),
            Some(407) => Err("it requires a user name and password (HTTP 407)".to_owned()),
            Some(status) => Err(format!("it refused the tunnel (HTTP {status})")),
            None => Err("it does not speak HTTP".to_owned()),
        }
    }
}

/// `HOST:PORT`, with brackets around an IPv6 address.
fn authority(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// The value of `Proxy-Authorization` for the user name and password of a URL.
fn basic(user_info: &str) -> Option<HeaderValue> {
    let (user, password) = user_info.split_once(':').unwrap_or((user_info, ""));
    let mut plain: Vec<u8> = percent_decode_str(user).collect();
    plain.push(b':');
    plain.extend(percent_decode_str(password));
    let text = format!("Basic {}", base64_simd::STANDARD.encode_to_string(&plain));
    let mut value = HeaderValue::try_from(text).ok()?;
    value.set_sensitive(true);
    Some(value)
}

impl Bypass {
    fn parse(entry: &str) -> Option<Self> {
        if entry.is_empty() {
            return None;
        }
        if entry == "*" {
            return Some(Self::Everything);
        }
        let (address, bits) = match entry.split_once('/') {
            Some((address, bits)) => (address, Some(bits)),
            None => (entry, None),
        };
        let bare = address.trim_start_matches('[').trim_end_matches(']');
        if let Ok(address) = bare.parse::<IpAddr>() {
            let most = if address.is_ipv4() { 32 } else { 128 };
            let bits = bits.map_or(Ok(most), str::parse).ok().filter(|&bits| bits <= most)?;
            return Some(Self::Network(address, bits));
        }
        let domain = entry.trim_start_matches('.').trim_end_matches('.');
        (!domain.is_empty()).then(|| Self::Domain(domain.to_ascii_lowercase()))
    }

    fn covers(&self, host: &str, address: Option<IpAddr>) -> bool {
        match (self, address) {
            (Self::Everything, _) => true,
            (Self::Network(network, bits), Some(address)) => within(*network, *bits, address),
            (Self::Domain(domain), None) => host
                .strip_suffix(domain.as_str())
                .is_some_and(|rest| rest.is_empty() || rest.ends_with('.')),
            (Self::Network(..), None) | (Self::Domain(_), Some(_)) => false,
        }
    }
}

fn within(network: IpAddr, bits: u8, address: IpAddr) -> bool {
    let same = |a: u128, b: u128, width: u32| {
        let ignored = width - u32::from(bits);
        a.checked_shr(ignored).unwrap_or(0) == b.checked_shr(ignored).unwrap_or(0)
    };
    match (network, address) {
        (IpAddr::V4(a), IpAddr::V4(b)) => same(a.to_bits().into(), b.to_bits().into(), 32),
        (IpAddr::V6(a), IpAddr::V6(b)) => same(a.to_bits(), b.to_bits(), 128),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proxies(variables: &[(&str, &str)]) -> Proxies {
        let get = |name: &str| variables.iter().find(|(n, _)| *n == name);
        Proxies::from_lookup(|name| get(name).map(|(_, value)| (*value).to_owned()))
    }

    fn for_host(variables: &[(&str, &str)], host: &str, tls: bool) -> Option<String> {
        proxies(variables).for_host(host, tls).unwrap().map(Proxy::address)
    }

    #[test]
    fn each_kind_of_connection_has_its_variable_and_upper_case_wins() {
        let p = "http://p:1";
        for (variables, plain, tls) in [
            (&[("HTTP_PROXY", p)][..], Some("p:1"), None),
            (&[("http_proxy", "p:1")], Some("p:1"), None),
            (&[("HTTPS_PROXY", p)], None, Some("p:1")),
            (&[("https_proxy", "https://p")], None, Some("p:443")),
            (&[("ALL_PROXY", p)], Some("p:1"), Some("p:1")),
            (&[("all_proxy", "http://p"), ("HTTPS_PROXY", "q:2")], Some("p:80"), Some("q:2")),
            (&[("HTTP_PROXY", "q:2"), ("http_proxy", p)], Some("q:2"), None),
            (&[("HTTP_PROXY", " "), ("http_proxy", p)], Some("p:1"), None),
            (&[("HTTP_PROXY", p), ("REQUEST_METHOD", "GET")], None, None),
            (&[("http_proxy", "http://[::1]:3"), ("REQUEST_METHOD", "GET")], Some("[::1]:3"), None),
            (&[], None, None),
        ] {
            assert_eq!(for_host(variables, "h", false).as_deref(), plain, "{variables:?}");
            assert_eq!(for_host(variables, "h", true).as_deref(), tls, "{variables:?}");
        }
    }

    #[test]
    fn no_proxy_bypasses_domains_addresses_and_networks() {
        for (entry, host, direct) in [
            ("*", "h", true),
            ("*", "10.0.0.1", true),
            ("127.0.0.1", "127.0.0.1", true),
            ("127.0.0.0/8", "127.9.9.9", true),
            ("10.0.0.0/9", "10.128.0.1", false),
            ("0.0.0.0/0", "9.9.9.9", true),
            ("0.0.0.0/0", "::1", false),
            ("::/0", "[::1]", true),
            ("[fe80::1]", "[fe80::1]", true),
            ("fd00::/8", "[fe80::1]", false),
            ("10.0.0.0/33", "10.0.0.0", false),
            ("localhost", "LOCALHOST", true),
            ("localhost", "127.0.0.1", false),
            ("localhost:1", "localhost", false),
            ("example.test", "a.example.test", true),
            (".example.test", "example.test", true),
            ("EXAMPLE.test", "example.test.", true),
            ("a,, example.test", "example.test", true),
            ("ample.test", "example.test", false),
            ("", "h", false),
        ] {
            let found = for_host(&[("HTTP_PROXY", "p"), ("NO_PROXY", entry)], host, false);
            assert_eq!(found.is_none(), direct, "{entry} {host}");
        }
        let lower = [("HTTP_PROXY", "p"), ("no_proxy", "h"), ("NO_PROXY", "x")];
        assert_eq!(for_host(&lower, "h", false).as_deref(), Some("p:80"));
    }

    #[test]
    fn unusable_proxy_is_an_error_and_not_a_direct_connection() {
        for bad in ["socks5://p:1", "nonsense://x", "http://", "a b", "http://:1"] {
            let variables = [("ALL_PROXY", bad), ("NO_PROXY", "direct.test")];
            assert_eq!(proxies(&variables).for_host("h", true).unwrap_err(), "ALL_PROXY", "{bad}");
            assert!(proxies(&variables).for_host("direct.test", true).unwrap().is_none());
        }
    }

    #[test]
    fn proxy_credentials_are_decoded_and_redacted() {
        let found = proxies(&[("HTTP_PROXY", "http://u%40x:hunter2@p:1")]);
        let shown = format!("{found:?}");
        assert!(!shown.contains("hunter2") && !shown.contains("u%40x"), "{shown}");
        let proxy = found.for_host("h", false).unwrap().unwrap();
        assert_eq!(proxy.authorization.as_ref().unwrap(), "Basic dUB4Omh1bnRlcjI=");
    }
}
