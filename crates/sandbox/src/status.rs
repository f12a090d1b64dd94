//! The status pipe: how the re-entered process reports a failure.
//!
//! Invariant: the pipe carries at most one [`Failure`], in one atomic write. If it closes without one,
//! the target runs, or the process was killed, which its exit status shows. Nothing is written once the
//! target has started.

use std::fmt;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The steps of a sandbox, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Stage {
    /// Read the plan from its memory file.
    ReadPlan = 1,
    /// Create and lock the placeholders of protected names.
    Placeholders,
    /// Create the namespaces.
    Namespaces,
    /// Map the user and group ids.
    Identities,
    /// Set up the managed network and hand its sockets to the server.
    Network,
    /// Open everything to be bind-mounted, while the host's tree is still visible.
    Sources,
    /// Stop mount propagation; make the host's tree read-only.
    Base,
    /// Create the private file system for skeletons and masks.
    Scratch,
    /// Mount binds, masks and skeletons.
    Tree,
    /// Mount a new `/proc`.
    Proc,
    /// Make the new tree the root.
    Root,
    /// Compare the finished tree with the plan.
    Proof,
    /// Limit the number of processes.
    Limits,
    /// Enter the working directory.
    WorkingDirectory,
    /// Set `no_new_privs`.
    NoNewPrivileges,
    /// Enter the Landlock domain.
    Landlock,
    /// Drop capabilities.
    Capabilities,
    /// Load the seccomp filter.
    Seccomp,
    /// Close all other descriptors.
    Descriptors,
    /// Start the target.
    Execute,
}

impl Stage {
    const ALL: [Self; 20] = [
        Self::ReadPlan,
        Self::Placeholders,
        Self::Namespaces,
        Self::Identities,
        Self::Network,
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
            Self::Network => "setting up the managed network",
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
    /// The step that failed.
    pub stage: Stage,
    /// Error number of the system; 0 for other failures.
    pub errno: i32,
    /// What it concerns, usually a path.
    pub message: String,
}

/// The errno for a file that is not the planned one.
pub(crate) const CHANGED: i32 = libc::ESTALE;

impl Failure {
    pub(crate) fn new(stage: Stage, errno: i32, message: impl Into<String>) -> Self {
        Self { stage, errno, message: message.into() }
    }

    /// Whether the program could not be executed, or its working directory not be entered. The same
    /// would have happened outside, so the sandbox is not the cause.
    pub fn is_target(&self) -> bool {
        matches!(self.stage, Stage::Execute | Stage::WorkingDirectory)
    }

    /// Whether a file was replaced between planning and building. Preparing again may succeed.
    pub fn is_race(&self) -> bool {
        self.errno == CHANGED && matches!(self.stage, Stage::Sources | Stage::Tree | Stage::Proof)
    }

    /// The error of the system.
    pub fn io_error(&self) -> io::Error {
        io::Error::from_raw_os_error(self.errno)
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![self.stage as u8];
        bytes.extend(self.errno.to_le_bytes());
        // Short enough for an atomic write.
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

    /// Waits until the target runs (`None`) or has failed. Blocks; drop the passed descriptors first,
    /// or it blocks for ever.
    pub fn wait(self) -> io::Result<Option<Failure>> {
        let mut bytes = Vec::new();
        std::fs::File::from(self.0).read_to_end(&mut bytes)?;
        Ok(Self::parse(&bytes))
    }

    /// Parses the content of the whole pipe, for callers that read it without blocking.
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
    fn failures_round_trip() {
        for stage in Stage::ALL {
            let failure = Failure::new(stage, libc::EROFS, "/srv/app");
            assert_eq!(StatusReader::parse(&failure.encode()), Some(failure));
        }
        assert_eq!(StatusReader::parse(b""), None);
        assert!(StatusReader::parse(b"\xff garbage").is_some());
    }
}
