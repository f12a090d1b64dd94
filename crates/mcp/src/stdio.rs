//! MCP over a pair of streams: one message a line.

use std::io;
use std::sync::Arc;

use serde_json::Value;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::{Semaphore, mpsc};

use crate::message::{self, Incoming, Malformed, Replies};
use crate::session::Session;

/// Messages that wait to be written.
const QUEUE: usize = 64;

/// Serves one client until it closes its stream; then kills what it left running.
pub async fn serve_stdio(
    session: Session,
    mut input: impl AsyncBufRead + Unpin,
    output: impl AsyncWrite + Unpin + Send + 'static,
) -> io::Result<()> {
    let (replies, queue) = Replies::channel(QUEUE);
    let writer = tokio::spawn(write(output, queue));
    let result = read(&session, &mut input, &replies).await;
    session.end().await;
    drop(replies);
    let written = writer.await.unwrap_or_else(|error| Err(io::Error::other(error)));
    // A client that has gone away reads nothing more, which is its right.
    match result.and(written) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

async fn read(
    session: &Session,
    input: &mut (impl AsyncBufRead + Unpin),
    replies: &Replies,
) -> io::Result<()> {
    let config = &session.workspace().config;
    let limit = config.max_message_bytes;
    let room = Arc::new(Semaphore::new(config.max_requests));
    let mut line = Vec::new();
    loop {
        line.clear();
        let bounded = &mut (&mut *input).take(limit as u64 + 1);
        if bounded.read_until(b'\n', &mut line).await? == 0 {
            return Ok(());
        }
        if line.len() > limit && line.last() != Some(&b'\n') {
            let message = format!("a message is longer than {limit} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let messages = match message::parse(&line) {
            Ok(messages) => messages,
            Err(malformed) => vec![Err(malformed)],
        };
        for message in messages {
            handle(session, message, replies, &room).await;
        }
    }
}

/// Requests run beside each other; notifications take effect before the next message is read.
async fn handle(
    session: &Session,
    message: Result<Incoming, Malformed>,
    replies: &Replies,
    room: &Arc<Semaphore>,
) {
    if !matches!(message, Ok(Incoming::Request { .. })) {
        return session.handle(message, replies).await;
    }
    let permit = room.clone().acquire_owned().await;
    let (session, replies) = (session.clone(), replies.clone());
    tokio::spawn(async move {
        let _permit = permit;
        session.handle(message, &replies).await;
    });
}

async fn write(
    mut output: impl AsyncWrite + Unpin,
    mut queue: mpsc::Receiver<Value>,
) -> io::Result<()> {
    while let Some(message) = queue.recv().await {
        let mut line = serde_json::to_vec(&message)?;
        line.push(b'\n');
        output.write_all(&line).await?;
        output.flush().await?;
    }
    Ok(())
}
