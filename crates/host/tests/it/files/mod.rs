//! Filesystem operations.

mod blocks;
mod connection;
mod content;
mod copy;
mod directories;
mod figures;
mod helper;
mod links;
mod memory;
mod metadata;
mod names;
mod persistent;
mod remove;
mod replace;
mod search;
mod walk;
mod watch;

use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;

use codex_exec_host::files::{
    AnswerMemory, Cancel, Executor, FileError, FileRequest, FilesConfig, Reservation,
};
use codex_exec_server_protocol::{ErrorKind, PathUri, RpcError};

use crate::skipped::{runs_as_root, skipped};

/// Grants every reservation at once.
struct UnboundedMemory;

impl AnswerMemory for UnboundedMemory {
    fn reserve(&self, _bytes: u64) -> Pin<Box<dyn Future<Output = Reservation> + Send + '_>> {
        Box::pin(std::future::ready(Reservation::new(())))
    }
}

/// An empty directory and an executor.
struct Fixture {
    executor: Executor,
    root: PathBuf,
    _directory: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Self {
        Self::with(FilesConfig::default())
    }

    fn with(config: FilesConfig) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().canonicalize().unwrap();
        Self { executor: Executor::new(Arc::new(config)), root, _directory: directory }
    }

    /// An executor that uses `openat2`, and one that opens paths by component.
    fn both_ways() -> [Self; 2] {
        [true, false].map(|use_openat2| {
            Self::with({
                let mut config = FilesConfig::default();
                config.use_openat2 = use_openat2;
                config
            })
        })
    }

    fn native(&self, name: impl AsRef<[u8]>) -> PathBuf {
        self.root.join(std::ffi::OsStr::from_bytes(name.as_ref()))
    }

    fn path(&self, name: impl AsRef<[u8]>) -> PathUri {
        uri(&self.native(name))
    }

    /// Creates a file and its parent directories.
    fn file(&self, name: &str, content: impl AsRef<[u8]>) -> PathUri {
        let native = self.native(name);
        std::fs::create_dir_all(native.parent().unwrap()).unwrap();
        std::fs::write(&native, content).unwrap();
        uri(&native)
    }

    fn dir(&self, name: &str) -> PathUri {
        std::fs::create_dir_all(self.native(name)).unwrap();
        self.path(name)
    }

    fn link(&self, target: impl AsRef<Path>, name: &str) -> PathUri {
        std::os::unix::fs::symlink(target, self.native(name)).unwrap();
        self.path(name)
    }

    fn fifo(&self, name: &str) -> PathUri {
        use rustix::fs::{CWD, FileType, Mode, mknodat};
        mknodat(CWD, self.native(name), FileType::Fifo, Mode::RWXU, 0).unwrap();
        self.path(name)
    }

    fn socket(&self, name: &str) -> PathUri {
        std::os::unix::net::UnixListener::bind(self.native(name)).unwrap();
        self.path(name)
    }

    fn content(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.native(name)).unwrap()
    }

    fn names(&self, name: &str) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(self.native(name))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    fn run<R: FileRequest>(&self, request: R) -> Result<R::Response, FileError> {
        run(&self.executor, request)
    }

    /// The code and message that a client gets.
    #[track_caller]
    fn fails<R: FileRequest>(&self, request: R) -> (i64, String)
    where
        R::Response: std::fmt::Debug,
    {
        let RpcError { code, message, .. } = self.run(request).unwrap_err().into();
        (code, message)
    }

    /// Like [`fails`](Self::fails), where only the code matters.
    #[track_caller]
    fn code<R: FileRequest>(&self, request: R) -> i64
    where
        R::Response: std::fmt::Debug,
    {
        self.fails(request).0
    }
}

fn run<R: FileRequest>(executor: &Executor, request: R) -> Result<R::Response, FileError> {
    let emit = |_| ControlFlow::Continue(());
    executor.execute(request.into(), &Cancel::new(), &emit).and_then(R::response)
}

fn uri(path: &Path) -> PathUri {
    PathUri::try_from(path).unwrap()
}

fn kind<T: std::fmt::Debug>(result: Result<T, FileError>) -> ErrorKind {
    result.unwrap_err().kind()
}

/// Runs `test` on a thread with only the rights of `nobody`. Linux has credentials per thread, so other
/// threads keep theirs. Without root this is skipped.
fn as_nobody(test: impl FnOnce() + Send) {
    use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
    if !runs_as_root() {
        return;
    }
    let (uid, gid) = (rustix::fs::Uid::from_raw(65534), rustix::fs::Gid::from_raw(65534));
    let run = || {
        set_thread_groups(&[]).unwrap();
        set_thread_res_gid(gid, gid, gid).unwrap();
        set_thread_res_uid(uid, uid, uid).unwrap();
        test();
    };
    let ended = std::thread::scope(|scope| scope.spawn(run).join());
    ended.unwrap();
}

/// A private mount namespace with a 256 KiB disk, which ends with the thread.
fn on_a_small_disk(test: impl FnOnce(&Fixture) + Send) {
    use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
    if !runs_as_root() {
        return;
    }
    let run = || {
        // SAFETY: the thread shares its filesystem state with no other afterwards, and its
        // descriptors are not unshared.
        let unshared =
            unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) };
        let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        let f = Fixture::new();
        let made = unshared.and_then(|()| mount_change("/", private)).and_then(|()| {
            mount("none", &f.root, "tmpfs", MountFlags::empty(), Some(c"size=256k"))
        });
        if let Err(errno) = made {
            return skipped(&format!("no small disk can be mounted here: {errno}"));
        }
        test(&f);
    };
    std::thread::scope(|scope| scope.spawn(run).join()).unwrap();
}

fn chmod(path: &Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

fn mode_of(path: &Path) -> u32 {
    use std::os::unix::fs::MetadataExt;
    std::fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

const NOT_FOUND: i64 = -32004;
const INVALID: i64 = -32600;
const INTERNAL: i64 = -32603;
