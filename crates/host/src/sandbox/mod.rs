//! The interface between this crate and the operating system's sandbox.
//!
//! This module names everything that the host and the server use of a sandbox: the trait
//! [`SandboxBackend`] and the types below. The implementation is chosen at compile time, without
//! dynamic dispatch. A sandbox for another operating system is another file beside `linux.rs` that
//! exports the same names:
//!
//! | name | what it is |
//! | --- | --- |
//! | `NativeSandbox` | the [`SandboxBackend`] |
//! | `Launch`, `Executable` | what is spawned in place of a confined program |
//! | `StatusReader`, `Failure`, `Stage` | why a confined program does not run, as the spawned process
//! reports it |
//! | `Cleanup` | removes what a killed sandbox left in the file system |
//! | `Detector` | recognizes output that reports a denial |
//! | `Spare`, `SpareLaunch` | a process that waits to become the next sandbox |
//! | `ManagedNetwork`, `NetworkDescriptors`, `NetworkReceiver` | a network that leads to the server alone: what
//! to ask for, the sockets that the server serves in it, and how they arrive |
//! | `OwnFiles` | files of the server that no policy can open |
//! | `is_sandbox`, `mounts_intact`, `PLACEHOLDER_MODE` | how to recognize sandboxes and their state |

use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::hash::Hash;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use codex_exec_server_protocol::{Assurance, ErrorKind, SandboxContext};

#[cfg(target_os = "linux")]
mod linux;
#[cfg(target_os = "linux")]
pub(crate) use linux::{
    Cleanup, Detector, Executable, NetworkReceiver, PLACEHOLDER_MODE, Spare, SpareLaunch, Stage,
    StatusReader, become_sandbox, is_sandbox, mountinfo, mounts_intact,
};
#[cfg(target_os = "linux")]
pub use linux::{Failure, Launch, ManagedNetwork, NativeSandbox, NetworkDescriptors, OwnFiles};

/// An operating system's sandbox, as the host and the server use it.
pub trait SandboxBackend: fmt::Debug + Sized + Send + Sync + 'static {
    /// A resolved policy.
    type Plan: fmt::Debug + Clone + Send + 'static;
    /// Identifies a policy; two equal keys can share a helper.
    type Key: fmt::Debug + Clone + Eq + Hash + Send + Sync + 'static;
    /// What to spawn in place of a confined program.
    type Launch: fmt::Debug + Send + 'static;
    /// Why a policy cannot be enforced. Nothing has run.
    type Refusal: PolicyRefusal;

    /// Sets up a sandbox with this configuration.
    fn new(config: SandboxConfig) -> io::Result<Self>;

    /// The highest assurance this machine offers; `None` if it can enforce nothing.
    fn assurance(&self) -> Option<Assurance>;

    /// Resolves a policy for a helper; `None` if the policy restricts no files. Reads the file system.
    /// A helper that `only_reads` leaves no trace in it.
    fn plan_helper(
        &self,
        context: &SandboxContext,
        only_reads: bool,
    ) -> Result<Option<Self::Plan>, Self::Refusal>;

    /// The key of the helper that can serve this plan.
    fn key(plan: &Self::Plan) -> Self::Key;

    /// Prepares the helper called `name` under a plan.
    fn launch_helper(&self, plan: &Self::Plan, name: &str) -> Result<Self::Launch, Self::Refusal>;

    /// Prepares a program under a policy; `None` if there is nothing to enforce. Reads the file system.
    fn launch_program(
        &self,
        context: &SandboxContext,
        program: &Program<'_>,
    ) -> Result<Option<Self::Launch>, Self::Refusal>;

    /// Prepares a process that runs no program: it prints a message to stderr, ends as denied, and has the
    /// environment and working directory of `program`. `None` if there is nothing to enforce.
    fn launch_refusal(
        &self,
        context: &SandboxContext,
        program: &Program<'_>,
        message: &str,
    ) -> Result<Option<Self::Launch>, Self::Refusal>;

    /// Whether the sandbox did not let the program be found or executed, as far as the failure tells.
    fn hides_program(failure: &Failure) -> bool;

    /// Clears the plan cache. Call it after a launch failed because a planned file was replaced.
    fn forget_plans(&self);
}

/// Why a policy cannot be enforced.
pub trait PolicyRefusal: Error + Send + Sync + 'static {
    /// The error kind to report.
    fn kind(&self) -> ErrorKind;

    /// Whether the request is at fault, as opposed to a temporary shortage on this machine.
    fn is_of_the_request(&self) -> bool;
}

/// Configuration of a server's sandboxes.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SandboxConfig {
    /// The executable to re-enter as the sandbox.
    pub executable: PathBuf,
    /// Files of the server that no policy can open (default: none).
    pub own_files: OwnFiles,
    /// Minimum assurance where the request names none (default: full). The server refuses a policy that
    /// it cannot enforce at this level.
    pub assurance: Assurance,
    /// Reuse a plan while the files it depends on are unchanged (default: true).
    pub cache_plans: bool,
    /// Programs see the processes and the `/proc` of the host (default: false). They can still neither
    /// signal nor inspect those outside of their sandbox.
    pub shares_pids: bool,
    /// A policy of the operator that bounds every other, and whose level no request lowers (default: none).
    pub ceiling: Option<SandboxContext>,
}

impl SandboxConfig {
    /// The defaults, with this executable to re-enter.
    pub fn new(executable: impl Into<PathBuf>) -> Self {
        Self {
            executable: executable.into(),
            own_files: OwnFiles::default(),
            assurance: Assurance::Full,
            cache_plans: true,
            shares_pids: false,
            ceiling: None,
        }
    }
}

/// A program to confine.
#[derive(Debug, Clone, Copy)]
pub struct Program<'a> {
    /// The program and its arguments; `argv[0]` is looked up in the `PATH` of `env`, inside the
    /// sandbox.
    pub argv: &'a [OsString],
    /// What the program sees as its own name (default: `argv[0]`).
    pub arg0: Option<&'a OsStr>,
    /// The whole environment.
    pub env: &'a [(OsString, OsString)],
    /// Working directory.
    pub cwd: &'a Path,
    /// Gives the program this network, whatever the policy says of the network. A policy that restricts
    /// nothing else is then enforced as one that restricts the network alone.
    pub network: Option<&'a ManagedNetwork>,
    /// A descriptor without a path, which the program gets as number 3.
    pub inherit: Option<&'a Arc<OwnedFd>>,
}
