//! The managed network: an HTTP and a SOCKS5 proxy for one process, and the rules they enforce.
//!
//! ```text
//!  client ─▶ http.rs, socks.rs, udp.rs ─▶ judge.rs ─▶ decide.rs (pure) ◀─ rules.rs, host.rs, address.rs
//!                     │                      ├─▶ Decider    the controller, asked about undecided hosts
//!                     │                      ├─▶ Connector  lookups
//!                     │                      └─▶ Observer   the audit
//!                     └─▶ dial.rs ─▶ the addresses that were judged, or an upstream proxy
//! ```
//!
//! [`decide`], [`rules`], [`host`] and [`address`] are pure: a request and the rules in, a verdict out.
//! This crate knows no JSON-RPC, no process and no sandbox.

pub mod address;
mod audit;
mod config;
mod connector;
pub mod decide;
mod decider;
mod dial;
mod env;
mod exchange;
#[doc(hidden)]
pub mod fuzzing;
pub mod host;
mod http;
mod idle;
mod judge;
mod masking;
mod mitm;
mod policy;
mod proxy;
pub mod rules;
mod sniff;
mod socks;
mod splice;
mod target;
mod transparent;
mod tunnel;
mod udp;
mod upstream;

pub use audit::{Observer, Record};
pub use config::{Config, Limits};
pub use connector::{Connector, SystemConnector};
pub use decider::{Decider, NoReply, Question, Reply};
pub use env::{
    NAMESPACE_HTTP_PORT, NAMESPACE_SOCKS_PORT, ca_variables, loopback_proxy_ports, proxy_variables,
};
pub use masking::{Auth, Bindings, CredentialProvider, Masker, Masking, ProviderError};
pub use mitm::{AuthorityError, CaFiles, CertificateAuthority, Mitm, Roots};
pub use proxy::{Proxy, ProxyHandle};
pub use transparent::{Namespace, SYNTHETIC_V4, SYNTHETIC_V6};
pub use upstream::{UpstreamProxies, UpstreamProxy};
