//! Runs operations in another process, under a sandbox.
//!
//! The helper reads [`frame::Request`]s from its stdin and writes [`frame::Reply`]s to its stdout,
//! concurrently, matched by id. It ends when its input does, and closes its handles.

mod client;
mod frame;
mod server;

pub use client::HelperClient;
pub use server::serve_helper;
