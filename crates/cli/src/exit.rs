//! Exit codes, and error messages.
//!
//! Invariant: no message if the reader of the output has closed it (`codex … | head`).

use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

use codex_exec_server::{ErrorKind, ExecServerError};

use crate::closed_streams;
use crate::style::{printable, printable_lines};

/// A failure; the message says what to do.
pub(crate) const FAILURE: u8 = 1;
/// `--timeout` expired, as with `timeout(1)`.
pub(crate) const TIMED_OUT: u8 = 124;
/// This program failed, not the command that it should run.
pub(crate) const NOT_RUN: u8 = 125;
/// The command exists but cannot be executed.
pub(crate) const NOT_EXECUTABLE: u8 = 126;
/// The command was not found.
pub(crate) const NOT_FOUND: u8 = 127;
/// The reader of the output has closed it: 128 + SIGPIPE.
pub(crate) const BROKEN_PIPE: u8 = 141;
/// The command line was wrong.
pub(crate) const USAGE: u8 = 2;

/// The table of exit codes in `codex help`.
pub(crate) const HELP: &str = "\
Exit codes:
  0        success
  1        failure; the message says what to do. search: no match
  2        wrong command line. search: failure
  124      run: --timeout or --idle-timeout expired
  125      run, shell, attach, sandbox: codex failed, not the command; run, attach: output was lost
  126 127  run, sandbox: the command cannot be executed, was not found
  128+N    run, shell, attach, sandbox: signal N killed the command, e.g. 130 after Ctrl-C
  141      the reader of the output closed it (… | head)
  other    run, shell, attach, sandbox: the command's own exit code";

/// An error with a kind, which decides the exit code, and with hints.
#[derive(Debug)]
pub(crate) struct CommandError {
    pub kind: ErrorKind,
    pub error: anyhow::Error,
    /// What to do about the error; printed after it.
    pub hints: Vec<String>,
}

impl CommandError {
    /// An error of this kind, without hints.
    pub(crate) fn new(kind: ErrorKind, error: impl Into<anyhow::Error>) -> Self {
        Self { kind, error: error.into(), hints: Vec::new() }
    }

    /// Adds a hint.
    #[must_use]
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hints.push(hint.into());
        self
    }
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&message(&self.error))?;
        self.hints.iter().try_for_each(|hint| write!(f, "; {hint}"))
    }
}

impl std::error::Error for CommandError {}

/// An error with an exit code.
#[derive(Debug)]
struct Coded {
    code: u8,
    error: anyhow::Error,
}

impl fmt::Display for Coded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&message(&self.error))
    }
}

impl std::error::Error for Coded {}

/// Gives an error this exit code, unless it has one.
pub(crate) fn with_code(code: u8) -> impl FnOnce(anyhow::Error) -> anyhow::Error {
    move |error| match error.downcast::<Coded>() {
        Ok(coded) => coded.into(),
        Err(error) => Coded { code, error }.into(),
    }
}

/// Gives the error of a command that should run the exit code that a shell would give it.
pub(crate) fn with_command_code(error: anyhow::Error) -> anyhow::Error {
    let by_kind = match kind(&error) {
        ErrorKind::ProgramNotFound => NOT_FOUND,
        ErrorKind::ProgramNotExecutable => NOT_EXECUTABLE,
        _ => NOT_RUN,
    };
    with_code(by_kind)(error)
}

/// The kind of an error; [`ErrorKind::Unknown`] if it has none.
pub(crate) fn kind(error: &anyhow::Error) -> ErrorKind {
    let found = causes(error).find_map(|cause| {
        let by_command = cause.downcast_ref::<CommandError>().map(|error| error.kind);
        by_command.or_else(|| cause.downcast_ref::<ExecServerError>().map(ExecServerError::kind))
    });
    found.unwrap_or(ErrorKind::Unknown)
}

/// Prints an error to stderr and returns its exit code.
pub(crate) fn report(error: &anyhow::Error) -> ExitCode {
    if is_broken_pipe(error) {
        return ExitCode::from(BROKEN_PIPE);
    }
    let closed = causes(error)
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(closed_streams::is_cause);
    match closed {
        true => print_stderr(format_args!("cannot write the output: stdout or stderr is closed")),
        false => print_stderr(format_args!("{}", message(error))),
    }
    ExitCode::from(code(error))
}

/// The exit code of an error.
pub(crate) fn code(error: &anyhow::Error) -> u8 {
    match error.downcast_ref::<Coded>() {
        _ if is_broken_pipe(error) => BROKEN_PIPE,
        Some(coded) => coded.code,
        None => FAILURE,
    }
}

/// An error and its causes, including those inside the error types of this module, which print them
/// themselves.
fn causes(error: &anyhow::Error) -> impl Iterator<Item = &(dyn std::error::Error + 'static)> {
    let mut pending: Vec<_> = error.chain().collect();
    pending.reverse();
    std::iter::from_fn(move || {
        let cause = pending.pop()?;
        let below = match (cause.downcast_ref::<Coded>(), cause.downcast_ref::<CommandError>()) {
            (Some(coded), _) => Some(&coded.error),
            (_, Some(error)) => Some(&error.error),
            _ => None,
        };
        if let Some(below) = below {
            let at = pending.len();
            pending.extend(below.chain());
            pending[at..].reverse();
        }
        Some(cause)
    })
}

/// The message of an error and its causes, each once: a client's error already includes its causes, and a
/// server's message needs no words about the protocol.
pub(crate) fn message(error: &anyhow::Error) -> String {
    let mut parts: Vec<String> = Vec::new();
    for cause in error.chain() {
        // Some errors already include their cause.
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

/// Prints a message to stderr, filtered; ignores a failure to do so.
pub(crate) fn print_stderr(message: fmt::Arguments<'_>) {
    print_notice(format_args!("codex: {message}"));
}

/// Prints text to stderr, filtered; ignores a failure to do so.
pub(crate) fn print_notice(text: fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr().lock(), "{}", printable_lines(&text.to_string()));
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    causes(error)
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

/// The exit code of a command as this program's own.
pub(crate) fn status(code: i32) -> ExitCode {
    ExitCode::from(byte(code))
}

/// The part of an exit code that a parent process sees.
pub(crate) fn byte(code: i32) -> u8 {
    u8::try_from(code & 0xff).unwrap_or(FAILURE)
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    fn server(kind: ErrorKind) -> ExecServerError {
        // The message contradicts every kind.
        let message = "all is well (os error 0)".to_owned();
        ExecServerError::Server { method: "process/start", code: -32603, message, kind }
    }

    fn exit_code(error: anyhow::Error) -> Option<u8> {
        with_command_code(error).downcast_ref::<Coded>().map(|coded| coded.code)
    }

    #[test]
    fn exit_codes_come_from_kinds() {
        for &kind in ErrorKind::ALL {
            let code = match kind {
                ErrorKind::ProgramNotFound => 127,
                ErrorKind::ProgramNotExecutable => 126,
                _ => 125,
            };
            assert_eq!(exit_code(server(kind).into()), Some(code), "{kind}");
            let found = CommandError::new(kind, anyhow::anyhow!("No such file or directory"));
            let found = anyhow::Error::new(found).context("cannot run it");
            assert_eq!(exit_code(found), Some(code), "{kind}");
        }
        let unkinded = anyhow::anyhow!("No such file or directory (os error 2)");
        assert_eq!(exit_code(unkinded), Some(125), "a message is not a kind");
    }

    #[test]
    fn the_outermost_kind_among_the_causes_counts() {
        let inner = anyhow::Error::from(server(ErrorKind::DiskFull)).context("below");
        let coded = with_code(3)(inner);
        assert_eq!(kind(&coded), ErrorKind::DiskFull);
        let outer = CommandError::new(ErrorKind::Busy, coded).hint("wait").hint("or do not");
        assert_eq!(outer.to_string(), "below: all is well (os error 0); wait; or do not");
        let outer = anyhow::Error::new(outer).context("above");
        assert_eq!(kind(&outer), ErrorKind::Busy);
        assert!(message(&outer).ends_with("; wait; or do not"), "{outer:#}");
        assert_eq!(kind(&anyhow::anyhow!("unknown session id x")), ErrorKind::Unknown);
    }

    #[test]
    fn a_broken_pipe_is_found_among_the_causes() {
        let pipe = io::Error::from(io::ErrorKind::BrokenPipe);
        let error = Err::<(), _>(pipe).context("cannot print");
        let error = CommandError::new(ErrorKind::Unknown, error.unwrap_err());
        assert!(is_broken_pipe(&with_code(2)(error.into())));
        assert!(!is_broken_pipe(&anyhow::anyhow!("Broken pipe (os error 32)")));
    }
}
