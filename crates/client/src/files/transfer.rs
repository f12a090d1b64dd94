//! Uploads and downloads of files and trees.
//!
//! Invariant: a download appears under its name only when it is complete, and so does an upload to a
//! server with the capability `fsAtomicWrite`. An upload that a dropped connection interrupts starts
//! over.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use codex_exec_server_protocol::files::*;
use codex_exec_server_protocol::{PathUri, call};
use futures_util::{StreamExt, TryStreamExt, stream};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{Files, WalkItem, local};
use crate::error::ExecServerError;

type OnProgress = Arc<dyn Fn(&TransferProgress) + Send + Sync>;

/// How to transfer.
#[derive(Clone)]
pub struct TransferOptions {
    /// Files of a tree that are transferred at once. Default 4.
    pub files_at_once: usize,
    progress: Option<OnProgress>,
}

impl Default for TransferOptions {
    fn default() -> Self {
        Self { files_at_once: 4, progress: None }
    }
}

impl TransferOptions {
    /// Calls `progress` after every block and every file.
    #[must_use]
    pub fn on_progress(
        mut self,
        progress: impl Fn(&TransferProgress) + Send + Sync + 'static,
    ) -> Self {
        self.progress = Some(Arc::new(progress));
        self
    }
}

impl fmt::Debug for TransferOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TransferOptions")
            .field("files_at_once", &self.files_at_once)
            .finish_non_exhaustive()
    }
}

/// How far a transfer is.
#[derive(Debug, Clone)]
pub struct TransferProgress {
    /// The file of the server that this step was about.
    pub path: PathUri,
    /// Bytes transferred. Goes back when a file starts over.
    pub bytes: u64,
    /// Bytes to transfer, as far as they are known.
    pub total_bytes: u64,
    /// Files done.
    pub files: u64,
    /// Files to do.
    pub total_files: u64,
}

/// What was transferred.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TransferReport {
    /// Files.
    pub files: u64,
    /// Directories, the root included.
    pub directories: u64,
    /// Bytes of content.
    pub bytes: u64,
    /// What was left out and why: links to directories, devices, what could not be read.
    pub skipped: Vec<String>,
}

/// Counters that files of one transfer share.
struct Count {
    options: TransferOptions,
    bytes: AtomicU64,
    total_bytes: AtomicU64,
    files: AtomicU64,
    total_files: u64,
    /// The server does not know permission bits.
    no_modes: AtomicBool,
}

impl Count {
    fn new(options: &TransferOptions, total_files: u64, total_bytes: u64) -> Self {
        Self {
            options: options.clone(),
            bytes: AtomicU64::new(0),
            total_bytes: AtomicU64::new(total_bytes),
            files: AtomicU64::new(0),
            total_files,
            no_modes: AtomicBool::new(false),
        }
    }

    fn tell(&self, path: &PathUri) {
        if let Some(progress) = &self.options.progress {
            progress(&TransferProgress {
                path: path.clone(),
                bytes: self.bytes.load(Ordering::Relaxed),
                total_bytes: self.total_bytes.load(Ordering::Relaxed),
                files: self.files.load(Ordering::Relaxed),
                total_files: self.total_files,
            });
        }
    }

    fn add(&self, path: &PathUri, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.tell(path);
    }

    fn file_done(&self, path: &PathUri) {
        self.files.fetch_add(1, Ordering::Relaxed);
        self.tell(path);
    }

    fn report(&self, directories: u64, skipped: Vec<String>) -> TransferReport {
        TransferReport {
            files: self.files.load(Ordering::Relaxed),
            directories,
            bytes: self.bytes.load(Ordering::Relaxed),
            skipped,
        }
    }
}

impl Files {
    /// Copies a file or a tree of this side to `remote`, which becomes that file or directory.
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
        let metadata = tokio::fs::metadata(local).await.map_err(reading(local))?;
        if !metadata.is_dir() {
            let count = Count::new(options, 1, metadata.len());
            self.upload_file(local, remote, &count).await?;
            return Ok(count.report(0, Vec::new()));
        }
        let tree = Tree::read(local).await?;
        let count = Count::new(options, tree.files.len() as u64, tree.bytes);
        self.create_directory(remote).await?;
        for directory in &tree.directories {
            self.create_directory(&local::below(remote, directory)?).await?;
        }
        stream::iter(&tree.files)
            .map(|file| {
                let count = &count;
                async move {
                    let to = local::below(remote, file)?;
                    self.upload_file(&local.join(file), &to, count).await
                }
            })
            .buffer_unordered(options.files_at_once.max(1))
            .try_collect::<()>()
            .await?;
        Ok(count.report(1 + tree.directories.len() as u64, tree.skipped))
    }

    async fn upload_file(
        &self,
        local: &Path,
        remote: &PathUri,
        count: &Count,
    ) -> Result<(), ExecServerError> {
        let mut attempts = 0;
        loop {
            let sent = AtomicU64::new(0);
            match self.upload_once(local, remote, count, &sent).await {
                Ok(()) => break,
                // What it wrote is replaced by what it writes next.
                Err(error) if error.is_handle_gone() => {
                    attempts += 1;
                    if attempts > self.client.shared.tuning.transfer_retries {
                        return Err(error);
                    }
                    tracing::debug!(%error, "an upload starts over");
                    count.bytes.fetch_sub(sent.load(Ordering::Relaxed), Ordering::Relaxed);
                }
                Err(error) => return Err(error),
            }
        }
        count.file_done(remote);
        Ok(())
    }

    async fn upload_once(
        &self,
        local: &Path,
        remote: &PathUri,
        count: &Count,
        sent: &AtomicU64,
    ) -> Result<(), ExecServerError> {
        let add = |bytes: u64| {
            sent.fetch_add(bytes, Ordering::Relaxed);
            count.add(remote, bytes);
        };
        let mut file = tokio::fs::File::open(local).await.map_err(reading(local))?;
        let before = file.metadata().await.map_err(reading(local))?;
        if before.len() <= self.client.shared.tuning.file_block as u64 {
            let mut content = Vec::new();
            file.read_to_end(&mut content).await.map_err(reading(local))?;
            let bytes = content.len() as u64;
            let mut params = FsWriteFileParams::new(remote.clone(), content);
            params.atomic = self.can_write_atomically();
            self.call::<call::FsWriteFile>(params).await?;
            add(bytes);
        } else {
            let mut writer = self.create_atomic(remote).await?;
            let mut block = bytes::BytesMut::new();
            loop {
                block.reserve(self.client.shared.tuning.file_block);
                let n = file.read_buf(&mut block).await.map_err(reading(local))?;
                if n == 0 {
                    break;
                }
                writer.write_bytes(block.split().freeze()).await?;
                add(n as u64);
            }
            writer.finish().await?;
        }
        let after = tokio::fs::metadata(local).await.map_err(reading(local))?;
        if !local::same(&before, &after) {
            return Err(ExecServerError::Invalid(format!(
                "{} was changed while it was copied, so the copy may be a mixture; copy it again",
                local.display()
            )));
        }
        self.copy_mode(&before, remote, count).await
    }

    /// Keeps a program executable, where the server can.
    async fn copy_mode(
        &self,
        local: &std::fs::Metadata,
        remote: &PathUri,
        count: &Count,
    ) -> Result<(), ExecServerError> {
        let Some(mode) = local::mode(local).filter(|mode| mode & 0o111 != 0) else {
            return Ok(());
        };
        if count.no_modes.load(Ordering::Relaxed) {
            return Ok(());
        }
        let params = FsSetModeParams::new(remote.clone(), mode & 0o777);
        match self.call::<call::FsSetMode>(params).await {
            Err(error) if error.is_method_not_found() => {
                count.no_modes.store(true, Ordering::Relaxed);
                Ok(())
            }
            other => other.map(|_| ()),
        }
    }

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
        stream::iter(&files)
            .map(|(from, to)| self.download_file(from, to, &count, false))
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

/// A tree of this side.
struct Tree {
    /// Relative, each after its parent.
    directories: Vec<PathBuf>,
    files: Vec<PathBuf>,
    bytes: u64,
    skipped: Vec<String>,
}

impl Tree {
    async fn read(root: &Path) -> Result<Self, ExecServerError> {
        let mut tree =
            Self { directories: Vec::new(), files: Vec::new(), bytes: 0, skipped: Vec::new() };
        let mut todo = vec![PathBuf::new()];
        while let Some(directory) = todo.pop() {
            let whole = root.join(&directory);
            let mut entries = tokio::fs::read_dir(&whole).await.map_err(reading(&whole))?;
            while let Some(entry) = entries.next_entry().await.map_err(reading(&whole))? {
                let path = directory.join(entry.file_name());
                let kind = entry.file_type().await.map_err(reading(&whole))?;
                if kind.is_dir() {
                    tree.directories.push(path.clone());
                    todo.push(path);
                    continue;
                }
                match tokio::fs::metadata(entry.path()).await {
                    Ok(metadata) if metadata.is_file() => {
                        tree.bytes += metadata.len();
                        tree.files.push(path);
                    }
                    Ok(_) => tree.skipped.push(format!("{}: not a file", path.display())),
                    Err(error) => tree.skipped.push(format!("{}: {error}", path.display())),
                }
            }
        }
        Ok(tree)
    }
}

fn reading(path: &Path) -> impl FnOnce(std::io::Error) -> ExecServerError + use<> {
    let doing = format!("cannot read {}", path.display());
    move |error| ExecServerError::local(doing, error)
}

fn writing(path: &Path) -> impl FnOnce(std::io::Error) -> ExecServerError + use<> {
    let doing = format!("cannot write {}", path.display());
    move |error| ExecServerError::local(doing, error)
}
