//! Bytes between two streams, both ways, until both are done.

use std::io;

use tokio::io::{AsyncRead, AsyncWrite, copy_bidirectional_with_sizes};

/// Bytes held for each direction.
const BUFFER: usize = 16 * 1024;

pub(crate) async fn join<A, B>(client: &mut A, target: &mut B) -> io::Result<()>
where
    A: AsyncRead + AsyncWrite + Unpin,
    B: AsyncRead + AsyncWrite + Unpin,
{
    copy_bidirectional_with_sizes(client, target, BUFFER, BUFFER).await.map(|_| ())
}
