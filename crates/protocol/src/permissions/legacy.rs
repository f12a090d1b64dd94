//! The older and shorter spellings of a policy.
//!
//! Invariant: these are parsed and never written; each means exactly one
//! [`PermissionProfile`](super::PermissionProfile).

use serde::Deserialize;

use super::profile::NetworkPolicy;
use crate::PathUri;

/// A policy in the older format.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum LegacySandboxPolicy {
    /// The whole disk can be read.
    ReadOnly {
        /// Whether the network can be reached.
        network_access: bool,
    },
    /// The whole disk can be read; the working directory and some other directories can be written.
    WorkspaceWrite {
        /// Writable besides the working directory.
        writable_roots: Vec<PathUri>,
        /// Whether the network can be reached.
        network_access: bool,
        /// `$TMPDIR` is not writable.
        exclude_tmpdir_env_var: bool,
        /// `/tmp` is not writable.
        exclude_slash_tmp: bool,
    },
    /// No sandbox.
    DangerFullAccess,
    /// An outer sandbox isolates the file system.
    ExternalSandbox {
        /// Whether the network can be reached.
        network_access: NetworkPolicy,
    },
}

impl LegacySandboxPolicy {
    /// Workspace-write with the defaults of its members.
    pub fn workspace_write() -> Self {
        Self::WorkspaceWrite {
            writable_roots: Vec::new(),
            network_access: false,
            exclude_tmpdir_env_var: false,
            exclude_slash_tmp: false,
        }
    }
}

/// The members of every older policy, in snake case and camel case.
#[derive(Debug, Default, Deserialize)]
pub(super) struct LegacyMembers {
    #[serde(alias = "networkAccess")]
    network_access: Option<NetworkAccess>,
    #[serde(alias = "writableRoots")]
    writable_roots: Option<Vec<PathUri>>,
    #[serde(alias = "excludeTmpdirEnvVar")]
    exclude_tmpdir_env_var: Option<bool>,
    #[serde(alias = "excludeSlashTmp")]
    exclude_slash_tmp: Option<bool>,
}

/// A boolean in most policies, a word in `external-sandbox`; both are accepted in each.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(untagged)]
enum NetworkAccess {
    Flag(bool),
    Word(NetworkPolicy),
}

impl LegacyMembers {
    /// The policy with this name, in any case style: `read-only`, `ReadOnly`, `readOnly`, `read_only`.
    pub(super) fn into_policy(self, name: &str) -> Option<LegacySandboxPolicy> {
        let network_access = matches!(
            self.network_access,
            Some(NetworkAccess::Flag(true) | NetworkAccess::Word(NetworkPolicy::Enabled))
        );
        Some(match name {
            "read-only" | "ReadOnly" | "readOnly" | "read_only" => {
                LegacySandboxPolicy::ReadOnly { network_access }
            }
            "workspace-write" | "WorkspaceWrite" | "workspaceWrite" | "workspace_write" => {
                LegacySandboxPolicy::WorkspaceWrite {
                    writable_roots: self.writable_roots.unwrap_or_default(),
                    network_access,
                    exclude_tmpdir_env_var: self.exclude_tmpdir_env_var.unwrap_or(false),
                    exclude_slash_tmp: self.exclude_slash_tmp.unwrap_or(false),
                }
            }
            "danger-full-access" | "DangerFullAccess" | "dangerFullAccess"
            | "danger_full_access" => LegacySandboxPolicy::DangerFullAccess,
            "external-sandbox" | "ExternalSandbox" | "externalSandbox" | "external_sandbox" => {
                LegacySandboxPolicy::ExternalSandbox {
                    network_access: if network_access {
                        NetworkPolicy::Enabled
                    } else {
                        NetworkPolicy::Restricted
                    },
                }
            }
            _ => return None,
        })
    }
}
