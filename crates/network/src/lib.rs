//! The managed network: an HTTP and a SOCKS5 proxy for one process, and the rules they enforce.
//!
//! [`decide`], [`rules`], [`host`] and [`address`] are pure: a request and the rules in, a verdict out.
//! This crate knows no JSON-RPC, no process and no sandbox.

pub mod address;
pub mod decide;
pub mod host;
pub mod rules;
