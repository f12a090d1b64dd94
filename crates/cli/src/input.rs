//! Stdin, read only on request.
//!
//! Invariant: this program reads only what it needs. Keys typed after the command has ended, and lines for
//! the next command of a script, stay unread. So a thread waits for input *and* for cancellation, and
//! reads at most once per request.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::mpsc as blocking;
use std::thread;

use bytes::Bytes;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FileType, fstat, makedev, tell};
use rustix::stdio::stdin;
use tokio::sync::mpsc;

/// Maximum bytes of one read.
const CHUNK: usize = 64 << 10;

/// The stdin of this program.
#[derive(Debug)]
pub(crate) struct Input {
    requests: blocking::Sender<()>,
    chunks: mpsc::Receiver<io::Result<Bytes>>,
    /// A chunk has been requested.
    requested: bool,
    /// Dropping it cancels the thread.
    _cancel_on_drop: OwnedFd,
}

impl Input {
    pub(crate) fn start() -> io::Result<Self> {
        let (cancelled, cancel_on_drop) =
            rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let (requests, requested) = blocking::channel();
        let (send, chunks) = mpsc::channel(1);
        thread::Builder::new().name("stdin".to_owned()).spawn(move || {
            while requested.recv().is_ok() {
                match wait_and_read(&cancelled) {
                    Some(chunk) => {
                        let over = chunk.as_ref().map_or(true, Bytes::is_empty);
                        if send.blocking_send(chunk).is_err() || over {
                            return;
                        }
                    }
                    None => return,
                }
            }
        })?;
        Ok(Self { requests, chunks, requested: false, _cancel_on_drop: cancel_on_drop })
    }

    /// The next bytes; `None` at the end. Dropping the future loses nothing.
    pub(crate) async fn next(&mut self) -> io::Result<Option<Bytes>> {
        if !self.requested {
            // Fails if the thread has ended, which `recv` reports below.
            let _ = self.requests.send(());
            self.requested = true;
        }
        let chunk = self.chunks.recv().await;
        self.requested = false;
        chunk.transpose().map(|chunk| chunk.filter(|bytes| !bytes.is_empty()))
    }
}

/// Waits for input and reads it; `None` after cancellation.
fn wait_and_read(cancelled: &OwnedFd) -> Option<io::Result<Bytes>> {
    let stdin = stdin();
    let mut buffer = vec![0; CHUNK];
    loop {
        let mut both =
            [PollFd::new(cancelled, PollFlags::IN), PollFd::from_borrowed_fd(stdin, PollFlags::IN)];
        match poll(&mut both, None) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Some(Err(error.into())),
            Ok(_) => {}
        }
        if !both[0].revents().is_empty() {
            return None;
        }
        if both[1].revents().is_empty() {
            continue;
        }
        match rustix::io::read(stdin, &mut buffer) {
            // Another process took the input, or made stdin non-blocking.
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            Err(error) => return Some(Err(error.into())),
            Ok(len) => {
                buffer.truncate(len);
                return Some(Ok(buffer.into()));
            }
        }
    }
}

/// Whether stdin is at its end, as far as that is known without reading.
pub(crate) fn is_at_end() -> bool {
    let Ok(stat) = fstat(stdin()) else { return true };
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::CharacterDevice => stat.st_rdev == makedev(1, 3),
        FileType::RegularFile => {
            tell(stdin()).is_ok_and(|at| at >= u64::try_from(stat.st_size).unwrap_or(0))
        }
        _ => {
            let mut one = [PollFd::from_borrowed_fd(stdin(), PollFlags::IN)];
            let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
            matches!(poll(&mut one, Some(&now)), Ok(1))
                && one[0].revents().contains(PollFlags::HUP)
                && !one[0].revents().contains(PollFlags::IN)
        }
    }
}
