//! Exit codes, and how a failure is told.

use std::process::ExitCode;

/// Something failed; the message says what.
pub const FAILURE: u8 = 1;
/// The command line was wrong.
pub const USAGE: Usage = Usage;

/// Exit code 2.
#[derive(Debug, Clone, Copy)]
pub struct Usage;

impl From<Usage> for ExitCode {
    fn from(Usage: Usage) -> Self {
        Self::from(2)
    }
}

/// Tells a failure on stderr.
pub fn report(error: &anyhow::Error) -> ExitCode {
    eprintln!("codex: {error:#}");
    ExitCode::from(FAILURE)
}
