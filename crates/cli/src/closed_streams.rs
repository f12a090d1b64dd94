//! Closed stdout and stderr (`codex … >&-`).
//!
//! The runtime of Rust opens `/dev/null` in the place of a standard stream that is closed when a program
//! starts, so output to it would be lost without an error. This module looks before the runtime does, and
//! puts a descriptor there that no write succeeds on.

use std::io;
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::fd::OwnedFd;
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::Errno;

/// Bit N is set if descriptor N was closed when the program started.
static CLOSED: AtomicU8 = AtomicU8::new(0);

/// The C runtime calls this before `main`, and before Rust's runtime.
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = note_closed_streams;

extern "C" fn note_closed_streams() {
    for descriptor in [libc::STDOUT_FILENO, libc::STDERR_FILENO] {
        // SAFETY: takes no pointer; a descriptor that is not open is an error, which is the question. The C
        // library is set up before it calls this.
        let flags = unsafe { libc::fcntl(descriptor, libc::F_GETFD) };
        if flags == -1 {
            CLOSED.fetch_or(1 << descriptor, Ordering::Relaxed);
        }
    }
}

fn was_closed(descriptor: i32) -> bool {
    CLOSED.load(Ordering::Relaxed) & (1 << descriptor) != 0
}

/// Makes writes to a stream fail that was closed when the program started.
pub(crate) fn fail_writes() {
    let replaced = |descriptor: i32, replace: fn(&OwnedFd) -> rustix::io::Result<()>| {
        !was_closed(descriptor) || unwritable().is_ok_and(|fd| replace(&fd).is_ok())
    };
    let stdout = replaced(libc::STDOUT_FILENO, |fd| rustix::stdio::dup2_stdout(fd));
    let stderr = replaced(libc::STDERR_FILENO, |fd| rustix::stdio::dup2_stderr(fd));
    if !stdout || !stderr {
        tracing::debug!("output to a closed stream will be lost");
    }
}

/// A descriptor on which writes fail, with another error than that of a closed one, which the standard
/// library ignores.
fn unwritable() -> rustix::io::Result<OwnedFd> {
    let sealed = || {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("closed", flags)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::WRITE | SealFlags::SEAL)?;
        Ok(file)
    };
    let full =
        |_: Errno| rustix::fs::open("/dev/full", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty());
    sealed().or_else(full)
}

/// Whether this failure is that of a write to a closed stream.
pub(crate) fn is_cause(error: &io::Error) -> bool {
    let error = error.raw_os_error().map(Errno::from_raw_os_error);
    let any_closed = was_closed(libc::STDOUT_FILENO) || was_closed(libc::STDERR_FILENO);
    any_closed && matches!(error, Some(Errno::PERM | Errno::NOSPC))
}
