//! Confines a command, or a filesystem helper, to a permission profile on Linux.
//!
//! Three steps:
//!
//! 1. `decide`: resolves a policy against a file system to an access for every path. Pure.
//! 2. `plan`: turns that into ordered steps, as plain data. Pure.
//! 3. `apply`: carries out the steps as system calls, in the process that becomes the target.
//!
//! A server calls [`Sandbox::prepare`], spawns the returned [`Launch`], and reads the outcome from the
//! status pipe; its executable calls [`reentry::main_if_reentered`] first thing in `main`.
//!
//! Invariant: a policy that cannot be enforced exactly is refused. The only weaker levels are those of
//! [`Assurance`], and only if the request or the configuration accepts them.

mod apply;
mod capabilities;
// Pure, and public for tests with models; a server needs neither.
#[doc(hidden)]
pub mod decide;
pub mod denial;
mod executable;
mod host;
mod launch;
pub mod mountinfo;
mod network;
#[doc(hidden)]
pub mod plan;
mod plan_cache;
pub mod reentry;
mod remedy;
mod seccomp;
mod spare;
mod status;

/// Mode of a placeholder: the directory that stands for a protected name that does not exist. Inside a
/// sandbox it is a mount point, and no other directory looks like that.
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
pub use network::{
    MAX_LOOPBACK_PORTS, ManagedNetwork, NetworkDescriptors, NetworkReceiver, TUN_ADDRESS_V4,
    TUN_ADDRESS_V6, TUN_MTU,
};
pub use reentry::INHERITED;
pub use spare::{Spare, SpareLaunch};
pub use status::{Failure, Stage, StatusReader};
