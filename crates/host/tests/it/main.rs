//! Tests on real files and processes, on a real kernel.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod files;
mod lifeline;
#[path = "../../../../tests/skipped.rs"]
mod skipped;
mod spool;
mod support;
