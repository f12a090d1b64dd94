//! The output streams of a process, read in the order in which they became readable.
//!
//! Two pipes have no order in common, but the kernel reports them in the order in which they were first
//! written to, and the runtime passes that on: each stream has a waker of its own, which queues the stream
//! before it wakes the owner. So what a process wrote to one stream and then to the other, before either was
//! read, is published in that order. Streams that are written to in turns between two reads are published
//! one after the other; only one pipe for both keeps the order of every write.

use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use bytes::Bytes;
use parking_lot::Mutex;

use super::output::Output;

/// stdout and stderr, or the terminal alone.
#[derive(Debug)]
pub(super) struct Outputs {
    streams: [Option<Output>; 2],
    arrivals: Arc<Mutex<Arrivals>>,
    wakers: [Waker; 2],
}

/// Streams that have become readable, and whom to wake.
#[derive(Debug, Default)]
struct Arrivals {
    /// Each stream at most once, the first to become readable in front.
    queue: [Option<usize>; 2],
    owner: Option<Waker>,
}

impl Arrivals {
    fn push(&mut self, stream: usize) {
        if !self.queue.contains(&Some(stream))
            && let Some(free) = self.queue.iter_mut().find(|slot| slot.is_none())
        {
            *free = Some(stream);
        }
    }

    fn remove(&mut self, stream: usize) {
        match self.queue {
            [Some(first), second] if first == stream => self.queue = [second, None],
            [first, Some(second)] if second == stream => self.queue = [first, None],
            _ => {}
        }
    }

    /// All streams, those that have become readable first.
    fn order(&self) -> [usize; 2] {
        match self.queue[0] {
            Some(1) => [1, 0],
            _ => [0, 1],
        }
    }
}

/// Queues a stream and wakes the owner.
struct StreamWaker {
    stream: usize,
    arrivals: Arc<Mutex<Arrivals>>,
}

impl Wake for StreamWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let mut arrivals = self.arrivals.lock();
        arrivals.push(self.stream);
        let owner = arrivals.owner.clone();
        drop(arrivals);
        if let Some(owner) = owner {
            owner.wake();
        }
    }
}

impl Outputs {
    /// Watches the streams from now on: create it before the process starts.
    pub(super) fn new(streams: [Option<Output>; 2]) -> Self {
        let arrivals = Arc::<Mutex<Arrivals>>::default();
        let wakers = [0, 1].map(|stream| {
            Waker::from(Arc::new(StreamWaker { stream, arrivals: arrivals.clone() }))
        });
        let outputs = Self { streams, arrivals, wakers };
        (0..outputs.streams.len()).for_each(|n| outputs.watch(n));
        outputs
    }

    pub(super) fn get(&self, n: usize) -> Option<&Output> {
        self.streams[n].as_ref()
    }

    pub(super) fn get_mut(&mut self, n: usize) -> Option<&mut Output> {
        self.streams[n].as_mut()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Output> {
        self.streams.iter().flatten()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Output> {
        self.streams.iter_mut().flatten()
    }

    /// The numbers of all streams, those that have become readable first.
    pub(super) fn order(&self) -> [usize; 2] {
        self.arrivals.lock().order()
    }

    /// Waits for at most `limit` bytes of either stream, `None` at the end of one; for ever once both have
    /// ended. Cancel safe.
    pub(super) async fn read(&mut self, limit: usize) -> (usize, Option<Bytes>) {
        std::future::poll_fn(|cx| self.poll_read(cx, limit)).await
    }

    fn poll_read(&mut self, cx: &Context<'_>, limit: usize) -> Poll<(usize, Option<Bytes>)> {
        let order = {
            let mut arrivals = self.arrivals.lock();
            match &mut arrivals.owner {
                Some(owner) => owner.clone_from(cx.waker()),
                none => *none = Some(cx.waker().clone()),
            }
            arrivals.order()
        };
        for n in order {
            // Before it is polled, so that a stream which becomes readable meanwhile is queued again.
            self.arrivals.lock().remove(n);
            let Some(output) = self.streams[n].as_mut().filter(|output| output.is_open()) else {
                continue;
            };
            let mut cx = Context::from_waker(&self.wakers[n]);
            if let Poll::Ready(bytes) = output.poll_read(&mut cx, limit) {
                self.watch(n);
                return Poll::Ready((n, bytes));
            }
        }
        Poll::Pending
    }

    /// Has the stream queued when it becomes readable, or now, behind the other, if it is.
    fn watch(&self, n: usize) {
        let mut cx = Context::from_waker(&self.wakers[n]);
        if self.streams[n].as_ref().is_some_and(|output| output.is_readable(&mut cx)) {
            self.arrivals.lock().push(n);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use std::os::fd::OwnedFd;

    use codex_exec_server_protocol::process::OutputStream;

    use super::super::output::READ_BYTES;
    use super::super::readiness::register;
    use super::*;

    fn pipe() -> (OwnedFd, OwnedFd) {
        let (ours, theirs) = rustix::pipe::pipe().unwrap();
        rustix::io::ioctl_fionbio(&ours, true).unwrap();
        (ours, theirs)
    }

    fn outputs() -> (Outputs, [OwnedFd; 2]) {
        let ((stdout, their_stdout), (stderr, their_stderr)) = (pipe(), pipe());
        let output = |stream, fd| Some(Output::new(stream, register(fd).unwrap()));
        let streams = [output(OutputStream::Stdout, stdout), output(OutputStream::Stderr, stderr)];
        (Outputs::new(streams), [their_stdout, their_stderr])
    }

    /// What is written before a read comes out stream by stream, in the order in which each stream was first
    /// written to; nothing is lost or repeated, also if reads are cancelled.
    #[tokio::test]
    async fn streams_are_read_in_the_order_of_their_first_writes() {
        let mut random = fastrand::Rng::with_seed(16);
        for _ in 0..200 {
            let (mut outputs, theirs) = outputs();
            let mut written = 0u64;
            for _ in 0..random.usize(1..6) {
                let mut expected: Vec<(usize, Vec<u8>)> = Vec::new();
                for _ in 0..random.usize(1..5) {
                    let n = random.usize(..2);
                    written += 1;
                    let line = format!("{written}\n").into_bytes();
                    rustix::io::write(&theirs[n], &line).unwrap();
                    match expected.iter_mut().find(|(stream, _)| *stream == n) {
                        Some((_, bytes)) => bytes.extend(line),
                        None => expected.push((n, line)),
                    }
                }
                if random.bool() {
                    // The runtime sees the events while no read waits, as while a process starts.
                    tokio::task::yield_now().await;
                }
                for (stream, bytes) in expected {
                    let (n, read) = outputs.read(READ_BYTES).await;
                    assert_eq!((n, read.unwrap().as_ref()), (stream, bytes.as_slice()));
                }
                let nothing = Context::from_waker(Waker::noop());
                assert!(outputs.poll_read(&nothing, READ_BYTES).is_pending());
            }
            drop(theirs);
            for _ in 0..2 {
                assert_eq!(outputs.read(READ_BYTES).await.1, None);
            }
            assert!(!outputs.iter().any(Output::is_open));
        }
    }

    /// A stream that is always readable does not keep the other waiting.
    #[tokio::test]
    async fn endless_stream_leaves_the_other_its_turn() {
        for busy in [0, 1] {
            let (mut outputs, theirs) = outputs();
            rustix::io::write(&theirs[busy], &[7; 4096]).unwrap();
            rustix::io::write(&theirs[1 - busy], b"once").unwrap();
            let mut streams = Vec::new();
            for _ in 0..4 {
                let (n, bytes) = outputs.read(16).await;
                streams.push((n, bytes.unwrap().len()));
            }
            assert_eq!(streams[..2], [(busy, 16), (1 - busy, 4)]);
        }
    }
}
