//! Plan: what will be done, in order, as plain data.
//!
//! Invariant: a [`Plan`] is complete. The process that carries it out takes no decision of its own:
//! it does each step or gives up. Building one is pure; everything known about the machine comes in
//! through [`Facts`](crate::decide::facts::Facts) and [`Capabilities`](crate::Capabilities).

mod build;
mod encoding;
mod landlock_only;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use codex_exec_server_protocol::Assurance;
use serde::{Deserialize, Serialize};

use crate::decide::facts::Identity;

pub(crate) use build::{PlanError, build};
pub use encoding::DecodeError;

/// Everything the re-entered process needs to know.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Plan {
    /// What holds the target back.
    pub enforcement: Arc<Enforcement>,
    /// No network, for this target: because the policy says so, or because it is a helper.
    pub network_restricted: bool,
    /// The numbers at which descriptors are passed besides the plan's own and the status pipe. Said
    /// here, since any number may be open for some other reason.
    pub passed: Vec<i32>,
    /// The seccomp program to load, as raw instructions.
    pub seccomp: Arc<[u64]>,
    /// What runs once that is in place.
    pub target: Target,
}

/// What holds the target back. Two equal enforcements are interchangeable.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Enforcement {
    /// Which mechanisms are used.
    pub walls: Walls,
    /// What these amount to. With full assurance a Landlock that cannot be entered is a failure.
    pub assurance: Assurance,
    /// The file system as the target sees it.
    pub tree: Tree,
    /// Landlock rules; `None` if the file system is not restricted.
    pub rules: Option<Vec<Rule>>,
    /// The policy allows no network.
    pub network_restricted: bool,
    /// As many processes and threads as there may be at once.
    pub processes: u32,
    /// As much private memory as `/dev/shm` may hold, in bytes.
    pub shared_memory: u64,
}

impl Enforcement {
    /// Whether connections are made by the outer process: there is a network to connect to, files
    /// that may not be connected to, and an outer process.
    pub(crate) fn is_brokered(&self, network_restricted: bool) -> bool {
        !network_restricted && self.rules.is_some() && self.walls == Walls::Namespaces
    }
}

/// Which mechanisms are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Walls {
    /// Namespaces first, Landlock as the second wall where the kernel has it, seccomp.
    Namespaces,
    /// Landlock and seccomp, for a policy that they express exactly.
    LandlockOnly,
}

/// The file system as the target sees it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Tree {
    /// What the tree starts from.
    pub base: Base,
    /// Applied in this order, parents before children.
    pub operations: Vec<Operation>,
    /// Names that may not come into being: created as empty directories before the tree is built and
    /// removed when the last sandbox that uses them ends.
    pub placeholders: Vec<Placeholder>,
}

/// What the tree starts from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Base {
    /// The host's tree, made read-only.
    ReadOnlyHost,
    /// The host's tree as it is.
    WritableHost,
    /// Nothing: the first operation is the skeleton of the root.
    Nothing,
}

/// One step of building the tree.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Operation {
    /// A private, read-only directory that holds mount points and links only.
    Skeleton {
        /// Where it is put.
        #[serde(with = "encoding::path")]
        path: PathBuf,
        /// What is in it, relative, parents first.
        nodes: Vec<SkeletonNode>,
        /// May its names be listed? Not where it stands for a denied directory.
        listable: bool,
    },
    /// The host's own directory or file, at the same place.
    Bind {
        /// Where it is and where it is put.
        #[serde(with = "encoding::path")]
        path: PathBuf,
        /// Which one it has to be.
        identity: Identity,
        /// Can it be written?
        writable: bool,
        /// Is it a device that has to stay usable?
        device: bool,
    },
    /// Nothing can be done with what is at this path.
    Mask {
        /// Where.
        #[serde(with = "encoding::path")]
        path: PathBuf,
        /// What is hidden; `None` in the kernel's own trees, which are mounted anew.
        identity: Option<Identity>,
        /// Is it a directory?
        directory: bool,
        /// Hidden because it is the server's own: to those who may override permissions it is empty.
        own: bool,
    },
    /// A link that can be followed but neither replaced nor removed.
    PinnedLink {
        /// Where.
        #[serde(with = "encoding::path")]
        path: PathBuf,
        /// Which one it has to be.
        identity: Identity,
    },
    /// A placeholder, read-only or hidden; or a directory on the way to it, which only keeps its name.
    Placeholder {
        /// Its place in [`Tree::placeholders`].
        index: u32,
        /// Which of the missing names it is; the last is the placeholder itself.
        level: u32,
    },
    /// A fresh `/proc` of the new PID namespace, read-only.
    Proc,
    /// A fresh `/dev/pts`.
    Terminals,
    /// A private `/dev/shm`.
    SharedMemory,
}

/// Something in a [`Operation::Skeleton`].
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SkeletonNode {
    /// A directory.
    Directory(#[serde(with = "encoding::path")] PathBuf),
    /// An empty file, to mount a file or a device on.
    File(#[serde(with = "encoding::path")] PathBuf),
    /// A link and its target.
    Link(#[serde(with = "encoding::path")] PathBuf, #[serde(with = "encoding::path")] PathBuf),
}

impl SkeletonNode {
    /// Where it is in the skeleton.
    pub(crate) fn path(&self) -> &Path {
        match self {
            Self::Directory(path) | Self::File(path) | Self::Link(path, _) => path,
        }
    }
}

/// A name that may not come into being.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Placeholder {
    /// The directory that exists.
    #[serde(with = "encoding::path")]
    pub parent: PathBuf,
    /// What is missing below it; only the last becomes a placeholder.
    pub missing: Vec<OsString>,
    /// Is it hidden, or an empty directory?
    pub hidden: bool,
}

impl Placeholder {
    /// The protected path.
    pub fn path(&self) -> PathBuf {
        self.path_to(self.missing.len())
    }

    /// The path of the first so many missing names.
    pub(crate) fn path_to(&self, names: usize) -> PathBuf {
        let mut path = self.parent.clone();
        path.extend(self.missing.iter().take(names));
        path
    }

    /// Whether a level is the placeholder itself.
    pub(crate) fn is_last(&self, level: u32) -> bool {
        level as usize + 1 == self.missing.len()
    }
}

/// A Landlock rule: what may be done with a path and all below.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Rule {
    /// The path, inside the finished tree.
    #[serde(with = "encoding::path")]
    pub path: PathBuf,
    /// What may be done.
    pub grant: Grant,
}

/// What a Landlock rule allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Grant {
    /// Reading and executing.
    Read,
    /// Everything.
    Write,
    /// Reading and writing what exists, and device controls.
    Device,
    /// Writing what exists.
    Output,
}

/// What runs inside.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Target {
    /// A program.
    Program(Program),
    /// A function of this executable, by name (see [`reentry`](crate::reentry)).
    Helper {
        /// Its name.
        name: String,
        /// `PATH`, `TMPDIR`, `TMP`, `TEMP`; nothing else.
        env: Vec<(OsString, OsString)>,
    },
    /// A message in place of a program that the policy leaves no place to run in.
    Refusal {
        /// Written to standard error.
        message: String,
    },
}

/// A program to execute.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Program {
    /// The program and its arguments; looked up in the `PATH` of `env`, inside the sandbox.
    pub argv: Vec<OsString>,
    /// What the program sees as its own name, if not `argv[0]`.
    pub arg0: Option<OsString>,
    /// The whole environment.
    pub env: Vec<(OsString, OsString)>,
    /// Where it starts.
    #[serde(with = "encoding::path")]
    pub cwd: PathBuf,
}
