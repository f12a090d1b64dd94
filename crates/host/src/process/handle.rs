//! The way to a process: commands into its owner's mailbox, answers back.
//!
//! Every method takes effect in the order of the calls, and returns before that: the answer is a
//! future of its own. So a caller keeps the order of its requests and waits for none of them.

use codex_exec_server_protocol::process::{
    ProcessInfo, ProcessSignal, ReadParams, ReadResponse, TerminalSize, WriteParams, WriteStatus,
};
use tokio::sync::{mpsc, oneshot};

use super::event::EventSink;

/// A process, from the moment its start was asked for until it is forgotten.
#[derive(Debug, Clone)]
pub struct ProcessHandle {
    pub(super) mailbox: mpsc::UnboundedSender<Command>,
}

/// An answer to come; an error means that the process is unknown (its start failed, or it was
/// forgotten).
pub type Reply<T> = oneshot::Receiver<T>;

/// What the owner of a process is told.
pub(super) enum Command {
    Read(ReadParams, oneshot::Sender<ReadResponse>),
    Write(WriteParams, oneshot::Sender<WriteStatus>),
    Signal(ProcessSignal, oneshot::Sender<()>),
    Terminate(oneshot::Sender<bool>),
    Resize(TerminalSize, oneshot::Sender<Result<(), NoTerminal>>),
    Info(oneshot::Sender<ProcessInfo>),
    Attach(Box<dyn EventSink>),
    Detach,
    Kill,
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
            Self::Resize(..) => "Resize",
            Self::Info(..) => "Info",
            Self::Attach(..) => "Attach",
            Self::Detach => "Detach",
            Self::Kill => "Kill",
        })
    }
}

impl ProcessHandle {
    fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Reply<T> {
        let (reply, answer) = oneshot::channel();
        // An owner that has gone drops the command, and with it the reply.
        let _ = self.mailbox.send(command(reply));
        answer
    }

    /// Output, now or as soon as there is something to tell.
    pub fn read(&self, params: ReadParams) -> Reply<ReadResponse> {
        self.ask(|reply| Command::Read(params, reply))
    }

    /// Bytes for stdin; answered once they are accepted.
    pub fn write(&self, params: WriteParams) -> Reply<WriteStatus> {
        self.ask(|reply| Command::Write(params, reply))
    }

    /// A signal to the process group.
    pub fn signal(&self, signal: ProcessSignal) -> Reply<()> {
        self.ask(|reply| Command::Signal(signal, reply))
    }

    /// SIGKILL to the group and every descendant; answers whether it was running.
    pub fn terminate(&self) -> Reply<bool> {
        self.ask(Command::Terminate)
    }

    /// A new size for the terminal.
    pub fn resize(&self, size: TerminalSize) -> Reply<Result<(), NoTerminal>> {
        self.ask(|reply| Command::Resize(size, reply))
    }

    /// A line for `process/list`.
    pub fn info(&self) -> Reply<ProcessInfo> {
        self.ask(Command::Info)
    }

    /// Events go to this sink from now on. The first sink of a process gets all of them, a later
    /// one those that are yet to come: what happened in between is there to be read.
    pub fn attach(&self, sink: Box<dyn EventSink>) {
        let _ = self.mailbox.send(Command::Attach(sink));
    }

    /// Nobody listens any more; output is kept for somebody who comes back.
    pub fn detach(&self) {
        let _ = self.mailbox.send(Command::Detach);
    }

    /// Kills everything of the process and forgets it.
    pub fn kill(&self) {
        let _ = self.mailbox.send(Command::Kill);
    }

    /// Whether the process was forgotten.
    pub fn is_gone(&self) -> bool {
        self.mailbox.is_closed()
    }

    /// Resolves when the process was forgotten.
    pub async fn gone(&self) {
        self.mailbox.closed().await;
    }
}
