//! A sandbox around a process: what is spawned is the sandbox's own command, which becomes the real
//! one, or says why it does not.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use codex_linux_sandbox::denial::Detector;
use codex_linux_sandbox::{Cleanup, StatusReader};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::task::JoinHandle;

use super::command::{Command, NulByte};
use super::env::Environment;
use super::host::StartError;

/// What is spawned in place of a confined program.
#[derive(Debug)]
pub(crate) struct Confinement {
    pub command: Command,
    /// Passed as 3, 4, …; let go of once it is spawned.
    pub pass: Vec<Arc<OwnedFd>>,
    pub status: OwnedFd,
    pub cleanup: Cleanup,
}

impl Confinement {
    pub(crate) fn new(launch: codex_linux_sandbox::Launch) -> Result<Self, NulByte> {
        let mut passed = launch.descriptors;
        passed.sort_by_key(|descriptor| descriptor.number);
        // The numbers are those after the standard streams, without a gap: that is how `spawn`
        // counts them.
        debug_assert!(passed.iter().zip(3..).all(|(passed, number)| passed.number == number));
        let env: Environment = launch.env.into_iter().collect();
        let name = launch.args.first().map_or(launch.program.as_os_str(), OsString::as_os_str);
        let args = launch.args.iter().skip(1).map(OsString::as_os_str);
        Ok(Self {
            command: Command::new(launch.program.as_os_str(), name, args, &env, Path::new("/"))?,
            pass: passed.into_iter().map(|passed| passed.fd).collect(),
            status: launch.status.into(),
            cleanup: launch.cleanup,
        })
    }
}

/// Waits until the real program runs, or the sandbox has said why it does not.
pub(crate) async fn entered(status: OwnedFd) -> Result<(), StartError> {
    let setup = |source| StartError::Setup { what: "the sandbox's status", source };
    let mut status = pipe::Receiver::from_owned_fd(status).map_err(setup)?;
    let mut words = Vec::new();
    status.read_to_end(&mut words).await.map_err(setup)?;
    match StatusReader::understand(&words) {
        None => Ok(()),
        Some(failure) => Err(StartError::Sandbox(failure)),
    }
}

/// What is known of a confined process while it runs.
#[derive(Debug)]
pub(super) struct Confined {
    words: Detector,
    cleanup: Cleanup,
}

impl Confined {
    pub(super) fn new(cleanup: Cleanup) -> Self {
        Self { words: Detector::default(), cleanup }
    }

    /// It has written this.
    pub(super) fn wrote(&mut self, bytes: &[u8]) {
        self.words.feed(bytes);
    }

    /// Whether its sandbox probably caused this exit.
    pub(super) fn denied(&self, code: i32) -> bool {
        self.words.denied(code)
    }

    /// Removes what it may have left on the host: necessary only if it was killed.
    pub(super) fn clean_up(self) -> JoinHandle<()> {
        tokio::task::spawn_blocking(move || {
            if !self.cleanup.is_empty() {
                self.cleanup.run();
            }
        })
    }
}
