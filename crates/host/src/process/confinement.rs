//! A sandbox around a process: what is spawned is the sandbox's own command, which becomes the real
//! one, or says why it does not.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::path::Path;

use codex_linux_sandbox::denial::Detector;
use codex_linux_sandbox::{Cleanup, Launch, StatusReader};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::task::JoinHandle;

use super::child::Child;
use super::command::{Command, NulByte};
use super::env::Environment;
use super::host::{ProcessHost, StartError};
use super::orphans::Group;
use super::spawn::SpawnRequest;

/// What is spawned in place of a confined program.
#[derive(Debug)]
pub(crate) struct Confinement {
    launch: Launch,
    command: Command,
}

/// A confined program on its way.
#[derive(Debug)]
pub(super) struct Entering {
    pub child: Child,
    /// Says why it does not run, if it does not.
    pub status: OwnedFd,
    pub cleanup: Cleanup,
}

impl Confinement {
    pub(crate) fn new(mut launch: Launch) -> Result<Self, NulByte> {
        launch.descriptors.sort_by_key(|descriptor| descriptor.number);
        // The numbers are those after the standard streams, without a gap: that is how `spawn`
        // counts them.
        let mut numbered = launch.descriptors.iter().zip(3..);
        debug_assert!(numbered.all(|(passed, number)| passed.number == number));
        let command = command(&launch.program, &launch.args, &launch.env)?;
        Ok(Self { launch, command })
    }
}

/// The executable, re-entered.
pub(super) fn command(
    program: &Path,
    args: &[OsString],
    env: &[(OsString, OsString)],
) -> Result<Command, NulByte> {
    let env: Environment = env.iter().cloned().collect();
    let name = args.first().map_or(program.as_os_str(), OsString::as_os_str);
    let args = args.iter().skip(1).map(OsString::as_os_str);
    Command::new(program.as_os_str(), name, args, &env, Path::new("/"))
}

impl ProcessHost {
    /// Starts the sandbox of a confined program: in a process that was kept ready if there is one.
    pub(super) async fn enter(
        &self,
        confinement: Confinement,
        stdio: [OwnedFd; 3],
        tty: bool,
        group: Group,
    ) -> Result<Entering, StartError> {
        let Confinement { launch, command } = confinement;
        let ready = self.spares().take(&launch.program);
        let child = match ready.and_then(|ready| ready.become_launch(&launch, &stdio, tty, group)) {
            Some(child) => child,
            None => {
                let pass = launch.descriptors.iter().map(|passed| passed.fd.clone()).collect();
                self.spawn(SpawnRequest { group, command, stdio, tty, pass }).await?
            }
        };
        let Launch { status, cleanup, program, .. } = launch;
        self.spares().replenish(self, program);
        Ok(Entering { child, status: status.into(), cleanup })
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
