//! Exit codes, and how a failure is told.
//!
//! Invariant: a reader that has gone away (`codex … | head`) is no failure worth a word.

use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

use codex_exec_server::{ErrorKind, ExecServerError};

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
  0        success
  1        failure; the message says what to do. search: no match
  2        wrong command line. search: failure
  124      run: --timeout expired
  125      run, shell, attach, sandbox: codex failed, not the command; run, attach: output was lost
  126 127  run, sandbox: the command cannot be executed, was not found
  128+N    run, shell, attach, sandbox: signal N killed the command, e.g. 130 after Ctrl-C
  141      the reader of the output closed it (… | head)
  other    run, shell, attach, sandbox: the command's own exit code";

/// Exit code 2.
#[derive(Debug, Clone, Copy)]
pub struct Usage;

impl From<Usage> for ExitCode {
    fn from(Usage: Usage) -> Self {
        Self::from(2)
    }
}

/// A failure that the command line knows more about: its kind, from which come exit code and hints.
#[derive(Debug)]
pub struct CommandError {
    pub kind: ErrorKind,
    pub error: anyhow::Error,
    /// What to do about it, each printed after the error.
    pub hints: Vec<String>,
}

impl CommandError {
    /// A failure of this kind, without hints.
    pub fn new(kind: ErrorKind, error: impl Into<anyhow::Error>) -> Self {
        Self { kind, error: error.into(), hints: Vec::new() }
    }

    /// With one more hint.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hints.push(hint.into());
        self
    }
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&words(&self.error))?;
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

/// Gives every failure of a command that was to be run the code that a shell would give it.
pub fn of_command(error: anyhow::Error) -> anyhow::Error {
    let by_kind = match kind(&error) {
        ErrorKind::ProgramNotFound => NOT_FOUND,
        ErrorKind::ProgramNotExecutable => NOT_EXECUTABLE,
        _ => NOT_RUN,
    };
    code(by_kind)(error)
}

/// What kind of failure it is; [`ErrorKind::Unknown`] if that is not known.
pub fn kind(error: &anyhow::Error) -> ErrorKind {
    let told = causes(error).find_map(|cause| {
        let by_command = cause.downcast_ref::<CommandError>().map(|error| error.kind);
        by_command.or_else(|| cause.downcast_ref::<ExecServerError>().map(ExecServerError::kind))
    });
    told.unwrap_or(ErrorKind::Unknown)
}

/// Tells a failure on stderr.
pub fn report(error: &anyhow::Error) -> ExitCode {
    if is_broken_pipe(error) {
        return ExitCode::from(BROKEN_PIPE);
    }
    tell(format_args!("{}", words(error)));
    ExitCode::from(error.downcast_ref::<Coded>().map_or(FAILURE, |coded| coded.code))
}

/// An error and all that led to it, also below those of this module, which print it themselves.
fn causes(error: &anyhow::Error) -> impl Iterator<Item = &(dyn std::error::Error + 'static)> {
    let mut waiting: Vec<_> = error.chain().collect();
    waiting.reverse();
    std::iter::from_fn(move || {
        let cause = waiting.pop()?;
        let below = match (cause.downcast_ref::<Coded>(), cause.downcast_ref::<CommandError>()) {
            (Some(coded), _) => Some(&coded.error),
            (_, Some(error)) => Some(&error.error),
            _ => None,
        };
        if let Some(below) = below {
            let at = waiting.len();
            waiting.extend(below.chain());
            waiting[at..].reverse();
        }
        Some(cause)
    })
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
    causes(error)
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

/// The exit code that passes on another one.
pub fn passed_on(code: i32) -> ExitCode {
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
        of_command(error).downcast_ref::<Coded>().map(|coded| coded.code)
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
            let told = CommandError::new(kind, anyhow::anyhow!("No such file or directory"));
            let told = anyhow::Error::new(told).context("cannot run it");
            assert_eq!(exit_code(told), Some(code), "{kind}");
        }
        let words = anyhow::anyhow!("No such file or directory (os error 2)");
        assert_eq!(exit_code(words), Some(125), "words are not a kind");
    }

    #[test]
    fn the_kind_is_found_below_and_the_outermost_counts() {
        let inner = anyhow::Error::from(server(ErrorKind::DiskFull)).context("below");
        let coded = code(3)(inner);
        assert_eq!(kind(&coded), ErrorKind::DiskFull);
        let outer = CommandError::new(ErrorKind::Busy, coded).hint("wait").hint("or do not");
        assert_eq!(outer.to_string(), "below: all is well (os error 0); wait; or do not");
        let outer = anyhow::Error::new(outer).context("above");
        assert_eq!(kind(&outer), ErrorKind::Busy);
        assert!(words(&outer).ends_with("; wait; or do not"), "{outer:#}");
        assert_eq!(kind(&anyhow::anyhow!("unknown session id x")), ErrorKind::Unknown);
    }

    #[test]
    fn a_broken_pipe_is_found_below() {
        let pipe = io::Error::from(io::ErrorKind::BrokenPipe);
        let error = Err::<(), _>(pipe).context("cannot print");
        let error = CommandError::new(ErrorKind::Unknown, error.unwrap_err());
        assert!(is_broken_pipe(&code(2)(error.into())));
        assert!(!is_broken_pipe(&anyhow::anyhow!("Broken pipe (os error 32)")));
    }
}
