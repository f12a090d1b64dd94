//! The server's side of a helper: concurrent operations over one pair of pipes.
//!
//! Invariant: the reading task never waits for a consumer, because each operation's channel holds as
//! many events as the helper may send. Dropping a call cancels it in the helper; when a helper ends,
//! all its calls fail.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Notify, Semaphore, mpsc, oneshot};
use tokio::task::AbortHandle;

use super::frame::{self, Frame, Reply, Request, WINDOW};
use crate::files::{Cancel, Event, FileError, FilesConfig, Operation, Outcome};

/// Capacity of the queue of outgoing frames.
const OUTBOUND: usize = 16;

/// A running helper. Clones share it; dropping the last one closes its pipes.
#[derive(Debug, Clone)]
pub struct HelperClient(Arc<Client>);

#[derive(Debug)]
struct Client {
    shared: Arc<Shared>,
    outbound: mpsc::Sender<Frame>,
    next_id: AtomicU64,
    tasks: [AbortHandle; 2],
}

#[derive(Debug)]
struct Shared {
    calls: Mutex<Calls>,
    /// Short messages that skip the queue: at most a few per running call.
    urgent: Mutex<Vec<Request>>,
    urgent_waiting: Notify,
    slots: Semaphore,
}

#[derive(Debug, Default)]
struct Calls {
    running: HashMap<u64, Call>,
    /// Why the helper accepts no more calls.
    ended: Option<String>,
}

#[derive(Debug)]
struct Call {
    events: mpsc::Sender<Event>,
    done: oneshot::Sender<Result<Outcome, FileError>>,
}

impl std::fmt::Debug for Frame {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Frame")
    }
}

impl HelperClient {
    /// Connects to a helper through its output and input. Call it inside a runtime.
    pub fn new(
        output: impl AsyncRead + Unpin + Send + 'static,
        input: impl AsyncWrite + Unpin + Send + 'static,
        config: &FilesConfig,
    ) -> Self {
        let shared = Arc::new(Shared {
            calls: Mutex::new(Calls::default()),
            urgent: Mutex::new(Vec::new()),
            urgent_waiting: Notify::new(),
            slots: Semaphore::new(config.max_helper_operations),
        });
        let (outbound, frames) = mpsc::channel(OUTBOUND);
        let reading = tokio::spawn(read_replies(output, shared.clone())).abort_handle();
        let writing = tokio::spawn(write_requests(input, frames, shared.clone())).abort_handle();
        let (next_id, tasks) = (AtomicU64::new(1), [reading, writing]);
        Self(Arc::new(Client { shared, outbound, next_id, tasks }))
    }

    /// Why the helper accepts no more operations; `None` while it does.
    pub fn ended(&self) -> Option<String> {
        self.0.shared.calls.lock().ended.clone()
    }

    /// Runs an operation in the helper and forwards its events. `cancel` asks it to end soon with a
    /// result; dropping the future cancels it too. For `room` see
    /// [`Executor::execute_within`](crate::files::Executor::execute_within).
    pub async fn run(
        &self,
        room: u64,
        operation: Operation,
        cancel: &Cancel,
        events: &mpsc::Sender<Event>,
    ) -> Result<Outcome, FileError> {
        let shared = &self.0.shared;
        let slot = if operation.is_watch() { None } else { shared.slots.acquire().await.ok() };
        let id = self.0.next_id.fetch_add(1, Ordering::Relaxed);
        let operation = Box::new(operation);
        let frame = Frame::new(Request::Run { id, room, operation })
            .map_err(|error| FileError::Helper { reason: error.to_string() })?;
        let (sender, mut incoming) = mpsc::channel(WINDOW);
        let (done, mut result) = oneshot::channel();
        {
            let mut calls = shared.calls.lock();
            if let Some(reason) = &calls.ended {
                return Err(FileError::Helper { reason: reason.clone() });
            }
            calls.running.insert(id, Call { events: sender, done });
        }
        let mut guard = CancelCall { shared, id, armed: true };
        if self.0.outbound.send(frame).await.is_err() {
            return Err(shared.why_ended());
        }
        let weak = Arc::downgrade(shared);
        cancel.on_cancel(move || {
            if let Some(shared) = weak.upgrade() {
                shared.send_urgent(Request::Cancel { id });
            }
        });
        let result = loop {
            tokio::select! {
                biased;
                Some(event) = incoming.recv() => {
                    // If the consumer is gone, discard the event.
                    let _ = events.send(event).await;
                    shared.send_urgent(Request::Taken { id });
                }
                result = &mut result => break result,
            }
        };
        guard.armed = false;
        drop(slot);
        // Events sent before the result were received before it.
        while let Ok(event) = incoming.try_recv() {
            let _ = events.send(event).await;
        }
        result.unwrap_or_else(|_| Err(shared.why_ended()))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
    }
}

struct CancelCall<'a> {
    shared: &'a Shared,
    id: u64,
    armed: bool,
}

impl Drop for CancelCall<'_> {
    fn drop(&mut self) {
        if self.armed && self.shared.calls.lock().running.remove(&self.id).is_some() {
            self.shared.send_urgent(Request::Cancel { id: self.id });
        }
    }
}

impl Shared {
    fn send_urgent(&self, request: Request) {
        self.urgent.lock().push(request);
        self.urgent_waiting.notify_one();
    }

    fn end(&self, reason: String) {
        let mut calls = self.calls.lock();
        calls.ended.get_or_insert(reason);
        calls.running.clear();
    }

    fn why_ended(&self) -> FileError {
        let reason = self.calls.lock().ended.clone();
        FileError::Helper { reason: reason.unwrap_or_else(|| "it ended".into()) }
    }
}

async fn read_replies(mut output: impl AsyncRead + Unpin, shared: Arc<Shared>) {
    let reason = loop {
        match frame::read_async(&mut output).await {
            Ok(Some(Reply::Event { id, event })) => {
                let calls = shared.calls.lock();
                if let Some(call) = calls.running.get(&id)
                    && call.events.try_send(event).is_err()
                {
                    break "it sent more events than were asked for".to_owned();
                }
            }
            Ok(Some(Reply::Done { id, result })) => {
                if let Some(call) = shared.calls.lock().running.remove(&id) {
                    let _ = call.done.send(result);
                }
            }
            Ok(None) => break "it ended".to_owned(),
            Err(error) => break error.to_string(),
        }
    };
    shared.end(reason);
}

async fn write_requests(
    mut input: impl AsyncWrite + Unpin,
    mut frames: mpsc::Receiver<Frame>,
    shared: Arc<Shared>,
) {
    let error = loop {
        let mut next = tokio::select! {
            biased;
            () = shared.urgent_waiting.notified() => None,
            frame = frames.recv() => match frame {
                Some(frame) => Some(frame),
                None => return,
            },
        };
        // A call must precede messages about it. An urgent message was sent after its call was queued,
        // so write the whole queue first.
        let urgent = std::mem::take(&mut *shared.urgent.lock());
        let written = async {
            while let Some(frame) = next.take().or_else(|| frames.try_recv().ok()) {
                frame.write_async(&mut input).await?;
            }
            for request in urgent {
                Frame::new(request)?.write_async(&mut input).await?;
            }
            Ok::<(), std::io::Error>(())
        };
        if let Err(error) = written.await {
            break error;
        }
    };
    shared.end(error.to_string());
}
