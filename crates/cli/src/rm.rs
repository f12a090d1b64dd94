//! `codex rm`: removes files of the other side.

use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use codex_exec_server::FsRemoveParams;
use codex_exec_server::client::Files;

use crate::exit;
use crate::on::{OnArgs, Wants, block_on};
use crate::remote_path::{self, unmarked};

/// Remove files of the other side
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codex rm --on ws://127.0.0.1:4500 /srv/app/old.log
  codex rm -r /srv/app/build                           a directory with all that is in it

A link is removed, not what it leads to.")]
pub struct RmArgs {
    #[command(flatten)]
    on: OnArgs,

    /// Remove directories with all that is in them
    #[arg(short, long)]
    recursive: bool,

    /// What is not there is fine
    #[arg(short, long)]
    force: bool,

    /// Which
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<String>,
}

pub fn run(args: &RmArgs) -> anyhow::Result<ExitCode> {
    block_on(async {
        let connected = args.on.connect(Wants::default()).await?;
        let files = connected.client.files();
        let mut code = ExitCode::SUCCESS;
        for written in &args.paths {
            let path = remote_path::resolve(&connected.client, unmarked(written))?;
            let removed = if path.as_bytes() == b"/" {
                Err(anyhow::anyhow!("that is everything; name what is in it"))
            } else {
                args.remove(&files, path).await
            };
            if let Err(error) = removed.with_context(|| format!("cannot remove {written}")) {
                code = exit::report(&error);
            }
        }
        connected.close().await;
        Ok(code)
    })
}

impl RmArgs {
    async fn remove(&self, files: &Files, path: codex_exec_server::PathUri) -> anyhow::Result<()> {
        let mut params = FsRemoveParams::new(path.clone());
        params.recursive = self.recursive;
        params.force = self.force;
        let Err(error) = files.remove(params).await else { return Ok(()) };
        let directory = !self.recursive
            && files.metadata(&path).await.is_ok_and(|metadata| metadata.is_directory);
        Err(match directory {
            true => {
                anyhow::anyhow!("it is a directory; add -r to remove it with all that is in it")
            }
            false => error.into(),
        })
    }
}
