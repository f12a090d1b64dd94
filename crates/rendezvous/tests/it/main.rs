//! The service over memory: every connection is a pipe, time is paused, the clock is set by hand.
//! Clusters have a real nats-server and real time.

#![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

mod cluster;
mod drive;
mod load;
mod nats_server;
mod passes;
mod registry;
mod routing;
mod secrets;
mod serve;
mod session;
mod util;
