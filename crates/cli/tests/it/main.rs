//! The program as it is installed: what it prints, how it ends, what it leaves behind.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod auth;
mod endings;
mod logging;
mod memory;
mod rendezvous;
mod stdio;
mod support;
mod usage;
