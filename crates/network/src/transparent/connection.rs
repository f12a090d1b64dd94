//! One TCP connection of a namespace: judged, connected, checked by its first bytes, and copied.
//!
//! ```text
//!  SYN ──▶ judge ──▶ dial ──▶ SYN-ACK ──▶ first bytes of the client ──▶ copy until both have ended
//!            └▶ RST    └▶ RST, ICMP          └▶ another host: RST
//! ```
//!
//! What the server says is passed on from the beginning: with many protocols it speaks first.

use std::future::poll_fn;
use std::io;
use std::sync::Arc;
use std::task::{Poll, ready};
use std::time::Duration;

use rustix::net::Shutdown;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::debug;

use super::dns;
use super::endpoint::{Ended, Endpoint, Stream};
use super::names::{Names, Target};
use super::packet::Unreachable;
use super::stack::{DNS_PORT, Opening};
use crate::audit::About;
use crate::decide::{Finding, Protocol, Subject};
use crate::host::Host;
use crate::mitm::{self, Opened};
use crate::proxy::{Client, Shared};
use crate::sniff::{Check, Watched};
use crate::target;

/// The wire has no word for a connection that was made without a proxy. This one is the nearest: a
/// stream of bytes to a host and port, without a method, that is never sent to an upstream proxy.
const PROTOCOL: Protocol = Protocol::Socks5Tcp;

/// How long the last segments of a connection may take.
const LINGER: Duration = Duration::from_secs(10);
/// Copies in one direction before the other has a turn.
const TURN: usize = 16;

/// Serves a connection from its SYN to its end.
pub(super) async fn serve(mut opening: Opening, client: Client) {
    let stack = opening.stack.clone();
    let (shared, port) = (&stack.shared, opening.flow.destination.port());
    if port == DNS_PORT {
        let Some(endpoint) = opening.accept() else { return };
        let stream = Stream(endpoint.clone());
        let names = stack.names.clone();
        return run(shared, &endpoint, serve_dns(shared.clone(), names, stream)).await;
    }
    let address = opening.flow.destination.ip();
    // The name stays pinned until the connection ends.
    let (host, _pinned) = match stack.names.target(address) {
        Target::Name(pinned) => (pinned.host.clone(), Some(pinned)),
        Target::Address => (Host::from(address), None),
        Target::Nowhere => {
            let host = Host::from(address);
            report(shared, &host, port, &client, &Finding::nameless());
            return opening.refuse(None);
        }
    };
    let mitm = shared.mitm_for(&host, port);
    let subject =
        Subject { protocol: PROTOCOL, host: &host, port, method: None, opened: mitm.is_some() };
    let Ok(destination) = shared.judge(subject, &client).await else {
        return opening.refuse(None);
    };
    if let Some(mitm) = mitm {
        let Some(endpoint) = opening.accept() else { return };
        let opened = Opened {
            target: target::Target { host, port },
            destination,
            protocol: PROTOCOL,
            client,
        };
        let stream = Stream(endpoint.clone());
        let served = async {
            mitm::serve(shared.clone(), mitm, stream, opened).await;
            Ok(())
        };
        return run(shared, &endpoint, served).await;
    }
    let upstream = match shared.dialer.direct(&host, port, &destination).await {
        Ok(upstream) => upstream,
        Err(error) => {
            debug!(%error, "target of a transparent connection unreachable");
            return opening.refuse(why_unreachable(error.kind()));
        }
    };
    let Some(endpoint) = opening.accept() else { return };
    let (shared, protocol) = (shared.clone(), PROTOCOL);
    let check = Check { shared, protocol, host, port, method: None, client };
    let relayed = async {
        tokio::try_join!(copy_up(&check, &endpoint, &upstream), copy_down(&endpoint, &upstream))?;
        Ok(())
    };
    run(&check.shared, &endpoint, relayed).await;
}

/// How the program learns that its target cannot be reached. `None`: the connection was refused.
fn why_unreachable(kind: io::ErrorKind) -> Option<Unreachable> {
    match kind {
        io::ErrorKind::ConnectionRefused | io::ErrorKind::ConnectionReset => None,
        io::ErrorKind::NetworkUnreachable => Some(Unreachable::Network),
        _ => Some(Unreachable::Host),
    }
}

/// Serves an accepted connection while its timers run, and then lets its last segments arrive.
async fn run(shared: &Shared, endpoint: &Endpoint, served: impl Future<Output = io::Result<()>>) {
    let mut served = std::pin::pin!(served);
    let mut driven = std::pin::pin!(endpoint.drive());
    let idle = async {
        loop {
            let due = endpoint.moved() + shared.limits.idle_timeout;
            if due <= Instant::now() {
                return;
            }
            sleep_until(due).await;
        }
    };
    let result = tokio::select! {
        biased;
        result = &mut served => result,
        ended = &mut driven => match ended {
            // What the client sent last may still be on its way to the target.
            Ended::Closed => return drop(served.await),
            Ended::Reset => Err(io::ErrorKind::ConnectionReset.into()),
        },
        () = idle => Err(io::ErrorKind::TimedOut.into()),
    };
    match result {
        Ok(()) => {
            endpoint.close();
            let _ = timeout(LINGER, driven).await;
        }
        Err(error) => {
            debug!(%error, "transparent connection ended");
            endpoint.abort();
        }
    }
}

/// Copies from the client to the target, once its first bytes are known to be for the host.
async fn copy_up(check: &Check, endpoint: &Endpoint, upstream: &TcpStream) -> io::Result<()> {
    let mut sniffer = check.sniffer();
    let sniffed = loop {
        let received =
            poll_fn(|cx| endpoint.poll_receive(cx, |data| (data.len(), sniffer.push(data))));
        match received.await? {
            Some(Some(sniffed)) => break sniffed,
            Some(None) => {}
            None => break sniffer.finish(),
        }
    };
    // Held for a host that the first bytes name, if the program connected to an address.
    let _pass = check.judge(sniffed).await?;
    let (held, mut watch) = sniffer.into_parts();
    write_all(upstream, &held).await?;
    drop(held);
    while let Some(watching) = &mut watch {
        let received =
            poll_fn(|cx| endpoint.poll_receive(cx, |data| (data.len(), data.to_vec()))).await?;
        let Some(bytes) = received else { break };
        let watched = check.watch(watching, &bytes)?;
        write_all(upstream, &bytes).await?;
        if watched == Watched::Done {
            watch = None;
        }
    }
    poll_fn(|cx| {
        for _ in 0..TURN {
            ready!(upstream.poll_write_ready(cx))?;
            let copied =
                ready!(endpoint.poll_receive(cx, |data| match upstream.try_write(data) {
                    Ok(written) => (written, Ok(())),
                    Err(error) => (0, Err(error)),
                }))?;
            match copied {
                None => return Poll::Ready(Ok(())),
                Some(Err(error)) if error.kind() != io::ErrorKind::WouldBlock => {
                    return Poll::Ready(Err(error));
                }
                Some(_) => {}
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await?;
    match rustix::net::shutdown(upstream, Shutdown::Write) {
        // The target has closed the connection.
        Ok(()) | Err(rustix::io::Errno::NOTCONN) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

async fn write_all(upstream: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        upstream.writable().await?;
        match upstream.try_write(bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Copies from the target to the client.
async fn copy_down(endpoint: &Endpoint, upstream: &TcpStream) -> io::Result<()> {
    poll_fn(|cx| {
        for _ in 0..TURN {
            ready!(endpoint.poll_room(cx))?;
            ready!(upstream.poll_read_ready(cx))?;
            let copied = ready!(endpoint.poll_send(cx, |room| match upstream.try_read(room) {
                Ok(read) => (read, Ok(read)),
                Err(error) => (0, Err(error)),
            }))?;
            match copied {
                Ok(0) => return Poll::Ready(Ok(())),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await?;
    endpoint.close();
    Ok(())
}

fn report(shared: &Shared, host: &Host, port: u16, client: &Client, finding: &Finding) {
    let about = About {
        protocol: PROTOCOL,
        host: Some(host),
        port,
        method: None,
        client: client.address(),
    };
    shared.judge.report(finding, &about);
}

/// Answers queries over TCP until the client ends.
pub(super) async fn serve_dns<S>(
    shared: Arc<Shared>,
    names: Arc<Names>,
    mut stream: S,
) -> io::Result<()>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
{
    let mut query = Vec::new();
    loop {
        let received = timeout(shared.limits.head_timeout, async {
            let length = match stream.read_u16().await {
                Ok(length) => length,
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
                Err(error) => return Err(error),
            };
            query.resize(length.into(), 0);
            stream.read_exact(&mut query).await.map(|_| true)
        });
        if !received.await.map_err(|_| io::ErrorKind::TimedOut)?? {
            return stream.shutdown().await;
        }
        let Some(answer) = dns::answer(&query, &names, &shared.policy.rules()) else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        let mut message = u16::try_from(answer.len()).unwrap_or(0).to_be_bytes().to_vec();
        message.extend(answer);
        stream.write_all(&message).await?;
    }
}
