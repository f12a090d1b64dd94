//! `codex completion`: completion scripts for shells.

use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use clap_complete::Shell;

/// Print a completion script for a shell
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codex completion bash > ~/.local/share/bash-completion/completions/codex
  codex completion zsh > \"${fpath[1]}/_codex\"
  codex completion fish > ~/.config/fish/completions/codex.fish")]
pub(crate) struct CompletionArgs {
    /// The shell to generate completions for
    shell: Shell,
}

pub(crate) fn run(args: &CompletionArgs, command: &mut clap::Command) -> anyhow::Result<ExitCode> {
    // Via a buffer: clap panics if the reader of stdout has gone.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, command, "codex", &mut script);
    std::io::stdout().write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}
