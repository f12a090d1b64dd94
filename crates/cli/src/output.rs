//! Writes the output of a process to stdout and stderr, or as JSON, one object per line.

use std::io::{self, Write};

use codex_exec_server::OutputStream;
use codex_exec_server::client::{ExitStatus, Lost};
use codex_exec_server::protocol::run_event::RunEvent;
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

impl Sink {
    pub(crate) fn new(json: bool) -> Self {
        Self { stdout: tokio::io::stdout(), stderr: tokio::io::stderr(), json }
    }

    pub(crate) async fn output(&mut self, stream: OutputStream, bytes: &[u8]) -> io::Result<()> {
        if self.json {
            let text = std::str::from_utf8(bytes).ok().map(str::to_owned);
            let base64 = text.is_none().then(|| bytes.into());
            return self.print(&RunEvent::Output { stream, text, base64 }).await;
        }
        match stream {
            OutputStream::Stderr => write(&mut self.stderr, bytes).await,
            OutputStream::Stdout | OutputStream::Pty => write(&mut self.stdout, bytes).await,
        }
    }

    pub(crate) async fn lost(&mut self, lost: &Lost) -> io::Result<()> {
        print_stderr(format_args!("{lost}"));
        self.print_if_json(&RunEvent::Lost { message: lost.to_string() }).await
    }

    pub(crate) async fn exited(&mut self, status: ExitStatus) -> io::Result<()> {
        let ExitStatus { code: exit_code, sandbox_denied, ended_by, usage } = status;
        let line = RunEvent::Exited { exit_code, sandbox_denied, ended_by, usage };
        self.print_if_json(&line).await
    }

    pub(crate) async fn closed(&mut self) -> io::Result<()> {
        self.print_if_json(&RunEvent::Closed).await
    }

    pub(crate) async fn print_if_json(&mut self, line: &RunEvent) -> io::Result<()> {
        if self.json { self.print(line).await } else { Ok(()) }
    }

    async fn print(&mut self, line: &RunEvent) -> io::Result<()> {
        let text = json_text::line(line)? + "\n";
        write(&mut self.stdout, text.as_bytes()).await
    }
}

/// Prints an event outside of a runtime.
pub(crate) fn print_line(line: &RunEvent) -> io::Result<()> {
    let text = json_text::line(line)? + "\n";
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

async fn write(to: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> io::Result<()> {
    to.write_all(bytes).await?;
    to.flush().await
}
