//! `codex sandbox`: a command here, held to a policy.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, bail};
use clap::Args;
use codex_exec_server::client::{PermissionProfile, SandboxContext};
use codex_exec_server::protocol::{
    AccessMode, FileSystemEntry, FileSystemPath, FileSystemPolicy, NetworkPolicy,
};
use codex_exec_server::{ErrorKind, PathUri};
use codex_exec_server::{NEVER_INHERITED, NEVER_PASSED_ON};
use codex_linux_sandbox::{Assurance, Config, Failure, Launch, Prepared, Request, Sandbox, Stage};

use crate::exit::{self, CommandError};
use crate::own_files::own_files;
use crate::policy;

/// Run a command on this machine under a policy that the kernel enforces
///
/// The command has the streams, the terminal, the directory and the environment of this one, and of
/// the rest of the machine what the policy grants: files it may not write or read, other processes
/// and the network are out of its reach, and of everything it starts. So are the credentials of codex
/// itself, whatever the policy says. When it ends, so does all that it started. codex doctor shows
/// whether this machine can do that.
#[derive(Debug, Args)]
#[command(after_help = "\
Profiles:
  read-only        the whole disk can be read, nothing can be written, no network
  workspace-write  as well, the working directory, /tmp and $TMPDIR can be written; in the working
                   directory .git, .agents and .codex stay as they are
  FILE             JSON, as in a request's `sandbox` or its `permissions`; relative to the working
                   directory where it does not name a cwd

Examples:
  codex sandbox -- ./configure                           look, do not touch
  codex sandbox --profile workspace-write -- make        write below this directory
  codex sandbox --profile workspace-write --network -- npm install
  codex sandbox --writable ~/.cache -- make -n           one more directory
  codex sandbox --profile policy.json -- sh              a policy of your own, such as
    {\"type\":\"managed\",\"network\":\"restricted\",\"file_system\":{\"type\":\"restricted\",\"entries\":[
      {\"path\":{\"type\":\"special\",\"value\":{\"kind\":\"root\"}},\"access\":\"read\"},
      {\"path\":{\"type\":\"glob_pattern\",\"pattern\":\"**/.env\"},\"access\":\"deny\"}]}}

Exit codes: those of the command; 125 there is no such sandbox, and nothing ran; 126 and 127 the
  command cannot be executed, is not found; 128+N it died of signal N.")]
pub struct SandboxArgs {
    /// What it may touch: read-only, workspace-write or the path of a JSON file
    #[arg(long, value_name = "PROFILE", default_value = "read-only")]
    profile: String,

    /// Let it write below this directory too; may be given more than once
    #[arg(long, value_name = "DIR")]
    writable: Vec<PathBuf>,

    /// Let it use the network
    #[arg(long)]
    network: bool,

    /// Weakest sandbox to accept: full, namespaces or landlock; see codex doctor
    #[arg(long, value_name = "LEVEL", default_value_t)]
    assurance: Assurance,

    /// The command and its arguments; no shell is involved. Everything after it is its own
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

pub fn run(args: &SandboxArgs) -> anyhow::Result<ExitCode> {
    args.run().map_err(exit::of_command)
}

/// A path without `.` and `..`, below a directory that is reached without links.
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
        let cwd = std::env::current_dir().context("the working directory is gone")?;
        let context = self.context(&cwd)?;
        let executable = std::env::current_exe().context("cannot find this executable")?;
        let (own_files, assurance) = (own_files([]), self.assurance);
        let mut config = Config::new(executable);
        config.own_files = own_files;
        config.assurance = assurance;
        let sandbox = Sandbox::new(config).context("cannot make a sandbox")?;
        for again in [true, false] {
            let Some(launch) = self.prepare(&sandbox, &context, &cwd)? else {
                return self.become_it();
            };
            match launch.run_in_foreground().context("cannot start the sandbox")? {
                Ok(code) => return Ok(exit::passed_on(code)),
                // Something moved while it was being built.
                Err(failure) if again && failure.is_race() => {}
                Err(failure) => return Err(self.explain(failure)),
            }
        }
        bail!("the sandbox was not built")
    }

    /// What it is held to.
    fn context(&self, cwd: &Path) -> anyhow::Result<SandboxContext> {
        let workspace =
            PathUri::try_from(cwd).with_context(|| format!("cannot work in {}", cwd.display()))?;
        let mut context = policy::context(&self.profile, &workspace)?;
        for directory in &self.writable {
            let flag = || format!("--writable {}", directory.display());
            directory.symlink_metadata().with_context(flag)?;
            // Links are left to be followed where it is known which of them can be trusted.
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

    /// `None` if there is nothing to enforce.
    fn prepare(
        &self,
        sandbox: &Sandbox,
        context: &SandboxContext,
        cwd: &Path,
    ) -> anyhow::Result<Option<Launch>> {
        let is_ours = |name: &OsString| {
            NEVER_PASSED_ON.iter().chain(NEVER_INHERITED).any(|never| name == never)
        };
        let env: Vec<(OsString, OsString)> =
            std::env::vars_os().filter(|(name, _)| !is_ours(name)).collect();
        let command = codex_linux_sandbox::Command::Program {
            argv: &self.command,
            arg0: None,
            env: &env,
            cwd,
        };
        match sandbox.prepare(context, &Request { command })? {
            Prepared::Unrestricted => Ok(None),
            Prepared::Enforced(launch) => {
                if launch.globs_cut {
                    eprintln!("codex: warning: glob patterns go deeper than glob_scan_max_depth");
                }
                Ok(Some(launch))
            }
        }
    }

    /// A profile that restricts nothing needs no sandbox.
    fn become_it(&self) -> anyhow::Result<ExitCode> {
        let error = Command::new(&self.command[0]).args(&self.command[1..]).exec();
        Err(self.not_executed(error).into())
    }

    fn explain(&self, failure: Failure) -> anyhow::Error {
        match failure.stage {
            Stage::Execute => self.not_executed(failure.io_error()).into(),
            _ => anyhow::Error::new(failure).context("the sandbox could not be built"),
        }
    }

    /// As a shell tells them apart.
    fn not_executed(&self, error: std::io::Error) -> CommandError {
        let kind = match ErrorKind::of_exec(&error) {
            ErrorKind::ProgramNotFound => ErrorKind::ProgramNotFound,
            _ => ErrorKind::ProgramNotExecutable,
        };
        let words = format!("cannot run `{}` in the sandbox", self.command[0].display());
        CommandError::new(kind, anyhow::Error::new(error).context(words))
    }
}
