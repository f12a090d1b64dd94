//! `codex apply-patch`: changes files of the other side as a patch says.

use std::io::{IsTerminal, Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Args;
use codex_exec_server::client::Patch;

use crate::on::{OnArgs, Wants, block_on};
use crate::policy::SandboxArgs;
use crate::remote_path;
use crate::style::Style;

/// Apply a patch to files of the other side
///
/// Everything is checked before anything is written: a patch that does not fit changes nothing. If
/// a file cannot be written after all, it is left as it was, and what is done by then is told.
/// Prints what changed, one file a line: A added, M modified, D deleted.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codex apply-patch < change.patch
  codex apply-patch --on ws://127.0.0.1:4500 --cwd /srv/app --sandbox workspace-write change.patch

The format:
  *** Begin Patch
  *** Add File: notes/new.txt
  +first line
  *** Update File: src/app.py
  *** Move to: src/main.py
  @@ def greet():
  -    print(\"Hi\")
  +    print(\"Hello\")
  *** Delete File: old.txt
  *** End Patch")]
pub struct ApplyPatchArgs {
    #[command(flatten)]
    on: OnArgs,

    /// What the patch's paths are relative to
    #[arg(short = 'C', long, value_name = "DIR", default_value = ".")]
    cwd: String,

    #[command(flatten)]
    sandbox: SandboxArgs,

    /// A file of this side that holds the patch; stdin otherwise
    patch: Option<PathBuf>,
}

pub fn run(args: &ApplyPatchArgs) -> anyhow::Result<ExitCode> {
    let patch = Patch::parse(&args.read()?)?;
    block_on(async {
        let wants = Wants { sandbox: args.sandbox.is_given(), ..Wants::default() };
        let connected = args.on.connect(wants).await?;
        let cwd = remote_path::resolve(&connected.client, &args.cwd)?;
        let files = connected.client.files().in_sandbox(args.sandbox.context(&cwd)?);
        let report = files.apply_patch(&patch, &cwd).await;
        connected.close().await;
        let report = report?;
        let style = Style::stdout();
        let mut out = std::io::stdout().lock();
        for change in &report.changes {
            let line = crate::style::printable(&change.to_string());
            let colour = match line.as_bytes().first() {
                Some(b'A') => style.green(&line),
                Some(b'D') => style.red(&line),
                _ => line,
            };
            writeln!(out, "{colour}")?;
        }
        Ok(ExitCode::SUCCESS)
    })
}

impl ApplyPatchArgs {
    fn read(&self) -> anyhow::Result<String> {
        if let Some(file) = &self.patch {
            return std::fs::read_to_string(file)
                .with_context(|| format!("cannot read the patch in {}", file.display()));
        }
        if std::io::stdin().is_terminal() {
            bail!("the patch comes on stdin; write codex apply-patch < FILE, or name the file");
        }
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).context("cannot read the patch on stdin")?;
        Ok(text)
    }
}
