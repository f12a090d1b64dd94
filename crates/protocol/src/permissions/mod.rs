//! Permissions: the sandbox policy that a request carries.
//!
//! These types are pure data: the sandbox crate reads the machine, resolves names and decides access.
//! Invariant: every spelling that any revision sends decodes to one type, which is always written in the
//! newest spelling.
//!
//! ```
//! use codex_exec_server_protocol::{NetworkPolicy, SandboxContext};
//! let asked: SandboxContext =
//!     serde_json::from_str(r#"{"type": "read-only", "network_access": false}"#).unwrap();
//! assert_eq!(asked.permissions.network(), NetworkPolicy::Restricted);
//! ```

pub(crate) mod assurance;
mod context;
mod file_system;
mod legacy;
mod profile;
#[cfg(test)]
mod tests;

pub use assurance::Assurance;
pub use context::{SandboxContext, SandboxOverride};
pub use file_system::{
    AccessMode, FileSystemEntry, FileSystemPath, FileSystemPolicy, MissingPathBehavior,
    RestrictedFileSystem, SpecialPath,
};
pub use legacy::LegacySandboxPolicy;
pub use profile::{NetworkPolicy, PermissionProfile};
