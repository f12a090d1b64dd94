//! Holds a command, or a filesystem helper, to a permission profile on Linux.
//!
//! Three steps in three places:
//!
//! 1. `decide`: a policy and a file system in, an access for every path out. Pure.
//! 2. `plan`: the ordered steps that enforce it, as plain data. Pure.
//! 3. `apply`: the steps as system calls, in the process that becomes the target.
//!
//! A server uses [`Sandbox::prepare`], spawns what it is told to, and reads the outcome from the
//! status pipe; its executable calls [`reentry::main_if_reentered`] first thing in `main`.
//!
//! Invariant: what cannot be enforced exactly is refused. Nothing here falls back to less, but to an
//! [`Assurance`] that the request or the configuration names.

mod apply;
mod capabilities;
// Pure, and public for the models that test them; a server needs nothing of either.
#[doc(hidden)]
pub mod decide;
pub mod denial;
mod executable;
mod host;
mod launch;
mod mountinfo;
#[doc(hidden)]
pub mod plan;
mod plan_cache;
pub mod reentry;
mod remedy;
mod seccomp;
mod spare;
mod status;

/// Permission bits of the directory that stands for a protected name that does not exist. Inside a
/// sandbox it is a mount point; nobody's own directory looks like that.
pub use apply::placeholder::MODE as PLACEHOLDER_MODE;
pub use capabilities::{Capabilities, Check, lacks};
pub use codex_exec_server_protocol::Assurance;
pub use decide::policy::Surroundings;
pub use executable::Executable;
pub use host::HostFacts;
pub use launch::{
    Cleanup, Command, Config, Launch, Limits, OwnFiles, PassedDescriptor, Planned, PolicyKey,
    PrepareError, Prepared, Request, Sandbox,
};
pub use spare::{Spare, SpareLaunch};
pub use status::{Failure, Stage, StatusReader};
