//! Shell snapshots: what a login shell has set up once its profile has run, so that later commands start
//! without running the profile again.
//!
//! ```text
//! capture: [path, "-lc", script, …] ──▶ stdout ──▶ CapturedState ──▶ ShellSnapshot
//! replay:  environment = that of the request, with what the profile changed
//!          descriptor 3 = functions, aliases and options as shell text, in memory
//! ```
//!
//! Everything here is pure except [`ShellSnapshot::new`], which creates the memory file. Exported
//! variables travel in the environment, never as shell text.
//!
//! Invariant: a capture that cannot be reproduced exactly as far as this module knows is an error, and the
//! command then runs as an ordinary login shell.

mod captured;
mod replay;
mod script;
#[cfg(test)]
mod tests;
mod words;

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::Arc;

use codex_exec_server_protocol::process::{Env, EnvPolicy};
use rustix::fs::{MemfdFlags, SealFlags};

use crate::process::{
    EnvPolicyError, Environment, NEVER_INHERITED, NEVER_PASSED_ON, retain_allowed,
};

pub use captured::CapturedState;
pub use script::capture_script;

/// A shell that can be captured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ShellKind {
    /// bash 4.4 or newer.
    Bash,
    /// zsh.
    Zsh,
    /// A POSIX shell: dash, busybox, or another one under the name `sh`.
    Sh,
}

impl ShellKind {
    /// The kind with this name.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "bash" => Some(Self::Bash),
            "zsh" => Some(Self::Zsh),
            "sh" => Some(Self::Sh),
            _ => None,
        }
    }
}

/// Why a capture is of no use.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The shell did not print its whole state.
    #[error("the shell did not print its state")]
    Incomplete,
    /// The state has a part that cannot be set again.
    #[error("the shell's state cannot be restored: {0}")]
    Unsupported(&'static str),
    /// A pattern of `envPolicy` does not parse.
    #[error(transparent)]
    EnvPolicy(#[from] EnvPolicyError),
    /// The memory file cannot be created.
    #[error("cannot store the shell's state: {0}")]
    Store(#[source] io::Error),
}

/// Variables that every shell sets anew.
const SET_BY_EVERY_SHELL: [&str; 4] = ["PWD", "OLDPWD", "SHLVL", "_"];

/// The state of a login shell, ready to be given to later shells.
#[derive(Clone)]
pub struct ShellSnapshot {
    kind: ShellKind,
    /// Exported variables that the profile set or changed.
    changed: Environment,
    /// Variables that the profile removed.
    removed: BTreeSet<OsString>,
    /// Sealed; holds the rest of the state as shell text.
    state: Arc<OwnedFd>,
}

/// Names only: values may be secrets.
impl fmt::Debug for ShellSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShellSnapshot")
            .field("kind", &self.kind)
            .field("changed", &self.changed.keys())
            .field("removed", &self.removed)
            .finish_non_exhaustive()
    }
}

/// What to start in place of a login shell.
pub struct Replay {
    /// The command line.
    pub argv: Vec<String>,
    /// The whole environment.
    pub environment: Environment,
    /// The descriptor that the shell gets as number 3.
    pub state: Arc<OwnedFd>,
}

/// The command line only: values of variables may be secrets.
impl fmt::Debug for Replay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replay").field("argv", &self.argv).finish_non_exhaustive()
    }
}

impl ShellSnapshot {
    /// Makes a snapshot of what was captured in `base`, under `policy` and what bounds every environment besides.
    pub fn new(
        kind: ShellKind,
        mut captured: CapturedState,
        base: &Environment,
        policy: Option<&EnvPolicy>,
        hold: impl Fn(&mut Environment),
    ) -> Result<Self, SnapshotError> {
        unexport_functions(&mut captured, base, policy, hold)?;
        let text = replay::state_text(kind, &captured)?;
        let variables: Environment = captured
            .variables
            .into_iter()
            .filter(|(name, _)| is_name(name) && !is_shells_own(name))
            .collect();
        let removed = base
            .keys()
            .filter(|name| is_name(name) && !is_shells_own(name) && !variables.contains_key(*name))
            .cloned()
            .collect();
        let mut changed = variables;
        changed.retain(|name, value| {
            let secret = |never: &&str| name == *never;
            base.get(name) != Some(value)
                && !NEVER_INHERITED.iter().any(secret)
                && !NEVER_PASSED_ON.iter().any(secret)
        });
        if let Some(policy) = policy {
            retain_allowed(&mut changed, policy)?;
        }
        let state = memory_file(&text).map_err(|errno| SnapshotError::Store(errno.into()))?;
        Ok(Self { kind, changed, removed, state: Arc::new(state) })
    }

    /// Turns the command line `[path, "-lc", script, …]` and its environment into what restores this
    /// snapshot and then runs the script. Variables named in `env` keep their value; `hold` bounds what the
    /// profile makes of the others. `None` if only a login shell can run it.
    pub fn replay(
        &self,
        argv: &[String],
        mut environment: Environment,
        env: &Env,
        hold: impl FnOnce(&mut Environment),
    ) -> Option<Replay> {
        let is_kept = |name: &OsStr| name.to_str().is_some_and(|name| env.0.contains_key(name));
        environment.retain(|name, _| is_kept(name) || !self.removed.contains(name));
        let changed = self.changed.iter().filter(|(name, _)| !is_kept(name));
        environment.extend(changed.map(|(name, value)| (name.clone(), value.clone())));
        // Before the variables are added by which the shell finds its state.
        hold(&mut environment);
        let argv = replay::command_line(self.kind, argv, &mut environment)?;
        Some(Replay { argv, environment, state: self.state.clone() })
    }
}

/// Takes back the export of functions whose variable `policy` or `hold` does not let through. Those that were in
/// the environment before the profile ran stay.
fn unexport_functions(
    captured: &mut CapturedState,
    base: &Environment,
    policy: Option<&EnvPolicy>,
    hold: impl Fn(&mut Environment),
) -> Result<(), SnapshotError> {
    let exported = captured.attributes.iter_mut().filter(|(flags, _)| flags.contains(&b'x'));
    for (flags, name) in exported {
        let variable = [b"BASH_FUNC_", name.as_slice(), b"%%"].concat();
        let variable = OsString::from_vec(variable);
        let mut variables = Environment::from([(variable.clone(), OsString::new())]);
        if let Some(policy) = policy {
            retain_allowed(&mut variables, policy)?;
        }
        hold(&mut variables);
        if variables.is_empty() && !base.contains_key(&variable) {
            flags.retain(|flag| *flag != b'x');
            captured.unexported.push(name.clone());
        }
    }
    captured.attributes.retain(|(flags, _)| flags != b"-f");
    Ok(())
}

/// Whether a shell can have a variable of this name; others pass through it unseen.
fn is_name(name: &OsStr) -> bool {
    let bytes = name.as_bytes();
    let start = |byte: &u8| byte.is_ascii_alphabetic() || *byte == b'_';
    bytes.first().is_some_and(start)
        && bytes.iter().all(|byte| start(byte) || byte.is_ascii_digit())
}

/// Whether the shell, or the capture script, sets this variable by itself.
fn is_shells_own(name: &OsStr) -> bool {
    SET_BY_EVERY_SHELL.iter().any(|own| name == *own)
        || name.as_bytes().starts_with(script::PREFIX.as_bytes())
}

/// A sealed memory file: every shell that opens it through `/dev/fd` reads it from its start, and none can
/// change it.
fn memory_file(text: &[u8]) -> rustix::io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("shell-snapshot", flags)?;
    let mut rest = text;
    while !rest.is_empty() {
        let written = rustix::io::retry_on_intr(|| rustix::io::write(&fd, rest))?;
        rest = &rest[written..];
    }
    let seals = SealFlags::SEAL | SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK;
    rustix::fs::fcntl_add_seals(&fd, seals)?;
    Ok(fd)
}
