//! The control socket: a Unix socket on which the operator asks a server what it does, and has it drain.
//!
//! One request per connection, a JSON object in a line; each response is a line, too. The socket is not part
//! of the protocol of clients: whoever may use it may stop the server.
//!
//! Invariant: only the server's user and root are served, and no process in a sandbox. The file has mode 0600
//! and is an own file of the server, which no sandbox opens.

mod client;
mod message;

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::metrics::Refused;
use crate::server::Server;
use crate::socket_file::{self, SocketFile};

pub use client::{ControlClient, ControlError};
pub use message::{DrainEnd, DrainStatus, ServerStatus, SessionCounts, StatusLimits};

use message::{MAX_MESSAGE, Request, Response};

/// Connections that are served at once; more wait.
const CONCURRENT: usize = 64;

/// How long a peer may take to send its request, and to read a response.
const PEER_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a peer that is refused may take to hear of it.
const REFUSED_TIMEOUT: Duration = Duration::from_secs(1);

/// A control socket that is bound.
#[derive(Debug)]
pub(crate) struct ControlSocket {
    listener: UnixListener,
    file: SocketFile,
}

/// The file of the control socket of a server, until it shuts down.
pub(crate) type ControlFile = Mutex<Option<SocketFile>>;

impl ControlSocket {
    /// Binds the socket, in place of one of a server that no longer listens.
    pub(crate) fn bind(path: &Path) -> io::Result<Self> {
        let bound = || -> io::Result<Self> {
            let (socket, file) = socket_file::listen(path)?;
            Ok(Self { listener: UnixListener::from_std(socket.into())?, file })
        };
        bound().map_err(|error| {
            let message = format!("cannot use the control socket {}: {error}", path.display());
            io::Error::new(error.kind(), message)
        })
    }

    /// Its file, which no sandbox may open.
    pub(crate) fn path(&self) -> &Path {
        self.file.path()
    }

    /// Serves the socket in a task until the server shuts down.
    pub(crate) fn start(self, server: &Server) {
        *server.control_file().lock() = Some(self.file);
        tokio::spawn(serve(self.listener, server.clone()));
    }
}

async fn serve(listener: UnixListener, server: Server) {
    let slots = Arc::new(Semaphore::new(CONCURRENT));
    loop {
        let Ok(slot) = slots.clone().acquire_owned().await else { return };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = server.shutting_down() => return,
        };
        match accepted {
            Ok((socket, _)) => {
                let server = server.clone();
                tokio::spawn(async move {
                    let _slot = slot;
                    if let Err(error) = serve_one(socket, &server).await {
                        tracing::debug!(%error, "a control connection failed");
                    }
                });
            }
            Err(error) => {
                tracing::warn!(%error, "accept failed");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

async fn serve_one(mut socket: UnixStream, server: &Server) -> io::Result<()> {
    if let Err(refusal) = server.host().peers().admit_unix(&socket).await {
        tracing::warn!("refused a control connection: {refusal}");
        server.count_refused(Refused::Admission);
        respond(&mut socket, &Response::Error { error: refusal.to_string() }).await?;
        // If the request were not read, the kernel would discard the response with it.
        socket.shutdown().await?;
        let mut rest = socket.take(MAX_MESSAGE);
        let _ = timeout(REFUSED_TIMEOUT, tokio::io::copy(&mut rest, &mut tokio::io::sink())).await;
        return Ok(());
    }
    let (read, mut write) = socket.split();
    let mut line = Vec::new();
    let mut read = BufReader::new(read).take(MAX_MESSAGE);
    timeout(PEER_TIMEOUT, read.read_until(b'\n', &mut line)).await??;
    match serde_json::from_slice(&line) {
        Ok(Request::Status {}) => {
            respond(&mut write, &Response::Status(server.status().await)).await
        }
        Ok(Request::Drain { deadline_ms }) => {
            server.drain(Duration::from_millis(deadline_ms));
            respond(&mut write, &Response::Status(server.status().await)).await?;
            tokio::select! {
                (drained, waiting) = server.drain_state().ended() => {
                    let end = DrainEnd { cut_sessions: drained.cut_sessions as u64 };
                    respond(&mut write, &Response::Drained(end)).await?;
                    drop(waiting);
                    // The end of the connection is the end of the server.
                    std::future::pending().await
                }
                // A peer that does not wait for the end of the drain costs nothing more.
                _ = read.read_u8() => Ok(()),
            }
        }
        Err(error) => {
            let error = format!("cannot read the request: {error}");
            respond(&mut write, &Response::Error { error }).await
        }
    }
}

async fn respond(socket: &mut (impl AsyncWriteExt + Unpin), response: &Response) -> io::Result<()> {
    let mut line = serde_json::to_vec(response)?;
    line.push(b'\n');
    timeout(PEER_TIMEOUT, socket.write_all(&line)).await?
}

impl Server {
    /// What the server does now.
    pub async fn status(&self) -> ServerStatus {
        let [attached, detached] = self.sessions().counts();
        let config = self.config();
        let quota = config.limits.server;
        let draining = self.drain_state().current().map(|drain| DrainStatus {
            elapsed_ms: milliseconds(drain.elapsed),
            deadline_ms: milliseconds(drain.left),
        });
        ServerStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            uptime_ms: milliseconds(self.uptime()),
            listeners: self.listeners(),
            connections: self.open_connections() as u64,
            sessions: SessionCounts { attached: attached as u64, detached: detached as u64 },
            processes: self.sessions().running_processes().await as u64,
            limits: StatusLimits {
                connections: config.entry.connections as u64,
                processes: quota.processes,
                memory_bytes: quota.memory_bytes,
                pids: quota.pids,
            },
            draining,
        }
    }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
