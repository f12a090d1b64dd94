//! The executor's own configuration files: `environmentConfig/read`.
//!
//! Invariant: what is read is raw. Nothing is expanded or merged: the client resolves `~` and relative
//! paths against [`user_home_dir`](EnvironmentConfigReadResponse::user_home_dir) and
//! [`base_dir`](ConfigLayer::base_dir).

use std::fmt;

use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize};

use crate::path_uri::PathUri;

/// Literal keys, from the top of a TOML document down; a dot in a key has no meaning.
pub type TomlPath = Vec<String>;

/// Params of `environmentConfig/read`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct EnvironmentConfigReadParams {
    /// The directory whose project is meant; it need not exist. Only a URI is taken here.
    #[serde(deserialize_with = "uri_only")]
    #[cfg_attr(feature = "schema", schemars(extend("pattern" = "^file:")))]
    pub cwd: PathUri,
    /// What to return of the configuration layers.
    pub config_paths: Vec<TomlPath>,
    /// What to return of the requirements layers.
    pub requirements_paths: Vec<TomlPath>,
}

/// Result of `environmentConfig/read`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct EnvironmentConfigReadResponse {
    /// The home directory of the server's user.
    pub user_home_dir: Option<PathUri>,
    /// `$CODEX_HOME`, or `.codex` in the home directory.
    pub codex_home_dir: PathUri,
    /// The machine's name.
    pub hostname: Option<String>,
    /// What a user or a project configures.
    pub config: ConfigLayers,
    /// What an administrator requires.
    pub requirements: ConfigLayers,
}

/// Files, lowest precedence first.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ConfigLayers {
    /// Those that have something of what was asked for.
    pub layers: Vec<ConfigLayer>,
    /// The index in `layers` at which layers from the cloud belong.
    pub cloud_insertion_index: usize,
}

/// The requested part of one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ConfigLayer {
    /// What the file is, for people.
    pub source: String,
    /// The directory that relative paths in the file start from.
    pub base_dir: PathUri,
    /// The requested keys, written anew as TOML.
    pub toml: String,
}

/// A path that is spelled as a URI.
fn uri_only<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PathUri, D::Error> {
    struct Uri;
    impl Visitor<'_> for Uri {
        type Value = PathUri;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a file: URI")
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<PathUri, E> {
            if text.starts_with('/') {
                return Err(E::custom(format_args!("path `{text}` is not a file: URI")));
            }
            text.parse().map_err(E::custom)
        }
    }
    deserializer.deserialize_str(Uri)
}

crate::encode::by_serde! { EnvironmentConfigReadParams }

impl crate::encode::Encode for EnvironmentConfigReadResponse {
    fn size_hint(&self) -> usize {
        let layers = self.config.layers.iter().chain(&self.requirements.layers);
        512 + layers.map(|layer| 128 + layer.source.len() + layer.toml.len()).sum::<usize>()
    }
}
