//! The `sandbox` member of a request: permissions and the directories they refer to.
//!
//! Invariant: an older policy, in place of the object or of `permissions`, makes `cwd` the only project root;
//! otherwise decoding removes every difference between the spellings.

use std::fmt;

use serde::de::value::MapAccessDeserializer;
use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};

use super::assurance::Assurance;
use super::profile::{ParsedProfile, PermissionProfile, ProfileMembers};
use crate::PathUri;

/// The sandbox policy of a `process/start` or filesystem request.
#[derive(Debug, Clone, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SandboxContext {
    /// What may be accessed.
    pub permissions: PermissionProfile,
    /// The directory for relative patterns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<PathUri>,
    /// The directories that `project_roots` means; empty grants nothing.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub workspace_roots: Vec<PathUri>,
    /// Set for an older policy without `cwd`: the project root is the working directory of the started
    /// process. Not serialized; the newest spelling names the roots.
    #[serde(skip)]
    pub project_root_is_cwd: bool,
    /// For Windows servers; preserved, and ignored elsewhere.
    pub windows_sandbox_level: String,
    /// For Windows servers; preserved, and ignored elsewhere.
    pub windows_sandbox_private_desktop: bool,
    /// For Windows servers; preserved, and ignored elsewhere.
    pub windows_sandbox_proxy_settings_mode: String,
    /// How an older server should enforce this; preserved and ignored.
    pub use_legacy_landlock: bool,
    /// **extension**: the least assurance to accept; the server's setting if absent. The request is
    /// refused if this machine has less.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub assurance: Option<Assurance>,
    /// Why the permissions are what they are. Kept; what is enforced follows from the permissions alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sandbox_override: Option<SandboxOverride>,
}

/// Why a client sends the permissions it sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum SandboxOverride {
    /// They are those of the session.
    NoOverride,
    /// The user approved more, and the denials of the session still hold.
    EscalatedSandboxWithRestrictions,
    /// The first attempt is made without the session's sandbox.
    BypassSandboxFirstAttempt,
}

impl SandboxContext {
    /// Makes a context without directories: `project_roots` grants nothing yet.
    pub fn new(permissions: PermissionProfile) -> Self {
        Self {
            permissions,
            cwd: None,
            workspace_roots: Vec::new(),
            project_root_is_cwd: false,
            windows_sandbox_level: "disabled".to_owned(),
            windows_sandbox_private_desktop: false,
            windows_sandbox_proxy_settings_mode: "preserve".to_owned(),
            use_legacy_landlock: false,
            assurance: None,
            sandbox_override: None,
        }
    }

    /// Makes a context with this directory as `cwd` and as the only workspace root.
    pub fn in_workspace(permissions: PermissionProfile, root: PathUri) -> Self {
        Self { cwd: Some(root.clone()), workspace_roots: vec![root], ..Self::new(permissions) }
    }

    fn from_profile(parsed: ParsedProfile) -> Self {
        Self { project_root_is_cwd: parsed.legacy, ..Self::new(parsed.profile) }
    }
}

#[derive(serde::Deserialize)]
#[serde(rename_all = "camelCase")]
struct ContextMembers {
    permissions: Option<ParsedProfile>,
    cwd: Option<PathUri>,
    workspace_roots: Option<Vec<PathUri>>,
    windows_sandbox_level: Option<String>,
    windows_sandbox_private_desktop: Option<bool>,
    windows_sandbox_proxy_settings_mode: Option<String>,
    use_legacy_landlock: Option<bool>,
    assurance: Option<Assurance>,
    #[serde(default, deserialize_with = "present")]
    sandbox_override: Option<SandboxOverride>,
    #[serde(flatten)]
    in_place: ProfileMembers,
}

/// A member that may be left out and may not be null.
fn present<'de, D: Deserializer<'de>>(from: D) -> Result<Option<SandboxOverride>, D::Error> {
    SandboxOverride::deserialize(from).map(Some)
}

impl ContextMembers {
    fn into_context<E: de::Error>(self) -> Result<SandboxContext, E> {
        let parsed = match self.permissions {
            Some(parsed) => parsed,
            None if self.in_place.is_profile() => self.in_place.into_profile()?,
            None => return Err(E::missing_field("permissions")),
        };
        let mut context = SandboxContext::from_profile(parsed);
        context.workspace_roots = self.workspace_roots.unwrap_or_default();
        if context.project_root_is_cwd
            && let Some(cwd) = &self.cwd
        {
            context.workspace_roots = vec![cwd.clone()];
            context.project_root_is_cwd = false;
        }
        context.cwd = self.cwd;
        if let Some(level) = self.windows_sandbox_level {
            context.windows_sandbox_level = level;
        }
        if let Some(mode) = self.windows_sandbox_proxy_settings_mode {
            context.windows_sandbox_proxy_settings_mode = mode;
        }
        context.windows_sandbox_private_desktop =
            self.windows_sandbox_private_desktop.unwrap_or(false);
        context.use_legacy_landlock = self.use_legacy_landlock.unwrap_or(false);
        context.assurance = self.assurance;
        context.sandbox_override = self.sandbox_override;
        Ok(context)
    }
}

impl<'de> Deserialize<'de> for SandboxContext {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ObjectOrName;
        impl<'de> Visitor<'de> for ObjectOrName {
            type Value = SandboxContext;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a sandbox object")
            }

            fn visit_str<E: de::Error>(self, word: &str) -> Result<Self::Value, E> {
                ProfileMembers::from_name(word).into_profile().map(SandboxContext::from_profile)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                ContextMembers::deserialize(MapAccessDeserializer::new(map))?.into_context()
            }
        }
        deserializer.deserialize_any(ObjectOrName)
    }
}
