//! The managed network, from the outside: real sockets on loopback, and a connector that is the rest of
//! the Internet.

#![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

mod asking;
mod attacks;
mod decisions;
mod http;
mod lifetime;
mod model;
mod namespace;
mod opened;
mod packets;
mod random;
#[allow(dead_code, reason = "no test here needs root")]
#[path = "../../../../tests/skipped.rs"]
mod skipped;
mod socks;
mod transparent;
mod tunnels;
mod updates;
mod upstream;
mod world;
