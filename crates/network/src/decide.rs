//! The verdict on one request: the rules, the controller's answer, the lookup and the mode, in that
//! order. No I/O: [`Decision`] says what it needs to know next, and its owner finds out.
//!
//! ```text
//!            ┌── refused: denied, local, method (SOCKS5)
//!  start ────┼── Ask ──▶ on_answer ──┬── refused
//!            │                       ▼
//!            └───────────────▶ LookUp ──▶ on_lookup ──┬── refused: local
//!                                                     ▼
//!                                             mode ── refused, or passed
//! ```

use std::net::IpAddr;

use crate::address::is_public;
use crate::host::{Host, HostKind};
use crate::rules::{Listing, Rules};

/// How a request reached the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// A request in plain HTTP.
    Http,
    /// CONNECT, and what is inside a tunnel that the proxy opened.
    HttpsConnect,
    /// SOCKS5 CONNECT.
    Socks5Tcp,
    /// A datagram through SOCKS5 UDP ASSOCIATE.
    Socks5Udp,
}

impl Protocol {
    /// The word on the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::HttpsConnect => "https_connect",
            Self::Socks5Tcp => "socks5_tcp",
            Self::Socks5Udp => "socks5_udp",
        }
    }
}

/// Which requests pass once the host is allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// GET, HEAD and OPTIONS only, so nothing that the proxy cannot read into.
    Limited,
    /// Everything.
    Full,
}

/// Who decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The rules.
    BaselinePolicy,
    /// The controller.
    Decider,
    /// [`Mode::Limited`].
    ModeGuard,
    /// What the proxy can do.
    ProxyState,
}

impl Source {
    /// The word on the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::BaselinePolicy => "baseline_policy",
            Self::Decider => "decider",
            Self::ModeGuard => "mode_guard",
            Self::ProxyState => "proxy_state",
        }
    }
}

/// What was decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The request passes.
    Allow,
    /// The request is refused.
    Deny,
    /// The request is refused because a person has to be asked first.
    Ask,
}

impl Outcome {
    /// The word on the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Deny => "deny",
            Self::Ask => "ask",
        }
    }
}

/// Why a request was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reason {
    /// The host is on no list, or the controller's answer was of no use.
    NotAllowed,
    /// The host is, or leads to, an address that is not public.
    NotAllowedLocal,
    /// A deny pattern matches.
    Denied,
    /// [`Mode::Limited`] does not pass the method.
    MethodNotAllowed,
    /// [`Mode::Limited`] does not pass what the proxy cannot read.
    MitmRequired,
    /// A Unix socket was asked for.
    UnixSocketUnsupported,
    /// A connection to one host names another in its first bytes.
    HostMismatch,
    /// The controller's own words.
    Other(String),
}

impl Reason {
    /// The controller's words as a reason: those of the table mean what they mean there.
    pub fn from_words(words: &str) -> Self {
        match words {
            "not_allowed" => Self::NotAllowed,
            "not_allowed_local" => Self::NotAllowedLocal,
            "denied" => Self::Denied,
            "method_not_allowed" => Self::MethodNotAllowed,
            "mitm_required" => Self::MitmRequired,
            "" => Self::Other("policy_denied".into()),
            words => Self::Other(words.into()),
        }
    }

    /// The word on the wire.
    pub fn as_str(&self) -> &str {
        match self {
            Self::NotAllowed => "not_allowed",
            Self::NotAllowedLocal => "not_allowed_local",
            Self::Denied => "denied",
            Self::MethodNotAllowed => "method_not_allowed",
            Self::MitmRequired => "mitm_required",
            Self::UnixSocketUnsupported => "unix_socket_unsupported",
            Self::HostMismatch => "host_mismatch",
            Self::Other(words) => words,
        }
    }

    /// The value of the header `x-proxy-error`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::NotAllowed | Self::NotAllowedLocal => "blocked-by-allowlist",
            Self::Denied => "blocked-by-denylist",
            Self::MethodNotAllowed => "blocked-by-method-policy",
            Self::MitmRequired => "blocked-by-mitm-required",
            Self::UnixSocketUnsupported | Self::HostMismatch | Self::Other(_) => {
                "blocked-by-policy"
            }
        }
    }

    /// The message for the program that made the request.
    pub fn message(&self) -> &'static str {
        match self {
            Self::NotAllowed => "Domain not in allowlist.",
            Self::NotAllowedLocal => "Sandbox policy blocks local/private network addresses.",
            Self::Denied => "Domain denied by the sandbox policy.",
            Self::MethodNotAllowed => "Method not allowed in limited mode.",
            Self::MitmRequired => "MITM required for limited HTTPS.",
            Self::UnixSocketUnsupported | Self::HostMismatch | Self::Other(_) => {
                "Request blocked by network policy."
            }
        }
    }
}

/// A refusal, as the program sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Why.
    pub reason: Reason,
    /// [`Outcome::Deny`] or [`Outcome::Ask`].
    pub outcome: Outcome,
    /// Who.
    pub source: Source,
}

impl Refusal {
    fn new(reason: Reason, source: Source) -> Self {
        Self { reason, outcome: Outcome::Deny, source }
    }

    /// A refusal by [`Mode::Limited`], of a request inside a tunnel.
    pub(crate) fn by_mode(reason: Reason) -> Self {
        Self::new(reason, Source::ModeGuard)
    }
}

/// What an audit record is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// The host.
    Domain,
    /// Something else about the request.
    NonDomain,
}

impl Scope {
    /// The word on the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Domain => "domain",
            Self::NonDomain => "non_domain",
        }
    }
}

/// One finding on the way to a verdict, for the audit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// About the host or not.
    pub scope: Scope,
    /// What was decided.
    pub outcome: Outcome,
    /// Who decided.
    pub source: Source,
    /// `None`: the word is `allow`.
    pub reason: Option<Reason>,
    /// The controller allowed what the rules did not.
    pub policy_override: bool,
}

impl Finding {
    fn refused(scope: Scope, refusal: &Refusal) -> Self {
        Self {
            scope,
            outcome: refusal.outcome,
            source: refusal.source,
            reason: Some(refusal.reason.clone()),
            policy_override: false,
        }
    }

    /// The audit record of a refusal by the mode.
    pub(crate) fn by_mode(refusal: &Refusal) -> Self {
        Self::refused(Scope::NonDomain, refusal)
    }

    /// A connection whose first bytes name another host than it was judged for.
    pub(crate) fn host_mismatch() -> Self {
        let refusal = Refusal::new(Reason::HostMismatch, Source::ProxyState);
        Self::refused(Scope::NonDomain, &refusal)
    }

    /// A connection to a synthetic address that has no name.
    pub(crate) fn nameless() -> Self {
        let refusal = Refusal::new(Reason::NotAllowedLocal, Source::ProxyState);
        Self::refused(Scope::Domain, &refusal)
    }

    /// A request for a Unix socket, which no system but macOS would serve.
    pub fn unix_socket() -> Self {
        let refusal = Refusal::new(Reason::UnixSocketUnsupported, Source::ProxyState);
        Self::refused(Scope::NonDomain, &refusal)
    }
}

/// A request as far as a verdict depends on it.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'a> {
    /// How it came.
    pub protocol: Protocol,
    /// Where it is to go.
    pub host: &'a Host,
    /// Where it is to go.
    pub port: u16,
    /// The HTTP method; `None` for SOCKS5.
    pub method: Option<&'a str>,
    /// The proxy reads inside this tunnel, so [`Mode::Limited`] judges each request there.
    pub opened: bool,
}

/// The controller's answer, validated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// Let this request through.
    Allow,
    /// Refuse it.
    Deny(Reason),
    /// Refuse it; a person has to be asked.
    Ask(Reason),
}

/// What a [`Decision`] needs next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// The controller's answer: [`Decision::on_answer`].
    Ask,
    /// The host's addresses: [`Decision::on_lookup`].
    LookUp,
    /// Nothing: the request passes, to exactly these addresses if a lookup was made.
    Passed(Destination),
    /// Nothing: the request is refused.
    Refused(Refusal),
}

/// Where a request that passed may connect to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Destination {
    /// These addresses and no others: those that were judged.
    Pinned(Vec<IpAddr>),
    /// Wherever the name leads when the connection is made.
    Anywhere,
}

/// A verdict in the making.
#[derive(Debug)]
pub struct Decision<'a> {
    rules: &'a Rules,
    mode: Mode,
    can_ask: bool,
    subject: Subject<'a>,
    overridden: bool,
    findings: Vec<Finding>,
}

impl<'a> Decision<'a> {
    /// Begins with the rules. `can_ask`: there is a controller to ask about undecided hosts.
    pub fn start(
        rules: &'a Rules,
        mode: Mode,
        can_ask: bool,
        subject: Subject<'a>,
    ) -> (Self, Step) {
        let mut decision =
            Self { rules, mode, can_ask, subject, overridden: false, findings: Vec::new() };
        let step = decision.first_step();
        (decision, step)
    }

    fn first_step(&mut self) -> Step {
        // What a SOCKS5 client will say on a port other than that of HTTPS cannot be judged at all.
        let blind = match self.subject.protocol {
            Protocol::Socks5Tcp => self.subject.port != 443 && !self.subject.opened,
            Protocol::Socks5Udp => true,
            Protocol::Http | Protocol::HttpsConnect => false,
        };
        if self.mode == Mode::Limited && blind {
            return self.refuse(Scope::NonDomain, Reason::MethodNotAllowed, Source::ModeGuard);
        }
        match self.rules.look_up(self.subject.host, self.subject.port) {
            Listing::Denied => self.refuse(Scope::Domain, Reason::Denied, Source::BaselinePolicy),
            Listing::Local => {
                self.refuse(Scope::Domain, Reason::NotAllowedLocal, Source::BaselinePolicy)
            }
            Listing::Undecided if self.can_ask => Step::Ask,
            Listing::Undecided => {
                self.refuse(Scope::Domain, Reason::NotAllowed, Source::BaselinePolicy)
            }
            Listing::Allowed => self.look_up(),
        }
    }

    /// Goes on with the controller's answer, after [`Step::Ask`].
    pub fn on_answer(&mut self, answer: Answer) -> Step {
        let (outcome, reason) = match answer {
            Answer::Allow => {
                self.overridden = true;
                return self.look_up();
            }
            Answer::Deny(reason) => (Outcome::Deny, reason),
            Answer::Ask(reason) => (Outcome::Ask, reason),
        };
        let refusal = Refusal { reason, outcome, source: Source::Decider };
        self.findings.push(Finding::refused(Scope::Domain, &refusal));
        Step::Refused(refusal)
    }

    fn look_up(&mut self) -> Step {
        match self.subject.host.kind() {
            // Listed under its own name: its addresses are part of what was allowed.
            HostKind::Localhost => self.pass(Destination::Pinned(vec![
                std::net::Ipv4Addr::LOCALHOST.into(),
                std::net::Ipv6Addr::LOCALHOST.into(),
            ])),
            HostKind::Address(address) => self.pass(Destination::Pinned(vec![address])),
            HostKind::Zoned(address) => self.pass(Destination::Pinned(vec![address.into()])),
            HostKind::Name if self.rules.allow_local_binding => self.pass(Destination::Anywhere),
            HostKind::Name => Step::LookUp,
        }
    }

    /// Goes on with the addresses of the host, after [`Step::LookUp`]. `None`: the lookup failed or
    /// took too long, which counts as local.
    pub fn on_lookup(&mut self, addresses: Option<Vec<IpAddr>>) -> Step {
        match addresses {
            Some(found) if !found.is_empty() && found.iter().all(|address| is_public(*address)) => {
                self.pass(Destination::Pinned(found))
            }
            _ => self.refuse(Scope::Domain, Reason::NotAllowedLocal, Source::BaselinePolicy),
        }
    }

    /// What the audit is to record, in order. Complete once a step is final.
    pub fn into_findings(self) -> Vec<Finding> {
        self.findings
    }

    fn pass(&mut self, destination: Destination) -> Step {
        self.findings.push(Finding {
            scope: Scope::Domain,
            outcome: Outcome::Allow,
            source: if self.overridden { Source::Decider } else { Source::BaselinePolicy },
            reason: self.overridden.then_some(Reason::NotAllowed),
            policy_override: self.overridden,
        });
        match self.refused_by_mode() {
            Some(reason) => self.refuse(Scope::NonDomain, reason, Source::ModeGuard),
            None => Step::Passed(destination),
        }
    }

    fn refused_by_mode(&self) -> Option<Reason> {
        if self.mode == Mode::Full {
            return None;
        }
        match self.subject.protocol {
            Protocol::Http => method_refused(self.subject.method),
            Protocol::HttpsConnect if self.subject.opened => None,
            Protocol::Socks5Tcp if self.subject.opened => None,
            Protocol::HttpsConnect | Protocol::Socks5Tcp => Some(Reason::MitmRequired),
            Protocol::Socks5Udp => Some(Reason::MethodNotAllowed),
        }
    }

    fn refuse(&mut self, scope: Scope, reason: Reason, source: Source) -> Step {
        let refusal = Refusal::new(reason, source);
        self.findings.push(Finding::refused(scope, &refusal));
        Step::Refused(refusal)
    }
}

/// The methods that [`Mode::Limited`] passes.
pub(crate) fn method_refused(method: Option<&str>) -> Option<Reason> {
    let reads = matches!(method, Some("GET" | "HEAD" | "OPTIONS"));
    (!reads).then_some(Reason::MethodNotAllowed)
}
