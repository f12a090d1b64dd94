//! How the re-entered process tells why it gave up.
//!
//! Invariant: the pipe carries at most one [`Failure`], in one write that the kernel keeps whole; its
//! end without a word means that the target runs (or that the process was killed, which its exit
//! status tells). Nothing is ever written once the target has started.

use std::fmt;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The steps, in the order in which they are carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Stage {
    /// Read the plan from its memory file.
    ReadPlan = 1,
    /// Create and lock the placeholders of names that may not come into being.
    Placeholders,
    /// Make the namespaces.
    Namespaces,
    /// Map the user and group ids.
    Identities,
    /// Open everything that will be bound, while the host's tree is still the tree.
    Sources,
    /// Cut propagation; make the host's tree read-only.
    Base,
    /// Make the private file system for skeletons and masks.
    Scratch,
    /// Put binds, masks and skeletons in their places.
    Tree,
    /// Mount a fresh `/proc`.
    Proc,
    /// Make the new tree the root.
    Root,
    /// Compare the finished tree with the plan.
    Proof,
    /// Limit processes.
    Limits,
    /// Enter the working directory.
    WorkingDirectory,
    /// Give up gaining privileges.
    NoNewPrivileges,
    /// Enter the Landlock domain.
    Landlock,
    /// Drop capabilities.
    Capabilities,
    /// Load the seccomp programs.
    Seccomp,
    /// Close every other descriptor.
    Descriptors,
    /// Start the target.
    Execute,
}

impl Stage {
    const ALL: [Self; 19] = [
        Self::ReadPlan,
        Self::Placeholders,
        Self::Namespaces,
        Self::Identities,
        Self::Sources,
        Self::Base,
        Self::Scratch,
        Self::Tree,
        Self::Proc,
        Self::Root,
        Self::Proof,
        Self::Limits,
        Self::WorkingDirectory,
        Self::NoNewPrivileges,
        Self::Landlock,
        Self::Capabilities,
        Self::Seccomp,
        Self::Descriptors,
        Self::Execute,
    ];

    fn description(self) -> &'static str {
        match self {
            Self::ReadPlan => "reading the plan",
            Self::Placeholders => "protecting a name",
            Self::Namespaces => "making namespaces",
            Self::Identities => "mapping user ids",
            Self::Sources => "opening what the policy grants",
            Self::Base => "making the tree read-only",
            Self::Scratch => "making a private file system",
            Self::Tree => "building the tree",
            Self::Proc => "mounting /proc",
            Self::Root => "changing the root",
            Self::Proof => "proving that the tree is as planned",
            Self::Limits => "limiting processes",
            Self::WorkingDirectory => "entering the working directory",
            Self::NoNewPrivileges => "giving up new privileges",
            Self::Landlock => "entering the Landlock domain",
            Self::Capabilities => "dropping capabilities",
            Self::Seccomp => "loading the seccomp filter",
            Self::Descriptors => "closing descriptors",
            Self::Execute => "starting the program",
        }
    }
}

/// Why the target did not start. Nothing has run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// At which step.
    pub stage: Stage,
    /// What the system said; 0 if it was not the system.
    pub errno: i32,
    /// What it was about: a path, mostly.
    pub message: String,
}

/// What a file being another one than planned is reported as.
pub(crate) const CHANGED: i32 = libc::ESTALE;

impl Failure {
    pub(crate) fn new(stage: Stage, errno: i32, message: impl Into<String>) -> Self {
        Self { stage, errno, message: message.into() }
    }

    /// Whether the program itself could not be executed, or its directory not be entered: the same
    /// would have happened outside, so it is not a matter of the sandbox.
    pub fn is_target(&self) -> bool {
        matches!(self.stage, Stage::Execute | Stage::WorkingDirectory)
    }

    /// Whether something was replaced between planning and doing. Preparing again may succeed.
    pub fn is_race(&self) -> bool {
        self.errno == CHANGED && matches!(self.stage, Stage::Sources | Stage::Tree | Stage::Proof)
    }

    /// What the system said.
    pub fn io_error(&self) -> io::Error {
        io::Error::from_raw_os_error(self.errno)
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![self.stage as u8];
        bytes.extend(self.errno.to_le_bytes());
        // Short enough for the kernel to write it in one piece.
        bytes.extend(self.message.bytes().take(2048));
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (stage, rest) = bytes.split_first()?;
        let stage = *Stage::ALL.iter().find(|known| **known as u8 == *stage)?;
        let (errno, message) = rest.split_first_chunk::<4>()?;
        Some(Self {
            stage,
            errno: i32::from_le_bytes(*errno),
            message: String::from_utf8_lossy(message).into_owned(),
        })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.stage.description())?;
        if !self.message.is_empty() {
            write!(f, ": {}", self.message)?;
        }
        if self.errno != 0 {
            write!(f, ": {}", self.io_error())?;
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}

/// The server's end of the status pipe.
#[derive(Debug)]
pub struct StatusReader(OwnedFd);

impl StatusReader {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Waits until the target runs (`None`) or has failed to. Blocks; drop the descriptors that were
    /// passed on first, or it blocks for good.
    pub fn wait(self) -> io::Result<Option<Failure>> {
        let mut bytes = Vec::new();
        std::fs::File::from(self.0).read_to_end(&mut bytes)?;
        Ok(Self::parse(&bytes))
    }

    /// What the bytes of the whole pipe mean, for those who read it without blocking.
    pub fn parse(bytes: &[u8]) -> Option<Failure> {
        if bytes.is_empty() {
            return None;
        }
        Some(Failure::decode(bytes).unwrap_or_else(|| {
            Failure::new(Stage::ReadPlan, 0, "the sandbox sent an unknown status")
        }))
    }
}

impl AsFd for StatusReader {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<StatusReader> for OwnedFd {
    fn from(reader: StatusReader) -> Self {
        reader.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_survive_the_pipe() {
        for stage in Stage::ALL {
            let failure = Failure::new(stage, libc::EROFS, "/srv/app");
            assert_eq!(StatusReader::parse(&failure.encode()), Some(failure));
        }
        assert_eq!(StatusReader::parse(b""), None);
        assert!(StatusReader::parse(b"\xff garbage").is_some());
    }
}
