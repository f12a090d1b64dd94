//! The interface for a server: prepare a sandbox, spawn it, read its status.
//!
//! Invariant: preparing changes nothing on the host, except that it creates missing writable roots. It
//! reads the file system and returns a program with arguments and descriptors; only the spawned process
//! acts.

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use codex_exec_server_protocol::{
    AccessMode, Assurance, FileSystemPolicy, NetworkPolicy, PermissionProfile, SandboxContext,
};
use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::pipe::PipeFlags;

use crate::apply;
use crate::apply::network::EmptyNetwork;
use crate::capabilities::{Capabilities, NEEDED_LANDLOCK, Shortfall};
use crate::decide::ceiling;
use crate::decide::facts::Facts;
use crate::decide::paths::is_within;
use crate::decide::policy::{
    MissingRoot, PolicyError, Region, Resolved, ServerState, Surroundings, resolve,
};
use crate::decide::writable_history::WritableHistory;
use crate::executable::Executable;
use crate::host::HostFacts;
use crate::network::{ManagedNetwork, NetworkReceiver};
use crate::plan::{self, Enforcement, Isolation, Network, Plan, PlanError, Program, Target};
use crate::plan_cache::PlanCache;
use crate::reentry;
use crate::seccomp;
use crate::status::StatusReader;

/// Configuration of a server's sandboxes.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Config {
    /// The executable that calls [`reentry::main_if_reentered`]; usually this one.
    pub executable: PathBuf,
    /// What this machine can enforce (default: probed once). Tests set it.
    pub capabilities: Option<Capabilities>,
    /// Limits.
    pub limits: Limits,
    /// Files of the server that no policy can open (default: none).
    pub own_files: OwnFiles,
    /// Reuse a plan while the files it depends on are unchanged (default: true).
    pub cache_plans: bool,
    /// Minimum assurance where the request names none (default: full).
    pub assurance: Assurance,
    /// Programs stay in the PID namespace of the server (default: false): they see the processes and the
    /// `/proc` of the host. Landlock still keeps their signals inside. Helpers have a namespace of their
    /// own in any case.
    pub shares_pids: bool,
    /// A policy of the operator that bounds every other (default: none): what a request permits beyond it is not
    /// permitted, a request without restrictions gets it, and none runs at a weaker level than `assurance`.
    pub ceiling: Option<SandboxContext>,
}

impl Config {
    /// The defaults, with this executable to re-enter.
    pub fn new(executable: impl Into<PathBuf>) -> Self {
        Self {
            executable: executable.into(),
            capabilities: None,
            limits: Limits::default(),
            own_files: OwnFiles::default(),
            cache_plans: true,
            assurance: Assurance::Full,
            shares_pids: false,
            ceiling: None,
        }
    }
}

/// Files of the server that would let a sandboxed process act outside its sandbox. Every policy that
/// restricts the file system excludes them, whatever its entries say, and prevents the creation of
/// those that do not exist. A policy that restricts only the network hides the existing `denied` ones.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OwnFiles {
    /// Neither readable nor writable inside: credentials, token files, data directories, control
    /// sockets.
    pub denied: Vec<PathBuf>,
    /// Not writable inside, even if the policy allows it: programs that run outside.
    pub read_only: Vec<PathBuf>,
}

/// Limits on policies and targets.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Entries of a policy (default: 10,000); more are refused.
    pub entries: usize,
    /// Files that glob patterns may match (default: 4,096); each costs a mount, and more are refused.
    pub glob_matches: usize,
    /// Names that are read while expanding patterns (default: 500,000); more are refused.
    pub glob_names: usize,
    /// Depth to which a pattern is expanded, in directories, where the policy sets none (default: 32).
    pub glob_depth: usize,
    /// Names that are protected before they exist (default: 4,096); more are refused.
    pub placeholders: usize,
    /// Processes and threads in a sandbox at once (default: 8,192).
    pub processes: u32,
    /// Size of `/dev/shm`, in bytes (default: 1 GiB).
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
    /// Adds the current targets of links: changing a link later does not expose its old target.
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

/// Why a sandbox cannot be prepared. Nothing has run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PrepareError {
    /// No machine can enforce this policy.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// This machine cannot enforce the policy.
    #[error("the sandbox cannot be enforced on this machine: {reason}; {remedy}")]
    Unsupported {
        /// What is missing.
        reason: String,
        /// How to get it.
        remedy: String,
    },
    /// The server's operator does not permit it to anyone.
    #[error("the operator's policy does not permit {0}")]
    Ceiling(&'static str),
    /// The policy does not make the working directory readable.
    #[error("working directory `{}` is not readable under this policy", .0.display())]
    WorkingDirectory(PathBuf),
    /// A writable root does not exist and cannot be created.
    #[error(
        "cannot create the writable root `{}`; create it, or skip it with `missing_path_behavior`", .path.display()
    )]
    MissingRoot {
        /// The root.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// A string of the command contains a NUL byte, or the command is empty.
    #[error("invalid command: {0}")]
    Command(&'static str),
    /// The managed network cannot be made as requested.
    #[error("invalid managed network: {0}")]
    Network(&'static str),
    /// A system call failed for reasons unrelated to the policy.
    #[error("cannot prepare the sandbox: {doing}")]
    Io {
        /// What was being done.
        doing: &'static str,
        /// The error of the system.
        source: io::Error,
    },
}

impl PrepareError {
    /// Whether the policy cannot be enforced, as opposed to a temporary shortage of this machine.
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

/// What to run.
#[derive(Debug, Clone, Copy)]
pub enum Command<'a> {
    /// A program.
    Program {
        /// The program and its arguments; `argv[0]` is looked up in the `PATH` of `env`, inside the
        /// sandbox.
        argv: &'a [OsString],
        /// What the program sees as its own name (default: `argv[0]`).
        arg0: Option<&'a OsStr>,
        /// The whole environment.
        env: &'a [(OsString, OsString)],
        /// Working directory.
        cwd: &'a Path,
    },
    /// A function registered with [`reentry::main_if_reentered`], with a minimal environment.
    Helper {
        /// Its name.
        name: &'a str,
        /// The source of `PATH`, `TMPDIR`, `TMP` and `TEMP`; other variables are not passed.
        env: &'a [(OsString, OsString)],
    },
    /// Runs no program: the sandbox writes a message to stderr and exits with
    /// [`REFUSED_CODE`](crate::reentry::REFUSED_CODE).
    Refusal {
        /// The text for stderr.
        message: &'a str,
        /// The environment that the program would have had.
        env: &'a [(OsString, OsString)],
        /// The working directory that the program would have had.
        cwd: &'a Path,
    },
}

/// A request to run something.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    command: Command<'a>,
    network: Option<&'a ManagedNetwork>,
    inherit: Option<&'a Arc<OwnedFd>>,
}

impl<'a> Request<'a> {
    /// Runs this with the network of the policy, the standard streams and no other descriptors.
    pub fn new(command: Command<'a>) -> Self {
        Self { command, network: None, inherit: None }
    }

    /// Gives the command this network, whatever the policy says of the network. A policy that restricts
    /// nothing else is then enforced as one that restricts the network alone. Without effect on a helper.
    #[must_use]
    pub fn with_network(self, network: Option<&'a ManagedNetwork>) -> Self {
        Self { network, ..self }
    }

    /// A program also inherits this descriptor, as number [`INHERITED`](crate::INHERITED). It bypasses
    /// the policy: pass nothing that has a path.
    #[must_use]
    pub fn inheriting(self, descriptor: Option<&'a Arc<OwnedFd>>) -> Self {
        Self { inherit: descriptor, ..self }
    }

    /// What the policy is resolved against: the program's working directory and `TMPDIR`. A helper has
    /// no working directory.
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

/// The result of preparing.
#[derive(Debug)]
pub enum Prepared {
    /// There is nothing to enforce: run the command directly.
    Unrestricted,
    /// Spawn this instead of the command.
    Enforced(Launch),
}

/// What to spawn instead of the command.
///
/// Execute `program` by its descriptor with exactly `args` and `env`, in `/`, with the standard streams
/// and the session of the target, and with each of `descriptors` at its number. Then drop `descriptors`
/// and wait on `status`.
#[derive(Debug)]
pub struct Launch {
    /// The executable to re-enter.
    pub program: Executable,
    /// All arguments, including `argv[0]`.
    pub args: Vec<OsString>,
    /// The whole environment. Not the target's, which could influence the dynamic linker.
    pub env: Vec<(OsString, OsString)>,
    /// Descriptors to pass, each at its number.
    pub descriptors: Vec<PassedDescriptor>,
    /// Reports whether the target runs.
    pub status: StatusReader,
    /// Run it once the spawned process is gone, in case it was killed before it could clean up.
    pub cleanup: Cleanup,
    /// The policy's `glob_scan_max_depth` limited the expansion of its patterns, so deeper files are
    /// not denied.
    pub globs_truncated: bool,
    /// The target has the host's network.
    pub has_host_network: bool,
    /// Receives the sockets of the managed network, if the request has one.
    pub network: Option<NetworkReceiver>,
    /// Assurance of the sandbox.
    pub assurance: Assurance,
}

/// A descriptor for the spawned process.
#[derive(Debug)]
pub struct PassedDescriptor {
    /// The descriptor in this process; close-on-exec.
    pub fd: Arc<OwnedFd>,
    /// Its number in the spawned process.
    pub number: i32,
}

impl AsFd for PassedDescriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Removes what a killed sandbox may leave on the host: placeholders of protected names. A sandbox that
/// is not killed removes them itself.
#[derive(Debug, Clone)]
pub struct Cleanup {
    enforcement: Arc<Enforcement>,
}

impl Cleanup {
    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.enforcement.tree.placeholders.is_empty()
    }

    /// Removes placeholders that no sandbox uses any more. Needed only if a signal killed the spawned
    /// process; may take some milliseconds while the processes inside are dying.
    pub fn run(&self) {
        apply::sweep(&self.enforcement.tree.placeholders);
    }
}

/// Identifies an enforcement, with the identity of every file it is built on. One helper can serve all
/// requests with an equal key; replacing or remounting a file changes the key.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PolicyKey(Arc<Enforcement>);

/// A resolved and planned policy, for any command.
#[derive(Debug, Clone)]
pub struct Planned {
    enforcement: Arc<Enforcement>,
    resolved: Arc<Resolved>,
    /// Its writable directories have been added to the history.
    recorded: Arc<AtomicBool>,
    /// The plan for requests that only read, once there was one.
    for_reading: Arc<OnceLock<Planned>>,
}

impl Planned {
    /// The key for caching helpers.
    pub fn key(&self) -> PolicyKey {
        PolicyKey(Arc::clone(&self.enforcement))
    }

    /// Whether a helper must serve file requests. If the policy restricts any path, it must serve all
    /// of them: for the server itself some names, `/proc/self` above all, mean other files.
    pub fn restricts_files(&self) -> bool {
        match &*self.resolved {
            Resolved::Unrestricted => false,
            Resolved::NetworkOnly(policy) => {
                policy.regions.iter().any(|(_, region)| region.access != AccessMode::Write)
            }
            Resolved::Restricted(_) => true,
        }
    }

    fn globs_truncated(&self) -> bool {
        matches!(&*self.resolved, Resolved::Restricted(policy) if policy.globs_truncated)
    }

    fn missing_roots(&self) -> &[MissingRoot] {
        match &*self.resolved {
            Resolved::Restricted(policy) => &policy.missing_roots,
            _ => &[],
        }
    }

    /// The steps that enforce the policy.
    pub fn enforcement(&self) -> &Enforcement {
        &self.enforcement
    }
}

/// Prepares sandboxes. One per server.
#[derive(Debug)]
pub struct Sandbox {
    config: Config,
    capabilities: Capabilities,
    /// Opened before anything runs in a sandbox; or the errno of the open.
    executable: Result<Executable, i32>,
    /// Never written to: it closes when the server is gone, which every running sandbox notices.
    lifeline: (Arc<OwnedFd>, OwnedFd),
    /// Created with the first sandbox without network.
    empty_network: OnceLock<Option<EmptyNetwork>>,
    plan_cache: PlanCache,
    /// Where launched sandboxes could have created links.
    writable_history: Mutex<Arc<WritableHistory>>,
}

impl Sandbox {
    /// Creates a sandbox factory; probes what the machine can enforce, unless the configuration says.
    pub fn new(mut config: Config) -> io::Result<Self> {
        config.own_files.resolve_links();
        let capabilities = config.capabilities.clone().unwrap_or_else(Capabilities::probe);
        let executable = Executable::open(&config.executable)
            .map_err(|error| error.raw_os_error().unwrap_or(libc::ENOENT));
        let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        let lifeline = (Arc::new(read), write);
        let empty_network = OnceLock::new();
        let (plan_cache, writable_history) = (PlanCache::default(), Mutex::default());
        Ok(Self {
            config,
            capabilities,
            executable,
            lifeline,
            empty_network,
            plan_cache,
            writable_history,
        })
    }

    /// What this machine can enforce.
    pub fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// Resolves and plans a policy; `None` if there is nothing to enforce. Reuses a cached plan if the
    /// files it depends on are unchanged.
    pub fn plan(
        &self,
        context: &SandboxContext,
        around: Surroundings<'_>,
    ) -> Result<Option<Planned>, PrepareError> {
        let context = &*self.bounded(context);
        if !self.config.cache_plans {
            return self.plan_with(context, around, &HostFacts::default());
        }
        self.plan_cache.plan(context, around, |facts| self.plan_with(context, around, facts))
    }

    /// The request as far as the ceiling permits it, at no weaker level than the server's.
    fn bounded<'a>(&self, context: &'a SandboxContext) -> Cow<'a, SandboxContext> {
        let mut context = ceiling::bounded(context, self.config.ceiling.as_ref());
        if self.config.ceiling.is_some() {
            let least = self.config.assurance;
            let requested = context.assurance.unwrap_or(least);
            context.to_mut().assurance = Some(requested.max(least));
        }
        context
    }

    /// Clears the plan cache. Call it before planning again because a file was replaced between
    /// planning and launching ([`Failure::is_race`](crate::Failure::is_race)).
    pub fn forget_plans(&self) {
        self.plan_cache.clear();
    }

    /// Like [`Sandbox::plan`], with other facts and without the cache.
    pub fn plan_with(
        &self,
        context: &SandboxContext,
        around: Surroundings<'_>,
        facts: &dyn Facts,
    ) -> Result<Option<Planned>, PrepareError> {
        let limits = &self.config.limits;
        let writable_history = Arc::clone(&self.writable_history.lock());
        let server = ServerState {
            own_files: &self.config.own_files,
            writable_history: &writable_history,
            ceiling: self.config.ceiling.as_ref(),
        };
        let resolved = resolve(context, around, facts, limits, server)?;
        if !matches!(resolved, Resolved::Unrestricted) {
            let minimum = context.assurance.unwrap_or(self.config.assurance);
            self.capabilities.require(minimum)?;
        }
        let enforcement = plan::build(&resolved, facts, &self.capabilities, limits)?;
        Ok(enforcement.map(|enforcement| Planned {
            enforcement: Arc::new(enforcement),
            resolved: Arc::new(resolved),
            recorded: Arc::default(),
            for_reading: Arc::default(),
        }))
    }

    /// The plan of the same policy for a helper that only reads: nothing is writable, so it creates
    /// neither placeholders nor missing roots. Which links are trusted is decided already, by the policy
    /// as it is.
    pub fn for_reading(&self, planned: &Planned) -> Result<Planned, PrepareError> {
        let Resolved::Restricted(policy) = &*planned.resolved else { return Ok(planned.clone()) };
        if let Some(planned) = planned.for_reading.get() {
            return Ok(planned.clone());
        }
        let resolved = Resolved::Restricted(Box::new(policy.for_reading()));
        let (facts, limits) = (HostFacts::default(), &self.config.limits);
        let built = plan::build(&resolved, &facts, &self.capabilities, limits)?;
        let Some(enforcement) = built else { return Ok(planned.clone()) };
        let reading = Planned {
            enforcement: Arc::new(enforcement),
            resolved: Arc::new(resolved),
            recorded: Arc::default(),
            for_reading: Arc::default(),
        };
        Ok(planned.for_reading.get_or_init(|| reading).clone())
    }

    /// Plans and launches a request. First creates missing writable roots as directories: a missing
    /// name could become a link to anywhere.
    pub fn prepare(
        &self,
        context: &SandboxContext,
        request: &Request<'_>,
    ) -> Result<Prepared, PrepareError> {
        let around = request.surroundings();
        let ceiling = self.config.ceiling.as_ref().map(|ceiling| ceiling.permissions.network());
        if request.network.is_some() && ceiling == Some(NetworkPolicy::Restricted) {
            return Err(PrepareError::Ceiling("a network"));
        }
        let context = &*match request.network {
            Some(_) => with_restricted_network(context),
            None => Cow::Borrowed(context),
        };
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

    /// Records the directories that this policy makes writable: from now on they may contain links
    /// created by a sandboxed process.
    fn record_writable(&self, planned: &Planned) {
        let Resolved::Restricted(policy) = &*planned.resolved else { return };
        if planned.recorded.swap(true, Ordering::Relaxed) {
            return;
        }
        let writable_history = &mut *self.writable_history.lock();
        for (path, region) in &policy.regions {
            if region.access == AccessMode::Write && !writable_history.covers(path) {
                Arc::make_mut(writable_history).add(path.clone());
            }
        }
    }

    /// Prepares a planned policy for a request.
    pub fn launch(&self, planned: &Planned, request: &Request<'_>) -> Result<Launch, PrepareError> {
        let mut target = target(request)?;
        self.record_writable(planned);
        let program = self.executable.clone().map_err(|errno| PrepareError::Io {
            doing: "opening the executable of the server",
            source: io::Error::from_raw_os_error(errno),
        })?;
        if let (Target::Program(program), Resolved::Restricted(policy)) =
            (&target, &*planned.resolved)
        {
            // Resolve links, because the access belongs to the directory, not to its name.
            let cwd = std::fs::canonicalize(&program.cwd).unwrap_or_else(|_| program.cwd.clone());
            let above_a_grant = || {
                let grants = |region: &Region| region.access != AccessMode::Deny;
                policy.regions.iter().any(|(path, region)| grants(region) && is_within(path, &cwd))
            };
            if policy.access.access(&cwd) == AccessMode::Deny && !above_a_grant() {
                return Err(PrepareError::WorkingDirectory(program.cwd.clone()));
            }
        }
        let network = match request.network {
            _ if matches!(target, Target::Helper { .. }) => Network::None,
            Some(managed) => Network::Managed(managed.namespace().map_err(PrepareError::Network)?),
            None if planned.enforcement.network_restricted => Network::None,
            None => Network::Host,
        };
        if matches!(network, Network::Managed(_))
            && planned.enforcement.isolation != Isolation::Namespaces
        {
            return Err(PrepareError::Unsupported {
                reason: "namespaces are not available, and a managed network is one".to_owned(),
                remedy: self.capabilities.namespace_remedy().to_owned(),
            });
        }
        let shares_pids = self.config.shares_pids
            && planned.enforcement.isolation == Isolation::Namespaces
            && !matches!(target, Target::Helper { .. });
        if shares_pids && self.capabilities.landlock_abi < NEEDED_LANDLOCK {
            return Err(PrepareError::Unsupported {
                reason: format!(
                    "without a PID namespace only Landlock {NEEDED_LANDLOCK} keeps signals inside, and \
                     the kernel has version {}",
                    self.capabilities.landlock_abi
                ),
                remedy: "use --linux-sandbox-pid-namespace isolate".to_owned(),
            });
        }
        let enforcement = Arc::clone(&planned.enforcement);
        let cleanup = Cleanup { enforcement: Arc::clone(&enforcement) };
        let filter = seccomp::Filter::of(&enforcement, &network, shares_pids);
        let seccomp = seccomp::program(filter).map_err(|error| PrepareError::Unsupported {
            reason: error.to_string(),
            remedy: "run the server on x86-64 or arm64".to_owned(),
        })?;
        let pass = |fd: &Arc<OwnedFd>, number| PassedDescriptor { fd: Arc::clone(fd), number };
        let (mut descriptors, mut receiver) = (Vec::new(), None);
        if planned.enforcement.isolation == Isolation::Namespaces {
            descriptors.push(pass(&self.lifeline.0, reentry::LIFELINE));
            if let Network::Managed(namespace) = &network {
                let (ours, theirs) = NetworkReceiver::new(namespace)
                    .map_err(io_error("making the socket of the managed network"))?;
                descriptors.push(pass(&Arc::new(theirs), reentry::HANDOVER));
                receiver = Some(ours);
            }
            if network == Network::None
                && let Some(EmptyNetwork { network, user }) =
                    self.empty_network.get_or_init(EmptyNetwork::make)
            {
                descriptors.push(pass(network, reentry::NETWORK));
                descriptors.extend(user.iter().map(|user| pass(user, reentry::USER)));
            }
        }
        let passed = descriptors.iter().map(|descriptor| descriptor.number).collect();
        if let (Target::Program(program), Some(inherit)) = (&mut target, request.inherit) {
            // The numbers have no gaps, so it may be that of a descriptor which is not passed now.
            let number = reentry::PLAN + 2 + descriptors.len() as i32;
            program.inherits = Some(number);
            descriptors.push(pass(inherit, number));
        }
        let has_host_network = network == Network::Host;
        let plan = Plan { enforcement, network, shares_pids, passed, seccomp, target };
        let file = memory_file(&plan.encode()).map_err(io_error("writing the plan"))?;
        let (read, write) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)
            .map_err(io_error("making the status pipe"))?;
        descriptors.push(pass(&Arc::new(file), reentry::PLAN));
        descriptors.push(pass(&Arc::new(write), reentry::STATUS));
        Ok(Launch {
            args: vec![program.path().into(), reentry::ARGUMENT.into()],
            program,
            env: Vec::new(),
            descriptors,
            status: StatusReader::new(read),
            cleanup,
            globs_truncated: planned.globs_truncated(),
            has_host_network,
            network: receiver,
            assurance: planned.enforcement.assurance,
        })
    }
}

/// The policy for a command with a managed network: one that restricts no files restricts the network
/// at least.
fn with_restricted_network(context: &SandboxContext) -> Cow<'_, SandboxContext> {
    match &context.permissions {
        PermissionProfile::Managed { file_system: FileSystemPolicy::Restricted(_), .. } => {
            Cow::Borrowed(context)
        }
        _ => {
            let mut context = context.clone();
            context.permissions =
                PermissionProfile::External { network: NetworkPolicy::Restricted };
            Cow::Owned(context)
        }
    }
}

/// Creates missing writable roots, without following links.
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

/// The variables that a helper gets, if they are set.
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
                inherits: None,
            })
        }
    })
}

/// A sealed memory file: its content cannot change before it is read.
fn memory_file(bytes: &[u8]) -> rustix::io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("codex-sandbox-plan", flags)?;
    let mut rest = bytes;
    while !rest.is_empty() {
        let writable_history = rustix::io::retry_on_intr(|| rustix::io::write(&fd, rest))?;
        rest = &rest[writable_history..];
    }
    let seals = SealFlags::SEAL | SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK;
    rustix::fs::fcntl_add_seals(&fd, seals)?;
    Ok(fd)
}
