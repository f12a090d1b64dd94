//! Turns the params of `process/start` into something that can be started.

use std::any::Any;
use std::ffi::OsStr;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use codex_exec_server_protocol::PathUri;
use codex_exec_server_protocol::process::{ExecParams, ProcessId, Retain, TerminalSize};
use codex_exec_server_protocol::resources::{EndedBy, ResourceLimits};

use super::command::{Command, NulByte};
use super::confinement::Confinement;
use super::env::{self, EnvPolicyError, Environment};
use super::leftovers::Group;

/// A process to start.
#[derive(Debug)]
pub struct Launch {
    /// The process's id in its session.
    pub process_id: ProcessId,
    /// The group it is killed with.
    pub group: Group,
    /// For `process/list`.
    pub argv: Vec<String>,
    /// For `process/list`.
    pub cwd: PathUri,
    /// Size of its terminal; `None` without a terminal.
    pub terminal: Option<TerminalSize>,
    /// Without a terminal: stdin is a pipe, not `/dev/null`.
    pub pipe_stdin: bool,
    /// How much output the server retains; `None` for the default.
    pub retain: Option<Retain>,
    /// What it and everything that it starts may use; `None` without limits.
    pub limits: Option<Box<ResourceLimits>>,
    /// What exists until the last of its descendants has ended.
    pub until_gone: Option<UntilGone>,
    /// Called when the process has exited, or is given up before that.
    pub on_exit: Option<OnExit>,
    /// Sees what passes through its terminal.
    pub tap: Option<Box<dyn TerminalTap>>,
    /// What the process needs until it exits.
    pub while_running: Option<WhileRunning>,
    /// Becomes descriptor 3 of an unconfined program.
    pub(super) inherit: Option<Arc<OwnedFd>>,
    pub(super) target: LaunchTarget,
}

/// Something that exists as long as a process runs: the host drops it as soon as it sees the exit, or
/// when the process does not start.
pub struct WhileRunning(Box<dyn Any + Send>);

impl WhileRunning {
    /// Holds `value` until the process exits. Dropping it must not block.
    pub fn new(value: impl Any + Send) -> Self {
        Self(Box::new(value))
    }
}

/// Something that exists until the last descendant of a process has ended, or the process did not start.
pub struct UntilGone(#[expect(dead_code, reason = "held for its drop")] Box<dyn Any + Send + Sync>);

impl UntilGone {
    /// Holds `value` until then. Dropping it must not block.
    pub fn new(value: impl Any + Send + Sync) -> Self {
        Self(Box::new(value))
    }
}

/// Sees what passes through the terminal of a process. Must not block.
pub trait TerminalTap: Send + fmt::Debug {
    /// The process wrote this.
    fn output(&mut self, bytes: &[u8]);
    /// The client typed this.
    fn input(&mut self, bytes: &[u8]);
    /// The terminal has another size.
    fn resized(&mut self, size: TerminalSize);
    /// The process has exited with this code.
    fn exited(&mut self, code: i32);
}

/// What is known about a process that has exited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExitSummary {
    /// Exit code; 128 + signal number if a signal killed it.
    pub code: i32,
    /// The sandbox probably caused the exit.
    pub sandbox_denied: bool,
    /// Why it ended, if it did not exit by itself.
    pub ended_by: Option<EndedBy>,
    /// Output until then, in bytes.
    pub output_bytes: u64,
}

/// Receives the [`ExitSummary`] of a process. Must not block.
pub struct OnExit(Box<dyn FnOnce(&ExitSummary) + Send>);

impl OnExit {
    /// Calls this function once.
    pub fn new(call: impl FnOnce(&ExitSummary) + Send + 'static) -> Self {
        Self(Box::new(call))
    }

    pub(super) fn call(self, exit: &ExitSummary) {
        (self.0)(exit);
    }
}

impl fmt::Debug for OnExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OnExit")
    }
}

impl fmt::Debug for UntilGone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UntilGone")
    }
}

impl fmt::Debug for WhileRunning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WhileRunning").field(&(*self.0).type_id()).finish()
    }
}

/// What to execute.
#[derive(Debug)]
pub(super) enum LaunchTarget {
    Program(Command),
    Confined(Confinement),
}

/// Why params cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// `argv` is empty.
    #[error("argv must not be empty")]
    EmptyArgv,
    /// `envPolicy` cannot be applied.
    #[error(transparent)]
    EnvPolicy(#[from] EnvPolicyError),
    /// A string contains a NUL byte.
    #[error(transparent)]
    Nul(#[from] NulByte),
    /// The request wants more output retained than the server allows.
    #[error("retain.bytes is {asked}; this server keeps at most {limit}")]
    Retain {
        /// Requested bytes.
        asked: u64,
        /// Maximum bytes.
        limit: u64,
    },
}

/// Whether [`environment`] can take long: the patterns of `params` are many.
pub fn environment_is_costly(params: &ExecParams) -> bool {
    params.env_policy.as_ref().is_some_and(env::is_costly)
}

/// Builds the environment that `params` ask for, based on this process's own.
pub fn environment(params: &ExecParams) -> Result<Environment, LaunchError> {
    Ok(env::build(std::env::vars_os(), params.env_policy.as_ref(), &params.env)?)
}

impl Launch {
    /// An unconfined process.
    pub fn new(
        params: ExecParams,
        environment: &Environment,
        group: Group,
    ) -> Result<Self, LaunchError> {
        let program = params.argv.first().ok_or(LaunchError::EmptyArgv)?;
        let argv0 = params.arg0.as_deref().unwrap_or(program);
        let command = Command::new(
            OsStr::new(program),
            OsStr::new(argv0),
            params.argv[1..].iter().map(OsStr::new),
            environment,
            params.cwd.as_path(),
        )?;
        Ok(Self::with(params, LaunchTarget::Program(command), group))
    }

    /// A process in a prepared sandbox.
    pub fn confined(
        params: ExecParams,
        sandbox: crate::sandbox::Launch,
        group: Group,
    ) -> Result<Self, LaunchError> {
        Ok(Self::with(params, LaunchTarget::Confined(Confinement::new(sandbox)?), group))
    }

    /// Passes a descriptor to an unconfined program, as number 3. A sandbox takes it when it is prepared.
    pub fn inheriting(self, descriptor: Option<Arc<OwnedFd>>) -> Self {
        Self { inherit: descriptor, ..self }
    }

    /// Shows another command line in `process/list`.
    pub fn listed_as(self, argv: Vec<String>) -> Self {
        Self { argv: shorten(argv), ..self }
    }

    fn with(params: ExecParams, target: LaunchTarget, group: Group) -> Self {
        Self {
            process_id: params.process_id,
            group,
            argv: shorten(params.argv),
            cwd: params.cwd,
            terminal: params.tty.then(|| params.size.unwrap_or_default()),
            pipe_stdin: params.pipe_stdin,
            retain: params.retain,
            limits: params.limits.filter(|limits| !limits.is_empty()).map(Box::new),
            until_gone: None,
            on_exit: None,
            tap: None,
            while_running: None,
            inherit: None,
            target,
        }
    }
}

/// The most of a command line that `process/list` shows, in bytes: what it costs while the process is
/// remembered.
const MAX_LISTED_ARGV: usize = 4096;

/// Cuts arguments after [`MAX_LISTED_ARGV`] bytes; the last one then ends in an ellipsis.
fn shorten(mut argv: Vec<String>) -> Vec<String> {
    let mut room = MAX_LISTED_ARGV;
    for at in 0..argv.len() {
        let argument = &mut argv[at];
        if argument.len() + 1 > room {
            argument.truncate(argument.floor_char_boundary(room));
            argument.push('\u{2026}');
            argument.shrink_to_fit();
            argv.truncate(at + 1);
            argv.shrink_to_fit();
            break;
        }
        room -= argument.len() + 1;
    }
    argv
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_command_lines_are_cut_where_a_character_ends() {
        let words =
            |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        let short = words(&["make", "test", ""]);
        assert_eq!(shorten(short.clone()), short);
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..1_000 {
            let argv: Vec<String> = (0..random.usize(1..20))
                .map(|_| (0..random.usize(0..2_000)).map(|_| random.char(..)).collect())
                .collect();
            let cut = shorten(argv.clone());
            assert!(cut.iter().map(|word| word.len() + 1).sum::<usize>() <= MAX_LISTED_ARGV + 4);
            let (last, whole) = cut.split_last().unwrap();
            assert_eq!(whole, &argv[..whole.len()]);
            match last.strip_suffix('\u{2026}').filter(|_| cut != argv) {
                Some(start) => assert!(argv[whole.len()].starts_with(start)),
                None => assert_eq!(cut, argv),
            }
        }
    }
}
