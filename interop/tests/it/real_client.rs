//! Their client, driven by a scripted model, on our server.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use crate::environment::Plain;
use crate::model::{Model, Step, call, call_with, exec};
use crate::programs::{Implementation, Server, home, output};

/// A variable value that only our server's environment has.
const MARK: &str = "on-our-server";

/// A finished session of their client: its workspace and the tool outputs.
pub(crate) struct Session {
    _home: tempfile::TempDir,
    pub workspace: PathBuf,
    pub tool_outputs: Vec<String>,
    pub log: String,
}

/// Runs their client on the script; `change` selects the server.
pub(crate) fn session(
    sandbox: &str,
    steps: Vec<Step>,
    change: impl FnOnce(&mut Command),
) -> Session {
    let expected = steps.len();
    let model = Model::start(steps);
    let session = session_with(&model, sandbox, change);
    assert_eq!(session.tool_outputs.len(), expected, "{}", session.log);
    session
}

/// Runs their client on this model.
pub(crate) fn session_with(
    model: &Model,
    sandbox: &str,
    change: impl FnOnce(&mut Command),
) -> Session {
    let home = home();
    let workspace = home.path().join("workspace");
    std::fs::create_dir(&workspace).unwrap();
    let codex_home = home.path().join("codex");
    std::fs::create_dir(&codex_home).unwrap();
    model.configure(&codex_home);
    let mut command = Implementation::Theirs.program(&codex_home);
    command.args(["exec", "--skip-git-repo-check", "--sandbox", sandbox, "go"]);
    change(command.current_dir(&workspace));
    let result = output(&mut command);
    let log = format!("{}{}", result.out, result.err);
    assert_eq!(result.code, Some(0), "{log}");
    Session { _home: home, workspace, tool_outputs: model.tool_outputs(), log }
}

/// Runs the session on a server of ours that has [`MARK`].
fn on_ours(sandbox: &str, steps: Vec<Step>) -> (Session, Server) {
    let server = Server::with(Implementation::Ours, |command| {
        command.env("MARK", MARK).env("RUST_LOG", "debug");
    });
    let session = session(sandbox, steps, |command| {
        command.env("CODEX_EXEC_SERVER_URL", &server.url);
    });
    (session, server)
}

/// The id of the terminal session in a tool output.
pub(crate) fn session_id(answer: &str) -> u64 {
    let words = answer.split("session ID ").nth(1).unwrap_or_else(|| panic!("{answer}"));
    words.split_whitespace().next().unwrap().parse().unwrap()
}

/// Starts a terminal that reads a line, then types the line.
pub(crate) fn typing() -> [Step; 2] {
    [
        call(
            "exec_command",
            json!({"cmd": "read line; echo typed-$line", "tty": true, "yield_time_ms": 250}),
        ),
        call_with(
            "write_stdin",
            |answer| json!({"session_id": session_id(answer), "chars": "abc\n", "yield_time_ms": 30_000}),
        ),
    ]
}

/// Adds a file and changes another.
pub(crate) fn patching() -> Step {
    exec(
        "apply_patch <<'EOF'\n*** Begin Patch\n*** Add File: added.txt\n+new\n\
         *** Update File: there.txt\n@@\n-old\n+changed\n*** End Patch\nEOF",
    )
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

#[test]
#[ignore = "interop/run runs it"]
fn commands_terminals_and_edits_on_our_server() {
    let mut steps = vec![exec("echo $MARK; pwd; exit 7"), exec("echo old > there.txt")];
    steps.extend(typing());
    steps.push(patching());
    steps.push(exec("cat added.txt there.txt"));
    let (session, server) = on_ours("danger-full-access", steps);
    let tool_outputs = &session.tool_outputs;
    assert!(tool_outputs[0].contains("exited with code 7"), "{}", tool_outputs[0]);
    assert!(tool_outputs[0].contains(MARK), "{}", tool_outputs[0]);
    assert!(tool_outputs[0].contains(session.workspace.to_str().unwrap()), "{}", tool_outputs[0]);
    assert!(tool_outputs[3].contains("typed-abc"), "{tool_outputs:?}");
    assert!(
        tool_outputs[4].contains("A added.txt") && tool_outputs[4].contains("M there.txt"),
        "{tool_outputs:?}"
    );
    assert!(tool_outputs[5].contains("new\nchanged\n"), "{}", tool_outputs[5]);
    assert_eq!(read(&session.workspace.join("added.txt")), "new\n");
    // Our server made the edits and ran the commands.
    let log = server.program.log();
    for method in ["process/start", "process/write", "fs/writeFile"] {
        assert!(log.contains(&format!("method=\"{method}\"")), "{method}: {log}");
    }
}

#[test]
#[ignore = "interop/run runs it"]
fn their_client_ignores_the_kind_of_an_error() {
    let patch = exec(
        "apply_patch <<'EOF'\n*** Begin Patch\n*** Update File: missing.txt\n@@\n-old\n+new\n\
         *** End Patch\nEOF",
    );
    let (session, server) = on_ours("danger-full-access", vec![patch, exec("echo $MARK")]);
    let tool_outputs = &session.tool_outputs;
    // The message of our error is shown, without its kind.
    assert!(tool_outputs[0].contains("missing.txt"), "{tool_outputs:?}");
    assert!(tool_outputs[0].contains("No such file or directory"), "{tool_outputs:?}");
    assert!(!tool_outputs[0].contains("pathNotFound"), "{tool_outputs:?}");
    assert!(tool_outputs[1].contains(MARK), "{tool_outputs:?}");
    let log = server.program.log();
    assert!(log.contains("method=\"fs/"), "our server got the request: {log}");
}

#[test]
#[ignore = "interop/run runs it"]
fn our_sandbox_denies_their_client() {
    let outside = home();
    let target = outside.path().join("denied");
    let mut steps = vec![
        exec("echo $MARK; echo inside > inside.txt; echo code $?"),
        exec(&format!("echo x > {}; echo code $?", target.display())),
        exec("echo x > /etc/denied-by-the-sandbox; echo code $?"),
        exec("exec 3<>/dev/tcp/127.0.0.1/1; echo code $?"),
        exec("echo old > there.txt"),
    ];
    steps.extend(typing());
    steps.push(patching());
    steps.push(exec(&format!(
        "apply_patch <<'EOF'\n*** Begin Patch\n*** Add File: {}\n+new\n*** End Patch\nEOF",
        target.display()
    )));
    let (session, _server) = on_ours("workspace-write", steps);
    let tool_outputs = &session.tool_outputs;
    assert!(
        tool_outputs[0].contains(MARK) && tool_outputs[0].contains("code 0"),
        "{}",
        tool_outputs[0]
    );
    assert!(
        tool_outputs[1].contains("\ncode 1") && tool_outputs[1].contains("Read-only"),
        "{}",
        tool_outputs[1]
    );
    assert!(tool_outputs[2].contains("\ncode 1"), "{}", tool_outputs[2]);
    assert!(tool_outputs[3].contains("\ncode 1"), "there is no network: {}", tool_outputs[3]);
    assert!(tool_outputs[6].contains("typed-abc"), "{tool_outputs:?}");
    assert!(tool_outputs[7].contains("M there.txt"), "{}", tool_outputs[7]);
    assert!(!tool_outputs[8].contains("Success"), "{}", tool_outputs[8]);
    assert!(!target.exists() && !Path::new("/etc/denied-by-the-sandbox").exists());
    assert_eq!(read(&session.workspace.join("there.txt")), "changed\n");
}

#[test]
#[ignore = "interop/run runs it"]
fn read_only_sandbox_denies_writes() {
    let steps =
        vec![exec("echo $MARK; echo x > inside.txt; echo code $?"), exec("cat /etc/hostname")];
    let (session, _server) = on_ours("read-only", steps);
    assert!(session.tool_outputs[0].contains(MARK), "{}", session.log);
    assert!(session.tool_outputs[0].contains("\ncode 1"), "{}", session.tool_outputs[0]);
    assert!(session.tool_outputs[1].contains("exited with code 0"), "{}", session.tool_outputs[1]);
    assert!(!session.workspace.join("inside.txt").exists());
}

#[test]
#[ignore = "interop/run runs it"]
fn much_output_and_a_missing_program() {
    let steps = vec![
        exec("seq 1 200000 | sha256sum; seq 1 200000 | tail -n 1"),
        exec("no-such-program-anywhere"),
        exec("yes | head -c 3000000 | wc -c"),
        exec("yes out | head -c 3000000"),
    ];
    let (session, _server) = on_ours("danger-full-access", steps);
    let tool_outputs = &session.tool_outputs;
    assert!(tool_outputs[0].contains("200000"), "{}", tool_outputs[0]);
    assert!(tool_outputs[1].contains("exited with code 127"), "{}", tool_outputs[1]);
    assert!(tool_outputs[2].contains("3000000"), "{}", tool_outputs[2]);
    assert!(tool_outputs[3].contains("exited with code 0"), "{}", tool_outputs[3]);
}

/// Their client sends `shellSnapshot` if its feature is on; the profile then runs once for both commands.
#[test]
#[ignore = "interop/run runs it"]
fn their_client_starts_shells_from_our_snapshot() {
    for (feature, runs) in [("true", 1), ("false", 2)] {
        let machine = home();
        let profile = "echo x >> $HOME/runs\nexport FROM=profile\ngreet() { echo hello-$1; }\n";
        std::fs::write(machine.path().join(".bash_profile"), profile).unwrap();
        let server = Server::with(Implementation::Ours, |command| {
            command.env("HOME", machine.path()).env("SHELL", "/bin/bash");
        });
        let steps = vec![exec("greet $FROM"), exec("greet again; shopt -q login_shell; echo $?")];
        let session = session("danger-full-access", steps, |command| {
            command.env("CODEX_EXEC_SERVER_URL", &server.url);
            command.args(["-c", &format!("features.shell_snapshot_v2={feature}")]);
        });
        let outputs = &session.tool_outputs;
        assert!(outputs[0].contains("hello-profile"), "{}", outputs[0]);
        let login = if feature == "true" { "hello-again\n1" } else { "hello-again\n0" };
        assert!(outputs[1].contains(login), "{}", outputs[1]);
        assert_eq!(read(&machine.path().join("runs")).lines().count(), runs, "{feature}");
    }
}

/// The same policy hides a program from both servers; both start a process that ends as denied.
#[test]
#[ignore = "interop/run runs it"]
fn a_hidden_program_is_a_denial_on_both_servers() {
    let directory = home();
    let at = |name: &str| directory.path().join(name);
    for name in ["hidden", "open"] {
        std::fs::create_dir(at(name)).unwrap();
    }
    std::fs::copy("/bin/true", at("hidden/program")).unwrap();
    let uri = |name: &str| format!("file://{}", at(name).display());
    let params = json!({
        "processId": "p", "argv": [at("hidden/program")], "cwd": uri("open"), "env": {}, "tty": false,
        "sandbox": {
            "permissions": {"type": "managed", "network": "restricted", "file_system": {
                "type": "restricted", "entries": [
                    {"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"},
                    {"path": {"type": "path", "path": uri("hidden")}, "access": "deny"},
                ]}},
            "cwd": uri("open"), "workspaceRoots": [uri("open")], "windowsSandboxLevel": "disabled",
            "windowsSandboxPrivateDesktop": false, "useLegacyLandlock": false,
        },
    });
    for implementation in [Implementation::Ours, Implementation::Theirs] {
        let mut plain = Plain::start(implementation, directory.path());
        let started = plain.call("process/start", &params);
        assert_eq!(started["sandboxType"], "linuxSeccomp", "{implementation:?}: {started}");
        let mut answer = json!({"exited": false});
        while answer["exited"] != true {
            answer = plain.call("process/read", &json!({"processId": "p", "waitMs": 1000}));
        }
        let end = (&answer["exitCode"], &answer["sandboxDenied"]);
        assert_eq!(end, (&json!(101), &json!(true)), "{implementation:?}: {answer}");
    }
}
