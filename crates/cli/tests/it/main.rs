//! The real binary: over pipes and terminals, with its embedded server and over websockets.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod commands;
mod errors;
mod files;
mod help;
mod patch;
mod run;
mod sessions;
mod shell;
mod terminal;
