//! `codex ps`: lists detached processes.

use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use codex_exec_server::{ErrorKind, ProcessInfo, SessionInfo};
use futures_util::future::join_all;

use crate::exit::{self, print_stderr};
use crate::limits;
use crate::on::{ConnectOptions, OnArgs, block_on};
use crate::saved_sessions::SavedSession;
use crate::style::{Style, printable, quoted, table};
use crate::target::{self, Join};

/// List detached processes
///
/// Without a name, lists what codex run --detach and codex shell detached from this machine, on any server,
/// and everything of yours on the server of --on, from any machine. With a name, lists all processes of that
/// session. ps forgets sessions that have expired.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codex ps                                                  everything detached from here
  codex ps --on ws://127.0.0.1:4500                         and everything of yours there
  codex ps build                                            the processes of one session
  codex ps --on ws://127.0.0.1:4500 --session 8c4c…         by session id
  codex ps --json | jq -r '.[] | select(.exited) | .name'   names of those that have exited")]
pub(crate) struct PsArgs {
    #[command(flatten)]
    on: OnArgs,

    /// Print one JSON array
    #[arg(long)]
    json: bool,

    /// A session id (needs --on) or a saved name
    #[arg(long, value_name = "ID", conflicts_with = "name")]
    session: Option<String>,

    /// A name given by --detach or by codex shell
    name: Option<String>,
}

/// How long to wait for a server's response.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// A line of the table, or an object of the array.
#[derive(Debug, serde::Serialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    url: Option<String>,
    /// Why the state of the process is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
    /// For `--session`, if this machine has not saved the name.
    #[serde(skip_serializing_if = "Option::is_none")]
    session_id: Option<String>,
    #[serde(flatten)]
    process: Option<ProcessInfo>,
}

pub(crate) fn run(args: &PsArgs) -> anyhow::Result<ExitCode> {
    block_on(async {
        let rows = match args.session.as_ref().or(args.name.as_ref()) {
            Some(session) => session_rows(args, session).await?,
            None => {
                let saved = SavedSession::all()?;
                let rows = join_all(saved.iter().map(|saved| saved_row(&args.on, saved)));
                let (mut rows, listed) = futures_util::join!(rows, target::list(&args.on));
                rows.extend(server_rows(&args.on, listed?, &saved));
                rows
            }
        };
        let text = if args.json {
            format!("{}\n", crate::json_text::pretty(&rows)?)
        } else if rows.is_empty() {
            print_stderr(format_args!(
                "no detached processes; start one with codex run --detach NAME"
            ));
            String::new()
        } else {
            render(&rows)
        };
        std::io::stdout().write_all(text.as_bytes())?;
        Ok(ExitCode::SUCCESS)
    })
}

/// What this user runs on the server of `--on` that was not started on this machine.
fn server_rows(on: &OnArgs, listed: Vec<SessionInfo>, saved: &[SavedSession]) -> Vec<Row> {
    let is_saved =
        |session: &SessionInfo| saved.iter().any(|saved| saved.session_id == session.session_id);
    let others = listed.into_iter().filter(|session| !is_saved(session));
    let rows = others.flat_map(|session| {
        let (id, name) = (session.session_id, session.session_name);
        session.processes.into_iter().map(move |process| Row {
            name: name.clone(),
            url: Some(on.display()),
            problem: None,
            session_id: Some(id.clone()),
            process: Some(process),
        })
    });
    rows.collect()
}

async fn session_rows(args: &PsArgs, session: &str) -> anyhow::Result<Vec<Row>> {
    let options = Join::VIEW.options(None);
    let (connected, saved) = target::connect(&args.on, session, options).await?;
    let listed = connected.client.process_list().await;
    connected.close().await;
    let row = |process| Row {
        name: saved.as_ref().map(|saved| saved.name.clone()),
        url: None,
        problem: None,
        session_id: None,
        process: Some(process),
    };
    Ok(listed?.processes.into_iter().map(row).collect())
}

async fn saved_row(on: &OnArgs, saved: &SavedSession) -> Row {
    let list = async {
        let options =
            ConnectOptions { fail_fast: true, one_of_all: true, ..Join::VIEW.options(None) };
        let connected = target::resume(on, saved, options).await?;
        let listed = connected.client.process_list().await;
        connected.close().await;
        anyhow::Ok(listed?.processes)
    };
    let (problem, process) = match tokio::time::timeout(REPLY_TIMEOUT, list).await {
        Err(_) => (Some("no reply".to_owned()), None),
        Ok(Err(error)) => (Some(brief(&error)), None),
        Ok(Ok(processes)) => {
            match processes.into_iter().find(|process| *process.process_id.0 == *saved.process_id) {
                Some(process) => (None, Some(process)),
                None => (Some("ended".to_owned()), None),
            }
        }
    };
    let (name, url) = (Some(saved.name.clone()), Some(saved.shown_url()));
    Row { name, url, problem, session_id: None, process }
}

/// An error as the content of a table cell.
fn brief(error: &anyhow::Error) -> String {
    match exit::kind(error) {
        ErrorKind::SessionAttached => "in use elsewhere".to_owned(),
        ErrorKind::UnknownSession => "gone".to_owned(),
        ErrorKind::ConnectionRefused => "server not running".to_owned(),
        ErrorKind::TokenRefused => "token refused".to_owned(),
        ErrorKind::Unsupported => "(server cannot list processes)".to_owned(),
        _ => exit::message(error),
    }
}

fn render(rows: &[Row]) -> String {
    let sessions = rows.iter().any(|row| row.url.is_some());
    let mut cells: Vec<Vec<String>> = Vec::new();
    let heading = match sessions {
        true => vec!["NAME", "STATE", "SINCE", "LIMITS", "SERVER", "COMMAND"],
        false => vec!["ID", "PID", "STATE", "SINCE", "LIMITS", "COMMAND"],
    };
    cells.push(heading.into_iter().map(str::to_owned).collect());
    for row in rows {
        let process = row.process.as_ref();
        let state = match (&row.problem, process) {
            (Some(problem), _) => printable(problem),
            (None, Some(ProcessInfo { exited: true, exit_code, ended_by, .. })) => {
                let code = exit_code.unwrap_or_default();
                match ended_by {
                    Some(by) => format!("exited {code} ({})", by.name()),
                    None => format!("exited {code}"),
                }
            }
            _ => "running".to_owned(),
        };
        let since = process.map(|process| age(process.started_at_ms)).unwrap_or_default();
        let limits = process.and_then(|process| process.limits.as_deref()).map(limits::summary);
        let limits = limits.unwrap_or_else(|| "-".to_owned());
        let command = process.map(|process| {
            printable(&process.argv.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" "))
        });
        let command = command.unwrap_or_default();
        cells.push(if sessions {
            let url = printable(row.url.as_deref().unwrap_or_default());
            let name = row.name.as_deref().map_or_else(|| "-".to_owned(), printable);
            vec![name, state, since, limits, url, command]
        } else {
            let id = process.map(|process| printable(&process.process_id.0)).unwrap_or_default();
            let pid = process.and_then(|process| process.pid).map(|pid| pid.to_string());
            vec![id, pid.unwrap_or_default(), state, since, limits, command]
        });
    }
    let style = Style::stdout();
    table(&cells, |heading| style.bold(heading))
}

/// `5s`, `12m`, `3h`, `2d`.
fn age(started_at_ms: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = now.saturating_sub(Duration::from_millis(started_at_ms)).as_secs();
    match seconds {
        0..=119 => format!("{seconds}s"),
        120..=7199 => format!("{}m", seconds / 60),
        7200..=172_799 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}
