//! Two sockets joined by the kernel: what arrives at one leaves by the other, without a copy in this
//! process.
//!
//! ```text
//!  Copying ── a read fills the buffer ──▶ Splicing ── end of file ──▶ Ended ── all written ──▶ Done
//!     └──────────────── end of file ───────────────────────────────────▲
//! ```
//!
//! Each direction begins with a buffer, which costs no descriptor and suits short messages. The first read
//! that fills it makes a pipe, through which the rest is spliced. A small pipe would be slower than the
//! buffer, since it holds few of the fragments that arrive; so where no large one can be made, the buffer
//! stays.

use std::future::poll_fn;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::task::{Context, Poll, ready};

use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown};
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::task::coop;

use crate::idle::Idle;
use crate::tunnel::BUFFER;

/// The size of a pipe, and the most that one call moves. It is what the kernel permits every user, until the
/// user has many such pipes.
const PIPE: usize = 1 << 20;

/// Joins both directions until both have ended, one fails, or nothing moves for too long.
pub(crate) async fn join(client: &mut Idle<TcpStream>, target: &TcpStream) -> io::Result<()> {
    let (mut up, mut down) = (Direction::default(), Direction::default());
    poll_fn(|cx| {
        let stream = client.get_ref();
        let (before, mut waits) = (up.moved + down.moved, false);
        waits |= up.poll(cx, stream, target)?.is_pending();
        waits |= down.poll(cx, target, stream)?.is_pending();
        if up.moved + down.moved != before {
            client.touch();
        }
        match waits {
            true => client.poll_idle(cx).map(Err),
            false => Poll::Ready(Ok(())),
        }
    })
    .await
}

/// Bytes from one socket to the other.
#[derive(Debug, Default)]
struct Direction {
    way: Way,
    /// Bytes that were read and not yet written.
    held: usize,
    /// Bytes written in all.
    moved: u64,
    ended: bool,
    done: bool,
}

#[derive(Debug)]
enum Way {
    Copying {
        buffer: Vec<u8>,
        /// Where the held bytes begin.
        start: usize,
        /// Whether a pipe may be tried.
        promotable: bool,
    },
    Splicing {
        reader: OwnedFd,
        writer: OwnedFd,
    },
}

impl Default for Way {
    fn default() -> Self {
        Self::Copying { buffer: Vec::new(), start: 0, promotable: true }
    }
}

impl Direction {
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        from: &TcpStream,
        to: &TcpStream,
    ) -> Poll<io::Result<()>> {
        while !self.done {
            let turn = ready!(coop::poll_proceed(cx));
            if self.held > 0 {
                ready!(to.poll_write_ready(cx))?;
                let wrote = to.try_io(Interest::WRITABLE, || self.write(to));
                if let Some(len) = unless_blocked(wrote)? {
                    self.held -= len;
                    self.moved += len as u64;
                }
            } else if self.ended {
                match rustix::net::shutdown(to, Shutdown::Write) {
                    // The peer is gone already.
                    Ok(()) | Err(Errno::NOTCONN) => self.done = true,
                    Err(error) => return Poll::Ready(Err(error.into())),
                }
            } else {
                ready!(from.poll_read_ready(cx))?;
                let read = from.try_io(Interest::READABLE, || self.read(from));
                if let Some(len) = unless_blocked(read)? {
                    self.held = len;
                    self.ended = len == 0;
                }
            }
            turn.made_progress();
        }
        Poll::Ready(Ok(()))
    }

    /// Reads from the socket into the empty buffer or pipe.
    fn read(&mut self, from: &TcpStream) -> io::Result<usize> {
        match &mut self.way {
            Way::Copying { buffer, start, .. } => {
                buffer.resize(BUFFER, 0);
                *start = 0;
                Ok(rustix::io::read(from, &mut buffer[..])?)
            }
            Way::Splicing { writer, .. } => Ok(moved(from, writer, PIPE)?),
        }
    }

    /// Writes to the socket what is held.
    fn write(&mut self, to: &TcpStream) -> io::Result<usize> {
        match &mut self.way {
            Way::Copying { buffer, start, promotable } => {
                let wrote = rustix::net::send(
                    to,
                    &buffer[*start..*start + self.held],
                    SendFlags::NOSIGNAL,
                )?;
                *start += wrote;
                let full = *start == BUFFER;
                if full && std::mem::take(promotable) {
                    if let Ok((reader, writer)) = large_pipe() {
                        self.way = Way::Splicing { reader, writer };
                    }
                }
                Ok(wrote)
            }
            Way::Splicing { reader, .. } => Ok(moved(reader, to, self.held)?),
        }
    }
}

fn large_pipe() -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    fcntl_setpipe_size(&writer, PIPE)?;
    Ok((reader, writer))
}

fn moved(from: &impl AsFd, to: &impl AsFd, len: usize) -> rustix::io::Result<usize> {
    splice(from, None, to, None, len, SpliceFlags::MOVE | SpliceFlags::NONBLOCK)
}

/// `None` if the call has to be repeated once its socket is ready.
fn unless_blocked(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Ok(len) => Ok(Some(len)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::time::Duration;

    use fastrand::Rng;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;
    use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

    use super::*;

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (near, far) = tokio::join!(TcpStream::connect(address), listener.accept());
        (near.unwrap(), far.unwrap().0)
    }

    fn bytes(random: &mut Rng, len: usize) -> Vec<u8> {
        (0..len).map(|_| random.u8(..)).collect()
    }

    async fn write(mut to: OwnedWriteHalf, data: Vec<u8>, mut random: Rng) {
        let mut rest = &data[..];
        while !rest.is_empty() {
            let (now, later) = rest.split_at(random.usize(1..200_000).min(rest.len()));
            to.write_all(now).await.unwrap();
            rest = later;
            tokio::task::yield_now().await;
        }
    }

    async fn read(mut from: OwnedReadHalf, mut random: Rng) -> Vec<u8> {
        let mut all = Vec::new();
        loop {
            let mut buffer = vec![0; random.usize(1..200_000)];
            match from.read(&mut buffer).await.unwrap() {
                0 => return all,
                len => all.extend_from_slice(&buffer[..len]),
            }
            for _ in 0..random.usize(0..20) {
                tokio::task::yield_now().await;
            }
        }
    }

    /// Each side gets what the other one wrote, and its end; one side may end long before the other.
    #[tokio::test]
    async fn both_directions_arrive_whole() {
        for seed in 0..60 {
            let mut random = Rng::with_seed(seed);
            let ((client, near), (far, target)) = (pair().await, pair().await);
            let joined = tokio::spawn(async move {
                let mut near = Idle::new(near, Duration::from_secs(600));
                join(&mut near, &far).await
            });
            let mut sides = Vec::new();
            for _ in 0..2 {
                let most = [1, 100, 40_000, 3_000_000][random.usize(..4)];
                let len = random.usize(0..most);
                sides.push(bytes(&mut random, len));
            }
            let ((client_in, client_out), (target_in, target_out)) =
                (client.into_split(), target.into_split());
            let (_, _, down, up) = tokio::join!(
                write(client_out, sides[0].clone(), random.fork()),
                write(target_out, sides[1].clone(), random.fork()),
                read(client_in, random.fork()),
                read(target_in, random.fork()),
            );
            assert!(up == sides[0], "seed {seed}: {} of {} bytes up", up.len(), sides[0].len());
            assert!(
                down == sides[1],
                "seed {seed}: {} of {} bytes down",
                down.len(),
                sides[1].len()
            );
            joined.await.unwrap().unwrap();
        }
    }

    /// Short messages cost no descriptors; a stream that fills the buffer gets a pipe.
    #[tokio::test]
    async fn pipe_is_made_for_much_alone() {
        let ((mut client, near), (far, mut target)) = (pair().await, pair().await);
        let mut direction = Direction::default();
        for (len, spliced) in [(10, false), (BUFFER - 1, false), (4 * BUFFER, true), (10, true)] {
            let sent = vec![7; len];
            client.write_all(&sent).await.unwrap();
            let mut got = vec![0; len];
            {
                let mut arrived = std::pin::pin!(target.read_exact(&mut got));
                poll_fn(|cx| {
                    let moving = direction.poll(cx, &near, &far);
                    assert!(moving.is_pending(), "{moving:?}");
                    arrived.as_mut().poll(cx)
                })
                .await
                .unwrap();
            }
            assert!(got == sent);
            assert_eq!(matches!(direction.way, Way::Splicing { .. }), spliced, "{len} bytes");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn idle_join_times_out() {
        let ((_client, near), (far, _target)) = (pair().await, pair().await);
        let mut near = Idle::new(near, Duration::from_secs(10));
        let error = join(&mut near, &far).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
