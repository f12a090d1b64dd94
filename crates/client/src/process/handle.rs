//! The handle of a process.

use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use codex_exec_server_protocol::process::{
    ExecParams, ExecResponse, OnFull, OutputStream, ProcessId, ProcessSignal, ResizeParams, Retain,
    RetainUntil, SandboxType, SignalParams, TerminateParams,
};
use codex_exec_server_protocol::resources::AppliedLimits;
use codex_exec_server_protocol::{Assurance, Effect, ErrorKind, PathUri, call};
use futures_util::{Stream, StreamExt};

use super::command::ExecCommand;
use super::delivery::Side;
use super::event::{ExitStatus, Output, ProcessEvent};
use super::follow::follow;
use super::output::ProcessOutput;
use super::sequencer::EventSequencer;
use super::shared_sequencer::SharedSequencer;
use super::stdin::ProcessStdin;
use crate::client::ExecServerClient;
use crate::error::{ExecServerError, Lost};

/// A process on the server.
///
/// Its output can be read in one of two ways: all events in order ([`next_event`](Self::next_event) or
/// [`take_events`](Self::take_events)), or stdout and stderr as byte streams
/// ([`take_stdout`](Self::take_stdout)). After the handle and everything taken from it are dropped, the
/// process keeps running, unless the command set [`ExecCommand::terminate_on_drop`].
///
/// ```no_run
/// # async fn run(client: codex_exec_client::ExecServerClient) -> Result<(), codex_exec_client::ExecServerError> {
/// use codex_exec_client::{ExecCommand, ProcessEvent};
///
/// let mut process = client.spawn(ExecCommand::new(["make", "-j4"]).cwd("/srv/app")?).await?;
/// while let Some(event) = process.next_event().await {
///     match event {
///         ProcessEvent::Output { stream, bytes } => println!("{stream:?}: {} bytes", bytes.len()),
///         ProcessEvent::Exited(status) => println!("exit code {}", status.code),
///         ProcessEvent::Lost(lost) => eprintln!("{lost}"),
///         ProcessEvent::Failed(error) => return Err(error),
///         ProcessEvent::Closed => {}
///     }
/// }
/// # Ok(()) }
/// ```
pub struct Process {
    handle: Arc<Handle>,
    sandbox_type: Option<SandboxType>,
    sandbox_assurance: Option<Assurance>,
    limits: Option<Box<AppliedLimits>>,
    stdin: Option<ProcessStdin>,
    taken: Taken,
    events: Option<ProcessEvents>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Taken {
    events: bool,
    stdout: bool,
    stderr: bool,
}

/// How much output the server retains until the client acknowledges it, unless the caller sets it, in
/// bytes.
const DEFAULT_RETAIN_BYTES: u64 = 8 << 20;

/// The state that the handle and everything taken from it share.
pub(super) struct Handle {
    pub(super) client: ExecServerClient,
    pub(super) id: ProcessId,
    pub(super) events: Arc<SharedSequencer>,
    pub(super) tty: bool,
    terminate_on_drop: bool,
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.events.abandon() {
            self.client.shared.untrack(&self.id);
        }
        let has_ended =
            self.events.peek(|sequencer| sequencer.exit().is_some() || sequencer.end().is_some());
        if self.terminate_on_drop
            && !has_ended
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            // The clone keeps the connection open until the request is done.
            let (client, process_id) = (self.client.clone(), self.id.clone());
            runtime.spawn(async move {
                let params = TerminateParams { process_id };
                let _ = client.call::<call::ProcessTerminate>(params).await;
            });
        }
    }
}

impl ExecServerClient {
    /// Starts a command.
    pub async fn spawn(&self, command: ExecCommand) -> Result<Process, ExecServerError> {
        let limited = command.limits.is_some_and(|limits| !limits.is_empty());
        if limited && !self.capabilities().process_limits {
            return Err(ExecServerError::Unsupported {
                what: "limit what a process uses".to_owned(),
                instead: "run the command under `ulimit` or `systemd-run`".to_owned(),
            });
        }
        let id = match &command.process_id {
            Some(id) => id.clone(),
            None => ProcessId::from(self.shared.fresh_id("p")),
        };
        let mut process = self.observe(
            id.clone(),
            EventSequencer::new(id.clone(), self.window(&command), 0, false),
            &command,
        )?;
        let mut params = command.params(id, self.default_cwd());
        if self.capabilities().process_retain_until_read {
            let default = Retain {
                bytes: DEFAULT_RETAIN_BYTES,
                on_full: OnFull::Wait,
                until: RetainUntil::Read,
            };
            let retain = params.retain.get_or_insert(default);
            // A process that drops old output does not wait for acknowledgements.
            if retain.on_full == OnFull::Wait {
                retain.until = RetainUntil::Read;
                process.handle.events.feed(EventSequencer::acknowledge);
            }
        }
        if params.retain.is_none_or(|retain| retain.until != RetainUntil::Read) {
            let limit = self.shared.tuning.spill_limit;
            process.handle.events.feed(|sequencer| sequencer.spill(limit));
        }
        match self.start(&params).await {
            Ok(Some(started)) => {
                process.sandbox_type = started.sandbox_type;
                process.sandbox_assurance = started.sandbox_assurance;
                process.limits = started.limits;
            }
            // It has started, and only the response was lost.
            Ok(None) => {}
            Err(error) => {
                process.forget_unstarted();
                return Err(error);
            }
        }
        process.follow();
        Ok(process)
    }

    /// Runs a command to its end and returns its output, which has to fit into memory.
    pub async fn run(&self, command: ExecCommand) -> Result<Output, ExecServerError> {
        self.spawn(command).await?.wait_with_output().await
    }

    /// Attaches to a process that this session started earlier, with its events after number `after` (0
    /// for all that the server retains). A process can have only one handle at a time. `like` sets the
    /// window and the behaviour for a slow consumer and, for a server that cannot list processes, whether
    /// the process has a terminal ([`ExecCommand::tty`]).
    pub async fn attach(
        &self,
        id: impl Into<ProcessId>,
        after: u64,
        like: ExecCommand,
    ) -> Result<Process, ExecServerError> {
        let id = id.into();
        let mut like = like;
        like.pipe_stdin = true;
        if self.capabilities().process_list {
            let listed = self.process_list().await?;
            let found = listed.processes.iter().find(|process| process.process_id == id);
            match found {
                Some(process) => like.tty |= process.tty,
                None => return Err(Lost::Process { process: id }.into()),
            }
        }
        let mut sequencer = EventSequencer::new(id.clone(), self.window(&like), after, true);
        // The client that started it may or may not have made it wait for acknowledgements.
        sequencer.spill(self.shared.tuning.spill_limit);
        if self.capabilities().process_retain_until_read {
            sequencer.acknowledge();
        }
        let mut process = self.observe(id, sequencer, &like)?;
        if let Some(stdin) = &mut process.stdin {
            stdin.leave_open();
        }
        process.follow();
        Ok(process)
    }

    fn observe(
        &self,
        id: ProcessId,
        sequencer: EventSequencer,
        command: &ExecCommand,
    ) -> Result<Process, ExecServerError> {
        let events = Arc::new(SharedSequencer::new(sequencer, command.on_slow_consumer));
        if !self.shared.track(&id, &events) {
            return Err(ExecServerError::Invalid(format!(
                "this client already has a handle on a process `{id}`; use that one, or another id"
            )));
        }
        let handle = Arc::new(Handle {
            client: self.clone(),
            id,
            events,
            tty: command.tty,
            terminate_on_drop: command.terminate_on_drop,
        });
        let stdin = (command.tty || command.pipe_stdin).then(|| ProcessStdin::new(handle.clone()));
        Ok(Process {
            handle,
            sandbox_type: None,
            sandbox_assurance: None,
            limits: None,
            stdin,
            taken: Taken::default(),
            events: None,
        })
    }

    /// Sends `process/start`, and repeats it after a reconnect: since it names the process, either the
    /// first request never arrived, or the server refuses the second because the process exists. Returns
    /// `None` if the first request started the process and only the response was lost.
    async fn start(&self, params: &ExecParams) -> Result<Option<ExecResponse>, ExecServerError> {
        let is_unused_name = self.shared.claim(&params.process_id);
        let timeout = self.shared.tuning.request_timeout;
        let first = self.shared.call::<call::ProcessStart>(params, Effect::Once, timeout).await;
        if !first.as_ref().is_err_and(ExecServerError::is_interrupted) {
            return first.map(Some);
        }
        let retried =
            self.shared.call::<call::ProcessStart>(params, Effect::Repeatable, timeout).await;
        match retried {
            // In this session, only the first request can have started a process with this id.
            Err(error) if is_unused_name && error.kind() == ErrorKind::ProcessExists => Ok(None),
            retried => retried.map(Some),
        }
    }

    fn window(&self, command: &ExecCommand) -> usize {
        command.window.unwrap_or(self.shared.tuning.event_window).max(1)
    }

    /// The working directory of a command that sets none.
    fn default_cwd(&self) -> PathUri {
        let info = self.info();
        let directory = info.cwd.clone().or_else(|| info.user_home_dir.clone());
        directory.unwrap_or_else(root)
    }
}

fn root() -> PathUri {
    match PathUri::from_native("/") {
        Ok(root) => root,
        Err(error) => unreachable!("the root is a path: {error}"),
    }
}

impl Process {
    /// The process's id in the session.
    pub fn id(&self) -> &ProcessId {
        &self.handle.id
    }

    /// The client that started it.
    pub fn client(&self) -> &ExecServerClient {
        &self.handle.client
    }

    /// The kind of its sandbox; `None` if the server did not report it.
    pub fn sandbox_type(&self) -> Option<SandboxType> {
        self.sandbox_type
    }

    /// The level of its sandbox; `None` without a sandbox, or if the server did not report it.
    pub fn sandbox_assurance(&self) -> Option<Assurance> {
        self.sandbox_assurance
    }

    /// The limits in force, and what enforces them; `None` without limits, or if the server did not report
    /// them.
    pub fn limits(&self) -> Option<&AppliedLimits> {
        self.limits.as_deref()
    }

    /// Takes all events, in order; `None` if events, stdout or stderr were taken already.
    pub fn take_events(&mut self) -> Option<ProcessEvents> {
        if self.taken != Taken::default() {
            return None;
        }
        self.taken.events = true;
        self.handle.events.feed(|sequencer| sequencer.delivery.attach_consumer());
        Some(ProcessEvents { handle: self.handle.clone(), ended: false })
    }

    /// The next event; `None` after the last, and if events, stdout or stderr were taken.
    pub async fn next_event(&mut self) -> Option<ProcessEvent> {
        if self.events.is_none() {
            self.events = self.take_events();
        }
        self.events.as_mut()?.next().await
    }

    /// Takes stdout, or the output of the terminal; `None` if it was taken already. Take stderr too, and
    /// drop it if you do not need it: a stream that is not read fills the window and stops the other.
    pub fn take_stdout(&mut self) -> Option<ProcessOutput> {
        if self.taken.events || std::mem::replace(&mut self.taken.stdout, true) {
            return None;
        }
        Some(self.output(Side::Out))
    }

    /// Takes stderr; `None` if it was taken already. Empty for a process with a terminal.
    pub fn take_stderr(&mut self) -> Option<ProcessOutput> {
        if self.taken.events || std::mem::replace(&mut self.taken.stderr, true) {
            return None;
        }
        Some(self.output(Side::Err))
    }

    fn output(&self, side: Side) -> ProcessOutput {
        self.handle.events.feed(|sequencer| sequencer.delivery.split());
        ProcessOutput { handle: self.handle.clone(), side }
    }

    /// Takes stdin; `None` if it was taken already, or if the command set neither
    /// [`ExecCommand::pipe_stdin`] nor [`ExecCommand::tty`].
    pub fn take_stdin(&mut self) -> Option<ProcessStdin> {
        self.stdin.take()
    }

    /// Waits for the exit. The output need not be read, unless the process
    /// [holds the connection](crate::OnSlowConsumer::HoldConnection).
    pub async fn wait(&self) -> Result<ExitStatus, ExecServerError> {
        poll_fn(|cx| {
            self.handle.events.poll_take(cx, |sequencer| {
                match (sequencer.exit(), sequencer.end()) {
                    (Some(status), _) => Some(Ok(status)),
                    (None, Some(Err(error))) => Some(Err(error.clone())),
                    // Closed without an exit: the server never sent the exit code.
                    (None, Some(Ok(()))) => {
                        Some(Err(Lost::Process { process: self.handle.id.clone() }.into()))
                    }
                    (None, None) => None,
                }
            })
        })
        .await
    }

    /// Closes stdin unless it was taken, reads all output, and waits for the exit. Lost output is an
    /// error.
    pub async fn wait_with_output(mut self) -> Result<Output, ExecServerError> {
        if self.taken.stdout || self.taken.stderr || (self.taken.events && self.events.is_none()) {
            return Err(ExecServerError::Invalid(
                "the events of this process were already taken; read its output from them"
                    .to_owned(),
            ));
        }
        drop(self.stdin.take());
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        while let Some(event) = self.next_event().await {
            match event {
                ProcessEvent::Output { stream: OutputStream::Stderr, bytes } => {
                    stderr.extend_from_slice(&bytes);
                }
                ProcessEvent::Output { bytes, .. } => stdout.extend_from_slice(&bytes),
                ProcessEvent::Lost(lost) => return Err(lost.into()),
                ProcessEvent::Failed(error) => return Err(error),
                ProcessEvent::Exited(_) | ProcessEvent::Closed => {}
            }
        }
        Ok(Output { status: self.wait().await?, stdout, stderr })
    }

    /// Resizes the terminal.
    pub async fn resize(&self, rows: u16, cols: u16) -> Result<(), ExecServerError> {
        if !self.handle.client.capabilities().process_resize {
            return Err(ExecServerError::Unsupported {
                what: "resize a terminal".to_owned(),
                instead:
                    "the terminal keeps 24 rows and 80 columns; run `stty rows R cols C` in it"
                        .to_owned(),
            });
        }
        let params = ResizeParams { process_id: self.handle.id.clone(), rows, cols, fit: None };
        self.handle.client.call::<call::ProcessResize>(params).await?;
        Ok(())
    }

    /// Sends a signal to the process group. All but `interrupt` need the capability `processSignals`.
    pub async fn signal(&self, signal: ProcessSignal) -> Result<(), ExecServerError> {
        let client = &self.handle.client;
        if signal != ProcessSignal::Interrupt && !client.capabilities().process_signals {
            return Err(ExecServerError::Unsupported {
                what: format!("send the signal {signal:?}").to_lowercase(),
                instead: "send interrupt, or terminate the process".to_owned(),
            });
        }
        let params = SignalParams { process_id: self.handle.id.clone(), signal };
        client.call::<call::ProcessSignal>(params).await?;
        Ok(())
    }

    /// Kills the process, its group and its descendants; true if it was running.
    pub async fn terminate(&self) -> Result<bool, ExecServerError> {
        let params = TerminateParams { process_id: self.handle.id.clone() };
        Ok(self.handle.client.call::<call::ProcessTerminate>(params).await?.running)
    }

    /// The number of the last event in order, to [attach](ExecServerClient::attach) after it later.
    pub fn last_seq(&self) -> u64 {
        self.handle.events.peek(EventSequencer::delivered)
    }

    fn follow(&self) {
        let handle = &self.handle;
        tokio::spawn(follow(
            handle.client.shared.clone(),
            handle.events.clone(),
            handle.id.clone(),
        ));
    }

    /// Drops the handle of a process that failed to start.
    fn forget_unstarted(mut self) {
        if let Some(stdin) = &mut self.stdin {
            stdin.leave_open();
        }
        self.handle.events.feed(|sequencer| {
            sequencer.fail(Lost::Process { process: self.handle.id.clone() }.into());
        });
    }
}

impl fmt::Debug for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Process").field("id", &self.handle.id).finish_non_exhaustive()
    }
}

/// The events of a process in order, each once; ends after
/// [`Closed`](ProcessEvent::Closed) or [`Failed`](ProcessEvent::Failed).
pub struct ProcessEvents {
    handle: Arc<Handle>,
    ended: bool,
}

impl Stream for ProcessEvents {
    type Item = ProcessEvent;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<ProcessEvent>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let event = self.handle.events.poll_take(cx, |sequencer| sequencer.delivery.pop());
        if let Poll::Ready(ProcessEvent::Closed | ProcessEvent::Failed(_)) = event {
            self.ended = true;
        }
        event.map(Some)
    }
}

impl Drop for ProcessEvents {
    fn drop(&mut self) {
        // The consumer is gone.
        self.handle.events.feed(|sequencer| sequencer.delivery.discard_all());
    }
}

impl fmt::Debug for ProcessEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessEvents").field("process", &self.handle.id).finish_non_exhaustive()
    }
}
