//! Bytes between a client and its target, both ways, until both are done.

use std::any::Any;
use std::io;

use tokio::io::{AsyncRead, AsyncWrite, copy_bidirectional_with_sizes};
use tokio::net::TcpStream;

use crate::idle::Idle;
use crate::splice;

/// Bytes held for each direction.
pub(crate) const BUFFER: usize = 16 * 1024;

/// Joins a client with a target. Between two sockets the kernel moves what is much.
pub(crate) async fn join<S>(client: &mut S, target: &mut TcpStream) -> io::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin + 'static,
{
    match (client as &mut dyn Any).downcast_mut::<Idle<TcpStream>>() {
        Some(client) => splice::join(client, target).await,
        None => copy(client, target).await,
    }
}

/// Joins any two streams.
pub(crate) async fn copy<A, B>(client: &mut A, target: &mut B) -> io::Result<()>
where
    A: AsyncRead + AsyncWrite + Unpin,
    B: AsyncRead + AsyncWrite + Unpin,
{
    copy_bidirectional_with_sizes(client, target, BUFFER, BUFFER).await.map(|_| ())
}
