//! `codex cat`: prints files on the server.

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use codex_exec_server::PathUri;
use codex_exec_server::client::Files;
use tokio::io::AsyncWriteExt;

use crate::exit;
use crate::on::{ConnectOptions, OnArgs, block_on};
use crate::remote_path::{self, strip_colon};

/// Print files on the server
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codex cat --on ws://127.0.0.1:4500 /etc/os-release
  codex cat '~/log.gz' | gunzip | less                 quote ~ to mean the server's home directory")]
pub(crate) struct CatArgs {
    #[command(flatten)]
    on: OnArgs,

    /// Files to print; a leading colon, as in cp, is allowed
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<OsString>,
}

pub(crate) fn run(args: &CatArgs) -> anyhow::Result<ExitCode> {
    block_on(async {
        let connected = args.on.connect(ConnectOptions::default()).await?;
        let files = connected.client.files();
        let mut stdout = tokio::io::stdout();
        let mut code = ExitCode::SUCCESS;
        for written in &args.paths {
            let path = remote_path::resolve(&connected, strip_colon(written))?;
            let printed = print(&files, &path, &mut stdout).await;
            if let Err(error) =
                printed.with_context(|| format!("cannot print {}", written.display()))
            {
                code = exit::report(&error);
                if code == ExitCode::from(exit::BROKEN_PIPE) {
                    break;
                }
            }
        }
        connected.close().await;
        Ok(code)
    })
}

/// Writes a file of the server to stdout.
pub(crate) async fn print(
    files: &Files,
    path: &PathUri,
    stdout: &mut tokio::io::Stdout,
) -> anyhow::Result<()> {
    let mut reader = files.open(path).await?;
    while let Some(block) = reader.next_block().await? {
        stdout.write_all(&block).await?;
    }
    Ok(stdout.flush().await?)
}
