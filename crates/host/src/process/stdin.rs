//! The queue of bytes for a process's stdin.
//!
//! Invariant: accepted bytes are written in the order of acceptance, each `writeId` once. The queue
//! holds at most `limit` bytes (or one larger write); later writes wait to be accepted and delay
//! nothing else.

use std::collections::{HashSet, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bytes::{Buf, Bytes};
use codex_exec_server_protocol::process::{WriteParams, WriteStatus};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot;

/// Accepted write ids that are remembered, to recognize retries.
const MAX_REMEMBERED_WRITES: usize = 4096;

#[derive(Debug)]
pub(super) struct Stdin {
    to: Destination,
    limit: usize,
    queue: VecDeque<Bytes>,
    queued: usize,
    /// Accept no more writes; close once the queue is empty.
    closing: bool,
    waiting: VecDeque<Waiting>,
    accepted: Accepted,
}

/// Where the bytes go; `None` once closed.
type Destination = Option<AsyncFd<Arc<OwnedFd>>>;

#[derive(Debug)]
struct Waiting {
    write: WriteParams,
    replies: Vec<oneshot::Sender<WriteStatus>>,
}

impl Stdin {
    /// Writes to a non-blocking pipe or terminal master, or to nothing.
    pub(super) fn new(to: Destination, limit: usize) -> Self {
        Self {
            to,
            limit,
            queue: VecDeque::new(),
            queued: 0,
            closing: false,
            waiting: VecDeque::new(),
            accepted: Accepted::default(),
        }
    }

    /// Queues a write; replies now, or once there is room.
    ///
    /// `eof` is the character that ends input on a terminal.
    pub(super) fn write(
        &mut self,
        write: WriteParams,
        reply: oneshot::Sender<WriteStatus>,
        eof: Option<u8>,
    ) {
        if write.write_id.as_ref().is_some_and(|id| self.accepted.contains(id)) {
            let _ = reply.send(WriteStatus::Accepted);
            return;
        }
        if let Some(id) = &write.write_id
            && let Some(same) =
                self.waiting.iter_mut().find(|w| w.write.write_id.as_ref() == Some(id))
        {
            same.replies.push(reply);
            return;
        }
        self.waiting.push_back(Waiting { write, replies: vec![reply] });
        self.accept(eof);
    }

    /// Accepts waiting writes while there is room.
    pub(super) fn accept(&mut self, eof: Option<u8>) {
        while let Some(next) = self.waiting.front() {
            let closed = self.closing || self.to.is_none();
            let len = next.write.chunk.len();
            if !closed && self.queued > 0 && self.queued + len > self.limit {
                break;
            }
            let Some(Waiting { write, replies }) = self.waiting.pop_front() else { break };
            let status = if closed {
                WriteStatus::StdinClosed
            } else {
                self.take(write, eof);
                WriteStatus::Accepted
            };
            for reply in replies {
                let _ = reply.send(status);
            }
        }
    }

    fn take(&mut self, write: WriteParams, eof: Option<u8>) {
        if let Some(id) = write.write_id {
            self.accepted.insert(&id);
        }
        let mut push = |bytes: Bytes| {
            self.queued += bytes.len();
            if !bytes.is_empty() {
                self.queue.push_back(bytes);
            }
        };
        push(write.chunk.0);
        if write.close_stdin {
            match eof {
                Some(eof) => push(Bytes::copy_from_slice(&[eof])),
                None => self.closing = true,
            }
        }
        if self.closing && self.queue.is_empty() {
            self.close();
        }
    }

    /// Whether [`Stdin::flush`] has bytes to write.
    pub(super) fn has_queued(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Waits until the destination accepts bytes, and writes them. Cancel safe.
    pub(super) async fn flush(&mut self) {
        let (Some(fd), Some(bytes)) = (&self.to, self.queue.front_mut()) else { return };
        let written = loop {
            let mut ready = match fd.ready(Interest::WRITABLE).await {
                Ok(ready) => ready,
                Err(error) => break Err(error),
            };
            // Asked before the write: one that would block empties the guard.
            let is_closed = ready.ready().is_write_closed();
            match ready.try_io(|fd| Ok(rustix::io::write(fd, &bytes[..])?)) {
                Ok(written) => break written,
                // A terminal that no process has open takes some bytes, then none, and stays "ready".
                Err(_) if is_closed => {
                    break Err(io::ErrorKind::BrokenPipe.into());
                }
                Err(_) => {}
            }
        };
        match written {
            Ok(written) => {
                bytes.advance(written);
                self.queued -= written;
                if bytes.is_empty() {
                    self.queue.pop_front();
                }
                if self.closing && self.queue.is_empty() {
                    self.close();
                }
            }
            Err(error) => {
                // The reader is gone: accepted bytes are lost like those in a pipe whose reader has
                // died.
                if error.kind() != io::ErrorKind::BrokenPipe {
                    tracing::debug!(%error, "stdin ended");
                }
                self.close();
            }
        }
    }

    /// Closes stdin: accepts and writes nothing more.
    pub(super) fn close(&mut self) {
        self.to = None;
        self.queue = VecDeque::new();
        self.queued = 0;
        self.accept(None);
    }
}

/// The last accepted `writeId`s, as hashes, because clients choose their length.
#[derive(Debug, Default)]
struct Accepted {
    keys: [RandomState; 2],
    order: VecDeque<[u64; 2]>,
    set: HashSet<[u64; 2]>,
}

impl Accepted {
    fn hash(&self, id: &str) -> [u64; 2] {
        self.keys.each_ref().map(|key| key.hash_one(id))
    }

    fn contains(&self, id: &str) -> bool {
        !self.set.is_empty() && self.set.contains(&self.hash(id))
    }

    fn insert(&mut self, id: &str) {
        let hash = self.hash(id);
        if self.order.len() == MAX_REMEMBERED_WRITES
            && let Some(oldest) = self.order.pop_front()
        {
            self.set.remove(&oldest);
        }
        self.order.push_back(hash);
        self.set.insert(hash);
    }
}

#[cfg(test)]
mod tests {
    use rustix::termios::OptionalActions;

    use super::*;
    use crate::process::pty;
    use crate::process::readiness::register;

    fn stdin(limit: usize) -> Stdin {
        let (_, writer) = io::pipe().unwrap();
        Stdin::new(Some(register(Arc::new(writer.into())).unwrap()), limit)
    }

    fn params(text: &str, id: Option<&str>, close_stdin: bool) -> WriteParams {
        WriteParams {
            process_id: "p".into(),
            chunk: text.as_bytes().into(),
            write_id: id.map(Into::into),
            close_stdin,
        }
    }

    fn write(stdin: &mut Stdin, write: WriteParams) -> Option<WriteStatus> {
        let (reply, mut answer) = oneshot::channel();
        stdin.write(write, reply, None);
        answer.try_recv().ok()
    }

    /// The kernel buffers some input of a raw terminal that nothing reads any more, and then takes no more. (In
    /// canonical mode it may discard all of it instead.)
    #[tokio::test]
    async fn a_terminal_that_no_process_has_open_ends_input() {
        let size = codex_exec_server_protocol::process::TerminalSize { rows: 24, cols: 80 };
        let pty::Pty { master, terminal } = pty::open(size).unwrap();
        let mut modes = rustix::termios::tcgetattr(&terminal).unwrap();
        modes.make_raw();
        rustix::termios::tcsetattr(&terminal, OptionalActions::Now, &modes).unwrap();
        let mut stdin = Stdin::new(Some(register(Arc::new(master)).unwrap()), 1 << 20);
        drop(terminal);
        let large = "x".repeat(1 << 19);
        assert_eq!(write(&mut stdin, params(&large, None, false)), Some(WriteStatus::Accepted));
        let flushed = async {
            while stdin.has_queued() {
                stdin.flush().await;
            }
        };
        tokio::time::timeout(std::time::Duration::from_secs(60), flushed).await.unwrap();
        assert_eq!(
            write(&mut stdin, params("x", None, false)),
            Some(WriteStatus::StdinClosed),
            "nothing reads the rest"
        );
    }

    #[tokio::test]
    async fn retried_write_is_accepted_once() {
        let mut stdin = stdin(100);
        for _ in 0..3 {
            assert_eq!(
                write(&mut stdin, params("ab", Some("1"), false)),
                Some(WriteStatus::Accepted)
            );
        }
        assert_eq!(stdin.queued, 2);
        for n in 0..MAX_REMEMBERED_WRITES {
            write(&mut stdin, params("", Some(&format!("x{n}")), false));
        }
        assert!(!stdin.accepted.contains("1"), "forgotten after 4,096 others");
        assert_eq!(stdin.accepted.set.len(), MAX_REMEMBERED_WRITES);
    }

    #[tokio::test]
    async fn writes_wait_in_order_for_a_full_queue_and_retries_join_them() {
        let mut stdin = stdin(4);
        assert_eq!(write(&mut stdin, params("aaa", None, false)), Some(WriteStatus::Accepted));
        assert_eq!(write(&mut stdin, params("bb", Some("b"), false)), None);
        assert_eq!(write(&mut stdin, params("c", None, false)), None, "no overtaking");
        let (reply, mut retry) = oneshot::channel();
        stdin.write(params("bb", Some("b"), false), reply, None);
        stdin.queue.clear();
        stdin.queued = 0;
        stdin.accept(None);
        assert_eq!(retry.try_recv(), Ok(WriteStatus::Accepted));
        assert_eq!(stdin.queue, ["bb", "c"]);
    }

    #[tokio::test]
    async fn no_write_is_accepted_after_close() {
        let mut stdin = stdin(100);
        assert_eq!(write(&mut stdin, params("a", None, true)), Some(WriteStatus::Accepted));
        assert_eq!(write(&mut stdin, params("b", None, false)), Some(WriteStatus::StdinClosed));
        assert_eq!(
            write(&mut Stdin::new(None, 0), params("b", None, false)),
            Some(WriteStatus::StdinClosed)
        );
    }

    #[tokio::test]
    async fn eof_character_follows_the_bytes_and_keeps_the_terminal_open() {
        let mut stdin = stdin(100);
        let (reply, _answer) = oneshot::channel();
        stdin.write(params("a", None, true), reply, Some(4));
        assert_eq!(stdin.queue, ["a", "\u{4}"]);
        assert_eq!(write(&mut stdin, params("b", None, false)), Some(WriteStatus::Accepted));
    }
}
