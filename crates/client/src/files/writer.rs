//! A file written as a stream of bytes, several blocks under way at once.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use codex_exec_server_protocol::files::*;
use codex_exec_server_protocol::{PathUri, call};
use futures_util::Stream;
use futures_util::stream::FuturesUnordered;
use tokio::io::AsyncWrite;

use super::Files;
use crate::error::ExecServerError;

type Work = Pin<Box<dyn Future<Output = Result<(), ExecServerError>> + Send>>;

/// A file of the server, written in order, see [`Files::create`].
///
/// The content is complete once [`finish`](Self::finish) or `shutdown` has succeeded. A connection
/// that drops before fails the writer: what the server has then is a part of the file, unless it was
/// [created atomically](Files::create_atomic).
pub struct FileWriter {
    files: Files,
    path: PathUri,
    /// `None` where the file is written whole at the end.
    handle: Option<String>,
    atomic: bool,
    /// Bits of the file if it is new.
    permissions: Option<u32>,
    buffer: BytesMut,
    /// Where the buffer starts.
    offset: u64,
    under_way: FuturesUnordered<Work>,
    closing: Option<Work>,
    failed: Option<ExecServerError>,
    finished: bool,
}

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
            files.call::<call::FsOpen>(params).await?;
            handle = Some(id);
        }
        Ok(Self {
            files,
            path,
            handle,
            atomic,
            permissions,
            buffer: BytesMut::new(),
            offset: 0,
            under_way: FuturesUnordered::new(),
            closing: None,
            failed: None,
            finished: false,
        })
    }

    /// Writes all of it, without a copy where it is large.
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

    /// Writes what is left and closes the file.
    pub async fn finish(mut self) -> Result<(), ExecServerError> {
        std::future::poll_fn(|cx| self.poll_finish(cx)).await
    }

    fn block(&self) -> usize {
        self.files.client.shared.tuning.file_block.clamp(1, 1 << 20)
    }

    /// How much more the buffer takes.
    fn room(&self) -> usize {
        match self.handle {
            Some(_) => self.block() - self.buffer.len(),
            None => (self.files.largest_whole() + 1).saturating_sub(self.buffer.len()),
        }
    }

    fn send_full(&mut self) {
        if self.handle.is_some() && self.buffer.len() == self.block() {
            let block = self.buffer.split().freeze();
            self.send(block);
        }
    }

    fn send(&mut self, block: Bytes) {
        let Some(handle) = &self.handle else { return };
        let params = FsWriteBlockParams::new(handle, self.offset, block);
        self.offset += params.chunk.len() as u64;
        let files = self.files.clone();
        self.under_way.push(Box::pin(async move {
            files.call::<call::FsWriteBlock>(params).await?;
            Ok(())
        }));
    }

    /// Waits until another block may be sent.
    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ExecServerError>> {
        if self.handle.is_none() {
            return Poll::Ready(self.files.check_whole(self.buffer.len()));
        }
        let most = self.files.client.shared.tuning.file_in_flight.max(1);
        self.poll_under_way(cx, most - 1)
    }

    /// Waits until no more than `most` blocks are under way.
    fn poll_under_way(
        &mut self,
        cx: &mut Context<'_>,
        most: usize,
    ) -> Poll<Result<(), ExecServerError>> {
        if let Some(error) = &self.failed {
            return Poll::Ready(Err(error.clone()));
        }
        while self.under_way.len() > most {
            if let Some(Err(error)) = ready!(Pin::new(&mut self.under_way).poll_next(cx)) {
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
        ready!(self.poll_under_way(cx, 0))?;
        if self.closing.is_none() {
            let files = self.files.clone();
            self.closing = Some(match self.handle.take() {
                Some(handle) => {
                    let mut params = FsCloseParams::new(handle);
                    params.commit = self.atomic;
                    Box::pin(async move {
                        files.call::<call::FsClose>(params).await?;
                        Ok(())
                    })
                }
                None => {
                    files.check_whole(self.buffer.len())?;
                    let content = self.buffer.split().freeze();
                    let mut params = FsWriteFileParams::new(self.path.clone(), content);
                    params.atomic = self.atomic;
                    params.mode = self.permissions;
                    Box::pin(async move {
                        files.call::<call::FsWriteFile>(params).await?;
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

    /// Waits for the blocks under way. A part of a block stays here until the end.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_under_way(cx, 0).map_err(Into::into)
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
            runtime.spawn(async move {
                let _ = files.call::<call::FsClose>(FsCloseParams::new(handle)).await;
            });
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
