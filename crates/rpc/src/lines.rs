//! JSON lines: one message per line, over a pair of byte streams (stdin and stdout).

use bytes::{Bytes, BytesMut};
use futures_util::stream;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::connection::{Connection, ConnectionConfig, TransportError};
use crate::outbound::{OutboundQueue, Queued, outbound};

impl Connection {
    /// Makes a connection over two byte streams and spawns its write task. An overlong line ends the
    /// connection.
    pub fn lines<R, W>(input: R, output: W, config: &ConnectionConfig) -> Self
    where
        R: AsyncRead + Unpin + Send + 'static,
        W: AsyncWrite + Unpin + Send + 'static,
    {
        let (outbound, queue) = outbound(config.outbound);
        tokio::spawn(async move {
            if let Err(error) = write(output, queue).await {
                tracing::debug!(%error, "line output ended");
            }
        });
        let reader =
            Reader { input, buffer: BytesMut::new(), scanned: 0, limit: config.message_bytes };
        let closed = outbound.clone();
        let incoming = stream::unfold(Some((reader, closed)), |state| async move {
            let (mut reader, closed) = state?;
            let line = tokio::select! {
                line = reader.next() => line,
                () = closed.closed() => return None,
            };
            match line.transpose()? {
                Ok(line) => Some((Ok(line), Some((reader, closed)))),
                Err(error) => Some((Err(error), None)),
            }
        });
        Self::new(incoming, outbound)
    }
}

struct Reader<R> {
    input: R,
    buffer: BytesMut,
    /// How much of the buffer is known to hold no line end.
    scanned: usize,
    limit: usize,
}

impl<R: AsyncRead + Unpin> Reader<R> {
    /// The next line that is not blank, without its newline; the last line may lack one.
    async fn next(&mut self) -> Result<Option<Bytes>, TransportError> {
        loop {
            let line = match memchr::memchr(b'\n', &self.buffer[self.scanned..]) {
                Some(at) => {
                    let mut line = self.buffer.split_to(self.scanned + at + 1);
                    self.scanned = 0;
                    line.truncate(line.len() - 1);
                    line
                }
                None => {
                    self.scanned = self.buffer.len();
                    if self.scanned > self.limit {
                        return Err(TransportError::TooLongToSkip { limit: self.limit });
                    }
                    self.buffer.reserve(8 << 10);
                    if self.input.read_buf(&mut self.buffer).await? > 0 {
                        continue;
                    }
                    if self.buffer.is_empty() {
                        return Ok(None);
                    }
                    self.scanned = 0;
                    self.buffer.split()
                }
            };
            if line.len() > self.limit {
                return Err(TransportError::TooLongToSkip { limit: self.limit });
            }
            if !line.trim_ascii().is_empty() {
                return Ok(Some(line.freeze()));
            }
        }
    }
}

async fn write<W: AsyncWrite + Unpin>(
    mut output: W,
    mut queue: OutboundQueue,
) -> std::io::Result<()> {
    // Shares of the queue whose lines are not written yet.
    let mut unwritten = Vec::new();
    while let Some(first) = queue.recv().await {
        let mut next = Some(first);
        while let Some(queued) = next {
            match queued {
                Queued::Message(line, share) => {
                    output.write_all(&line).await?;
                    output.write_all(b"\n").await?;
                    unwritten.push(share);
                }
                Queued::Mark(mark) => mark.reached(),
                Queued::Ping | Queued::Flush(_) => {}
            }
            next = queue.try_recv();
        }
        output.flush().await?;
        unwritten.clear();
    }
    output.shutdown().await
}
