//! `codex sandbox`: runs a local command in a sandbox.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, bail};
use clap::Args;
use codex_exec_network::{NAMESPACE_HTTP_PORT, NAMESPACE_SOCKS_PORT, proxy_variables};
use codex_exec_server::client::{PermissionProfile, SandboxContext};
use codex_exec_server::protocol::{
    AccessMode, FileSystemEntry, FileSystemPath, FileSystemPolicy, NetworkPolicy,
};
use codex_exec_server::{ErrorKind, PathUri};
use codex_exec_server::{NEVER_INHERITED, NEVER_PASSED_ON};
use codex_linux_sandbox::{
    Assurance, Config, Failure, Launch, ManagedNetwork, Prepared, Request, Sandbox, Stage,
};

use crate::exit::{self, CommandError};
use crate::hosts::{HostArgs, HostRules};
use crate::own_files::own_files;
use crate::policy;

/// Run a command on this machine in a sandbox that the kernel enforces
///
/// The command inherits stdin, stdout, stderr, the terminal, the working directory and the environment.
/// The policy decides which files it and everything it starts may read and write, and whether it may
/// use the network; other processes and codex's own credentials are always out of reach. When the
/// command ends, everything it started ends too. codex doctor shows whether this machine can enforce
/// this.
///
/// A file given as stdin is opened again, so that the command can read it and change nothing about it.
/// If that is not possible because its name is gone, nothing runs.
#[derive(Debug, Args)]
#[command(after_help = "\
Profiles:
  read-only        may read every file, may write none; no network
  workspace-write  as read-only, but may write to the working directory (except .git, .agents and
                   .codex in it), /tmp and $TMPDIR
  FILE             JSON, like a request's `sandbox` or `permissions`; its paths are relative to the
                   working directory unless it sets `cwd`

Examples:
  codex sandbox -- ./configure                           read only
  codex sandbox --profile workspace-write -- make        may write to this directory
  codex sandbox --profile workspace-write --network -- npm install
  codex sandbox --allow-host github.com --allow-host '*.crates.io:443' -- cargo fetch
  codex sandbox --writable ~/.cache -- make -n           may write to one more directory
  codex sandbox --profile policy.json -- sh              with your own policy, such as
    {\"type\":\"managed\",\"network\":\"restricted\",\"file_system\":{\"type\":\"restricted\",\"entries\":[
      {\"path\":{\"type\":\"special\",\"value\":{\"kind\":\"root\"}},\"access\":\"read\"},
      {\"path\":{\"type\":\"glob_pattern\",\"pattern\":\"**/.env\"},\"access\":\"deny\"}]}}

Exit codes: the command's own; 125 codex failed and ran nothing, for example because this machine
  cannot enforce the policy; 126 the command cannot be executed; 127 it was not found; 128+N signal
  N killed it.")]
pub(crate) struct SandboxArgs {
    /// The policy: read-only, workspace-write or the path of a JSON file
    #[arg(long, value_name = "PROFILE", default_value = "read-only")]
    profile: String,

    /// Allow writing below this directory too; can be repeated
    #[arg(long, value_name = "DIR")]
    writable: Vec<PathBuf>,

    /// Allow using the network
    #[arg(long)]
    network: bool,

    #[command(flatten)]
    hosts: HostArgs,

    /// Weakest sandbox level to accept: full, namespaces or landlock; see codex doctor
    #[arg(long, value_name = "LEVEL", default_value_t)]
    assurance: Assurance,

    /// The command and its arguments; use sh -c '…' for shell syntax
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

pub(crate) fn run(args: &SandboxArgs) -> anyhow::Result<ExitCode> {
    args.run().map_err(exit::with_command_code)
}

/// Joins a path to a directory without links, and resolves `.` and `..` lexically.
fn absolute(cwd: &Path, path: &Path) -> PathBuf {
    let mut absolute = cwd.to_owned();
    for component in path.components() {
        match component {
            Component::ParentDir => drop(absolute.pop()),
            Component::CurDir => {}
            other => absolute.push(other),
        }
    }
    absolute
}

impl SandboxArgs {
    fn run(&self) -> anyhow::Result<ExitCode> {
        let cwd = std::env::current_dir().context("cannot find the working directory")?;
        let context = self.context(&cwd)?;
        let rules = self.host_rules()?;
        let executable = std::env::current_exe().context("cannot find this executable")?;
        let (own_files, assurance) = (own_files([]), self.assurance);
        let mut config = Config::new(executable);
        config.own_files = own_files;
        config.assurance = assurance;
        let sandbox = Sandbox::new(config).context("cannot create a sandbox")?;
        for may_retry in [true, false] {
            let Some(launch) = self.prepare(&sandbox, &context, &cwd, rules.is_some())? else {
                return self.exec_unsandboxed();
            };
            let ran = match &rules {
                Some(rules) => rules.serve_in_foreground(launch)?,
                None => launch.run_in_foreground(),
            };
            match ran.context("cannot start the sandbox")? {
                Ok(code) => return Ok(exit::status(code)),
                // A path changed while the sandbox was being built.
                Err(failure) if may_retry && failure.is_race() => {}
                Err(failure) => return Err(self.explain(failure)),
            }
        }
        bail!("cannot build the sandbox: the paths of the policy keep changing; try again")
    }

    /// The hosts that the command may connect to; `None`: those of the policy.
    fn host_rules(&self) -> anyhow::Result<Option<HostRules>> {
        let rules = self.hosts.rules(policy::hosts(&self.profile)?);
        match &rules {
            Some(_) if self.network => {
                bail!("--network allows every host; leave out it or the host rules")
            }
            Some(rules) if rules.ask => bail!(
                "codex sandbox gives the terminal to the command, so it cannot ask; use codex run \
                 --ask-host"
            ),
            _ => Ok(rules),
        }
    }

    /// The sandbox policy.
    fn context(&self, cwd: &Path) -> anyhow::Result<SandboxContext> {
        let workspace =
            PathUri::try_from(cwd).with_context(|| format!("cannot work in {}", cwd.display()))?;
        let mut context = policy::context(&self.profile, &workspace)?;
        for directory in &self.writable {
            let flag = || format!("--writable {}", directory.display());
            directory.symlink_metadata().with_context(flag)?;
            // Keep links: the sandbox knows which of them it may follow.
            let path = PathUri::try_from(absolute(cwd, directory).as_path()).with_context(flag)?;
            if let PermissionProfile::Managed {
                file_system: FileSystemPolicy::Restricted(restricted),
                ..
            } = &mut context.permissions
            {
                let path = FileSystemPath::Path { path };
                restricted.entries.push(FileSystemEntry::new(path, AccessMode::Write));
            }
        }
        if self.network
            && let PermissionProfile::Managed { network, .. }
            | PermissionProfile::External { network } = &mut context.permissions
        {
            *network = NetworkPolicy::Enabled;
        }
        Ok(context)
    }

    /// Prepares the sandbox; `None` if the policy restricts nothing.
    fn prepare(
        &self,
        sandbox: &Sandbox,
        context: &SandboxContext,
        cwd: &Path,
        managed: bool,
    ) -> anyhow::Result<Option<Launch>> {
        let is_ours = |name: &OsString| {
            NEVER_PASSED_ON.iter().chain(NEVER_INHERITED).any(|never| name == never)
        };
        let mut env: BTreeMap<OsString, OsString> =
            std::env::vars_os().filter(|(name, _)| !is_ours(name)).collect();
        let network = managed.then(|| ManagedNetwork {
            loopback_ports: vec![NAMESPACE_HTTP_PORT, NAMESPACE_SOCKS_PORT],
            transparent: true,
        });
        if managed {
            let variables = proxy_variables(NAMESPACE_HTTP_PORT, Some(NAMESPACE_SOCKS_PORT), false);
            env.extend(variables.into_iter().map(|(name, value)| (name.into(), value.into())));
        }
        let env: Vec<_> = env.into_iter().collect();
        let command = codex_linux_sandbox::Command::Program {
            argv: &self.command,
            arg0: None,
            env: &env,
            cwd,
        };
        let request = Request::new(command).with_network(network.as_ref());
        match sandbox.prepare(context, &request)? {
            Prepared::Unrestricted => Ok(None),
            Prepared::Enforced(launch) => {
                if launch.globs_truncated {
                    crate::exit::print_stderr(format_args!(
                        "warning: glob patterns apply only down to glob_scan_max_depth; raise it if \
                         deeper files must match"
                    ));
                }
                Ok(Some(launch))
            }
        }
    }

    /// Replaces this process with the command, for a policy that restricts nothing.
    fn exec_unsandboxed(&self) -> anyhow::Result<ExitCode> {
        let error = Command::new(&self.command[0]).args(&self.command[1..]).exec();
        Err(self.exec_error(error).into())
    }

    fn explain(&self, failure: Failure) -> anyhow::Error {
        match failure.stage {
            Stage::Execute => self.exec_error(failure.io_error()).into(),
            _ => anyhow::Error::new(failure).context("cannot build the sandbox"),
        }
    }

    /// The error of a command that cannot be executed; its kind decides between 126 and 127.
    fn exec_error(&self, error: std::io::Error) -> CommandError {
        let kind = match ErrorKind::of_exec(&error) {
            ErrorKind::ProgramNotFound => ErrorKind::ProgramNotFound,
            _ => ErrorKind::ProgramNotExecutable,
        };
        let message = format!("cannot run `{}` in the sandbox", self.command[0].display());
        CommandError::new(kind, anyhow::Error::new(error).context(message))
    }
}
