//! The targets, a file per noun. Their order is that of a message's way: envelope, contents, relay, network, disk.

#[path = "../../../crates/cli/src/asciicast.rs"]
#[allow(dead_code, clippy::all, reason = "a file of the program, which a library cannot name")]
mod asciicast;
mod frames;
mod messages;
mod network;
mod patches;
mod paths;
mod policies;
mod records;
#[path = "../../../crates/cli/src/session_file.rs"]
#[allow(dead_code, clippy::all, reason = "a file of the program, which a library cannot name")]
mod session_file;
mod stored;

use crate::Target;

/// Every target.
pub const TARGETS: &[Target] = &[
    Target { name: "message", check: messages::check },
    Target { name: "path-uri", check: paths::check },
    Target { name: "policy", check: policies::check },
    Target { name: "patch", check: patches::check },
    Target { name: "relay-frame", check: frames::check },
    Target { name: "noise-record", check: records::check },
    Target { name: "http-request", check: network::http_request },
    Target { name: "socks-address", check: network::socks_address },
    Target { name: "first-bytes", check: network::first_bytes },
    Target { name: "dns-query", check: network::dns_query },
    Target { name: "journal", check: stored::journal },
    Target { name: "state", check: stored::state },
    Target { name: "tokens", check: stored::tokens },
    Target { name: "saved-session", check: stored::saved_session },
    Target { name: "recording", check: stored::recording },
];

/// The kind of an outcome: the variant of its type, without what the variant holds.
fn kind_of(value: impl std::fmt::Debug) -> u64 {
    let text = format!("{value:?}");
    let name = text.split(['(', '{', ' ']).next().unwrap_or_default();
    name.bytes().fold(7, |hash, byte| hash * 31 % 1_000_003 + u64::from(byte))
}
