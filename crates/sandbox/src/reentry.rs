//! The way back in: the server's own executable, spawned again as the sandbox.
//!
//! Invariant: recognized before anything else happens in `main`, so that the process that becomes the
//! target has one thread, no runtime and nothing open but what it was given.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::apply;

/// The hidden first argument.
pub const WORD: &str = "__linux-sandbox";

/// The name by which the executable is also recognized.
pub const NAME: &str = "codex-linux-sandbox";

/// How a sandbox exits that says why it runs no program
/// ([`Command::Refusal`](crate::Command::Refusal)).
pub const REFUSED_CODE: i32 = 101;

/// The last argument of a sandbox whose first process is signalled alone, not with its group.
pub(crate) const ALONE: &str = "alone";

/// The last argument of a process that waits to be needed as a sandbox.
pub(crate) const WAIT: &str = "wait";

/// How a sandbox was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// With everything it needs, by a server.
    Given,
    /// The same, in the foreground of a terminal.
    Alone,
    /// Ahead of time.
    Waiting,
}

/// The number of the plan's memory file.
pub(crate) const PLAN: i32 = 3;
/// The number of the status pipe.
pub(crate) const STATUS: i32 = 4;
/// The number of the pipe whose end means that the server is gone.
pub(crate) const LIFELINE: i32 = 5;
/// The number of the empty network.
pub(crate) const NETWORK: i32 = 6;
/// The number of the user namespace it belongs to.
pub(crate) const USER: i32 = 7;
/// The number of the socket of a process that waits; it has none of the others yet.
pub(crate) const SPARE: i32 = 3;

pub use crate::apply::proof::mounts_stand;

/// A function that can run inside a sandbox in place of a program. Its standard streams are those the
/// server gave; what it returns is the exit code.
#[derive(Debug, Clone, Copy)]
pub struct Helper {
    /// Named so in [`Command::Helper`](crate::Command::Helper).
    pub name: &'static str,
    /// Runs with one thread, inside.
    pub run: fn() -> i32,
}

/// Whether these are the arguments of a process that was started as a sandbox.
pub fn is_reentry<'a>(mut arguments: impl Iterator<Item = &'a [u8]>) -> bool {
    let name = arguments.next().unwrap_or_default();
    let by_name = Path::new(OsStr::from_bytes(name)).file_name() == Some(OsStr::new(NAME));
    by_name || arguments.next() == Some(WORD.as_bytes())
}

/// Does not return if this process was started as a sandbox. To be called first thing in `main`,
/// before any thread or runtime.
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
    let by_word = args.next().is_some_and(|word| word == WORD);
    if by_name || by_word {
        let mode = match args.next() {
            Some(word) if word == ALONE => Mode::Alone,
            Some(word) if word == WAIT => Mode::Waiting,
            _ => Mode::Given,
        };
        // Executed by a descriptor, it would be called by that number.
        let _ = rustix::thread::set_name(c"codex-sandbox");
        apply::main(helpers, mode)
    }
}
