//! The local terminal: raw while a remote one is shown in it, and sane afterwards.
//!
//! Invariant: whoever made it raw puts it back, whatever ends this program. A normal end, an error,
//! a signal and a panic restore it on the way out. For an end without a way out (`kill -9`) there is
//! a guard: this executable again, in a session of its own so that no signal of the terminal reaches
//! it, which holds the read end of a pipe. When the pipe ends without a word of farewell, the guard
//! restores the terminal and exits. (Only if guard and program are killed together, nothing does.)

use std::cell::{Cell, RefCell};
use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::AsFd;
use std::process::{ChildStdin, Command, Stdio};

use anyhow::{Context, bail};
use rustix::stdio::{stdin, stdout};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

use crate::screen_modes::ScreenModes;

/// The word that makes this executable a guard.
const GUARD_ARGUMENT: &str = "__terminal-guard";
/// A message to the guard: its length, then what would take back the modes in force.
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
    /// The terminal, with a guard beside it. To be made before any other child: a server in this
    /// process takes all children for its own.
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

    /// Passes every key on, until the answer is dropped.
    pub(crate) fn raw(&self) -> anyhow::Result<RawMode<'_>> {
        let mut raw = self.saved.clone();
        raw.make_raw();
        tcsetattr(stdin(), OptionalActions::Now, &raw)
            .context("cannot put the terminal into raw mode")?;
        self.raw.set(true);
        Ok(RawMode(self))
    }

    /// Looks at what is about to be shown, to know what has to be taken back in the end.
    pub(crate) fn watch(&self, output: &[u8]) {
        let mut modes = self.modes.borrow_mut();
        if modes.watch(output) {
            self.update_guard(&modes.reset());
        }
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
        // Not after what is still to be shown: that could take for ever.
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

/// Rows and columns, of whichever of our streams is a terminal.
pub(crate) fn size() -> Option<(u16, u16)> {
    let size = tcgetwinsize(stdin()).or_else(|_| tcgetwinsize(stdout())).ok()?;
    (size.ws_row > 0 && size.ws_col > 0).then_some((size.ws_row, size.ws_col))
}

/// Becomes the guard and never returns, if that is what this process was started as.
pub(crate) fn main_if_guard() {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_none_or(|word| word != GUARD_ARGUMENT) {
        return;
    }
    if arguments.next().is_some() {
        // Once removed, so that it is nobody's child that could be reaped or killed as one.
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
    // It has to know the terminal as it is now.
    ready.read_exact(&mut [0])?;
    Ok(pipe)
}

/// The pipe is stdin, the terminal is stdout, and stderr is told when it is ready.
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
