//! The exec-server wire protocol.

mod path_uri;
mod permissions;

pub use path_uri::{PathUri, PathUriError};
pub use permissions::{
    AccessMode, FileSystemEntry, FileSystemPath, FileSystemPolicy, LegacySandboxPolicy,
    MissingPathBehavior, NetworkPolicy, PermissionProfile, RestrictedFileSystem, SandboxContext,
    SpecialPath,
};
