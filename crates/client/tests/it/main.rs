//! The client against scripted servers, against this project's server, and against another one.

#![allow(clippy::unwrap_used, reason = "helpers of tests, too, are tests")]

mod files;
mod interop;
mod kill;
mod lifecycle;
mod ours;
mod process;
mod reconnect;
mod support;
