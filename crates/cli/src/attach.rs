//! `codex attach`: reattaches to a detached process.

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use codex_exec_screen::Screen;
use codex_exec_server::client::ExecCommand;
use codex_exec_server::{
    ExecServerClient, Fit, ProcessId, ReadParams, ResizeParams, ResourceLimits, Role, ScreenParams,
};

use crate::exit::{self, NOT_RUN, print_stderr};
use crate::foreground::{Ending, Foreground, kill, warn_abandoned, warn_left_over};
use crate::on::block_on;
use crate::signals::Signals;
use crate::target::{Join, TargetArgs};
use crate::terminal::{self, Terminal};

/// Reattach to a detached process
///
/// Others may be attached to the same process: all see its output, and all may type. If the process has a
/// terminal, attach repaints it and your keys go to it; ~. after Enter detaches again. If it has none, attach
/// prints the output so far, and Ctrl-C interrupts the process; codex logs -f only watches. If attach cannot
/// write its output, it exits and the process keeps running. When the process exits, attach exits with its exit
/// code and kills what the process left running; codex logs still has the output, and the name can be used
/// again. The server keeps the newest 16 MiB of output; if it dropped older output, attach prints how much and
/// the exit code stays the same.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codex attach build                                         started by codex run --detach build
  codex attach --read-only build                             watch; Ctrl-C or ~. stops watching
  codex attach --take build                                  detach everyone else
  codex attach --on ws://127.0.0.1:4500 build                started on another machine
  codex attach --on ws://127.0.0.1:4500 --session 8c4c… p1   by session and process id")]
pub(crate) struct AttachArgs {
    #[command(flatten)]
    target: TargetArgs,

    /// Watch only: type nothing, and leave the size of the terminal alone
    #[arg(long, conflicts_with = "size")]
    read_only: bool,

    /// Detach all other clients
    #[arg(long)]
    take: bool,

    /// The size of a terminal that several clients share
    #[arg(long, value_enum, default_value_t = Size::Smallest)]
    size: Size,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Size {
    /// That of the smallest window
    Smallest,
    /// That of this window
    Mine,
}

pub(crate) fn run(args: &AttachArgs) -> anyhow::Result<ExitCode> {
    block_on(attach(args)).map_err(exit::with_code(NOT_RUN))
}

async fn attach(args: &AttachArgs) -> anyhow::Result<ExitCode> {
    let signals = Signals::listen()?;
    let role = if args.read_only { Role::View } else { Role::Control };
    let join = Join { role, watch: true, take: args.take };
    let target = tokio::select! {
        target = args.target.open(join) => target?,
        code = signals.exit_code() => return Ok(exit::status(code)),
    };
    let client = &target.connected.client;
    let interactive = target.has_terminal() && std::io::stdin().is_terminal();
    let terminal = interactive.then(|| Terminal::open("codex attach")).transpose()?;
    let like = match target.has_terminal() {
        true => ExecCommand::new(["-"]).tty(),
        false => ExecCommand::new(["-"]),
    };
    let fit = match args.size {
        _ if args.read_only => None,
        Size::Smallest => Some(Fit::Smallest),
        Size::Mine => Some(Fit::Mine),
    };
    let (mut after, mut first_paint) = (0, None);
    if let (true, Some((rows, cols))) = (interactive, terminal::size()) {
        if let Some(fit) = fit
            && client.capabilities().process_resize
        {
            let fit = Some(fit).filter(|fit| *fit != Fit::default());
            let process_id = target.process.clone();
            // A process that has exited has no size any more.
            let _ = client.process_resize(ResizeParams { process_id, rows, cols, fit }).await;
        }
        let painted = screen(client, &target.process, (rows, cols)).await?;
        after = painted.seq;
        first_paint = Some(painted.sequence);
    }
    let process = client.attach(target.process.clone(), after, like).await?;
    let foreground = Foreground {
        terminal: terminal.as_ref(),
        forward_stdin: interactive,
        escapes: interactive,
        json: false,
        limits: ResourceLimits::default(),
        attached: true,
        keep_on_hangup: true,
        fit,
        first_paint,
        signals: &signals,
    };
    let ending = foreground.run(process).await;
    drop(terminal);
    let name = target.saved.as_ref().map(|saved| saved.name.clone());
    if ending.has_ended() && !args.read_only {
        // Kill what the process left running, before its name is used again.
        let killed = kill(client, &target.process).await;
        match &name {
            Some(name) if !killed => warn_left_over(name),
            // A server that shares sessions keeps the output for `codex logs`.
            _ if client.is_guest() => {}
            _ => target.forget()?,
        }
    }
    match ending {
        Ending::Abandoned(_) => target.connected.abandon().await,
        _ => target.connected.close().await,
    }
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

/// What repaints a terminal.
struct Painted {
    sequence: Vec<u8>,
    /// The number of the last event in it.
    seq: u64,
}

/// Bytes per request.
const READ_BYTES: u64 = 1 << 20;

/// The screen of the process: the server's, or one made here from the output that the server retains.
async fn screen(
    client: &ExecServerClient,
    process: &ProcessId,
    (rows, cols): (u16, u16),
) -> anyhow::Result<Painted> {
    // What is on the local screen scrolls into its history.
    let mut sequence = format!("\x1b[{rows};1H{}", "\r\n".repeat(rows.into())).into_bytes();
    let process_id = process.clone();
    if client.capabilities().process_screen {
        let screen = client.process_screen(ScreenParams { process_id }).await?;
        sequence.extend_from_slice(&screen.repaint.0);
        return Ok(Painted { sequence, seq: screen.seq });
    }
    let (mut screen, mut seq) = (Screen::new(rows, cols), 0);
    loop {
        let read = client.process_read(ReadParams {
            process_id: process.clone(),
            after_seq: Some(seq),
            max_bytes: Some(READ_BYTES),
            wait_ms: None,
        });
        let read = read.await?;
        for chunk in &read.chunks {
            screen.feed(&chunk.chunk.0);
        }
        match read.chunks.last() {
            Some(last) => seq = last.seq,
            None => break,
        }
    }
    sequence.extend(screen.repaint(true));
    Ok(Painted { sequence, seq })
}
