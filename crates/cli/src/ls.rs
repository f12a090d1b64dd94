//! `codex ls`: lists a directory on the server.

use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use codex_exec_server::client::Files;
use codex_exec_server::{ExecServerError, FsGetMetadataResponse, FsReadDirectoryEntry, PathUri};
use futures_util::{StreamExt, TryStreamExt, stream};
use time::OffsetDateTime;

use crate::exit::print_stderr;
use crate::on::{ConnectOptions, OnArgs, block_on};
use crate::remote_path::{self, strip_colon};
use crate::style::{Style, name_for_stdout};

/// List a directory on the server
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codex ls --on ws://127.0.0.1:4500            the server's working directory
  codex ls -l /srv/app                         with permissions, size and time (UTC)")]
pub(crate) struct LsArgs {
    #[command(flatten)]
    on: OnArgs,

    /// Show permissions, size and modification time
    #[arg(short, long)]
    long: bool,

    /// Include names that start with a dot
    #[arg(short, long)]
    all: bool,

    /// The directory or file to list
    #[arg(value_name = "PATH", default_value = ".")]
    path: OsString,
}

/// Concurrent metadata requests.
const CONCURRENT_REQUESTS: usize = 32;

pub(crate) fn run(args: &LsArgs) -> anyhow::Result<ExitCode> {
    block_on(async {
        let connected = args.on.connect(ConnectOptions::default()).await?;
        let files = connected.client.files();
        let path = remote_path::resolve(&connected, strip_colon(&args.path))?;
        let listed = args.list(&files, &path).await;
        let Listing { text, complete } =
            listed.with_context(|| format!("cannot list {}", args.path.display()))?;
        std::io::stdout().write_all(&text)?;
        connected.close().await;
        if !complete {
            print_stderr(format_args!(
                "the list is incomplete: the directory has more names than the server lists"
            ));
            return Ok(ExitCode::FAILURE);
        }
        Ok(ExitCode::SUCCESS)
    })
}

/// What is printed.
struct Listing {
    text: Vec<u8>,
    /// Whether it has all names.
    complete: bool,
}

impl LsArgs {
    async fn list(&self, files: &Files, path: &PathUri) -> anyhow::Result<Listing> {
        let metadata = files.metadata(path).await?;
        if !metadata.is_directory {
            let about = if self.long { line(&metadata, 0) } else { String::new() };
            let name = name_for_stdout(self.path.as_bytes());
            let text = [about.as_bytes(), &name, b"\n"].concat();
            return Ok(Listing { text, complete: true });
        }
        let listed = files.read_directory(path).await?;
        let mut entries: Vec<_> = listed
            .entries
            .into_iter()
            .filter(|entry| self.all || !entry.file_name.starts_with('.'))
            .collect();
        // Not every server sorts.
        entries.sort_by(|a, b| name(a).cmp(name(b)));
        let complete = !listed.truncated;
        if !self.long {
            let lines = entries.iter().flat_map(|entry| [shown(entry), b"\n".to_vec()].concat());
            return Ok(Listing { text: lines.collect(), complete });
        }
        let long: Vec<_> = stream::iter(&entries)
            .map(|entry| async move {
                let of = match &entry.file_name_uri {
                    Some(uri) => uri.clone(),
                    None => path.join(&entry.file_name)?,
                };
                match files.metadata(&of).await {
                    Ok(metadata) => anyhow::Ok((entry, metadata)),
                    // Removed meanwhile, or not readable: show only its name.
                    Err(ExecServerError::Server { .. }) => {
                        Ok((entry, FsGetMetadataResponse::default()))
                    }
                    Err(error) => Err(error.into()),
                }
            })
            .buffered(CONCURRENT_REQUESTS)
            .try_collect()
            .await?;
        let width = long.iter().map(|(_, metadata)| metadata.size.to_string().len()).max();
        let lines = long.iter().flat_map(|(entry, metadata)| {
            let about = line(metadata, width.unwrap_or(0));
            [about.as_bytes(), &shown(entry), b"\n"].concat()
        });
        Ok(Listing { text: lines.collect(), complete })
    }
}

/// The bytes of a name.
fn name(entry: &FsReadDirectoryEntry) -> &[u8] {
    entry.file_name_uri.as_ref().map_or(entry.file_name.as_bytes(), PathUri::file_name)
}

/// A name for stdout: escaped and coloured for a terminal, unchanged for a program.
fn shown(entry: &FsReadDirectoryEntry) -> Vec<u8> {
    let shown = name_for_stdout(name(entry));
    match String::from_utf8(shown) {
        Ok(text) if entry.is_directory && std::io::stdout().is_terminal() => {
            format!("{}/", Style::stdout().blue(&text)).into_bytes()
        }
        Ok(text) => text.into_bytes(),
        Err(error) => error.into_bytes(),
    }
}

/// The columns before the name in the long format.
fn line(metadata: &FsGetMetadataResponse, width: usize) -> String {
    let kind = match metadata {
        FsGetMetadataResponse { is_symlink: true, .. } => 'l',
        FsGetMetadataResponse { is_directory: true, .. } => 'd',
        _ => '-',
    };
    let mode = match metadata.mode {
        Some(mode) => (0..9)
            .map(|bit| if mode >> (8 - bit) & 1 == 1 { ['r', 'w', 'x'][bit % 3] } else { '-' })
            .collect(),
        None => "?????????".to_owned(),
    };
    let time = time(metadata.modified_at_ms);
    format!("{kind}{mode}  {:>width$}  {time}  ", metadata.size)
}

/// `2026-11-15 22:04`, UTC.
fn time(milliseconds: i64) -> String {
    let seconds = milliseconds.div_euclid(1000);
    match OffsetDateTime::from_unix_timestamp(seconds) {
        Ok(time) if milliseconds != 0 => {
            let (date, (hour, minute, _)) = (time.date(), time.to_hms());
            let (year, month, day) = (date.year(), u8::from(date.month()), date.day());
            format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}")
        }
        _ => "               -".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_formatted_in_utc() {
        assert_eq!(time(1), "1970-01-01 00:00");
        assert_eq!(time(951_782_400_000), "2000-02-29 00:00");
        assert_eq!(time(1_794_787_440_000), "2026-11-16 00:04");
        assert_eq!(time(-60_000), "1969-12-31 23:59");
    }

    #[test]
    fn the_long_format_shows_mode_size_and_time() {
        let metadata = FsGetMetadataResponse {
            is_file: true,
            size: 42,
            modified_at_ms: 1,
            mode: Some(0o755),
            ..FsGetMetadataResponse::default()
        };
        assert_eq!(line(&metadata, 4), "-rwxr-xr-x    42  1970-01-01 00:00  ");
    }
}
