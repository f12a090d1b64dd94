//! The service manager that started the server (systemd): the sockets that it passed, and the notifications that it gets.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// A listening socket that the service manager passed (`LISTEN_FDS`).
#[derive(Debug)]
pub struct InheritedSocket {
    /// The socket.
    pub socket: OwnedFd,
    /// Its name (`LISTEN_FDNAMES`). A TCP socket named `ws` speaks no TLS, even if there is a certificate.
    pub name: String,
}

/// Tells the service manager what the server does (`NOTIFY_SOCKET`). Without one, does nothing.
#[derive(Debug, Default)]
pub struct ServiceNotifier {
    address: Option<SocketAddr>,
}

impl ServiceNotifier {
    /// Sends to the socket with this name: a path, or `@` and an abstract name.
    pub fn new(name: Option<OsString>) -> Self {
        let address = name.filter(|name| !name.is_empty()).and_then(|name| {
            let address = match name.as_bytes().strip_prefix(b"@") {
                Some(name) => SocketAddr::from_abstract_name(name),
                None => SocketAddr::from_pathname(&name),
            };
            address.inspect_err(|error| tracing::warn!(%error, "cannot use NOTIFY_SOCKET")).ok()
        });
        Self { address }
    }

    /// The server accepts connections.
    pub fn ready(&self) {
        self.send("READY=1");
    }

    /// The server stops.
    pub fn stopping(&self) {
        self.send("STOPPING=1");
    }

    fn send(&self, state: &str) {
        let Some(address) = &self.address else { return };
        let sent = || -> io::Result<()> {
            let socket = UnixDatagram::unbound()?;
            // A manager that does not read must not stop the server.
            socket.set_nonblocking(true)?;
            socket.send_to_addr(state.as_bytes(), address)?;
            Ok(())
        };
        if let Err(error) = sent() {
            tracing::warn!(%error, state, "cannot notify the service manager");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_reach_a_socket_by_path_and_by_abstract_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let by_path = UnixDatagram::bind(&path).unwrap();
        let name = format!("codex-test-{}", std::process::id());
        let abstract_name = SocketAddr::from_abstract_name(&name).unwrap();
        let by_name = UnixDatagram::bind_addr(&abstract_name).unwrap();
        for (socket, name) in
            [(by_path, path.into_os_string()), (by_name, format!("@{name}").into())]
        {
            let notifier = ServiceNotifier::new(Some(name));
            notifier.ready();
            notifier.stopping();
            for expected in ["READY=1", "STOPPING=1"] {
                let mut buffer = [0; 64];
                let length = socket.recv(&mut buffer).unwrap();
                assert_eq!(&buffer[..length], expected.as_bytes());
            }
        }
        ServiceNotifier::new(None).ready();
        ServiceNotifier::new(Some("/nowhere/at/all".into())).ready();
    }
}
