//! Starts a process in a sandbox: the host spawns the sandbox's own command, which becomes the program
//! or reports why it cannot.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use codex_exec_server_protocol::Assurance;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::task::JoinHandle;

use crate::pool;
use crate::sandbox::{
    Cleanup, Detector, Executable, Failure, Launch, NetworkDescriptors, NetworkReceiver,
    StatusReader,
};

use super::child::Child;
use super::command::{Command, NulByte};
use super::env::Environment;
use super::host::{ProcessHost, StartError};
use super::keeper::OrderLimits;
use super::leftovers::Group;
use super::spawner::SpawnRequest;

/// How long a failed sandbox may take to clean up and exit.
const FAILURE_EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// What to spawn in place of a confined program.
#[derive(Debug)]
pub(crate) struct Confinement {
    launch: Launch,
    command: Command,
}

/// A sandbox that is being set up.
#[derive(Debug)]
pub(super) struct StartingSandbox {
    pub child: Child,
    /// Receives the failure, if there is one.
    pub status: OwnedFd,
    /// Receives the sockets of the managed network, if it has one.
    pub network: Option<NetworkReceiver>,
    pub cleanup: Cleanup,
}

impl Confinement {
    pub(crate) fn new(mut launch: Launch) -> Result<Self, NulByte> {
        launch.descriptors.sort_by_key(|descriptor| descriptor.number);
        // The numbers follow the standard streams without a gap, as `SpawnRequest::pass` numbers them.
        let mut numbered = launch.descriptors.iter().zip(3..);
        debug_assert!(numbered.all(|(passed, number)| passed.number == number));
        let command = command(&launch.program, &launch.args, &launch.env)?;
        Ok(Self { launch, command })
    }

    /// Assurance of the sandbox.
    pub(super) fn assurance(&self) -> Assurance {
        self.launch.assurance
    }
}

/// The command that re-enters the executable.
pub(super) fn command(
    program: &Executable,
    args: &[OsString],
    env: &[(OsString, OsString)],
) -> Result<Command, NulByte> {
    let env: Environment = env.iter().cloned().collect();
    let name = args.first().map_or(program.path().as_os_str(), OsString::as_os_str);
    let args = args.iter().skip(1).map(OsString::as_os_str);
    let command = Command::new(program.path().as_os_str(), name, args, &env, Path::new("/"))?;
    Ok(command.with_executable(program))
}

impl ProcessHost {
    /// Starts the sandbox of a confined program, in the spare process if there is one.
    pub(super) async fn start_sandbox(
        &self,
        confinement: Confinement,
        stdio: [OwnedFd; 3],
        tty: bool,
        group: Group,
        limits: OrderLimits,
    ) -> Result<StartingSandbox, StartError> {
        let Confinement { launch, command } = confinement;
        if launch.has_host_network || launch.network.is_some() {
            self.peers().sandbox_has_network();
        }
        // A spare is not in the control group, and has been born with other limits.
        let limited = limits.cgroup.is_some() || limits.open_files > 0;
        let spare = if limited { None } else { self.spares().take(&launch.program) };
        let child = match spare.and_then(|spare| spare.activate(&launch, &stdio, tty, group)) {
            Some(child) => child,
            None => {
                let pass = launch.descriptors.iter().map(|passed| passed.fd.clone()).collect();
                let cleans_up = !launch.cleanup.is_empty();
                let request = SpawnRequest { group, command, stdio, tty, pass, cleans_up, limits };
                self.spawn(request).await?
            }
        };
        let child = child.with_cleanup(launch.cleanup.clone());
        let Launch { status, cleanup, program, network, .. } = launch;
        self.spares().replenish(self, program);
        Ok(StartingSandbox { child, status: status.into(), network, cleanup })
    }
}

impl StartingSandbox {
    /// Waits until the program runs, or until the sandbox has failed; then all its processes are gone.
    /// Returns the sockets of the managed network, if it has one.
    pub(super) async fn wait_started(
        self,
    ) -> Result<(Child, Option<NetworkDescriptors>), StartError> {
        let Self { mut child, status, network, cleanup: _ } = self;
        let failure = match read_status(status).await {
            Ok(None) => match network.map(NetworkReceiver::receive).transpose() {
                Ok(network) => return Ok((child, network)),
                Err(source) => StartError::Setup { what: "the managed network", source },
            },
            Ok(Some(failure)) => StartError::Sandbox(failure),
            Err(source) => StartError::Setup { what: "the sandbox's status", source },
        };
        if tokio::time::timeout(FAILURE_EXIT_TIMEOUT, child.wait_exit())
            .await
            .is_ok_and(|code| code <= 128)
        {
            child.release();
        } else {
            // Killing blocks, which a runtime thread must not do.
            let _ = pool::blocking(move || drop(child)).await;
        }
        Err(failure)
    }
}

async fn read_status(status: OwnedFd) -> io::Result<Option<Failure>> {
    let mut bytes = Vec::new();
    pipe::Receiver::from_owned_fd(status)?.read_to_end(&mut bytes).await?;
    Ok(StatusReader::parse(&bytes))
}

/// A confined process while it runs.
#[derive(Debug)]
pub(super) struct Confined {
    detector: Detector,
    cleanup: Cleanup,
    assurance: Assurance,
}

impl Confined {
    pub(super) fn new(cleanup: Cleanup, assurance: Assurance) -> Self {
        Self { detector: Detector::default(), cleanup, assurance }
    }

    /// Assurance of its sandbox.
    pub(super) fn assurance(&self) -> Assurance {
        self.assurance
    }

    /// Checks output for signs of a denial.
    pub(super) fn observe_output(&mut self, bytes: &[u8]) {
        self.detector.feed(bytes);
    }

    /// Whether its sandbox probably caused this exit.
    pub(super) fn denied(&self, code: i32) -> bool {
        self.detector.denied(code)
    }

    /// Removes what it may have left on the host; needed only if it was killed.
    pub(super) fn clean_up(self) -> JoinHandle<()> {
        tokio::spawn(async move {
            if !self.cleanup.is_empty() {
                let _ = pool::blocking(move || self.cleanup.run()).await;
            }
        })
    }
}
