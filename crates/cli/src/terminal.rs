//! The local terminal: raw while it shows a remote one, and restored afterwards.
//!
//! Invariant: the terminal is restored however this program ends. After a normal exit, an error, a signal
//! or a panic, this program restores it. After `kill -9`, a guard does: this executable again, in another
//! session so that no signal of the terminal reaches it, with the read end of a pipe. When the pipe closes
//! without a disarm message, the guard restores the terminal and exits. (If guard and program are killed
//! together, nothing does.)

use std::cell::{Cell, RefCell};
use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::AsFd;
use std::process::{ChildStdin, Command, Stdio};

use anyhow::{Context, bail};
use rustix::stdio::{stdin, stdout};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

use crate::screen_modes::ScreenModes;

/// The argument that makes this executable a guard.
const GUARD_ARGUMENT: &str = "__terminal-guard";
/// A message to the guard is a length and the sequence that resets the current modes. This length means
/// that there is nothing to restore.
const DISARM: u16 = u16::MAX;

/// The terminal on stdin.
#[derive(Debug)]
pub(crate) struct Terminal {
    saved: Termios,
    raw: Cell<bool>,
    modes: RefCell<ScreenModes>,
    guard: RefCell<Option<ChildStdin>>,
}

/// Raw until dropped.
#[derive(Debug)]
pub(crate) struct RawMode<'a>(&'a Terminal);

impl Terminal {
    /// Opens the terminal on stdin and starts the guard. Call this before any other child is started: a
    /// server in this process treats every child as its own.
    pub(crate) fn open(flag: &str) -> anyhow::Result<Self> {
        if !io::stdin().is_terminal() {
            bail!(
                "{flag} needs a terminal, but stdin is not one; run it in a terminal, or use `codex \
                 run` without -t"
            );
        }
        let saved = tcgetattr(stdin()).context("cannot read the settings of the terminal")?;
        let guard = start_guard().inspect_err(|error| {
            tracing::debug!(%error, "cannot start the terminal guard");
        });
        Ok(Self {
            saved,
            raw: Cell::new(false),
            modes: RefCell::default(),
            guard: RefCell::new(guard.ok()),
        })
    }

    /// Puts the terminal into raw mode until the result is dropped.
    pub(crate) fn raw(&self) -> anyhow::Result<RawMode<'_>> {
        let mut raw = self.saved.clone();
        raw.make_raw();
        tcsetattr(stdin(), OptionalActions::Now, &raw)
            .context("cannot put the terminal into raw mode")?;
        self.raw.set(true);
        Ok(RawMode(self))
    }

    /// Tracks the modes that this output sets, to reset them later.
    pub(crate) fn watch(&self, output: &[u8]) {
        let mut modes = self.modes.borrow_mut();
        if modes.watch(output) {
            self.update_guard(&modes.reset());
        }
    }

    /// Whether the output has switched to the alternate screen.
    pub(crate) fn is_alternate(&self) -> bool {
        self.modes.borrow().is_alternate()
    }

    fn update_guard(&self, reset: &[u8]) {
        let mut guard = self.guard.borrow_mut();
        let Some(pipe) = guard.as_mut() else { return };
        let len = u16::try_from(reset.len()).unwrap_or(0);
        let mut message = len.to_le_bytes().to_vec();
        message.extend_from_slice(&reset[..usize::from(len)]);
        if pipe.write_all(&message).is_err() {
            *guard = None;
        }
    }

    fn restore(&self) {
        if !self.raw.replace(false) {
            return;
        }
        let mut modes = self.modes.borrow_mut();
        let reset = modes.reset();
        if !reset.is_empty() {
            let _ = rustix::io::write(stdout(), &reset);
            *modes = ScreenModes::default();
            self.update_guard(&[]);
        }
        // `Now` rather than after pending output, which might never drain.
        let _ = tcsetattr(stdin(), OptionalActions::Now, &self.saved);
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.restore();
        if let Some(mut pipe) = self.guard.borrow_mut().take() {
            let _ = pipe.write_all(&DISARM.to_le_bytes());
        }
    }
}

impl Drop for RawMode<'_> {
    fn drop(&mut self) {
        self.0.restore();
    }
}

/// Rows and columns of the terminal on stdin or stdout.
pub(crate) fn size() -> Option<(u16, u16)> {
    let size = tcgetwinsize(stdin()).or_else(|_| tcgetwinsize(stdout())).ok()?;
    (size.ws_row > 0 && size.ws_col > 0).then_some((size.ws_row, size.ws_col))
}

/// Runs the guard and exits, if this process was started as one.
pub(crate) fn main_if_guard() {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_none_or(|word| word != GUARD_ARGUMENT) {
        return;
    }
    if arguments.next().is_some() {
        // Starts the guard as a grandchild, so that a server in this program does not reap or kill it.
        let _ =
            std::env::current_exe().and_then(|own| Command::new(own).arg(GUARD_ARGUMENT).spawn());
    } else {
        guard();
    }
    std::process::exit(0);
}

fn start_guard() -> io::Result<ChildStdin> {
    let mut child = Command::new(std::env::current_exe()?)
        .args([GUARD_ARGUMENT, "start"])
        .stdin(Stdio::piped())
        .stdout(stdin().try_clone_to_owned()?)
        .stderr(Stdio::piped())
        .spawn()?;
    let pipes = (child.stdin.take(), child.stderr.take());
    child.wait()?;
    let (Some(pipe), Some(mut ready)) = pipes else { return Err(io::ErrorKind::Other.into()) };
    // Wait until the guard has read the terminal's settings.
    ready.read_exact(&mut [0])?;
    Ok(pipe)
}

/// The guard: the pipe is stdin, the terminal is stdout, and stderr reports that it is ready.
fn guard() {
    let _ = rustix::process::setsid();
    let Ok(saved) = tcgetattr(io::stdout()) else { return };
    if io::stderr().write_all(b"r").is_err() {
        return;
    }
    let mut pipe = io::stdin().lock();
    let mut reset = Vec::new();
    loop {
        let mut len = [0; 2];
        if pipe.read_exact(&mut len).is_err() {
            break;
        }
        match u16::from_le_bytes(len) {
            DISARM => return,
            len => reset.resize(usize::from(len), 0),
        }
        if pipe.read_exact(&mut reset).is_err() {
            break;
        }
    }
    let _ = rustix::io::write(io::stdout().as_fd(), &reset);
    let _ = tcsetattr(io::stdout(), OptionalActions::Now, &saved);
}
