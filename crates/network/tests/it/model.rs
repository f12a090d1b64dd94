//! What the proxy should decide, written as simply as possible and without any of its code: strings,
//! recursion, a table of networks.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Rules as text.
#[derive(Debug, Clone, Default)]
pub(crate) struct Model {
    pub allow: Vec<String>,
    pub deny: Vec<String>,
    pub review: Vec<String>,
    pub local: bool,
    pub limited: bool,
    pub can_ask: bool,
}

/// A request with everything the world would say about it.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub protocol: &'static str,
    /// In normal form.
    pub host: String,
    pub address: Option<IpAddr>,
    pub port: u16,
    pub method: Option<&'static str>,
    /// What the controller would answer: decision and reason.
    pub answer: (&'static str, &'static str),
    /// What a lookup would find; `None`: it fails.
    pub lookup: Option<Vec<IpAddr>>,
}

/// decision, reason, source of the last finding.
pub(crate) type Expected = (&'static str, String, &'static str);

impl Model {
    pub(crate) fn judge(&self, request: &Request) -> Expected {
        let refuse = |reason: &str, source| ("deny", reason.to_owned(), source);
        if self.limited {
            let udp = request.protocol == "socks5_udp";
            if udp || (request.protocol == "socks5_tcp" && request.port != 443) {
                return refuse("method_not_allowed", "mode_guard");
            }
        }
        let mut names = vec![request.host.clone()];
        if let Some(IpAddr::V6(address)) = request.address {
            names.extend(inner(address).map(|inner| inner.to_string()));
        }
        let any = |list: &[String], names: &[String]| {
            list.iter().any(|pattern| names.iter().any(|name| matches(pattern, name)))
        };
        if any(&self.deny, &names) {
            return refuse("denied", "baseline_policy");
        }
        let is_local = request.host == "localhost" || request.address.is_some_and(|a| !public(a));
        if !self.local && is_local && !self.allow.contains(&request.host) {
            return refuse("not_allowed_local", "baseline_policy");
        }
        let listed = any(&self.allow, &names[..1]) && !any(&self.review, &names);
        if !listed {
            if !self.can_ask {
                return refuse("not_allowed", "baseline_policy");
            }
            if request.answer.0 != "allow" {
                return (request.answer.0, request.answer.1.to_owned(), "decider");
            }
        }
        let is_name = request.host != "localhost" && request.address.is_none();
        if !self.local && is_name {
            let found = request.lookup.clone().unwrap_or_default();
            if found.is_empty() || found.into_iter().any(|address| !public(address)) {
                return refuse("not_allowed_local", "baseline_policy");
            }
        }
        if self.limited {
            match request.protocol {
                "http" => {
                    if !["GET", "HEAD", "OPTIONS"].contains(&request.method.unwrap_or_default()) {
                        return refuse("method_not_allowed", "mode_guard");
                    }
                }
                _ => return refuse("mitm_required", "mode_guard"),
            }
        }
        match listed {
            true => ("allow", "allow".into(), "baseline_policy"),
            false => ("allow", "not_allowed".into(), "decider"),
        }
    }
}

/// Patterns of the test are lower case, without ports or blanks.
pub(crate) fn matches(pattern: &str, host: &str) -> bool {
    if let Some(domain) = pattern.strip_prefix("**.") {
        return wild(domain, host) || wild(&format!("*.{domain}"), host);
    }
    wild(pattern, host)
}

fn wild(pattern: &str, text: &str) -> bool {
    let mut rest = pattern.chars();
    match rest.next() {
        None => text.is_empty(),
        Some('*') => (0..=text.len()).any(|skip| wild(rest.as_str(), &text[skip..])),
        Some('?') => !text.is_empty() && wild(rest.as_str(), &text[1..]),
        Some(c) => text.starts_with(c) && wild(rest.as_str(), &text[1..]),
    }
}

const NOT_PUBLIC: &[(&str, u32)] = &[
    ("0.0.0.0", 8),
    ("10.0.0.0", 8),
    ("100.64.0.0", 10),
    ("127.0.0.0", 8),
    ("169.254.0.0", 16),
    ("172.16.0.0", 12),
    ("192.0.0.0", 24),
    ("192.0.2.0", 24),
    ("192.168.0.0", 16),
    ("198.18.0.0", 15),
    ("198.51.100.0", 24),
    ("203.0.113.0", 24),
    ("224.0.0.0", 4),
    ("240.0.0.0", 4),
];

const NOT_PUBLIC_V6: &[(&str, u32)] =
    &[("::", 128), ("::1", 128), ("fc00::", 7), ("fe80::", 10), ("fec0::", 10), ("ff00::", 8)];

/// Networks that carry an IPv4 address, and how far its last bit is from the right.
const CARRIES: &[(&str, u32, u32)] = &[
    ("::", 96, 0),
    ("::ffff:0:0", 96, 0),
    ("64:ff9b::", 96, 0),
    ("64:ff9b:1::", 48, 0),
    ("2002::", 16, 80),
];

fn inner(address: Ipv6Addr) -> Option<Ipv4Addr> {
    let bits = u128::from(address);
    if bits < 2 {
        return None;
    }
    let carrier = CARRIES.iter().find(|(network, length, _)| in_v6(bits, network, *length))?;
    Some(Ipv4Addr::from((bits >> carrier.2) as u32))
}

fn in_v6(bits: u128, network: &str, length: u32) -> bool {
    let network = u128::from(network.parse::<Ipv6Addr>().unwrap());
    (bits ^ network) >> (128 - length) == 0
}

pub(crate) fn public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => {
            let bits = u32::from(address);
            !NOT_PUBLIC.iter().any(|(network, length)| {
                let network = u32::from(network.parse::<Ipv4Addr>().unwrap());
                (bits ^ network) >> (32 - length) == 0
            })
        }
        IpAddr::V6(address) => match inner(address) {
            Some(inner) => public(inner.into()),
            None => {
                let bits = u128::from(address);
                !NOT_PUBLIC_V6.iter().any(|(network, length)| match length {
                    128 => bits == u128::from(network.parse::<Ipv6Addr>().unwrap()),
                    length => in_v6(bits, network, *length),
                })
            }
        },
    }
}
