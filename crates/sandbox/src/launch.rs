//! What a server uses: prepare a sandbox, spawn what it says, hear how it went.
//!
//! Invariant: preparing changes nothing on the host, but for the writable roots that are missing. It
//! looks at the file system, and hands out a program with its arguments and descriptors; only the
//! spawned process acts.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use codex_exec_server_protocol::{AccessMode, Assurance, SandboxContext};
use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::pipe::PipeFlags;

use crate::apply;
use crate::apply::network::EmptyNetwork;
use crate::capabilities::{Capabilities, Shortfall};
use crate::decide::facts::Facts;
use crate::decide::order::is_within;
use crate::decide::policy::{
    MissingRoot, PolicyError, Region, Resolved, ServerState, Surroundings, resolve,
};
use crate::decide::written::Written;
use crate::executable::Executable;
use crate::host::HostFacts;
use crate::keep::Keep;
use crate::plan::{self, Enforcement, Plan, PlanError, Program, Target, Walls};
use crate::reentry;
use crate::seccomp;
use crate::status::StatusReader;

/// How a server wants its sandboxes.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Config {
    /// The executable that calls [`reentry::main_if_reentered`]; usually this one.
    pub executable: PathBuf,
    /// What this machine can enforce. Probed once if absent; given in tests.
    pub capabilities: Option<Capabilities>,
    /// Bounds.
    pub limits: Limits,
    /// Files of the server itself that no policy can open.
    pub own_files: OwnFiles,
    /// Whether plans are used again while nothing they rest on has changed (default true).
    pub cache_plans: bool,
    /// What has to stand behind a sandbox at least, where the request does not say. Default full.
    pub assurance: Assurance,
}

impl Config {
    /// The defaults, re-entering this executable.
    pub fn new(executable: impl Into<PathBuf>) -> Self {
        Self {
            executable: executable.into(),
            capabilities: None,
            limits: Limits::default(),
            own_files: OwnFiles::default(),
            cache_plans: true,
            assurance: Assurance::Full,
        }
    }
}

/// Files of the server itself: what would let a sandboxed process act outside of its sandbox. Every
/// policy that restricts the file system leaves them out, whatever its entries say, and keeps names that
/// do not exist from coming into being; one that restricts the network only leaves out what is denied and
/// exists.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OwnFiles {
    /// Neither read nor written inside: credentials, token files, data directories, control sockets.
    pub denied: Vec<PathBuf>,
    /// Not written inside, where the policy would allow it: programs that run outside.
    pub read_only: Vec<PathBuf>,
}

/// Bounds on what a policy may ask for, and on what a target may use.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Entries of a policy. Default 10,000.
    pub entries: usize,
    /// Files that glob patterns may match. Each costs a mount. Default 4,096.
    pub glob_matches: usize,
    /// Names that are looked at while expanding patterns. Default 500,000.
    pub glob_names: usize,
    /// Directories deep a pattern is expanded, where the policy does not say. Default 32.
    pub glob_depth: usize,
    /// Names that are protected before they exist. Default 4,096.
    pub placeholders: usize,
    /// Processes and threads in a sandbox at once. Default 8,192.
    pub processes: u32,
    /// Bytes of private memory in `/dev/shm`. Default 1 GiB.
    pub shared_memory: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            entries: 10_000,
            glob_matches: 4_096,
            glob_names: 500_000,
            glob_depth: 32,
            placeholders: 4_096,
            processes: 8_192,
            shared_memory: 1 << 30,
        }
    }
}

impl OwnFiles {
    /// Adds what the names lead to now: a link that is changed later does not open what it led to.
    fn resolve_links(&mut self) {
        for paths in [&mut self.denied, &mut self.read_only] {
            let mut real: Vec<PathBuf> =
                paths.iter().filter_map(|path| path.canonicalize().ok()).collect();
            paths.append(&mut real);
            paths.sort();
            paths.dedup();
        }
    }
}

/// Why there is no sandbox. Nothing has run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PrepareError {
    /// The policy itself cannot be enforced, on any machine.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The policy cannot be enforced on this machine.
    #[error("the sandbox cannot be enforced on this machine: {reason}; {remedy}")]
    Unsupported {
        /// What is missing.
        reason: String,
        /// What to do about it.
        remedy: String,
    },
    /// The process could not even stand where it is to start.
    #[error("working directory `{}` is not readable under this policy", .0.display())]
    WorkingDirectory(PathBuf),
    /// A place that is to be written neither exists nor can be created.
    #[error(
        "cannot create the writable root `{}`; create it, or skip it with `missing_path_behavior`", .path.display()
    )]
    MissingRoot {
        /// Which.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A string of the command contains a NUL byte, or there is no command.
    #[error("invalid command: {0}")]
    Command(&'static str),
    /// The system refused something that has nothing to do with the policy.
    #[error("cannot prepare the sandbox: {doing}")]
    Io {
        /// What was being done.
        doing: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

impl PrepareError {
    /// Whether the request is at fault or the machine cannot do it (as opposed to a passing
    /// shortage): the caller should be told that the sandbox cannot be enforced.
    pub fn is_unenforceable(&self) -> bool {
        !matches!(self, Self::Io { .. })
    }
}

impl From<Shortfall> for PrepareError {
    fn from(Shortfall { reason, remedy }: Shortfall) -> Self {
        Self::Unsupported { reason, remedy }
    }
}

impl From<PlanError> for PrepareError {
    fn from(error: PlanError) -> Self {
        match error {
            PlanError::Unsupported { reason, remedy } => Self::Unsupported { reason, remedy },
            PlanError::Placeholders { .. } => {
                Self::Unsupported { reason: error.to_string(), remedy: "shorten the policy".into() }
            }
        }
    }
}

fn io_error(doing: &'static str) -> impl Fn(rustix::io::Errno) -> PrepareError {
    move |errno| PrepareError::Io { doing, source: errno.into() }
}

/// What is to run.
#[derive(Debug, Clone, Copy)]
pub enum Command<'a> {
    /// A program.
    Program {
        /// The program and its arguments; looked up in the `PATH` of `env`, inside the sandbox.
        argv: &'a [OsString],
        /// What the program sees as its own name, if not `argv[0]`.
        arg0: Option<&'a OsStr>,
        /// The whole environment.
        env: &'a [(OsString, OsString)],
        /// Where it starts.
        cwd: &'a Path,
    },
    /// A function that the executable registered with [`reentry::main_if_reentered`], with a minimal
    /// environment.
    Helper {
        /// Its name.
        name: &'a str,
        /// Where `PATH`, `TMPDIR`, `TMP` and `TEMP` are taken from; the rest is left behind.
        env: &'a [(OsString, OsString)],
    },
    /// Nothing: the sandbox writes a message to its standard error and exits with
    /// [`REFUSED_CODE`](crate::reentry::REFUSED_CODE), in place of a program that it cannot run.
    Refusal {
        /// What is written.
        message: &'a str,
        /// The environment that the program would have had.
        env: &'a [(OsString, OsString)],
        /// Where it would have started.
        cwd: &'a Path,
    },
}

/// A request to run something.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// What is to run.
    pub command: Command<'a>,
}

impl<'a> Request<'a> {
    /// What the policy is resolved against: a program's own directory and its `TMPDIR`. A helper has
    /// no directory of its own.
    pub fn surroundings(&self) -> Surroundings<'a> {
        let (env, cwd) = match self.command {
            Command::Program { env, cwd, .. } | Command::Refusal { env, cwd, .. } => {
                (env, Some(cwd))
            }
            Command::Helper { env, .. } => (env, None),
        };
        let tmpdir = env.iter().find(|(name, _)| name == "TMPDIR").map(|(_, value)| &**value);
        Surroundings { cwd, tmpdir }
    }
}

/// What came of preparing.
#[derive(Debug)]
pub enum Prepared {
    /// There is nothing to enforce: run it as it is.
    Unrestricted,
    /// Spawn this instead.
    Enforced(Launch),
}

/// What to spawn instead of the command.
///
/// The server executes `program`, by its descriptor, with exactly `args` and `env`, in `/`, with the standard streams and
/// the session the target is to have, and with each of `descriptors` at its number. Once it is
/// spawned, drop `descriptors` and wait on `status`.
#[derive(Debug)]
pub struct Launch {
    /// The executable to re-enter.
    pub program: Executable,
    /// Its whole argument list, its own name first.
    pub args: Vec<OsString>,
    /// Its whole environment. Not the target's, which could steer the dynamic linker.
    pub env: Vec<(OsString, OsString)>,
    /// Descriptors to pass, each at its number.
    pub descriptors: Vec<PassedDescriptor>,
    /// Tells whether the target runs.
    pub status: StatusReader,
    /// To be run once the spawned process is gone, in case it could not do so itself.
    pub cleanup: Cleanup,
    /// The policy's own `glob_scan_max_depth` kept its patterns from being expanded as deep as they go,
    /// so that files below are not denied.
    pub globs_cut: bool,
    /// The target has no network.
    pub network_restricted: bool,
    /// How much stands behind the sandbox.
    pub assurance: Assurance,
}

/// A descriptor for the spawned process.
#[derive(Debug)]
pub struct PassedDescriptor {
    /// The descriptor here; close-on-exec.
    pub fd: Arc<OwnedFd>,
    /// Its number there.
    pub number: i32,
}

impl AsFd for PassedDescriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// What may be left on the host if the spawned process is killed outright: the placeholders of names
/// that may not come into being. The process removes them itself in every other case.
#[derive(Debug, Clone)]
pub struct Cleanup {
    enforcement: Arc<Enforcement>,
}

impl Cleanup {
    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.enforcement.tree.placeholders.is_empty()
    }

    /// Removes what nobody uses any more. Needed only if the spawned process died of a signal; may
    /// take some milliseconds then, while the processes inside are still dying.
    pub fn run(&self) {
        apply::sweep(&self.enforcement.tree.placeholders);
    }
}

/// Which enforcement it is, with the identity of every place it was built on. Two equal keys can be
/// served by one helper; a place replaced or remounted changes the key.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PolicyKey(Arc<Enforcement>);

/// A policy resolved and planned, before it is known what will run under it.
#[derive(Debug, Clone)]
pub struct Planned {
    enforcement: Arc<Enforcement>,
    resolved: Arc<Resolved>,
    /// What it makes writable has been noted.
    noted: Arc<AtomicBool>,
}

impl Planned {
    /// For keeping helpers.
    pub fn key(&self) -> PolicyKey {
        PolicyKey(Arc::clone(&self.enforcement))
    }

    /// Whether requests for files have to be served by a helper. If the policy restricts any path they
    /// all have: to the server itself some names, `/proc/self` first of all, mean other files.
    pub fn restricts_files(&self) -> bool {
        match &*self.resolved {
            Resolved::Unrestricted => false,
            Resolved::NetworkOnly(policy) => {
                policy.regions.iter().any(|(_, region)| region.access != AccessMode::Write)
            }
            Resolved::Restricted(_) => true,
        }
    }

    fn globs_cut(&self) -> bool {
        matches!(&*self.resolved, Resolved::Restricted(policy) if policy.globs_cut)
    }

    fn missing_roots(&self) -> &[MissingRoot] {
        match &*self.resolved {
            Resolved::Restricted(policy) => &policy.missing_roots,
            _ => &[],
        }
    }

    /// The steps.
    pub fn enforcement(&self) -> &Enforcement {
        &self.enforcement
    }
}

/// Prepares sandboxes. One per server.
#[derive(Debug)]
pub struct Sandbox {
    config: Config,
    capabilities: Capabilities,
    /// Opened before anything runs in a sandbox; why it could not be, if it could not.
    executable: Result<Executable, i32>,
    /// Never written to: its end tells every running sandbox that the server is gone.
    lifeline: (Arc<OwnedFd>, OwnedFd),
    /// Made when the first sandbox without network is.
    empty_network: OnceLock<Option<EmptyNetwork>>,
    keep: Keep,
    /// Where the sandboxes that were launched could have put links.
    written: Mutex<Arc<Written>>,
}

impl Sandbox {
    /// Looks at what the machine can enforce, unless the configuration says.
    pub fn new(mut config: Config) -> io::Result<Self> {
        config.own_files.resolve_links();
        let capabilities = config.capabilities.clone().unwrap_or_else(Capabilities::probe);
        let executable = Executable::open(&config.executable)
            .map_err(|error| error.raw_os_error().unwrap_or(libc::ENOENT));
        let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        let lifeline = (Arc::new(read), write);
        let empty_network = OnceLock::new();
        let (keep, written) = (Keep::default(), Mutex::default());
        Ok(Self { config, capabilities, executable, lifeline, empty_network, keep, written })
    }

    /// What this machine can enforce.
    pub fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// Resolves and plans a policy; `None` if there is nothing to enforce. A policy that is asked for
    /// again is planned again only if something it was resolved to has changed.
    pub fn plan(
        &self,
        context: &SandboxContext,
        around: Surroundings<'_>,
    ) -> Result<Option<Planned>, PrepareError> {
        if !self.config.cache_plans {
            return self.plan_with(context, around, &HostFacts::default());
        }
        self.keep.plan(context, around, |facts| self.plan_with(context, around, facts))
    }

    /// Forgets the plans that were made so far. To be called before a policy is planned again because
    /// something it rests on was no longer the same when it was built on
    /// ([`Failure::is_race`](crate::Failure::is_race)).
    pub fn forget_plans(&self) {
        self.keep.forget();
    }

    /// As [`Sandbox::plan`], with other facts.
    pub fn plan_with(
        &self,
        context: &SandboxContext,
        around: Surroundings<'_>,
        facts: &dyn Facts,
    ) -> Result<Option<Planned>, PrepareError> {
        let limits = &self.config.limits;
        let written = Arc::clone(&self.written.lock());
        let server = ServerState { own_files: &self.config.own_files, written: &written };
        let resolved = resolve(context, around, facts, limits, server)?;
        if !matches!(resolved, Resolved::Unrestricted) {
            let least = context.assurance.unwrap_or(self.config.assurance);
            self.capabilities.require(least)?;
        }
        let enforcement = plan::build(&resolved, facts, &self.capabilities, limits)?;
        Ok(enforcement.map(|enforcement| Planned {
            enforcement: Arc::new(enforcement),
            resolved: Arc::new(resolved),
            noted: Arc::default(),
        }))
    }

    /// Plans and readies a request in one go. A place that is to be written and does not exist is made
    /// a directory first: left missing, its name could become a link that leads anywhere.
    pub fn prepare(
        &self,
        context: &SandboxContext,
        request: &Request<'_>,
    ) -> Result<Prepared, PrepareError> {
        let around = request.surroundings();
        let Some(mut planned) = self.plan(context, around)? else {
            return Ok(Prepared::Unrestricted);
        };
        if !planned.missing_roots().is_empty() {
            create_roots(planned.missing_roots())?;
            planned = match self.plan(context, around)? {
                Some(planned) => planned,
                None => return Ok(Prepared::Unrestricted),
            };
        }
        self.launch(&planned, request).map(Prepared::Enforced)
    }

    /// What this policy makes writable may hold links of a sandboxed process from now on.
    fn note_written(&self, planned: &Planned) {
        let Resolved::Restricted(policy) = &*planned.resolved else { return };
        if planned.noted.swap(true, Ordering::Relaxed) {
            return;
        }
        let written = &mut *self.written.lock();
        for (path, region) in &policy.regions {
            if region.access == AccessMode::Write && !written.covers(path) {
                Arc::make_mut(written).add(path.clone());
            }
        }
    }

    /// Readies a planned policy for a request.
    pub fn launch(&self, planned: &Planned, request: &Request<'_>) -> Result<Launch, PrepareError> {
        let target = target(request)?;
        self.note_written(planned);
        let program = self.executable.clone().map_err(|errno| PrepareError::Io {
            doing: "opening the executable of the server",
            source: io::Error::from_raw_os_error(errno),
        })?;
        if let (Target::Program(program), Resolved::Restricted(policy)) =
            (&target, &*planned.resolved)
        {
            // Links are resolved so that the answer is about the place, not about its name.
            let cwd = std::fs::canonicalize(&program.cwd).unwrap_or_else(|_| program.cwd.clone());
            let above_a_grant = || {
                let grants = |region: &Region| region.access != AccessMode::Deny;
                policy.regions.iter().any(|(path, region)| grants(region) && is_within(path, &cwd))
            };
            if policy.access.access(&cwd) == AccessMode::Deny && !above_a_grant() {
                return Err(PrepareError::WorkingDirectory(program.cwd.clone()));
            }
        }
        let network_restricted =
            planned.enforcement.network_restricted || matches!(target, Target::Helper { .. });
        let enforcement = Arc::clone(&planned.enforcement);
        let cleanup = Cleanup { enforcement: Arc::clone(&enforcement) };
        let filter = seccomp::Filter::of(&enforcement, network_restricted);
        let seccomp = seccomp::program(filter).map_err(|error| PrepareError::Unsupported {
            reason: error.to_string(),
            remedy: "run the server on x86-64 or arm64".to_owned(),
        })?;
        let pass = |fd: &Arc<OwnedFd>, number| PassedDescriptor { fd: Arc::clone(fd), number };
        let mut descriptors = Vec::new();
        if planned.enforcement.walls == Walls::Namespaces {
            descriptors.push(pass(&self.lifeline.0, reentry::LIFELINE));
            if network_restricted
                && let Some(EmptyNetwork { network, user }) =
                    self.empty_network.get_or_init(EmptyNetwork::make)
            {
                descriptors.push(pass(network, reentry::NETWORK));
                descriptors.extend(user.iter().map(|user| pass(user, reentry::USER)));
            }
        }
        let passed = descriptors.iter().map(|descriptor| descriptor.number).collect();
        let plan = Plan { enforcement, network_restricted, passed, seccomp, target };
        let file = memory_file(&plan.encode()).map_err(io_error("writing the plan"))?;
        let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)
            .map_err(io_error("making the status pipe"))?;
        descriptors.push(pass(&Arc::new(file), reentry::PLAN));
        descriptors.push(pass(&Arc::new(write), reentry::STATUS));
        Ok(Launch {
            args: vec![program.path().into(), reentry::WORD.into()],
            program,
            env: Vec::new(),
            descriptors,
            status: StatusReader::new(read),
            cleanup,
            globs_cut: planned.globs_cut(),
            network_restricted,
            assurance: planned.enforcement.assurance,
        })
    }
}

/// Makes directories of what is to be written and is missing, following no link.
fn create_roots(roots: &[MissingRoot]) -> Result<(), PrepareError> {
    for root in roots {
        let mut path = root.parent.clone();
        let failed = |path: &Path, errno: rustix::io::Errno| {
            let (path, source) = (path.to_owned(), errno.into());
            PrepareError::MissingRoot { path, source }
        };
        let mut parent = apply::sys::open_absolute(&path).map_err(|errno| failed(&path, errno))?;
        for name in &root.missing {
            path.push(name);
            match rustix::fs::mkdirat(&parent, &**name, Mode::from_raw_mode(0o777)) {
                Ok(()) | Err(rustix::io::Errno::EXIST) => {}
                Err(errno) => return Err(failed(&path, errno)),
            }
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            parent = rustix::fs::openat(&parent, &**name, flags, Mode::empty())
                .map_err(|errno| failed(&path, errno))?;
        }
    }
    Ok(())
}

/// The variables a helper gets, if they are set.
const HELPER_ENV: [&str; 4] = ["PATH", "TMPDIR", "TMP", "TEMP"];

fn target(request: &Request<'_>) -> Result<Target, PrepareError> {
    let has_nul = |text: &OsStr| text.as_encoded_bytes().contains(&0);
    Ok(match request.command {
        Command::Helper { name, env } => Target::Helper {
            name: name.to_owned(),
            env: env
                .iter()
                .filter(|(name, _)| HELPER_ENV.iter().any(|kept| name == kept))
                .cloned()
                .collect(),
        },
        Command::Refusal { message, .. } => Target::Refusal { message: message.to_owned() },
        Command::Program { argv, arg0, env, cwd } => {
            if argv.first().is_none_or(|program| program.is_empty()) {
                return Err(PrepareError::Command("it is empty"));
            }
            let texts = argv
                .iter()
                .map(|text| &**text)
                .chain(arg0)
                .chain(env.iter().flat_map(|(name, value)| [&**name, &**value]));
            if texts.chain([cwd.as_os_str()]).any(has_nul) {
                return Err(PrepareError::Command("it contains a NUL byte"));
            }
            Target::Program(Program {
                argv: argv.to_vec(),
                arg0: arg0.map(OsStr::to_owned),
                env: env.to_vec(),
                cwd: cwd.to_owned(),
            })
        }
    })
}

/// A sealed memory file: what was planned is what is read.
fn memory_file(bytes: &[u8]) -> rustix::io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("codex-sandbox-plan", flags)?;
    let mut rest = bytes;
    while !rest.is_empty() {
        let written = rustix::io::retry_on_intr(|| rustix::io::write(&fd, rest))?;
        rest = &rest[written..];
    }
    let seals = SealFlags::SEAL | SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK;
    rustix::fs::fcntl_add_seals(&fd, seals)?;
    Ok(fd)
}
