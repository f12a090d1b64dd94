//! Commands: run, output, write, kill, list.

use std::collections::BTreeMap;
use std::time::Duration;

use codex_exec_client::ExecCommand;
use codex_exec_server_protocol::process::ProcessSignal;
use codex_exec_server_protocol::resources::{EndedBy, ResourceLimits};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;

use super::{Context, Outcome, object, result_bytes, seconds};
use crate::content::ToolResult;
use crate::processes::{Entry, State};
use crate::workspace::shown;

/// How long `output` and `write` wait unless the call says otherwise: long enough for an answer of a prompt.
const SHORT_WAIT: Duration = Duration::from_secs(1);
/// The terminal of a command with one.
const TERMINAL: (u16, u16) = (24, 120);

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub(super) struct RunArgs {
    command: Option<String>,
    argv: Option<Vec<String>>,
    cwd: Option<String>,
    env: Option<BTreeMap<String, String>>,
    stdin: Option<String>,
    keep_stdin: Option<bool>,
    tty: Option<bool>,
    wait_seconds: Option<f64>,
    timeout_seconds: Option<f64>,
    max_output_bytes: Option<u64>,
}

pub(super) fn run_schema() -> Value {
    object(
        &json!({
            "command": {"type": "string", "description": "A command line for /bin/sh."},
            "argv": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Program and arguments, without a shell; instead of command.",
            },
            "cwd": {"type": "string", "description": "Directory to run in; the workspace by default."},
            "env": {
                "type": "object",
                "additionalProperties": {"type": "string"},
                "description": "Variables to add to the environment.",
            },
            "stdin": {"type": "string", "description": "Text for standard input, which ends after it."},
            "keep_stdin": {
                "type": "boolean",
                "description": "Keep standard input open, for the tool write.",
            },
            "tty": {"type": "boolean", "description": "Run in a terminal of 24 rows and 120 columns."},
            "wait_seconds": {
                "type": "number",
                "description": "Return after this time even if the command still runs; it keeps running.",
            },
            "timeout_seconds": {"type": "number", "description": "Kill the command after this time."},
            "max_output_bytes": {
                "type": "integer",
                "description": "The most output to return; what is left out can be read with output.",
            },
        }),
        &[],
    )
}

pub(super) async fn run(context: &Context, args: RunArgs) -> Outcome {
    let workspace = &context.workspace;
    let (mut command, line) = match (args.command, args.argv) {
        (Some(line), None) => (ExecCommand::shell(line.clone()), line),
        (None, Some(argv)) if !argv.is_empty() => (ExecCommand::new(argv.clone()), argv.join(" ")),
        _ => return Err("give either command or a non-empty argv".to_owned()),
    };
    let cwd = workspace.resolve(args.cwd.as_deref().unwrap_or("."))?;
    let env = args.env.unwrap_or_default();
    if let Some(name) = env.keys().find(|name| !workspace.policy.may_set(name)) {
        return Err(format!(
            "{name} cannot be set: it decides which directory the sandbox makes writable"
        ));
    }
    command = command.cwd_uri(cwd).envs(env);
    let (tty, keep_stdin) = (args.tty == Some(true), args.keep_stdin == Some(true));
    if tty {
        command = command.size(TERMINAL.0, TERMINAL.1);
    } else if keep_stdin || args.stdin.is_some() {
        command = command.pipe_stdin();
    }
    let timeout =
        args.timeout_seconds.map(|given| seconds(Some(given), Duration::ZERO, MAX_TIMEOUT));
    let by_server = workspace.client.capabilities().process_limits;
    if let Some(timeout) = timeout.filter(|_| by_server) {
        let wall_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX).max(1);
        command = command.limits(ResourceLimits { wall_ms: Some(wall_ms), ..Default::default() });
    }
    let entry = context.processes.start(workspace, command, shown(&line)).await?;
    if let Some(timeout) = timeout.filter(|_| !by_server) {
        let entry = entry.clone();
        tokio::spawn(async move {
            entry.wait_for_end(timeout, Duration::ZERO).await;
            if !entry.state().has_ended() {
                let _ = entry.process.terminate().await;
            }
        });
    }
    let config = &workspace.config;
    let wait = seconds(args.wait_seconds, config.default_wait, config.max_wait);
    let feed = feed(&entry, args.stdin.unwrap_or_default().into_bytes(), keep_stdin || tty);
    let end = async { tokio::join!(feed, entry.wait_for_end(wait, config.drain)).0 };
    // A command that does not read its input must not delay the result.
    let fed = match tokio::time::timeout(wait, reporting(context, &entry, end)).await {
        Ok(fed) => fed,
        Err(_) => Ok(()),
    };
    let mut result = finished(&entry, result_bytes(workspace, args.max_output_bytes));
    if let Err(error) = fed {
        result = result.note(format!("[standard input: {error}]"));
    }
    Ok(result)
}

/// The longest time limit of a command.
const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// Writes to the command's stdin and closes it, unless it is kept open.
async fn feed(entry: &Entry, text: Vec<u8>, keep_open: bool) -> Result<(), String> {
    let mut stdin = entry.stdin.lock().await;
    let Some(open) = stdin.as_mut() else { return Ok(()) };
    let written = async {
        open.write_all(&text).await?;
        if keep_open { open.flush().await } else { open.shutdown().await }
    };
    let written = written.await.map_err(|error| error.to_string());
    if !keep_open {
        *stdin = None;
    }
    written
}

/// Reports progress while the work is under way, if the client wants that.
async fn reporting<T>(context: &Context, entry: &Entry, work: impl Future<Output = T>) -> T {
    let Some(progress) = &context.progress else { return work.await };
    let mut work = std::pin::pin!(work);
    let mut tick = tokio::time::interval(context.workspace.config.progress_interval);
    tick.tick().await;
    loop {
        tokio::select! {
            biased;
            done = &mut work => return done,
            _ = tick.tick() => {
                let elapsed = entry.started.elapsed().as_secs_f64();
                let (bytes, line) = {
                    let log = entry.log.lock();
                    (log.end(), log.last_line())
                };
                let message = format!("running for {elapsed:.0} s, {bytes} bytes of output: {line}");
                progress.report(elapsed, &message);
            }
        }
    }
}

/// The result of `run`: the output from its beginning; if that is too much, its first and last part.
fn finished(entry: &Entry, max: usize) -> ToolResult {
    let state = entry.state();
    let (text, from) = {
        let log = entry.log.lock();
        let whole = log.read(0, max, state.closed);
        let end = log.end();
        let mut cursor = entry.cursor.lock();
        if end - whole.from <= max as u64 || !state.has_ended() {
            *cursor = whole.next;
            let mut text = whole.text;
            if whole.next < end {
                text += &left_out(entry, whole.next, end - whole.next);
            }
            (text, whole.from)
        } else {
            let head = log.read(0, max / 2, false);
            let tail = log.read(end - (max / 2) as u64, max / 2, state.closed);
            *cursor = head.next;
            let gap = left_out(entry, head.next, tail.from - head.next);
            (format!("{}{gap}{}", head.text, tail.text), head.from)
        }
    };
    describe(entry, &state, text, from)
}

fn left_out(entry: &Entry, offset: u64, bytes: u64) -> String {
    format!(
        "\n[… {bytes} bytes left out here; read them with the tool output, handle {}, offset {offset} …]\n",
        entry.handle
    )
}

/// Output, then the state of the command.
fn describe(entry: &Entry, state: &State, text: String, from: u64) -> ToolResult {
    let mut notes = Vec::new();
    let next = *entry.cursor.lock();
    match (&state.exit, &state.failure) {
        (Some(exit), _) => {
            notes.push(format!("exited with code {}", exit.code));
            if let Some(by) = exit.ended_by {
                notes.push(format!("ended by: {}", by.name()));
            }
            if exit.sandbox_denied {
                notes.push(
                    "the sandbox of this server probably denied the command something; its policy \
                     cannot be changed from here"
                        .to_owned(),
                );
            }
            if !state.closed {
                notes.push("a process that it started still holds its output open".to_owned());
            }
        }
        (None, Some(failure)) => notes.push(format!("the command is lost: {failure}")),
        (None, None) => notes.push(format!(
            "still running as {handle}; read on with the tool output, handle {handle} (offset {next}); \
             end it with kill",
            handle = entry.handle
        )),
    }
    if state.lost {
        notes.push("some output was lost on the way".to_owned());
    }
    if from > 0 {
        notes.push(format!("the output before offset {from} is no longer kept"));
    }
    let status = format!("[{}]", notes.join("; "));
    let structured = json!({
        "handle": entry.handle,
        "running": !state.has_ended(),
        "exit_code": state.exit.map(|exit| exit.code),
        "ended_by": state.exit.and_then(|exit| exit.ended_by).map(EndedBy::name),
        "sandbox_denied": state.exit.is_some_and(|exit| exit.sandbox_denied),
        "next_offset": next,
        "total_bytes": entry.log.lock().end(),
    });
    ToolResult::text(text).note(status).structured(structured)
}

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub(super) struct OutputArgs {
    handle: String,
    offset: Option<u64>,
    wait_seconds: Option<f64>,
    max_output_bytes: Option<u64>,
}

pub(super) fn output_schema() -> Value {
    object(
        &json!({
            "handle": {"type": "string", "description": "The handle that run returned."},
            "offset": {
                "type": "integer",
                "description": "Where to begin, in bytes; by default where the last result ended.",
            },
            "wait_seconds": {
                "type": "number",
                "description": "How long to wait for output if there is none yet; 1 by default.",
            },
            "max_output_bytes": {"type": "integer", "description": "The most output to return."},
        }),
        &["handle"],
    )
}

pub(super) async fn output(context: &Context, args: OutputArgs) -> Outcome {
    let entry = context.processes.get(&args.handle)?;
    let config = &context.workspace.config;
    let offset = args.offset.unwrap_or_else(|| *entry.cursor.lock());
    let wait = seconds(args.wait_seconds, SHORT_WAIT, config.max_wait);
    reporting(context, &entry, entry.wait_for_output(offset, wait)).await;
    let max = result_bytes(&context.workspace, args.max_output_bytes);
    Ok(excerpt(&entry, offset, max))
}

/// The output from an offset on.
fn excerpt(entry: &Entry, offset: u64, max: usize) -> ToolResult {
    let state = entry.state();
    let (text, from) = {
        let log = entry.log.lock();
        let piece = log.read(offset, max, state.closed);
        *entry.cursor.lock() = piece.next;
        let mut text = piece.text;
        if piece.next < log.end() && (state.closed || text.len() >= max / 2) {
            text += &left_out(entry, piece.next, log.end() - piece.next);
        }
        (text, if piece.from > offset { piece.from } else { 0 })
    };
    describe(entry, &state, text, from)
}

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub(super) struct WriteArgs {
    handle: String,
    text: Option<String>,
    close: Option<bool>,
    wait_seconds: Option<f64>,
}

pub(super) fn write_schema() -> Value {
    object(
        &json!({
            "handle": {"type": "string", "description": "The handle that run returned."},
            "text": {
                "type": "string",
                "description": "What to write; end it with a newline to enter a line.",
            },
            "close": {"type": "boolean", "description": "End the standard input after the text."},
            "wait_seconds": {
                "type": "number",
                "description": "How long to wait for output after that; 1 by default.",
            },
        }),
        &["handle"],
    )
}

pub(super) async fn write(context: &Context, args: WriteArgs) -> Outcome {
    let entry = context.processes.get(&args.handle)?;
    let config = &context.workspace.config;
    let wait = seconds(args.wait_seconds, SHORT_WAIT, config.max_wait);
    if entry.stdin.lock().await.is_none() {
        return Err(format!(
            "{} takes no input: it was started without keep_stdin, or its input has ended",
            entry.handle
        ));
    }
    let before = entry.log.lock().end();
    let text = args.text.unwrap_or_default().into_bytes();
    let close = args.close == Some(true);
    match tokio::time::timeout(config.max_wait, feed(&entry, text, !close)).await {
        Ok(fed) => fed?,
        Err(_) => {
            return Err("the command does not read its input; part of it was not written".into());
        }
    }
    reporting(context, &entry, entry.wait_for_output(before, wait)).await;
    let offset = *entry.cursor.lock();
    Ok(excerpt(&entry, offset, config.default_result_bytes))
}

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub(super) struct KillArgs {
    handle: String,
    signal: Option<Signal>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
enum Signal {
    Interrupt,
    Terminate,
    Kill,
    Hangup,
    Quit,
    User1,
    User2,
    Stop,
    Continue,
}

impl From<Signal> for ProcessSignal {
    fn from(signal: Signal) -> Self {
        match signal {
            Signal::Interrupt => Self::Interrupt,
            Signal::Terminate => Self::Terminate,
            Signal::Kill => Self::Kill,
            Signal::Hangup => Self::Hangup,
            Signal::Quit => Self::Quit,
            Signal::User1 => Self::User1,
            Signal::User2 => Self::User2,
            Signal::Stop => Self::Stop,
            Signal::Continue => Self::Continue,
        }
    }
}

pub(super) fn kill_schema() -> Value {
    object(
        &json!({
            "handle": {"type": "string", "description": "The handle that run returned."},
            "signal": {
                "type": "string",
                "enum": [
                    "interrupt", "terminate", "kill", "hangup", "quit", "user1", "user2", "stop", "continue",
                ],
                "description": "Send this signal instead of killing the command and everything it started.",
            },
        }),
        &["handle"],
    )
}

pub(super) async fn kill(context: &Context, args: KillArgs) -> Outcome {
    let entry = context.processes.get(&args.handle)?;
    match args.signal {
        Some(signal) => {
            entry.process.signal(signal.into()).await.map_err(|error| error.to_string())?;
        }
        None => {
            entry.process.terminate().await.map_err(|error| error.to_string())?;
            entry.wait_for_end(context.workspace.config.max_wait, Duration::ZERO).await;
        }
    }
    let offset = *entry.cursor.lock();
    Ok(excerpt(&entry, offset, context.workspace.config.default_result_bytes))
}

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub(super) struct ListArgs {}

pub(super) fn list_schema() -> Value {
    object(&json!({}), &[])
}

pub(super) async fn list(context: &Context, _args: ListArgs) -> Outcome {
    let entries = context.processes.list();
    if entries.is_empty() {
        return Ok(ToolResult::text("no command was started in this session"));
    }
    let mut text = String::new();
    let mut rows = Vec::new();
    for entry in entries {
        let state = entry.state();
        let status = match (&state.exit, &state.failure) {
            (Some(exit), _) => format!("exited with code {}", exit.code),
            (None, Some(_)) => "lost".to_owned(),
            (None, None) => format!("running for {} s", entry.started.elapsed().as_secs()),
        };
        text += &format!("{}  {status}  {}\n", entry.handle, entry.command.replace('\n', " "));
        rows.push(json!({
            "handle": entry.handle,
            "command": entry.command,
            "running": !state.has_ended(),
            "exit_code": state.exit.map(|exit| exit.code),
        }));
    }
    Ok(ToolResult::text(text).structured(json!({"commands": rows})))
}
