//! Operations carried to another process, which runs them under a sandbox.
//!
//! The helper reads [`frame::Request`]s from its standard input and writes [`frame::Reply`]s to its
//! standard output, many at a time, matched by number. It ends when its input does, and takes its
//! open handles with it.

mod client;
mod frame;
mod server;

pub use client::HelperClient;
pub use server::serve_helper;
