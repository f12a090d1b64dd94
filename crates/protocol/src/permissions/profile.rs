//! The permission profile: file system and network, as one value.
//!
//! Invariant: a missing `network` means restricted, so an absent member never grants more.

use std::fmt;

use serde::de::value::{MapAccessDeserializer, StrDeserializer};
use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};
use serde::ser::{Serialize, SerializeStruct, Serializer};

use super::file_system::{
    AccessMode, FileSystemEntry, FileSystemPath, FileSystemPolicy, RestrictedFileSystem,
    SpecialPath,
};
use super::legacy::{LegacyMembers, LegacySandboxPolicy};

/// What a command or a filesystem request may access.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum PermissionProfile {
    /// The server enforces file system and network.
    Managed {
        /// Which paths may be read and written.
        file_system: FileSystemPolicy,
        /// Whether the network can be reached.
        network: NetworkPolicy,
    },
    /// No sandbox.
    Disabled,
    /// An outer sandbox isolates the file system: full disk access, network as given.
    External {
        /// Whether the network can be reached.
        network: NetworkPolicy,
    },
}

/// Whether the network can be reached.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, Default, serde::Serialize, serde::Deserialize,
)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum NetworkPolicy {
    /// No socket reaches anything outside the sandbox.
    #[default]
    Restricted,
    /// The host's network.
    Enabled,
}

impl PermissionProfile {
    /// The whole disk can be read, nothing written, no network.
    pub fn read_only() -> Self {
        Self::from_legacy(&LegacySandboxPolicy::ReadOnly { network_access: false })
    }

    /// The whole disk can be read; the project roots, `/tmp` and `$TMPDIR` written; no network.
    pub fn workspace_write() -> Self {
        Self::from_legacy(&LegacySandboxPolicy::workspace_write())
    }

    /// No sandbox at all.
    pub fn full_access() -> Self {
        Self::Disabled
    }

    /// The profile an older policy stands for.
    ///
    /// The project root of older policies is the working directory: a caller that puts the result into a
    /// [`SandboxContext`](super::SandboxContext) sets it as the only workspace root.
    pub fn from_legacy(policy: &LegacySandboxPolicy) -> Self {
        let special =
            |value, access| FileSystemEntry::new(FileSystemPath::Special { value }, access);
        let managed = |entries, network_access: bool| Self::Managed {
            file_system: FileSystemPolicy::Restricted(RestrictedFileSystem {
                entries,
                glob_scan_max_depth: None,
            }),
            network: if network_access {
                NetworkPolicy::Enabled
            } else {
                NetworkPolicy::Restricted
            },
        };
        match policy {
            LegacySandboxPolicy::DangerFullAccess => Self::Disabled,
            LegacySandboxPolicy::ExternalSandbox { network_access } => {
                Self::External { network: *network_access }
            }
            LegacySandboxPolicy::ReadOnly { network_access } => {
                managed(vec![special(SpecialPath::Root, AccessMode::Read)], *network_access)
            }
            LegacySandboxPolicy::WorkspaceWrite {
                writable_roots,
                network_access,
                exclude_tmpdir_env_var,
                exclude_slash_tmp,
            } => {
                let mut entries = vec![
                    special(SpecialPath::Root, AccessMode::Read),
                    special(SpecialPath::ProjectRoots { subpath: None }, AccessMode::Write),
                ];
                if !exclude_slash_tmp {
                    entries.push(special(SpecialPath::SlashTmp, AccessMode::Write));
                }
                if !exclude_tmpdir_env_var {
                    entries.push(special(SpecialPath::Tmpdir, AccessMode::Write));
                }
                entries.extend(writable_roots.iter().map(|root| {
                    FileSystemEntry::new(
                        FileSystemPath::Path { path: root.clone() },
                        AccessMode::Write,
                    )
                }));
                managed(entries, *network_access)
            }
        }
    }

    /// The network policy; a disabled sandbox has the network enabled.
    pub fn network(&self) -> NetworkPolicy {
        match self {
            Self::Managed { network, .. } | Self::External { network } => *network,
            Self::Disabled => NetworkPolicy::Enabled,
        }
    }
}

impl Serialize for PermissionProfile {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Managed { file_system, network } => {
                let mut out = serializer.serialize_struct("PermissionProfile", 3)?;
                out.serialize_field("type", "managed")?;
                out.serialize_field("file_system", file_system)?;
                out.serialize_field("network", network)?;
                out.end()
            }
            Self::Disabled => {
                let mut out = serializer.serialize_struct("PermissionProfile", 1)?;
                out.serialize_field("type", "disabled")?;
                out.end()
            }
            Self::External { network } => {
                let mut out = serializer.serialize_struct("PermissionProfile", 2)?;
                out.serialize_field("type", "external")?;
                out.serialize_field("network", network)?;
                out.end()
            }
        }
    }
}

impl<'de> Deserialize<'de> for PermissionProfile {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(ParsedProfile::deserialize(deserializer)?.profile)
    }
}

/// A profile, and whether it was an older policy, which decides the project root.
#[derive(Debug)]
pub(super) struct ParsedProfile {
    pub(super) profile: PermissionProfile,
    pub(super) legacy: bool,
}

/// The members of every spelling together, so that one pass over the input parses any of them.
#[derive(Debug, Default, serde::Deserialize)]
pub(super) struct ProfileMembers {
    #[serde(rename = "type")]
    kind: Option<String>,
    file_system: Option<FileSystemPolicy>,
    network: Option<NetworkPolicy>,
    #[serde(flatten)]
    legacy: LegacyMembers,
}

impl ProfileMembers {
    pub(super) fn is_profile(&self) -> bool {
        self.kind.is_some()
    }

    /// `{"type": word}` and nothing else.
    pub(super) fn from_name(word: &str) -> Self {
        Self { kind: Some(word.to_owned()), ..Self::default() }
    }

    pub(super) fn into_profile<E: de::Error>(self) -> Result<ParsedProfile, E> {
        let Some(kind) = self.kind else {
            return Err(E::missing_field("type"));
        };
        let network = self.network.unwrap_or_default();
        let profile = match kind.as_str() {
            "managed" => {
                let file_system =
                    self.file_system.ok_or_else(|| E::missing_field("file_system"))?;
                PermissionProfile::Managed { file_system, network }
            }
            "disabled" => PermissionProfile::Disabled,
            "external" => PermissionProfile::External { network },
            other => {
                let policy = self.legacy.into_policy(other).ok_or_else(|| {
                    E::unknown_variant(other, &["managed", "disabled", "external"])
                })?;
                let profile = PermissionProfile::from_legacy(&policy);
                return Ok(ParsedProfile { profile, legacy: true });
            }
        };
        Ok(ParsedProfile { profile, legacy: false })
    }
}

impl<'de> Deserialize<'de> for ParsedProfile {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ObjectOrName;
        impl<'de> Visitor<'de> for ObjectOrName {
            type Value = ParsedProfile;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a permission profile")
            }

            fn visit_str<E: de::Error>(self, word: &str) -> Result<Self::Value, E> {
                ProfileMembers::from_name(word).into_profile()
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                ProfileMembers::deserialize(MapAccessDeserializer::new(map))?.into_profile()
            }
        }
        deserializer.deserialize_any(ObjectOrName)
    }
}

/// Parses the name of a policy without members, such as `read-only` on a command line.
impl std::str::FromStr for PermissionProfile {
    type Err = de::value::Error;

    fn from_str(word: &str) -> Result<Self, Self::Err> {
        Self::deserialize(StrDeserializer::<Self::Err>::new(word))
    }
}
