//! Files and trees of the server, copied to this side.
//!
//! Invariant: a download appears under its name only when it is complete.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use codex_exec_server_protocol::PathUri;
use codex_exec_server_protocol::files::*;
use futures_util::{StreamExt, TryStreamExt, stream};
use tokio::io::AsyncWriteExt;

use super::transfer::{Count, writing};
use super::{Files, TransferOptions, TransferReport, WalkItem, local};
use crate::error::ExecServerError;

impl Files {
    /// Copies a file or a tree of the server to `local`, which becomes that file or directory.
    pub async fn download(
        &self,
        remote: &PathUri,
        local: impl AsRef<Path>,
        options: &TransferOptions,
    ) -> Result<TransferReport, ExecServerError> {
        let local = local.as_ref();
        let metadata = self.metadata(remote).await?;
        if !metadata.is_directory {
            let count = Count::new(options, 1, metadata.size);
            self.download_file(remote, local, &count, true).await?;
            return Ok(count.report(0, Vec::new()));
        }
        let (mut directories, mut files, mut skipped) = (Vec::new(), Vec::new(), Vec::new());
        let mut walk = self.walk(remote, FsWalkOptions::default());
        while let Some(item) = walk.try_next().await? {
            match item {
                WalkItem::Entry(entry) => {
                    let to = local.join(local::relative(&entry.path, remote)?);
                    match entry.kind {
                        FsEntryKind::Directory => directories.push(to),
                        FsEntryKind::File => files.push((entry.path, to)),
                    }
                }
                WalkItem::Unreadable(error) => {
                    skipped.push(format!("{}: {}", error.path, error.message));
                }
            }
        }
        let count = Count::new(options, files.len() as u64, 0);
        for directory in std::iter::once(local).chain(directories.iter().map(PathBuf::as_path)) {
            tokio::fs::create_dir_all(directory).await.map_err(writing(directory))?;
        }
        stream::iter(files)
            .map(|(from, to)| {
                let count = &count;
                async move { self.download_file(&from, &to, count, false).await }
            })
            .buffer_unordered(options.files_at_once.max(1))
            .try_collect::<()>()
            .await?;
        Ok(count.report(1 + directories.len() as u64, skipped))
    }

    async fn download_file(
        &self,
        remote: &PathUri,
        local: &Path,
        count: &Count,
        size_known: bool,
    ) -> Result<(), ExecServerError> {
        let directory = match local.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        if !directory.is_dir() {
            let words = format!("there is no directory {}; create it first", directory.display());
            return Err(writing(local)(io::Error::new(io::ErrorKind::NotFound, words)));
        }
        let mut reader = self.open(remote).await?;
        let before = reader.metadata().clone();
        if !size_known {
            count.total_bytes.fetch_add(before.size, Ordering::Relaxed);
        }
        let temporary = tempfile::Builder::new()
            .prefix(".download-")
            .tempfile_in(directory)
            .map_err(writing(local))?;
        let file = temporary.as_file().try_clone().map_err(writing(local))?;
        let mut file = tokio::fs::File::from_std(file);
        while let Some(block) = reader.next_block().await? {
            file.write_all(&block).await.map_err(writing(local))?;
            count.add(remote, block.len() as u64);
        }
        file.flush().await.map_err(writing(local))?;
        let after = self.metadata(remote).await?;
        if (after.size, after.modified_at_ms) != (before.size, before.modified_at_ms) {
            return Err(ExecServerError::Invalid(format!(
                "{remote} was changed while it was copied, so nothing was kept; copy it again"
            )));
        }
        // What a new file would get, plus what the source tells.
        let mode = before.mode.unwrap_or(0o644);
        local::set_mode(temporary.as_file(), mode).map_err(writing(local))?;
        temporary.persist(local).map_err(|error| writing(local)(error.error))?;
        count.file_done(remote);
        Ok(())
    }
}
