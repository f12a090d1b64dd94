//! Generated frame types, as the schema next to them gives them.
//!
//! Private on purpose: their `Debug` prints payloads. [`crate::frame`] is the only user.

#![allow(
    missing_debug_implementations,
    missing_docs,
    unreachable_pub,
    clippy::all,
    clippy::pedantic,
    reason = "generated"
)]

include!("proto/codex.exec_server.relay.v1.rs");
