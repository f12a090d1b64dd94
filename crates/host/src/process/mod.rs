//! Processes: start, write to, read from, signal, and kill with all their descendants.
//!
//! [`ProcessHost::start`] starts a process and its owner, a task (see `actor`); a [`ProcessHandle`]
//! sends commands to that owner. The owner publishes events to an [`EventSink`].
//!
//! [`ProcessConfig`] bounds the memory of one process: `retain_bytes` of output in at most
//! `retain_chunks` chunks (or that much in a file), `stdin_queue_bytes` of input, and `unsent_bytes` on
//! the way to the client.

mod actor;
mod cgroup;
mod child;
mod command;
mod config;
mod confinement;
mod descendants;
mod env;
mod event;
mod file_size;
mod guests;
mod handle;
mod helper;
mod host;
mod keeper;
mod launch;
mod leftovers;
mod limits;
mod output;
mod outputs;
mod pty;
mod readiness;
mod retention;
mod screen;
mod spares;
mod spawner;
mod spool;
mod stdin;
mod tree_usage;
pub(crate) mod warden;

pub use command::{Command, NulByte};
pub use config::{Lifeline, ProcessConfig};
pub(crate) use env::retain_allowed;
pub use env::{EnvPolicyError, Environment, NEVER_INHERITED, NEVER_PASSED_ON};
pub use event::{EventKind, EventSink, ProcessEvent, SinkClosed};
pub(crate) use file_size::handle_file_size_signal;
pub use guests::ClientId;
pub use handle::{NoTerminal, ProcessHandle, Reader, Reply};
pub(crate) use helper::SandboxMounts;
pub use host::{ProcessHost, StartError, Started};
pub use launch::{
    ExitSummary, Launch, LaunchError, OnExit, TerminalTap, UntilGone, WhileRunning, environment,
    environment_is_costly,
};
pub use leftovers::Group;
pub use limits::LimitError;
pub use readiness::register_descriptor;
pub use spawner::SpawnError;
