//! Writes a file as a stream of bytes, with several blocks in flight.
//!
//! Invariant: blocks have offsets, so the writer can repeat those that were in flight when a connection
//! died. That needs a persistent handle (`fsKeepHandles`); any other closes with its connection, and the
//! writer fails.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use codex_exec_server_protocol::files::*;
use codex_exec_server_protocol::{PathUri, call};
use futures_util::Stream;
use futures_util::stream::FuturesUnordered;
use tokio::io::AsyncWrite;

use super::Files;
use crate::channel::Channel;
use crate::error::ExecServerError;

type Work = Pin<Box<dyn Future<Output = Result<(), ExecServerError>> + Send>>;

/// A file on the server, open for writing, from [`Files::create`].
///
/// The content is complete once [`finish`](Self::finish) or `shutdown` has succeeded. With the capability
/// `fsKeepHandles` the writer survives a dropped connection. Without it the writer fails, and the server
/// has a part of the file, unless it was [created atomically](Files::create_atomic).
pub struct FileWriter {
    files: Files,
    path: PathUri,
    /// `None` if the file is written by one request at the end.
    handle: Option<Handle>,
    atomic: bool,
    /// Permission bits of a new file.
    permissions: Option<u32>,
    buffer: BytesMut,
    /// The offset of the buffer.
    offset: u64,
    in_flight: FuturesUnordered<Work>,
    closing: Option<Work>,
    failed: Option<ExecServerError>,
    finished: bool,
}

#[derive(Clone)]
struct Handle {
    id: String,
    /// The channel it is bound to; `None` if the handle is persistent.
    channel: Option<Arc<Channel>>,
}

/// The smallest block after a lost connection, in bytes.
const MIN_BLOCK: usize = 4 << 10;

impl FileWriter {
    pub(super) async fn create(
        files: Files,
        path: PathUri,
        atomic: bool,
        permissions: Option<u32>,
    ) -> Result<Self, ExecServerError> {
        let mut handle = None;
        let atomic = atomic && files.can_write_atomically();
        let permissions = permissions.filter(|_| files.can_write_atomically());
        if files.can_write_blocks() {
            let id = files.client.shared.fresh_id("w");
            let mode = if atomic { FsOpenMode::ReplaceAtomic } else { FsOpenMode::Replace };
            let mut params = FsOpenParams::new(&id, path.clone(), mode);
            params.permissions = permissions;
            params.keep = files.can_keep_handles();
            let channel = match params.keep {
                true => {
                    files.call_repeatable::<call::FsOpen>(params).await?;
                    None
                }
                false => {
                    let channel = files.client.shared.channel().await?;
                    files.call_on::<call::FsOpen>(&channel, params).await?;
                    Some(channel)
                }
            };
            handle = Some(Handle { id, channel });
        }
        Ok(Self {
            files,
            path,
            handle,
            atomic,
            permissions,
            buffer: BytesMut::new(),
            offset: 0,
            in_flight: FuturesUnordered::new(),
            closing: None,
            failed: None,
            finished: false,
        })
    }

    /// Writes all bytes; does not copy whole blocks.
    pub async fn write_bytes(&mut self, mut bytes: Bytes) -> Result<(), ExecServerError> {
        while !bytes.is_empty() {
            std::future::poll_fn(|cx| self.poll_room(cx)).await?;
            let len = self.room().min(bytes.len());
            if self.buffer.is_empty() && len == self.block() && self.handle.is_some() {
                let block = bytes.split_to(len);
                self.send(block);
            } else {
                self.buffer.extend_from_slice(&bytes.split_to(len));
                self.send_full();
            }
        }
        Ok(())
    }

    /// Writes the rest and closes the file.
    pub async fn finish(mut self) -> Result<(), ExecServerError> {
        std::future::poll_fn(|cx| self.poll_finish(cx)).await
    }

    fn block(&self) -> usize {
        self.files.client.shared.tuning.file_block.clamp(1, 1 << 20)
    }

    /// How many more bytes the buffer accepts.
    fn room(&self) -> usize {
        match self.handle {
            Some(_) => self.block() - self.buffer.len(),
            None => (self.files.largest_one_request() + 1).saturating_sub(self.buffer.len()),
        }
    }

    fn send_full(&mut self) {
        if self.handle.is_some() && self.buffer.len() == self.block() {
            let block = self.buffer.split().freeze();
            self.send(block);
        }
    }

    fn send(&mut self, block: Bytes) {
        let Some(handle) = self.handle.clone() else { return };
        let offset = self.offset;
        self.offset += block.len() as u64;
        self.in_flight.push(Box::pin(handle.write(self.files.clone(), offset, block)));
    }

    /// Waits until another block may be sent.
    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ExecServerError>> {
        if self.handle.is_none() {
            return Poll::Ready(self.files.check_one_request(self.buffer.len()));
        }
        let max = self.files.client.shared.tuning.file_in_flight.max(1);
        self.poll_in_flight(cx, max - 1)
    }

    /// Waits until at most `max` blocks are in flight.
    fn poll_in_flight(
        &mut self,
        cx: &mut Context<'_>,
        max: usize,
    ) -> Poll<Result<(), ExecServerError>> {
        if let Some(error) = &self.failed {
            return Poll::Ready(Err(error.clone()));
        }
        while self.in_flight.len() > max {
            if let Some(Err(error)) = ready!(Pin::new(&mut self.in_flight).poll_next(cx)) {
                self.failed = Some(error.clone());
                return Poll::Ready(Err(error));
            }
        }
        Poll::Ready(Ok(()))
    }

    fn poll_finish(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ExecServerError>> {
        if self.finished {
            return Poll::Ready(Ok(()));
        }
        if !self.buffer.is_empty() && self.handle.is_some() {
            let block = self.buffer.split().freeze();
            self.send(block);
        }
        ready!(self.poll_in_flight(cx, 0))?;
        if self.closing.is_none() {
            let files = self.files.clone();
            self.closing = Some(match self.handle.take() {
                Some(handle) => {
                    let commit = self.atomic;
                    Box::pin(async move { handle.close(&files, commit).await })
                }
                None => {
                    files.check_one_request(self.buffer.len())?;
                    let content = self.buffer.split().freeze();
                    let mut params = FsWriteFileParams::new(self.path.clone(), content);
                    params.atomic = self.atomic;
                    params.mode = self.permissions;
                    Box::pin(async move {
                        files.call_repeatable::<call::FsWriteFile>(params).await?;
                        Ok(())
                    })
                }
            });
        }
        if let Some(closing) = &mut self.closing {
            let closed = ready!(closing.as_mut().poll(cx));
            self.closing = None;
            if let Err(error) = closed {
                self.failed = Some(error.clone());
                return Poll::Ready(Err(error));
            }
        }
        self.finished = true;
        Poll::Ready(Ok(()))
    }
}

impl Handle {
    /// Writes a block. After a lost connection it writes smaller pieces, so that writing makes progress
    /// even on short-lived connections.
    async fn write(
        self,
        files: Files,
        mut offset: u64,
        mut block: Bytes,
    ) -> Result<(), ExecServerError> {
        let mut max = block.len();
        while !block.is_empty() {
            let piece = block.slice(..max.min(block.len()));
            let len = piece.len();
            let params = FsWriteBlockParams::new(&self.id, offset, piece);
            let channel = match &self.channel {
                Some(channel) => channel.clone(),
                None => files.client.shared.channel().await?,
            };
            match files.call_on::<call::FsWriteBlock>(&channel, params).await {
                Ok(_) => {
                    block.advance(len);
                    offset += len as u64;
                    max = max.saturating_mul(2);
                }
                Err(error) if error.is_interrupted() && self.channel.is_none() => {
                    max = (max.min(len) / 2).max(MIN_BLOCK);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    async fn close(self, files: &Files, commit: bool) -> Result<(), ExecServerError> {
        let mut params = FsCloseParams::new(self.id);
        params.commit = commit;
        match &self.channel {
            Some(channel) => files.call_on::<call::FsClose>(channel, params).await?,
            None => files.call_repeatable::<call::FsClose>(params).await?,
        };
        Ok(())
    }
}

impl AsyncWrite for FileWriter {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.finished {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        ready!(self.poll_room(cx))?;
        let len = self.room().min(bytes.len());
        self.buffer.extend_from_slice(&bytes[..len]);
        self.send_full();
        Poll::Ready(Ok(len))
    }

    /// Waits for the blocks in flight. A partial block stays in the buffer until the end.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_in_flight(cx, 0).map_err(Into::into)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_finish(cx).map_err(Into::into)
    }
}

impl Drop for FileWriter {
    fn drop(&mut self) {
        if let Some(handle) = self.handle.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let files = self.files.clone();
            runtime.spawn(async move { handle.close(&files, false).await });
        }
    }
}

impl fmt::Debug for FileWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileWriter")
            .field("path", &self.path)
            .field("offset", &self.offset)
            .finish_non_exhaustive()
    }
}
