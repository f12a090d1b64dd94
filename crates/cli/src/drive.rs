//! A process and whoever started it: output out, input in, signals over, until it ends.
//!
//! Four things go on at once and none waits for another: what the process says is written, what is
//! typed is sent, signals are passed on, and the connection is watched. The first that has an end
//! to tell ends all.

use std::cell::Cell;
use std::io::{self, IsTerminal, Write};
use std::pin::pin;
use std::time::Duration;

use codex_exec_server::client::{
    ConnectionStatus, Process, ProcessEvent, ProcessEvents, ProcessStdin,
};
use codex_exec_server::{
    ExecServerClient, ExecServerError, ProcessId, ProcessSignal, SignalParams, TerminateParams,
};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::io::AsyncWriteExt;

use crate::escapes::{self, Escapes, Typed};
use crate::exec_server::span;
use crate::exit::{BROKEN_PIPE, TIMED_OUT, tell};
use crate::input::Input;
use crate::output::Sink;
use crate::signals::{Signalled, Signals, exit_code};
use crate::terminal::{self, Terminal};

/// How a process is shown.
#[derive(Debug)]
pub struct Drive<'a> {
    /// The local terminal is the process's terminal.
    pub terminal: Option<&'a Terminal>,
    /// What is typed or piped in here goes there.
    pub forward_stdin: bool,
    /// Look for `~.` in it.
    pub escapes: bool,
    /// One JSON object a line instead of what it says.
    pub json: bool,
    /// How long it may run.
    pub timeout: Option<Duration>,
    /// It ran before we came: what the server had dropped by then is told, and no failure.
    pub joined: bool,
    pub signals: &'a Signals,
}

/// How it ended, for us.
#[derive(Debug)]
pub enum Ending {
    /// By itself, with this code.
    Exited { code: i32, sandbox_denied: bool },
    /// The same, but not all that it said arrived. That was told.
    Incomplete { code: i32, sandbox_denied: bool },
    /// We ended it, and exit with this code.
    Stopped(i32),
    /// We exit with this code and could not end it, for want of a connection.
    Abandoned(i32),
    /// It goes on without us.
    Left,
    /// The same, since our output cannot be written; we exit with this code.
    Unwritable(i32),
    /// We do not know.
    Failed(anyhow::Error),
}

impl Ending {
    /// Whether the process has ended, and that was told.
    pub fn is_end(&self) -> bool {
        matches!(self, Self::Exited { .. } | Self::Incomplete { .. } | Self::Stopped(_))
    }
}

/// Signals of one kind after which a process that does not listen is killed.
const INSISTENCE: u32 = 3;
/// How long a terminal is still read from after the process in it has exited: what is left in it
/// comes at once, and a daemon that keeps it open never closes it.
const LAST_WORDS: Duration = Duration::from_millis(300);
/// After how long it is said what is waited for.
const EXPLANATION: Duration = Duration::from_secs(2);
/// What Ctrl-C types in a raw terminal.
const INTERRUPT: u8 = 3;
/// How long a kill may take.
const KILL: Duration = Duration::from_secs(3);

impl Drive<'_> {
    /// Shows the process to its end.
    pub async fn to_the_end(&self, mut process: Process) -> Ending {
        let (client, id) = (process.client().clone(), process.id().clone());
        let Some(events) = process.take_events() else {
            return Ending::Failed(anyhow::anyhow!("the events of the process are already taken"));
        };
        let raw = match self.terminal.map(Terminal::raw).transpose() {
            Ok(raw) => raw,
            Err(error) => return Ending::Failed(error),
        };
        let (exited, told_to_end, lost) = (Cell::new(None), Cell::new(None), Cell::new(false));
        let mut sink = Sink::new(self.json);
        let ending = {
            let mut showing = pin!(self.show(events, &mut sink, &exited, &lost));
            let typing = self.type_in(process.take_stdin(), &client);
            let passing = self.pass_on(&client, &id, &exited, &told_to_end);
            let watching = self.watch(&client);
            let limit = async {
                match self.timeout {
                    Some(limit) => tokio::time::sleep(limit).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                ending = &mut showing => ending,
                ending = typing => ending,
                ending = passing => ending,
                () = watching => Ending::Left,
                () = limit => match kill(&client, &id).await {
                    true => {
                        // What it had said by then.
                        let _ = tokio::time::timeout(KILL, showing).await;
                        Ending::Stopped(TIMED_OUT.into())
                    }
                    false => Ending::Abandoned(TIMED_OUT.into()),
                },
            }
        };
        // It ended because we were told to, and it may say so before the server answers.
        let ending = match (ending, told_to_end.get()) {
            (Ending::Exited { .. }, Some(signal)) => Ending::Stopped(exit_code(signal)),
            (Ending::Exited { code, sandbox_denied }, None) if lost.get() => {
                Ending::Incomplete { code, sandbox_denied }
            }
            (ending, _) => ending,
        };
        let ending = match ending {
            Ending::Stopped(code)
                if code != i32::from(TIMED_OUT)
                    && exited.get().is_none()
                    && !kill(&client, &id).await =>
            {
                Ending::Abandoned(code)
            }
            ending => ending,
        };
        if self.terminal.is_some() && !matches!(ending, Ending::Exited { .. }) {
            // Whatever is said now begins on a line of its own.
            let _ = io::stderr().write_all(b"\r\n");
        }
        drop(raw);
        if let Ending::Incomplete { code, .. } = ending {
            tell(format_args!(
                "some of the command's output was lost; the command itself exited with code {code}"
            ));
        }
        if let Ending::Stopped(code) = ending
            && code == i32::from(TIMED_OUT)
        {
            let limit = self.timeout.unwrap_or_default();
            tell(format_args!(
                "killed the command: it ran longer than its --timeout of {}",
                span(limit)
            ));
        }
        ending
    }

    /// Writes what it says, in order.
    async fn show(
        &self,
        mut events: ProcessEvents,
        sink: &mut Sink,
        exited: &Cell<Option<(i32, bool)>>,
        lost: &Cell<bool>,
    ) -> Ending {
        let mut explained = false;
        let mut before_us = self.joined;
        loop {
            let next = match exited.get() {
                Some((code, sandbox_denied)) if self.terminal.is_some() => {
                    match tokio::time::timeout(LAST_WORDS, events.next()).await {
                        Ok(next) => next,
                        Err(_) => return Ending::Exited { code, sandbox_denied },
                    }
                }
                Some(_) if !explained && io::stderr().is_terminal() => {
                    match tokio::time::timeout(EXPLANATION, events.next()).await {
                        Ok(next) => next,
                        Err(_) => {
                            explained = true;
                            tell(format_args!(
                                "the command has exited, but a process it started holds its \
                                 output open; press Ctrl-C to stop waiting"
                            ));
                            continue;
                        }
                    }
                }
                _ => events.next().await,
            };
            let written = match next {
                Some(ProcessEvent::Output { stream, bytes }) => {
                    before_us = false;
                    if let Some(terminal) = self.terminal {
                        terminal.watch(&bytes);
                    }
                    sink.output(stream, &bytes).await
                }
                Some(ProcessEvent::Lost(missing)) => {
                    lost.set(lost.get() || !before_us);
                    sink.lost(&missing).await
                }
                Some(ProcessEvent::Exited(status)) => {
                    exited.set(Some((status.code, status.sandbox_denied)));
                    sink.exited(status).await
                }
                Some(ProcessEvent::Failed(error)) => return Ending::Failed(error.into()),
                Some(ProcessEvent::Closed) | None => {
                    if let Err(error) = sink.closed().await {
                        return self.refused(&error);
                    }
                    return match exited.get() {
                        Some((code, sandbox_denied)) => Ending::Exited { code, sandbox_denied },
                        None => Ending::Failed(anyhow::anyhow!(
                            "the server closed the process without an exit code"
                        )),
                    };
                }
            };
            if let Err(error) = written {
                return self.refused(&error);
            }
        }
    }

    /// Sends what is typed; resolves when the one who types wants to leave, or is gone.
    async fn type_in(&self, stdin: Option<ProcessStdin>, client: &ExecServerClient) -> Ending {
        let Some(mut stdin) = stdin.filter(|_| self.forward_stdin) else {
            return std::future::pending().await;
        };
        let mut input = match Input::start() {
            Ok(input) => input,
            Err(error) => return Ending::Failed(error.into()),
        };
        let mut escapes = Escapes::default();
        loop {
            let chunk = match input.next().await {
                Ok(Some(chunk)) => chunk,
                // A raw terminal has no end of input: it is gone.
                Ok(None) | Err(_) if self.terminal.is_some() => {
                    return Ending::Stopped(exit_code(ProcessSignal::Hangup));
                }
                Ok(None) | Err(_) => break,
            };
            // There is nobody to interrupt but us.
            if self.terminal.is_some() && chunk.contains(&INTERRUPT) && !is_connected(client) {
                return Ending::Abandoned(exit_code(ProcessSignal::Interrupt));
            }
            let typed = match self.escapes {
                true => escapes.take(&chunk),
                false => vec![Typed::Keys(chunk.to_vec())],
            };
            for typed in typed {
                match typed {
                    Typed::Keys(keys) => {
                        if stdin.write_all(&keys).await.is_err() {
                            // It takes no more; its end is told elsewhere.
                            return std::future::pending().await;
                        }
                    }
                    Typed::Detach => return Ending::Left,
                    Typed::Help => self.remark(escapes::HELP),
                }
            }
        }
        match stdin.shutdown().await {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                // Most commands do not wait for it.
                tokio::time::sleep(EXPLANATION).await;
                tell(format_args!(
                    "this server cannot close a command's stdin, so the command may wait for more \
                     input; press Ctrl-C to stop it, or run it with -n"
                ));
            }
            _ => {}
        }
        std::future::pending().await
    }

    /// Passes signals on; resolves when it is better to end.
    async fn pass_on(
        &self,
        client: &ExecServerClient,
        id: &ProcessId,
        exited: &Cell<Option<(i32, bool)>>,
        told_to_end: &Cell<Option<ProcessSignal>>,
    ) -> Ending {
        let (mut last, mut times) = (None, 0);
        let mut sending = FuturesUnordered::new();
        loop {
            let signalled = tokio::select! {
                signalled = self.signals.next() => signalled,
                // Whoever wants it to end is not kept waiting for a connection to come back.
                Some((signal, false)) = sending.next() => {
                    return Ending::Stopped(exit_code(signal));
                }
            };
            let signal = match signalled {
                Signalled::Resized => {
                    if self.terminal.is_some() {
                        resize(client, id);
                    }
                    continue;
                }
                Signalled::Pass(signal) => signal,
            };
            if matches!(signal, ProcessSignal::User1 | ProcessSignal::User2) {
                // It asks for no end, so none comes of a server that cannot be told.
                if client.capabilities().process_signals {
                    sending.push(pass(client, id, signal));
                }
                continue;
            }
            times = if last == Some(signal) { times + 1 } else { 1 };
            last = Some(signal);
            if let Some((code, sandbox_denied)) = exited.get() {
                return Ending::Exited { code, sandbox_denied };
            }
            if !is_connected(client) || times >= INSISTENCE {
                return Ending::Stopped(exit_code(signal));
            }
            if self.terminal.is_some() && signal != ProcessSignal::Interrupt {
                // Our terminal goes; so does the one it stands for.
                told_to_end.set(Some(signal));
                send(client, id, ProcessSignal::Hangup).await;
                return Ending::Stopped(exit_code(signal));
            }
            // A server that knows only one signal can still end the process.
            if signal != ProcessSignal::Interrupt && !client.capabilities().process_signals {
                return Ending::Stopped(exit_code(signal));
            }
            sending.push(pass(client, id, signal));
        }
    }

    /// Says when the connection is lost and back; resolves never.
    async fn watch(&self, client: &ExecServerClient) {
        let mut status = client.status();
        let mut told = false;
        while status.changed().await.is_ok() {
            let words = match &*status.borrow_and_update() {
                ConnectionStatus::Reconnecting { reason, .. } if !told => {
                    told = true;
                    format!(
                        "connection lost ({reason}); reconnecting; press Ctrl-C to stop waiting"
                    )
                }
                ConnectionStatus::Connected if told => {
                    told = false;
                    "reconnected".to_owned()
                }
                _ => continue,
            };
            if io::stderr().is_terminal() {
                self.remark(&format!("codex: {words}"));
            }
        }
        std::future::pending::<()>().await;
    }

    /// Words of ours in between, on lines of their own.
    /// Our output cannot be written, and we exit with the code for that. A command of our own ends with
    /// us; one that ran before we came goes on. A reader that closed our output needs no message.
    fn refused(&self, error: &io::Error) -> Ending {
        let code = match error.kind() {
            io::ErrorKind::BrokenPipe => BROKEN_PIPE,
            _ => {
                tell(format_args!("cannot write the command's output: {error}"));
                crate::exit::NOT_RUN
            }
        };
        if self.joined { Ending::Unwritable(code.into()) } else { Ending::Stopped(code.into()) }
    }

    fn remark(&self, words: &str) {
        let words = match self.terminal {
            Some(_) => format!("\r\n{}\r\n", words.replace('\n', "\r\n")),
            None => format!("{words}\n"),
        };
        let _ = io::stderr().write_all(words.as_bytes());
    }
}

fn is_connected(client: &ExecServerClient) -> bool {
    matches!(*client.status().borrow(), ConnectionStatus::Connected)
}

/// Passes a signal on; whether that is all there is to do about it.
async fn pass(
    client: &ExecServerClient,
    id: &ProcessId,
    signal: ProcessSignal,
) -> (ProcessSignal, bool) {
    let taken = send(client, id, signal).await;
    (signal, taken || matches!(signal, ProcessSignal::User1 | ProcessSignal::User2))
}

/// Whether the server has taken the signal, or refused it; false if the connection was lost.
async fn send(client: &ExecServerClient, id: &ProcessId, signal: ProcessSignal) -> bool {
    let params = SignalParams { process_id: id.clone(), signal };
    let sent = tokio::time::timeout(KILL, client.process_signal(params)).await;
    tracing::debug!(?sent, ?signal, "signal passed on");
    matches!(
        sent,
        Ok(Ok(_) | Err(ExecServerError::Server { .. } | ExecServerError::Unsupported { .. }))
    )
}

fn resize(client: &ExecServerClient, id: &ProcessId) {
    let Some((rows, cols)) = terminal::size() else { return };
    if !client.capabilities().process_resize {
        return;
    }
    let (client, process_id) = (client.clone(), id.clone());
    tokio::spawn(async move {
        let params = codex_exec_server::ResizeParams { process_id, rows, cols };
        let resized = client.process_resize(params).await;
        tracing::debug!(?resized, "terminal resized");
    });
}

/// Whether the server has ended the process and all that it left behind, or answered that it cannot.
/// Does not wait for a connection to come back.
pub async fn kill(client: &ExecServerClient, id: &ProcessId) -> bool {
    let mut status = client.status();
    let lost = status.wait_for(|status| !matches!(status, ConnectionStatus::Connected));
    let params = TerminateParams { process_id: id.clone() };
    let killed = tokio::select! {
        biased;
        _ = lost => return false,
        killed = tokio::time::timeout(KILL, client.process_terminate(params)) => killed,
    };
    tracing::debug!(?killed, "process killed");
    matches!(
        killed,
        Ok(Ok(_) | Err(ExecServerError::Server { .. } | ExecServerError::Unsupported { .. }))
    )
}

/// Says that what a command left behind may go on, and how to end it.
pub fn tell_left_over(name: &str) {
    tell(format_args!(
        "the connection is lost, so processes that the command started may still run; end them with \
         codex kill {name}"
    ));
}

/// Says that a command was left running for want of a connection, and how to get back to it.
pub fn tell_abandoned(way_back: Option<&str>) {
    let words =
        "the connection is lost, so the command still runs, until the server ends its session";
    match way_back {
        Some(command) => tell(format_args!("{words}; reattach with {command}")),
        None => tell(format_args!("{words}")),
    }
}
