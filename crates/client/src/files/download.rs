//! Files and trees of the server, copied to this side.
//!
//! Invariant: a download appears under its name only when it is complete, and takes the place of nothing
//! but a regular file.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use codex_exec_server_protocol::PathUri;
use codex_exec_server_protocol::files::*;
use futures_util::{StreamExt, TryStreamExt, stream};
use tokio::io::AsyncWriteExt;

use super::replacement::Replacement;
use super::transfer::{Count, is_of_one, keep_words, writing};
use super::{Files, TransferOptions, TransferReport, WalkItem, local};
use crate::error::ExecServerError;

impl Files {
    /// Copies a file or a tree of the server to `local`, which becomes that file or directory. A link
    /// there is followed, and a file keeps its owner and permissions. A pipe, a socket or a device is
    /// refused.
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
            return Ok(count.report());
        }
        let mut tree = self.look_through(remote, local).await?;
        let count = Count::new(options, tree.files.len() as u64, 0);
        let late = tree.make_directories().await?;
        let download = |(from, to): (PathUri, PathBuf)| {
            let count = &count;
            async move { keep_words(self.download_file(&from, &to, count, false).await) }
        };
        tree.failed.extend(count.each(tree.files, download).await?);
        for (directory, mode) in late.iter().rev() {
            let set = local::set_directory_mode(directory, *mode).map_err(writing(directory));
            tree.failed.extend(keep_words(set)?);
        }
        Ok(count.report_tree(tree.directories.len(), tree.skipped, tree.failed))
    }

    pub(super) async fn look_through(
        &self,
        remote: &PathUri,
        local: &Path,
    ) -> Result<Tree, ExecServerError> {
        let mut tree = Tree::default();
        let mut directories = vec![(remote.clone(), local.to_owned())];
        let mut unreadable = HashSet::new();
        let mut walk = self.walk(remote, FsWalkOptions::default());
        while let Some(item) = walk.try_next().await? {
            match item {
                WalkItem::Entry(entry) => {
                    let to = local.join(local::relative(&entry.path, remote)?);
                    match entry.kind {
                        FsEntryKind::Directory => directories.push((entry.path, to)),
                        FsEntryKind::File => tree.files.push((entry.path, to)),
                    }
                }
                WalkItem::Unreadable(error) => {
                    let shown = local::shown(&error.path);
                    tree.failed.push(format!("cannot read {shown}: {}", error.message));
                    unreadable.insert(error.path);
                }
            }
        }
        // A walk tells neither links to directories nor what is neither file nor directory.
        let looked: Vec<_> = stream::iter(directories)
            .map(|(from, to)| async move {
                let looked = self.look_into(&from, from == *remote).await;
                (from, to, looked)
            })
            .buffered(self.client.shared.tuning.file_in_flight.max(1))
            .collect()
            .await;
        for (from, to, looked) in looked {
            match looked {
                Ok(looked) if looked.is_link => {
                    tree.skipped.push(format!("{}: a link to a directory", local::shown(&from)));
                }
                Ok(looked) => {
                    tree.skipped.extend(looked.others);
                    tree.directories.push((to, looked.mode));
                }
                Err(error) if from != *remote && is_of_one(&error) => {
                    if !unreadable.contains(&from) {
                        tree.failed.push(error.to_string());
                    }
                    tree.directories.push((to, None));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(tree)
    }

    async fn look_into(&self, path: &PathUri, is_root: bool) -> Result<Looked, ExecServerError> {
        let metadata = self.metadata(path).await?;
        let mode = metadata.mode.map(|mode| mode & 0o777);
        let mut looked = Looked { is_link: metadata.is_symlink && !is_root, mode, others: vec![] };
        if !looked.is_link {
            let listed = self.read_directory(path).await?;
            let directory = local::shown(path);
            let others = listed.entries.iter().filter(|e| !e.is_directory && !e.is_file);
            let others = others.map(|e| format!("{directory}/{}: no file", e.file_name));
            let dead = listed.dead_links.iter();
            let dead = dead.map(|name| format!("{directory}/{name}: a link that leads nowhere"));
            looked.others = others.chain(dead).collect();
        }
        Ok(looked)
    }

    async fn download_file(
        &self,
        remote: &PathUri,
        local: &Path,
        count: &Count,
        size_known: bool,
    ) -> Result<(), ExecServerError> {
        let mut reader = self.open(remote).await?;
        let before = reader.metadata().clone();
        if !size_known {
            count.total_bytes.fetch_add(before.size, Ordering::Relaxed);
        }
        let replacement = Replacement::begin(local).map_err(writing(local))?;
        let file = replacement.file().try_clone().map_err(writing(local))?;
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
        replacement.commit(before.mode.unwrap_or(0o644)).map_err(writing(local))?;
        count.file_done(remote);
        Ok(())
    }
}

/// A tree of the server, and where it goes.
#[derive(Default)]
pub(super) struct Tree {
    /// With their bits, as far as they are known, each after its parent; the root is the first.
    pub directories: Vec<(PathBuf, Option<u32>)>,
    pub files: Vec<(PathUri, PathBuf)>,
    pub skipped: Vec<String>,
    pub failed: Vec<String>,
}

/// What a walk does not tell of a directory.
struct Looked {
    is_link: bool,
    mode: Option<u32>,
    /// What is in it and is neither file nor directory.
    others: Vec<String>,
}

impl Tree {
    /// Makes the directories. A new one gets the bits of its source while nothing is in it; bits
    /// that would keep us from putting something in it are returned, to be set at the end.
    async fn make_directories(&mut self) -> Result<Vec<(PathBuf, u32)>, ExecServerError> {
        let mut late = Vec::new();
        for (at, (directory, mode)) in self.directories.iter().enumerate() {
            let is_new = !directory.exists();
            let mut made = tokio::fs::create_dir_all(directory).await;
            if let Some(mode) = mode.filter(|_| is_new && made.is_ok()) {
                made = local::set_directory_mode(directory, mode | 0o700);
                if mode & 0o700 != 0o700 {
                    late.push((directory.clone(), mode));
                }
            }
            let made = made.map_err(writing(directory));
            if at == 0 {
                made?;
            } else {
                self.failed.extend(keep_words(made)?);
            }
        }
        Ok(late)
    }
}
