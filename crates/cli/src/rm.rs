//! `codex rm`: removes files on the server.
//!
//! Two guards against mistakes. The server refuses the root, homes, its working directory, mount points, and
//! what contains one of them (`preserve` of `fs/remove`); for a server that cannot, this program checks what
//! it knows. And a person is asked before a directory that is not empty is removed.

use std::ffi::{OsStr, OsString};
use std::io::{self, IsTerminal};
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Args;
use codex_exec_server::client::Files;
use codex_exec_server::{ErrorKind, ExecServerClient, FsRemoveParams, PathUri};

use crate::confirm::Terminal;
use crate::exit::{self, CommandError};
use crate::on::{ConnectOptions, Connected, OnArgs, block_on};
use crate::remote_path::{self, strip_colon};

/// Remove files on the server
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codex rm --on ws://127.0.0.1:4500 /srv/app/old.log
  codex rm -r /srv/app/build                           a directory and its contents

rm removes a link itself, not its target. It refuses to remove the root directory, the home
directory, the server's working directory, mount points, and every directory that contains one of
them.")]
pub(crate) struct RmArgs {
    #[command(flatten)]
    on: OnArgs,

    /// Remove directories and their contents; asks first if a directory is not empty
    #[arg(short, long)]
    recursive: bool,

    /// Do not ask, and ignore files that do not exist
    #[arg(short, long)]
    force: bool,

    /// Remove PATH even if it is, or contains, a home directory, the server's working directory or a mount
    /// point; PATH is one of the files to remove
    #[arg(long, value_name = "PATH")]
    no_preserve: Vec<OsString>,

    /// Files to remove; a leading colon, as in cp, is allowed
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<OsString>,
}

pub(crate) fn run(args: &RmArgs) -> anyhow::Result<ExitCode> {
    if let Some(unused) = args.no_preserve.iter().find(|path| !args.paths.contains(path)) {
        let error = anyhow::anyhow!(
            "--no-preserve {}: it is not among the files to remove",
            unused.display()
        );
        return Err(exit::with_code(exit::USAGE)(error));
    }
    block_on(async {
        let connected = args.on.connect(ConnectOptions::default()).await?;
        let mut code = ExitCode::SUCCESS;
        for written in &args.paths {
            let removed = match removable_path(&connected, strip_colon(written)) {
                Ok(path) => args.remove(&connected.client, path, written).await,
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
fn removable_path(connected: &Connected, written: &OsStr) -> anyhow::Result<PathUri> {
    let last = written.as_bytes().split(|&byte| byte == b'/').rfind(|name| !name.is_empty());
    if matches!(last, Some(b"." | b"..")) {
        bail!("refusing to remove `.` or `..`; write the directory's name");
    }
    let path = remote_path::resolve(connected, written)?;
    if path.as_bytes() == b"/" {
        bail!("refusing to remove the root directory");
    }
    Ok(path)
}

impl RmArgs {
    async fn remove(
        &self,
        client: &ExecServerClient,
        path: PathUri,
        written: &OsString,
    ) -> anyhow::Result<()> {
        let files = client.files();
        let preserve = !self.no_preserve.contains(written);
        let server_checks = client.capabilities().fs_remove_preserve;
        let (checks, asks) = (preserve && !server_checks, self.recursive && !self.force);
        if (checks || asks) && is_directory(&files, &path).await {
            if checks {
                check_known(client, &files, &path).await?;
            }
            if asks {
                confirm(&files, &path).await?;
            }
        }
        let mut params = FsRemoveParams::new(path.clone());
        params.recursive = self.recursive;
        params.force = self.force;
        params.preserve = preserve && server_checks;
        let Err(error) = files.remove(params).await else { return Ok(()) };
        Err(match error.kind() {
            ErrorKind::Preserved => preserved(error),
            _ if !self.recursive && is_directory(&files, &path).await => {
                anyhow::anyhow!("it is a directory; add -r to remove it and its contents")
            }
            _ => error.into(),
        })
    }
}

/// Whether the path itself is a directory. Errors are those of the removal.
async fn is_directory(files: &Files, path: &PathUri) -> bool {
    let found = files.metadata(path).await;
    found.is_ok_and(|metadata| metadata.is_directory && !metadata.is_symlink)
}

fn preserved(error: impl Into<anyhow::Error>) -> anyhow::Error {
    CommandError::new(ErrorKind::Preserved, error)
        .hint("if you mean it, name the same path with --no-preserve")
        .into()
}

/// For a server without `preserve`: refuses what contains the home or the working directory that the server
/// reported.
async fn check_known(
    client: &ExecServerClient,
    files: &Files,
    path: &PathUri,
) -> anyhow::Result<()> {
    let real = files.canonicalize(path).await?;
    let info = client.info();
    let places = [
        ("the home directory", &info.user_home_dir),
        ("the server's working directory", &info.cwd),
    ];
    for (what, place) in places {
        let Some(place) = place else { continue };
        let place = files.canonicalize(place).await.unwrap_or_else(|_| place.clone());
        if place.as_path().starts_with(real.as_path()) {
            let shown = remote_path::display(&place);
            return Err(preserved(anyhow::anyhow!("refusing to remove {what}, {shown}")));
        }
    }
    Ok(())
}

/// Asks before a directory that is not empty is removed; without a terminal, refuses.
async fn confirm(files: &Files, path: &PathUri) -> anyhow::Result<()> {
    if files
        .read_directory(path)
        .await
        .is_ok_and(|listed| listed.entries.is_empty() && listed.dead_links.is_empty())
    {
        return Ok(());
    }
    // A script that only has a terminal would wait for an answer that it does not expect to give.
    let terminal = Terminal::open().ok().filter(|_| io::stdin().is_terminal());
    let Some(terminal) = terminal else {
        bail!("the directory is not empty, and there is no terminal to ask at; add -f");
    };
    let shown = remote_path::display(path);
    if !terminal.ask(format!("remove {shown} and all its contents? [y/N] ")).await {
        bail!("not removed");
    }
    Ok(())
}
