//! The `codex` that tasks run, built like this program.

use std::path::PathBuf;
use std::process::Command;

use anyhow::ensure;

/// Builds `codex` with the profile of this program, and returns its path.
pub(crate) fn build() -> anyhow::Result<PathBuf> {
    let mut command = cargo();
    command.args(["build", "--quiet", "--locked", "--package", "codex"]);
    let built = command.args((!cfg!(debug_assertions)).then_some("--release")).status()?;
    ensure!(built.success(), "the build failed");
    Ok(std::env::current_exe()?.with_file_name("codex"))
}

/// The cargo that runs this program, with the environment that cargo itself was started with.
///
/// `cargo run` describes the package that it runs in variables. Build scripts that watch those would take
/// them for changed, and what depends on their packages would be compiled anew for each task.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_CRATE_", "CARGO_BIN_", "CARGO_PRIMARY_"]
            .iter()
            .any(|prefix| text.starts_with(prefix))
        {
            command.env_remove(name);
        }
    }
    command
}
