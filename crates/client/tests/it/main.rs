//! The client against scripted servers, against this project's server, and against another one.

mod files;
mod interop;
mod kill;
mod lifecycle;
mod ours;
mod process;
mod reconnect;
mod support;
