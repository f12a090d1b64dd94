//! The installed program: its output, exit codes and remains; over pipes and terminals, with its embedded
//! server and over websockets.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod assurance;
mod auth;
mod cgroup;
mod commands;
mod confined;
mod control;
mod cut_connections;
mod denials;
mod destinations;
mod direct;
mod errors;
mod files;
mod guides;
mod hostile_server;
mod limits;
mod listening;
mod logging;
mod lying_server;
mod managed;
mod mcp;
mod memory;
mod observation;
mod old_server;
mod operator_policy;
mod own_files;
mod patch;
mod pid_namespace;
mod placeholders;
mod places;
mod promises;
mod proxy;
mod reconnecting;
mod remote;
mod rendezvous;
mod renewal;
mod rm;
mod root_write;
mod run;
mod sandbox;
mod server_access;
mod sessions;
mod shell;
mod shell_snapshots;
mod shutdown;
#[path = "../../../../tests/skipped.rs"]
mod skipped;
mod stdio;
mod support;
mod terminal;
mod tls;
mod usage;
