//! What sandboxed requests report: denials of processes, unenforceable policies, changing roots, and
//! approval after a denial.

use std::path::Path;

use codex_exec_server::client::{Approval, ExecCommand, PermissionProfile, SandboxContext};
use codex_exec_server::{ExecServerClient, PathUri, RemoteExecServerConnectArgs};
use serde_json::{Value, json};

use crate::commands::read;
use crate::support::{Client, Running, all_gone, below, send, start};

fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in("/var/tmp").unwrap()
}

fn policy(entries: &Value, cwd: &Path) -> Value {
    json!({
        "permissions": {
            "type": "managed",
            "network": "restricted",
            "file_system": {"type": "restricted", "entries": entries},
        },
        "cwd": cwd,
        "workspaceRoots": [cwd],
    })
}

fn whole_disk() -> Value {
    json!({"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"})
}

fn workspace(cwd: &Path) -> Value {
    let project =
        json!({"path": {"type": "special", "value": {"kind": "project_roots"}}, "access": "write"});
    policy(&json!([whole_disk(), project]), cwd)
}

/// The exit code and denial in `process/exited`, checked against `process/read`.
async fn denied(client: &mut Client, id: &str, script: &str, sandbox: Value) -> (i64, bool) {
    let mut params = start(id, script);
    params["sandbox"] = sandbox;
    let answer = client.call("process/start", params).await;
    assert_eq!(answer["result"]["processId"], id, "{answer}");
    loop {
        let notice = client.notification().await;
        if notice["method"] == "process/exited" && notice["params"]["processId"] == id {
            let told = &notice["params"];
            let read = client.call("process/read", json!({"processId": id})).await;
            assert_eq!(read["result"]["sandboxDenied"], told["sandboxDenied"], "{script}");
            return (told["exitCode"].as_i64().unwrap(), told["sandboxDenied"].as_bool().unwrap());
        }
    }
}

#[tokio::test]
async fn only_denials_are_reported_as_denials() {
    let server = Running::start(&[]);
    let mut client = server.client().await;
    let directory = directory();
    let path = directory.path().display();
    let read_only = json!({"permissions": {"type": "read-only"}, "cwd": directory.path()});
    std::fs::create_dir(directory.path().join("sandbox")).unwrap();
    let scripts = [
        (format!("echo x > {path}/x"), true),
        (format!("mkdir {path}/x"), true),
        ("echo 'blocked by the Sandbox' >&2; exit 1".to_owned(), true),
        ("echo 'seccomp: no' >&2; exit 2".to_owned(), true),
        ("kill -SYS $$".to_owned(), true),
        // Failures that the sandbox did not cause.
        ("exit 1".to_owned(), false),
        ("exit 126".to_owned(), false),
        ("ls /nope".to_owned(), false),
        ("no-such-command".to_owned(), false),
        // A path that contains an error message is no denial.
        (format!("ls {path}/sandbox/nope"), false),
        (format!("ls {path}/nope/my-sandbox.txt"), false),
        (format!("cd {path}/sandbox; pwd; exit 1"), false),
        // A success is no denial, whatever it printed.
        (format!("mkdir {path}/x; true"), false),
        (format!("mkdir {path}/x 2>&1 | cat"), false),
    ];
    for (n, (script, expected)) in scripts.iter().enumerate() {
        let (code, told) = denied(&mut client, &format!("in-{n}"), script, read_only.clone()).await;
        assert_eq!(told, *expected, "{script}: {code}");
        // Without a sandbox, the same output is no denial.
        if script.contains("echo '") || script.contains("kill") {
            let (_, told) = denied(&mut client, &format!("out-{n}"), script, Value::Null).await;
            assert!(!told, "{script}");
        }
    }
}

#[tokio::test]
async fn an_unenforceable_policy_is_refused_and_nothing_runs() {
    let server = Running::start(&[]);
    let mut client = server.client().await;
    let directory = directory();
    let many = directory.path().join("many");
    std::fs::create_dir(&many).unwrap();
    for n in 0..10_000 {
        std::fs::write(many.join(format!("{n}.key")), "").unwrap();
    }
    let glob = |pattern: &str, access: &str| json!([whole_disk(), {"path": {"type": "glob_pattern", "pattern": pattern}, "access": access}]);
    let entry = |path: Value, access: &str| json!([whole_disk(), {"path": path, "access": access}]);
    let unknown = json!({"type": "special", "value": {"kind": "moon"}});
    for (sandbox, words) in [
        (policy(&glob("**/*.key", "deny"), directory.path()), "match more than 4096 files"),
        (policy(&glob("**/*.key", "write"), directory.path()), "glob patterns can only deny"),
        (policy(&glob("../x", "deny"), directory.path()), "`..`"),
        (policy(&entry(unknown, "deny"), directory.path()), "unknown kind"),
        (policy(&vec![whole_disk(); 10_001].into(), directory.path()), "at most 10000"),
        (json!({"permissions": {"type": "nope"}}), ""),
        (json!({"permissions": 7}), ""),
        (json!("read-only-ish"), ""),
    ] {
        let mut params = start("never", "touch /var/tmp/never");
        params["sandbox"] = sandbox.clone();
        let answer = client.call("process/start", params).await;
        assert_eq!(answer["error"]["code"], -32602, "{sandbox}: {answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains(words), "{answer}");
        let path = directory.path().join("never");
        let params = json!({"path": path, "dataBase64": "", "sandbox": sandbox});
        let answer = client.call("fs/writeFile", params).await;
        let code = if words.is_empty() { -32602 } else { -32600 };
        assert_eq!(answer["error"]["code"], code, "{sandbox}: {answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains(words), "{answer}");
        assert!(!path.exists());
    }
}

/// A spare waits for the next sandbox; if it dies, the sandbox starts without it.
#[tokio::test]
async fn a_spare_is_used_once_and_may_die() {
    let server = Running::start(&[]);
    let pid = server.pid();
    let spare = || {
        let waiting = |line: &str| line.contains("__linux-sandbox wait");
        below(pid).into_iter().find(|(_, line)| waiting(line)).map(|(pid, _)| pid)
    };
    let mut client = server.client().await;
    let read_only = json!({"permissions": {"type": "read-only"}, "cwd": "/"});
    assert_eq!(spare(), None, "nothing is kept before the first sandbox");
    let mut used = Vec::new();
    let mut starts = 0;
    while used.len() < 4 {
        assert!(starts < 1000, "nothing is kept ready any more: {used:?}");
        let ended = denied(&mut client, &format!("p-{starts}"), "exit 3", read_only.clone()).await;
        assert_eq!(ended, (3, false));
        starts += 1;
        // The next start detects a spare that was killed.
        let Some(ready) = spare().filter(|pid| !used.contains(pid)) else { continue };
        if used.len() % 2 == 0 {
            send(ready, rustix::process::Signal::KILL);
            all_gone(&[ready]).await;
        }
        used.push(ready);
    }
    drop(client);
    server.signal(rustix::process::Signal::TERM);
    server.ended();
    all_gone(&used).await;
}

/// A helper is not reused once its policy's root is another directory.
#[tokio::test]
async fn a_replaced_root_is_another_root() {
    let server = Running::start(&[]);
    let mut client = server.client().await;
    let directory = directory();
    let (root, old) = (directory.path().join("root"), directory.path().join("old"));
    let file = root.join("file");
    let write = |text: &str| {
        let data = base64_simd::STANDARD.encode_to_string(text);
        json!({"path": file, "dataBase64": data, "sandbox": workspace(&root)})
    };
    std::fs::create_dir(&root).unwrap();
    let answer = client.call("fs/writeFile", write("first")).await;
    assert_eq!(answer["result"], json!({}), "{answer}");
    // Moved away and replaced.
    std::fs::rename(&root, &old).unwrap();
    std::fs::create_dir(&root).unwrap();
    let answer = client.call("fs/writeFile", write("second")).await;
    assert_eq!(answer["result"], json!({}), "{answer}");
    assert_eq!((read(old.join("file")), read(&file)), ("first".to_owned(), "second".to_owned()));
    // Removed: the policy grants a missing path, so nothing.
    std::fs::remove_dir_all(&root).unwrap();
    let answer = client.call("fs/writeFile", write("third")).await;
    assert!(answer["error"]["code"].is_i64(), "{answer}");
    assert!(!root.exists());
    // A link to another directory grants that directory.
    std::os::unix::fs::symlink(&old, &root).unwrap();
    let answer = client.call("fs/writeFile", write("fourth")).await;
    assert_eq!(answer["result"], json!({}), "{answer}");
    assert_eq!(read(old.join("file")), "fourth");
}

/// The kernel removes a mount when the file below it is removed; the next file with that name may have the
/// same inode number, or be the same file.
#[tokio::test]
async fn a_denied_path_stays_denied_when_it_is_created_again() {
    let server = Running::start(&[]);
    let mut client = server.client().await;
    let directory = directory();
    let at = |name: &str| directory.path().join(name);
    let (secret, other) = (at("secret"), at("other"));
    std::fs::write(&secret, "first").unwrap();
    std::fs::write(at("open"), "open").unwrap();
    let entry = |path: &std::path::Path, access: &str| json!({"path": {"type": "path", "path": path}, "access": access});
    let sandbox = json!({"permissions": {"type": "managed", "network": "restricted", "file_system": {
        "type": "restricted",
        "entries": [entry(directory.path(), "read"), entry(&secret, "deny")],
    }}, "cwd": "/"});
    let remake: [&dyn Fn(); 3] = [
        &|| {
            std::fs::remove_file(&secret).unwrap();
            std::fs::write(&secret, "second").unwrap();
        },
        &|| {
            std::fs::hard_link(&secret, &other).unwrap();
            std::fs::remove_file(&secret).unwrap();
            std::fs::rename(&other, &secret).unwrap();
        },
        &|| {
            std::fs::write(&other, "third").unwrap();
            std::fs::rename(&other, &secret).unwrap();
        },
    ];
    for remake in remake.into_iter().cycle().take(9) {
        let read = |path: &std::path::Path| json!({"path": path, "sandbox": sandbox});
        let answer = client.call("fs/readFile", read(&at("open"))).await;
        assert_eq!(answer["result"]["dataBase64"], "b3Blbg==", "{answer}");
        let answer = client.call("fs/readFile", read(&secret)).await;
        assert!(answer["error"].is_object(), "{answer}");
        remake();
        let answer = client.call("fs/readFile", read(&secret)).await;
        assert!(answer["error"].is_object(), "{answer}");
    }
}

#[tokio::test]
async fn a_denied_command_runs_again_after_approval() {
    let server = Running::start(&[]);
    let arguments = RemoteExecServerConnectArgs::new(&server.url, "test");
    let client = ExecServerClient::connect_websocket(arguments).await.unwrap();
    let directory = directory();
    let file = directory.path().join("greeting");
    let root = PathUri::try_from(directory.path()).unwrap();
    let command = || {
        ExecCommand::shell("echo hi > greeting")
            .cwd_uri(root.clone())
            .sandbox(SandboxContext::in_workspace(PermissionProfile::read_only(), root.clone()))
    };
    let first = client
        .run_with_approval(command(), async |denial| {
            assert!(denial.status.sandbox_denied);
            assert_eq!(denial.command.argv()[0], "/bin/sh");
            Approval::Refused
        })
        .await
        .unwrap();
    assert!(!first.status.success() && first.status.sandbox_denied);
    assert!(!file.exists());
    let second = client.run_with_approval(command(), async |_| Approval::Approved).await.unwrap();
    assert!(second.status.success() && !second.status.sandbox_denied);
    assert_eq!(read(&file), "hi\n");
    // A command that fails for another reason causes no question.
    let fails = ExecCommand::shell("exit 3")
        .cwd_uri(root.clone())
        .sandbox(SandboxContext::in_workspace(PermissionProfile::read_only(), root.clone()));
    let failed =
        client.run_with_approval(fails, async |_| panic!("nothing was denied")).await.unwrap();
    assert_eq!(failed.status.code, 3);
}

/// Awaits the exit of a process that its policy did not let start.
async fn assert_denied(client: &mut Client) {
    let exited = loop {
        let notice = client.notification().await;
        if notice["method"] == "process/exited" {
            break notice["params"].clone();
        }
    };
    assert_eq!((&exited["exitCode"], &exited["sandboxDenied"]), (&json!(101), &json!(true)));
}

/// Clients ask for approval after a denied process, not after an error response.
#[tokio::test]
async fn hidden_working_directory_denies_the_process() {
    let server = Running::start(&[]);
    let mut client = server.client().await;
    let directory = directory();
    let (hidden, open) = (directory.path().join("hidden"), directory.path().join("open"));
    std::fs::create_dir(&hidden).unwrap();
    std::fs::create_dir(&open).unwrap();
    let minimal =
        json!({"path": {"type": "special", "value": {"kind": "minimal"}}, "access": "read"});
    let deny = json!({"path": {"type": "path", "path": hidden}, "access": "deny"});
    let policies = [json!([whole_disk(), deny]), json!([minimal]), json!([])];
    for (n, entries) in policies.iter().enumerate() {
        let id = format!("p{n}");
        let mut params = start(&id, "echo ran > made");
        params["cwd"] = json!(hidden);
        params["sandbox"] = policy(entries, &open);
        let answer = client.call("process/start", params).await;
        assert_eq!(answer["result"]["sandboxType"], "linuxSeccomp", "{answer}");
        assert_denied(&mut client).await;
        let wait = json!({"processId": id, "waitMs": 10_000});
        let read = client.call("process/read", wait).await["result"].clone();
        let text = read["chunks"].to_string();
        assert_eq!(read["chunks"][0]["stream"], "stderr", "{text}");
        assert_eq!(read["sandboxDenied"], true);
        assert!(!hidden.join("made").exists() && !Path::new("/made").exists());
    }
}

/// The same holds for a program that only the policy keeps from running.
#[tokio::test]
async fn hidden_program_denies_the_process() {
    let server = Running::start(&[]);
    let mut client = server.client().await;
    let directory = directory();
    let (hidden, open) = (directory.path().join("hidden"), directory.path().join("open"));
    std::fs::create_dir(&hidden).unwrap();
    std::fs::create_dir(&open).unwrap();
    std::fs::copy("/bin/true", hidden.join("program")).unwrap();
    std::fs::write(hidden.join("plain"), "text").unwrap();
    let minimal =
        json!({"path": {"type": "special", "value": {"kind": "minimal"}}, "access": "read"});
    let work = json!({"path": {"type": "path", "path": open}, "access": "read"});
    let deny = json!({"path": {"type": "path", "path": hidden}, "access": "deny"});
    let program = hidden.join("program");
    let plain = hidden.join("plain");
    let cases = [
        (json!([whole_disk(), deny]), json!([program]), true),
        (json!([whole_disk(), deny]), json!(["program"]), true),
        (json!([minimal, work]), json!([program]), true),
        // The loader of the program is hidden.
        (
            json!([work, {"path": {"type": "path", "path": hidden}, "access": "read"}]),
            json!([program]),
            true,
        ),
        // These cannot be executed outside either.
        (json!([whole_disk(), deny]), json!([plain]), false),
        (json!([whole_disk(), deny]), json!(["/no/such/program"]), false),
        (json!([minimal, work]), json!(["no-such-program"]), false),
    ];
    for (n, (entries, argv, is_hidden)) in cases.iter().enumerate() {
        let id = format!("p{n}");
        let mut params = start(&id, "");
        params["argv"] = argv.clone();
        params["cwd"] = json!(open);
        params["env"] = json!({"PATH": format!("{}:/usr/bin:/bin", hidden.display())});
        params["sandbox"] = policy(entries, &open);
        let answer = client.call("process/start", params).await;
        if !is_hidden {
            assert_eq!(answer["error"]["code"], -32603, "{argv}: {answer}");
            continue;
        }
        assert_eq!(answer["result"]["sandboxType"], "linuxSeccomp", "{argv}: {answer}");
        assert_denied(&mut client).await;
    }
}

/// Without a sandbox there is nothing to enforce; with one, something has to lead out of it.
#[tokio::test]
async fn enforcing_a_managed_network_is_accepted_without_a_sandbox() {
    let server = Running::start(&[]);
    let mut client = server.client().await;
    let mut params = start("plain", "true");
    params["enforceManagedNetwork"] = json!(true);
    let answer = client.call("process/start", params.clone()).await;
    assert_eq!(answer["result"]["sandboxType"], "none", "{answer}");
    params["processId"] = json!("confined");
    params["sandbox"] = policy(&json!([whole_disk()]), Path::new("/"));
    let answer = client.call("process/start", params).await;
    assert_eq!(answer["error"]["code"], -32602, "{answer}");
}
