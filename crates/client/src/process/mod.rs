//! Processes: starting them, their events, their streams, their exit.

mod command;
mod delivery;
mod event;
mod follow;
mod handle;
mod output;
mod sequencer;
mod shared_sequencer;
mod spool;
mod stdin;

pub use command::ExecCommand;
pub use event::{ExitStatus, Output, ProcessEvent};
pub use handle::{Process, ProcessEvents};
pub use output::ProcessOutput;
pub use shared_sequencer::OnSlowConsumer;
pub use stdin::ProcessStdin;

pub(crate) use sequencer::EventSequencer;
pub(crate) use shared_sequencer::SharedSequencer;
