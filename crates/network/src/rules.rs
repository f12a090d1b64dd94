//! Patterns for hosts, and the lists they stand in.
//!
//! Invariant: [`Rules`] holds parsed patterns only; a list that does not parse never judges anything.

use std::fmt;
use std::net::IpAddr;

use crate::address::{embedded_v4, is_public};
use crate::host::{Host, HostKind, without_port};

/// What a list does with the hosts that match it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum List {
    /// Lets them through.
    Allow,
    /// Refuses them, whatever another list says.
    Deny,
    /// Asks the controller about them, even if they are allowed.
    Review,
}

/// Why a pattern cannot be used. The messages are part of the wire protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    /// Nothing is left once blanks, port and dots are removed.
    #[error("domain pattern is empty")]
    Empty,
    /// A URL, a network with a prefix length, blanks, braces or escapes.
    #[error("unsupported domain pattern syntax: {0}")]
    Syntax(String),
    /// `**` anywhere but in front of a domain.
    #[error("unsupported repeated wildcard: {0}")]
    RepeatedWildcard(String),
    /// Brackets around something other than an IPv6 address.
    #[error("brackets are only supported for IPv6 literals or [*]: {0}")]
    Brackets(String),
    /// A deny list that would refuse everything.
    #[error(
        "invalid value for network.denied_domains: {0} \
         (allowed exact hosts or scoped wildcards like *.example.com or **.example.com)"
    )]
    DenyEverything(String),
    /// A port that is not a number, where ports count.
    #[error("invalid port in domain pattern: {0}")]
    Port(String),
}

/// A host, or a set of hosts by wildcards.
///
/// `*` stands for any text, dots included, and `?` for any one character. `**.` in front of a domain
/// stands for the domain and its subdomains.
#[derive(Clone, PartialEq, Eq)]
pub struct Pattern {
    /// Lower case; a glob if `exact` is false.
    text: String,
    exact: bool,
    /// `**.`: the domain itself matches, too.
    with_apex: bool,
    /// The port that was written, whether or not it counts; `Err`: not a number.
    port: Option<Result<u16, String>>,
}

impl Pattern {
    /// Parses a pattern as an entry of `list`.
    pub fn parse(text: &str, list: List) -> Result<Self, PatternError> {
        let given = text.trim();
        let refused = |c: char| matches!(c, '/' | '\\' | '{' | '}') || c.is_whitespace();
        if given.contains(refused) {
            return Err(PatternError::Syntax(given.to_owned()));
        }
        let brackets = || PatternError::Brackets(given.to_owned());
        let (host, port) = match given.strip_prefix('[') {
            Some(bracketed) => {
                let (inside, after) = bracketed.split_once(']').ok_or_else(brackets)?;
                let is_v6 = || inside.contains(':') && Host::parse(inside).is_ok();
                if !(after.is_empty() || after.starts_with(':')) || !(inside == "*" || is_v6()) {
                    return Err(brackets());
                }
                (inside, after.strip_prefix(':'))
            }
            None => {
                let host = without_port(given);
                (host, given[host.len()..].strip_prefix(':'))
            }
        };
        if host.contains(['[', ']']) {
            return Err(brackets());
        }
        let name = host.trim_end_matches('.').to_lowercase();
        // A wildcard whose domain is only a dot.
        let lost_domain = matches!(name.as_str(), "*" | "**") && host.ends_with('.');
        if name.is_empty() || lost_domain {
            return Err(PatternError::Empty);
        }
        let (with_apex, rest) = match name.strip_prefix("**.") {
            Some(rest) => (true, rest),
            None => (false, name.as_str()),
        };
        if rest.contains("**") {
            return Err(PatternError::RepeatedWildcard(given.to_owned()));
        }
        if rest == "*" && list == List::Deny {
            return Err(PatternError::DenyEverything(given.to_owned()));
        }
        let exact = !with_apex && !rest.contains(['*', '?']);
        // Another spelling of an address has to match it.
        let text = match Host::parse(rest) {
            Ok(host) if exact => host.as_str().to_owned(),
            _ => rest.to_owned(),
        };
        let port = port.map(|port| port.parse().map_err(|_| port.to_owned()));
        Ok(Self { text, exact, with_apex, port })
    }

    /// Whether the pattern matches a host in normal form, whatever its port.
    pub fn matches(&self, host: &str) -> bool {
        if self.exact {
            return self.text == host;
        }
        if !self.with_apex {
            return glob(self.text.as_bytes(), host.as_bytes());
        }
        // The domain itself, or anything in front of a dot and it.
        glob(self.text.as_bytes(), host.as_bytes())
            || host
                .match_indices('.')
                .any(|(dot, _)| dot > 0 && glob(self.text.as_bytes(), &host.as_bytes()[dot + 1..]))
    }
}

impl fmt::Debug for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.with_apex { "**." } else { "" }, self.text)?;
        match &self.port {
            Some(Ok(port)) => write!(f, ":{port}"),
            _ => Ok(()),
        }
    }
}

/// Matches `*` and `?`; takes at most the product of the two lengths.
fn glob(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p + 1, t));
                p += 1;
            }
            Some(byte) if *byte == b'?' || *byte == text[t] => (p, t) = (p + 1, t + 1),
            _ => match star {
                Some((after, from)) => {
                    star = Some((after, from + 1));
                    (p, t) = (after, from + 1);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|byte| *byte == b'*')
}

/// The lists of one proxy.
#[derive(Debug, Clone, Default)]
pub struct Rules {
    allow: Vec<Pattern>,
    deny: Vec<Pattern>,
    review: Vec<Pattern>,
    /// Connect to loopback and private addresses like to any other (default false).
    pub allow_local_binding: bool,
    match_ports: bool,
}

/// What the lists say about a host, before anything is looked up or asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Listing {
    /// A deny pattern matches.
    Denied,
    /// A local target that no entry allows by its own name.
    Local,
    /// A review pattern matches, or no allow pattern does.
    Undecided,
    /// An allow pattern matches.
    Allowed,
}

impl Rules {
    /// Rules in which a port in a pattern counts: `example.com:443` matches that port alone, a pattern
    /// without a port matches every port. In [`Rules::default`] ports in patterns are ignored, as the
    /// wire protocol has it.
    pub fn matching_ports() -> Self {
        Self { match_ports: true, ..Self::default() }
    }

    /// Parses `pattern` and appends it to `list`.
    pub fn add(&mut self, list: List, pattern: &str) -> Result<(), PatternError> {
        let pattern = Pattern::parse(pattern, list)?;
        if let (true, Some(Err(port))) = (self.match_ports, &pattern.port) {
            return Err(PatternError::Port(port.clone()));
        }
        match list {
            List::Allow => self.allow.push(pattern),
            List::Deny => self.deny.push(pattern),
            List::Review => self.review.push(pattern),
        }
        Ok(())
    }

    /// Steps 1 to 4 of the order: deny, local, review, allow.
    pub fn look_up(&self, host: &Host, port: u16) -> Listing {
        let has = |list: &[Pattern], name: &str| {
            list.iter().any(|pattern| self.counts_for(pattern, port) && pattern.matches(name))
        };
        // A rule about an IPv4 address holds for it in IPv6 clothes, too, when it restricts.
        let inside = match host.kind() {
            HostKind::Address(IpAddr::V6(address)) => embedded_v4(address),
            _ => None,
        };
        let inside = inside.map(|address| address.to_string());
        let restricts = |list: &[Pattern]| {
            has(list, host.as_str()) || inside.as_deref().is_some_and(|name| has(list, name))
        };
        if restricts(&self.deny) {
            return Listing::Denied;
        }
        if !self.allow_local_binding && is_local(host) && !self.allows_by_name(host, port) {
            return Listing::Local;
        }
        if restricts(&self.review) || !has(&self.allow, host.as_str()) {
            return Listing::Undecided;
        }
        Listing::Allowed
    }

    /// Whether a deny pattern matches the host at every port.
    pub fn denies(&self, host: &Host) -> bool {
        self.deny.iter().any(|pattern| {
            (!self.match_ports || pattern.port.is_none()) && pattern.matches(host.as_str())
        })
    }

    /// Whether an allow pattern other than `*` matches the host at some port.
    pub fn allows_in_particular(&self, host: &Host) -> bool {
        self.allow.iter().any(|pattern| pattern.text != "*" && pattern.matches(host.as_str()))
    }

    fn allows_by_name(&self, host: &Host, port: u16) -> bool {
        self.allow.iter().any(|pattern| {
            pattern.exact && self.counts_for(pattern, port) && pattern.text == host.as_str()
        })
    }

    fn counts_for(&self, pattern: &Pattern, port: u16) -> bool {
        !self.match_ports || pattern.port.as_ref().is_none_or(|written| *written == Ok(port))
    }
}

/// `localhost`, an address that is not public, or one of a single interface.
pub(crate) fn is_local(host: &Host) -> bool {
    match host.kind() {
        HostKind::Name => false,
        HostKind::Localhost | HostKind::Zoned(_) => true,
        HostKind::Address(address) => !is_public(address),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str, list: List) -> String {
        Pattern::parse(text, list).unwrap_err().to_string()
    }

    #[test]
    fn patterns_that_are_refused() {
        for text in ["http://a.b", "10.0.0.0/8", "a/b", "exa mple", "a{b,c}", "a\\*", "*.com/"] {
            assert_eq!(
                error(text, List::Allow),
                format!("unsupported domain pattern syntax: {text}")
            );
        }
        for text in ["", "\t", "*.", "**.", ".", ":80"] {
            assert_eq!(error(text, List::Review), "domain pattern is empty", "{text:?}");
        }
        for text in ["**", "x**", "a.**.com", "**.x.**.y", "**.**"] {
            assert_eq!(error(text, List::Deny), format!("unsupported repeated wildcard: {text}"));
        }
        for text in ["a[bc", "[a]", "[1.2.3.4]", "[::1", "::1]", "[::1]x"] {
            let expected = format!("brackets are only supported for IPv6 literals or [*]: {text}");
            assert_eq!(error(text, List::Allow), expected);
        }
        for text in ["*", " * ", "*:80", "[*]", "**.*"] {
            let expected = format!(
                "invalid value for network.denied_domains: {} (allowed exact hosts or scoped \
                 wildcards like *.example.com or **.example.com)",
                text.trim()
            );
            assert_eq!(error(text, List::Deny), expected);
            assert!(Pattern::parse(text, List::Allow).unwrap().matches("any.thing"));
        }
    }

    #[test]
    fn patterns_match_what_the_protocol_says() {
        let hosts = [
            "a.com",
            "x.a.com",
            "x.y.a.com",
            "fa.com",
            "foo.a.com",
            "f.g.a.com",
            "a",
            "b.org",
            "axb.com",
            "a.b.com",
            "aa.b",
            "x.a.org",
            "8.8.8.8",
            "xa.com",
            "f.a.com",
            "2001:db8::1",
        ];
        let table: &[(&str, &[&str])] = &[
            ("*.a.com", &["x.a.com", "x.y.a.com", "foo.a.com", "f.g.a.com", "f.a.com"]),
            ("**.a.com", &["a.com", "x.a.com", "x.y.a.com", "foo.a.com", "f.g.a.com", "f.a.com"]),
            ("f*.a.com", &["foo.a.com", "f.g.a.com", "f.a.com"]),
            ("a?b.com", &["axb.com", "a.b.com"]),
            ("*.a.*", &["x.a.com", "x.y.a.com", "foo.a.com", "f.g.a.com", "x.a.org", "f.a.com"]),
            ("a.com:80", &["a.com"]),
            ("a.com:x", &["a.com"]),
            ("A.COM.", &["a.com"]),
            (".a", &[]),
            ("8.8.*", &["8.8.8.8"]),
            ("8.8.2056", &["8.8.8.8"]),
            ("[2001:DB8:0::1]:80", &["2001:db8::1"]),
            ("*::1*", &["2001:db8::1"]),
            (
                "**.*.com",
                &[
                    "a.com",
                    "x.a.com",
                    "x.y.a.com",
                    "fa.com",
                    "foo.a.com",
                    "f.g.a.com",
                    "axb.com",
                    "a.b.com",
                    "xa.com",
                    "f.a.com",
                ],
            ),
        ];
        for (text, expected) in table {
            let pattern = Pattern::parse(text, List::Allow).unwrap();
            let matched: Vec<_> =
                hosts.iter().copied().filter(|host| pattern.matches(host)).collect();
            assert_eq!(&matched, expected, "{text}");
        }
    }

    #[test]
    fn ports_count_only_where_they_were_asked_for() {
        let host = Host::parse("a.com").unwrap();
        for (mut rules, other_port) in
            [(Rules::default(), Listing::Allowed), (Rules::matching_ports(), Listing::Undecided)]
        {
            rules.add(List::Allow, "a.com:443").unwrap();
            assert_eq!(rules.look_up(&host, 443), Listing::Allowed);
            assert_eq!(rules.look_up(&host, 22), other_port);
        }
        assert!(Rules::matching_ports().add(List::Allow, "a.com:x").is_err());
    }
}
