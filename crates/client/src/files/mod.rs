//! Files on the server: read, write, stream, walk, watch, transfer.

mod copy_within;
mod download;
mod entry_name;
mod local;
mod reader;
mod replacement;
mod transfer;
mod upload;
mod walk;
mod watch;
mod writer;

pub use reader::FileReader;
pub use transfer::{TransferOptions, TransferProgress, TransferReport};
pub use walk::{Walk, WalkItem};
pub use watch::{Changes, Watch};
pub use writer::FileWriter;

use std::sync::Arc;

use bytes::Bytes;
use codex_exec_server_protocol::files::*;
use codex_exec_server_protocol::{Effect, FileCall, PathUri, SandboxContext, call};

use crate::channel::Channel;
use crate::client::ExecServerClient;
use crate::error::ExecServerError;

/// File operations on the server, optionally under a sandbox policy. Cheap to clone.
///
/// ```no_run
/// # async fn run(client: codex_exec_client::ExecServerClient) -> Result<(), Box<dyn std::error::Error>> {
/// use codex_exec_client::{PermissionProfile, SandboxContext};
///
/// let path = "/srv/app/notes.txt".parse()?;
/// let files = client.files();
/// files.write_file(&path, "hello").await?;
/// assert_eq!(files.read_file(&path).await?, "hello");
///
/// let careful = files.in_sandbox(SandboxContext::new(PermissionProfile::read_only()));
/// assert!(careful.write_file(&path, "bye").await.is_err());
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Files {
    pub(crate) client: ExecServerClient,
    pub(crate) sandbox: Option<SandboxContext>,
}

impl ExecServerClient {
    /// File operations on the server.
    pub fn files(&self) -> Files {
        Files { client: self.clone(), sandbox: None }
    }
}

impl Files {
    /// The same operations under this sandbox policy; `None` removes it.
    #[must_use]
    pub fn in_sandbox(&self, sandbox: impl Into<Option<SandboxContext>>) -> Self {
        Self { client: self.client.clone(), sandbox: sandbox.into() }
    }

    /// Calls any filesystem method under the sandbox policy.
    pub async fn call<C: FileCall>(
        &self,
        params: C::Params,
    ) -> Result<C::Response, ExecServerError> {
        self.client.call_in::<C>(params, self.sandbox.as_ref()).await
    }

    /// Calls a method on this channel only, see [`Shared::call_on`](crate::shared::Shared::call_on).
    async fn call_on<C: FileCall>(
        &self,
        channel: &Arc<Channel>,
        params: C::Params,
    ) -> Result<C::Response, ExecServerError> {
        let params = C::with_sandbox(params, self.sandbox.as_ref());
        let timeout = self.client.timeout(C::METHOD);
        self.client.shared.call_on::<C>(channel, &params, C::effect(&params), timeout).await
    }

    /// Calls a method that may be repeated after a reconnect, although its params do not imply it.
    async fn call_repeatable<C: FileCall>(
        &self,
        params: C::Params,
    ) -> Result<C::Response, ExecServerError> {
        let params = C::with_sandbox(params, self.sandbox.as_ref());
        self.client.call_as::<C>(&params, Effect::Repeatable).await
    }

    /// Reads a whole file; a large one in blocks.
    pub async fn read_file(&self, path: &PathUri) -> Result<Bytes, ExecServerError> {
        let metadata = self.metadata(path).await?;
        if metadata.size <= self.client.shared.tuning.whole_file as u64 || !self.can_read_blocks() {
            let params = FsReadFileParams::new(path.clone());
            return Ok(self.call::<call::FsReadFile>(params).await?.data.0);
        }
        let mut whole = Vec::with_capacity(usize::try_from(metadata.size).unwrap_or(0));
        let mut reader = self.open(path).await?;
        while let Some(block) = reader.next_block().await? {
            whole.extend_from_slice(&block);
        }
        Ok(whole.into())
    }

    /// Replaces the content of a file, or creates it; its directory has to exist. Writes in place, so links
    /// and permissions stay; writes a large file in blocks.
    pub async fn write_file(
        &self,
        path: &PathUri,
        content: impl Into<Bytes>,
    ) -> Result<(), ExecServerError> {
        self.write_content(path, content.into(), false, None).await
    }

    /// Writes in place or, if `atomic` and the server supports it, replaces the file atomically. `mode` is
    /// for a new file.
    pub(crate) async fn write_content(
        &self,
        path: &PathUri,
        content: Bytes,
        atomic: bool,
        mode: Option<u32>,
    ) -> Result<(), ExecServerError> {
        let mode = mode.filter(|_| self.can_write_atomically());
        if content.len() <= self.client.shared.tuning.whole_file || !self.can_write_blocks() {
            self.check_one_request(content.len())?;
            let mut params = FsWriteFileParams::new(path.clone(), content);
            params.atomic = atomic && self.can_write_atomically();
            params.mode = mode;
            self.call::<call::FsWriteFile>(params).await?;
            return Ok(());
        }
        let mut writer = FileWriter::create(self.clone(), path.clone(), atomic, mode).await?;
        writer.write_bytes(content).await?;
        writer.finish().await
    }

    /// Opens a file to read it in blocks, several at once. A server without block reads sends it whole.
    pub async fn open(&self, path: &PathUri) -> Result<FileReader, ExecServerError> {
        FileReader::open(self.clone(), path.clone()).await
    }

    /// Creates or truncates a file to write it in blocks, several at once. For a server without block
    /// writes, the client buffers the content and writes it at the end.
    pub async fn create(&self, path: &PathUri) -> Result<FileWriter, ExecServerError> {
        FileWriter::create(self.clone(), path.clone(), false, None).await
    }

    /// Like [`create`](Self::create), but replaces the old content atomically at the end, if the server has
    /// the capability `fsAtomicWrite`. Other hard links keep the old content.
    pub async fn create_atomic(&self, path: &PathUri) -> Result<FileWriter, ExecServerError> {
        FileWriter::create(self.clone(), path.clone(), true, None).await
    }

    /// The metadata of a path; follows links.
    pub async fn metadata(&self, path: &PathUri) -> Result<FsGetMetadataResponse, ExecServerError> {
        self.call::<call::FsGetMetadata>(FsGetMetadataParams::new(path.clone())).await
    }

    /// Whether the path exists.
    pub async fn exists(&self, path: &PathUri) -> Result<bool, ExecServerError> {
        match self.metadata(path).await {
            Ok(_) => Ok(true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Resolves every link in the path.
    pub async fn canonicalize(&self, path: &PathUri) -> Result<PathUri, ExecServerError> {
        let params = FsCanonicalizeParams::new(path.clone());
        Ok(self.call::<call::FsCanonicalize>(params).await?.path)
    }

    /// Lists a directory.
    pub async fn read_directory(
        &self,
        path: &PathUri,
    ) -> Result<FsReadDirectoryResponse, ExecServerError> {
        self.call::<call::FsReadDirectory>(FsReadDirectoryParams::new(path.clone())).await
    }

    /// Creates a directory and its parents; does nothing if it exists.
    pub async fn create_directory(&self, path: &PathUri) -> Result<(), ExecServerError> {
        let params = FsCreateDirectoryParams::new(path.clone());
        self.call::<call::FsCreateDirectory>(params).await?;
        Ok(())
    }

    /// Removes a file, a link or a tree.
    pub async fn remove(&self, params: FsRemoveParams) -> Result<(), ExecServerError> {
        self.call::<call::FsRemove>(params).await?;
        Ok(())
    }

    /// Copies a file, a link, or with `recursive` a tree, on the server.
    pub async fn copy(
        &self,
        source: &PathUri,
        destination: &PathUri,
        recursive: bool,
    ) -> Result<(), ExecServerError> {
        let params = FsCopyParams::new(source.clone(), destination.clone(), recursive);
        self.call::<call::FsCopy>(params).await?;
        Ok(())
    }

    /// Walks a tree of any size.
    pub fn walk(&self, path: &PathUri, options: FsWalkOptions) -> Walk {
        Walk::new(self.clone(), path.clone(), options)
    }

    pub(crate) fn can_read_blocks(&self) -> bool {
        self.sandbox.is_none() || self.client.capabilities().sandboxed_file_streaming
    }

    pub(crate) fn can_write_blocks(&self) -> bool {
        self.can_read_blocks() && self.client.capabilities().file_write_streaming
    }

    /// Whether handles can be persistent, that is, outlive their connection.
    pub(crate) fn can_keep_handles(&self) -> bool {
        self.sandbox.is_none() && self.client.capabilities().fs_keep_handles
    }

    pub(crate) fn can_write_atomically(&self) -> bool {
        self.client.capabilities().fs_atomic_write
    }

    pub(crate) fn can_rename(&self) -> bool {
        self.client.capabilities().fs_rename_link_mode
    }

    /// The largest content that fits into one request as base64, in bytes.
    pub(crate) fn largest_one_request(&self) -> usize {
        (self.client.shared.tuning.connection.message_bytes / 4 * 3).saturating_sub(64 << 10)
    }

    pub(crate) fn check_one_request(&self, len: usize) -> Result<(), ExecServerError> {
        if len <= self.largest_one_request() {
            return Ok(());
        }
        Err(ExecServerError::Unsupported {
            what: format!("receive a file of {len} bytes"),
            instead: format!(
                "it accepts files of up to {} bytes; split or compress it",
                self.largest_one_request()
            ),
        })
    }
}
