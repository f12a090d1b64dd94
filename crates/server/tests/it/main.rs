//! The server as any client sees it: messages in, messages out, real processes.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod backpressure;
mod discovery;
mod entry;
mod environment;
mod environment_config;
mod errors;
mod exits;
mod fetches;
mod http;

mod lifecycle;
mod malformed;
mod network;
mod network_attacks;
mod ordering;
mod processes;
mod reads;
mod sandbox;
mod sessions;
mod sharing;
mod shell_snapshots;
mod spans;
mod stdin;
mod support;
mod terminals;
mod threads;
