//! Runs a process in the foreground: forwards its output, the user's input and signals, until it ends.
//!
//! Four futures run concurrently, none of which waits for another: one writes the output, one sends the
//! input, one forwards signals, and one reports the state of the connection. The first to resolve ends
//! all.

use std::cell::Cell;
use std::convert::Infallible;
use std::io::{self, IsTerminal, Write};
use std::pin::pin;
use std::time::{Duration, Instant};

use codex_exec_server::client::{
    ConnectionStatus, Lost, Process, ProcessEvent, ProcessEvents, ProcessStdin,
};
use codex_exec_server::protocol::run_event::RunEvent;
use codex_exec_server::{
    EndedBy, ErrorKind, ExecServerClient, ExecServerError, Fit, OutputStream, ProcessId,
    ProcessSignal, ResourceLimits, SignalParams, TerminateParams,
};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::io::AsyncWriteExt;

use crate::escapes::{self, Escapes, Typed};
use crate::exit::{self, BROKEN_PIPE, TIMED_OUT, print_stderr};
use crate::input::Input;
use crate::limits;
use crate::outage::{self, Outage, Trying, Where};
use crate::output::Sink;
use crate::signals::{SignalEvent, Signals, exit_code};
use crate::terminal::{self, Terminal};

/// How to run a process in the foreground.
#[derive(Debug)]
pub(crate) struct Foreground<'a> {
    /// The local terminal is the process's terminal.
    pub terminal: Option<&'a Terminal>,
    /// Forward stdin to the process.
    pub forward_stdin: bool,
    /// Recognize escape sequences such as `~.` in stdin.
    pub escapes: bool,
    /// Print events as JSON, one per line, instead of the output.
    pub json: bool,
    /// What the process may use. What its server does not enforce, this program does if it can.
    pub limits: ResourceLimits,
    /// The process was running before: output that the server had already dropped is reported, but is no
    /// failure.
    pub attached: bool,
    /// The process keeps running when the local terminal closes or this program gets SIGHUP or SIGTERM, as
    /// after a dropped connection.
    pub keep_on_hangup: bool,
    /// How the size of the local terminal counts beside those of other clients; `None`: this client only
    /// watches, and its keys go nowhere.
    pub fit: Option<Fit>,
    /// What repaints the terminal before its output.
    pub first_paint: Option<Vec<u8>>,
    pub signals: &'a Signals,
}

/// How the foreground run ended.
#[derive(Debug)]
pub(crate) enum Ending {
    /// The process exited with this code.
    Exited { code: i32, sandbox_denied: bool },
    /// The process exited, but some of its output was lost, which was reported.
    Incomplete { code: i32, sandbox_denied: bool },
    /// This program killed the process, and exits with this code.
    Stopped(i32),
    /// This program exits with this code, and could not kill the process without a connection.
    Abandoned(i32),
    /// The user detached, or the local terminal is gone; the process keeps running, and this program exits
    /// with this code.
    Detached(i32),
    /// The output cannot be written; the process keeps running, and this program exits with this code.
    Unwritable(i32),
    /// The outcome is unknown.
    Failed(anyhow::Error),
}

impl Ending {
    /// Whether the process has ended, and that was reported.
    pub(crate) fn has_ended(&self) -> bool {
        matches!(self, Self::Exited { .. } | Self::Incomplete { .. } | Self::Stopped(_))
    }

    /// The exit code, if this program does not choose another one.
    fn code(&self) -> Option<i32> {
        match self {
            Self::Exited { code, .. }
            | Self::Stopped(code)
            | Self::Abandoned(code)
            | Self::Detached(code)
            | Self::Unwritable(code) => Some(*code),
            Self::Incomplete { .. } | Self::Failed(_) => None,
        }
    }
}

/// What `forward_output` has seen.
#[derive(Clone, Copy)]
struct Seen<'a> {
    exited: &'a Cell<Option<(i32, bool)>>,
    ended_by: &'a Cell<Option<EndedBy>>,
    lost: &'a Cell<bool>,
    local: &'a LocalLimits,
}

/// The limits that this program enforces.
struct LocalLimits {
    wall: Option<Duration>,
    idle: Option<Duration>,
    active_at: Cell<tokio::time::Instant>,
    output_left: Cell<Option<u64>>,
    output_exceeded: tokio::sync::Notify,
}

impl LocalLimits {
    /// Those that the server does not enforce.
    fn new(limits: &ResourceLimits, enforced: bool) -> Self {
        let duration = |limit: Option<u64>| limit.map(Duration::from_millis);
        let unless_enforced = |limit: Option<u64>| limit.filter(|_| !enforced);
        // Without a connection, the user still waits no longer than this.
        let slack = if enforced { KILL_TIMEOUT } else { Duration::ZERO };
        Self {
            wall: duration(limits.wall_ms).map(|wall| wall + slack),
            idle: duration(unless_enforced(limits.idle_ms)),
            active_at: Cell::new(tokio::time::Instant::now()),
            output_left: Cell::new(unless_enforced(limits.output_bytes)),
            output_exceeded: tokio::sync::Notify::new(),
        }
    }

    fn is_active(&self) {
        self.active_at.set(tokio::time::Instant::now());
    }

    fn output(&self, bytes: usize) {
        self.is_active();
        if let Some(left) = self.output_left.get() {
            self.output_left.set(left.checked_sub(bytes as u64));
            if self.output_left.get().is_none() {
                self.output_exceeded.notify_one();
            }
        }
    }

    /// Resolves once a limit is exceeded.
    async fn exceeded(&self) -> EndedBy {
        let wall = async {
            match self.wall {
                Some(wall) => tokio::time::sleep(wall).await,
                None => std::future::pending().await,
            }
        };
        let idle = async {
            let Some(idle) = self.idle else { return std::future::pending().await };
            loop {
                let until = self.active_at.get() + idle;
                tokio::time::sleep_until(until).await;
                if self.active_at.get() + idle <= tokio::time::Instant::now() {
                    return;
                }
            }
        };
        tokio::select! {
            () = wall => EndedBy::Wall,
            () = idle => EndedBy::Idle,
            () = self.output_exceeded.notified() => EndedBy::Output,
        }
    }
}

/// The exit code after a limit, if it is not that of the command.
fn limit_code(by: EndedBy) -> Option<i32> {
    matches!(by, EndedBy::Wall | EndedBy::Idle).then_some(TIMED_OUT.into())
}

/// The exit code of a killed command.
const KILLED: i32 = 128 + 9;

/// Repeats of one signal after which this program kills the process.
const KILL_AFTER_SIGNALS: u32 = 3;
/// How long to read a terminal after its process has exited: the rest of the output arrives at once, and
/// a daemon may never close the terminal.
const FINAL_OUTPUT_WAIT: Duration = Duration::from_millis(300);
/// After how long a message explains what this program waits for.
const EXPLAIN_AFTER: Duration = Duration::from_secs(2);
/// The byte that Ctrl-C sends in a raw terminal.
const CTRL_C: u8 = 3;
/// How long a kill may take.
const KILL_TIMEOUT: Duration = Duration::from_secs(3);
/// How long the server may take to confirm that it is there.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(2);

impl Foreground<'_> {
    /// Runs until the process ends or the user detaches.
    pub(crate) async fn run(&self, mut process: Process) -> Ending {
        let (client, id) = (process.client().clone(), process.id().clone());
        let Some(events) = process.take_events() else {
            return Ending::Failed(anyhow::anyhow!("the events of the process are already taken"));
        };
        let raw = match self.terminal.map(Terminal::raw).transpose() {
            Ok(raw) => raw,
            Err(error) => return Ending::Failed(error),
        };
        let (exited, ending_signal, lost) = (Cell::new(None), Cell::new(None), Cell::new(false));
        let enforced = client.capabilities().process_limits;
        let local = LocalLimits::new(&self.limits, enforced);
        let ended_by = Cell::new(None);
        let applied = process.limits().copied();
        let mut sink = Sink::new(self.json);
        let outage_shown = Cell::new(None);
        let ending = {
            let seen = Seen { exited: &exited, ended_by: &ended_by, lost: &lost, local: &local };
            let mut output = pin!(self.forward_output(events, &mut sink, seen));
            let input = self.forward_input(process.take_stdin(), &client, &local);
            let signals = self.forward_signals(&client, &id, &exited, &ending_signal);
            let connection = self.report_connection(&client, &id, &outage_shown);
            let size = self.keep_size(&client, &id);
            tokio::select! {
                biased;
                ending = &mut output => ending,
                ending = input => ending,
                ending = signals => ending,
                never = connection => match never {},
                never = size => match never {},
                by = local.exceeded() => {
                    // Before the exit arrives, so that --json reports the limit with it.
                    ended_by.set(Some(by));
                    let killed = kill(&client, &id).await;
                    if killed {
                        // Print the output up to the kill.
                        let _ = tokio::time::timeout(KILL_TIMEOUT, output).await;
                    }
                    match killed {
                        true => Ending::Exited { code: KILLED, sandbox_denied: false },
                        false => Ending::Abandoned(limit_code(by).unwrap_or(KILLED)),
                    }
                },
            }
        };
        if let Some(at) = outage_shown.take() {
            let _ = io::stderr().write_all(&at.clear());
        }
        // It ended because of our signal, and its exit may arrive before the server's response.
        let ending = match (ending, ending_signal.get()) {
            (Ending::Exited { .. }, Some(signal)) => Ending::Stopped(exit_code(signal)),
            (Ending::Exited { code, sandbox_denied }, None) if lost.get() => {
                Ending::Incomplete { code, sandbox_denied }
            }
            (ending, _) => ending,
        };
        let ending = match ending {
            Ending::Stopped(code) if exited.get().is_none() && !kill(&client, &id).await => {
                Ending::Abandoned(code)
            }
            Ending::Detached(code) if !self.is_confirmed(&client).await => Ending::Abandoned(code),
            ending => ending,
        };
        let limit = ended_by.get().and_then(|by| {
            Some((limit_code(by), limits::explain(by, &self.limits, applied.as_ref())?))
        });
        let ending = match (ending, &limit) {
            (Ending::Exited { .. }, Some((Some(code), _))) => Ending::Stopped(*code),
            (ending, _) => ending,
        };
        if self.terminal.is_some() && !matches!(ending, Ending::Exited { .. }) {
            // The next message starts on a new line.
            let _ = io::stderr().write_all(b"\r\n");
        }
        drop(raw);
        if let Ending::Incomplete { code, .. } = ending {
            print_stderr(format_args!(
                "some of the command's output was lost; the command itself exited with code {code}"
            ));
        }
        if let Some((_, explanation)) = &limit
            && ending.has_ended()
        {
            print_stderr(format_args!("{explanation}"));
        }
        if exited.get().is_none() && (limit.is_some() || matches!(ending, Ending::Abandoned(_))) {
            let (kind, message) = match limit {
                Some((_, explanation)) => (ErrorKind::TimedOut, explanation),
                None => (ErrorKind::ConnectionLost, ABANDONED.to_owned()),
            };
            let exit_code = ending.code().map_or(exit::NOT_RUN, exit::byte);
            let line = RunEvent::Failed { kind, message, exit_code };
            // If stdout is closed, the exit code still says it.
            let _ = sink.print_if_json(&line).await;
        }
        ending
    }

    /// Writes the output, in order.
    async fn forward_output(
        &self,
        mut events: ProcessEvents,
        sink: &mut Sink,
        Seen { exited, ended_by, lost, local }: Seen<'_>,
    ) -> Ending {
        let mut explained = false;
        let mut before_attach = self.attached;
        if let (Some(paint), Some(terminal)) = (&self.first_paint, self.terminal) {
            terminal.watch(paint);
            if let Err(error) = sink.output(OutputStream::Pty, paint).await {
                return self.write_failed(&error);
            }
        }
        loop {
            let next = match exited.get() {
                Some((code, sandbox_denied)) if self.terminal.is_some() => {
                    match tokio::time::timeout(FINAL_OUTPUT_WAIT, events.next()).await {
                        Ok(next) => next,
                        Err(_) => return Ending::Exited { code, sandbox_denied },
                    }
                }
                Some(_) if !explained && io::stderr().is_terminal() => {
                    match tokio::time::timeout(EXPLAIN_AFTER, events.next()).await {
                        Ok(next) => next,
                        Err(_) => {
                            explained = true;
                            print_stderr(format_args!(
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
                    before_attach = false;
                    local.output(bytes.len());
                    if let Some(terminal) = self.terminal {
                        terminal.watch(&bytes);
                    }
                    sink.output(stream, &bytes).await
                }
                Some(ProcessEvent::Lost(missing)) => {
                    lost.set(lost.get() || !before_attach);
                    sink.lost(&missing).await
                }
                Some(ProcessEvent::Exited(mut status)) => {
                    exited.set(Some((status.code, status.sandbox_denied)));
                    status.ended_by = status.ended_by.or(ended_by.get());
                    ended_by.set(status.ended_by);
                    sink.exited(status).await
                }
                Some(ProcessEvent::Failed(ExecServerError::Lost(lost @ Lost::Taken))) => {
                    self.print_between(&format!("codex: {lost}"));
                    return Ending::Detached(0);
                }
                Some(ProcessEvent::Failed(error)) => return Ending::Failed(error.into()),
                Some(ProcessEvent::Closed) | None => {
                    if let Err(error) = sink.closed().await {
                        return self.write_failed(&error);
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
                return self.write_failed(&error);
            }
        }
    }

    /// Forwards stdin; resolves when the user detaches, or the terminal is gone.
    async fn forward_input(
        &self,
        stdin: Option<ProcessStdin>,
        client: &ExecServerClient,
        local: &LocalLimits,
    ) -> Ending {
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
                // A raw terminal has no end of input, so the terminal is gone.
                Ok(None) | Err(_) if self.terminal.is_some() => {
                    return self.hung_up(ProcessSignal::Hangup);
                }
                Ok(None) | Err(_) => break,
            };
            // Without a connection, Ctrl-C can only interrupt this program.
            if self.terminal.is_some() && chunk.contains(&CTRL_C) && !is_connected(client) {
                return Ending::Abandoned(exit_code(ProcessSignal::Interrupt));
            }
            let typed = match self.escapes {
                true => escapes.parse(&chunk),
                false => vec![Typed::Keys(chunk.to_vec())],
            };
            for typed in typed {
                match typed {
                    Typed::Keys(keys) if self.fit.is_none() => {
                        if keys.contains(&CTRL_C) {
                            return Ending::Detached(0);
                        }
                    }
                    Typed::Keys(keys) => {
                        local.is_active();
                        if stdin.write_all(&keys).await.is_err() {
                            // Its stdin is closed; `forward_output` reports the exit.
                            return std::future::pending().await;
                        }
                    }
                    Typed::Detach => return Ending::Detached(0),
                    Typed::Help => self.print_between(escapes::HELP),
                }
            }
        }
        match stdin.shutdown().await {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                // Most commands exit before this.
                tokio::time::sleep(EXPLAIN_AFTER).await;
                print_stderr(format_args!(
                    "this server cannot close a command's stdin, so the command may wait for more \
                     input; press Ctrl-C to stop it, or run it with -n"
                ));
            }
            _ => {}
        }
        std::future::pending().await
    }

    /// Forwards signals; resolves when this program should kill the process.
    async fn forward_signals(
        &self,
        client: &ExecServerClient,
        id: &ProcessId,
        exited: &Cell<Option<(i32, bool)>>,
        ending_signal: &Cell<Option<ProcessSignal>>,
    ) -> Ending {
        let (mut last, mut times) = (None, 0);
        let mut sending = FuturesUnordered::new();
        loop {
            let event = tokio::select! {
                event = self.signals.next() => event,
                // A user who ends the command does not wait for a reconnect.
                Some((signal, false)) = sending.next() => {
                    return Ending::Stopped(exit_code(signal));
                }
            };
            let signal = match event {
                SignalEvent::Resized => {
                    self.resize(client, id);
                    continue;
                }
                SignalEvent::Forward(signal) => signal,
            };
            if matches!(signal, ProcessSignal::User1 | ProcessSignal::User2) {
                // These signals ask for no end, so a server without them ends nothing.
                if client.capabilities().process_signals {
                    sending.push(forward_signal(client, id, signal));
                }
                continue;
            }
            times = if last == Some(signal) { times + 1 } else { 1 };
            last = Some(signal);
            if let Some((code, sandbox_denied)) = exited.get() {
                return Ending::Exited { code, sandbox_denied };
            }
            let hangup = matches!(signal, ProcessSignal::Hangup | ProcessSignal::Terminate);
            if hangup && self.keep_on_hangup {
                return self.hung_up(signal);
            }
            if self.fit.is_none() {
                return Ending::Detached(exit_code(signal));
            }
            if !is_connected(client) || times >= KILL_AFTER_SIGNALS {
                return Ending::Stopped(exit_code(signal));
            }
            if self.terminal.is_some() && signal != ProcessSignal::Interrupt {
                // The local terminal is closing, so hang up the remote one.
                ending_signal.set(Some(signal));
                send_signal(client, id, ProcessSignal::Hangup).await;
                return Ending::Stopped(exit_code(signal));
            }
            // A server without signals can still kill the process.
            if signal != ProcessSignal::Interrupt && !client.capabilities().process_signals {
                return Ending::Stopped(exit_code(signal));
            }
            sending.push(forward_signal(client, id, signal));
        }
    }

    /// Tells the server the size of the local terminal, if that counts.
    fn resize(&self, client: &ExecServerClient, id: &ProcessId) {
        let (Some(_), Some(fit)) = (self.terminal, self.fit) else { return };
        resize(client, id, fit);
    }

    /// Tells the server the size again after each reconnect, since it forgets those of clients that are gone;
    /// never resolves.
    async fn keep_size(&self, client: &ExecServerClient, id: &ProcessId) -> Infallible {
        let mut status = client.status();
        let mut lost = false;
        while status.changed().await.is_ok() {
            let connected = matches!(*status.borrow_and_update(), ConnectionStatus::Connected);
            if connected && lost {
                self.resize(client, id);
            }
            lost = !connected;
        }
        std::future::pending().await
    }

    /// Shows outages, and their end; never resolves.
    async fn report_connection(
        &self,
        client: &ExecServerClient,
        id: &ProcessId,
        shown: &Cell<Option<Where>>,
    ) -> Infallible {
        if !io::stderr().is_terminal() {
            return std::future::pending().await;
        }
        let mut status = client.status();
        let mut outage: Option<Outage> = None;
        let mut tick = tokio::time::interval(outage::TICK);
        loop {
            tokio::select! {
                changed = status.changed() => if changed.is_err() {
                    return std::future::pending().await;
                },
                _ = tick.tick(), if outage.is_some() && self.terminal.is_some() => {}
            }
            let started = |since: Instant| Outage {
                server: client.endpoint().to_owned(),
                since,
                trying: Trying::Waiting,
            };
            let is_new = outage.is_none();
            match &*status.borrow_and_update() {
                ConnectionStatus::Unresponsive { since } => {
                    outage.get_or_insert_with(|| started(*since)).trying = Trying::Waiting;
                }
                ConnectionStatus::Reconnecting { attempt, reason } => {
                    let trying = Trying::Reconnecting { attempt: *attempt, reason: reason.clone() };
                    outage.get_or_insert_with(|| started(Instant::now())).trying = trying;
                }
                ConnectionStatus::Connected => {
                    if let Some(over) = outage.take() {
                        self.outage_over(client, id, &over, shown);
                    }
                    continue;
                }
                _ => continue,
            }
            if let Some(outage) = &outage {
                self.show_outage(outage, is_new, shown);
            }
        }
    }

    /// Shows the line of an outage: in a terminal in its place, otherwise once.
    fn show_outage(&self, outage: &Outage, is_new: bool, shown: &Cell<Option<Where>>) {
        let leave = if self.escapes { "Enter ~. leaves" } else { "Ctrl-C leaves" };
        let line = outage.line(Instant::now(), leave);
        let (Some(terminal), Some((rows, columns))) = (self.terminal, terminal::size()) else {
            if is_new {
                self.print_between(&line);
            }
            return;
        };
        let at = match terminal.is_alternate() {
            true => Where::Last(rows),
            false => Where::BelowCursor,
        };
        let painted = at.paint(&line, columns, shown.get() != Some(at));
        shown.set(Some(at));
        let _ = io::stderr().write_all(&painted);
    }

    /// Removes the line of an outage that is over.
    fn outage_over(
        &self,
        client: &ExecServerClient,
        id: &ProcessId,
        outage: &Outage,
        shown: &Cell<Option<Where>>,
    ) {
        match shown.take() {
            None => self.print_between(&outage.over(Instant::now())),
            Some(at) => {
                let _ = io::stderr().write_all(&at.clear());
                if let (Where::Last(_), Some(fit)) = (at, self.fit) {
                    repaint(client, id, fit);
                }
            }
        }
    }

    /// Whether the server confirms that it is there, so that the process is, too.
    async fn is_confirmed(&self, client: &ExecServerClient) -> bool {
        // Only the process of a client that was detached by another is known to run without an answer.
        let taken = |status: &ConnectionStatus| {
            matches!(status, ConnectionStatus::Closed(ExecServerError::Lost(Lost::Taken)))
        };
        if taken(&client.status().borrow()) {
            return true;
        }
        let asked = client.environment_status();
        is_connected(client)
            && matches!(
                tokio::time::timeout(CONFIRM_TIMEOUT, asked).await,
                Ok(Ok(_)
                    | Err(ExecServerError::Server { .. } | ExecServerError::Unsupported { .. }))
            )
    }

    /// The ending if the local terminal is gone or closing.
    fn hung_up(&self, signal: ProcessSignal) -> Ending {
        let code = exit_code(signal);
        if self.keep_on_hangup { Ending::Detached(code) } else { Ending::Stopped(code) }
    }

    /// The ending if the output cannot be written. Kills a command that this program started; one that was
    /// running before keeps running. Prints no message if the reader closed the output.
    fn write_failed(&self, error: &io::Error) -> Ending {
        // What a terminal says that is gone, perhaps before SIGHUP or the end of input arrives.
        if self.terminal.is_some()
            && error.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error())
        {
            return self.hung_up(ProcessSignal::Hangup);
        }
        let code = match error.kind() {
            io::ErrorKind::BrokenPipe => BROKEN_PIPE,
            _ => {
                print_stderr(format_args!("cannot write the command's output: {error}"));
                exit::NOT_RUN
            }
        };
        let gone = self.terminal.is_some() && self.keep_on_hangup;
        match (self.attached, gone) {
            (_, true) => Ending::Detached(code.into()),
            (true, false) => Ending::Unwritable(code.into()),
            (false, false) => Ending::Stopped(code.into()),
        }
    }

    /// Prints a message on its own lines between the output.
    fn print_between(&self, message: &str) {
        let message = match self.terminal {
            Some(_) => format!("\r\n{}\r\n", message.replace('\n', "\r\n")),
            None => format!("{message}\n"),
        };
        let _ = io::stderr().write_all(message.as_bytes());
    }
}

fn is_connected(client: &ExecServerClient) -> bool {
    matches!(*client.status().borrow(), ConnectionStatus::Connected)
}

/// Forwards a signal; false if this program should kill the process instead.
async fn forward_signal(
    client: &ExecServerClient,
    id: &ProcessId,
    signal: ProcessSignal,
) -> (ProcessSignal, bool) {
    let handled = send_signal(client, id, signal).await;
    (signal, handled || matches!(signal, ProcessSignal::User1 | ProcessSignal::User2))
}

/// Whether the server has accepted the signal, or refused it; false if the connection was lost.
async fn send_signal(client: &ExecServerClient, id: &ProcessId, signal: ProcessSignal) -> bool {
    let params = SignalParams { process_id: id.clone(), signal };
    let sent = tokio::time::timeout(KILL_TIMEOUT, client.process_signal(params)).await;
    tracing::debug!(?sent, ?signal, "signal passed on");
    matches!(
        sent,
        Ok(Ok(_) | Err(ExecServerError::Server { .. } | ExecServerError::Unsupported { .. }))
    )
}

/// Makes a program on the alternate screen paint it again, by a change of its size.
fn repaint(client: &ExecServerClient, id: &ProcessId, fit: Fit) {
    let Some((rows, cols)) = terminal::size() else { return };
    if !client.capabilities().process_resize || rows < 2 {
        return;
    }
    let (client, process_id) = (client.clone(), id.clone());
    tokio::spawn(async move {
        let fit = Some(fit).filter(|fit| *fit != Fit::default());
        for rows in [rows - 1, rows] {
            let process_id = process_id.clone();
            let params = codex_exec_server::ResizeParams { process_id, rows, cols, fit };
            if client.process_resize(params).await.is_err() {
                return;
            }
        }
    });
}

fn resize(client: &ExecServerClient, id: &ProcessId, fit: Fit) {
    let Some((rows, cols)) = terminal::size() else { return };
    if !client.capabilities().process_resize {
        return;
    }
    let (client, process_id) = (client.clone(), id.clone());
    tokio::spawn(async move {
        let fit = Some(fit).filter(|fit| *fit != Fit::default());
        let params = codex_exec_server::ResizeParams { process_id, rows, cols, fit };
        let resized = client.process_resize(params).await;
        tracing::debug!(?resized, "terminal resized");
    });
}

/// Kills the process and what it left running; false if the server did not respond. Does not wait for a
/// reconnect.
pub(crate) async fn kill(client: &ExecServerClient, id: &ProcessId) -> bool {
    let mut status = client.status();
    let lost = status.wait_for(|status| !matches!(status, ConnectionStatus::Connected));
    let params = TerminateParams { process_id: id.clone() };
    let killed = tokio::select! {
        biased;
        _ = lost => return false,
        killed = tokio::time::timeout(KILL_TIMEOUT, client.process_terminate(params)) => killed,
    };
    tracing::debug!(?killed, "process killed");
    matches!(
        killed,
        Ok(Ok(_) | Err(ExecServerError::Server { .. } | ExecServerError::Unsupported { .. }))
    )
}

/// Prints that descendants of a command may still run, and how to end them.
pub(crate) fn warn_left_over(name: &str) {
    print_stderr(format_args!(
        "the connection is lost, so processes that the command started may still run; end them with \
         codex kill {name}"
    ));
}

/// What is known of a command that this program cannot reach.
const ABANDONED: &str = "the connection is lost, so whether the command still runs is unknown";

/// Prints what is known of a command that this program left without a connection, and how to look again.
pub(crate) fn warn_abandoned(reattach_command: Option<&str>) {
    match reattach_command {
        Some(command) => print_stderr(format_args!(
            "{ABANDONED}; if its server does, the command does too, until the server ends its session; reattach \
             with {command}"
        )),
        None => print_stderr(format_args!("{ABANDONED}; it ends with its server or its session")),
    }
}
