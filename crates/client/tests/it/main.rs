//! The client against scripted servers, against this project's server, and against another one.

mod interop;
mod lifecycle;
mod process;
mod reconnect;
mod support;
