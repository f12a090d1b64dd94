//! Linux: the only file of this crate that names `codex_linux_sandbox`.

use std::io;

use codex_exec_server_protocol::{Assurance, ErrorKind, SandboxContext};
use codex_linux_sandbox::reentry::{self, Helper};
use codex_linux_sandbox::{
    Command, Config, Planned, PolicyKey, PrepareError, Prepared, Request, Sandbox, Surroundings,
};

use super::{PolicyRefusal, Program, SandboxBackend, SandboxConfig};

pub(crate) use codex_linux_sandbox::denial::Detector;
pub(crate) use codex_linux_sandbox::mountinfo;
pub(crate) use codex_linux_sandbox::reentry::{is_reentry as is_sandbox, mounts_intact};
pub(crate) use codex_linux_sandbox::{
    Cleanup, Executable, NetworkReceiver, PLACEHOLDER_MODE, Spare, SpareLaunch, Stage, StatusReader,
};
pub use codex_linux_sandbox::{Failure, Launch, ManagedNetwork, NetworkDescriptors, OwnFiles};

/// The Linux sandbox: namespaces, Landlock and seccomp.
#[derive(Debug)]
pub struct NativeSandbox(Sandbox);

impl SandboxBackend for NativeSandbox {
    type Plan = Planned;
    type Key = PolicyKey;
    type Launch = Launch;
    type Refusal = PrepareError;

    fn new(config: SandboxConfig) -> io::Result<Self> {
        let SandboxConfig { executable, own_files, assurance, cache_plans, shares_pids, ceiling } =
            config;
        let mut config = Config::new(executable);
        config.own_files = own_files;
        config.assurance = assurance;
        config.cache_plans = cache_plans;
        config.shares_pids = shares_pids;
        config.ceiling = ceiling;
        Sandbox::new(config).map(Self)
    }

    fn assurance(&self) -> Option<Assurance> {
        self.0.capabilities().assurance()
    }

    fn plan_helper(
        &self,
        context: &SandboxContext,
        only_reads: bool,
    ) -> Result<Option<Planned>, PrepareError> {
        let tmpdir = std::env::var_os("TMPDIR");
        let around = Surroundings { cwd: None, tmpdir: tmpdir.as_deref() };
        match self.0.plan(context, around)?.filter(Planned::restricts_files) {
            Some(planned) if only_reads => self.0.for_reading(&planned).map(Some),
            planned => Ok(planned),
        }
    }

    fn key(plan: &Planned) -> PolicyKey {
        plan.key()
    }

    fn launch_helper(&self, plan: &Planned, name: &str) -> Result<Launch, PrepareError> {
        let env: Vec<_> = std::env::vars_os().collect();
        self.0.launch(plan, &Request::new(Command::Helper { name, env: &env }))
    }

    fn launch_program(
        &self,
        context: &SandboxContext,
        program: &Program<'_>,
    ) -> Result<Option<Launch>, PrepareError> {
        let Program { argv, arg0, env, cwd, network, inherit } = *program;
        let command = Command::Program { argv, arg0, env, cwd };
        let request = Request::new(command).with_network(network).inheriting(inherit);
        let launched = match self.0.prepare(context, &request) {
            // Clients expect a process that fails, not an error: they ask for approval to run without a
            // sandbox only if a process was denied.
            Err(refused @ PrepareError::WorkingDirectory(_)) => {
                return self.launch_refusal(context, program, &refused.to_string());
            }
            prepared => prepared?,
        };
        Ok(enforced(launched))
    }

    fn launch_refusal(
        &self,
        context: &SandboxContext,
        program: &Program<'_>,
        message: &str,
    ) -> Result<Option<Launch>, PrepareError> {
        let message = format!("codex: sandbox: {message}: Permission denied\n");
        let command = Command::Refusal { message: &message, env: program.env, cwd: program.cwd };
        self.0.prepare(context, &Request::new(command)).map(enforced)
    }

    fn hides_program(failure: &Failure) -> bool {
        use std::io::ErrorKind::{NotADirectory, NotFound, PermissionDenied};
        let kind = failure.io_error().kind();
        failure.stage == Stage::Execute
            && matches!(kind, NotFound | NotADirectory | PermissionDenied)
    }

    fn forget_plans(&self) {
        self.0.forget_plans();
    }
}

fn enforced(prepared: Prepared) -> Option<Launch> {
    match prepared {
        Prepared::Unrestricted => None,
        Prepared::Enforced(launch) => Some(launch),
    }
}

impl PolicyRefusal for PrepareError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Io { source, .. } => ErrorKind::of_system(source),
            Self::WorkingDirectory(_) => ErrorKind::WorkingDirectoryDenied,
            Self::Ceiling(_) => ErrorKind::OperatorPolicy,
            Self::Command(_) | Self::Network(_) => ErrorKind::InvalidParams,
            _ => ErrorKind::SandboxUnavailable,
        }
    }

    fn is_of_the_request(&self) -> bool {
        self.is_unenforceable()
    }
}

/// Never returns if this process was started as a sandbox; `run` is the body of the helper `name`.
pub(crate) fn become_sandbox(name: &'static str, run: fn() -> i32) {
    reentry::main_if_reentered(&[Helper { name, run }]);
}
