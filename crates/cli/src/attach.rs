//! `codex attach`: reattaches to a detached process.

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Args;
use codex_exec_server::ResourceLimits;
use codex_exec_server::client::ExecCommand;

use crate::exit::{self, NOT_RUN, print_stderr};
use crate::foreground::{Ending, Foreground, kill, warn_abandoned, warn_left_over};
use crate::on::{ConnectOptions, block_on};
use crate::signals::Signals;
use crate::target::TargetArgs;
use crate::terminal::{self, Terminal};

/// Reattach to a detached process
///
/// Prints the output so far, then follows the process until it exits. If the process has a terminal,
/// your keys go to it; ~. after Enter detaches again. If it has none, Ctrl-C interrupts it; codex logs -f
/// only watches. If attach cannot write its output, it exits and the process keeps running. When the
/// process exits, attach exits with its exit code, frees the name and kills what the process left
/// running. The server keeps the newest 16 MiB of output; if it dropped older output, attach prints how
/// much and the exit code stays the same.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codex attach build                                         started by codex run --detach build
  codex attach --on ws://127.0.0.1:4500 --session 8c4c… p1   by session and process id")]
pub(crate) struct AttachArgs {
    #[command(flatten)]
    target: TargetArgs,
}

pub(crate) fn run(args: &AttachArgs) -> anyhow::Result<ExitCode> {
    block_on(attach(args)).map_err(exit::with_code(NOT_RUN))
}

async fn attach(args: &AttachArgs) -> anyhow::Result<ExitCode> {
    let signals = Signals::listen()?;
    let target = tokio::select! {
        target = args.target.open(ConnectOptions::default()) => target?,
        code = signals.exit_code() => return Ok(exit::status(code)),
    };
    let client = &target.connected.client;
    let interactive = target.has_terminal() && std::io::stdin().is_terminal();
    let terminal = interactive.then(|| Terminal::open("codex attach")).transpose()?;
    let like = match target.has_terminal() {
        true => ExecCommand::new(["-"]).tty(),
        false => ExecCommand::new(["-"]),
    };
    let process = client.attach(target.process.clone(), 0, like).await?;
    if interactive && let Some((rows, cols)) = terminal::size() {
        // A server that cannot resize is no reason to fail.
        let _ = process.resize(rows, cols).await;
    }
    let foreground = Foreground {
        terminal: terminal.as_ref(),
        forward_stdin: interactive,
        escapes: interactive,
        json: false,
        limits: ResourceLimits::default(),
        attached: true,
        keep_on_hangup: true,
        signals: &signals,
    };
    let ending = foreground.run(process).await;
    drop(terminal);
    let name = target.saved.as_ref().map(|saved| saved.name.clone());
    if ending.has_ended() {
        // Kill what the process left running: without its name, no command could end it later.
        match (kill(client, &target.process).await, &name) {
            (false, Some(name)) => warn_left_over(name),
            _ => target.forget()?,
        }
    }
    target.connected.close().await;
    match ending {
        Ending::Exited { code, .. } | Ending::Stopped(code) => Ok(exit::status(code)),
        Ending::Abandoned(code) => {
            let reattach_command = name.map(|name| format!("codex attach {name}"));
            warn_abandoned(reattach_command.as_deref());
            Ok(exit::status(code))
        }
        Ending::Incomplete { .. } => Ok(ExitCode::from(NOT_RUN)),
        Ending::Unwritable(code) => Ok(exit::status(code)),
        Ending::Detached(code) => {
            match name {
                Some(name) => {
                    print_stderr(format_args!("detached; reattach with codex attach {name}"));
                }
                None => print_stderr(format_args!("detached; the process keeps running")),
            }
            Ok(exit::status(code))
        }
        Ending::Failed(error) => Err(error),
    }
}
