//! Processes: started, fed, listened to, signalled, and never left behind.
//!
//! [`ProcessHost::start`] makes a process and its one owner (a task, see `actor`); a
//! [`ProcessHandle`] talks to that owner. What the process publishes goes to an [`EventSink`].
//!
//! Memory of one process is bounded by [`ProcessConfig`]: `retain_bytes` of output in at most
//! `retain_chunks` chunks (or that much of a file), `stdin_queue_bytes` of input, and
//! `unsent_bytes` on the way to the client.

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
mod handle;
mod helper;
mod host;
mod keeper;
mod launch;
mod left;
mod output;
mod pty;
mod readiness;
mod retention;
mod spares;
mod spawner;
mod spool;
mod stdin;
pub(crate) mod warden;

pub use command::{Command, NulByte};
pub use config::{Lifeline, ProcessConfig};
pub use env::{Environment, NEVER_INHERITED, NEVER_PASSED_ON};
pub use event::{EventKind, EventSink, ProcessEvent, SinkClosed};
pub(crate) use file_size::outlive_file_size_limit;
pub use handle::{NoTerminal, ProcessHandle, Reply};
pub(crate) use helper::Mounts;
pub use host::{ProcessHost, StartError, Started};
pub use launch::{Launch, LaunchError, environment};
pub use left::Group;
pub use spawner::SpawnError;
