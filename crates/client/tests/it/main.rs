//! The client against scripted servers and against this project's server.

#![allow(clippy::unwrap_used, reason = "helpers of tests, too, are tests")]

mod copies;
mod embedded;
mod examples;
mod files;
mod killed_connections;
mod lifecycle;
mod limits;
mod lost_start;
mod patch_model;
mod patch_names;
mod patches;
mod process;
mod reconnect;
#[expect(dead_code, reason = "no test here needs root")]
#[path = "../../../../tests/skipped.rs"]
mod skipped;
mod slow_consumers;
mod support;
mod transfers;
mod unified_diffs;
