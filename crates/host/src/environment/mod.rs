//! What is configured and installed on this machine for Codex clients: configuration files, skills and
//! plugins.
//!
//! ```text
//! config.rs     layers of configuration and requirements, cut to what was asked for
//!    ├─ document.rs      one TOML file; selection
//!    ├─ project.rs       which directories are the project's, and whether they are trusted
//!    └─ requirements.rs  what the older managed file requires
//! discovery.rs  files of skills and plugins below a root         through a sandbox, if there is one
//! installed.rs  skills and plugins that are installed here          (reader.rs)
//!    └─ skill.rs, manifest.rs, yaml.rs   what their files say
//! ```
//!
//! Configuration is read with the server's own rights; everything else by the same operations as `fs/*`
//! requests, on the backend that the request's sandbox leads to.

mod config;
mod discovery;
mod document;
mod installed;
mod manifest;
mod project;
mod reader;
mod requirements;
mod skill;
mod yaml;

use std::path::{Path, PathBuf};

pub use config::{ConfigError, read_config};
pub use discovery::{MAX_ANSWER_BYTES, MAX_ROOTS, ROOTS_AT_ONCE, discover_root};
pub use installed::discover_installed;
pub use reader::Reader;

use crate::machine;

/// Where the configuration of this machine and its user is.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct EnvironmentPlaces {
    /// The administrator's directory. Default `/etc/codex`.
    pub system: PathBuf,
    /// The user's configuration. Default none: `$CODEX_HOME`, or `.codex` in the home directory.
    pub codex_home: Option<PathBuf>,
    /// The home directory. Default none: that of the server's user.
    pub user_home: Option<PathBuf>,
}

impl Default for EnvironmentPlaces {
    fn default() -> Self {
        Self { system: PathBuf::from("/etc/codex"), codex_home: None, user_home: None }
    }
}

/// The directory `$CODEX_HOME` cannot be used, or there is none.
#[derive(Debug, thiserror::Error)]
pub enum HomeError {
    /// It was set, and cannot be looked at.
    #[error("CODEX_HOME points to {path:?}, which cannot be used: {source}")]
    Unusable {
        /// Its value.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It was set to something else.
    #[error("CODEX_HOME points to {0:?}, which is not a directory")]
    NotADirectory(PathBuf),
    /// There is no home directory either.
    #[error("the home directory is unknown; set CODEX_HOME")]
    Unknown,
}

impl EnvironmentPlaces {
    fn user_home(&self) -> Option<PathBuf> {
        self.user_home.clone().or_else(machine::home)
    }

    /// The user's configuration directory: one that was chosen has to exist, the default need not.
    pub fn codex_home(&self) -> Result<PathBuf, HomeError> {
        let variable = || std::env::var_os("CODEX_HOME").filter(|value| !value.is_empty());
        match self.codex_home.clone().or_else(|| variable().map(PathBuf::from)) {
            Some(chosen) => existing_directory(&chosen),
            None => self.user_home().map(|home| home.join(".codex")).ok_or(HomeError::Unknown),
        }
    }
}

fn existing_directory(path: &Path) -> Result<PathBuf, HomeError> {
    let unusable = |source| HomeError::Unusable { path: path.to_owned(), source };
    let found = path.canonicalize().map_err(unusable)?;
    match found.is_dir() {
        true => Ok(found),
        false => Err(HomeError::NotADirectory(path.to_owned())),
    }
}
