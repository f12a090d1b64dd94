//! An MCP server whose tools work on an exec-server: run commands, read, write and search files.
//!
//! A [`Workspace`] is a client of the exec-server, a directory, and the policy that every tool call is held
//! to. A [`Session`] is one MCP client's: it answers JSON-RPC messages and keeps the commands that the client
//! started. [`serve_stdio`] and [`HttpServer`] carry the messages.
//!
//! Invariant: the arguments of a tool choose what to do, never under which policy. The policy is part of the
//! workspace, which is made before the first message is read and never changes.
//!
//! This crate knows neither the host nor the sandbox: it uses the client.

mod config;
mod content;
mod http;
mod http_guard;
mod message;
mod output_log;
mod processes;
mod resources;
mod session;
mod stdio;
mod tools;
mod workspace;

pub use config::McpConfig;
pub use http::{HttpError, HttpServer};
pub use http_guard::HttpGuard;
pub use session::Session;
pub use stdio::serve_stdio;
pub use workspace::{Policy, Workspace};
