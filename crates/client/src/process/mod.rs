//! Processes: starting them, their events, their streams, their end.

mod command;
mod delivery;
mod event;
mod follow;
mod handle;
mod output;
mod spool;
mod stdin;
mod track;
mod tracked;

pub use command::ExecCommand;
pub use event::{ExitStatus, Output, ProcessEvent};
pub use handle::{Process, ProcessEvents};
pub use output::ProcessOutput;
pub use stdin::ProcessStdin;
pub use tracked::WhenSlow;

pub(crate) use track::Track;
pub(crate) use tracked::Tracked;
