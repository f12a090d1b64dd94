//! The service over memory: every connection is a pipe, time is paused, the clock is set by hand.

#![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

mod load;
mod passes;
mod registry;
mod routing;
mod secrets;
mod serve;
mod session;
mod util;
