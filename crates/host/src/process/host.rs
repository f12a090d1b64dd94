//! Starts processes, and kills what is left of them at shutdown.

use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;

use codex_exec_server_protocol::process::{OutputStream, Retain, TerminalSize};
use codex_exec_server_protocol::resources::AppliedLimits;
use codex_exec_server_protocol::{Assurance, ErrorKind};
use rustix::fs::{Mode, OFlags};
use tokio::sync::{mpsc, oneshot};

use crate::peer::Peers;
use crate::pool;
use crate::sandbox::{Failure, NetworkDescriptors, Stage};

use super::actor::{Actor, Parts};
use super::cgroup::ProgramGroups;
use super::child::Child;
use super::config::{Lifeline, ProcessConfig};
use super::confinement::Confined;
use super::handle::{Command, ProcessHandle, Reply};
use super::helper::HelperProcesses;
use super::launch::{Launch, LaunchError, LaunchTarget};
use super::leftovers::{Group, Leftovers};
use super::limits::{LimitError, Prepared};
use super::output::Output;
use super::outputs::Outputs;
use super::pty;
use super::readiness::register;
use super::retention::{Retention, RetentionLimits};
use super::screen::TerminalScreen;
use super::spares::Spares;
use super::spawner::{SpawnError, SpawnRequest, Spawner};
use super::spool::Spool;
use super::stdin::Stdin;
use super::warden::Warden;

/// Starts processes on this machine.
#[derive(Debug, Clone)]
pub struct ProcessHost {
    config: Arc<ProcessConfig>,
    spawner: Spawner,
    leftovers: Leftovers,
    spares: Spares,
    helpers: HelperProcesses,
    peers: Peers,
    program_groups: ProgramGroups,
}

/// A started process.
#[derive(Debug)]
pub struct Started {
    /// Assurance of its sandbox; `None` without one.
    pub assurance: Option<Assurance>,
    /// What to serve in its managed network; `None` without one. The program runs already: what it has
    /// connected to waits to be served.
    pub network: Option<NetworkDescriptors>,
    /// The limits in force; `None` if there are none.
    pub limits: Option<Box<AppliedLimits>>,
}

/// Why a process did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The program cannot be executed.
    #[error(transparent)]
    Spawn(#[from] SpawnError),
    /// The host cannot set up what the process needs.
    #[error("cannot set up {what}: {source}")]
    Setup {
        /// A terminal, a pipe or a spool.
        what: &'static str,
        /// The error of the system.
        source: io::Error,
    },
    /// The request exceeds a limit.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// A limit cannot be enforced.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// The sandbox could not be built, or could not execute the program; nothing ran.
    #[error("{0}")]
    Sandbox(Failure),
}

impl StartError {
    /// The error kind to report.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Spawn(error) => error.kind(),
            Self::Setup { source, .. } => ErrorKind::of_system(source),
            Self::Launch(LaunchError::Retain { .. }) => ErrorKind::LimitReached,
            Self::Launch(_) => ErrorKind::InvalidParams,
            Self::Limit(LimitError::TooSmall { .. }) => ErrorKind::InvalidParams,
            Self::Limit(LimitError::Unsupported { .. }) => ErrorKind::Unsupported,
            Self::Sandbox(failure) => match failure.stage {
                Stage::Execute => ErrorKind::of_exec(&failure.io_error()),
                Stage::WorkingDirectory => ErrorKind::of_chdir(&failure.io_error()),
                _ => ErrorKind::SandboxUnavailable,
            },
        }
    }
}

impl ProcessHost {
    /// Creates a host in this process. Call it inside a tokio runtime.
    pub fn new(config: ProcessConfig) -> io::Result<Self> {
        pool::start_threads()?;
        let mut program_groups = ProgramGroups::default();
        let spawner = match &config.lifeline {
            Lifeline::Own => Spawner::Own(Arc::default()),
            Lifeline::Warden { executable } => {
                let limit = raise_descriptor_limit();
                require_descriptors()?;
                program_groups = ProgramGroups::prepare();
                Spawner::Warden(Warden::start(executable, limit)?)
            }
        };
        let spares = if config.spare_sandbox { Spares::default() } else { Spares::none() };
        let helpers = HelperProcesses::default();
        let peers = Peers::new(matches!(config.lifeline, Lifeline::Warden { .. }));
        let leftovers = Leftovers::default();
        Ok(Self {
            config: Arc::new(config),
            spawner,
            leftovers,
            spares,
            helpers,
            peers,
            program_groups,
        })
    }

    /// Starts a process once `launch` resolves. The handle queues commands until then; the reply says
    /// whether the start succeeded. Events wait until a sink is attached.
    ///
    /// If its sandbox fails, the host tries once more with what `again` returns for the failure.
    pub fn start<E: From<StartError> + Send + 'static, F>(
        &self,
        launch: F,
        again: impl FnOnce(&Failure) -> Option<F> + Send + 'static,
    ) -> (ProcessHandle, Reply<Result<Started, E>>)
    where
        F: Future<Output = Result<Launch, E>> + Send + 'static,
    {
        let (mailbox, commands) = mpsc::unbounded_channel();
        let (started, answer) = oneshot::channel();
        let host = self.clone();
        // In a box of its own: it needs far more memory than the process that it leads to.
        let starting = Box::pin(async move {
            let (mut launch, mut again) = (launch, Some(again));
            loop {
                match host.parts(launch.await?).await {
                    Err(StartError::Sandbox(failure)) => {
                        match again.take().and_then(|again| again(&failure)) {
                            Some(next) => launch = next,
                            None => return Err(E::from(StartError::Sandbox(failure))),
                        }
                    }
                    parts => return Ok(parts?),
                }
            }
        });
        tokio::spawn(run(starting, self.config.clone(), commands, started));
        (ProcessHandle { mailbox }, answer)
    }

    /// Kills processes that programs of this group left behind. The programs themselves have been
    /// killed already.
    pub async fn end_group(&self, group: Group) {
        let leftovers = self.leftovers.clone();
        let _ = pool::blocking(move || leftovers.kill_group(group)).await;
    }

    /// Kills the helpers and all processes left behind, and dismisses the warden.
    pub async fn shut_down(&self) {
        let (leftovers, spares, helpers) =
            (self.leftovers.clone(), self.spares.clone(), self.helpers.clone());
        let warden = match &self.spawner {
            Spawner::Warden(warden) => Some(warden.clone()),
            Spawner::Own(_) => None,
        };
        let ended = pool::blocking(move || {
            spares.shut_down();
            helpers.kill_all();
            leftovers.kill_all();
            if let Some(warden) = warden {
                warden.kill_orphans();
            }
        });
        let _ = ended.await;
        if let Spawner::Warden(warden) = &self.spawner {
            warden.dismiss();
        }
    }

    async fn parts(
        &self,
        mut launch: Launch,
    ) -> Result<(Parts, Option<NetworkDescriptors>), StartError> {
        let retention = self.retention(launch.retain).await?;
        let limits = self.limits(&mut launch)?;
        let order = limits.as_ref().map(Prepared::order).unwrap_or_default();
        let io = Stdio::new(&launch, &self.config)
            .map_err(|(what, source)| StartError::Setup { what, source })?;
        let tty = launch.terminal.is_some();
        let (group, stdio) = (launch.group, io.child_ends);
        let (mut child, confined, network) = match launch.target {
            LaunchTarget::Program(command) => {
                let pass = launch.inherit.into_iter().collect();
                let (cleans_up, limits) = (false, order);
                let request = SpawnRequest { group, command, stdio, tty, pass, cleans_up, limits };
                (self.spawn(request).await?, None, None)
            }
            LaunchTarget::Confined(confinement) => {
                let assurance = confinement.assurance();
                let starting = self.start_sandbox(confinement, stdio, tty, group, order).await?;
                let cleanup = starting.cleanup.clone();
                let (child, network) = starting.wait_started().await?;
                (child, Some(Confined::new(cleanup, assurance)), network)
            }
        };
        let limited = limits.map(|limits| Box::new(child.watch(limits)));
        let parts = Parts {
            process_id: launch.process_id,
            argv: launch.argv,
            cwd: launch.cwd,
            child,
            stdin: io.stdin,
            outputs: io.outputs,
            terminal: io.terminal,
            screen: launch.terminal.map(|size| Box::new(TerminalScreen::new(size))),
            retention,
            confined,
            limited,
            on_exit: launch.on_exit,
            tap: launch.tap,
            while_running: launch.while_running,
        };
        Ok((parts, network))
    }

    /// The admission check for connections from this machine: refuses sandboxed processes.
    pub fn peers(&self) -> &Peers {
        &self.peers
    }

    /// The spare sandbox processes.
    pub(super) fn spares(&self) -> &Spares {
        &self.spares
    }

    /// The running helpers.
    pub(super) fn helpers(&self) -> &HelperProcesses {
        &self.helpers
    }

    /// Starts a process that dies with this one.
    pub(super) async fn spawn(&self, request: SpawnRequest) -> Result<Child, StartError> {
        let group = request.group;
        Ok(Child::new(self.spawner.spawn(request).await?, group, self.leftovers.clone()))
    }

    /// Decides what enforces the limits of a process.
    fn limits(&self, launch: &mut Launch) -> Result<Option<Prepared>, StartError> {
        let held = launch.until_gone.take();
        if launch.limits.is_none() && held.is_none() {
            return Ok(None);
        }
        let confined = matches!(launch.target, LaunchTarget::Confined(_));
        let limits = launch.limits.take().unwrap_or_default();
        let interval = self.config.limit_interval;
        Ok(Some(Prepared::new(&limits, &self.program_groups, interval, confined, held)?))
    }

    async fn retention(&self, retain: Option<Retain>) -> Result<Retention, StartError> {
        let config = &self.config;
        let mut limits = RetentionLimits {
            bytes: config.retain_bytes,
            chunks: config.retain_chunks,
            on_full: Default::default(),
            until: Default::default(),
        };
        if let Some(retain) = retain {
            if retain.bytes > config.max_retain_bytes {
                let limit = config.max_retain_bytes;
                return Err(LaunchError::Retain { asked: retain.bytes, limit }.into());
            }
            limits.bytes = retain.bytes;
            limits.on_full = retain.on_full;
            limits.until = retain.until;
        }
        let mut spool = None;
        if limits.bytes > config.spool_above {
            let (directory, bytes) = (config.spool_directory.clone(), limits.bytes);
            let made = pool::blocking(move || Spool::create(&directory, bytes)).await;
            let made = made.unwrap_or_else(|error| Err(io::Error::other(error)));
            let setup = |source| StartError::Setup { what: "a spool for its output", source };
            spool = Some(made.map_err(setup)?);
        }
        Ok(Retention::new(limits, spool))
    }
}

/// Starts a process and owns it until it is forgotten.
///
/// `starting` is freed when the process runs, so that it costs its actor alone.
async fn run<E>(
    starting: Pin<Box<impl Future<Output = Result<(Parts, Option<NetworkDescriptors>), E>>>>,
    config: Arc<ProcessConfig>,
    commands: mpsc::UnboundedReceiver<Command>,
    started: oneshot::Sender<Result<Started, E>>,
) {
    match starting.await {
        Ok((parts, network)) => {
            let assurance = parts.confined.as_ref().map(Confined::assurance);
            let limits = parts.limited.as_ref().and_then(|limited| limited.applied());
            let _ = started.send(Ok(Started { assurance, network, limits }));
            // On the heap: a future keeps a copy of every value that is moved into another.
            Box::new(Actor::new(parts, config, commands)).run().await;
        }
        Err(error) => {
            // Drop the mailbox before replying: the caller may reuse the process id at once.
            drop(commands);
            let _ = started.send(Err(error));
        }
    }
}

/// Both ends of a process's stdin and outputs.
struct Stdio {
    child_ends: [OwnedFd; 3],
    stdin: Stdin,
    outputs: Outputs,
    terminal: Option<Arc<OwnedFd>>,
}

impl Stdio {
    fn new(launch: &Launch, config: &ProcessConfig) -> Result<Self, (&'static str, io::Error)> {
        match launch.terminal {
            Some(size) => Self::terminal(size, config).map_err(|error| ("a terminal", error)),
            None => Self::pipes(launch.pipe_stdin, config).map_err(|error| ("pipes", error)),
        }
    }

    fn terminal(size: TerminalSize, config: &ProcessConfig) -> io::Result<Self> {
        let pty::Pty { master, terminal } = pty::open(size)?;
        // A second descriptor of the same terminal, so that reads and writes have separate readiness.
        let input = Arc::new(master.try_clone()?);
        let child_ends = [terminal.try_clone()?, terminal.try_clone()?, terminal];
        Ok(Self {
            child_ends,
            stdin: Stdin::new(Some(register(input.clone())?), config.stdin_queue_bytes),
            outputs: Outputs::new([Some(Output::new(OutputStream::Pty, register(master)?)), None]),
            terminal: Some(input),
        })
    }

    fn pipes(pipe_stdin: bool, config: &ProcessConfig) -> io::Result<Self> {
        let (their_stdin, stdin) = if pipe_stdin {
            let (reader, writer) = io::pipe()?;
            rustix::io::ioctl_fionbio(&writer, true)?;
            (reader.into(), Some(register(Arc::new(writer.into()))?))
        } else {
            let flags = OFlags::RDONLY | OFlags::CLOEXEC;
            (rustix::fs::open("/dev/null", flags, Mode::empty())?, None)
        };
        let (stdout, their_stdout) = output_pipe()?;
        let (stderr, their_stderr) = output_pipe()?;
        Ok(Self {
            child_ends: [their_stdin, their_stdout, their_stderr],
            stdin: Stdin::new(stdin, config.stdin_queue_bytes),
            outputs: Outputs::new([
                Some(Output::new(OutputStream::Stdout, register(stdout)?)),
                Some(Output::new(OutputStream::Stderr, register(stderr)?)),
            ]),
            terminal: None,
        })
    }
}

/// Our end, non-blocking, and the child's, blocking.
fn output_pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let (ours, theirs) = io::pipe()?;
    rustix::io::ioctl_fionbio(&ours, true)?;
    Ok((ours.into(), theirs.into()))
}

/// Minimum of open files: the server's own, the numbers that sandboxes reserve, and a few for requests.
const MIN_DESCRIPTORS: u64 = 96;

fn require_descriptors() -> io::Result<()> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    match limit.current {
        Some(limit) if limit < MIN_DESCRIPTORS => Err(io::Error::other(format!(
            "only {limit} files may be open at once; raise the limit (ulimit -n) to at least \
             {MIN_DESCRIPTORS}, better 1024"
        ))),
        _ => Ok(()),
    }
}

/// Raises the soft limit on open files to the hard limit: a server of many processes needs many
/// descriptors. Returns the previous limit, to restore it in children.
fn raise_descriptor_limit() -> Option<libc::rlimit> {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let before = getrlimit(Resource::Nofile);
    let mut raised = before;
    raised.current = raised.maximum;
    setrlimit(Resource::Nofile, raised).ok()?;
    let value = |limit: Option<u64>| limit.unwrap_or(libc::RLIM_INFINITY);
    Some(libc::rlimit { rlim_cur: value(before.current), rlim_max: value(before.maximum) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An idle process costs the server its actor and this task, whatever its start needed.
    #[test]
    fn task_of_a_process_is_small() {
        let (_mailbox, commands) = mpsc::unbounded_channel();
        let (started, _answer) = oneshot::channel::<Result<Started, StartError>>();
        let task = run(Box::pin(std::future::pending()), Arc::default(), commands, started);
        let bytes = size_of_val(&task) + size_of::<Actor>();
        assert!(bytes <= 5 << 10, "{bytes} bytes");
    }
}
