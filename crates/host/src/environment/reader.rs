//! Looks at files for a discovery, by the same operations as `fs/*` requests and under the same sandbox.
//!
//! Invariant: what it has read in all stays within its budgets, of which each counts bytes as they are
//! sent in JSON.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use codex_exec_server_protocol::PathUri;
use codex_exec_server_protocol::discovery::CapabilityFile;
use codex_exec_server_protocol::files::{
    FsCloseParams, FsGetMetadataParams, FsGetMetadataResponse, FsOpenMode, FsOpenParams,
    FsReadBlockParams, FsReadDirectoryEntry, FsReadDirectoryParams, FsWalkOptions, FsWalkParams,
    FsWalkResponse,
};
use tokio::sync::mpsc;

use crate::files::{AnswerMemory, Backend, FileConnection, FileError, FilesConfig, Reservation};

/// The largest file that a discovery returns.
pub(super) const MAX_FILE_BYTES: u64 = 1 << 20;

/// Memory for responses that the caller has bounded already.
struct Bounded;

impl AnswerMemory for Bounded {
    fn reserve(&self, _bytes: u64) -> Pin<Box<dyn Future<Output = Reservation> + Send + '_>> {
        Box::pin(std::future::ready(Reservation::new(())))
    }
}

/// Reads files of a discovery.
#[derive(Debug)]
pub struct Reader {
    files: FileConnection,
    backend: Backend,
    /// What may still be read, by this reader and those that share the budget.
    shared: Arc<AtomicUsize>,
}

/// A file that was looked for.
#[derive(Debug)]
pub(super) enum Looked {
    Found(CapabilityFile),
    /// There is no regular file of that name.
    Missing,
    /// There is one that is not returned, and why.
    Skipped(String),
}

impl Reader {
    /// A reader on this backend that takes from a budget, in bytes.
    pub fn new(config: Arc<FilesConfig>, backend: Backend, shared: Arc<AtomicUsize>) -> Self {
        // Nothing that is asked here notifies, and every answer is small or within the budget.
        let (unused, _) = mpsc::channel(1);
        let files = FileConnection::new(config, Arc::new(unused), Arc::new(Bounded));
        Self { files, backend, shared }
    }

    pub(super) async fn metadata(
        &self,
        path: &PathUri,
    ) -> Result<FsGetMetadataResponse, FileError> {
        let params = FsGetMetadataParams::new(path.clone());
        Ok(self.files.call(self.backend.clone(), params).await?.into_response())
    }

    pub(super) async fn walk(
        &self,
        path: &PathUri,
        options: FsWalkOptions,
    ) -> Result<FsWalkResponse, FileError> {
        let params = FsWalkParams::new(path.clone(), options);
        Ok(self.files.call(self.backend.clone(), params).await?.into_response())
    }

    pub(super) async fn entries(
        &self,
        path: &PathUri,
    ) -> Result<Vec<FsReadDirectoryEntry>, FileError> {
        let params = FsReadDirectoryParams::new(path.clone());
        Ok(self.files.call(self.backend.clone(), params).await?.into_response().entries)
    }

    /// The text of a file, as long as there is `room` for it.
    pub(super) async fn text(&self, path: &PathUri, room: &mut usize) -> Looked {
        let bytes = match self.bytes(path).await {
            Ok(bytes) => bytes,
            Err(FileError::NotRegularFile { .. }) => return Looked::Missing,
            Err(error) if is_missing(&error) => return Looked::Missing,
            Err(error) => {
                let reason = reason(&error);
                return Looked::Skipped(format!("failed to read capability file {path}: {reason}"));
            }
        };
        if bytes.len() as u64 > MAX_FILE_BYTES {
            return Looked::Skipped(format!(
                "capability file {path} exceeds the {MAX_FILE_BYTES}-byte limit"
            ));
        }
        let contents = match String::from_utf8(bytes) {
            Ok(contents) => contents,
            Err(error) => {
                let error = error.utf8_error();
                return Looked::Skipped(format!("capability file {path} is not UTF-8: {error}"));
            }
        };
        let size = encoded_len(&contents);
        let enough = size <= *room
            && self
                .shared
                .try_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(size))
                .is_ok();
        if !enough {
            return Looked::Skipped(format!(
                "capability file {path} exceeds what one discovery returns"
            ));
        }
        *room -= size;
        Looked::Found(CapabilityFile { path: path.clone(), contents })
    }

    /// At most one byte more than the limit.
    async fn bytes(&self, path: &PathUri) -> Result<Vec<u8>, FileError> {
        // A helper serves many readers.
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let handle = format!("discovery-{:x}", COUNT.fetch_add(1, Ordering::Relaxed));
        let open = FsOpenParams::new(&*handle, path.clone(), FsOpenMode::Read);
        self.files.call(self.backend.clone(), open).await?;
        let mut bytes = Vec::new();
        let mut read = Ok(());
        for len in [MAX_FILE_BYTES, 1] {
            let offset = bytes.len() as u64;
            let params = FsReadBlockParams::new(&*handle, offset, len);
            match self.files.call(self.backend.clone(), params).await {
                Ok(block) => {
                    bytes.extend_from_slice(&block.chunk);
                    if block.eof {
                        break;
                    }
                }
                Err(error) => {
                    read = Err(error);
                    break;
                }
            }
        }
        let close = FsCloseParams::new(handle);
        self.files.call(self.backend.clone(), close).await?;
        read.map(|()| bytes)
    }
}

/// How long a text is in JSON.
fn encoded_len(text: &str) -> usize {
    let escaped = |byte: u8| match byte {
        b'"' | b'\\' | b'\n' | b'\r' | b'\t' => 2,
        0..0x20 => 6,
        _ => 1,
    };
    text.bytes().map(escaped).sum()
}

/// Whether there is nothing of that name.
pub(super) fn is_missing(error: &FileError) -> bool {
    let errno = rustix::io::Errno::from_raw_os_error;
    matches!(
        error,
        FileError::Os { errno: number, .. }
            if matches!(errno(*number), rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR)
    )
}

/// Why something failed, without the path.
pub(super) fn reason(error: &FileError) -> String {
    match error {
        FileError::Os { errno, .. } | FileError::Denied { errno, .. } => {
            std::io::Error::from_raw_os_error(*errno).to_string()
        }
        other => other.to_string(),
    }
}
