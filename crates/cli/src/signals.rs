//! Signals that this program forwards to the process that it runs.

use codex_exec_server::ProcessSignal;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::Mutex;

/// Receives the signals to forward. If several tasks wait, one gets the next signal.
#[derive(Debug)]
pub(crate) struct Signals(Mutex<Kinds>);

#[derive(Debug)]
struct Kinds {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
    quit: Signal,
    user1: Signal,
    user2: Signal,
    resized: Signal,
}

/// A received signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SignalEvent {
    /// A signal to forward.
    Forward(ProcessSignal),
    /// The local terminal was resized.
    Resized,
}

impl Signals {
    /// Installs the handlers.
    pub(crate) fn listen() -> std::io::Result<Self> {
        Ok(Self(Mutex::new(Kinds {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: signal(SignalKind::hangup())?,
            quit: signal(SignalKind::quit())?,
            user1: signal(SignalKind::user_defined1())?,
            user2: signal(SignalKind::user_defined2())?,
            resized: signal(SignalKind::window_change())?,
        })))
    }

    pub(crate) async fn next(&self) -> SignalEvent {
        let mut kinds = self.0.lock().await;
        let kinds = &mut *kinds;
        tokio::select! {
            Some(()) = kinds.interrupt.recv() => SignalEvent::Forward(ProcessSignal::Interrupt),
            Some(()) = kinds.terminate.recv() => SignalEvent::Forward(ProcessSignal::Terminate),
            Some(()) = kinds.hangup.recv() => SignalEvent::Forward(ProcessSignal::Hangup),
            Some(()) = kinds.quit.recv() => SignalEvent::Forward(ProcessSignal::Quit),
            Some(()) = kinds.user1.recv() => SignalEvent::Forward(ProcessSignal::User1),
            Some(()) = kinds.user2.recv() => SignalEvent::Forward(ProcessSignal::User2),
            Some(()) = kinds.resized.recv() => SignalEvent::Resized,
            else => std::future::pending().await,
        }
    }

    /// Resolves on the first signal that ends a program, with the exit code for it.
    pub(crate) async fn exit_code(&self) -> i32 {
        loop {
            if let SignalEvent::Forward(signal) = self.next().await {
                return exit_code(signal);
            }
        }
    }
}

/// 128 + the signal's number.
pub(crate) fn exit_code(signal: ProcessSignal) -> i32 {
    128 + match signal {
        ProcessSignal::Hangup => 1,
        ProcessSignal::Interrupt => 2,
        ProcessSignal::Quit => 3,
        ProcessSignal::Kill => 9,
        ProcessSignal::User1 => 10,
        ProcessSignal::User2 => 12,
        ProcessSignal::Terminate => 15,
        ProcessSignal::Continue => 18,
        ProcessSignal::Stop => 19,
    }
}
