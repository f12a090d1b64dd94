//! Writes the output of a process to stdout and stderr, or as JSON, one object per line.

use std::io::{self, Write};

use codex_exec_server::client::{ExitStatus, Lost};
use codex_exec_server::{AppliedLimits, EndedBy, ErrorKind, OutputStream, SandboxType, Usage};
use codex_linux_sandbox::Assurance;
use serde::Serialize;
use tokio::io::{AsyncWrite, AsyncWriteExt, Stderr, Stdout};

use crate::exit::print_stderr;
use crate::json_text;

/// Stdout and stderr of this program.
#[derive(Debug)]
pub(crate) struct Sink {
    stdout: Stdout,
    stderr: Stderr,
    json: bool,
}

/// An event in the output of `--json`.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub(crate) enum JsonEvent<'a> {
    /// The process has started.
    Started {
        process_id: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        session_id: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        sandbox_type: Option<SandboxType>,
        #[serde(skip_serializing_if = "Option::is_none")]
        sandbox_assurance: Option<Assurance>,
        #[serde(skip_serializing_if = "Option::is_none")]
        limits: Option<&'a AppliedLimits>,
    },
    /// Output: text, or base64 if it is not UTF-8.
    Output {
        stream: &'static str,
        #[serde(skip_serializing_if = "Option::is_none")]
        text: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        base64: Option<String>,
    },
    /// Output is lost here.
    Lost { message: String },
    /// The process has exited.
    Exited {
        exit_code: i32,
        sandbox_denied: bool,
        #[serde(skip_serializing_if = "Option::is_none")]
        ended_by: Option<EndedBy>,
        #[serde(skip_serializing_if = "Option::is_none")]
        usage: Option<Usage>,
    },
    /// There are no more events.
    Closed,
    /// The sandbox denied the command something, and the user was asked.
    Asked { approved: bool },
    /// This program failed; if the command has started, its outcome is unknown. It exits with this code.
    Failed { kind: ErrorKind, message: String, exit_code: u8 },
}

impl Sink {
    pub(crate) fn new(json: bool) -> Self {
        Self { stdout: tokio::io::stdout(), stderr: tokio::io::stderr(), json }
    }

    pub(crate) async fn output(&mut self, stream: OutputStream, bytes: &[u8]) -> io::Result<()> {
        if self.json {
            let text = std::str::from_utf8(bytes).ok();
            let base64 = text.is_none().then(|| base64_simd::STANDARD.encode_to_string(bytes));
            return self.print(&JsonEvent::Output { stream: stream.as_str(), text, base64 }).await;
        }
        match stream {
            OutputStream::Stderr => write(&mut self.stderr, bytes).await,
            OutputStream::Stdout | OutputStream::Pty => write(&mut self.stdout, bytes).await,
        }
    }

    pub(crate) async fn lost(&mut self, lost: &Lost) -> io::Result<()> {
        print_stderr(format_args!("{lost}"));
        self.print_if_json(&JsonEvent::Lost { message: lost.to_string() }).await
    }

    pub(crate) async fn exited(&mut self, status: ExitStatus) -> io::Result<()> {
        let ExitStatus { code: exit_code, sandbox_denied, ended_by, usage } = status;
        let line = JsonEvent::Exited { exit_code, sandbox_denied, ended_by, usage };
        self.print_if_json(&line).await
    }

    pub(crate) async fn closed(&mut self) -> io::Result<()> {
        self.print_if_json(&JsonEvent::Closed).await
    }

    pub(crate) async fn print_if_json(&mut self, line: &JsonEvent<'_>) -> io::Result<()> {
        if self.json { self.print(line).await } else { Ok(()) }
    }

    async fn print(&mut self, line: &JsonEvent<'_>) -> io::Result<()> {
        let text = json_text::line(line)? + "\n";
        write(&mut self.stdout, text.as_bytes()).await
    }
}

/// Prints an event outside of a runtime.
pub(crate) fn print_line(line: &JsonEvent<'_>) -> io::Result<()> {
    let text = json_text::line(line)? + "\n";
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

async fn write(to: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> io::Result<()> {
    to.write_all(bytes).await?;
    to.flush().await
}
