//! Golden messages: what is written and what is read, to the letter.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod discovery;
mod docs;
mod envelope;
mod environment;
mod files;
mod golden;
mod http;
mod network;
mod processes;
mod schema;
mod sessions;
