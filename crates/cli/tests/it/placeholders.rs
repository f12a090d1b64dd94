//! The placeholders that a sandbox puts into a workspace are gone when it ends, however it ends and whichever
//! process is killed.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;

use crate::commands::{codex, everywhere, output, output_of, read_until};
use crate::support::{Client, Running, children, eventually, send, state};

const PLACEHOLDERS: [&str; 3] = [".agents", ".codex", ".git"];

/// The name of a sandbox's first process.
const SANDBOX: &str = "__linux-sandbox";

/// Repetitions of tests that depend on timing.
const ROUNDS: usize = 5;

/// A directory that workspace-write does not make writable by itself, unlike `/tmp`.
fn workspace() -> tempfile::TempDir {
    tempfile::tempdir_in("/var/tmp").unwrap()
}

fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

async fn no_litter(directory: &Path) {
    eventually("no litter", || names(directory).is_empty()).await;
}

fn sandboxed(mut command: Command, cwd: &Path) -> Command {
    command.args(["-C", cwd.to_str().unwrap(), "--sandbox", "workspace-write"]);
    command
}

/// Starts a command that keeps running.
fn running(command: Command, cwd: &Path) -> Child {
    let mut command = sandboxed(command, cwd);
    command.args(["--", "sh", "-c", "echo ready; exec sleep 1000"]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    read_until(child.stdout.as_mut().unwrap(), "ready");
    assert_eq!(names(cwd), PLACEHOLDERS);
    child
}

/// Stops the sandboxes in every other round, to test those that clean up before the warden and those that it
/// has to wait for.
fn stop_sandboxes(server: u32, round: usize) {
    if round % 2 == 1 {
        for (pid, _) in children(server).iter().filter(|(_, line)| line.contains(SANDBOX)) {
            send(*pid, Signal::STOP);
        }
    }
}

fn codex_on(server: &Running, subcommand: &str) -> Command {
    let mut command = codex();
    command.args([subcommand, "--on", &server.url]);
    command
}

/// Makes a helper of the server create a file in the workspace, and stay.
async fn write_in(client: &mut Client, workspace: &Path) {
    let uri = |path: &Path| format!("file://{}", path.display());
    let sandbox = json!({"permissions": {"type": "workspace-write"}, "cwd": uri(workspace)});
    let path = uri(&workspace.join("file"));
    let params = json!({"path": path, "dataBase64": "", "sandbox": sandbox});
    let answer = client.call("fs/writeFile", params).await;
    assert!(answer.get("error").is_none(), "{answer}");
    assert_eq!(names(workspace), [".agents", ".codex", ".git", "file"]);
    std::fs::remove_file(workspace.join("file")).unwrap();
}

/// Tools outside would take a placeholder for a repository, or fail to remove the directory.
#[tokio::test]
async fn requests_that_only_read_create_nothing() {
    let base = workspace();
    let workspace = base.path().join("work");
    std::fs::create_dir(&workspace).unwrap();
    std::fs::write(workspace.join("f"), "text").unwrap();
    let uri = |path: &Path| format!("file://{}", path.display());
    let (root, file) = (uri(&workspace), uri(&workspace.join("f")));
    let special = |kind: &str, access: &str| json!({"path": {"type": "special", "value": {"kind": kind}}, "access": access});
    let missing = json!({"type": "path", "path": uri(&base.path().join("missing"))});
    let entries = json!([
        special("root", "read"),
        special("project_roots", "write"),
        {"path": missing, "access": "write"},
    ]);
    let sandbox = json!({
        "permissions": {
            "type": "managed",
            "file_system": {"type": "restricted", "entries": entries},
            "network": "restricted",
        },
        "cwd": root,
        "workspaceRoots": [root],
    });
    let options = json!({"maxDepth": 9, "maxDirectories": 99, "maxEntries": 99,
                         "followDirectorySymlinks": false});
    let times = || {
        let found = workspace.metadata().unwrap();
        [found.mtime(), found.mtime_nsec(), found.ctime(), found.ctime_nsec()]
    };
    let before = times();
    let server = Running::start(&[]);
    let mut client = server.client().await;
    for (method, params) in [
        ("fs/readFile", json!({"path": file})),
        ("fs/getMetadata", json!({"path": file})),
        ("fs/readDirectory", json!({"path": root})),
        ("fs/canonicalize", json!({"path": file})),
        ("fs/walk", json!({"path": root, "options": options})),
        ("fs/open", json!({"handleId": "h", "path": file})),
        ("fs/search", json!({"path": root, "pattern": "text"})),
        ("fs/glob", json!({"path": root, "patterns": ["*"]})),
        ("fs/watch", json!({"watchId": 2, "path": root})),
        ("fs/watchMissing", json!({"watchId": 3, "missing": [uri(&workspace.join("g"))]})),
    ] {
        let mut params = params;
        params["sandbox"] = sandbox.clone();
        let answer = client.call(method, params).await;
        assert!(answer.get("error").is_none(), "{method}: {answer}");
        assert_eq!(names(&workspace), ["f"], "{method}");
        assert_eq!(names(base.path()), ["work"], "{method}");
        assert_eq!(times(), before, "{method}");
    }
    // Under the same policy a change is possible, and the names are protected.
    let new = uri(&workspace.join("new"));
    let params = json!({"path": new, "dataBase64": "", "sandbox": sandbox});
    let answer = client.call("fs/writeFile", params).await;
    assert!(answer.get("error").is_none(), "{answer}");
    assert_eq!(names(&workspace), [".agents", ".codex", ".git", "f", "new"]);
    let git = uri(&workspace.join(".git/x"));
    let params = json!({"path": git, "dataBase64": "", "sandbox": sandbox});
    assert!(client.call("fs/writeFile", params).await.get("error").is_some());
}

#[test]
fn placeholders_are_gone_after_a_patch_without_a_server() {
    for _ in 0..ROUNDS {
        let workspace = workspace();
        let mut apply = codex();
        apply.arg("apply-patch");
        let patch = "*** Begin Patch\n*** Add File: new\n+text\n*** End Patch\n";
        let said = output_of(&mut sandboxed(apply, workspace.path()), patch.as_bytes());
        assert_eq!(said.success(), "A new\n");
        assert_eq!(names(workspace.path()), ["new"]);
    }
}

#[test]
fn placeholders_are_gone_after_a_program_that_cannot_be_executed() {
    everywhere(|codex| {
        for _ in 0..ROUNDS {
            let workspace = workspace();
            let mut run = sandboxed(codex("run"), workspace.path());
            output(run.args(["--", "no-such-program"])).failed(127, "no-such-program");
            assert_eq!(names(workspace.path()), [""; 0]);
        }
    });
}

/// With more workspaces than helpers, the first helpers end.
#[tokio::test]
async fn placeholders_are_gone_after_a_helper_ends() {
    let server = Running::start(&[]);
    let mut client = server.client().await;
    let workspaces: Vec<_> = (0..35).map(|_| workspace()).collect();
    for workspace in &workspaces {
        write_in(&mut client, workspace.path()).await;
    }
    for workspace in &workspaces[..3] {
        no_litter(workspace.path()).await;
    }
    // No zombies remain.
    let dead = || children(server.pid()).into_iter().any(|(pid, _)| state(pid) == Some(b'Z'));
    eventually("no zombie", || !dead()).await;
    server.signal(Signal::TERM);
    server.ended();
    for workspace in &workspaces {
        assert_eq!(names(workspace.path()), [""; 0]);
    }
}

#[tokio::test]
async fn placeholders_are_gone_after_sigterm() {
    let server = Running::start(&[]);
    let mut client = server.client().await;
    let (by_helper, by_process) = (workspace(), workspace());
    write_in(&mut client, by_helper.path()).await;
    let mut run = running(codex_on(&server, "run"), by_process.path());
    // A placeholder that was removed by hand does not keep the others.
    for workspace in [&by_helper, &by_process] {
        std::fs::remove_dir(workspace.path().join(".codex")).unwrap();
    }
    server.signal(Signal::TERM);
    server.ended();
    assert_eq!(names(by_helper.path()), [""; 0]);
    assert_eq!(names(by_process.path()), [""; 0]);
    // It would reconnect to the server.
    run.kill().unwrap();
    run.wait().unwrap();
}

#[tokio::test]
async fn placeholders_are_gone_after_the_server_is_killed() {
    for round in 0..ROUNDS {
        let mut server = Running::start(&[]);
        let mut client = server.client().await;
        let (by_helper, by_process) = (workspace(), workspace());
        write_in(&mut client, by_helper.path()).await;
        let mut run = running(codex_on(&server, "run"), by_process.path());
        stop_sandboxes(server.pid(), round);
        server.child.kill().unwrap();
        no_litter(by_helper.path()).await;
        no_litter(by_process.path()).await;
        // It would reconnect to the server.
        run.kill().unwrap();
        run.wait().unwrap();
    }
}

#[tokio::test]
async fn placeholders_are_gone_after_an_embedded_server_is_killed() {
    for round in 0..ROUNDS {
        let workspace = workspace();
        let mut run = codex();
        run.arg("run");
        let mut run = running(run, workspace.path());
        stop_sandboxes(run.id(), round);
        run.kill().unwrap();
        run.wait().unwrap();
        no_litter(workspace.path()).await;
    }
}

/// If a process is killed while it builds a sandbox, everything that it has started ends too: nothing holds
/// its output open.
#[test]
fn processes_that_build_a_sandbox_end_with_it() {
    const ROUNDS: u64 = 200;
    const MICROSECOND: Duration = Duration::from_micros(1);
    let directory = workspace();
    for round in 0..ROUNDS {
        // On one processor, so that its children run late.
        let mut command = Command::new("taskset");
        command.args(["-c", "0"]).arg(codex().get_program());
        command.args(["sandbox", "--profile", "read-only", "--", "sleep", "100"]);
        command.current_dir(directory.path()).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let threads = format!("/proc/{}/task", child.id());
        let forked = |thread: std::io::Result<std::fs::DirEntry>| {
            let children = thread.and_then(|thread| std::fs::read(thread.path().join("children")));
            children.is_ok_and(|children| !children.is_empty())
        };
        while !std::fs::read_dir(&threads).unwrap().any(forked) {}
        // At a random time before the start of the command.
        let until = Instant::now() + fastrand::Rng::with_seed(round).u32(..20_000) * MICROSECOND;
        while Instant::now() < until {
            std::hint::spin_loop();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let mut output = child.stdout.take().unwrap();
        let (end, ended) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut output, &mut std::io::sink());
            let _ = end.send(());
        });
        ended.recv_timeout(Duration::from_secs(20)).unwrap_or_else(|_| {
            panic!("round {round}: something is left that holds its output");
        });
    }
}

/// Directories pass their set-group-ID bit and default access list on to new entries; the placeholders are
/// still recognized.
#[tokio::test]
async fn placeholders_are_recognized_in_directories_that_set_modes() {
    let mut random = fastrand::Rng::with_seed(11);
    for round in 0..12 {
        let workspace = workspace();
        let mode = if random.bool() { 0o2775 } else { 0o755 };
        std::fs::set_permissions(workspace.path(), PermissionsExt::from_mode(mode)).unwrap();
        let rights: [u8; 3] = std::array::from_fn(|_| random.u8(..8));
        if round > 0 {
            set_default_access(workspace.path(), rights);
        }
        let mut command = codex();
        command.args(["sandbox", "--profile", "workspace-write", "--", "true"]);
        output(command.current_dir(workspace.path())).success();
        assert_eq!(names(workspace.path()), [""; 0], "{mode:o} {rights:?}");
        // While the sandbox runs, a placeholder with content belongs to the user.
        let mut run = codex();
        run.arg("run");
        let mut child = running(run, workspace.path());
        std::fs::write(workspace.path().join(".git/HEAD"), "").unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let what = format!("{mode:o} {rights:?}: only .git is left");
        eventually(&what, || names(workspace.path()) == [".git"]).await;
    }
}

/// Sets the default access list of a directory to these rights of owner, group and others.
fn set_default_access(directory: &Path, rights: [u8; 3]) {
    let mut list = 2u32.to_le_bytes().to_vec();
    for (tag, rights) in [1u16, 4, 0x20].into_iter().zip(rights) {
        list.extend(tag.to_le_bytes());
        list.extend(u16::from(rights).to_le_bytes());
        list.extend(u32::MAX.to_le_bytes());
    }
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(directory, "system.posix_acl_default", &list, flags).unwrap();
}
