//! The owner of a process: its child, its output, its sequence numbers.
//!
//! ```text
//!            spawned                exit seen             streams ended        linger over
//! Starting ───────────▶ Running ───────────────▶ Exited ───────────────▶ Closed ───────▶ forgotten
//!     │ failed             publishes output        publishes late output    can be read
//!     ▼
//!  forgotten
//! ```
//!
//! Everything that happens to the process passes through this loop, so output, exit and close are
//! numbered in the order they are published. The loop never waits for one thing only: a client that
//! does not read, a stdin that is not read and a pending read are each a branch of it.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use codex_exec_server_protocol::PathUri;
use codex_exec_server_protocol::process::{
    OutputStream, ProcessId, ProcessInfo, ProcessSignal, ReadParams, ReadResponse,
};
use codex_exec_server_protocol::resources::{EndedBy, Usage};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use super::child::Child;
use super::config::ProcessConfig;
use super::confinement::Confined;
use super::event::{EventKind, EventSink, ProcessEvent, SinkClosed};
use super::guests::{Guests, Sizes};
use super::handle::{Command, Reader};
use super::launch::{ExitSummary, OnExit, TerminalTap, WhileRunning};
use super::limits::{self, Limited};
use super::output::{Output, READ_BYTES};
use super::outputs::Outputs;
use super::pty;
use super::retention::Retention;
use super::screen::TerminalScreen;
use super::stdin::Stdin;

mod sharing;

/// Longest wait of a read, so that no clock overflows.
const MAX_READ_WAIT: Duration = Duration::from_secs(30 * 24 * 3600);

/// The parts of a started process.
pub(super) struct Parts {
    pub process_id: ProcessId,
    pub argv: Vec<String>,
    pub cwd: PathUri,
    pub child: Child,
    pub stdin: Stdin,
    /// stdout and stderr, or the terminal alone.
    pub outputs: Outputs,
    /// Master of the terminal.
    pub terminal: Option<Arc<OwnedFd>>,
    /// What the terminal shows.
    pub screen: Option<Box<TerminalScreen>>,
    pub retention: Retention,
    pub confined: Option<Confined>,
    pub limited: Option<Box<Limited>>,
    pub on_exit: Option<OnExit>,
    pub tap: Option<Box<dyn TerminalTap>>,
    /// Dropped when the process has exited.
    pub while_running: Option<WhileRunning>,
}

/// Who receives the events.
enum Subscriber {
    /// The response to `process/start` has not been sent yet; events wait for it.
    Expected,
    Attached(Box<dyn EventSink>),
    Detached,
}

pub(super) struct Actor {
    parts: Parts,
    config: Arc<ProcessConfig>,
    mailbox: mpsc::UnboundedReceiver<Command>,
    started_at_ms: u64,
    next_seq: u64,
    subscriber: Subscriber,
    guests: Guests,
    sizes: Sizes,
    /// Events to be delivered to the subscriber.
    undelivered: VecDeque<ProcessEvent>,
    undelivered_bytes: usize,
    /// The last event delivered to a subscriber.
    delivered: u64,
    /// The last event that a client may have seen in any way.
    seen: u64,
    /// The last event known to have reached the client's side.
    arrived: u64,
    /// The event whose arrival the sink is being polled for.
    awaiting_arrival: Option<u64>,
    /// Output retained while no subscriber was attached, which a resumed client has yet to read.
    backlog: Option<Backlog>,
    waiting: Vec<WaitingRead>,
    exit: Option<Exit>,
    /// The descendants are being killed, or have been.
    killed: bool,
    output_bytes: u64,
    /// Why the process ends, if it does not exit by itself.
    cause: Option<EndedBy>,
    /// All descendants have exited; when to end the streams if another program still holds them.
    end_streams_at: Option<Instant>,
    /// The streams end once their buffered output is read.
    ending: bool,
    closed: bool,
    failure: Option<String>,
    forget_at: Option<Instant>,
    cleaning: Option<JoinHandle<()>>,
}

/// Output that a resumed client may still read before it can be dropped.
struct Backlog {
    /// Events below this number.
    before: u64,
    /// Deadline for the client.
    until: Instant,
}

struct Exit {
    seq: u64,
    code: i32,
    sandbox_denied: bool,
    ended_by: Option<EndedBy>,
    usage: Option<Usage>,
}

struct WaitingRead {
    params: ReadParams,
    reader: Reader,
    until: Instant,
    reply: oneshot::Sender<ReadResponse>,
}

/// Why the loop woke up.
enum Event {
    Command(Option<Command>),
    Deliver(Result<(), SinkClosed>),
    Arrived,
    GuestsMoved,
    Output(usize, Option<Bytes>),
    Limit(EndedBy),
    Exited(i32),
    Gone,
    StdinMoved,
    Due,
}

/// Whether the loop continues.
#[derive(PartialEq, Eq)]
enum Flow {
    Continue,
    Forget,
}

impl Actor {
    pub(super) fn new(
        parts: Parts,
        config: Arc<ProcessConfig>,
        mailbox: mpsc::UnboundedReceiver<Command>,
    ) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            parts,
            config,
            mailbox,
            started_at_ms: now.as_millis() as u64,
            next_seq: 1,
            subscriber: Subscriber::Expected,
            guests: Guests::default(),
            sizes: Sizes::default(),
            undelivered: VecDeque::new(),
            undelivered_bytes: 0,
            delivered: 0,
            seen: 0,
            arrived: 0,
            awaiting_arrival: None,
            backlog: None,
            waiting: Vec::new(),
            exit: None,
            killed: false,
            output_bytes: 0,
            cause: None,
            end_streams_at: None,
            ending: false,
            closed: false,
            failure: None,
            forget_at: None,
            cleaning: None,
        }
    }

    /// Runs until the process is forgotten.
    pub(super) async fn run(mut self: Box<Self>) {
        loop {
            self.close_if_done();
            self.deliver_ready();
            self.schedule_forget();
            self.answer_ready_reads().await;
            let event = self.next_event().await;
            if self.handle(event).await == Flow::Forget {
                break;
            }
        }
        self.end().await;
    }

    async fn next_event(&mut self) -> Event {
        let deadline = self.deadline();
        let room = self.room();
        if self.awaiting_arrival.is_none() && self.delivered > self.arrived {
            self.awaiting_arrival =
                self.parts.retention.needs_arrival_check().then_some(self.delivered);
        }
        let awaiting_arrival = self.awaiting_arrival.is_some();
        let dying = self.killed && self.exit.is_some() && !self.closed;
        let dying = dying && self.end_streams_at.is_none();
        let Parts { child, stdin, outputs, limited, .. } = &mut self.parts;
        tokio::select! {
            // Commands come first: a client must not wait behind endless output. Output comes last,
            // since it alone can always be ready.
            biased;
            command = self.mailbox.recv() => Event::Command(command),
            event = subscriber_event(&mut self.subscriber, self.undelivered.front(), awaiting_arrival) => event,
            () = self.guests.moved() => Event::GuestsMoved,
            by = verdict(limited), if limited.is_some() => Event::Limit(by),
            event = child_event(child, self.exit.is_some()), if self.exit.is_none() || dying => event,
            () = stdin.flush(), if stdin.has_queued() => Event::StdinMoved,
            () = wait_until(deadline) => Event::Due,
            (n, bytes) = outputs.read(room), if room > 0 => Event::Output(n, bytes),
        }
    }

    async fn handle(&mut self, event: Event) -> Flow {
        match event {
            Event::Command(Some(command)) => return self.command(command).await,
            // No handle is left.
            Event::Command(None) => return Flow::Forget,
            Event::Deliver(Ok(())) => self.deliver(),
            Event::Deliver(Err(SinkClosed)) => self.detach(),
            Event::Arrived => {
                self.arrived = self.awaiting_arrival.take().unwrap_or(self.arrived);
                if self.backlog.is_none() {
                    self.parts.retention.sent(self.arrived);
                }
            }
            Event::GuestsMoved => self.guests_moved(),
            Event::Output(n, Some(bytes)) => self.publish_output(n, bytes).await,
            Event::Output(_, None) => {}
            // The watchdog kills it.
            Event::Limit(by) => {
                self.cause.get_or_insert(by);
                self.killed = true;
            }
            Event::Exited(code) => self.exited(code).await,
            Event::Gone => {
                self.end_streams_at = Some(Instant::now() + self.config.stream_linger);
            }
            Event::StdinMoved => {
                self.parts.stdin.accept(self.eof());
                self.is_active();
            }
            Event::Due => {
                if self.forget_at.is_some_and(|at| at <= Instant::now()) {
                    return Flow::Forget;
                }
                if self.idle_until().is_some_and(|at| at <= Instant::now()) {
                    match self.room() {
                        // It waits for its client, who does not read.
                        0 => self.is_active(),
                        _ => self.exceeded(EndedBy::Idle),
                    }
                }
                if self.end_streams_at.is_some_and(|at| at <= Instant::now()) && !self.ending {
                    self.ending = true;
                    self.parts.outputs.iter_mut().for_each(Output::end_after_buffered);
                }
                if self.backlog.as_ref().is_some_and(|backlog| backlog.until <= Instant::now()) {
                    self.backlog = None;
                    self.parts.retention.sent(self.arrived);
                }
            }
        }
        Flow::Continue
    }

    async fn command(&mut self, command: Command) -> Flow {
        match command {
            Command::Read(params, reader, reply) => {
                // Acknowledge now, not when the read is answered: it may wait for output that needs the
                // space.
                if self.acknowledges(reader) {
                    self.acknowledge(params.after_seq.unwrap_or(0).min(self.next_seq - 1));
                }
                let wait = Duration::from_millis(params.wait_ms.unwrap_or(0)).min(MAX_READ_WAIT);
                let until = Instant::now() + wait;
                self.waiting.push(WaitingRead { params, reader, until, reply });
            }
            Command::Write(write, reply) => {
                let eof = self.eof();
                if let Some(tap) = &mut self.parts.tap {
                    tap.input(&write.chunk.0);
                }
                self.parts.stdin.write(write, reply, eof);
                self.is_active();
            }
            Command::Signal(signal, reply) => {
                let _ = reply.send(());
                if signal == ProcessSignal::Kill {
                    self.cause.get_or_insert(EndedBy::Signal);
                    self.killed = true;
                    self.parts.child.begin_kill();
                } else if self.exit.is_none() {
                    let foreground = self.parts.terminal.as_ref().and_then(pty::foreground_group);
                    self.parts.child.signal(signal, foreground);
                }
            }
            Command::Terminate(reply) => {
                let running = self.exit.is_none();
                let _ = reply.send(running);
                // Also kill the descendants of an exited process: they may hold its streams.
                self.cause.get_or_insert(EndedBy::Terminate);
                self.killed = true;
                self.parts.child.begin_kill();
            }
            Command::Stop => {
                self.cause.get_or_insert(EndedBy::Server);
                self.parts.child.signal(ProcessSignal::Terminate, None);
            }
            Command::Resize(client, size, fit, reply) => {
                let _ = reply.send(self.resize(client, size, fit));
            }
            Command::Screen(reply) => {
                let _ = reply.send(self.screen());
            }
            Command::Info(reply) => {
                let _ = reply.send(self.info());
            }
            Command::Attach(sink) => self.attach(sink),
            Command::Detach => self.detach(),
            Command::Join(client, sink, paces) => self.join(client, sink, paces),
            Command::Leave(clients) => self.leave(&clients),
            Command::Kill => return Flow::Forget,
        }
        Flow::Continue
    }

    fn attach(&mut self, sink: Box<dyn EventSink>) {
        if matches!(self.subscriber, Subscriber::Detached) {
            self.delivered = self.next_seq - 1;
            self.arrived = self.delivered;
            self.expect_backlog();
        }
        self.subscriber = Subscriber::Attached(sink);
        self.awaiting_arrival = None;
    }

    /// Gives a client that comes back time to read what it missed.
    fn expect_backlog(&mut self) {
        let until = Instant::now() + self.config.resume_grace;
        self.backlog = Some(Backlog { before: self.next_seq, until });
    }

    /// Sent events may be lost, so all retained output stays until a client reads it.
    fn detach(&mut self) {
        self.subscriber = Subscriber::Detached;
        self.awaiting_arrival = None;
        self.undelivered.clear();
        self.undelivered_bytes = 0;
        self.backlog = None;
        self.parts.retention.pin_all();
    }

    /// How many bytes of output may be read from the process now.
    fn room(&self) -> usize {
        let unsent = match (&self.subscriber, self.guests.least_waiting()) {
            (Subscriber::Detached, Some(waiting)) => waiting,
            _ => self.undelivered_bytes,
        };
        match self.failure.is_none() && unsent < self.config.unsent_bytes {
            true => self.parts.retention.room().min(READ_BYTES),
            false => 0,
        }
    }

    async fn publish_output(&mut self, n: usize, bytes: Bytes) {
        let Some(stream) = self.parts.outputs.get(n).map(|output| output.stream) else {
            return;
        };
        if let Some(confined) = &mut self.parts.confined {
            confined.observe_output(&bytes);
        }
        self.is_active();
        self.output_bytes += bytes.len() as u64;
        if let Some(tap) = &mut self.parts.tap {
            tap.output(&bytes);
        }
        if let Some(screen) = &mut self.parts.screen {
            screen.output(&bytes);
        }
        if self.parts.limited.as_mut().is_some_and(|limited| limited.exceeds_output(bytes.len())) {
            self.exceeded(EndedBy::Output);
        }
        let newest = self.next_seq - 1;
        let unseen = matches!(self.subscriber, Subscriber::Detached)
            && self.guests.is_empty()
            && newest > self.seen;
        if unseen && self.parts.retention.extend(newest, stream, &bytes) {
            return;
        }
        if let Err(error) = self.parts.retention.push(self.next_seq, stream, bytes.clone()).await {
            self.failure = Some(format!("cannot store output: {error}"));
            // The output cannot be delivered: close the streams, so that the process gets an error.
            self.parts.outputs.iter_mut().for_each(Output::end);
            return;
        }
        self.publish(EventKind::Output { stream, bytes });
    }

    /// Numbers an event and queues it for the subscriber.
    fn publish(&mut self, kind: EventKind) -> u64 {
        let seq = self.next_seq;
        self.next_seq += 1;
        let detached = matches!(self.subscriber, Subscriber::Detached);
        if detached && self.guests.is_empty() {
            return seq;
        }
        self.seen = seq;
        let event = ProcessEvent { process_id: self.parts.process_id.clone(), seq, kind };
        self.guests.publish(&event, self.config.unsent_bytes);
        if !detached {
            self.undelivered_bytes += event.len();
            self.undelivered.push_back(event);
        }
        seq
    }

    /// Delivers every event that the sink has room for now.
    fn deliver_ready(&mut self) {
        // If the sink is not ready, the loop polls it again with its own waker.
        let mut cx = Context::from_waker(Waker::noop());
        while let (Subscriber::Attached(sink), Some(event)) =
            (&mut self.subscriber, self.undelivered.front())
            && let Poll::Ready(Ok(())) = sink.poll_ready(&mut cx, event)
        {
            self.deliver();
        }
        if !self.guests.is_empty() {
            self.guests.deliver_ready();
            self.guests_moved();
        }
    }

    /// Delivers the event that the sink has room for.
    fn deliver(&mut self) {
        let Subscriber::Attached(sink) = &mut self.subscriber else { return };
        let Some(event) = self.undelivered.pop_front() else { return };
        self.undelivered_bytes -= event.len();
        self.delivered = event.seq;
        sink.send(event);
    }

    /// Handles the exit. Output written before it is in the pipes already, so read that first; but no
    /// more, since a descendant that keeps writing must not delay the exit.
    async fn exited(&mut self, code: i32) {
        self.parts.while_running = None;
        self.drain_available().await;
        let ended_by = self.ended_by(code);
        let mut sandbox_denied = false;
        if code != 0
            && self.parts.confined.is_some()
            && ended_by.is_none_or(|by| by.resource().is_none())
        {
            self.drain_until(Instant::now() + self.config.denial_wait).await;
            let confined = self.parts.confined.as_ref();
            sandbox_denied = confined.is_some_and(|confined| confined.denied(code));
        }
        let usage = limits::usage(self.parts.child.used(), self.parts.limited.as_deref());
        let seq = self.publish(EventKind::Exited { code, sandbox_denied, ended_by, usage });
        self.exit = Some(Exit { seq, code, sandbox_denied, ended_by, usage });
        self.summarize(code, sandbox_denied, ended_by);
    }

    fn summarize(&mut self, code: i32, sandbox_denied: bool, ended_by: Option<EndedBy>) {
        if let Some(on_exit) = self.parts.on_exit.take() {
            let output_bytes = self.output_bytes;
            on_exit.call(&ExitSummary { code, sandbox_denied, ended_by, output_bytes });
        }
    }

    /// Why it ended, if it did not exit by itself.
    fn ended_by(&mut self, code: i32) -> Option<EndedBy> {
        // The processes around a sandboxed program exit with what it was killed by.
        let confined = self.parts.confined.is_some();
        let signalled = self.parts.child.signalled() || confined && code > 128;
        if let Some(limited) = &mut self.parts.limited {
            if let Some(by) = limited.verdict_now() {
                self.cause.get_or_insert(by);
                self.killed = true;
            }
            if self.cause.is_none() {
                self.cause = limited.ended_by_group(signalled, code);
            }
        }
        match self.cause {
            // It may do something about SIGTERM before it exits, and about forks that fail.
            Some(EndedBy::Server) => Some(EndedBy::Server),
            Some(EndedBy::Pids) if code != 0 => Some(EndedBy::Pids),
            cause => signalled.then(|| cause.unwrap_or(EndedBy::Signal)),
        }
    }

    /// The process wrote or received something.
    fn is_active(&mut self) {
        if let Some(limited) = &mut self.parts.limited {
            limited.is_active();
        }
    }

    /// When the process has been idle too long, while that matters.
    fn idle_until(&self) -> Option<Instant> {
        self.parts.limited.as_ref()?.idle_until().filter(|_| !self.killed && !self.closed)
    }

    /// Kills the process and its descendants because of a limit.
    fn exceeded(&mut self, limit: EndedBy) {
        self.cause.get_or_insert(limit);
        self.killed = true;
        self.parts.child.begin_kill();
    }

    async fn drain_available(&mut self) {
        for n in self.parts.outputs.order() {
            let mut available = self.parts.outputs.get(n).map_or(0, Output::available);
            while available > 0 && self.room() > 0 {
                let room = self.room();
                let output = self.parts.outputs.get_mut(n);
                let Some(bytes) = output.and_then(|output| output.read_now(room)) else { break };
                available = available.saturating_sub(bytes.len() as u64);
                self.publish_output(n, bytes).await;
            }
        }
    }

    /// Reads output until all streams have ended, or until the deadline.
    async fn drain_until(&mut self, deadline: Instant) {
        while self.room() > 0 && self.parts.outputs.iter().any(Output::is_open) {
            let room = self.room();
            let (n, bytes) = tokio::select! {
                output = self.parts.outputs.read(room) => output,
                () = sleep_until(deadline) => break,
            };
            if let Some(bytes) = bytes {
                self.publish_output(n, bytes).await;
            }
        }
    }

    /// Publishes the last event once the process has exited and all streams have ended.
    fn close_if_done(&mut self) {
        let open = self.parts.outputs.iter().any(Output::is_open);
        if self.closed || self.exit.is_none() || open {
            return;
        }
        self.closed = true;
        self.publish(EventKind::Closed);
        // All its output is recorded.
        if let (Some(mut tap), Some(exit)) = (self.parts.tap.take(), &self.exit) {
            tap.exited(exit.code);
        }
        self.parts.child.release();
        self.parts.stdin.close();
        self.parts.terminal = None;
        self.clean_up();
    }

    /// Removes what a killed sandbox may have left on the host. A sandbox that was not killed has
    /// cleaned up itself.
    fn clean_up(&mut self) {
        let killed = self.exit.as_ref().is_none_or(|exit| exit.code > 128);
        if let Some(confined) = self.parts.confined.take().filter(|_| killed) {
            self.cleaning = Some(confined.clean_up());
        }
    }

    /// Forgets a closed process some time after all events were delivered; never while it is detached,
    /// since a client may reattach.
    fn schedule_forget(&mut self) {
        let all_delivered =
            matches!(self.subscriber, Subscriber::Attached(_)) && self.undelivered.is_empty();
        if !self.closed || !all_delivered {
            self.forget_at = None;
        } else if self.forget_at.is_none() {
            self.forget_at = Some(Instant::now() + self.config.closed_linger);
        }
    }

    /// Answers every read that has something to report, or whose wait is over.
    async fn answer_ready_reads(&mut self) {
        let mut at = 0;
        while at < self.waiting.len() {
            let read = &self.waiting[at];
            if read.reply.is_closed() {
                self.waiting.swap_remove(at);
            } else if self.has_news(&read.params) || read.until <= Instant::now() {
                let read = self.waiting.swap_remove(at);
                let response = self.read(&read.params, read.reader).await;
                let _ = read.reply.send(response);
            } else {
                at += 1;
            }
        }
    }

    fn has_news(&self, params: &ReadParams) -> bool {
        let after = params.after_seq.unwrap_or(0);
        self.parts.retention.has_after(after)
            || self.closed
            || self.failure.is_some()
            || self.exit.as_ref().is_some_and(|exit| exit.seq > after)
    }

    async fn read(&mut self, params: &ReadParams, reader: Reader) -> ReadResponse {
        let after = params.after_seq.unwrap_or(0);
        let limit = self.config.max_read_bytes;
        let max_bytes = params.max_bytes.unwrap_or(limit).min(limit);
        let found = match self.parts.retention.after(after, max_bytes).await {
            Ok(found) => found,
            Err(error) => {
                self.failure = Some(format!("cannot read stored output: {error}"));
                super::retention::ReadResult {
                    chunks: Vec::new(),
                    truncated: false,
                    dropped_bytes: 0,
                }
            }
        };
        let last = found.chunks.last().map(|chunk| chunk.seq);
        self.seen = self.seen.max(last.unwrap_or(0));
        // The response may be lost, but what the client read before has arrived.
        if self.acknowledges(reader) {
            self.acknowledge(after.min(self.next_seq - 1));
        }
        let caught_up = !found.truncated && self.acknowledges(reader);
        if let Some(backlog) = self.backlog.as_mut().filter(|_| caught_up) {
            // All of it has been read: a client that now only listens must not block its process.
            backlog.until = backlog.until.min(Instant::now() + self.config.resume_read_grace);
        }
        let next_seq = match last {
            Some(last) if found.truncated || params.max_bytes.is_some() => last + 1,
            _ => self.next_seq,
        };
        ReadResponse {
            chunks: found.chunks,
            next_seq,
            exited: self.exit.is_some(),
            exit_code: self.exit.as_ref().map(|exit| exit.code),
            closed: self.closed,
            failure: self.failure.clone(),
            sandbox_denied: self.exit.as_ref().is_some_and(|exit| exit.sandbox_denied),
            dropped_bytes: found.dropped_bytes,
            ended_by: self.exit.as_ref().and_then(|exit| exit.ended_by),
            usage: self.exit.as_ref().and_then(|exit| exit.usage),
        }
    }

    fn info(&self) -> ProcessInfo {
        let parts = &self.parts;
        ProcessInfo {
            process_id: parts.process_id.clone(),
            argv: parts.argv.clone(),
            cwd: parts.cwd.clone(),
            tty: parts.outputs.iter().any(|output| output.stream == OutputStream::Pty),
            pid: Some(parts.child.pid().as_raw_nonzero().get().cast_unsigned()),
            started_at_ms: self.started_at_ms,
            exited: self.exit.is_some(),
            exit_code: self.exit.as_ref().map(|exit| exit.code),
            closed: self.closed,
            next_seq: self.next_seq,
            limits: parts.limited.as_ref().and_then(|limited| limited.applied()),
            ended_by: self.exit.as_ref().and_then(|exit| exit.ended_by),
            usage: self.exit.as_ref().and_then(|exit| exit.usage),
        }
    }

    fn eof(&self) -> Option<u8> {
        self.parts.terminal.as_ref().and_then(|master| pty::eof_character(master).ok())
    }

    fn deadline(&self) -> Option<Instant> {
        let waits = self.waiting.iter().map(|read| read.until);
        let ending = self.end_streams_at.filter(|_| !self.ending && !self.closed);
        waits
            .chain(self.forget_at)
            .chain(ending)
            .chain(self.idle_until())
            .chain(self.backlog.as_ref().map(|b| b.until))
            .min()
    }

    /// Kills all descendants and cleans up.
    ///
    /// The mailbox stays open until that is done, because callers wait for the process by waiting for
    /// its mailbox. Commands that arrive meanwhile get the reply of an unknown process: their reply
    /// channels are dropped.
    async fn end(mut self: Box<Self>) {
        if !self.closed {
            self.parts.child.kill().await;
            if self.exit.is_none() {
                let code = self.parts.child.wait_exit().await;
                self.summarize(code, false, Some(EndedBy::Server));
            }
            self.parts.child.release();
            self.clean_up();
        }
        if let Some(cleaning) = self.cleaning {
            let _ = cleaning.await;
        }
    }
}

/// Waits for the verdict of the watchdog.
async fn verdict(limited: &mut Option<Box<Limited>>) -> EndedBy {
    match limited {
        Some(limited) => limited.verdict().await,
        None => std::future::pending().await,
    }
}

/// Waits for the exit or, after that, until the last descendant has exited.
async fn child_event(child: &mut Child, exit_seen: bool) -> Event {
    if exit_seen {
        child.wait_gone().await;
        return Event::Gone;
    }
    Event::Exited(child.wait_exit().await)
}

/// Resolves when the next event can be sent, or when the polled event has arrived; never without a
/// subscriber.
async fn subscriber_event(
    subscriber: &mut Subscriber,
    event: Option<&ProcessEvent>,
    awaiting_arrival: bool,
) -> Event {
    let Subscriber::Attached(sink) = subscriber else { return std::future::pending().await };
    poll_fn(|cx| {
        if awaiting_arrival && sink.poll_arrived(cx).is_ready() {
            return Poll::Ready(Event::Arrived);
        }
        match event {
            Some(event) => sink.poll_ready(cx, event).map(Event::Deliver),
            None => Poll::Pending,
        }
    })
    .await
}

async fn wait_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
