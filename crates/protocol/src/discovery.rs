//! Skills and plugins on the executor: `capabilityRoots/discoverV1`, `capabilities/discoverV2`.

use serde::{Deserialize, Serialize};

use crate::path_uri::PathUri;
use crate::permissions::SandboxContext;

/// Params of `capabilityRoots/discoverV1`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CapabilityRootsDiscoverParams {
    /// Where to look; at most 128 roots.
    pub roots: Vec<CapabilityRoot>,
}

/// A directory to look in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CapabilityRoot {
    /// Chosen by the client, returned unchanged.
    pub id: String,
    /// The directory.
    pub path: PathUri,
    /// What restricts every look into it; none restricts nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
}

/// Result of `capabilityRoots/discoverV1`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CapabilityRootsDiscoverResponse {
    /// One for each root, in the order of the request.
    pub roots: Vec<DiscoveredRoot>,
}

/// What is in a root.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct DiscoveredRoot {
    /// Of the request.
    pub id: String,
    /// Of the request.
    pub path: PathUri,
    /// The plugin whose manifest is directly in the root.
    pub plugin: Option<PluginFiles>,
    /// Every `SKILL.md`, sorted by path.
    pub skills: Vec<SkillFiles>,
    /// The manifest that names the skills of the root, then those of nested plugins.
    pub namespace_manifests: Vec<CapabilityFile>,
    /// What was skipped, and why.
    pub warnings: Vec<String>,
    /// Why the root cannot be searched; nothing else is filled in then.
    pub error: Option<String>,
}

impl DiscoveredRoot {
    /// A root in which nothing was found yet.
    pub fn empty(id: String, path: PathUri) -> Self {
        Self {
            id,
            path,
            plugin: None,
            skills: Vec::new(),
            namespace_manifests: Vec::new(),
            warnings: Vec::new(),
            error: None,
        }
    }

    /// About how long it is as JSON.
    fn size_hint(&self) -> usize {
        let skills = self.skills.iter().map(|skill| {
            skill.instructions.size_hint()
                + skill.metadata.as_ref().map_or(4, CapabilityFile::size_hint)
        });
        256 + skills.sum::<usize>()
            + self.plugin.as_ref().map_or(4, PluginFiles::size_hint)
            + self.namespace_manifests.iter().map(CapabilityFile::size_hint).sum::<usize>()
            + self.warnings.iter().map(String::len).sum::<usize>()
    }
}

/// A text file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CapabilityFile {
    /// Where it is.
    pub path: PathUri,
    /// All of it.
    pub contents: String,
}

impl CapabilityFile {
    fn size_hint(&self) -> usize {
        64 + self.path.encoded_len() + self.contents.len()
    }
}

/// The files of a plugin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct PluginFiles {
    /// `plugin.json`.
    pub manifest: CapabilityFile,
    /// Its MCP servers.
    pub mcp_config: Option<CapabilityFile>,
    /// Its apps.
    pub apps_config: Option<CapabilityFile>,
}

impl PluginFiles {
    fn size_hint(&self) -> usize {
        let configs = self.mcp_config.iter().chain(&self.apps_config);
        64 + self.manifest.size_hint() + configs.map(CapabilityFile::size_hint).sum::<usize>()
    }
}

/// The files of a skill.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SkillFiles {
    /// `SKILL.md`.
    pub instructions: CapabilityFile,
    /// `agents/openai.yaml` beside it.
    pub metadata: Option<CapabilityFile>,
}

/// Params of `capabilities/discoverV2`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CapabilitiesDiscoverParams {
    /// The session's directory. What is found does not depend on it.
    pub cwd: PathUri,
    /// What restricts every look; none restricts nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxContext>,
}

/// Result of `capabilities/discoverV2`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CapabilitiesDiscoverResponse {
    /// Installed plugins, sorted by id.
    pub plugins: Vec<DiscoveredPlugin>,
    /// Skills outside plugins.
    pub skills: Vec<DiscoveredSkill>,
    /// Something could not be loaded.
    pub warnings: Vec<String>,
}

/// An installed plugin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct DiscoveredPlugin {
    /// `NAME@MARKETPLACE`.
    pub id: String,
    /// For people.
    pub display_name: String,
    /// Its id in a remote catalogue.
    pub remote_plugin_id: Option<String>,
    /// The name of the directory that the version is installed in.
    pub version: String,
    /// That directory.
    pub root: PathUri,
    /// Its files.
    pub files: PluginFiles,
    /// Its skills, named `PLUGIN:NAME`.
    pub skills: Vec<DiscoveredSkill>,
}

/// A skill, as its front matter describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct DiscoveredSkill {
    /// What the model calls it.
    pub name: String,
    /// What it is for.
    pub description: String,
    /// The same in fewer words.
    pub short_description: Option<String>,
    /// Its `SKILL.md`.
    pub path: PathUri,
    /// Where it was found; absent for a plugin's skill.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub discovery_root: Option<DiscoveryRoot>,
    /// What it needs.
    pub dependencies: Option<SkillDependencies>,
    /// When it may be used.
    pub policy: Option<SkillPolicy>,
}

impl DiscoveredSkill {
    fn size_hint(&self) -> usize {
        let tools = self.dependencies.iter().flat_map(|dependencies| &dependencies.tools);
        512 + self.name.len()
            + self.description.len()
            + self.short_description.as_ref().map_or(4, String::len)
            + tools.map(|tool| 256 + tool.value.len()).sum::<usize>()
    }
}

/// A directory that the server searches by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DiscoveryRoot {
    /// `codex-home-skills` or `user-agent-skills`.
    pub id: String,
    /// The directory.
    pub path: PathUri,
}

/// What a skill needs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SkillDependencies {
    /// Tools.
    pub tools: Vec<SkillTool>,
}

/// A tool that a skill needs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct SkillTool {
    /// `mcp`, `env_var` and the like.
    #[serde(rename = "type")]
    pub kind: String,
    /// Which one.
    pub value: String,
    /// For people.
    pub description: Option<String>,
    /// How an MCP server is reached.
    pub transport: Option<String>,
    /// How an MCP server is started.
    pub command: Option<String>,
    /// Where an MCP server is.
    pub url: Option<String>,
    /// The port that a sign-in comes back to.
    pub oauth_callback_port: Option<u16>,
}

/// When a skill may be used.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct SkillPolicy {
    /// Whether the model may use it without being asked to.
    pub allow_implicit_invocation: Option<bool>,
    /// The products it is for; none means all.
    pub products: Vec<String>,
}

crate::encode::by_serde! { CapabilityRootsDiscoverParams, CapabilitiesDiscoverParams }

impl crate::encode::Encode for CapabilityRootsDiscoverResponse {
    fn size_hint(&self) -> usize {
        16 + self.roots.iter().map(DiscoveredRoot::size_hint).sum::<usize>()
    }
}

impl crate::encode::Encode for CapabilitiesDiscoverResponse {
    fn size_hint(&self) -> usize {
        let plugin = |plugin: &DiscoveredPlugin| {
            256 + plugin.files.size_hint()
                + plugin.skills.iter().map(DiscoveredSkill::size_hint).sum::<usize>()
        };
        64 + self.plugins.iter().map(plugin).sum::<usize>()
            + self.skills.iter().map(DiscoveredSkill::size_hint).sum::<usize>()
    }
}
