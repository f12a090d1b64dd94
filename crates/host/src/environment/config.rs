//! `environmentConfig/read`: the layers of this machine's configuration, cut to what was asked for.

use std::path::Path;

use codex_exec_server_protocol::environment_config::{
    ConfigLayer, ConfigLayers, EnvironmentConfigReadParams, EnvironmentConfigReadResponse, TomlPath,
};
use codex_exec_server_protocol::{ErrorKind, PathUri, RpcError};
use toml::Table;

use super::document::{Document, DocumentError, select};
use super::project::Projects;
use super::{EnvironmentPlaces, HomeError, requirements};

/// What all layers of an answer may hold together, in bytes of TOML.
const MAX_ANSWER_BYTES: usize = 16 << 20;

/// The configuration cannot be read or returned.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Nothing was asked for.
    #[error("at least one config or requirements path is required")]
    NothingAsked,
    /// A path without keys.
    #[error("TOML paths must contain at least one key segment")]
    EmptyPath,
    /// There is no directory for the user's configuration.
    #[error("failed to find Codex home: {0}")]
    Home(#[from] HomeError),
    /// A file cannot be used.
    #[error("failed to load executor-local config: {0}")]
    Document(#[from] DocumentError),
    /// What was asked for cannot be written as TOML.
    #[error("failed to write {file} as TOML: {source}")]
    Write {
        /// The file it is from.
        file: String,
        /// Why.
        source: toml::ser::Error,
    },
    /// A path that has no URI.
    #[error("failed to name a configuration directory: {0}")]
    Path(#[from] codex_exec_server_protocol::PathUriError),
    /// More than one answer carries.
    #[error(
        "the requested configuration is larger than {MAX_ANSWER_BYTES} bytes; request less of it"
    )]
    TooLarge,
}

impl From<ConfigError> for RpcError {
    fn from(error: ConfigError) -> Self {
        let message = error.to_string();
        match error {
            ConfigError::NothingAsked | ConfigError::EmptyPath => {
                Self::invalid_params(ErrorKind::InvalidParams, message)
            }
            ConfigError::TooLarge => Self::internal(ErrorKind::TooLarge, message),
            _ => Self::internal(ErrorKind::InvalidConfig, message),
        }
    }
}

/// Reads the layers. Blocks.
pub fn read_config(
    places: &EnvironmentPlaces,
    params: &EnvironmentConfigReadParams,
) -> Result<EnvironmentConfigReadResponse, ConfigError> {
    let paths = params.config_paths.iter().chain(&params.requirements_paths);
    match paths.clone().any(Vec::is_empty) {
        true => return Err(ConfigError::EmptyPath),
        false if paths.count() == 0 => return Err(ConfigError::NothingAsked),
        false => {}
    }
    let codex_home = places.codex_home()?;
    let files = Files::load(places, &codex_home, params.cwd.as_path())?;
    let mut config = Cut::new(&params.config_paths);
    config.add("system", files.system.as_ref())?;
    let cloud_insertion_index = config.layers.len();
    config.add("user", files.user.as_ref())?;
    for project in &files.projects {
        config.add("project", Some(project))?;
    }
    config.add("legacy managed_config.toml", files.managed.as_ref())?;

    let mut required = Cut::new(&params.requirements_paths);
    if let Some(document) = &files.requirements {
        required.add_table(document.path.display().to_string(), &document.path, &document.table)?;
    }
    let required_insertion_index = required.layers.len();
    if let Some(document) = &files.managed {
        let table = requirements::of_managed(document)?;
        required.add_table(document.path.display().to_string(), &document.path, &table)?;
    }
    if config.bytes + required.bytes > MAX_ANSWER_BYTES {
        return Err(ConfigError::TooLarge);
    }
    Ok(EnvironmentConfigReadResponse {
        user_home_dir: places.user_home().as_deref().map(PathUri::try_from).transpose()?,
        codex_home_dir: PathUri::try_from(codex_home.as_path())?,
        hostname: hostname(),
        config: ConfigLayers { layers: config.layers, cloud_insertion_index },
        requirements: ConfigLayers {
            layers: required.layers,
            cloud_insertion_index: required_insertion_index,
        },
    })
}

/// Every file that there is.
struct Files {
    system: Option<Document>,
    user: Option<Document>,
    /// Outermost first.
    projects: Vec<Document>,
    managed: Option<Document>,
    requirements: Option<Document>,
}

impl Files {
    fn load(
        places: &EnvironmentPlaces,
        codex_home: &Path,
        cwd: &Path,
    ) -> Result<Self, DocumentError> {
        let system = Document::read(&places.system.join("config.toml"))?;
        let user = Document::read(&codex_home.join("config.toml"))?;
        let managed = Document::read(&places.system.join("managed_config.toml"))?;
        let requirements = Document::read(&places.system.join("requirements.toml"))?;
        let trusting = Projects::of([&system, &user, &managed].into_iter().flatten())?;
        let mut projects = Vec::new();
        for directory in trusting.trusted_directories(cwd) {
            let settings = directory.join(".codex");
            // That is the user's layer.
            let is_home = settings.canonicalize().is_ok_and(|real| real == codex_home);
            if !is_home {
                projects.extend(Document::read(&settings.join("config.toml"))?);
            }
        }
        Ok(Self { system, user, projects, managed, requirements })
    }
}

/// Layers, as far as they are asked for.
struct Cut<'p> {
    paths: &'p [TomlPath],
    layers: Vec<ConfigLayer>,
    bytes: usize,
}

impl<'p> Cut<'p> {
    fn new(paths: &'p [TomlPath]) -> Self {
        Self { paths, layers: Vec::new(), bytes: 0 }
    }

    fn add(&mut self, kind: &str, document: Option<&Document>) -> Result<(), ConfigError> {
        let Some(Document { path, table }) = document else { return Ok(()) };
        self.add_table(format!("{kind} ({})", path.display()), path, table)
    }

    fn add_table(&mut self, source: String, file: &Path, table: &Table) -> Result<(), ConfigError> {
        let selected = select(table, &self.paths.iter().map(Vec::as_slice).collect::<Vec<_>>());
        if selected.is_empty() {
            return Ok(());
        }
        let failed = |source| ConfigError::Write { file: file.display().to_string(), source };
        let toml = toml::to_string(&selected).map_err(failed)?;
        self.bytes += toml.len();
        let base_dir = PathUri::try_from(file.parent().unwrap_or(file))?;
        self.layers.push(ConfigLayer { source, base_dir, toml });
        Ok(())
    }
}

fn hostname() -> Option<String> {
    let name = rustix::system::uname().nodename().to_str().ok()?.to_owned();
    Some(name).filter(|name| !name.is_empty())
}
