//! The seam between this crate and the operating system's sandbox.
//!
//! Everything that the host and the server need of a sandbox is named here: [`SandboxBackend`] is what
//! they ask of it, and the types beside it are what it answers with. Which one it is is known when it
//! is compiled; no call is dynamic. Another operating system's sandbox is another file beside
//! `linux.rs`, which exports the same names:
//!
//! | name | what it is |
//! | --- | --- |
//! | `NativeSandbox` | the [`SandboxBackend`] |
//! | `Launch`, `Executable` | what is spawned in place of a confined program |
//! | `StatusReader`, `Failure`, `Stage` | why a confined program does not run, told by what was spawned |
//! | `Cleanup` | what a sandbox that was killed has left in the file system |
//! | `Detector` | the words by which a program says that it was denied something |
//! | `Spare`, `SpareLaunch` | a process that waits to become the next sandbox |
//! | `OwnFiles` | files of the server that no policy can open |
//! | `is_sandbox`, `mounts_intact`, `PLACEHOLDER_MODE` | marks by which sandboxes are known |

use std::error::Error;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::hash::Hash;
use std::io;
use std::path::{Path, PathBuf};

use codex_exec_server_protocol::{Assurance, ErrorKind, SandboxContext};

#[cfg(target_os = "linux")]
mod linux;
#[cfg(target_os = "linux")]
pub(crate) use linux::{
    Cleanup, Detector, Executable, PLACEHOLDER_MODE, Spare, SpareLaunch, Stage, StatusReader,
    become_sandbox, is_sandbox, mounts_intact,
};
#[cfg(target_os = "linux")]
pub use linux::{Failure, Launch, NativeSandbox, OwnFiles};

/// What the host and the server ask of an operating system's sandbox.
pub trait SandboxBackend: fmt::Debug + Sized + Send + Sync + 'static {
    /// A policy that has been resolved.
    type Plan: fmt::Debug + Clone + Send + 'static;
    /// Equal for policies that one helper can serve.
    type Key: fmt::Debug + Clone + Eq + Hash + Send + Sync + 'static;
    /// What to spawn in place of a confined program.
    type Launch: fmt::Debug + Send + 'static;
    /// Why a policy is not enforced. Nothing has run.
    type Refusal: PolicyRefusal;

    /// A sandbox that is set up so.
    fn new(config: SandboxConfig) -> io::Result<Self>;

    /// The most that can stand behind a sandbox here; `None` if there can be none.
    fn assurance(&self) -> Option<Assurance>;

    /// Resolves a policy for a helper; `None` if it restricts no file. Looks at files.
    fn plan_helper(&self, context: &SandboxContext) -> Result<Option<Self::Plan>, Self::Refusal>;

    /// Which helper can serve a policy.
    fn key(plan: &Self::Plan) -> Self::Key;

    /// Prepares a helper of that name under a policy.
    fn launch_helper(&self, plan: &Self::Plan, name: &str) -> Result<Self::Launch, Self::Refusal>;

    /// Prepares a program under a policy; `None` if there is nothing to enforce. Looks at files.
    fn launch_program(
        &self,
        context: &SandboxContext,
        program: &Program<'_>,
    ) -> Result<Option<Self::Launch>, Self::Refusal>;

    /// Has every policy resolved anew: something was not what it was when one was.
    fn forget_plans(&self);
}

/// Why a policy is not enforced.
pub trait PolicyRefusal: Error + Send + Sync + 'static {
    /// What kind of failure it is.
    fn kind(&self) -> ErrorKind;

    /// Whether the request is at fault, and not this machine at this moment.
    fn is_of_the_request(&self) -> bool;
}

/// How a server wants its sandboxes.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SandboxConfig {
    /// The executable that is re-entered as the sandbox.
    pub executable: PathBuf,
    /// Files of the server itself that no policy can open. Default none.
    pub own_files: OwnFiles,
    /// What has to stand behind a sandbox at least, where the request does not say. Default full.
    pub assurance: Assurance,
    /// Whether plans are used again while nothing they rest on has changed. Default true.
    pub cache_plans: bool,
}

impl SandboxConfig {
    /// The defaults, re-entering this executable.
    pub fn new(executable: impl Into<PathBuf>) -> Self {
        Self {
            executable: executable.into(),
            own_files: OwnFiles::default(),
            assurance: Assurance::Full,
            cache_plans: true,
        }
    }
}

/// A program that is to be confined.
#[derive(Debug, Clone, Copy)]
pub struct Program<'a> {
    /// The program and its arguments; looked up in the `PATH` of `env`, inside the sandbox.
    pub argv: &'a [OsString],
    /// What the program sees as its own name, if not `argv[0]`.
    pub arg0: Option<&'a OsStr>,
    /// The whole environment.
    pub env: &'a [(OsString, OsString)],
    /// Where it starts.
    pub cwd: &'a Path,
}
