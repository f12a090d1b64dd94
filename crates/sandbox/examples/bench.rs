//! Figures: what a sandboxed start costs, and how preparing grows with the policy.
//!
//! `cargo run --release -p codex-linux-sandbox --example bench [rounds]`

#[path = "../tests/support/spawn.rs"]
mod spawn;

use std::ffi::OsString;
use std::path::Path;
use std::process::Command as StdCommand;
use std::time::{Duration, Instant};

use codex_exec_server_protocol::{
    AccessMode, FileSystemEntry, FileSystemPath, FileSystemPolicy, NetworkPolicy, PathUri,
    PermissionProfile, RestrictedFileSystem, SandboxContext, SpecialPath,
};
use codex_linux_sandbox::{Command, Config, Prepared, Request, Sandbox, reentry};

fn main() {
    reentry::main_if_reentered(&[]);
    let rounds = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(300);
    let executable = std::env::current_exe().expect("an executable");
    let sandbox = Sandbox::new(Config::new(executable)).expect("a pipe");
    let root = tempfile::tempdir().expect("a directory");
    let root = root.path().canonicalize().expect("a directory");
    std::fs::create_dir(root.join(".git")).expect("a directory");
    let workspace = PathUri::try_from(root.as_path()).expect("a path");

    let plain = measure(rounds, || {
        let mut command = StdCommand::new("/bin/true");
        let mut child = command.env_clear().current_dir(&root).spawn_isolated();
        assert!(child.wait().expect("a child").success());
    });
    report("plain", plain, plain);
    for (name, profile) in [
        ("read-only", PermissionProfile::read_only()),
        ("workspace-write", PermissionProfile::workspace_write()),
        ("workspace-write, network", with_network()),
        ("minimal", minimal()),
    ] {
        let context = SandboxContext::in_workspace(profile, workspace.clone());
        let took = measure(rounds, || run(&sandbox, &context, &root));
        report(name, took, plain);
    }
    preparing(&sandbox, &root);
}

trait SpawnIsolated {
    fn spawn_isolated(&mut self) -> std::process::Child;
}

impl SpawnIsolated for StdCommand {
    /// In its own session, as a server spawns.
    fn spawn_isolated(&mut self) -> std::process::Child {
        use std::os::unix::process::CommandExt;
        // SAFETY: a system call only.
        unsafe {
            self.pre_exec(|| {
                libc::setsid();
                Ok(())
            });
        }
        self.spawn().expect("a child")
    }
}

fn run(sandbox: &Sandbox, context: &SandboxContext, cwd: &Path) {
    let argv = [OsString::from("/bin/true")];
    let command = Command::Program { argv: &argv, arg0: None, env: &[], cwd };
    match sandbox.prepare(context, &Request { command }).expect("a sandbox") {
        Prepared::Unrestricted => panic!("nothing to enforce"),
        Prepared::Enforced(launch) => {
            let command = spawn::command(&launch);
            let (mut child, failure, _) = spawn::spawn(command, launch).expect("a child");
            assert_eq!(failure, None);
            assert!(child.wait().expect("a child").success());
        }
    }
}

fn measure(rounds: usize, mut run: impl FnMut()) -> Duration {
    let mut took: Vec<Duration> = (0..rounds)
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed()
        })
        .collect();
    took.sort();
    took[took.len() / 2]
}

fn report(name: &str, took: Duration, plain: Duration) {
    let ratio = took.as_secs_f64() / plain.as_secs_f64();
    eprintln!("{name:<28} p50 {:>7.0} us   {ratio:.2}x", took.as_secs_f64() * 1e6);
}

fn with_network() -> PermissionProfile {
    let PermissionProfile::Managed { file_system, .. } = PermissionProfile::workspace_write()
    else {
        unreachable!("workspace-write is managed");
    };
    PermissionProfile::Managed { file_system, network: NetworkPolicy::Enabled }
}

fn entry(path: FileSystemPath, access: AccessMode) -> FileSystemEntry {
    FileSystemEntry::new(path, access)
}

fn managed(entries: Vec<FileSystemEntry>) -> PermissionProfile {
    PermissionProfile::Managed {
        file_system: FileSystemPolicy::Restricted(RestrictedFileSystem {
            entries,
            glob_scan_max_depth: None,
        }),
        network: NetworkPolicy::Restricted,
    }
}

fn minimal() -> PermissionProfile {
    let special = |value| FileSystemPath::Special { value };
    managed(vec![
        entry(special(SpecialPath::Minimal), AccessMode::Read),
        entry(special(SpecialPath::ProjectRoots { subpath: None }), AccessMode::Write),
    ])
}

/// Preparing a policy of 10 and of 1,000 entries, writable directories all.
fn preparing(sandbox: &Sandbox, root: &Path) {
    let mut took = Vec::new();
    for count in [10, 1000] {
        let mut entries =
            vec![entry(FileSystemPath::Special { value: SpecialPath::Root }, AccessMode::Read)];
        for n in 1..count {
            let path = root.join(format!("root-{n}"));
            let _ = std::fs::create_dir(&path);
            let path = PathUri::try_from(path.as_path()).expect("a path");
            entries.push(entry(FileSystemPath::Path { path }, AccessMode::Write));
        }
        let context = SandboxContext::new(managed(entries));
        let argv = [OsString::from("/bin/true")];
        let command = Command::Program { argv: &argv, arg0: None, env: &[], cwd: root };
        let prepare = || {
            assert!(sandbox.prepare(&context, &Request { command }).is_ok());
        };
        let prepared = measure(100, prepare);
        let ran = measure(20, || run(sandbox, &context, root));
        eprintln!("{count:>5} entries: prepared {prepared:?}, started to exited {ran:?}");
        took.push((prepared, ran));
    }
    eprintln!(
        "1,000 entries cost {:.1}x of 10 to prepare, {:.1}x to prepare and run",
        took[1].0.as_secs_f64() / took[0].0.as_secs_f64(),
        took[1].1.as_secs_f64() / took[0].1.as_secs_f64()
    );
}
