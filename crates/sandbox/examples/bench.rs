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
    match sandbox.prepare(context, &Request::new(command)).expect("a sandbox") {
        Prepared::Unrestricted => panic!("nothing to enforce"),
        Prepared::Enforced(launch) => {
            let command = spawn::command(&launch);
            let (mut child, failure, _) = spawn::spawn(command, launch).expect("a child");
            assert_eq!(failure, None);
            assert!(child.wait().expect("a child").success());
        }
    }
}

/// What a run took: by the clock, and of the processors in the processes that were started. The second
/// does not depend on what else the machine is doing.
#[derive(Clone, Copy)]
struct Took {
    clock: Duration,
    processor: Duration,
}

fn measure(rounds: usize, mut run: impl FnMut()) -> Took {
    let before = children();
    let mut took: Vec<Duration> = (0..rounds)
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed()
        })
        .collect();
    took.sort();
    let processor = (children() - before) / rounds as u32;
    Took { clock: took[took.len() / 2], processor }
}

/// Processor time of all children so far.
fn children() -> Duration {
    // SAFETY: plain data, filled by the call.
    let usage = unsafe {
        let mut usage = std::mem::zeroed::<libc::rusage>();
        libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage);
        usage
    };
    let duration =
        |time: libc::timeval| Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000);
    duration(usage.ru_utime) + duration(usage.ru_stime)
}

fn report(name: &str, took: Took, plain: Took) {
    let ratio = |took: Duration, plain: Duration| took.as_secs_f64() / plain.as_secs_f64();
    eprintln!(
        "{name:<28} p50 {:>6} us {:>5.2}x   processor {:>6} us {:>5.2}x",
        took.clock.as_micros(),
        ratio(took.clock, plain.clock),
        took.processor.as_micros(),
        ratio(took.processor, plain.processor),
    );
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
            assert!(sandbox.prepare(&context, &Request::new(command)).is_ok());
        };
        let prepared = measure(100, prepare).clock;
        let ran = measure(20, || run(sandbox, &context, root)).clock;
        eprintln!("{count:>5} entries: prepared {prepared:?}, started to exited {ran:?}");
        took.push((prepared, ran));
    }
    eprintln!(
        "1,000 entries cost {:.1}x of 10 to prepare, {:.1}x to prepare and run",
        took[1].0.as_secs_f64() / took[0].0.as_secs_f64(),
        took[1].1.as_secs_f64() / took[0].1.as_secs_f64()
    );
}
