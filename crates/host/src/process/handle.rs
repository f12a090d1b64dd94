//! A handle to a process: sends commands to its owner's mailbox and receives replies.
//!
//! Commands take effect in the order of the calls. A method returns at once; the reply is a separate
//! future. So a caller keeps its requests in order without waiting for any of them.

use codex_exec_server_protocol::process::{
    Fit, ProcessInfo, ProcessSignal, ReadParams, ReadResponse, ScreenResponse, TerminalSize,
    WriteParams, WriteStatus,
};
use tokio::sync::{mpsc, oneshot};

use super::event::EventSink;
use super::guests::ClientId;

/// A handle to a process, from its start request until the host forgets it.
#[derive(Debug, Clone)]
pub struct ProcessHandle {
    pub(super) mailbox: mpsc::UnboundedSender<Command>,
}

/// A pending reply; an error means that the process is unknown (its start failed, or the host has
/// forgotten it).
pub type Reply<T> = oneshot::Receiver<T>;

/// A command to the owner of a process.
pub(super) enum Command {
    Read(ReadParams, Reader, oneshot::Sender<ReadResponse>),
    Write(WriteParams, oneshot::Sender<WriteStatus>),
    Signal(ProcessSignal, oneshot::Sender<()>),
    Terminate(oneshot::Sender<bool>),
    Stop,
    Resize(ClientId, TerminalSize, Fit, oneshot::Sender<Result<TerminalSize, NoTerminal>>),
    Screen(oneshot::Sender<Result<ScreenResponse, NoTerminal>>),
    Info(oneshot::Sender<ProcessInfo>),
    Attach(Box<dyn EventSink>),
    Detach,
    Join(ClientId, Box<dyn EventSink>, bool),
    Leave(Vec<ClientId>),
    Kill,
}

/// Who reads, which decides whether a read acknowledges what came before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reader {
    /// The client that the process waits for.
    Subscriber,
    /// Another client. Its reads acknowledge only while there is no subscriber and it has joined.
    Guest(ClientId),
}

/// The process has no terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the process has no terminal")]
pub struct NoTerminal;

impl std::fmt::Debug for Command {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Read(..) => "Read",
            Self::Write(..) => "Write",
            Self::Signal(..) => "Signal",
            Self::Terminate(..) => "Terminate",
            Self::Stop => "Stop",
            Self::Resize(..) => "Resize",
            Self::Screen(..) => "Screen",
            Self::Info(..) => "Info",
            Self::Attach(..) => "Attach",
            Self::Detach => "Detach",
            Self::Join(..) => "Join",
            Self::Leave(..) => "Leave",
            Self::Kill => "Kill",
        })
    }
}

impl ProcessHandle {
    fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Reply<T> {
        let (reply, answer) = oneshot::channel();
        // If the owner is gone, `send` drops the command and its reply.
        let _ = self.mailbox.send(command(reply));
        answer
    }

    /// Reads output, now or as soon as there is some.
    pub fn read(&self, params: ReadParams, reader: Reader) -> Reply<ReadResponse> {
        self.ask(|reply| Command::Read(params, reader, reply))
    }

    /// Writes to stdin; replies once the bytes are accepted.
    pub fn write(&self, params: WriteParams) -> Reply<WriteStatus> {
        self.ask(|reply| Command::Write(params, reply))
    }

    /// Signals the process group.
    pub fn signal(&self, signal: ProcessSignal) -> Reply<()> {
        self.ask(|reply| Command::Signal(signal, reply))
    }

    /// Sends SIGKILL to the group and every descendant; replies whether the process was running.
    pub fn terminate(&self) -> Reply<bool> {
        self.ask(Command::Terminate)
    }

    /// Sends SIGTERM because the server stops.
    pub fn stop(&self) {
        let _ = self.mailbox.send(Command::Stop);
    }

    /// Sets the size of a client's window; replies with the size of the terminal.
    pub fn resize(
        &self,
        client: ClientId,
        size: TerminalSize,
        fit: Fit,
    ) -> Reply<Result<TerminalSize, NoTerminal>> {
        self.ask(|reply| Command::Resize(client, size, fit, reply))
    }

    /// What repaints the terminal.
    pub fn screen(&self) -> Reply<Result<ScreenResponse, NoTerminal>> {
        self.ask(Command::Screen)
    }

    /// An entry of `process/list`.
    pub fn info(&self) -> Reply<ProcessInfo> {
        self.ask(Command::Info)
    }

    /// Sends events to this sink from now on. The first sink of a process gets all events; a later one
    /// gets new events only, and earlier output is available through `read`.
    pub fn attach(&self, sink: Box<dyn EventSink>) {
        let _ = self.mailbox.send(Command::Attach(sink));
    }

    /// Detaches the sink; output is retained for a later one.
    pub fn detach(&self) {
        let _ = self.mailbox.send(Command::Detach);
    }

    /// Sends new events to a guest, too. While the process has no subscriber, it waits for guests that `pace` it,
    /// and drops output that they have received as if a subscriber had; other guests change nothing.
    pub fn join(&self, client: ClientId, sink: Box<dyn EventSink>, pace: bool) {
        let _ = self.mailbox.send(Command::Join(client, sink, pace));
    }

    /// Forgets clients at once: their events, and the sizes of their windows.
    pub fn leave(&self, clients: Vec<ClientId>) {
        let _ = self.mailbox.send(Command::Leave(clients));
    }

    /// Kills the process with its descendants and forgets it.
    pub fn kill(&self) {
        let _ = self.mailbox.send(Command::Kill);
    }

    /// Whether the host has forgotten the process.
    pub fn is_gone(&self) -> bool {
        self.mailbox.is_closed()
    }

    /// Waits until the host has forgotten the process.
    pub async fn gone(&self) {
        self.mailbox.closed().await;
    }
}
