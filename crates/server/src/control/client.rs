//! The operator's end of a control socket.
//!
//! It blocks: a command line has nothing else to do.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::message::{DrainEnd, MAX_MESSAGE, Request, Response, ServerStatus};

/// How long a server may take to answer.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Why a request on a control socket failed.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// No server listens there, or it cannot be asked.
    #[error("cannot reach a server at the control socket {}: {source}", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The server refused the request.
    #[error("the server refused: {0}")]
    Refused(String),
    /// The server ended, or did not answer.
    #[error("the server did not answer: {0}")]
    Lost(#[source] io::Error),
    /// Something else than a server answered.
    #[error("the answer is not that of a server")]
    Protocol,
}

/// A connection to the control socket of a server.
#[derive(Debug)]
pub struct ControlClient {
    socket: BufReader<UnixStream>,
}

impl ControlClient {
    /// Connects to the server with this control socket.
    pub fn connect(path: &Path) -> Result<Self, ControlError> {
        let failed = |source| ControlError::Connect { path: path.to_owned(), source };
        let socket = UnixStream::connect(path).map_err(failed)?;
        let timeouts = socket.set_read_timeout(Some(TIMEOUT));
        timeouts.and_then(|()| socket.set_write_timeout(Some(TIMEOUT))).map_err(failed)?;
        Ok(Self { socket: BufReader::new(socket) })
    }

    /// Asks what the server does.
    pub fn status(mut self) -> Result<ServerStatus, ControlError> {
        self.send(&Request::Status {})?;
        match self.receive()? {
            Response::Status(status) => Ok(status),
            _ => Err(ControlError::Protocol),
        }
    }

    /// Has the server drain and stop, at the latest after `deadline`. Returns what it does now.
    pub fn drain(&mut self, deadline: Duration) -> Result<ServerStatus, ControlError> {
        let deadline_ms = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
        self.send(&Request::Drain { deadline_ms })?;
        match self.receive()? {
            Response::Status(status) => Ok(status),
            _ => Err(ControlError::Protocol),
        }
    }

    /// After [`drain`](Self::drain): waits until the server has drained and ended.
    pub fn wait_ended(mut self) -> Result<DrainEnd, ControlError> {
        self.socket.get_ref().set_read_timeout(None).map_err(ControlError::Lost)?;
        let Response::Drained(end) = self.receive()? else { return Err(ControlError::Protocol) };
        match self.socket.read(&mut [0]) {
            Ok(0) => Ok(end),
            Ok(_) => Err(ControlError::Protocol),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(end),
            Err(error) => Err(ControlError::Lost(error)),
        }
    }

    fn send(&mut self, request: &Request) -> Result<(), ControlError> {
        let mut line =
            serde_json::to_vec(request).map_err(|error| ControlError::Lost(error.into()))?;
        line.push(b'\n');
        self.socket.get_mut().write_all(&line).map_err(ControlError::Lost)
    }

    fn receive(&mut self) -> Result<Response, ControlError> {
        let mut line = Vec::new();
        let mut limited = (&mut self.socket).take(MAX_MESSAGE);
        limited.read_until(b'\n', &mut line).map_err(ControlError::Lost)?;
        if line.is_empty() {
            return Err(ControlError::Lost(io::ErrorKind::UnexpectedEof.into()));
        }
        match serde_json::from_slice(&line) {
            Ok(Response::Error { error }) => Err(ControlError::Refused(error)),
            Ok(response) => Ok(response),
            Err(_) => Err(ControlError::Protocol),
        }
    }
}
