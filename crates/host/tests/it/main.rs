//! Tests on real files and processes, on a real kernel.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod files;
mod lifeline;
mod managed;
#[path = "../../../../tests/skipped.rs"]
mod skipped;
mod spool;
mod support;
