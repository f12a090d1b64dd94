//! `codex shell`: opens a login shell on the server in this terminal.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use codex_exec_server::client::ExecCommand;
use codex_exec_server::{AttachParams, Fit, ResourceLimits};

use crate::env_args::EnvArgs;
use crate::exec_server::{format_duration, parse_duration};
use crate::exit::{self, NOT_RUN, print_stderr};
use crate::foreground::{Ending, Foreground, kill, warn_abandoned, warn_left_over};
use crate::on::{ConnectOptions, Connected, OnArgs, block_on};
use crate::policy::SandboxArgs;
use crate::remote_path;
use crate::run::{env_policy, in_terminal, with_terminal_size};
use crate::saved_sessions::{SavedSession, SessionName};
use crate::signals::Signals;
use crate::target::require_free;
use crate::terminal::Terminal;

/// The shell's id in its session.
const PROCESS: &str = "shell";

/// Open a login shell on the server, or run a command in its place
///
/// If the connection drops, codex reconnects and the shell continues where it was. When the shell
/// exits, the server kills what it left running. A shell with a name also survives the end of codex and of
/// this terminal. codex always restores this terminal.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codex shell --on ws://127.0.0.1:4500
  codex shell --on 'stdio:ssh host codex exec-server --listen stdio'
  codex shell --on ws://… --name work          detach with ~. and reattach with codex attach work,
                                               also after a crash of codex or of this machine
  codex shell --on build -e EDITOR=vi -- htop  a command instead of the login shell

Keys, after Enter:
  ~.   detach; the shell keeps running for --keep, and codex attach reattaches. A shell on this
       machine or behind stdio: ends instead. During an outage codex says that it cannot know
  ~?   show these keys
  ~~   type a tilde

Exit codes: the shell's own; 125 codex failed; 128+N signal N killed the shell.")]
pub(crate) struct ShellArgs {
    #[command(flatten)]
    on: OnArgs,

    /// Start in this directory [default: the home directory]
    #[arg(short = 'C', long, value_name = "DIR")]
    cwd: Option<String>,

    #[command(flatten)]
    env: EnvArgs,

    #[command(flatten)]
    sandbox: SandboxArgs,

    /// The name to reattach by [default: shell- and four characters]
    #[arg(long)]
    name: Option<SessionName>,

    /// End the shell after this time without a client
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "1h")]
    keep: Duration,

    /// A command and its arguments, instead of a login shell
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

pub(crate) fn run(args: &ShellArgs) -> anyhow::Result<ExitCode> {
    args.open().map_err(exit::with_code(NOT_RUN))
}

impl ShellArgs {
    fn open(&self) -> anyhow::Result<ExitCode> {
        // Before anything else: a server in this process treats every child as its own.
        let terminal = Terminal::open("codex shell")?;
        block_on(async {
            let signals = Signals::listen()?;
            let options = ConnectOptions {
                heartbeat: true,
                sandbox: self.sandbox.or_of(self.on.settings()).is_given(),
                detach_ttl: Some(self.keep),
                // Reconnect for as long as the server keeps the shell.
                patience: Some(self.keep),
                // Others may join, and one of them may take the shell.
                attach: Some(AttachParams::default()),
                name: self.name.as_ref().map(ToString::to_string),
                ..ConnectOptions::default()
            };
            let connected = tokio::select! {
                connected = self.on.connect(options) => connected?,
                code = signals.exit_code() => {
                    return Ok(exit::status(code));
                }
            };
            if let Some(name) = &self.name {
                require_free(&self.on, name).await?;
            }
            let command = self.command(&connected)?;
            // Saved before the start: if this program is killed, the shell can still be found by its name.
            let saved = self.saved(connected.client.session_id().as_deref())?;
            saved.as_ref().map_or(Ok(()), SavedSession::write)?;
            let process = match connected.client.spawn(command).await {
                Ok(process) => process,
                Err(error) => {
                    if error.code().is_some() {
                        saved.as_ref().map_or(Ok(()), SavedSession::remove)?;
                    }
                    return Err(error.into());
                }
            };
            let id = process.id().clone();
            let foreground = Foreground {
                terminal: Some(&terminal),
                forward_stdin: true,
                escapes: true,
                json: false,
                limits: ResourceLimits::default(),
                attached: false,
                keep_on_hangup: self.name.is_some() && saved.is_some(),
                fit: Some(Fit::Smallest),
                first_paint: None,
                signals: &signals,
            };
            let ending = foreground.run(process).await;
            drop(terminal);
            let kept = connected.client.capabilities().session_detach_ttl;
            let nothing_left = !ending.has_ended() || kill(&connected.client, &id).await;
            match ending {
                Ending::Abandoned(_) => connected.abandon().await,
                _ => connected.close().await,
            }
            match ending {
                Ending::Exited { code, .. }
                | Ending::Incomplete { code, .. }
                | Ending::Stopped(code) => {
                    match &saved {
                        Some(saved) if nothing_left => saved.remove()?,
                        Some(saved) => warn_left_over(&saved.name),
                        None => {}
                    }
                    Ok(exit::status(code))
                }
                Ending::Unwritable(code) => Ok(exit::status(code)),
                Ending::Abandoned(code) => {
                    let reattach_command =
                        saved.map(|saved| format!("codex attach {}", saved.name));
                    warn_abandoned(reattach_command.as_deref());
                    Ok(exit::status(code))
                }
                Ending::Detached(code) => {
                    self.print_detached(saved.as_ref(), kept);
                    Ok(exit::status(code))
                }
                Ending::Failed(error) => Err(error),
            }
        })
    }

    fn command(&self, connected: &Connected) -> anyhow::Result<ExecCommand> {
        let client = &connected.client;
        let info = client.info();
        let path = if info.shell.path.is_empty() { "/bin/sh" } else { &info.shell.path };
        let cwd = match &self.cwd {
            Some(cwd) => remote_path::resolve(connected, cwd)?,
            None if connected.is_embedded() || connected.cwd.is_some() => {
                remote_path::working_directory(connected)?
            }
            None => remote_path::resolve(connected, "~")
                .or_else(|_| remote_path::working_directory(connected))
                .context("cannot choose a directory to start in; pass --cwd DIR")?,
        };
        // Every shell knows this flag. An argv[0] that starts with a dash does the same, but not every
        // server supports arg0 for a process in a terminal.
        let argv = match self.command.is_empty() {
            true => vec![path.to_owned(), "-l".to_owned()],
            false => self.command.clone(),
        };
        let sandbox = self.sandbox.or_of(self.on.settings()).context(&cwd)?;
        let command = ExecCommand::new(with_terminal_size(client, argv))
            .cwd_uri(cwd)
            .sandbox(sandbox)
            .process_id(PROCESS)
            .env_policy(Some(env_policy(connected.is_embedded())));
        self.env.apply(in_terminal(command), self.on.settings())
    }

    /// The session to save, if the server has sessions that outlive a connection.
    fn saved(&self, session: Option<&str>) -> anyhow::Result<Option<SavedSession>> {
        let Some(session) = session else { return Ok(None) };
        let name = match &self.name {
            Some(name) => name.clone(),
            None => {
                let mark: String = session.chars().filter(char::is_ascii_alphanumeric).collect();
                let mark = mark.get(..4).unwrap_or("left");
                // The server chooses its session ids, but not which saved session to replace.
                let names = std::iter::once(format!("shell-{mark}"))
                    .chain((2..).map(|number| format!("shell-{mark}-{number}")));
                let mut free = names.filter_map(|name| {
                    let name: SessionName = name.parse().ok()?;
                    matches!(SavedSession::find(&name), Ok(None)).then_some(name)
                });
                free.next().context("cannot choose a name for the shell; pass --name")?
            }
        };
        SavedSession::new(&name, &self.on, session, PROCESS, true)
    }

    fn print_detached(&self, saved: Option<&SavedSession>, kept: bool) {
        let Some(saved) = saved else {
            return print_stderr(format_args!("disconnected; the shell has ended"));
        };
        let time = match kept {
            true => format!("for {}", format_duration(self.keep)),
            false => "for a time that the server chooses, usually 30s".to_owned(),
        };
        print_stderr(format_args!(
            "detached; the shell keeps running {time}: codex attach {}",
            saved.name
        ));
    }
}
