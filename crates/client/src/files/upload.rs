//! Uploads: local files and trees, copied to the server.
//!
//! Invariant: memory is bounded by blocks, not by the size of the source. With the capability
//! `fsAtomicWrite` an upload appears under its name only when it is complete, and not at all if the source
//! changed meanwhile. With the capability `fsKeepHandles` it continues after each dropped connection.
//! Without it, a regular file starts over; anything else (a pipe, a device) can be read only once, so an
//! interruption after the first byte is an error.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::BytesMut;
use codex_exec_server_protocol::files::*;
use codex_exec_server_protocol::{PathUri, call};
use tokio::fs::File;
use tokio::io::AsyncReadExt;

use super::transfer::{Counters, read_error, tolerate_file_error};
use super::{FileWriter, Files, TransferOptions, TransferReport, local};
use crate::error::ExecServerError;

impl Files {
    /// Copies a local file or tree to `remote`, which becomes that file or directory. Reads a pipe or a
    /// device to its end.
    ///
    /// ```no_run
    /// # async fn run(client: codex_exec_client::ExecServerClient) -> Result<(), Box<dyn std::error::Error>> {
    /// use codex_exec_client::TransferOptions;
    /// let options = TransferOptions::default()
    ///     .on_progress(|at| eprintln!("{}: {}/{} bytes", at.path, at.bytes, at.total_bytes));
    /// let report = client.files().upload("./src", &"/srv/app/src".parse()?, &options).await?;
    /// println!("{} files", report.files);
    /// # Ok(()) }
    /// ```
    pub async fn upload(
        &self,
        local: impl AsRef<Path>,
        remote: &PathUri,
        options: &TransferOptions,
    ) -> Result<TransferReport, ExecServerError> {
        let local = local.as_ref();
        let metadata = tokio::fs::metadata(local).await.map_err(read_error(local))?;
        if !metadata.is_dir() {
            let counters = Counters::new(options, 1, metadata.len());
            self.upload_file(local, remote, &counters).await?;
            return Ok(counters.report());
        }
        let mut tree = Tree::read(local, local::mode(&metadata)).await?;
        let counters = Counters::new(options, tree.files.len() as u64, tree.bytes);
        let deferred_modes =
            self.make_directories(remote, &tree.directories, &mut tree.failed).await?;
        let upload = |file: PathBuf| {
            let counters = &counters;
            async move {
                let to = local::below(remote, &file)?;
                tolerate_file_error(self.upload_file(&local.join(file), &to, counters).await)
            }
        };
        tree.failed.extend(counters.transfer_each(tree.files, upload).await?);
        self.set_deferred_modes(deferred_modes, &mut tree.failed).await?;
        Ok(counters.report_tree(tree.directories.len(), tree.skipped, tree.failed))
    }

    /// Creates the directories of a tree. A new one gets the permission bits of its source while it is
    /// empty; returns the bits that would prevent writing into it, to be set at the end.
    pub(super) async fn make_directories(
        &self,
        remote: &PathUri,
        directories: &[(PathBuf, Option<u32>)],
        failed: &mut Vec<String>,
    ) -> Result<Vec<(PathUri, u32)>, ExecServerError> {
        let can_set = self.client.capabilities().fs_rename_link_mode;
        let (mut deferred_modes, mut all_new) = (Vec::new(), false);
        for (at, (directory, mode)) in directories.iter().enumerate() {
            let to = local::below(remote, directory)?;
            let mode = mode.filter(|_| can_set);
            let is_new = mode.is_some()
                && (all_new
                    || matches!(self.metadata(&to).await, Err(error) if error.is_not_found()));
            let mut made = self.create_directory(&to).await;
            if let Some(mode) = mode.filter(|_| is_new && made.is_ok()) {
                made = self.set_mode(to.clone(), mode | 0o700).await;
                if mode & 0o700 != 0o700 {
                    deferred_modes.push((to, mode));
                }
            }
            if at == 0 {
                made?;
                all_new = is_new;
            } else {
                failed.extend(tolerate_file_error(made)?);
            }
        }
        Ok(deferred_modes)
    }

    /// Sets the permission bits that [`make_directories`](Self::make_directories) returned.
    pub(super) async fn set_deferred_modes(
        &self,
        deferred_modes: Vec<(PathUri, u32)>,
        failed: &mut Vec<String>,
    ) -> Result<(), ExecServerError> {
        for (directory, mode) in deferred_modes.into_iter().rev() {
            failed.extend(tolerate_file_error(self.set_mode(directory, mode).await)?);
        }
        Ok(())
    }

    pub(super) async fn set_mode(&self, path: PathUri, mode: u32) -> Result<(), ExecServerError> {
        self.call::<call::FsSetMode>(FsSetModeParams::new(path, mode)).await?;
        Ok(())
    }

    async fn upload_file(
        &self,
        local: &Path,
        remote: &PathUri,
        counters: &Counters,
    ) -> Result<(), ExecServerError> {
        loop {
            let mut source = Source::open(local).await?;
            let sent = AtomicU64::new(0);
            match self.upload_once(&mut source, remote, counters, &sent).await {
                Ok(()) => break,
                Err(error) if error.is_interrupted() => {
                    if !source.can_restart() {
                        return Err(self.interrupted_error(&source, remote, &error));
                    }
                    // The next attempt replaces what this one wrote.
                    tracing::debug!(%error, "restarting an upload");
                    counters.bytes.fetch_sub(sent.load(Ordering::Relaxed), Ordering::Relaxed);
                }
                Err(error) => return Err(error),
            }
        }
        counters.file_done(remote);
        Ok(())
    }

    /// The error for an interrupted upload of a source that can be read only once.
    fn interrupted_error(
        &self,
        source: &Source<'_>,
        remote: &PathUri,
        error: &ExecServerError,
    ) -> ExecServerError {
        let outcome = if source.ended && error.may_have_taken_effect() {
            format!("{remote} may be incomplete")
        } else if self.can_write_atomically() {
            "the copy was discarded".to_owned()
        } else {
            format!("{remote} may contain a part of it")
        };
        ExecServerError::Invalid(format!(
            "the connection was lost while copying {}, which can be read only once; {outcome}; copy \
             it again from its beginning ({error})",
            source.path.display()
        ))
    }

    async fn upload_once(
        &self,
        source: &mut Source<'_>,
        remote: &PathUri,
        counters: &Counters,
        sent: &AtomicU64,
    ) -> Result<(), ExecServerError> {
        let regular = source.regular;
        let add = |bytes: u64| {
            sent.fetch_add(bytes, Ordering::Relaxed);
            if !regular {
                counters.total_bytes.fetch_add(bytes, Ordering::Relaxed);
            }
            counters.add(remote, bytes);
        };
        let limit = self.client.shared.tuning.file_block;
        let start = source.start(limit).await?;
        if source.ended {
            source.check_unchanged("the copy was discarded").await?;
            let bytes = start.len() as u64;
            let mut params = FsWriteFileParams::new(remote.clone(), start.freeze());
            params.atomic = self.can_write_atomically();
            params.mode = source.mode().filter(|_| self.can_write_atomically());
            self.write_small(params).await?;
            add(bytes);
        } else {
            let mode = source.mode();
            let mut writer = FileWriter::create(self.clone(), remote.clone(), true, mode).await?;
            self.stream(source, start, &mut writer, add).await?;
            // Before the commit: the old file is better than a mixture.
            let outcome = match self.can_write_atomically() {
                true => "the copy was discarded",
                false => "the copy may mix both versions",
            };
            source.check_unchanged(outcome).await?;
            writer.finish().await?;
            self.check_size(remote, sent.load(Ordering::Relaxed)).await?;
        }
        Ok(())
    }

    /// Writes a file by one request; after a lost connection in blocks, which shrink on short-lived
    /// connections.
    async fn write_small(&self, params: FsWriteFileParams) -> Result<(), ExecServerError> {
        if !self.can_keep_handles() || !self.can_write_blocks() {
            self.call_repeatable::<call::FsWriteFile>(params).await?;
            return Ok(());
        }
        match self.call::<call::FsWriteFile>(params.clone()).await {
            Err(error) if error.is_interrupted() => {
                let FsWriteFileParams { path, data, atomic, mode, .. } = params;
                let mut writer = FileWriter::create(self.clone(), path, atomic, mode).await?;
                writer.write_bytes(data.0).await?;
                writer.finish().await
            }
            other => other.map(|_| ()),
        }
    }

    /// Writes the source to its end; `block` is its beginning.
    async fn stream(
        &self,
        source: &mut Source<'_>,
        mut block: BytesMut,
        writer: &mut FileWriter,
        add: impl Fn(u64),
    ) -> Result<(), ExecServerError> {
        while !block.is_empty() {
            let bytes = block.len() as u64;
            writer.write_bytes(block.split().freeze()).await?;
            add(bytes);
            block.reserve(self.client.shared.tuning.file_block);
            source.read(&mut block).await?;
        }
        Ok(())
    }

    /// Checks that the file has as many bytes as were sent.
    async fn check_size(&self, remote: &PathUri, sent: u64) -> Result<(), ExecServerError> {
        let size = self.metadata(remote).await?.size;
        if size == sent {
            return Ok(());
        }
        Err(ExecServerError::Invalid(format!(
            "{remote} has {size} bytes, but {sent} were sent: another process is writing to it; \
             copy it again"
        )))
    }
}

/// The source of an upload.
struct Source<'a> {
    path: &'a Path,
    file: File,
    before: std::fs::Metadata,
    /// A regular file, which can be read again.
    regular: bool,
    /// At least one byte was read.
    has_data: bool,
    /// The end was reached.
    ended: bool,
}

impl<'a> Source<'a> {
    async fn open(path: &'a Path) -> Result<Self, ExecServerError> {
        let file = File::open(path).await.map_err(read_error(path))?;
        let before = file.metadata().await.map_err(read_error(path))?;
        let regular = before.is_file();
        Ok(Self { path, file, before, regular, has_data: false, ended: false })
    }

    /// Reads up to `limit` bytes, and sets `ended` at the end. Ignores the file's size: a pipe has none,
    /// and that of a growing file is out of date.
    async fn start(&mut self, limit: usize) -> Result<BytesMut, ExecServerError> {
        let mut start = BytesMut::with_capacity(limit);
        while !self.ended && start.len() < limit {
            self.read(&mut start).await?;
        }
        Ok(start)
    }

    async fn read(&mut self, into: &mut BytesMut) -> Result<(), ExecServerError> {
        let got = self.file.read_buf(into).await.map_err(read_error(self.path))?;
        self.has_data |= got > 0;
        self.ended = got == 0;
        Ok(())
    }

    /// The permission bits for a new file; `None` unless the source is a regular file.
    fn mode(&self) -> Option<u32> {
        local::mode(&self.before).filter(|_| self.regular).map(|mode| mode & 0o777)
    }

    /// Whether the upload can start over.
    fn can_restart(&self) -> bool {
        self.regular || !(self.has_data || self.ended)
    }

    /// Checks that the file did not change meanwhile; `outcome` says in the error what became of the copy.
    async fn check_unchanged(&self, outcome: &str) -> Result<(), ExecServerError> {
        let after = tokio::fs::metadata(self.path).await.map_err(read_error(self.path))?;
        if !self.regular || local::is_unchanged(&self.before, &after) {
            return Ok(());
        }
        Err(ExecServerError::Invalid(format!(
            "{} changed while it was being copied, so {outcome}; copy it again",
            self.path.display()
        )))
    }
}

/// A local tree.
struct Tree {
    /// Relative paths and permission bits, parents first, beginning with the root.
    directories: Vec<(PathBuf, Option<u32>)>,
    files: Vec<PathBuf>,
    bytes: u64,
    skipped: Vec<String>,
    failed: Vec<String>,
}

impl Tree {
    async fn read(root: &Path, mode: Option<u32>) -> Result<Self, ExecServerError> {
        let mut tree = Self {
            directories: vec![(PathBuf::new(), mode.map(|mode| mode & 0o777))],
            files: Vec::new(),
            bytes: 0,
            skipped: Vec::new(),
            failed: Vec::new(),
        };
        let mut todo = vec![PathBuf::new()];
        while let Some(directory) = todo.pop() {
            let absolute = root.join(&directory);
            let read = tree.read_directory(&absolute, &directory, &mut todo).await;
            if directory.as_os_str().is_empty() {
                read?;
            } else {
                tree.failed.extend(tolerate_file_error(read)?);
            }
        }
        Ok(tree)
    }

    async fn read_directory(
        &mut self,
        absolute: &Path,
        directory: &Path,
        todo: &mut Vec<PathBuf>,
    ) -> Result<(), ExecServerError> {
        let mut entries = tokio::fs::read_dir(absolute).await.map_err(read_error(absolute))?;
        while let Some(entry) = entries.next_entry().await.map_err(read_error(absolute))? {
            let path = directory.join(entry.file_name());
            let shown = entry.path();
            let kind = entry.file_type().await.map_err(read_error(&shown))?;
            match tokio::fs::metadata(&shown).await {
                Ok(metadata) if kind.is_dir() => {
                    let mode = local::mode(&metadata).map(|mode| mode & 0o777);
                    self.directories.push((path.clone(), mode));
                    todo.push(path);
                }
                Ok(metadata) if metadata.is_file() => {
                    self.bytes += metadata.len();
                    self.files.push(path);
                }
                Ok(metadata) => {
                    let reason = if metadata.is_dir() {
                        "a link to a directory"
                    } else {
                        "not a regular file"
                    };
                    self.skipped.push(format!("{}: {reason}", shown.display()));
                }
                Err(error) if kind.is_symlink() && error.kind() == io::ErrorKind::NotFound => {
                    self.skipped.push(format!("{}: a broken link", shown.display()));
                }
                Err(error) => self.failed.push(read_error(&shown)(error).to_string()),
            }
        }
        Ok(())
    }
}
