//! `codex run`: runs a command on the server as if it were local.

use std::cell::Cell;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use codex_exec_server::client::{Approval, Denial, ExecCommand, ExitStatus, Process};
use codex_exec_server::protocol::run_event::RunEvent;
use codex_exec_server::{
    EnvInherit, EnvPolicy, ErrorKind, ExecServerClient, ExecServerError, Fit, OnFull, PathUri,
    ProcessId, ResourceLimits, Retain, RetainUntil,
};

use crate::env_args::EnvArgs;
use crate::exec_server::parse_duration;
use crate::exit::{self, CommandError, NOT_RUN, print_stderr};
use crate::foreground::{Ending, Foreground, warn_abandoned};
use crate::hosts::{HostArgs, HostRules, Watched};
use crate::limits::{self, RunLimits};
use crate::on::{ConnectOptions, Connected, OnArgs, TOKEN_VARIABLE, block_on};
use crate::output::{self, Sink};
use crate::place::Place;
use crate::policy::SandboxArgs;
use crate::saved_sessions::{SavedSession, SessionName};
use crate::signals::Signals;
use crate::target::require_free;
use crate::terminal::{self, Terminal};
use crate::{confirm, input, remote_path, style};

/// Run a command on the server
///
/// Forwards stdin, stdout, stderr and signals, and exits with the command's exit code. If the connection
/// drops, run reconnects and continues; it loses and repeats nothing.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codex run -- make test                               on this machine, without a server
  codex run --on ws://127.0.0.1:4500 -- make test      on a server
  codex run -t -- vim notes.txt                        in a terminal
  tar c . | codex run --cwd /srv/app -- tar x          with input from a pipe
  codex run --sandbox workspace-write -- ./configure   may write to the working directory
  codex run --sandbox read-only --ask -- npm install   ask before running it without the sandbox
  codex run --allow-host '*.crates.io' -- cargo fetch  may connect there and nowhere else
  codex run --timeout 5m --json -- make | jq .         events as JSON
  codex run --memory 2G --pids 200 -- make test        with limits
  codex run --on ws://… --detach build -- make         in the background; codex attach build

Environment:
  On this machine the command inherits your environment. On a server it inherits the server's,
  except variables like *KEY*, *SECRET* and *TOKEN*; --inherit changes that, -e adds variables, and
  -t sets TERM.

Exit codes: the command's own; 124 --timeout or --idle-timeout expired; 125 codex failed, not the command; 126 the
  command cannot be executed; 127 it was not found; 128+N signal N killed it.")]
pub(crate) struct RunArgs {
    #[command(flatten)]
    on: OnArgs,

    /// Run the command in a terminal of the same size as this one
    #[arg(short, long, conflicts_with = "json")]
    tty: bool,

    /// Print what the command writes to stderr to stdout, in the exact order of its writes
    ///
    /// Without it, stdout and stderr are two pipes: codex prints them in the order in which the command wrote
    /// to them, unless it writes to both in turns faster than the server reads. The command runs by way of
    /// /bin/sh.
    #[arg(long, conflicts_with = "tty")]
    merge: bool,

    /// Give the command an empty stdin, so that run does not read the input of a script around it
    #[arg(short, long)]
    no_stdin: bool,

    /// Run in this directory, relative to the server's working directory
    #[arg(short = 'C', long, value_name = "DIR")]
    cwd: Option<String>,

    #[command(flatten)]
    env: EnvArgs,

    /// Which variables to inherit from the server [default: all]
    #[arg(long, value_enum, value_name = "WHAT")]
    inherit: Option<Inherit>,

    #[command(flatten)]
    sandbox: SandboxArgs,

    /// If the sandbox denies the command something, ask whether to run it again without the sandbox
    #[arg(long, requires = "sandbox")]
    ask: bool,

    #[command(flatten)]
    hosts: HostArgs,

    /// Print events as JSON, one per line
    ///
    /// By `type`: started, output (stream, and text or base64), lost, asked, exited (exitCode, and endedBy if a
    /// limit ended it: wall is --timeout), closed; failed (kind, message, exitCode) if codex fails, for example
    /// because it cannot connect or the command cannot be started.
    #[arg(long)]
    json: bool,

    /// Run in the background under this name; reattach with codex attach NAME
    ///
    /// The server keeps the newest 16 MiB of output. See also codex ps, logs and kill.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["ask", "json"])]
    detach: Option<SessionName>,

    /// With --detach, end the command after this time without a client
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "24h",
          requires = "detach")]
    keep: Duration,

    #[command(flatten)]
    limits: RunLimits,

    /// The command and its arguments; use sh -c '…' for shell syntax
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<String>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Inherit {
    /// All, except those that look like secrets
    All,
    /// PATH, HOME, SHELL, LANG, USER and a few more
    Core,
    /// None; set PATH with -e, or give the command as a path
    None,
}

/// How much output the server retains of a detached process, in bytes; it drops the oldest.
const DETACHED_OUTPUT: u64 = 16 << 20;

pub(crate) fn run(args: &RunArgs) -> anyhow::Result<ExitCode> {
    let result = match &args.detach {
        Some(name) => block_on(detach(args, name)),
        None => run_foreground(args),
    };
    let result = result.map_err(exit::with_command_code);
    if let (true, Err(error)) = (args.json, &result) {
        let (kind, message) = (exit::kind(error), exit::message(error));
        let line = RunEvent::Failed { kind, message, exit_code: exit::code(error) };
        // Its failure is that of the output, which is reported anyway.
        let _ = output::print_line(&line);
    }
    result
}

fn run_foreground(args: &RunArgs) -> anyhow::Result<ExitCode> {
    // Before anything else: a server in this process treats every child as its own.
    let terminal = args.tty.then(|| Terminal::open("-t")).transpose()?;
    let rules = args.host_rules()?;
    let asks = rules.as_ref().is_some_and(|rules| rules.ask);
    if asks && args.tty {
        bail!("--ask-host needs the terminal that -t gives to the command; leave out one of them");
    }
    block_on(async {
        let signals = Signals::listen()?;
        let sandbox = args.sandbox().is_given() || rules.is_some();
        let heartbeat = io::stderr().is_terminal();
        let options = ConnectOptions { sandbox, heartbeat, ..ConnectOptions::default() };
        let connected = tokio::select! {
            connected = args.on.connect(options) => connected?,
            code = signals.exit_code() => return Ok(exit::status(code)),
        };
        let foreground = Foreground {
            terminal: terminal.as_ref(),
            // Answers on the terminal must not reach the command.
            forward_stdin: !(args.no_stdin || asks && io::stdin().is_terminal()),
            escapes: false,
            json: args.json,
            limits: args.limits.limits(),
            attached: false,
            keep_on_hangup: false,
            fit: Some(Fit::Smallest),
            first_paint: None,
            signals: &signals,
        };
        let process = Cell::new(None);
        let watched = rules.as_ref().map(|rules| Watched::start(&connected.client, rules));
        let ending = args.run_process(&connected, &foreground, &process).await;
        drop(terminal);
        let session = connected.client.session_id();
        match ending {
            Ok(Ending::Abandoned(_)) => connected.abandon().await,
            _ => connected.close().await,
        }
        if let Some(watched) = watched {
            watched.report().await;
        }
        match ending? {
            Ending::Exited { code, .. } | Ending::Stopped(code) | Ending::Unwritable(code) => {
                Ok(exit::status(code))
            }
            Ending::Abandoned(code) => {
                let reattach_command = session.zip(process.take()).map(|(session, process)| {
                    format!("codex attach{} --session {session} {process}", args.on.flag())
                });
                warn_abandoned(reattach_command.as_deref());
                Ok(exit::status(code))
            }
            Ending::Incomplete { .. } => Ok(ExitCode::from(NOT_RUN)),
            Ending::Detached(code) => Ok(exit::status(code)),
            Ending::Failed(error) => Err(error),
        }
    })
}

impl RunArgs {
    async fn run_process(
        &self,
        connected: &Connected,
        foreground: &Foreground<'_>,
        id: &Cell<Option<ProcessId>>,
    ) -> anyhow::Result<Ending> {
        let client = &connected.client;
        let command = self.exec_command(connected, foreground.forward_stdin)?;
        let status = |ending: &Ending| match *ending {
            Ending::Exited { code, sandbox_denied }
            | Ending::Incomplete { code, sandbox_denied } => {
                ExitStatus { sandbox_denied, ..ExitStatus::of_code(code) }
            }
            _ => ExitStatus::of_code(0),
        };
        let run = async |process: Process| {
            id.set(Some(process.id().clone()));
            self.announce(&process).await;
            Ok(foreground.run(process).await)
        };
        let ask = async |denial: Denial<'_, Ending>| self.ask(&denial, foreground).await;
        match client.drive_with_approval(command, run, status, ask).await {
            Ok(ending) => Ok(ending),
            Err(error) => Err(self.explain(connected, error).await),
        }
    }

    /// `--sandbox`, or that of the place.
    fn sandbox(&self) -> SandboxArgs {
        self.sandbox.or_of(self.on.settings())
    }

    /// The hosts that the command may connect to; `None`: not restricted.
    fn host_rules(&self) -> anyhow::Result<Option<HostRules>> {
        Ok(self.hosts.rules(self.sandbox().hosts()?))
    }

    /// The command to start, without the options of detached runs.
    fn exec_command(&self, connected: &Connected, stdin: bool) -> anyhow::Result<ExecCommand> {
        let client = &connected.client;
        let cwd = self.directory(connected)?;
        let argv = match self.tty {
            true => with_terminal_size(client, self.command.clone()),
            false if self.merge => after_script("exec \"$@\" 2>&1", self.command.clone()),
            false => self.command.clone(),
        };
        let sandbox = self.sandbox().context(&cwd)?;
        let mut command = ExecCommand::new(argv)
            .cwd_uri(cwd)
            .env_policy(self.env_policy(connected.is_embedded()));
        command = match self.host_rules()? {
            Some(rules) => rules.apply(client, command, sandbox)?,
            None => command.sandbox(sandbox),
        };
        command = command.limits(self.server_limits(client)?);
        if self.tty {
            command = in_terminal(command);
        } else if stdin && (client.capabilities().process_close_stdin || !input::is_at_end()) {
            command = command.pipe_stdin();
        }
        self.env.apply(command, self.on.settings())
    }

    /// The limits that the server has to enforce.
    fn server_limits(&self, client: &ExecServerClient) -> anyhow::Result<ResourceLimits> {
        let limits = self.limits.limits();
        if client.capabilities().process_limits {
            return Ok(limits);
        }
        let kept = limits::kept_by_client(&limits);
        let detached = self.detach.is_some();
        let mut others =
            limits.iter().filter(|(resource, _)| detached || kept.get(*resource).is_none());
        match others.next() {
            Some((resource, _)) => {
                let what = format!("enforce {}", limits::flag(resource));
                let instead = "leave it out, or use a newer server".to_owned();
                Err(ExecServerError::Unsupported { what, instead }.into())
            }
            None => Ok(ResourceLimits::default()),
        }
    }

    fn directory(&self, connected: &Connected) -> anyhow::Result<PathUri> {
        match &self.cwd {
            Some(cwd) => remote_path::resolve(connected, cwd),
            None => remote_path::working_directory(connected)
                .context("cannot choose a working directory; pass --cwd DIR"),
        }
    }

    fn env_policy(&self, embedded: bool) -> Option<EnvPolicy> {
        let inherit = match self.inherit {
            Some(Inherit::None) => return None,
            Some(Inherit::Core) => EnvInherit::Core,
            Some(Inherit::All) | None => EnvInherit::All,
        };
        Some(EnvPolicy { inherit, ..env_policy(embedded) })
    }

    async fn announce(&self, process: &Process) {
        let session = process.client().session_id();
        let line = RunEvent::Started {
            process_id: process.id().to_string(),
            session_id: session,
            sandbox_type: process.sandbox_type(),
            sandbox_assurance: process.sandbox_assurance(),
            limits: process.limits().copied().map(Box::new),
        };
        if self.json {
            let _ = Sink::new(true).print_if_json(&line).await;
        }
    }

    async fn ask(&self, denial: &Denial<'_, Ending>, foreground: &Foreground<'_>) -> Approval {
        let command = self.command.iter().map(|word| style::quoted(word)).collect::<Vec<_>>();
        let command = style::printable(&command.join(" "));
        if !self.ask {
            if !self.json {
                print_stderr(format_args!(
                    "the sandbox probably denied the command something; with --ask, codex offers \
                     to run it without the sandbox"
                ));
            }
            return Approval::Refused;
        }
        let question = format!(
            "codex: the sandbox denied this command something (exit code {}):\n  {command}\n\
             Run it again without the sandbox? [y/N] ",
            denial.status.code
        );
        let approval = confirm::confirm(&question, foreground.signals).await;
        if self.json {
            let line = RunEvent::Asked { approved: approval == Approval::Approved };
            let _ = Sink::new(true).print_if_json(&line).await;
        }
        approval
    }

    /// Explains a failed start, with the kind that decides the exit code.
    async fn explain(&self, connected: &Connected, error: ExecServerError) -> anyhow::Error {
        let kind = error.kind();
        // Some servers report a missing directory like a missing program.
        let unsure = matches!(
            kind,
            ErrorKind::ProgramNotFound | ErrorKind::ProgramNotExecutable | ErrorKind::Unknown
        );
        if unsure
            && let Some(cwd) = &self.cwd
            && let Ok(path) = remote_path::resolve(connected, cwd)
            && !connected.client.files().metadata(&path).await.is_ok_and(|is| is.is_directory)
        {
            let missing = anyhow::anyhow!("there is no directory {cwd} on the server");
            return CommandError::new(ErrorKind::WorkingDirectoryMissing, missing)
                .hint("pass another --cwd")
                .into();
        }
        let program = style::printable(&self.command[0]);
        match kind {
            ErrorKind::ProgramNotFound => {
                CommandError::new(kind, anyhow::anyhow!("command `{program}` not found"))
                    .hint("check its name and PATH (-e PATH=…)")
                    .into()
            }
            ErrorKind::ProgramNotExecutable => {
                CommandError::new(kind, anyhow::anyhow!("`{program}` cannot be executed"))
                    .hint("check that it is a program and has execute permission")
                    .into()
            }
            ErrorKind::WorkingDirectoryMissing | ErrorKind::WorkingDirectoryDenied => {
                let error =
                    anyhow::Error::from(error).context("cannot run in this working directory");
                CommandError::new(kind, error).hint("pass another --cwd").into()
            }
            _ => error.into(),
        }
    }
}

/// Inherits the server's environment except variables that look like secrets; if the server runs in this
/// process, the whole environment, which the user could pass to the command without this program.
pub(crate) fn env_policy(embedded: bool) -> EnvPolicy {
    EnvPolicy {
        ignore_default_excludes: embedded,
        exclude: vec![TOKEN_VARIABLE.to_owned()],
        ..EnvPolicy::default()
    }
}

/// The command that runs `argv` in a terminal of the local size. If the server cannot resize terminals,
/// which then have 24×80, the command calls `stty` first.
pub(crate) fn with_terminal_size(client: &ExecServerClient, argv: Vec<String>) -> Vec<String> {
    match terminal::size() {
        Some((rows, cols)) if !client.capabilities().process_resize => {
            after_script(&format!("stty rows {rows} cols {cols}; exec \"$@\""), argv)
        }
        _ => argv,
    }
}

/// The command that runs a script of a shell, which has `argv` as its arguments.
fn after_script(script: &str, argv: Vec<String>) -> Vec<String> {
    let shell = ["/bin/sh", "-c", script, "sh"].map(str::to_owned);
    shell.into_iter().chain(argv).collect()
}

/// Runs a command in a terminal with the local size and TERM.
pub(crate) fn in_terminal(command: ExecCommand) -> ExecCommand {
    let (rows, cols) = terminal::size().unwrap_or((24, 80));
    let term = std::env::var("TERM").unwrap_or_else(|_| "xterm".to_owned());
    command.size(rows, cols).env("TERM", term)
}

/// Saves the session, starts the command and exits.
async fn detach(args: &RunArgs, name: &SessionName) -> anyhow::Result<ExitCode> {
    let Some(place) = args.on.place() else {
        bail!(
            "--detach needs a server that keeps running; start one with `codex exec-server --listen \
             ws://127.0.0.1:4500` and add --on ws://127.0.0.1:4500"
        );
    };
    if matches!(place, Place::Websocket(_)) && place.url().is_none() {
        bail!(
            "--detach saves the server's URL, and this one has a query or a user, which may be a secret; \
             pass the token with --token-file PATH"
        );
    }
    if place.url().is_none() {
        bail!(
            "--detach needs a server that keeps running, but a stdio: server ends with its \
             connection; pass --on ws://… or --on env:…"
        );
    }
    require_free(&args.on, name).await?;
    let rules = args.host_rules()?;
    if rules.as_ref().is_some_and(|rules| rules.ask) {
        bail!("--ask-host needs a command in the foreground; leave out --detach");
    }
    let sandbox = args.sandbox().is_given() || rules.is_some();
    let options = ConnectOptions {
        detach_ttl: Some(args.keep),
        sandbox,
        name: Some(name.to_string()),
        ..ConnectOptions::default()
    };
    let connected = args.on.connect(options).await?;
    let client = &connected.client;
    let Some(session) = client.session_id() else {
        bail!("this server has no sessions to reattach to; run the command without --detach");
    };
    let capabilities = client.capabilities();
    if !capabilities.session_detach_ttl {
        print_stderr(format_args!(
            "this server ignores --keep: it ends a command without a client after a time of its \
             own, usually 30 s; reattach before that"
        ));
    }
    let retain = Retain { bytes: DETACHED_OUTPUT, on_full: OnFull::Drop, until: RetainUntil::Sent };
    let id = name.to_string();
    let command = args.exec_command(&connected, false)?.process_id(id.clone()).retain(retain);
    // Before the start: a command without a saved name could not be ended before its TTL expires.
    let saved = SavedSession::new(name, &args.on, &session, &id, args.tty)?;
    saved.as_ref().map_or(Ok(()), SavedSession::write)?;
    let _process = match client.spawn(command).await {
        Ok(process) => process,
        Err(error) => {
            // A refused command does not run. Any other may run, so keep the name to end it by.
            if error.code().is_some() {
                saved.as_ref().map_or(Ok(()), SavedSession::remove)?;
            }
            return Err(args.explain(&connected, error).await);
        }
    };
    connected.close().await;
    let mut out = std::io::stdout().lock();
    writeln!(out, "{name}")?;
    print_stderr(format_args!(
        "running as `{name}`: codex attach {name}, codex logs -f {name}, codex kill {name}"
    ));
    Ok(ExitCode::SUCCESS)
}
