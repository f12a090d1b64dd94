//! A process's stdin.
//!
//! Invariant: bytes reach the process in order, each once, whatever happens to the connection. Every
//! write has an id; on the next connection the client repeats, in order, the writes that the server has
//! not acknowledged, and the server ignores those that it already has.

use std::collections::VecDeque;
use std::fmt;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use codex_exec_server_protocol::call;
use codex_exec_server_protocol::process::{ProcessId, WriteParams, WriteStatus};
use futures_util::StreamExt;
use futures_util::stream::FuturesOrdered;
use parking_lot::Mutex;
use tokio::io::AsyncWrite;

use super::handle::Handle;
use crate::channel::{Channel, ChannelError};
use crate::client::ExecServerClient;
use crate::error::ExecServerError;
use crate::shared::call_error;

/// The stdin of a process, from [`Process::take_stdin`](crate::Process::take_stdin).
///
/// A write completes when it is queued, and waits while the server has not accepted more than
/// [`ClientTuning::stdin_window`](crate::ClientTuning::stdin_window) bytes. `flush` waits until it has
/// accepted all. `shutdown` flushes and closes the process's stdin (on a terminal it sends the
/// end-of-file character); dropping a pipe's stdin does so in the background. A server without the
/// capability `processCloseStdin` cannot close a pipe: there, `shutdown` fails with
/// [`Unsupported`](io::ErrorKind::Unsupported).
pub struct ProcessStdin {
    handle: Arc<Handle>,
    queue: Arc<Mutex<Queue>>,
    pumping: bool,
    close_on_drop: bool,
}

struct Queue {
    /// Oldest first; the first `sent` of them are sent on the current connection.
    writes: VecDeque<Write>,
    bytes: usize,
    sent: usize,
    end: CloseState,
    /// The handle was dropped.
    dropped: bool,
    error: Option<ExecServerError>,
    writer: Option<Waker>,
    pump: Option<Waker>,
}

#[derive(Clone)]
struct Write {
    id: String,
    bytes: Bytes,
    close: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CloseState {
    Open,
    /// The close is queued.
    Queued,
    Done,
}

/// How long to wait before repeating a write to a process that is still starting.
const STARTING_RETRY_DELAY: Duration = Duration::from_millis(20);

/// The end-of-file character of a terminal.
const CTRL_D: &[u8] = &[4];

impl ProcessStdin {
    pub(super) fn new(handle: Arc<Handle>) -> Self {
        let queue = Arc::new(Mutex::new(Queue {
            writes: VecDeque::new(),
            bytes: 0,
            sent: 0,
            end: CloseState::Open,
            dropped: false,
            error: None,
            writer: None,
            pump: None,
        }));
        let close_on_drop = !handle.tty;
        Self { handle, queue, pumping: false, close_on_drop }
    }

    /// Keeps the process's stdin open when this is dropped.
    pub fn leave_open(&mut self) {
        self.close_on_drop = false;
    }

    fn pump(&mut self) {
        if !self.pumping {
            self.pumping = true;
            let (client, id) = (self.handle.client.clone(), self.handle.id.clone());
            tokio::spawn(pump(client, id, self.queue.clone()));
        }
    }

    fn push(&self, queue: &mut Queue, bytes: Bytes, close: bool) {
        queue.bytes += bytes.len();
        queue.writes.push_back(Write { id: self.handle.client.shared.fresh_id("w"), bytes, close });
        if close {
            queue.end = CloseState::Queued;
        }
        if let Some(pump) = queue.pump.take() {
            pump.wake();
        }
    }

    fn can_close(&self) -> bool {
        self.handle.client.capabilities().process_close_stdin
    }
}

impl Queue {
    fn wait(&mut self, cx: &Context<'_>) {
        self.writer = Some(cx.waker().clone());
    }

    fn wake_writer(&mut self) {
        if let Some(writer) = self.writer.take() {
            writer.wake();
        }
    }

    fn check(&self) -> io::Result<()> {
        match &self.error {
            Some(error) => Err(error.clone().into()),
            None => Ok(()),
        }
    }

    fn fail(&mut self, error: ExecServerError) {
        self.error = Some(error);
        self.writes.clear();
        self.bytes = 0;
        self.wake_writer();
    }
}

impl AsyncWrite for ProcessStdin {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.pump();
        let tuning = &self.handle.client.shared.tuning;
        let mut queue = self.queue.lock();
        queue.check()?;
        if queue.end != CloseState::Open {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        if bytes.is_empty() {
            return Poll::Ready(Ok(0));
        }
        let room = tuning.stdin_window.saturating_sub(queue.bytes);
        if room == 0 {
            queue.wait(cx);
            return Poll::Pending;
        }
        let len = bytes.len().min(room).min(tuning.stdin_chunk.max(1));
        self.push(&mut queue, Bytes::copy_from_slice(&bytes[..len]), false);
        Poll::Ready(Ok(len))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut queue = self.queue.lock();
        queue.check()?;
        if queue.writes.is_empty() {
            return Poll::Ready(Ok(()));
        }
        queue.wait(cx);
        Poll::Pending
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.pump();
        let mut queue = self.queue.lock();
        queue.check()?;
        if queue.end == CloseState::Open {
            if self.can_close() {
                self.push(&mut queue, Bytes::new(), true);
            } else if self.handle.tty {
                self.push(&mut queue, Bytes::from_static(CTRL_D), false);
                queue.end = CloseState::Queued;
            } else if !queue.writes.is_empty() {
                // Report the error only after all writes are accepted.
                queue.wait(cx);
                return Poll::Pending;
            } else {
                let error = ExecServerError::Unsupported {
                    what: "close a process's stdin".to_owned(),
                    instead: "end the input in a way that the program understands, run it in a \
                              terminal, or terminate it"
                        .to_owned(),
                };
                return Poll::Ready(Err(error.into()));
            }
        }
        if queue.writes.is_empty() {
            queue.end = CloseState::Done;
            return Poll::Ready(Ok(()));
        }
        queue.wait(cx);
        Poll::Pending
    }
}

impl Drop for ProcessStdin {
    fn drop(&mut self) {
        let close = self.close_on_drop && self.can_close();
        // Without a runtime nothing can be sent.
        if close && tokio::runtime::Handle::try_current().is_ok() {
            self.pump();
        }
        let mut queue = self.queue.lock();
        if close && queue.end == CloseState::Open && queue.error.is_none() {
            self.push(&mut queue, Bytes::new(), true);
        }
        queue.dropped = true;
        if let Some(pump) = queue.pump.take() {
            pump.wake();
        }
    }
}

impl fmt::Debug for ProcessStdin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessStdin").field("process", &self.handle.id).finish_non_exhaustive()
    }
}

/// Sends the queued writes until all are accepted and the handle is dropped.
async fn pump(client: ExecServerClient, process: ProcessId, queue: Arc<Mutex<Queue>>) {
    let mut channel = match client.shared.channel().await {
        Ok(channel) => channel,
        Err(error) => return queue.lock().fail(error),
    };
    let mut pump = Pump { client, process, queue, pipelined: false };
    loop {
        match pump.serve(&channel).await {
            PumpEnd::Done => return,
            PumpEnd::Failed(error) => return pump.queue.lock().fail(error),
            PumpEnd::ChannelEnded => {}
        }
        pump.queue.lock().sent = 0;
        channel = match pump.client.shared.channel_after(channel.epoch).await {
            Ok(channel) => channel,
            Err(error) => return pump.queue.lock().fail(error),
        };
    }
}

struct Pump {
    client: ExecServerClient,
    process: ProcessId,
    queue: Arc<Mutex<Queue>>,
    /// The process has started, since it accepted a write: several writes may be pending at once.
    pipelined: bool,
}

enum PumpEnd {
    Done,
    ChannelEnded,
    Failed(ExecServerError),
}

impl Pump {
    async fn serve(&mut self, channel: &Arc<Channel>) -> PumpEnd {
        let mut responses = FuturesOrdered::new();
        loop {
            let in_flight = self.client.shared.tuning.stdin_in_flight.max(1);
            let may_send = responses.len() < if self.pipelined { in_flight } else { 1 };
            let step = tokio::select! {
                biased;
                Some(response) = responses.next() => Step::Response(response),
                next = poll_fn(|cx| self.poll_unsent(cx)), if may_send => Step::Send(next),
            };
            match step {
                Step::Send(None) if responses.is_empty() => return PumpEnd::Done,
                // Done once the responses have arrived.
                Step::Send(None) => match responses.next().await {
                    Some(response) => {
                        if let Some(end) = self.handle_response(response).await {
                            return end;
                        }
                    }
                    None => return PumpEnd::Done,
                },
                Step::Send(Some(write)) => {
                    let params = WriteParams {
                        process_id: self.process.clone(),
                        chunk: write.bytes.into(),
                        write_id: Some(write.id),
                        close_stdin: write.close,
                    };
                    match channel.send::<call::ProcessWrite>(&params).await {
                        Ok(response) => responses.push_back(response),
                        Err(_) => return PumpEnd::ChannelEnded,
                    }
                }
                Step::Response(response) => {
                    if let Some(end) = self.handle_response(response).await {
                        return end;
                    }
                }
            }
        }
    }

    /// The next unsent write; `None` when there will be no more.
    fn poll_unsent(&self, cx: &mut Context<'_>) -> Poll<Option<Write>> {
        let mut queue = self.queue.lock();
        if let Some(write) = queue.writes.get(queue.sent).cloned() {
            queue.sent += 1;
            return Poll::Ready(Some(write));
        }
        if queue.dropped {
            return Poll::Ready(None);
        }
        queue.pump = Some(cx.waker().clone());
        Poll::Pending
    }

    async fn handle_response(
        &mut self,
        response: Result<codex_exec_server_protocol::process::WriteResponse, ChannelError>,
    ) -> Option<PumpEnd> {
        let reason = match response {
            Ok(response) => match response.status {
                WriteStatus::Accepted => {
                    self.pipelined = true;
                    let mut queue = self.queue.lock();
                    if let Some(write) = queue.writes.pop_front() {
                        queue.bytes -= write.bytes.len();
                        queue.sent -= 1;
                    }
                    queue.wake_writer();
                    return None;
                }
                WriteStatus::Starting => {
                    // Until the first is accepted only one write is pending, so none has overtaken it.
                    tokio::time::sleep(STARTING_RETRY_DELAY).await;
                    self.queue.lock().sent = 0;
                    return None;
                }
                WriteStatus::UnknownProcess => "the server no longer knows it",
                WriteStatus::StdinClosed => {
                    "its stdin is closed; start it with `pipe_stdin` or `tty` to keep it open"
                }
            },
            Err(ChannelError::NotSent | ChannelError::Interrupted) => {
                return Some(PumpEnd::ChannelEnded);
            }
            Err(error) => return Some(PumpEnd::Failed(call_error("process/write", error))),
        };
        Some(PumpEnd::Failed(ExecServerError::Stdin { process: self.process.clone(), why: reason }))
    }
}

enum Step {
    Response(Result<codex_exec_server_protocol::process::WriteResponse, ChannelError>),
    Send(Option<Write>),
}
