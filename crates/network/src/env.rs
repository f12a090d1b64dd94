//! The variables that point a process at its proxy.

/// The port of the HTTP proxy in a network namespace of a process's own: free there, unusual, and not
/// ephemeral.
pub const NAMESPACE_HTTP_PORT: u16 = 29_128;

/// The port of the SOCKS5 proxy there.
pub const NAMESPACE_SOCKS_PORT: u16 = 29_108;

/// Variables that hold the HTTP proxy.
const HTTP: &[&str] = &[
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "WS_PROXY",
    "WSS_PROXY",
    "http_proxy",
    "https_proxy",
    "ws_proxy",
    "wss_proxy",
    "YARN_HTTP_PROXY",
    "YARN_HTTPS_PROXY",
    "NPM_CONFIG_HTTP_PROXY",
    "NPM_CONFIG_HTTPS_PROXY",
    "NPM_CONFIG_PROXY",
    "npm_config_http_proxy",
    "npm_config_https_proxy",
    "npm_config_proxy",
    "BUNDLE_HTTP_PROXY",
    "BUNDLE_HTTPS_PROXY",
    "PIP_PROXY",
    "DOCKER_HTTP_PROXY",
    "DOCKER_HTTPS_PROXY",
];

/// Variables that hold the SOCKS5 proxy, or the HTTP proxy where there is none.
const ANY: &[&str] = &["ALL_PROXY", "all_proxy", "FTP_PROXY", "ftp_proxy"];

/// Variables that hold what is to bypass the proxy.
const NO_PROXY: &[&str] =
    &["NO_PROXY", "no_proxy", "NPM_CONFIG_NOPROXY", "npm_config_noproxy", "BUNDLE_NO_PROXY"];

const LOCAL: &str = "localhost,127.0.0.1,::1,10.0.0.0/8,172.16.0.0/12,192.168.0.0/16";

/// The environment variables of a process behind a proxy on these ports of 127.0.0.1. They replace
/// whatever the environment says. `socks_port`: `None` without SOCKS5.
pub fn proxy_variables(
    http_port: u16,
    socks_port: Option<u16>,
    allow_local_binding: bool,
) -> Vec<(&'static str, String)> {
    let http = format!("http://127.0.0.1:{http_port}");
    let any = match socks_port {
        Some(port) => format!("socks5h://127.0.0.1:{port}"),
        None => http.clone(),
    };
    let bypass = if allow_local_binding { LOCAL } else { "" };
    let mut variables = Vec::with_capacity(HTTP.len() + ANY.len() + NO_PROXY.len() + 4);
    variables.extend(HTTP.iter().map(|name| (*name, http.clone())));
    variables.extend(ANY.iter().map(|name| (*name, any.clone())));
    variables.extend(NO_PROXY.iter().map(|name| (*name, bypass.to_owned())));
    let local = if allow_local_binding { "1" } else { "0" };
    for (name, value) in [
        ("CODEX_NETWORK_PROXY_ACTIVE", "1"),
        ("CODEX_NETWORK_ALLOW_LOCAL_BINDING", local),
        ("ELECTRON_GET_USE_PROXY", "true"),
        ("NODE_USE_ENV_PROXY", "1"),
    ] {
        variables.push((name, value.to_owned()));
    }
    variables
}

/// The ports of 127.0.0.1 that the proxy variables of an environment name.
pub fn loopback_proxy_ports(variable: impl Fn(&str) -> Option<String>) -> Vec<u16> {
    let mut ports = Vec::new();
    for port in HTTP.iter().chain(ANY).filter_map(|name| loopback_port(&variable(name)?)) {
        if !ports.contains(&port) {
            ports.push(port);
        }
    }
    ports
}

/// The port of a proxy on 127.0.0.1: `[SCHEME://][USER[:PASSWORD]@]HOST[:PORT][/…]`.
fn loopback_port(url: &str) -> Option<u16> {
    let (scheme, rest) = url.trim().split_once("://").unwrap_or(("http", url.trim()));
    let authority = rest.split(['/', '?', '#']).next()?;
    let place = authority.rsplit_once('@').map_or(authority, |(_, place)| place);
    let (host, port) = place.split_once(':').unwrap_or((place, ""));
    let default = match scheme.to_ascii_lowercase().as_str() {
        "http" | "ws" => 80,
        "https" | "wss" => 443,
        socks if socks.starts_with("socks") => 1080,
        _ => return None,
    };
    let is_local = host == "127.0.0.1" || host.eq_ignore_ascii_case("localhost");
    let port = if port.is_empty() { default } else { port.parse().ok()? };
    (is_local && port != 0).then_some(port)
}

/// Variables that name the certificates a program trusts.
const CA: &[&str] = &[
    "CODEX_CA_CERTIFICATE",
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "NODE_EXTRA_CA_CERTS",
    "GIT_SSL_CAINFO",
    "CARGO_HTTP_CAINFO",
    "BUNDLE_SSL_CA_CERT",
    "PIP_CERT",
    "npm_config_cafile",
    "NPM_CONFIG_CAFILE",
];

/// The environment variables of a process whose tunnels are opened: all name the bundle of
/// [`CaFiles`](crate::CaFiles).
pub fn ca_variables(bundle: &str) -> Vec<(&'static str, String)> {
    CA.iter().map(|name| (*name, bundle.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn variables(socks: Option<u16>, local: bool) -> BTreeMap<&'static str, String> {
        let list = proxy_variables(1080, socks, local);
        let map: BTreeMap<_, _> = list.iter().cloned().collect();
        assert_eq!(map.len(), list.len(), "a variable is set twice");
        map
    }

    #[test]
    fn proxies_on_loopback_are_found() {
        for (url, port) in [
            ("http://127.0.0.1:8080", Some(8080)),
            ("http://user:p%40ss@localhost:1/path", Some(1)),
            ("socks5h://127.0.0.1", Some(1080)),
            ("LOCALHOST:3128", Some(3128)),
            ("https://127.0.0.1/", Some(443)),
            ("http://127.0.0.2:1", None),
            ("http://[::1]:1", None),
            ("http://example.com:1", None),
            ("http://127.0.0.1.example.com:1", None),
            ("http://127.0.0.1@example.com:1", None),
            ("http://127.0.0.1:0", None),
            ("http://127.0.0.1:65536", None),
            ("http://127.0.0.1:1:2", None),
            ("ftp://127.0.0.1", None),
            ("", None),
        ] {
            assert_eq!(loopback_port(url), port, "{url}");
        }
        let variables = BTreeMap::from([
            ("HTTP_PROXY", "http://127.0.0.1:5"),
            ("https_proxy", "http://localhost:6"),
            ("all_proxy", "socks5://127.0.0.1:5"),
            ("NO_PROXY", "127.0.0.1:7"),
        ]);
        let ports = loopback_proxy_ports(|name| variables.get(name).map(|url| (*url).to_owned()));
        assert_eq!(ports, [5, 6]);
    }

    #[test]
    fn variables_point_at_the_ports() {
        let with = variables(Some(1081), false);
        assert_eq!(with.len(), 34);
        assert_eq!(with["https_proxy"], "http://127.0.0.1:1080");
        assert_eq!(with["ALL_PROXY"], "socks5h://127.0.0.1:1081");
        assert_eq!(with["NO_PROXY"], "");
        assert_eq!(with["CODEX_NETWORK_PROXY_ACTIVE"], "1");
        assert_eq!(with["CODEX_NETWORK_ALLOW_LOCAL_BINDING"], "0");
        let without = variables(None, true);
        assert_eq!(without["ftp_proxy"], "http://127.0.0.1:1080");
        assert_eq!(without["BUNDLE_NO_PROXY"], LOCAL);
        assert_eq!(without["CODEX_NETWORK_ALLOW_LOCAL_BINDING"], "1");
        assert!(with.keys().eq(without.keys()));
    }
}
