//! Downloads: files and trees on the server, copied to this machine.
//!
//! Invariant: a download appears under its name only when it is complete, and replaces nothing but a
//! regular file. Nothing that the server sends makes it write outside `local`: every name passes
//! `entry_name.rs`, and a link below `local` that leads out of it is not followed.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use codex_exec_server_protocol::PathUri;
use codex_exec_server_protocol::files::*;
use futures_util::{StreamExt, stream};
use tokio::io::AsyncWriteExt;

use super::replacement::{Replacement, remove_leftovers};
use super::transfer::{Counters, affects_one_file, tolerate_file_error, write_error};
use super::{Files, TransferOptions, TransferReport, entry_name, local};
use crate::error::ExecServerError;

impl Files {
    /// Copies a file or a tree on the server to `local`, which becomes that file or directory. Follows a
    /// link at `local`; an existing file keeps its owner and permissions, a new one gets those of its source
    /// without the bits of the umask. Refuses to replace a pipe, a
    /// socket or a device.
    pub async fn download(
        &self,
        remote: &PathUri,
        local: impl AsRef<Path>,
        options: &TransferOptions,
    ) -> Result<TransferReport, ExecServerError> {
        let local = local.as_ref();
        let metadata = self.metadata(remote).await?;
        if !metadata.is_directory {
            remove_leftovers(local.parent().unwrap_or(local));
            let counters = Counters::new(options, 1, metadata.size);
            self.download_file(remote, local, &counters, true).await?;
            return Ok(counters.report());
        }
        options.check_directory(&local::display(remote))?;
        let mut tree = self.scan_tree(remote, local, options).await?;
        let counters = Counters::new(options, tree.files.len() as u64, 0);
        let (root, deferred_modes) = tree.make_directories().await?;
        for (directory, _) in &tree.directories {
            remove_leftovers(directory);
        }
        let download = |(from, to): (PathUri, PathBuf)| {
            let (counters, root) = (&counters, &root);
            async move {
                let downloaded = match local::require_below(root, &to).map_err(write_error(&to)) {
                    Ok(()) => self.download_file(&from, &to, counters, false).await,
                    Err(error) => Err(error),
                };
                tolerate_file_error(downloaded)
            }
        };
        tree.failed.extend(counters.transfer_each(tree.files, download).await?);
        for (directory, mode) in deferred_modes.iter().rev() {
            let set = local::set_directory_mode(directory, *mode).map_err(write_error(directory));
            tree.failed.extend(tolerate_file_error(set)?);
        }
        Ok(counters.report_tree(tree.directories.len(), tree.skipped, tree.failed))
    }

    /// Scans a tree directory by directory: unlike `fs/walk`, a listing includes links to files.
    pub(super) async fn scan_tree(
        &self,
        remote: &PathUri,
        local: &Path,
        options: &TransferOptions,
    ) -> Result<Tree, ExecServerError> {
        let mut tree = Tree::default();
        let mut level = vec![(remote.clone(), local.to_owned())];
        while !level.is_empty() {
            let scanned: Vec<_> = stream::iter(level)
                .map(|(from, to)| async move {
                    let scanned = self.scan_directory(&from, from == *remote).await;
                    (from, to, scanned)
                })
                .buffered(self.client.shared.tuning.file_in_flight.max(1))
                .collect()
                .await;
            level = Vec::new();
            for (from, to, scanned) in scanned {
                match scanned {
                    Ok(Scanned { listed: None, .. }) => {
                        let shown = local::display(&from);
                        tree.skipped.push(format!("{shown}: a link to a directory"));
                    }
                    Ok(Scanned { listed: Some(listed), mode }) => {
                        level.extend(tree.add_entries(&from, &to, listed));
                        tree.directories.push((to, mode));
                        let seen = tree.directories.len() + tree.files.len() + level.len();
                        if seen > options.max_entries {
                            return Err(ExecServerError::Invalid(format!(
                                "{} has more than {} entries; copy its parts instead",
                                local::display(remote),
                                options.max_entries
                            )));
                        }
                    }
                    Err(error) if from != *remote && affects_one_file(&error) => {
                        tree.failed.push(error.for_people());
                        tree.directories.push((to, None));
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(tree)
    }

    async fn scan_directory(
        &self,
        path: &PathUri,
        is_root: bool,
    ) -> Result<Scanned, ExecServerError> {
        let metadata = self.metadata(path).await?;
        let mode = metadata.mode.map(|mode| mode & 0o777);
        let is_link = metadata.is_symlink && !is_root;
        let listed = if is_link { None } else { Some(self.read_directory(path).await?) };
        Ok(Scanned { mode, listed })
    }

    async fn download_file(
        &self,
        remote: &PathUri,
        local: &Path,
        counters: &Counters,
        size_known: bool,
    ) -> Result<(), ExecServerError> {
        let mut reader = self.open(remote).await?;
        let before = reader.metadata().clone();
        if !size_known {
            counters.total_bytes.fetch_add(before.size, Ordering::Relaxed);
        }
        let replacement = Replacement::begin(local).map_err(write_error(local))?;
        let file = replacement.file().try_clone().map_err(write_error(local))?;
        let mut file = tokio::fs::File::from_std(file);
        while let Some(block) = reader.next_block().await? {
            file.write_all(&block).await.map_err(write_error(local))?;
            counters.add(remote, block.len() as u64);
        }
        file.flush().await.map_err(write_error(local))?;
        let after = self.metadata(remote).await?;
        if (after.size, after.modified_at_ms) != (before.size, before.modified_at_ms) {
            return Err(ExecServerError::Invalid(format!(
                "{remote} changed while it was being copied, so the copy was discarded; copy it \
                 again"
            )));
        }
        replacement.commit(before.mode.unwrap_or(0o644)).map_err(write_error(local))?;
        counters.file_done(remote);
        Ok(())
    }
}

/// A tree on the server, and its local paths.
#[derive(Default)]
pub(super) struct Tree {
    /// Directories and their permission bits if known, parents first, beginning with the root.
    pub directories: Vec<(PathBuf, Option<u32>)>,
    pub files: Vec<(PathUri, PathBuf)>,
    pub skipped: Vec<String>,
    pub failed: Vec<String>,
}

/// A scanned directory, or a link to one.
struct Scanned {
    mode: Option<u32>,
    /// `None` for a link.
    listed: Option<FsReadDirectoryResponse>,
}

impl Tree {
    /// Adds the entries of a directory; returns the directories to scan next.
    fn add_entries(
        &mut self,
        directory: &PathUri,
        local: &Path,
        listed: FsReadDirectoryResponse,
    ) -> Vec<(PathUri, PathBuf)> {
        let shown = local::display(directory);
        let mut directories = Vec::new();
        for entry in listed.entries {
            let checked = entry_name::checked(directory, &entry).and_then(|(path, name)| {
                let to = local.join(local::native(&name));
                match to.as_os_str().len() < local::MAX_PATH {
                    true => Ok((path, to)),
                    false => Err("its path is too long"),
                }
            });
            let (path, to) = match checked {
                Ok(checked) => checked,
                Err(why) => {
                    self.failed.push(format!("cannot read {shown}/{}: {why}", entry.file_name));
                    continue;
                }
            };
            if entry.is_directory {
                directories.push((path, to));
            } else if entry.is_file {
                self.files.push((path, to));
            } else {
                self.skipped.push(format!("{shown}/{}: not a regular file", entry.file_name));
            }
        }
        if listed.truncated {
            self.failed.push(format!("cannot read {shown}: more names than the server lists"));
        }
        let dead = listed.dead_links.iter();
        self.skipped.extend(dead.map(|name| format!("{shown}/{name}: a broken link")));
        directories
    }

    /// Creates the directories. A new one gets the permission bits of its source, without those of the
    /// umask, while it is empty. Returns the root with its links resolved, and the bits that would prevent
    /// writing into a directory, to be set at the end.
    async fn make_directories(
        &mut self,
    ) -> Result<(PathBuf, Vec<(PathBuf, u32)>), ExecServerError> {
        let mut deferred_modes = Vec::new();
        let mut root = PathBuf::new();
        let umask = local::umask();
        for (at, (directory, mode)) in self.directories.iter().enumerate() {
            let is_new = !directory.exists();
            let mut made = match at {
                0 => tokio::fs::create_dir_all(directory).await,
                _ if is_new => match local::require_below(&root, directory) {
                    Ok(()) => tokio::fs::create_dir(directory).await,
                    Err(error) => Err(error),
                },
                _ => local::require_below(&root, directory),
            };
            if at == 0 && made.is_ok() {
                root = directory.canonicalize().map_err(write_error(directory))?;
            }
            if let Some(mode) = mode.filter(|_| is_new && made.is_ok()) {
                let mode = mode & !umask;
                made = local::set_directory_mode(directory, mode | 0o700);
                if mode & 0o700 != 0o700 {
                    deferred_modes.push((directory.clone(), mode));
                }
            }
            let made = made.map_err(write_error(directory));
            if at == 0 {
                made?;
            } else {
                self.failed.extend(tolerate_file_error(made)?);
            }
        }
        Ok((root, deferred_modes))
    }
}
