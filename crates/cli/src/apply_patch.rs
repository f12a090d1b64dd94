//! `codex apply-patch`: applies a patch to files on the server.

use std::io::{IsTerminal, Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Args;
use codex_exec_server::client::Patch;

use crate::on::{ConnectOptions, OnArgs, block_on};
use crate::policy::SandboxArgs;
use crate::remote_path;
use crate::style::Style;

/// Apply a patch to files on the server
///
/// Checks the whole patch before it writes: a patch that does not fit changes nothing. If writing a
/// file fails, that file stays as it was, and the error lists the files already changed. Prints one
/// line per changed file: A added, M modified, D deleted.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codex apply-patch < change.patch
  git diff | codex apply-patch --on build
  codex apply-patch --on ws://127.0.0.1:4500 --cwd /srv/app --sandbox workspace-write change.patch

A text that does not begin with *** Begin Patch is a unified diff, of diff -u or of git with new, deleted and
renamed files. Its hunks have to fit exactly, at their lines or near them, as with git apply; changed modes, links
and binary files are refused.

The other format:
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
pub(crate) struct ApplyPatchArgs {
    #[command(flatten)]
    on: OnArgs,

    /// Resolve the paths in the patch against this directory on the server
    #[arg(short = 'C', long, value_name = "DIR", default_value = ".")]
    cwd: String,

    #[command(flatten)]
    sandbox: SandboxArgs,

    /// Local patch file [default: stdin]
    patch: Option<PathBuf>,
}

pub(crate) fn run(args: &ApplyPatchArgs) -> anyhow::Result<ExitCode> {
    let patch = Patch::parse(&args.read()?)?;
    block_on(async {
        let sandbox = args.sandbox.or_of(args.on.settings());
        let options = ConnectOptions { sandbox: sandbox.is_given(), ..ConnectOptions::default() };
        let connected = args.on.connect(options).await?;
        let cwd = remote_path::resolve(&connected, &args.cwd)?;
        let files = connected.client.files().in_sandbox(sandbox.context(&cwd)?);
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
                .with_context(|| format!("cannot read the patch file {}", file.display()));
        }
        if std::io::stdin().is_terminal() {
            bail!("no patch given; run codex apply-patch FILE, or pipe the patch to stdin");
        }
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).context("cannot read the patch from stdin")?;
        Ok(text)
    }
}
