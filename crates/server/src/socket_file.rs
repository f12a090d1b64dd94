//! The file of a Unix socket.
//!
//! Invariant: the file has mode 0600 from its first moment on; only the file of a server that no longer
//! listens is replaced, and only the file that this server made is removed.

use std::fs::{File, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use codex_exec_host::peer;
use socket2::{Domain, SockAddr, Socket, Type};

/// Connections that wait to be accepted.
pub(crate) const BACKLOG: i32 = 1024;

/// How often and how long to wait for another server that binds in the same directory.
const LOCK_ATTEMPTS: u32 = 50;
const LOCK_PAUSE: Duration = Duration::from_millis(100);

/// The file of a socket that this server listens on. Dropping it removes the file.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

/// Listens on a Unix socket at `path`. Blocks for a few seconds at most, while another server does the same in
/// this directory.
pub(crate) fn listen(path: &Path) -> io::Result<(Socket, SocketFile)> {
    let path = std::path::absolute(path)?;
    let directory = File::open(path.parent().unwrap_or(Path::new("/")))?;
    // Two servers that find the same stale file must not both replace it.
    lock(&directory)?;
    remove_stale(&path)?;
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    // The file gets the mode of the socket, less the umask.
    let descriptor = OwnedFd::from(socket.try_clone()?);
    File::from(descriptor).set_permissions(Permissions::from_mode(0o600))?;
    socket.bind(&SockAddr::unix(&path)?)?;
    let metadata = path.symlink_metadata()?;
    let file = SocketFile { path, device: metadata.dev(), inode: metadata.ino() };
    if metadata.mode() & 0o077 != 0 {
        return Err(io::Error::other("the file system ignores the mode of a socket file"));
    }
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok((socket, file))
}

fn lock(directory: &File) -> io::Result<()> {
    for _ in 0..LOCK_ATTEMPTS {
        match directory.try_lock() {
            Ok(()) => return Ok(()),
            Err(std::fs::TryLockError::Error(error)) => return Err(error),
            Err(std::fs::TryLockError::WouldBlock) => std::thread::sleep(LOCK_PAUSE),
        }
    }
    let reason = "another process holds a lock on the directory of the socket";
    Err(io::Error::new(io::ErrorKind::WouldBlock, reason))
}

/// Removes the socket of a server that no longer listens; fails if the path is anything else.
fn remove_stale(path: &Path) -> io::Result<()> {
    let in_use = |reason| Err(io::Error::new(io::ErrorKind::AddrInUse, reason));
    let metadata = match path.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        metadata => metadata?,
    };
    if !metadata.file_type().is_socket() {
        return in_use("the path exists and is not a socket");
    }
    if metadata.uid() != peer::own_uid() {
        return in_use("the path is the socket of another user");
    }
    let probe = Socket::new(Domain::UNIX, Type::STREAM.nonblocking(), None)?;
    match probe.connect(&SockAddr::unix(path)?) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path)
        }
        _ => in_use("another server listens there"),
    }
}

impl SocketFile {
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Another server may replace the file once this one no longer listens.
        let directory = self.path.parent().and_then(|directory| File::open(directory).ok());
        let _lock = directory.filter(|directory| directory.try_lock().is_ok());
        let is_ours = |metadata: std::fs::Metadata| {
            (metadata.dev(), metadata.ino()) == (self.device, self.inode)
        };
        if self.path.symlink_metadata().is_ok_and(is_ours) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    fn kind(result: io::Result<(Socket, SocketFile)>) -> io::ErrorKind {
        result.map(|_| ()).unwrap_err().kind()
    }

    #[test]
    fn only_a_stale_socket_is_replaced_and_only_our_own_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "a dead server leaves its file");
        let (socket, file) = listen(&path).unwrap();
        assert_eq!(path.symlink_metadata().unwrap().mode() & 0o7777, 0o600);
        UnixStream::connect(&path).unwrap();
        assert_eq!(kind(listen(&path)), io::ErrorKind::AddrInUse, "it lives");
        UnixStream::connect(&path).unwrap();
        drop((socket, file));
        assert!(!path.exists());
        // A file that took the name of ours stays.
        let (_socket, file) = listen(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "another's").unwrap();
        drop(file);
        assert_eq!(std::fs::read(&path).unwrap(), b"another's");
        assert_eq!(kind(listen(&path)), io::ErrorKind::AddrInUse, "not a socket");
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(directory.path().join("nowhere"), &link).unwrap();
        assert_eq!(kind(listen(&link)), io::ErrorKind::AddrInUse, "a link");
    }

    /// Servers that find a stale socket at the same time: one of them listens in the end, under that name.
    #[test]
    fn of_servers_that_race_for_a_stale_socket_one_wins() {
        for _ in 0..20 {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("socket");
            drop(UnixListener::bind(&path).unwrap());
            let racers: Vec<_> = (0..4)
                .map(|_| {
                    let path = path.clone();
                    std::thread::spawn(move || listen(&path))
                })
                .collect();
            let won: Vec<_> =
                racers.into_iter().filter_map(|racer| racer.join().unwrap().ok()).collect();
            assert_eq!(won.len(), 1);
            UnixStream::connect(&path).unwrap();
        }
    }
}
