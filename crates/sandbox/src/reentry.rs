//! Re-entry: the server's own executable, spawned again as the sandbox.
//!
//! Invariant: re-entry is recognized before anything else happens in `main`, so the process that
//! becomes the target has one thread, no runtime and only the descriptors that it was given.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::apply;

/// The hidden first argument.
pub const ARGUMENT: &str = "__linux-sandbox";

/// The program name by which re-entry is also recognized.
pub const NAME: &str = "codex-linux-sandbox";

/// Exit code of a sandbox that runs no program and prints the reason
/// ([`Command::Refusal`](crate::Command::Refusal)).
pub const REFUSED_CODE: i32 = 101;

/// The last argument of a sandbox in the foreground: signals go to its first process alone, not to its
/// group.
pub(crate) const FOREGROUND: &str = "alone";

/// The last argument of a spare.
pub(crate) const SPARE_ARGUMENT: &str = "wait";

/// How a sandbox was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// By a server, with everything it needs.
    Spawned,
    /// By a command line program, in the foreground of a terminal.
    Foreground,
    /// As a spare.
    Spare,
}

/// Descriptor number of the plan's memory file.
pub(crate) const PLAN: i32 = 3;
/// Descriptor number of the status pipe.
pub(crate) const STATUS: i32 = 4;
/// Descriptor number of the lifeline, a pipe that closes when the server is gone.
pub(crate) const LIFELINE: i32 = 5;
/// Descriptor number of the empty network namespace.
pub(crate) const NETWORK: i32 = 6;
/// Descriptor number of the socket that a managed network is handed over on. A sandbox with one is
/// passed no empty network.
pub(crate) const HANDOVER: i32 = 6;
/// Descriptor number of the user namespace that owns the empty network.
pub(crate) const USER: i32 = 7;
/// Number of the descriptor that a program inherits besides the standard streams, if it inherits one
/// ([`Request::inheriting`](crate::Request::inheriting)).
pub const INHERITED: i32 = 3;
/// Descriptor number of a spare's socket; a spare has none of the others yet.
pub(crate) const SPARE: i32 = 3;

pub use crate::apply::proof::mounts_intact;

/// A function that runs inside a sandbox in place of a program, with the streams that the server
/// passed. Its result is the exit code.
#[derive(Debug, Clone, Copy)]
pub struct Helper {
    /// Its name in [`Command::Helper`](crate::Command::Helper).
    pub name: &'static str,
    /// The function; called inside the sandbox, with one thread.
    pub run: fn() -> i32,
}

/// Whether these are the arguments of a re-entered process.
pub fn is_reentry<'a>(mut arguments: impl Iterator<Item = &'a [u8]>) -> bool {
    let name = arguments.next().unwrap_or_default();
    let by_name = Path::new(OsStr::from_bytes(name)).file_name() == Some(OsStr::new(NAME));
    by_name || arguments.next() == Some(ARGUMENT.as_bytes())
}

/// Never returns if this process was started as a sandbox. Call it first thing in `main`, before any
/// thread or runtime.
///
/// ```no_run
/// // in `main`:
/// codex_linux_sandbox::reentry::main_if_reentered(&[]);
/// // and now the usual work
/// ```
pub fn main_if_reentered(helpers: &[Helper]) {
    let mut args = std::env::args_os();
    let name = args.next().unwrap_or_default();
    let by_name = Path::new(&name).file_name() == Some(OsStr::from_bytes(NAME.as_bytes()));
    let by_argument = args.next().is_some_and(|argument| argument == ARGUMENT);
    if by_name || by_argument {
        let mode = match args.next() {
            Some(argument) if argument == FOREGROUND => Mode::Foreground,
            Some(argument) if argument == SPARE_ARGUMENT => Mode::Spare,
            _ => Mode::Spawned,
        };
        // Executed by descriptor, the process would be named after that number.
        let _ = rustix::thread::set_name(c"codex-sandbox");
        apply::main(helpers, mode)
    }
}
