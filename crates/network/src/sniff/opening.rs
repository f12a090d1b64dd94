//! The beginning of a tunnel: the target gets the client's first bytes once they are checked, and the client
//! what the target says meanwhile.
//!
//! ```text
//!  Reading ──▶ Judging ──▶ Writing ──▶ Through
//!     ▲                       │
//!     └── a first line goes on┘
//! ```

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures_util::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{Check, Sniffed, Sniffer, Watch, Watched};
use crate::policy::Pass;

/// Bytes that are read at a time.
const CHUNK: usize = 4096;

/// Copies both ways until the client's first bytes are known to be for the tunnel's host. The pass, if
/// there is one, is held until the tunnel ends. Does nothing if the proxy does not check tunnels.
pub(crate) async fn check_first_bytes<A, B>(
    check: &Check,
    client: &mut A,
    target: &mut B,
) -> io::Result<Option<Pass>>
where
    A: AsyncRead + AsyncWrite + Unpin,
    B: AsyncRead + AsyncWrite + Unpin,
{
    if !check.shared.check_tunnels {
        return Ok(None);
    }
    let mut up = Up { check, state: State::Reading(Reader::First(check.sniffer())), pass: None };
    let mut down = Down::default();
    poll_fn(|cx| {
        let passed = up.poll(cx, client, target)?.is_ready();
        let written = down.poll(cx, client, target, !passed)?.is_ready();
        if passed && written { Poll::Ready(io::Result::Ok(())) } else { Poll::Pending }
    })
    .await?;
    Ok(up.pass)
}

/// From the client to the target.
struct Up<'a> {
    check: &'a Check,
    state: State<'a>,
    pass: Option<Pass>,
}

enum State<'a> {
    Reading(Reader),
    Judging(Vec<u8>, Option<Watch>, BoxFuture<'a, io::Result<Option<Pass>>>),
    /// The bytes after so many are to be written, and the next ones watched.
    Writing(Vec<u8>, usize, Option<Watch>),
    Through,
}

enum Reader {
    First(Sniffer),
    Line(Watch),
}

impl Up<'_> {
    /// Ready once the rest of the connection is of no concern.
    fn poll<A, B>(
        &mut self,
        cx: &mut Context<'_>,
        client: &mut A,
        target: &mut B,
    ) -> Poll<io::Result<()>>
    where
        A: AsyncRead + Unpin,
        B: AsyncWrite + Unpin,
    {
        loop {
            self.state = match std::mem::replace(&mut self.state, State::Through) {
                State::Reading(reader) => {
                    let mut chunk = [0; CHUNK];
                    let mut chunk = ReadBuf::new(&mut chunk);
                    match Pin::new(&mut *client).poll_read(cx, &mut chunk)? {
                        Poll::Ready(()) => self.on_bytes(reader, chunk.filled())?,
                        Poll::Pending => {
                            self.state = State::Reading(reader);
                            return Poll::Pending;
                        }
                    }
                }
                State::Judging(held, watch, mut judging) => match judging.as_mut().poll(cx)? {
                    Poll::Ready(pass) => {
                        self.pass = pass;
                        State::Writing(held, 0, watch)
                    }
                    Poll::Pending => {
                        self.state = State::Judging(held, watch, judging);
                        return Poll::Pending;
                    }
                },
                State::Writing(bytes, at, watch) if at < bytes.len() => {
                    match Pin::new(&mut *target).poll_write(cx, &bytes[at..])? {
                        Poll::Ready(0) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                        Poll::Ready(written) => State::Writing(bytes, at + written, watch),
                        Poll::Pending => {
                            self.state = State::Writing(bytes, at, watch);
                            return Poll::Pending;
                        }
                    }
                }
                State::Writing(_, _, Some(watch)) => State::Reading(Reader::Line(watch)),
                State::Writing(_, _, None) | State::Through => return Poll::Ready(Ok(())),
            };
        }
    }
}

impl<'a> Up<'a> {
    /// What follows from these bytes; none: the client sends no more.
    fn on_bytes(&self, reader: Reader, bytes: &[u8]) -> io::Result<State<'a>> {
        match reader {
            Reader::First(mut sniffer) => {
                let sniffed = match bytes {
                    [] => Some(sniffer.finish()),
                    bytes => sniffer.push(bytes),
                };
                let Some(sniffed) = sniffed else {
                    return Ok(State::Reading(Reader::First(sniffer)));
                };
                let (held, watch) = sniffer.into_parts();
                Ok(State::Judging(held, watch, judge(self.check, sniffed)))
            }
            Reader::Line(_) if bytes.is_empty() => Ok(State::Through),
            Reader::Line(mut watch) => {
                let watched = self.check.watch(&mut watch, bytes)?;
                let watch = (watched == Watched::Passes).then_some(watch);
                Ok(State::Writing(bytes.to_vec(), 0, watch))
            }
        }
    }
}

fn judge(check: &Check, sniffed: Sniffed) -> BoxFuture<'_, io::Result<Option<Pass>>> {
    Box::pin(check.judge(sniffed))
}

/// From the target to the client.
#[derive(Default)]
struct Down {
    bytes: Vec<u8>,
    written: usize,
    ended: bool,
}

impl Down {
    /// Ready once nothing is left to be written. `read`: take more from the target.
    fn poll<A, B>(
        &mut self,
        cx: &mut Context<'_>,
        client: &mut A,
        target: &mut B,
        read: bool,
    ) -> Poll<io::Result<()>>
    where
        A: AsyncWrite + Unpin,
        B: AsyncRead + Unpin,
    {
        loop {
            if self.written < self.bytes.len() {
                let rest = &self.bytes[self.written..];
                match ready!(Pin::new(&mut *client).poll_write(cx, rest))? {
                    0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                    written => self.written += written,
                }
                continue;
            }
            ready!(Pin::new(&mut *client).poll_flush(cx))?;
            if !read {
                return Poll::Ready(Ok(()));
            }
            if self.ended {
                return Pin::new(&mut *client).poll_shutdown(cx);
            }
            let mut chunk = [0; CHUNK];
            let mut chunk = ReadBuf::new(&mut chunk);
            ready!(Pin::new(&mut *target).poll_read(cx, &mut chunk))?;
            self.ended = chunk.filled().is_empty();
            self.bytes = chunk.filled().to_vec();
            self.written = 0;
        }
    }
}
