//! Files on the server: whole, streamed, walked, watched, transferred.

mod download;
mod local;
mod reader;
mod replacement;
mod transfer;
mod upload;
mod walk;
mod watch;
mod within;
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

use crate::client::ExecServerClient;
use crate::error::ExecServerError;
use crate::link::Link;

/// Files on the server, perhaps held to a sandbox. Cheap to clone.
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
    /// Files on the server.
    pub fn files(&self) -> Files {
        Files { client: self.clone(), sandbox: None }
    }
}

impl Files {
    /// The same, every request held to `sandbox`.
    #[must_use]
    pub fn in_sandbox(&self, sandbox: impl Into<Option<SandboxContext>>) -> Self {
        Self { client: self.client.clone(), sandbox: sandbox.into() }
    }

    /// Calls any filesystem method, held to the sandbox.
    pub async fn call<C: FileCall>(
        &self,
        params: C::Params,
    ) -> Result<C::Response, ExecServerError> {
        self.client.call_in::<C>(params, self.sandbox.as_ref()).await
    }

    /// Calls a method on this very connection, see [`Shared::call_on`](crate::shared::Shared::call_on).
    async fn call_on<C: FileCall>(
        &self,
        link: &Arc<Link>,
        params: C::Params,
    ) -> Result<C::Response, ExecServerError> {
        let params = C::with_sandbox(params, self.sandbox.as_ref());
        let timeout = self.client.timeout(C::METHOD);
        self.client.shared.call_on::<C>(link, &params, C::effect(&params), timeout).await
    }

    /// Calls a method that may be repeated after a reconnect although its params do not tell.
    async fn call_again<C: FileCall>(
        &self,
        params: C::Params,
    ) -> Result<C::Response, ExecServerError> {
        let params = C::with_sandbox(params, self.sandbox.as_ref());
        self.client.call_as::<C>(&params, Effect::Repeatable).await
    }

    /// The whole content of a file. A large one is read in blocks.
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

    /// Replaces the content of a file, or creates it; its directory has to exist. The file is
    /// written in place: links and permissions stay. A large one is written in blocks.
    pub async fn write_file(
        &self,
        path: &PathUri,
        content: impl Into<Bytes>,
    ) -> Result<(), ExecServerError> {
        self.write_content(path, content.into(), false, None).await
    }

    /// Writes in place, or, if `atomic` and the server can, replaces the file all at once. `mode` is
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
            self.check_whole(content.len())?;
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

    /// Opens a file for reading in blocks, several at once. A server without such reading delivers
    /// it whole.
    pub async fn open(&self, path: &PathUri) -> Result<FileReader, ExecServerError> {
        FileReader::open(self.clone(), path.clone()).await
    }

    /// Creates or truncates a file for writing in blocks, several at once. With a server without
    /// such writing the content is gathered and written whole at the end.
    pub async fn create(&self, path: &PathUri) -> Result<FileWriter, ExecServerError> {
        FileWriter::create(self.clone(), path.clone(), false, None).await
    }

    /// Like [`create`](Self::create), but the new content takes the place of the old one at the end,
    /// all at once, where the server has the capability `fsAtomicWrite`; elsewhere it is the same as
    /// `create`. Hard links to the old content stay with it.
    pub async fn create_atomic(&self, path: &PathUri) -> Result<FileWriter, ExecServerError> {
        FileWriter::create(self.clone(), path.clone(), true, None).await
    }

    /// What a path is, following links.
    pub async fn metadata(&self, path: &PathUri) -> Result<FsGetMetadataResponse, ExecServerError> {
        self.call::<call::FsGetMetadata>(FsGetMetadataParams::new(path.clone())).await
    }

    /// Whether there is something at the path.
    pub async fn exists(&self, path: &PathUri) -> Result<bool, ExecServerError> {
        match self.metadata(path).await {
            Ok(_) => Ok(true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The path with every link resolved.
    pub async fn canonicalize(&self, path: &PathUri) -> Result<PathUri, ExecServerError> {
        let params = FsCanonicalizeParams::new(path.clone());
        Ok(self.call::<call::FsCanonicalize>(params).await?.path)
    }

    /// The names in a directory.
    pub async fn read_directory(
        &self,
        path: &PathUri,
    ) -> Result<FsReadDirectoryResponse, ExecServerError> {
        self.call::<call::FsReadDirectory>(FsReadDirectoryParams::new(path.clone())).await
    }

    /// Makes a directory and its parents; one that exists is fine.
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

    /// Everything below a directory, without a limit on how much that is.
    pub fn walk(&self, path: &PathUri, options: FsWalkOptions) -> Walk {
        Walk::new(self.clone(), path.clone(), options)
    }

    pub(crate) fn can_read_blocks(&self) -> bool {
        self.sandbox.is_none() || self.client.capabilities().sandboxed_file_streaming
    }

    pub(crate) fn can_write_blocks(&self) -> bool {
        self.can_read_blocks() && self.client.capabilities().file_write_streaming
    }

    /// Whether a handle can outlive its connection.
    pub(crate) fn can_keep_handles(&self) -> bool {
        self.sandbox.is_none() && self.client.capabilities().fs_keep_handles
    }

    pub(crate) fn can_write_atomically(&self) -> bool {
        self.client.capabilities().fs_atomic_write
    }

    pub(crate) fn can_rename(&self) -> bool {
        self.client.capabilities().fs_rename_link_mode
    }

    /// How much fits into one message as base64, with room for the rest of the request.
    pub(crate) fn largest_whole(&self) -> usize {
        (self.client.shared.tuning.connection.message_bytes / 4 * 3).saturating_sub(64 << 10)
    }

    pub(crate) fn check_whole(&self, len: usize) -> Result<(), ExecServerError> {
        if len <= self.largest_whole() {
            return Ok(());
        }
        Err(ExecServerError::Unsupported {
            what: format!("receive a file of {len} bytes"),
            instead: format!(
                "it accepts files of up to {} bytes; split or compress it",
                self.largest_whole()
            ),
        })
    }
}
