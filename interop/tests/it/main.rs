//! Two implementations, programs against programs. `interop/run` installs the other one and runs this.
//!
//! Every test is ignored otherwise: a fresh checkout has nothing to run it against.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod app_server;
mod capabilities;
mod cloud;
mod compatibility;
mod environment;
mod escalation;
#[path = "../../../crates/client/tests/it/files.rs"]
mod files;
mod library;
mod model;
mod network;
mod programs;
mod real_client;
mod real_server;
mod remote;
mod requests;
mod support;
mod tap;
#[allow(dead_code, reason = "the command line's own tests use all of it")]
#[path = "../../../crates/cli/tests/it/terminal.rs"]
mod terminal;
mod walks;
