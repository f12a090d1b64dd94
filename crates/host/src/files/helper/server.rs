//! The helper's side: blocking, without a runtime. One thread reads; once it has read an operation it
//! lets another thread read and runs the operation itself, so the work begins without waking a thread.
//!
//! Invariant: some thread always reads, and waits for nothing but input, so cancellations and
//! acknowledgements always get through. When the input ends, every operation is cancelled and awaited.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::Scope;

use parking_lot::{Condvar, Mutex};

use super::frame::{self, Frame, Reply, Request, WATCH_WINDOW, WINDOW};
use crate::files::{Cancel, Event, Executor, FileError, FilesConfig, Operation};

/// Threads that may wait for their turn to read.
const IDLE: usize = 4;

/// Runs the operations from `input` and replies on `output`, until `input` ends or `output` fails.
///
/// `output` is written in large pieces and flushed after each; a plain descriptor is best.
pub fn serve_helper(
    input: impl Read + Send,
    output: impl Write + Send,
    config: Arc<FilesConfig>,
) -> io::Result<()> {
    let helper = Helper {
        limit: config.max_helper_operations + config.max_watches,
        executor: Executor::new(config),
        input: Mutex::new(Input { from: input, ended: None }),
        idle: AtomicUsize::new(0),
        output: Mutex::new(output),
        running: Mutex::new(HashMap::new()),
    };
    std::thread::scope(|scope| helper.serve(scope));
    let input = helper.input.into_inner();
    input.ended.unwrap_or(Ok(()))
}

struct Helper<R, W> {
    limit: usize,
    executor: Executor,
    /// The thread that holds this lock reads.
    input: Mutex<Input<R>>,
    /// Threads that wait to read.
    idle: AtomicUsize,
    output: Mutex<W>,
    running: Mutex<HashMap<u64, Arc<Running>>>,
}

struct Input<R> {
    from: R,
    /// How the input ended; then no thread reads any more.
    ended: Option<io::Result<()>>,
}

/// A started operation.
struct Call {
    id: u64,
    room: u64,
    operation: Box<Operation>,
    running: Arc<Running>,
}

struct Running {
    cancel: Cancel,
    /// Events that may still be sent.
    window: Mutex<usize>,
    credit_added: Condvar,
}

impl Running {
    fn add_credit(&self) {
        *self.window.lock() += 1;
        self.credit_added.notify_one();
    }

    /// Waits until an event may be sent; false if the operation is cancelled first.
    fn take_credit(&self) -> bool {
        let mut window = self.window.lock();
        let closed = |window: &mut usize| *window == 0 && !self.cancel.is_cancelled();
        self.credit_added.wait_while(&mut window, closed);
        if self.cancel.is_cancelled() {
            return false;
        }
        *window -= 1;
        true
    }
}

impl<R: Read + Send, W: Write + Send> Helper<R, W> {
    /// Body of a thread: read, run, and read again.
    fn serve<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        loop {
            self.idle.fetch_add(1, Ordering::SeqCst);
            let mut input = self.input.lock();
            self.idle.fetch_sub(1, Ordering::SeqCst);
            let Some(call) = self.read(&mut input) else { return };
            // Another thread must read meanwhile.
            if self.idle.load(Ordering::SeqCst) == 0 {
                let next = std::thread::Builder::new();
                if let Err(error) = next.spawn_scoped(scope, || self.serve(scope)) {
                    input.ended = Some(Err(error));
                    self.cancel_all();
                }
            }
            drop(input);
            self.run(call);
            if self.idle.load(Ordering::SeqCst) >= IDLE {
                return;
            }
        }
    }

    /// Reads and registers the next operation; `None` at the end.
    fn read(&self, input: &mut Input<R>) -> Option<Call> {
        if input.ended.is_some() {
            return None;
        }
        let end = loop {
            match frame::read(&mut input.from) {
                Ok(Some(Request::Run { id, room, operation })) => {
                    if let Some(running) = self.begin(id, &operation) {
                        return Some(Call { id, room, operation, running });
                    }
                }
                Ok(Some(Request::Cancel { id })) => {
                    if let Some(running) = self.running.lock().get(&id) {
                        running.cancel.cancel();
                    }
                }
                Ok(Some(Request::Taken { id })) => {
                    if let Some(running) = self.running.lock().get(&id) {
                        running.add_credit();
                    }
                }
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        input.ended = Some(end);
        self.cancel_all();
        None
    }

    /// `None` if the server exceeds the limit; replies with an error.
    fn begin(&self, id: u64, operation: &Operation) -> Option<Arc<Running>> {
        let running = Arc::new(Running {
            cancel: Cancel::new(),
            // Changes wait with their watch, which merges them.
            window: Mutex::new(if operation.is_watch() { WATCH_WINDOW } else { WINDOW }),
            credit_added: Condvar::new(),
        });
        let refused = {
            let mut all = self.running.lock();
            if all.len() >= self.limit {
                Some(FileError::TooMany {
                    what: "operations in a helper".into(),
                    limit: self.limit as u64,
                })
            } else {
                all.insert(id, running.clone());
                None
            }
        };
        if let Some(error) = refused {
            self.send(Reply::Done { id, result: Err(error) });
            return None;
        }
        let weak = Arc::downgrade(&running);
        running.cancel.on_cancel(move || {
            if let Some(running) = weak.upgrade() {
                // Take the lock, or the wakeup could fall between a check and the wait after it.
                drop(running.window.lock());
                running.credit_added.notify_all();
            }
        });
        Some(running)
    }

    fn run(&self, call: Call) {
        let Call { id, room, operation, running } = call;
        let emit = |event: Event| {
            if running.take_credit() && self.send(Reply::Event { id, event }) {
                ControlFlow::Continue(())
            } else {
                ControlFlow::Break(())
            }
        };
        let run = || self.executor.execute_within(room, *operation, &running.cancel, &emit);
        // A panic must not leave the caller waiting.
        let result = catch_unwind(AssertUnwindSafe(run))
            .unwrap_or_else(|_| Err(FileError::Helper { reason: "the operation panicked".into() }));
        self.running.lock().remove(&id);
        self.send(Reply::Done { id, result });
    }

    /// Sends a reply. If the output is closed, cancels everything and returns false.
    fn send(&self, reply: Reply) -> bool {
        let sent = Frame::new(reply).and_then(|frame| frame.write(&mut *self.output.lock()));
        if sent.is_err() {
            self.cancel_all();
        }
        sent.is_ok()
    }

    fn cancel_all(&self) {
        let all: Vec<_> = self.running.lock().values().cloned().collect();
        all.iter().for_each(|running| running.cancel.cancel());
    }
}
