//! Exit codes, and how a failure is printed.
//!
//! Invariant: a reader that has gone away (`codex … | head`) is no failure worth a word.

use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

use codex_exec_server::{ErrorKind, ExecServerError};

use crate::style::printable;

/// Something failed; the message says what.
pub(crate) const FAILURE: u8 = 1;
/// `--timeout` was over, as with `timeout(1)`.
pub(crate) const TIMED_OUT: u8 = 124;
/// A command was to be run, and this program failed, not the command.
pub(crate) const NOT_RUN: u8 = 125;
/// The command is there but cannot be executed.
pub(crate) const NOT_EXECUTABLE: u8 = 126;
/// There is no such command.
pub(crate) const NOT_FOUND: u8 = 127;
/// Whoever read our output has gone: 128 + SIGPIPE.
pub(crate) const BROKEN_PIPE: u8 = 141;
/// The command line was wrong.
pub(crate) const USAGE: u8 = 2;

/// The table of `codex help`.
pub(crate) const HELP: &str = "\
Exit codes:
  0        success
  1        failure; the message says what to do. search: no match
  2        wrong command line. search: failure
  124      run: --timeout expired
  125      run, shell, attach, sandbox: codex failed, not the command; run, attach: output was lost
  126 127  run, sandbox: the command cannot be executed, was not found
  128+N    run, shell, attach, sandbox: signal N killed the command, e.g. 130 after Ctrl-C
  141      the reader of the output closed it (… | head)
  other    run, shell, attach, sandbox: the command's own exit code";

/// A failure that the command line knows more about: its kind, from which come exit code and hints.
#[derive(Debug)]
pub(crate) struct CommandError {
    pub kind: ErrorKind,
    pub error: anyhow::Error,
    /// What to do about it, each printed after the error.
    pub hints: Vec<String>,
}

impl CommandError {
    /// A failure of this kind, without hints.
    pub(crate) fn new(kind: ErrorKind, error: impl Into<anyhow::Error>) -> Self {
        Self { kind, error: error.into(), hints: Vec::new() }
    }

    /// With one more hint.
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

/// A failure with an exit code of its own.
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

/// Gives every failure this code, unless it has one.
pub(crate) fn with_code(code: u8) -> impl FnOnce(anyhow::Error) -> anyhow::Error {
    move |error| match error.downcast::<Coded>() {
        Ok(coded) => coded.into(),
        Err(error) => Coded { code, error }.into(),
    }
}

/// Gives every failure of a command that was to be run the code that a shell would give it.
pub(crate) fn with_command_code(error: anyhow::Error) -> anyhow::Error {
    let by_kind = match kind(&error) {
        ErrorKind::ProgramNotFound => NOT_FOUND,
        ErrorKind::ProgramNotExecutable => NOT_EXECUTABLE,
        _ => NOT_RUN,
    };
    with_code(by_kind)(error)
}

/// What kind of failure it is; [`ErrorKind::Unknown`] if that is not known.
pub(crate) fn kind(error: &anyhow::Error) -> ErrorKind {
    let found = causes(error).find_map(|cause| {
        let by_command = cause.downcast_ref::<CommandError>().map(|error| error.kind);
        by_command.or_else(|| cause.downcast_ref::<ExecServerError>().map(ExecServerError::kind))
    });
    found.unwrap_or(ErrorKind::Unknown)
}

/// Tells a failure on stderr.
pub(crate) fn report(error: &anyhow::Error) -> ExitCode {
    if is_broken_pipe(error) {
        return ExitCode::from(BROKEN_PIPE);
    }
    print_stderr(format_args!("{}", message(error)));
    ExitCode::from(error.downcast_ref::<Coded>().map_or(FAILURE, |coded| coded.code))
}

/// An error and all that led to it, also below those of this module, which print it themselves.
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

/// A failure and its causes for people, each word once: a client's error tells its own causes, and
/// a server's words stand without the protocol's.
fn message(error: &anyhow::Error) -> String {
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
pub(crate) fn print_stderr(message: fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr().lock(), "codex: {message}");
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    causes(error)
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

/// The exit code that passes on another one.
pub(crate) fn status(code: i32) -> ExitCode {
    ExitCode::from(u8::try_from(code & 0xff).unwrap_or(FAILURE))
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    fn server(kind: ErrorKind) -> ExecServerError {
        // The words say the opposite of every kind.
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
        assert_eq!(exit_code(unkinded), Some(125), "words are not a kind");
    }

    #[test]
    fn the_kind_is_found_below_and_the_outermost_counts() {
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
    fn a_broken_pipe_is_found_below() {
        let pipe = io::Error::from(io::ErrorKind::BrokenPipe);
        let error = Err::<(), _>(pipe).context("cannot print");
        let error = CommandError::new(ErrorKind::Unknown, error.unwrap_err());
        assert!(is_broken_pipe(&with_code(2)(error.into())));
        assert!(!is_broken_pipe(&anyhow::anyhow!("Broken pipe (os error 32)")));
    }
}
