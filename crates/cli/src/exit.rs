//! Exit codes, and how a failure is told.
//!
//! Invariant: a reader that has gone away (`codex … | head`) is no failure worth a word.

use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

use codex_exec_server::ExecServerError;

use crate::style::printable;

/// Something failed; the message says what.
pub const FAILURE: u8 = 1;
/// `--timeout` was over, as with `timeout(1)`.
pub const TIMED_OUT: u8 = 124;
/// A command was to be run, and this program failed, not the command.
pub const NOT_RUN: u8 = 125;
/// The command is there but cannot be executed.
pub const NOT_EXECUTABLE: u8 = 126;
/// There is no such command.
pub const NOT_FOUND: u8 = 127;
/// Whoever read our output has gone: 128 + SIGPIPE.
pub const BROKEN_PIPE: u8 = 141;
/// The command line was wrong.
pub const USAGE: Usage = Usage;

/// The table of `codex help`.
pub const HELP: &str = "\
Exit codes:
  0        done
  1        failed; the message says what to do. search: nothing matches
  2        the command line is wrong. search: failed
  124      run: --timeout was over
  125      run, shell, attach, sandbox: this program failed, not the command; run, attach: some of
           its output was lost
  126 127  run, sandbox: the command cannot be executed, is not found
  128+N    run, shell, attach, sandbox: the command died of signal N, e.g. 130 after Ctrl-C
  141      whoever read the output has gone (… | head)
  any      run, shell, attach, sandbox: what the command exited with";

/// Exit code 2.
#[derive(Debug, Clone, Copy)]
pub struct Usage;

impl From<Usage> for ExitCode {
    fn from(Usage: Usage) -> Self {
        Self::from(2)
    }
}

/// A failure with an exit code of its own.
#[derive(Debug)]
pub struct Coded {
    pub code: u8,
    pub error: anyhow::Error,
}

impl fmt::Display for Coded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&words(&self.error))
    }
}

impl std::error::Error for Coded {}

/// Gives every failure this code, unless it has one.
pub fn code(code: u8) -> impl FnOnce(anyhow::Error) -> anyhow::Error {
    move |error| match error.downcast::<Coded>() {
        Ok(coded) => coded.into(),
        Err(error) => Coded { code, error }.into(),
    }
}

/// Tells a failure on stderr.
pub fn report(error: &anyhow::Error) -> ExitCode {
    if is_broken_pipe(error) {
        return ExitCode::from(BROKEN_PIPE);
    }
    tell(format_args!("{}", words(error)));
    ExitCode::from(error.downcast_ref::<Coded>().map_or(FAILURE, |coded| coded.code))
}

/// A failure and its causes for people, each word once: a client's error tells its own causes, and
/// a server's words stand without the protocol's.
fn words(error: &anyhow::Error) -> String {
    let mut parts: Vec<String> = Vec::new();
    for cause in error.chain() {
        // Some tell their cause themselves.
        if parts.last().is_some_and(|last| last.contains(&cause.to_string())) {
            continue;
        }
        match cause.downcast_ref::<ExecServerError>() {
            Some(ExecServerError::Server { message, .. }) => parts.push(message.clone()),
            Some(error) => parts.push(error.to_string()),
            None => {
                parts.push(cause.to_string());
                continue;
            }
        }
        break;
    }
    parts.join(": ").lines().map(printable).collect::<Vec<_>>().join("\n")
}

/// One line on stderr, wherever that leads.
pub fn tell(words: fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr().lock(), "codex: {words}");
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let chain = match error.downcast_ref::<Coded>() {
        Some(coded) => coded.error.chain(),
        None => error.chain(),
    };
    chain
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

/// The exit code that passes on another one.
pub fn passed_on(code: i32) -> ExitCode {
    ExitCode::from(u8::try_from(code & 0xff).unwrap_or(FAILURE))
}
