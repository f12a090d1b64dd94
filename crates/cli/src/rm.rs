//! `codex rm`: removes files on the server.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Args;
use codex_exec_server::client::Files;
use codex_exec_server::{ExecServerClient, FsRemoveParams, PathUri};

use crate::exit;
use crate::on::{ConnectOptions, OnArgs, block_on};
use crate::remote_path::{self, strip_colon};

/// Remove files on the server
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codex rm --on ws://127.0.0.1:4500 /srv/app/old.log
  codex rm -r /srv/app/build                           a directory and its contents

rm removes a link itself, not its target.")]
pub(crate) struct RmArgs {
    #[command(flatten)]
    on: OnArgs,

    /// Remove directories and their contents
    #[arg(short, long)]
    recursive: bool,

    /// Ignore files that do not exist
    #[arg(short, long)]
    force: bool,

    /// Files to remove; a leading colon, as in cp, is allowed
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<OsString>,
}

pub(crate) fn run(args: &RmArgs) -> anyhow::Result<ExitCode> {
    block_on(async {
        let connected = args.on.connect(ConnectOptions::default()).await?;
        let files = connected.client.files();
        let mut code = ExitCode::SUCCESS;
        for written in &args.paths {
            let removed = match removable_path(&connected.client, strip_colon(written)) {
                Ok(path) => args.remove(&files, path).await,
                Err(error) => Err(error),
            };
            if let Err(error) =
                removed.with_context(|| format!("cannot remove {}", written.display()))
            {
                code = exit::report(&error);
            }
        }
        connected.close().await;
        Ok(code)
    })
}

/// Resolves the path; refuses `.`, `..` and the root, which are mistakes, for example after an unset
/// variable.
fn removable_path(client: &ExecServerClient, written: &OsStr) -> anyhow::Result<PathUri> {
    let last = written.as_bytes().split(|&byte| byte == b'/').rfind(|name| !name.is_empty());
    if matches!(last, Some(b"." | b"..")) {
        bail!("refusing to remove `.` or `..`; write the directory's name");
    }
    let path = remote_path::resolve(client, written)?;
    if path.as_bytes() == b"/" {
        bail!("refusing to remove the root directory");
    }
    Ok(path)
}

impl RmArgs {
    async fn remove(&self, files: &Files, path: PathUri) -> anyhow::Result<()> {
        let mut params = FsRemoveParams::new(path.clone());
        params.recursive = self.recursive;
        params.force = self.force;
        let Err(error) = files.remove(params).await else { return Ok(()) };
        let directory = !self.recursive
            && files.metadata(&path).await.is_ok_and(|metadata| metadata.is_directory);
        Err(match directory {
            true => {
                anyhow::anyhow!("it is a directory; add -r to remove it and its contents")
            }
            false => error.into(),
        })
    }
}
