//! `-e NAME=VALUE`: variables of a command.

use anyhow::{Context, bail};
use clap::Args;
use codex_exec_server::client::ExecCommand;

use crate::places_file::PlaceSettings;

/// `--env`.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct EnvArgs {
    /// Set a variable; NAME alone copies its local value
    #[arg(short, long = "env", value_name = "NAME=VALUE")]
    env: Vec<String>,
}

impl EnvArgs {
    /// The names and values.
    pub(crate) fn pairs(&self) -> anyhow::Result<Vec<(String, String)>> {
        let pair = |given: &String| {
            let (name, value) = match given.split_once('=') {
                Some((name, value)) => (name, value.to_owned()),
                None => (given.as_str(), local_variable(given)?),
            };
            if name.is_empty() {
                bail!("invalid variable `{given}`: expected -e NAME=VALUE or -e NAME");
            }
            Ok((name.to_owned(), value))
        };
        self.env.iter().map(pair).collect()
    }

    /// Gives a command the variables of its place, and then these.
    pub(crate) fn apply(
        &self,
        mut command: ExecCommand,
        settings: Option<&PlaceSettings>,
    ) -> anyhow::Result<ExecCommand> {
        for (name, value) in settings.into_iter().flat_map(|settings| &settings.env) {
            command = command.env(name, value);
        }
        for (name, value) in self.pairs()? {
            command = command.env(name, value);
        }
        Ok(command)
    }
}

fn local_variable(name: &str) -> anyhow::Result<String> {
    std::env::var(name)
        .with_context(|| format!("cannot copy ${name}; set it, or pass -e {name}=VALUE"))
}
