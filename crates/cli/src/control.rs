//! `codex exec-server status` and `drain`: the operator's commands, over the control socket of a server.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use codex_exec_server::{ControlClient, DrainStatus, ServerStatus};

use crate::exec_server::{format_duration, parse_duration};
use crate::json_text;
use crate::style::{Style, printable};

/// Which server.
#[derive(Debug, Args)]
struct ControlArgs {
    /// The socket that the server was given as --control
    #[arg(long, value_name = "PATH", env = "CODEX_EXEC_SERVER_CONTROL")]
    control: Option<PathBuf>,
}

impl ControlArgs {
    fn connect(&self) -> anyhow::Result<ControlClient> {
        let path = self.control.as_deref().context(
            "which server? pass --control PATH or set CODEX_EXEC_SERVER_CONTROL, and start the server with \
             codex exec-server --control PATH",
        )?;
        Ok(ControlClient::connect(path)?)
    }
}

/// Show what a running server does
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codex exec-server status --control /run/codex/control.sock
  codex exec-server status --control /run/codex/control.sock --json | jq .processes")]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    control: ControlArgs,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Let the clients of a running server finish, then stop it
///
/// The server opens no new sessions. Clients that have one keep it, and can resume it after a lost connection.
/// Once no session has a connection or a process, or at the deadline, the server stops as after SIGTERM
/// (see --stop-grace). Run it again to set another deadline.
///
/// Waits until the server has ended; exits with 1 if the deadline cut sessions off.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codex exec-server drain --control /run/codex/control.sock
  codex exec-server drain --control /run/codex/control.sock --deadline 0   stop at once")]
pub(crate) struct DrainArgs {
    #[command(flatten)]
    control: ControlArgs,

    /// Stop after this time, whatever still runs: 30s, 5m, 2h
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = parse_duration)]
    deadline: Duration,

    /// Do not wait for the end of the server
    #[arg(long)]
    no_wait: bool,

    /// Print what the server does, and how the drain ended, as JSON objects in lines
    #[arg(long)]
    json: bool,
}

pub(crate) fn status(args: &StatusArgs) -> anyhow::Result<ExitCode> {
    let status = args.control.connect()?.status()?;
    let text = match args.json {
        true => format!("{}\n", json_text::pretty(&status)?),
        false => describe(&status),
    };
    std::io::stdout().write_all(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn drain(args: &DrainArgs) -> anyhow::Result<ExitCode> {
    let mut client = args.control.connect()?;
    let status = client.drain(args.deadline)?;
    let text = match args.json {
        true => format!("{}\n", json_text::line(&status)?),
        false => describe(&status),
    };
    std::io::stdout().write_all(text.as_bytes())?;
    if args.no_wait {
        return Ok(ExitCode::SUCCESS);
    }
    let end = client.wait_ended()?;
    if args.json {
        writeln!(std::io::stdout(), "{}", json_text::line(&end)?)?;
    }
    if end.cut_sessions > 0 {
        let sessions = count(end.cut_sessions, "session was", "sessions were");
        anyhow::bail!("{sessions} still in use at the deadline; their processes were ended");
    }
    Ok(ExitCode::SUCCESS)
}

fn describe(status: &ServerStatus) -> String {
    let style = Style::stdout();
    let mut out = String::new();
    let mut row = |name: &str, value: &str| {
        out.push_str(&format!("{}  {value}\n", style.bold(&format!("{name:<11}"))));
    };
    row("version", &printable(&status.version));
    row("pid", &status.pid.to_string());
    row("uptime", &seconds(status.uptime_ms));
    for listener in &status.listeners {
        row("listener", &printable(listener));
    }
    let limits = &status.limits;
    row("connections", &of(status.connections, Some(limits.connections)));
    let sessions = &status.sessions;
    row("sessions", &format!("{} attached, {} detached", sessions.attached, sessions.detached));
    row("processes", &of(status.processes, limits.processes));
    if let Some(DrainStatus { elapsed_ms, deadline_ms, .. }) = status.draining {
        let (elapsed, left) = (seconds(elapsed_ms), seconds(deadline_ms));
        row("draining", &format!("for {elapsed}; stops in {left} at the latest"));
    }
    out
}

/// A number, and the most that it may be.
fn of(number: u64, most: Option<u64>) -> String {
    most.map_or(number.to_string(), |most| format!("{number} of at most {most}"))
}

fn count(number: u64, one: &str, several: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { several })
}

/// A time in whole seconds.
fn seconds(ms: u64) -> String {
    format_duration(Duration::from_secs(ms / 1000))
}
