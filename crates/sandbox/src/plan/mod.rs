//! Plan: the steps to take, in order, as plain data.
//!
//! Invariant: a [`Plan`] is complete. The process that carries it out makes no decisions: it performs
//! each step or fails. Building a plan is pure; all knowledge of the machine comes in through
//! [`Facts`](crate::decide::facts::Facts) and [`Capabilities`](crate::Capabilities).

mod build;
mod encoding;
mod landlock_only;

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use codex_exec_server_protocol::Assurance;
use serde::{Deserialize, Serialize};

use crate::decide::facts::Identity;

pub(crate) use build::{PlanError, build};
pub use encoding::DecodeError;

/// Everything the re-entered process needs.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Plan {
    /// The restrictions of the target.
    pub enforcement: Arc<Enforcement>,
    /// The network of the target.
    pub network: Network,
    /// The target is in the PID namespace of the server, whose `/proc` it sees.
    pub shares_pids: bool,
    /// Numbers of the passed descriptors, besides the plan, the status pipe and what the target inherits. Listed here because
    /// other numbers may happen to be open.
    pub passed: Vec<i32>,
    /// The seccomp program to load, as raw instructions.
    pub seccomp: Arc<[u64]>,
    /// What to run.
    pub target: Target,
}

/// The restrictions of a target. Two equal enforcements are interchangeable.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Enforcement {
    /// The mechanisms.
    pub isolation: Isolation,
    /// The level they reach. At full assurance, failing to enter Landlock is an error.
    pub assurance: Assurance,
    /// The file system as the target sees it.
    pub tree: Tree,
    /// Landlock rules; `None` if the file system is not restricted.
    pub rules: Option<Vec<Rule>>,
    /// The policy allows no network.
    pub network_restricted: bool,
    /// Maximum processes and threads at once.
    pub processes: u32,
    /// Size of `/dev/shm`, in bytes.
    pub shared_memory: u64,
}

impl Enforcement {
    /// Whether the outer process makes connections: the target has the host's network, some files must
    /// not be connected to, and there is an outer process.
    pub(crate) fn is_brokered(&self, network: &Network) -> bool {
        *network == Network::Host && self.rules.is_some() && self.isolation == Isolation::Namespaces
    }

    /// Whether the policy opens devices of the host: all of them, or some by an entry that allows writing.
    /// What can only be read cannot be controlled.
    pub(crate) fn has_host_devices(&self) -> bool {
        let opens = |rule: &Rule| {
            rule.grant == Grant::Write
                && rule.path.starts_with("/dev")
                && !rule.path.starts_with("/dev/shm")
        };
        self.rules.as_ref().is_none_or(|rules| rules.iter().any(opens))
    }
}

/// The network of a target.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Network {
    /// The host's.
    Host,
    /// None: because of the policy, or because the target is a helper.
    None,
    /// A namespace of its own that leads to the server alone.
    Managed(ManagedNamespace),
}

/// A network namespace whose sockets the server serves.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ManagedNamespace {
    /// Ports of 127.0.0.1 that the server listens on.
    pub ports: Vec<u16>,
    /// Route all other addresses to the server, through a TUN interface.
    pub transparent: bool,
    /// Loopback addresses whose port 53 the server serves.
    pub nameservers: Vec<IpAddr>,
}

/// The mechanisms in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Isolation {
    /// Namespaces, seccomp, and Landlock as a second layer where the kernel has it.
    Namespaces,
    /// Landlock and seccomp only, for a policy that they express exactly.
    LandlockOnly,
}

/// The file system as the target sees it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Tree {
    /// What the tree starts from.
    pub base: Base,
    /// Operations in order, parents before children.
    pub operations: Vec<Operation>,
    /// Names that must not be created: empty directories, created before the tree is built and removed
    /// when the last sandbox that uses them ends.
    pub placeholders: Vec<Placeholder>,
}

/// What the tree starts from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Base {
    /// The host's tree, made read-only.
    ReadOnlyHost,
    /// The host's tree as it is.
    WritableHost,
    /// Empty: the first operation is the skeleton of the root.
    Empty,
}

/// One step of building the tree.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Operation {
    /// A private, read-only directory with only mount points and links.
    Skeleton {
        /// Its path.
        #[serde(with = "encoding::path")]
        path: PathBuf,
        /// Its nodes, with relative paths, parents first.
        nodes: Vec<SkeletonNode>,
        /// Whether its names can be listed; not if it replaces a denied directory.
        listable: bool,
    },
    /// A bind mount of the host's directory or file, at the same path.
    Bind {
        /// Its path, on the host and in the sandbox.
        #[serde(with = "encoding::path")]
        path: PathBuf,
        /// The identity that the file must have.
        identity: Identity,
        /// Whether it is writable.
        writable: bool,
        /// Whether it is a device that must stay usable.
        device: bool,
    },
    /// Hides what is at this path.
    Mask {
        /// The path.
        #[serde(with = "encoding::path")]
        path: PathBuf,
        /// The identity of the hidden file; `None` in the kernel's trees, which are mounted anew.
        identity: Option<Identity>,
        /// Whether it is a directory.
        directory: bool,
        /// Hidden because it belongs to the server; processes that may override permissions see it
        /// empty.
        is_server_file: bool,
    },
    /// A link that can be followed but neither replaced nor removed.
    PinnedLink {
        /// The path.
        #[serde(with = "encoding::path")]
        path: PathBuf,
        /// The identity that the link must have.
        identity: Identity,
    },
    /// A placeholder, read-only or hidden; or a directory above it, which only must not be renamed.
    Placeholder {
        /// Index in [`Tree::placeholders`].
        index: u32,
        /// Index of the missing name; the last one is the placeholder itself.
        level: u32,
    },
    /// A new `/proc` of the new PID namespace, read-only; the host's, if that is shared.
    Proc,
    /// A new `/dev/pts`.
    Terminals,
    /// A private `/dev/shm`.
    SharedMemory,
}

/// A node of an [`Operation::Skeleton`].
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SkeletonNode {
    /// A directory.
    Directory(#[serde(with = "encoding::path")] PathBuf),
    /// An empty file, as a mount point for a file or a device.
    File(#[serde(with = "encoding::path")] PathBuf),
    /// A link and its target.
    Link(#[serde(with = "encoding::path")] PathBuf, #[serde(with = "encoding::path")] PathBuf),
}

impl SkeletonNode {
    /// Its path in the skeleton.
    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::Directory(path) | Self::File(path) | Self::Link(path, _) => path,
        }
    }
}

/// A name that must not be created.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Placeholder {
    /// The existing directory.
    #[serde(with = "encoding::path")]
    pub parent: PathBuf,
    /// The missing names below it; the last one becomes the placeholder.
    pub missing: Vec<OsString>,
    /// Whether it is hidden; otherwise it appears as an empty directory.
    pub hidden: bool,
}

impl Placeholder {
    /// The protected path.
    pub fn path(&self) -> PathBuf {
        self.path_to(self.missing.len())
    }

    /// The path up to this many of the missing names.
    pub(crate) fn path_to(&self, names: usize) -> PathBuf {
        let mut path = self.parent.clone();
        path.extend(self.missing.iter().take(names));
        path
    }

    /// Whether this index is the placeholder itself.
    pub(crate) fn is_last(&self, level: u32) -> bool {
        level as usize + 1 == self.missing.len()
    }
}

/// A Landlock rule for a path and everything below it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Rule {
    /// The path, inside the finished tree.
    #[serde(with = "encoding::path")]
    pub path: PathBuf,
    /// What the rule allows.
    pub grant: Grant,
}

/// What a Landlock rule allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Grant {
    /// Listing directories.
    List,
    /// Reading and executing.
    Read,
    /// Everything.
    Write,
    /// Reading and writing existing files, and device controls.
    Device,
    /// Writing existing files.
    Output,
}

/// What to run inside the sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Target {
    /// A program.
    Program(Program),
    /// A function of this executable, by name (see [`reentry`](crate::reentry)).
    Helper {
        /// Its name.
        name: String,
        /// `PATH`, `TMPDIR`, `TMP` and `TEMP`, if set.
        env: Vec<(OsString, OsString)>,
    },
    /// A message instead of a program, because the policy hides its working directory.
    Refusal {
        /// The text for stderr.
        message: String,
    },
}

/// A program to execute.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Program {
    /// The program and its arguments; `argv[0]` is looked up in the `PATH` of `env`, inside the
    /// sandbox.
    pub argv: Vec<OsString>,
    /// What the program sees as its own name (default: `argv[0]`).
    pub arg0: Option<OsString>,
    /// The whole environment.
    pub env: Vec<(OsString, OsString)>,
    /// Working directory.
    #[serde(with = "encoding::path")]
    pub cwd: PathBuf,
    /// Number of the passed descriptor that the program inherits as
    /// [`INHERITED`](crate::INHERITED); `None` if it inherits none but the standard streams.
    pub inherits: Option<i32>,
}
