//! The helper's side: blocking, no runtime. One thread reads; when it has read an operation it hands
//! the reading on to another thread and runs the operation itself, so that nobody has to be woken
//! before the work begins.
//!
//! Invariant: some thread always reads, and waits for nothing but input meanwhile, so that a cancel or
//! a taken event always gets through. When the input ends every operation is cancelled and waited for.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::Scope;

use parking_lot::{Condvar, Mutex};

use super::frame::{self, Frame, Reply, Request, WINDOW};
use crate::files::{Cancel, Event, Executor, FileError, FilesConfig, Operation};

/// Threads that may wait for their turn to read.
const IDLE: usize = 4;

/// Runs what `input` asks and answers on `output`, until `input` ends or `output` breaks.
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
    /// Whoever holds it reads.
    input: Mutex<Input<R>>,
    /// How many threads wait to read.
    idle: AtomicUsize,
    output: Mutex<W>,
    running: Mutex<HashMap<u64, Arc<Running>>>,
}

struct Input<R> {
    from: R,
    /// How it ended; nobody reads any more.
    ended: Option<io::Result<()>>,
}

/// An operation that has begun.
struct Call {
    id: u64,
    room: u64,
    operation: Box<Operation>,
    running: Arc<Running>,
}

struct Running {
    cancel: Cancel,
    /// How many events may be sent.
    window: Mutex<usize>,
    credit_added: Condvar,
}

impl Running {
    fn add_credit(&self) {
        *self.window.lock() += 1;
        self.credit_added.notify_one();
    }

    /// Waits for room for an event; false if it is cancelled first.
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
    /// The life of a thread: read, run, and read again.
    fn serve<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        loop {
            self.idle.fetch_add(1, Ordering::SeqCst);
            let mut input = self.input.lock();
            self.idle.fetch_sub(1, Ordering::SeqCst);
            let Some(call) = self.read(&mut input) else { return };
            // Somebody has to be there to read on.
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

    /// The next operation, begun; `None` at the end.
    fn read(&self, input: &mut Input<R>) -> Option<Call> {
        if input.ended.is_some() {
            return None;
        }
        let end = loop {
            match frame::read(&mut input.from) {
                Ok(Some(Request::Run { id, room, operation })) => {
                    if let Some(running) = self.begin(id) {
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

    /// `None` if the other side breaks the rules, which it is told.
    fn begin(&self, id: u64) -> Option<Arc<Running>> {
        let running = Arc::new(Running {
            cancel: Cancel::new(),
            window: Mutex::new(WINDOW),
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
                // Under the lock, or the wake could fall between a look and the wait after it.
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
        // Whoever waits for it must not wait for ever.
        let result = catch_unwind(AssertUnwindSafe(run))
            .unwrap_or_else(|_| Err(FileError::Helper { reason: "the operation panicked".into() }));
        self.running.lock().remove(&id);
        self.send(Reply::Done { id, result });
    }

    /// False, and everything cancelled, if nobody reads any more.
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
