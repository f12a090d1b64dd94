//! `cargo xtask fuzz`: builds and runs `codex-fuzz` like this program.

use anyhow::ensure;
use clap::Args;

use crate::codex;

/// Passed on to `codex-fuzz`.
#[derive(Debug, Args)]
pub(crate) struct FuzzArgs {
    /// `TARGET`, `--seconds N`, `--seed SEED`, `--replay FILE`; without them every target runs for 60 s
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

pub(crate) fn run(args: &FuzzArgs) -> anyhow::Result<()> {
    let mut command = codex::cargo();
    command.args(["run", "--quiet", "--locked", "--package", "codex-fuzz"]);
    command.args((!cfg!(debug_assertions)).then_some("--release")).arg("--").args(&args.arguments);
    ensure!(command.status()?.success(), "a fuzz target failed");
    Ok(())
}
