//! Reads a file as a stream of bytes, with several block requests in flight.
//!
//! Invariant: bytes arrive in order, each once. A handle closes with its connection; after each
//! reconnect the reader opens the file again and continues at the same offset, if it is still the same
//! file.

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use codex_exec_server_protocol::files::*;
use codex_exec_server_protocol::{PathUri, call};
use futures_util::StreamExt;
use futures_util::stream::FuturesOrdered;
use tokio::io::{AsyncRead, ReadBuf};

use super::Files;
use crate::channel::Channel;
use crate::error::ExecServerError;

/// A file on the server, open for reading, from [`Files::open`].
pub struct FileReader {
    state: State,
    metadata: FsGetMetadataResponse,
    current: Bytes,
}

/// While a block is awaited, the future owns the blocks.
enum State {
    Idle(Box<Blocks>),
    Reading(Pin<Box<dyn Future<Output = (Box<Blocks>, Block)> + Send>>),
    Poisoned,
}

type Block = Result<Option<Bytes>, ExecServerError>;
type BlockResult = Result<FsReadBlockResponse, ExecServerError>;

struct Blocks {
    files: Files,
    path: PathUri,
    metadata: FsGetMetadataResponse,
    handle: Option<Handle>,
    /// The offset of the next block to request.
    requested: u64,
    /// The offset of the next block to deliver.
    delivered: u64,
    in_flight: FuturesOrdered<Pin<Box<dyn Future<Output = BlockResult> + Send>>>,
    lengths: VecDeque<u64>,
    /// Bytes to request per block: fewer after a lost connection, so that reading makes progress even on
    /// short-lived connections, and more after each block.
    len: u64,
    done: bool,
    /// The server has no block reads.
    whole: bool,
}

/// A file handle, and the channel it is bound to.
#[derive(Clone)]
struct Handle {
    id: String,
    channel: Arc<Channel>,
}

/// The smallest block, in bytes.
const MIN_BLOCK: u64 = 4 << 10;

impl FileReader {
    pub(super) async fn open(files: Files, path: PathUri) -> Result<Self, ExecServerError> {
        let metadata = files.metadata(&path).await?;
        let whole = !files.can_read_blocks();
        let len = files.client.shared.tuning.file_block.clamp(1, 1 << 20) as u64;
        let mut blocks = Box::new(Blocks {
            files,
            path,
            metadata: metadata.clone(),
            handle: None,
            requested: 0,
            delivered: 0,
            in_flight: FuturesOrdered::new(),
            lengths: VecDeque::new(),
            len,
            done: false,
            whole,
        });
        while !blocks.whole && blocks.handle.is_none() {
            blocks.open().await.or_else(|error| blocks.interrupted(error))?;
        }
        Ok(Self { state: State::Idle(blocks), metadata, current: Bytes::new() })
    }

    /// The file's metadata when it was opened.
    pub fn metadata(&self) -> &FsGetMetadataResponse {
        &self.metadata
    }

    /// The next block; `None` at the end.
    pub async fn next_block(&mut self) -> Result<Option<Bytes>, ExecServerError> {
        if self.current.has_remaining() {
            return Ok(Some(std::mem::take(&mut self.current)));
        }
        std::future::poll_fn(|cx| self.poll_block(cx)).await
    }

    fn poll_block(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, ExecServerError>> {
        loop {
            match std::mem::replace(&mut self.state, State::Poisoned) {
                State::Idle(mut blocks) => {
                    self.state = State::Reading(Box::pin(async move {
                        let block = blocks.next().await;
                        (blocks, block)
                    }));
                }
                State::Reading(mut reading) => match reading.as_mut().poll(cx) {
                    Poll::Ready((blocks, block)) => {
                        self.state = State::Idle(blocks);
                        return Poll::Ready(block);
                    }
                    Poll::Pending => {
                        self.state = State::Reading(reading);
                        return Poll::Pending;
                    }
                },
                State::Poisoned => {
                    let reason = "reading a file panicked".to_owned();
                    return Poll::Ready(Err(ExecServerError::Closed { reason }));
                }
            }
        }
    }
}

impl AsyncRead for FileReader {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.current.has_remaining() {
            match ready!(self.poll_block(cx))? {
                Some(block) => self.current = block,
                None => return Poll::Ready(Ok(())),
            }
        }
        let len = self.current.len().min(buffer.remaining());
        buffer.put_slice(&self.current.split_to(len));
        Poll::Ready(Ok(()))
    }
}

impl fmt::Debug for FileReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileReader").field("size", &self.metadata.size).finish_non_exhaustive()
    }
}

impl Blocks {
    async fn open(&mut self) -> Result<(), ExecServerError> {
        let shared = &self.files.client.shared;
        let (id, channel) = (shared.fresh_id("r"), shared.channel().await?);
        let params = FsOpenParams::new(&id, self.path.clone(), FsOpenMode::Read);
        match self.files.call_on::<call::FsOpen>(&channel, params).await {
            Ok(_) => self.handle = Some(Handle { id, channel }),
            Err(error) if error.is_method_not_found() => self.whole = true,
            Err(error) => return Err(error),
        }
        Ok(())
    }

    async fn next(&mut self) -> Result<Option<Bytes>, ExecServerError> {
        loop {
            if self.done {
                return Ok(None);
            }
            if self.whole {
                self.done = true;
                let params = FsReadFileParams::new(self.path.clone());
                let data = self.files.call::<call::FsReadFile>(params).await?.data.0;
                return Ok(Some(data.slice(self.delivered.min(data.len() as u64) as usize..)));
            }
            if self.handle.is_none() {
                self.reopen().await.or_else(|error| self.interrupted(error))?;
                continue;
            }
            self.request_blocks();
            let (Some(result), Some(len)) = (self.in_flight.next().await, self.lengths.pop_front())
            else {
                continue;
            };
            match result {
                Ok(block) => {
                    let max = self.files.client.shared.tuning.file_block.clamp(1, 1 << 20);
                    self.len = (self.len * 2).min(max as u64);
                    let got = block.chunk.len() as u64;
                    self.delivered += got;
                    if block.eof {
                        self.close();
                    } else if got < len {
                        self.rewind();
                    }
                    if got > 0 {
                        return Ok(Some(block.chunk.0));
                    }
                }
                Err(error) => self.interrupted(error)?,
            }
        }
    }

    /// Keeps enough block requests in flight.
    fn request_blocks(&mut self) {
        let (tuning, len) = (&self.files.client.shared.tuning, self.len);
        // A read past the end only reports the end.
        let likely_end = self.metadata.size.max(self.delivered);
        while self.in_flight.is_empty()
            || (self.in_flight.len() < tuning.file_in_flight && self.requested <= likely_end)
        {
            let Some(handle) = &self.handle else { return };
            let params = FsReadBlockParams::new(&handle.id, self.requested, len);
            let (files, channel) = (self.files.clone(), handle.channel.clone());
            self.in_flight.push_back(Box::pin(async move {
                files.call_on::<call::FsReadBlock>(&channel, params).await
            }));
            self.lengths.push_back(len);
            self.requested += len;
        }
    }

    /// Opens the file again after a reconnect, if it is still the same file.
    async fn reopen(&mut self) -> Result<(), ExecServerError> {
        let now = self.files.metadata(&self.path).await?;
        let same = now.size == self.metadata.size
            && now.modified_at_ms == self.metadata.modified_at_ms
            && now.inode == self.metadata.inode;
        if !same {
            return Err(ExecServerError::Invalid(format!(
                "{} changed while it was being read; read it again",
                self.path
            )));
        }
        self.open().await
    }

    /// After a lost connection, prepares to request the blocks in flight again; fails on other errors.
    fn interrupted(&mut self, error: ExecServerError) -> Result<(), ExecServerError> {
        if !error.is_interrupted() {
            self.done = true;
            return Err(error);
        }
        self.handle = None;
        self.len = (self.len / 2).max(MIN_BLOCK.min(self.len));
        self.rewind();
        Ok(())
    }

    fn rewind(&mut self) {
        self.in_flight = FuturesOrdered::new();
        self.lengths.clear();
        self.requested = self.delivered;
    }

    fn close(&mut self) {
        self.done = true;
        self.rewind();
        if let Some(handle) = self.handle.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let files = self.files.clone();
            runtime.spawn(async move {
                // Without this, the handle would close with the connection.
                let params = FsCloseParams::new(handle.id);
                let _ = files.call_on::<call::FsClose>(&handle.channel, params).await;
            });
        }
    }
}

impl Drop for Blocks {
    fn drop(&mut self) {
        self.close();
    }
}
