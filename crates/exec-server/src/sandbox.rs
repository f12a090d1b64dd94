//! Requests that ask to be confined.
//!
//! Invariant: what cannot be enforced is refused; nothing runs with less protection than asked.

use codex_exec_server_protocol::{PermissionProfile, SandboxContext};

/// The answer to a request that asks for confinement.
pub(crate) const NOT_OFFERED: &str =
    "this server cannot enforce a sandbox; send no sandbox, or permissions of type `disabled`";

/// Whether the request has to be confined at all.
pub(crate) fn restricts(sandbox: &SandboxContext) -> bool {
    !matches!(sandbox.permissions, PermissionProfile::Disabled)
}
