//! The program as it is installed: what it prints, how it ends, what it leaves behind; over pipes and
//! terminals, with its embedded server and over websockets.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod assurance;
mod auth;
mod commands;
mod confined;
mod cuts;
mod denials;
mod direct;
mod endings;
mod errors;
mod files;
mod litter;
mod logging;
mod memory;
mod old_server;
mod own_files;
mod patch;
mod patience;
mod promises;
mod proxy;
mod remote;
mod rendezvous;
mod renewal;
mod run;
mod sandbox;
mod sessions;
mod shell;
#[path = "../../../../tests/skipped.rs"]
mod skipped;
mod stdio;
mod support;
mod terminal;
mod usage;
mod way_back;
