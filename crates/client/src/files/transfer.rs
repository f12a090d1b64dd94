//! Options, progress and reports of uploads, downloads and copies.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use codex_exec_server_protocol::PathUri;
use futures_util::{StreamExt, TryStreamExt, stream};

use crate::error::ExecServerError;

type OnProgress = Arc<dyn Fn(&TransferProgress) + Send + Sync>;

/// Options of a transfer.
#[derive(Clone)]
#[non_exhaustive]
pub struct TransferOptions {
    /// Files of a tree to transfer at once. Default 4.
    pub concurrent_files: usize,
    /// Whether a directory is transferred with its contents. Default true; otherwise a source that is, or
    /// has meanwhile become, a directory is an error.
    pub recursive: bool,
    /// Entries of the largest tree that is downloaded or copied. Default 1,000,000; a larger tree, or one
    /// that the server makes up without end, is an error, before anything is created.
    pub max_entries: usize,
    progress: Option<OnProgress>,
}

impl Default for TransferOptions {
    fn default() -> Self {
        Self { concurrent_files: 4, recursive: true, max_entries: 1_000_000, progress: None }
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
            .field("concurrent_files", &self.concurrent_files)
            .field("recursive", &self.recursive)
            .field("max_entries", &self.max_entries)
            .finish_non_exhaustive()
    }
}

/// The progress of a transfer.
#[derive(Debug, Clone)]
pub struct TransferProgress {
    /// The file on the server that made progress.
    pub path: PathUri,
    /// Bytes transferred. Decreases if a file starts over.
    pub bytes: u64,
    /// Bytes to transfer, as far as known.
    pub total_bytes: u64,
    /// Files transferred.
    pub files: u64,
    /// Files to transfer.
    pub total_files: u64,
}

/// The result of a transfer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TransferReport {
    /// Files transferred.
    pub files: u64,
    /// Directories, including the root.
    pub directories: u64,
    /// Bytes transferred.
    pub bytes: u64,
    /// The skipped paths and why: links to directories, pipes, devices.
    pub skipped: Vec<String>,
    /// Why parts of a tree were not copied.
    pub failed: Vec<String>,
}

/// Counters of one transfer.
pub(super) struct Counters {
    options: TransferOptions,
    pub bytes: AtomicU64,
    pub total_bytes: AtomicU64,
    files: AtomicU64,
    total_files: u64,
}

impl Counters {
    pub(super) fn new(options: &TransferOptions, total_files: u64, total_bytes: u64) -> Self {
        Self {
            options: options.clone(),
            bytes: AtomicU64::new(0),
            total_bytes: AtomicU64::new(total_bytes),
            files: AtomicU64::new(0),
            total_files,
        }
    }

    fn report_progress(&self, path: &PathUri) {
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

    /// Adds bytes to transfer.
    pub(super) fn expect(&self, bytes: u64) {
        self.total_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn add(&self, path: &PathUri, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.report_progress(path);
    }

    pub(super) fn file_done(&self, path: &PathUri) {
        self.files.fetch_add(1, Ordering::Relaxed);
        self.report_progress(path);
    }

    /// The report of the files.
    pub(super) fn report(&self) -> TransferReport {
        TransferReport {
            files: self.files.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            ..TransferReport::default()
        }
    }

    /// Transfers the files of a tree, several at once. Returns the
    /// [messages](tolerate_file_error) of those that failed.
    pub(super) async fn transfer_each<T, F>(
        &self,
        files: Vec<T>,
        transfer: impl Fn(T) -> F,
    ) -> Result<Vec<String>, ExecServerError>
    where
        F: Future<Output = Result<Option<String>, ExecServerError>>,
    {
        let at_once = self.options.concurrent_files.max(1);
        let transfers = stream::iter(files).map(transfer).buffer_unordered(at_once);
        transfers.try_filter_map(async |message| Ok(message)).try_collect().await
    }

    /// The report of a tree.
    pub(super) fn report_tree(
        &self,
        directories: usize,
        skipped: Vec<String>,
        failed: Vec<String>,
    ) -> TransferReport {
        TransferReport { directories: directories as u64, skipped, failed, ..self.report() }
    }
}

impl TransferOptions {
    /// Fails if the source is a directory and the transfer is not recursive.
    pub(super) fn check_directory(&self, shown: &str) -> Result<(), ExecServerError> {
        if self.recursive {
            return Ok(());
        }
        Err(ExecServerError::Invalid(format!("{shown} is a directory, not a file")))
    }
}

/// Whether the error concerns one file, so that the rest of a tree can be copied.
pub(super) fn affects_one_file(error: &ExecServerError) -> bool {
    use io::ErrorKind::{QuotaExceeded, ReadOnlyFilesystem, StorageFull};
    match error {
        ExecServerError::Server { .. }
        | ExecServerError::Invalid(_)
        | ExecServerError::Unsupported { .. } => true,
        ExecServerError::Local { cause, .. } => {
            !matches!(cause.kind(), StorageFull | QuotaExceeded | ReadOnlyFilesystem)
        }
        _ => false,
    }
}

/// Turns an error that concerns one file into its message; any other error ends the transfer.
pub(super) fn tolerate_file_error(
    result: Result<(), ExecServerError>,
) -> Result<Option<String>, ExecServerError> {
    match result {
        Err(error) if affects_one_file(&error) => Ok(Some(error.for_people())),
        other => other.map(|()| None),
    }
}

pub(super) fn read_error(path: &Path) -> impl FnOnce(io::Error) -> ExecServerError + use<> {
    let doing = format!("cannot read {}", path.display());
    move |error| ExecServerError::local(doing, error)
}

pub(super) fn write_error(path: &Path) -> impl FnOnce(io::Error) -> ExecServerError + use<> {
    let doing = format!("cannot write {}", path.display());
    move |error| ExecServerError::local(doing, error)
}
