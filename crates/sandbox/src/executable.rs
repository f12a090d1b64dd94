//! The re-entered executable, held open.
//!
//! Invariant: the program that runs outside of sandboxes is the file that existed when the server
//! started. A file that takes its name later, perhaps created by a sandboxed process, is never
//! executed.

use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};

/// Above every descriptor number that a launch uses.
const LOWEST: RawFd = 64;

/// An executable file, held open. Clones share the descriptor.
#[derive(Debug, Clone)]
pub struct Executable {
    path: PathBuf,
    /// `None` for a script: its interpreter opens it by path.
    fd: Option<Arc<OwnedFd>>,
}

impl Executable {
    /// Opens an executable. If this process runs it, opens the running file, whatever is at its path by
    /// now.
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

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The descriptor for `execveat`; its number is above those that a launch uses. `None` for a
    /// script, which must be executed by path.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(|fd| fd.as_fd())
    }

    /// A path for [`std::process::Command`]: a forked child can execute it while it has the descriptors
    /// of its parent.
    pub fn name_after_fork(&self) -> PathBuf {
        match &self.fd {
            Some(fd) => format!("/proc/self/fd/{}", fd.as_raw_fd()).into(),
            None => self.path.clone(),
        }
    }
}

fn is_script(path: &Path) -> bool {
    let mut start = [0; 2];
    // A file that can be executed but not read is not a script.
    std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut start)).is_ok()
        && start == *b"#!"
}
