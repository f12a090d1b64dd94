//! Running things under a policy, as each kind of user there is.

use std::ffi::OsStr;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::skipped::runs_as_root;

use codex_exec_server_protocol::{
    AccessMode, FileSystemEntry, FileSystemPath, FileSystemPolicy, NetworkPolicy, PathUri,
    PermissionProfile, RestrictedFileSystem, SandboxContext, SpecialPath,
};

/// What the miniature server exits with if the sandbox was refused, or failed.
pub(crate) const REFUSED: i32 = 201;
pub(crate) const FAILED: i32 = 202;

/// The user id of `nobody`.
const UNPRIVILEGED: u32 = 65_534;

/// Who runs the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum User {
    /// The user who runs the tests.
    Own,
    /// A user without privileges.
    Nobody,
}

/// Root and an unprivileged user, or just the latter if the tests are run by one.
pub(crate) fn users() -> Vec<User> {
    if runs_as_root() { vec![User::Own, User::Nobody] } else { vec![User::Own] }
}

/// The program beside the tests.
pub(crate) fn program() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    own.ancestors().nth(2).unwrap().join("examples/sandbox-test-program")
}

/// Directories of a test: `work` is the workspace, `outside` is not.
pub(crate) struct World {
    _directory: tempfile::TempDir,
    pub user: User,
    pub base: PathBuf,
    pub work: PathBuf,
    pub outside: PathBuf,
}

impl World {
    pub(crate) fn new(user: User) -> Self {
        // Not below /tmp, which workspace-write makes writable.
        let directory = tempfile::Builder::new().prefix("sandbox-").tempdir_in("/var/tmp").unwrap();
        let base = directory.path().canonicalize().unwrap();
        std::fs::set_permissions(&base, PermissionsExt::from_mode(0o755)).unwrap();
        let (work, outside) = (base.join("work"), base.join("outside"));
        std::fs::create_dir(&work).unwrap();
        std::fs::create_dir(&outside).unwrap();
        std::fs::write(outside.join("secret"), "secret").unwrap();
        let world = Self { _directory: directory, user, base, work, outside };
        world.own();
        world
    }

    /// Gives everything to the user.
    pub(crate) fn own(&self) {
        if self.user == User::Nobody {
            give(&self.base);
        }
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.base.join(name).to_str().unwrap().to_owned()
    }

    /// The context of these permissions in the workspace.
    pub(crate) fn context(&self, permissions: PermissionProfile) -> SandboxContext {
        SandboxContext::in_workspace(permissions, uri(&self.work))
    }

    pub(crate) fn run<I>(&self, permissions: PermissionProfile, argv: I) -> Done
    where
        I: IntoIterator,
        I::Item: AsRef<OsStr>,
    {
        finish(&mut self.server(&self.context(permissions), &self.work, argv))
    }

    /// Runs something with a managed network, of which the miniature server serves these ports.
    pub(crate) fn run_managed<I>(
        &self,
        permissions: PermissionProfile,
        network: &Managed<'_>,
        argv: I,
    ) -> Done
    where
        I: IntoIterator,
        I::Item: AsRef<OsStr>,
    {
        let mut server = self.server(&self.context(permissions), &self.work, argv);
        finish(network.dress(&mut server))
    }

    /// Runs an attempt of the test program with a managed network.
    pub(crate) fn attempt_managed(
        &self,
        permissions: PermissionProfile,
        network: &Managed<'_>,
        words: &[&str],
    ) -> Done {
        let program = program();
        let mut argv: Vec<&OsStr> = vec![program.as_os_str(), "attempt".as_ref()];
        argv.extend(words.iter().map(OsStr::new));
        self.run_managed(permissions, network, argv)
    }

    pub(crate) fn shell(&self, permissions: PermissionProfile, script: &str) -> Done {
        self.run(permissions, ["sh", "-c", script])
    }

    /// Runs an attempt of the test program.
    pub(crate) fn attempt(&self, permissions: PermissionProfile, words: &[&str]) -> Done {
        let program = program();
        let mut argv: Vec<&OsStr> = vec![program.as_os_str(), "attempt".as_ref()];
        argv.extend(words.iter().map(OsStr::new));
        self.run(permissions, argv)
    }

    /// The miniature server, ready to be spawned.
    pub(crate) fn server<I>(&self, context: &SandboxContext, cwd: &Path, argv: I) -> Command
    where
        I: IntoIterator,
        I::Item: AsRef<OsStr>,
    {
        let mut command = Command::new(program());
        command.arg("run").arg(serde_json::to_string(context).unwrap()).arg(cwd).arg("--");
        command.args(argv);
        self.clothe(&mut command);
        command
    }

    pub(crate) fn clothe(&self, command: &mut Command) {
        Self::clothe_as_root(command);
        if self.user == User::Nobody {
            command.uid(UNPRIVILEGED).gid(UNPRIVILEGED);
        }
    }
}

impl World {
    /// The environment and streams of a server, which somebody else gives its user.
    pub(crate) fn clothe_as_root(command: &mut Command) {
        command.env_clear().env("PATH", "/usr/bin:/bin").env("SERVER_SECRET", "do not tell");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    }
}

fn give(path: &Path) {
    std::os::unix::fs::lchown(path, Some(UNPRIVILEGED), Some(UNPRIVILEGED)).unwrap();
    if path.is_dir() && !path.is_symlink() {
        for entry in std::fs::read_dir(path).unwrap() {
            give(&entry.unwrap().path());
        }
    }
}

/// Makes sure `chown` exists for the odd test that needs it.
pub(crate) fn give_to_root(path: &Path) {
    chown(path, Some(0), Some(0)).unwrap();
}

/// A managed network.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Managed<'a> {
    /// Ports, with a comma after each.
    pub ports: &'a str,
    pub transparent: bool,
}

impl Managed<'_> {
    pub(crate) fn dress<'c>(&self, server: &'c mut Command) -> &'c mut Command {
        server.env("TEST_MANAGED", self.ports);
        if self.transparent {
            server.env("TEST_TRANSPARENT", "1");
        }
        server
    }
}

/// How it ended.
#[derive(Debug)]
pub(crate) struct Done {
    pub code: i32,
    pub out: String,
    pub err: String,
}

pub(crate) fn finish(command: &mut Command) -> Done {
    let Output { status, stdout, stderr } = command.output().unwrap();
    Done {
        code: status.code().unwrap_or(-1),
        out: String::from_utf8_lossy(&stdout).into_owned(),
        err: String::from_utf8_lossy(&stderr).into_owned(),
    }
}

impl Done {
    /// It ran and succeeded.
    #[track_caller]
    pub(crate) fn ok(&self) -> &Self {
        assert_eq!(self.code, 0, "{self:?}");
        self
    }

    /// It ran and its attempt was refused.
    #[track_caller]
    pub(crate) fn kept_from(&self) -> &Self {
        assert!(self.code != 0 && self.code != REFUSED && self.code != FAILED, "{self:?}");
        self
    }
}

pub(crate) fn uri(path: &Path) -> PathUri {
    PathUri::try_from(path).unwrap()
}

pub(crate) fn at(path: &Path, access: AccessMode) -> FileSystemEntry {
    FileSystemEntry::new(FileSystemPath::Path { path: uri(path) }, access)
}

pub(crate) fn special(value: SpecialPath, access: AccessMode) -> FileSystemEntry {
    FileSystemEntry::new(FileSystemPath::Special { value }, access)
}

pub(crate) fn glob(pattern: &str) -> FileSystemEntry {
    let path = FileSystemPath::GlobPattern { pattern: pattern.to_owned() };
    FileSystemEntry::new(path, AccessMode::Deny)
}

pub(crate) fn root(access: AccessMode) -> FileSystemEntry {
    special(SpecialPath::Root, access)
}

pub(crate) fn project(access: AccessMode) -> FileSystemEntry {
    special(SpecialPath::ProjectRoots { subpath: None }, access)
}

pub(crate) fn managed(entries: Vec<FileSystemEntry>) -> PermissionProfile {
    managed_with(entries, NetworkPolicy::Restricted)
}

pub(crate) fn managed_with(
    entries: Vec<FileSystemEntry>,
    network: NetworkPolicy,
) -> PermissionProfile {
    PermissionProfile::Managed {
        file_system: FileSystemPolicy::Restricted(RestrictedFileSystem {
            entries,
            glob_scan_max_depth: None,
        }),
        network,
    }
}

/// The whole disk readable, the workspace writable, nothing else.
pub(crate) fn workspace() -> PermissionProfile {
    managed(vec![root(AccessMode::Read), project(AccessMode::Write)])
}

/// What programs need, and the workspace.
pub(crate) fn minimal() -> PermissionProfile {
    let test_program = program().parent().unwrap().to_owned();
    managed(vec![
        special(SpecialPath::Minimal, AccessMode::Read),
        project(AccessMode::Write),
        at(&test_program, AccessMode::Read),
    ])
}

/// Random numbers from a seed.
pub(crate) struct Random(pub u64);

impl Random {
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % bound as u64) as usize
    }

    pub(crate) fn pick<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }
}
