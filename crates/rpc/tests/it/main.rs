//! Connections over every transport, with real framing and a paused clock.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod budget;
mod dial;
mod http;
mod lines;
mod memory;
mod metered;
mod proxy;
mod socket;
mod websocket;
