//! What is best seen below the protocol: who dies with whom, and where output is kept.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod lifeline;
mod spool;
mod support;
