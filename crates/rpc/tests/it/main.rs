//! Connections over every transport, with real framing and a clock that the tests hold.

mod dial;
mod lines;
mod memory;
mod websocket;
