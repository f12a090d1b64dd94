//! What a proxy is made with.

use std::sync::Arc;
use std::time::Duration;

use crate::connector::{Connector, SystemConnector};
use crate::decide::Mode;
use crate::mitm::Mitm;
use crate::rules::Rules;
use crate::upstream::UpstreamProxies;

/// Configuration of one proxy. Take [`Config::new`] and set fields.
#[derive(Clone)]
#[non_exhaustive]
pub struct Config {
    /// Which hosts are allowed, denied and reviewed.
    pub rules: Rules,
    /// Which requests pass once the host is allowed (default [`Mode::Full`]).
    pub mode: Mode,
    /// Listen on ports of this machine (default true). Otherwise connections come only by a
    /// [`ProxyHandle`](crate::ProxyHandle).
    pub listen: bool,
    /// Listen for SOCKS5, too (default true).
    pub socks5: bool,
    /// Offer SOCKS5 UDP ASSOCIATE (default true). Otherwise it is answered with reply 7.
    pub socks5_udp: bool,
    /// How long the controller has to answer, without [`Limits::answer_grace`] (default `None`: hosts
    /// that the rules leave undecided are refused without asking).
    pub ask_timeout: Option<Duration>,
    /// Proxies that carry requests to public hosts (default `None`: every connection is direct).
    pub upstream: Option<UpstreamProxies>,
    /// Opens tunnels to hosts that secrets are bound to, and in limited mode all of them (default
    /// `None`: tunnels are passed on as they are, and limited mode refuses them).
    pub mitm: Option<Mitm>,
    /// Hold the first bytes in tunnels of CONNECT and SOCKS5 to what those of a served namespace are held to: TLS
    /// or HTTP/1 for another host than the tunnel's is cut (default false: tunnels are passed on as they are).
    pub check_tunnels: bool,
    /// The domains that `search` lists in the `resolv.conf` of a namespace that is served (default: none).
    /// A name that ends in one exists there only if an allow pattern other than `*` matches it: the
    /// resolver tries such names first if a name has fewer dots than `ndots`, and takes the first that
    /// exists.
    pub search_domains: Vec<String>,
    /// How names are looked up and connections made (default: by the system).
    pub connector: Arc<dyn Connector>,
    /// Limits on memory and time.
    pub limits: Limits,
}

impl Config {
    /// The defaults, with these rules.
    pub fn new(rules: Rules) -> Self {
        Self {
            rules,
            mode: Mode::Full,
            listen: true,
            socks5: true,
            socks5_udp: true,
            ask_timeout: None,
            upstream: None,
            mitm: None,
            check_tunnels: false,
            search_domains: Vec::new(),
            connector: Arc::new(SystemConnector),
            limits: Limits::default(),
        }
    }
}

impl std::fmt::Debug for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Config")
            .field("rules", &self.rules)
            .field("mode", &self.mode)
            .field("socks5", &self.socks5)
            .field("socks5_udp", &self.socks5_udp)
            .field("ask_timeout", &self.ask_timeout)
            .field("upstream", &self.upstream)
            .field("mitm", &self.mitm)
            .field("check_tunnels", &self.check_tunnels)
            .field("search_domains", &self.search_domains)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

/// Limits on memory and time of one proxy.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Limits {
    /// Maximum connections from clients at a time, both proxies together (default 512). Further ones
    /// wait in the listeners' backlogs.
    pub connections: usize,
    /// Time for a request's head or a SOCKS5 handshake to arrive, and for the next request of a
    /// connection that is kept alive (default 60 s); then the connection is closed.
    pub head_timeout: Duration,
    /// Time without a byte in either direction after which a connection is closed (default 1 h).
    pub idle_timeout: Duration,
    /// Time for a lookup that a verdict depends on (default 2 s); then the host counts as local.
    pub lookup_timeout: Duration,
    /// Time to connect to a target or an upstream proxy, all addresses together (default 30 s).
    pub connect_timeout: Duration,
    /// Time that the controller has beyond [`Config::ask_timeout`] (default 5 s).
    pub answer_grace: Duration,
    /// Buffer of one direction of an HTTP connection, in bytes (default 64 KiB, at least 8 KiB). A
    /// request whose head is longer is refused.
    pub http_buffer: usize,
    /// Datagrams of one association that are judged at a time (default 64); more are dropped.
    pub udp_judged: usize,
    /// Targets of one association whose answers are passed on (default 256); the oldest is forgotten.
    pub udp_targets: usize,
    /// Buffer of one direction of a transparent connection, in bytes (default 256 KiB, at least 8 KiB).
    pub transparent_buffer: usize,
    /// Names whose synthetic addresses are known at a time (default 4,096); the one used longest ago
    /// without a connection is forgotten.
    pub transparent_names: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 512,
            head_timeout: Duration::from_secs(60),
            idle_timeout: Duration::from_secs(60 * 60),
            lookup_timeout: Duration::from_secs(2),
            connect_timeout: Duration::from_secs(30),
            answer_grace: Duration::from_secs(5),
            http_buffer: 64 * 1024,
            udp_judged: 64,
            udp_targets: 256,
            transparent_buffer: 256 * 1024,
            transparent_names: 4096,
        }
    }
}
