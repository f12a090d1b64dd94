//! Connections over every transport, with real framing and a clock that the tests hold.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod budget;
mod dial;
mod http;
mod lines;
mod memory;
mod proxy;
mod shares;
mod socket;
mod websocket;
