//! The program that is re-entered, held open.
//!
//! Invariant: what runs outside of sandboxes is the file that was there when the server started.
//! Whatever takes its name later, put there by a sandboxed process say, is never executed.

use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};

/// Above every number that a launch passes something at.
const LOWEST: RawFd = 64;

/// An executable file, held open. Clones are the same.
#[derive(Debug, Clone)]
pub struct Executable {
    path: PathBuf,
    /// `None` for a script: its interpreter opens it by its name.
    fd: Option<Arc<OwnedFd>>,
}

impl Executable {
    /// Opens it. If this process runs it, that very file is meant, whatever has its name by now.
    pub fn open(path: &Path) -> io::Result<Self> {
        let running = std::env::current_exe().is_ok_and(|running| running == path);
        let opened = if running { Path::new("/proc/self/exe") } else { path };
        let fd = rustix::fs::open(opened, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let fd = match is_script(opened) {
            true => None,
            false => Some(Arc::new(rustix::io::fcntl_dupfd_cloexec(fd, LOWEST)?)),
        };
        Ok(Self { path: path.to_owned(), fd })
    }

    /// The name it had.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What to execute with `execveat`. Its number is above all that a launch passes. `None` for a
    /// script, which has to be executed by its path.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(|fd| fd.as_fd())
    }

    /// A name by which a child that was just forked can execute it, as long as it has the descriptors
    /// of its parent: for [`std::process::Command`].
    pub fn name_after_fork(&self) -> PathBuf {
        match &self.fd {
            Some(fd) => format!("/proc/self/fd/{}", fd.as_raw_fd()).into(),
            None => self.path.clone(),
        }
    }
}

fn is_script(path: &Path) -> bool {
    let mut start = [0; 2];
    // What may be executed but not read is no script.
    std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut start)).is_ok()
        && start == *b"#!"
}
