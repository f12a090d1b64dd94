//! Server information: `environment/info`, `environment/status`.

use serde::{Deserialize, Serialize};

use crate::path_uri::PathUri;
use crate::permissions::Assurance;

/// Params of `environment/info`: none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct EnvironmentInfoParams {}

/// Result of `environment/info`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default)]
pub struct EnvironmentInfo {
    /// The user's shell.
    pub shell: ShellInfo,
    /// The release that clients take the server for, as a semantic version; the server's own version may be
    /// its build metadata.
    pub executor_version: String,
    /// Which implementation this is; the same on every machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub provider_id: Option<String>,
    /// The server's working directory, if it exists.
    pub cwd: Option<PathUri>,
    /// The home directory of the server's user.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user_home_dir: Option<PathUri>,
    /// `linux`.
    pub platform_os: String,
    /// Directories for the client to prepend to the `PATH` it sends.
    pub prepend_path_dirs: Vec<PathUri>,
    /// `$TMPDIR`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temporary_directories: Option<Vec<PathUri>>,
    /// The directory for temporary files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temp_dir: Option<PathUri>,
    /// **extension**: the highest assurance of sandboxes here; absent without sandboxes.
    #[serde(
        skip_serializing_if = "Option::is_none",
        deserialize_with = "crate::permissions::assurance::lenient"
    )]
    #[cfg_attr(feature = "schema", schemars(with = "Option<crate::schema::ReportedAssurance>"))]
    pub sandbox_assurance: Option<Assurance>,
    /// The optional features that this server supports.
    pub capabilities: Capabilities,
}

/// The user's shell.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct ShellInfo {
    /// Its name, such as `bash`.
    pub name: String,
    /// Its path, such as `/bin/bash`.
    pub path: String,
}

macro_rules! capabilities {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The optional features of a server. An absent capability means false; unknown ones
        /// are ignored.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        #[serde(rename_all = "camelCase", default)]
        pub struct Capabilities {
            $($(#[$doc])* #[serde(deserialize_with = "lenient_bool")] pub $name: bool,)*
        }

        impl Capabilities {
            /// Every capability with its value, in the order of the wire.
            pub fn list(&self) -> Vec<(&'static str, bool)> {
                vec![$((stringify!($name), self.$name),)*]
            }
        }
    };
}

capabilities! {
    /// `networkProxy` of `process/start`.
    network_proxy_launch,
    /// `reviewDomains` of a network proxy.
    network_proxy_review_domains,
    /// `credentialMasking` of a network proxy.
    credential_masking,
    /// `credentialProviders` of a network proxy.
    credential_masking_custom_providers,
    /// `sandbox` of `capabilityRoots/discoverV1`.
    capability_discovery_sandbox,
    /// `capabilities/discoverV2`.
    capability_discovery_v2,
    /// `environmentConfig/read`.
    environment_config_read,
    /// `valueEnvVar` of `http/request`.
    http_header_env_vars,
    /// `fs/open` with a sandbox.
    sandboxed_file_streaming,
    /// `fs/open` with mode `replace`.
    file_write_streaming,
    /// `fs/watchMissing`.
    fs_watch_missing,
    /// `shellSnapshot` of `process/start`.
    shell_snapshot_v2,
    /// A sandbox of Windows.
    windows_mxc,
    /// Permission to write everywhere, without restrictions, leaves the host's `/dev` in place.
    linux_root_write_preserves_devices,
    /// Permission to write everywhere keeps the denials beside it, and explicit permissions for paths
    /// that do not exist change nothing.
    linux_approved_root_write_preserves_restrictions,
    /// **extension**: `matchPorts` of a network proxy.
    network_port_rules,
    /// **extension**: `network/updateRules`.
    network_update_rules,
    /// **extension**: `transparent` of `networkProxy`, and `network` of the response.
    network_transparent,
    /// **extension**: `process/resize`, and `size` of `process/start`.
    process_resize,
    /// **extension**: `process/list`.
    process_list,
    /// **extension**: every signal of `process/signal`.
    process_signals,
    /// **extension**: `closeStdin` of `process/write`.
    process_close_stdin,
    /// **extension**: `retain` of `process/start` and `droppedBytes` of `process/read`.
    process_retain,
    /// **extension**: `until` of `retain` of `process/start`.
    process_retain_until_read,
    /// **extension**: `limits` of `process/start`, `endedBy` and `usage` of `process/exited`.
    process_limits,
    /// **extension**: `detachTtlMs` of `initialize`.
    session_detach_ttl,
    /// **extension**: `attach` and `sessionName` of `initialize`, `session/list`, `fit` of `process/resize`,
    /// `process/resized`.
    session_sharing,
    /// **extension**: `process/screen`.
    process_screen,
    /// **extension**: `fs/search` and `fs/cancelSearch`.
    fs_search,
    /// **extension**: `fs/glob`.
    fs_glob,
    /// **extension**: `fs/watch` and `fs/unwatch`.
    fs_watch,
    /// **extension**: `fs/rename`, `fs/symlink` and `fs/setMode`.
    fs_rename_link_mode,
    /// **extension**: `atomic` and `mode` of `fs/writeFile`, mode `replaceAtomic` of `fs/open` with
    /// `commit` of `fs/close`, `permissions` of `fs/open`.
    fs_atomic_write,
    /// **extension**: `atomic` of `fs/copy`.
    fs_atomic_copy,
    /// **extension**: `keep` of `fs/open`.
    fs_keep_handles,
    /// **extension**: `preserve` of `fs/remove`.
    fs_remove_preserve,
    /// **extension**: `assurance` of `sandbox`, and `sandboxAssurance` of `process/start`.
    sandbox_assurance,
}

fn lenient_bool<'de, D: serde::Deserializer<'de>>(from: D) -> Result<bool, D::Error> {
    let raw = <&serde_json::value::RawValue>::deserialize(from)?;
    Ok(raw.get() == "true")
}

/// Params of `environment/status`: none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct EnvironmentStatusParams {}

/// Result of `environment/status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct EnvironmentStatusResponse {
    /// `ready`.
    pub status: String,
}

crate::encode::by_serde! { EnvironmentInfoParams, EnvironmentInfo, EnvironmentStatusParams, EnvironmentStatusResponse }
