//! The server's own files: credentials that no sandbox reads, and executables that none replaces.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::skipped::runs_as_root;
use crate::support::{Client, Running, all_below, codex, eventually, start, warden};

/// The user id of `nobody`.
const UNPRIVILEGED: u32 = 65_534;

/// Content that must not leak, plain and in base64.
const SECRET: &str = "TOPSECRETTOPSECRETTOPSECRETTOPSECRET";
const SECRET_ENCODED: &str = "VE9QU0VDUkVU";

struct World {
    _directory: tempfile::TempDir,
    work: PathBuf,
    home: PathBuf,
    nobody: bool,
}

impl World {
    fn new(nobody: bool) -> Self {
        // Not below /tmp, which some policies make writable.
        let directory = tempfile::Builder::new().prefix("own-").tempdir_in("/var/tmp").unwrap();
        let base = directory.path().canonicalize().unwrap();
        std::fs::set_permissions(&base, PermissionsExt::from_mode(0o755)).unwrap();
        let (work, home) = (base.join("workspace"), base.join("home"));
        let world = Self { _directory: directory, work, home, nobody };
        for directory in [&world.work, &world.home.join(".codex"), &world.sessions()] {
            std::fs::create_dir_all(directory).unwrap();
        }
        for file in world.secrets() {
            std::fs::write(file, SECRET).unwrap();
        }
        world.give();
        world
    }

    fn sessions(&self) -> PathBuf {
        self.home.join("state/codex/sessions")
    }

    fn token(&self) -> PathBuf {
        self.work.join("token")
    }

    fn secrets(&self) -> [PathBuf; 3] {
        [self.token(), self.home.join(".codex/auth.json"), self.sessions().join("mine.json")]
    }

    /// Makes the server's user the owner of everything.
    fn give(&self) {
        if self.nobody {
            let output = std::process::Command::new("chown")
                .args(["-R", &UNPRIVILEGED.to_string()])
                .args([&self.work, &self.home])
                .output();
            assert!(output.unwrap().status.success());
        }
    }

    fn server(&self, program: &Path) -> Running {
        let mut command = std::process::Command::new(program);
        if self.nobody {
            command.uid(UNPRIVILEGED).gid(UNPRIVILEGED);
        }
        command
            .args(["exec-server", "--ws-auth", "capability-token", "--ws-token-file", "token"])
            .current_dir(&self.work)
            .env("HOME", &self.home)
            .env("XDG_STATE_HOME", self.home.join("state"))
            .env_remove("CODEX_HOME");
        Running::start_with(&mut command)
    }

    /// Every kind of policy, and some that name the secrets themselves.
    fn policies(&self) -> Vec<Value> {
        let uri = |path: &Path| format!("file://{}", path.display());
        let entry = |path: &Path, access: &str| json!({"path": {"type": "path", "path": uri(path)}, "access": access});
        let special = |kind: &str, access: &str| json!({"path": {"type": "special", "value": {"kind": kind}}, "access": access});
        let managed = |entries: Vec<Value>| {
            json!({
                "permissions": {
                    "type": "managed",
                    "file_system": {"type": "restricted", "entries": entries},
                    "network": "restricted",
                },
                "cwd": uri(&self.work),
                "workspaceRoots": [uri(&self.work)],
            })
        };
        let named = |access: &'static str| self.secrets().map(|file| entry(&file, access)).to_vec();
        let with = |mut entries: Vec<Value>, more: Vec<Value>| {
            entries.extend(more);
            managed(entries)
        };
        vec![
            json!({"permissions": {"type": "read-only"}, "cwd": uri(&self.work)}),
            json!({"permissions": {"type": "workspace-write"}, "cwd": uri(&self.work)}),
            managed(vec![special("minimal", "read"), special("project_roots", "write")]),
            with(vec![special("minimal", "read"), entry(&self.work, "read")], named("read")),
            with(vec![special("minimal", "read"), entry(&self.work, "read")], named("write")),
            with(vec![special("root", "write")], named("write")),
            managed(vec![
                special("minimal", "read"),
                entry(&self.work, "read"),
                entry(&self.home, "write"),
            ]),
        ]
    }
}

fn users() -> Vec<bool> {
    if runs_as_root() { vec![false, true] } else { vec![false] }
}

async fn run(client: &mut Client, id: &str, script: &str, sandbox: Value, cwd: &Path) -> String {
    let mut params = start(id, script);
    params["sandbox"] = sandbox;
    params["cwd"] = format!("file://{}", cwd.display()).into();
    let answer = client.call("process/start", params).await;
    assert!(answer["result"].is_object(), "{answer}");
    client.closed(id).await.0
}

#[tokio::test]
async fn credentials_stay_out_of_every_sandbox() {
    for nobody in users() {
        let world = World::new(nobody);
        let server = world.server(Path::new(env!("CARGO_BIN_EXE_codex")));
        let mut client = server.client_with_token(SECRET).await;
        for (n, policy) in world.policies().into_iter().enumerate() {
            for (m, file) in world.secrets().into_iter().enumerate() {
                let shown = file.display();
                let script = format!(
                    "cat {shown}; cat < {shown}; cp {shown} copy; cat copy; ln {shown} link; cat link; \
                     cat /proc/self/cwd/../workspace/token; mv {shown} moved; cat moved; rm -f {shown}; \
                     echo gone > {shown}; true"
                );
                let id = format!("p-{n}-{m}");
                let said = run(&mut client, &id, &script, policy.clone(), &world.work).await;
                assert!(!said.contains(SECRET), "{policy} {shown}: {said}");
                assert_eq!(std::fs::read_to_string(&file).unwrap(), SECRET, "{policy} {shown}");
                let path = format!("file://{shown}");
                let copy = format!("file://{}/copy", world.work.display());
                for (method, params) in [
                    ("fs/readFile", json!({"path": path})),
                    ("fs/writeFile", json!({"path": path, "dataBase64": "eA=="})),
                    (
                        "fs/copy",
                        json!({"sourcePath": path, "destinationPath": copy, "recursive": false}),
                    ),
                    ("fs/remove", json!({"path": path, "recursive": false, "force": true})),
                ] {
                    let mut params = params;
                    params["sandbox"] = policy.clone();
                    let answer = client.call(method, params).await.to_string();
                    let given = answer.contains(SECRET) || answer.contains(SECRET_ENCODED);
                    assert!(!given, "{method} {policy}: {answer}");
                    let there = std::fs::read_to_string(&file).unwrap();
                    assert_eq!(there, SECRET, "{method} {policy} {shown}: {answer}");
                    let copied = std::fs::read_to_string(world.work.join("copy"));
                    assert!(!copied.unwrap_or_default().contains(SECRET), "{method} {policy}");
                }
            }
        }
        // Requests without a sandbox can read them.
        for (n, kind) in ["danger-full-access", "disabled"].into_iter().enumerate() {
            let policy = json!({"permissions": {"type": kind}, "cwd": "file:///"});
            let id = format!("free-{n}");
            let said = run(&mut client, &id, "cat token", policy.clone(), &world.work).await;
            assert_eq!(said, SECRET, "{kind}");
            let path = format!("file://{}", world.token().display());
            let read = json!({"path": path, "sandbox": policy});
            let answer = client.call("fs/readFile", read).await;
            assert!(answer.to_string().contains(SECRET_ENCODED), "{kind}: {answer}");
        }
    }
}

#[test]
fn codex_sandbox_hides_credentials() {
    let world = World::new(false);
    let script = "cat \"$1\" \"$2\"; env";
    let [_, auth, session] = world.secrets();
    for profile in ["read-only", "workspace-write"] {
        let mut command = codex();
        command
            .args(["sandbox", "--profile", profile, "--", "sh", "-c", script, "sh"])
            .args([&auth, &session])
            .current_dir(&world.work)
            .env("HOME", &world.home)
            .env("XDG_STATE_HOME", world.home.join("state"))
            .env_remove("CODEX_HOME");
        for name in CREDENTIALS {
            command.env(name, SECRET);
        }
        let output = command.env("OTHER", "seen").output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(!said.contains(SECRET), "{profile}: {said}");
        assert!(said.contains("OTHER=seen"), "{profile}: {said} {output:?}");
    }
}

const CREDENTIALS: [&str; 6] = [
    "CODEX_ACCESS_TOKEN",
    "CODEX_API_KEY",
    "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN",
    "CODEX_EXEC_SERVER_REMOTE_BEARER_TOKEN",
    "CODEX_EXEC_SERVER_TOKEN",
    "CODEX_RENDEZVOUS_NATS",
];

#[tokio::test]
async fn no_credential_variable_reaches_a_sandbox() {
    let mut command = codex();
    command.arg("exec-server").env("OTHER", "seen");
    for name in CREDENTIALS {
        command.env(name, SECRET);
    }
    let server = Running::start_with(&mut command);
    let mut client = server.client().await;
    let mut params = start("p", "env; tr '\\0' '\\n' < /proc/1/environ; cat /proc/*/environ");
    params["sandbox"] = json!({"permissions": {"type": "read-only"}, "cwd": "file:///"});
    params["envPolicy"] = json!({"inherit": "all", "ignoreDefaultExcludes": true});
    let answer = client.call("process/start", params).await;
    assert!(answer["result"].is_object(), "{answer}");
    let (said, _) = client.closed("p").await;
    assert!(said.contains("OTHER=seen") && !said.contains(SECRET), "{said}");
}

/// The password database has the home directory if `HOME` does not, for what is hidden as for what is used.
/// A path is bytes: what no text can name is protected all the same.
#[test]
fn credentials_are_hidden_in_a_home_of_any_name() {
    let world = World::new(false);
    let names: [&[u8]; 3] = [b"\xff", b"caf\xe9 \xf0\x28", b" plain"];
    for name in names.map(OsStr::from_bytes) {
        let home = world.work.join(name);
        std::fs::create_dir(&home).unwrap();
        std::fs::write(home.join("auth.json"), SECRET).unwrap();
        for profile in ["read-only", "workspace-write"] {
            let mut command = codex();
            command.current_dir(&world.work).env("HOME", &world.home).env("CODEX_HOME", &home);
            command
                .args(["sandbox", "--profile", profile, "--", "cat"])
                .arg(home.join("auth.json"));
            let output = command.output().unwrap();
            assert!(!output.status.success() && output.stdout.is_empty(), "{name:?} {output:?}");
        }
    }
}

#[test]
fn saved_sessions_are_hidden_without_a_home_variable() {
    for nobody in users() {
        let world = World::new(nobody);
        let sessions = world.home.join(".local/state/codex/sessions");
        std::fs::create_dir_all(&sessions).unwrap();
        std::fs::write(sessions.join("mine.json"), SECRET).unwrap();
        std::fs::write(world.work.join("plain"), "plain").unwrap();
        let passwd = world.work.join("passwd");
        std::fs::write(&passwd, format!("root:x:0:0::{}:/bin/sh\n", world.home.display())).unwrap();
        world.give();
        for home in [None, Some(""), Some("relative"), Some("/nonexistent")] {
            // The user becomes root of a namespace in which the password file says where its home is.
            let mut command = std::process::Command::new("unshare");
            command.args(["--user", "--map-root-user", "--mount", "sh", "-c"]);
            command.arg("mount --bind passwd /etc/passwd && exec \"$0\" \"$@\"");
            command.arg(env!("CARGO_BIN_EXE_codex")).args(["sandbox", "--", "cat", "plain"]);
            command.arg(sessions.join("mine.json")).arg(world.home.join(".codex/auth.json"));
            command.current_dir(&world.work).env_remove("HOME").env_remove("XDG_STATE_HOME");
            command.env_remove("CODEX_HOME").envs(home.map(|home| ("HOME", home)));
            if nobody {
                command.uid(UNPRIVILEGED).gid(UNPRIVILEGED);
            }
            let output = command.output().unwrap();
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(said.starts_with("plain"), "the control: {output:?}");
            // An absolute path is the home directory, whatever the database says.
            let expected = home == Some("/nonexistent");
            assert_eq!(said.contains(SECRET), expected, "{home:?}: {said}");
        }
    }
}

#[tokio::test]
async fn the_link_that_the_server_was_started_by_cannot_be_replaced() {
    for nobody in users() {
        let world = World::new(nobody);
        let link = world.work.join("bin/codex");
        let middle = world.work.join("current");
        std::fs::create_dir(world.work.join("bin")).unwrap();
        std::os::unix::fs::symlink("../current", &link).unwrap();
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_codex"), &middle).unwrap();
        world.give();
        let server = world.server(&link);
        let mut client = server.client_with_token(SECRET).await;
        let policy = json!({"permissions": {"type": "workspace-write"},
            "cwd": format!("file://{}", world.work.display())});
        let script = "ln -sfn /bin/echo bin/codex; ln -sfn /bin/echo current; rm -f bin/codex current; \
                      cp /bin/echo other; mv -f other bin/codex; mv bin away; touch bin/was-here";
        let said = run(&mut client, "p", script, policy, &world.work).await;
        assert!(world.work.join("bin/was-here").exists(), "the control: {said}");
        assert_eq!(std::fs::read_link(&link).unwrap(), Path::new("../current"), "{said}");
        let target = std::fs::read_link(&middle).unwrap();
        assert_eq!(target, Path::new(env!("CARGO_BIN_EXE_codex")), "{said}");
    }
}

#[tokio::test]
async fn the_servers_executable_cannot_be_replaced() {
    for nobody in users() {
        let world = World::new(nobody);
        let program = world.work.join("codex");
        std::fs::copy(env!("CARGO_BIN_EXE_codex"), &program).unwrap();
        world.give();
        let marker = world.home.join("ran");
        let other = format!("#!/bin/sh\necho \"$0 $*\" >> {}\n", marker.display());
        std::fs::write(world.work.join("other"), &other).unwrap();
        std::fs::set_permissions(world.work.join("other"), PermissionsExt::from_mode(0o755))
            .unwrap();
        let before = std::fs::metadata(&program).unwrap();

        let server = world.server(&program);
        let mut client = server.client_with_token(SECRET).await;
        let policy = json!({"permissions": {"type": "workspace-write"},
            "cwd": format!("file://{}", world.work.display())});
        // From inside, it cannot be changed.
        let script = "rm -f codex; mv other codex; cp other codex; ln -f other codex; cat other > codex; \
                      chmod 777 codex; mv codex away; touch was-here";
        run(&mut client, "inside", script, policy.clone(), &world.work).await;
        assert!(world.work.join("was-here").exists(), "the workspace can be written");
        let after = std::fs::metadata(&program).unwrap();
        let what = |file: &std::fs::Metadata| (file.ino(), file.len(), file.mode());
        assert_eq!(what(&before), what(&after));
        // Nor can it be written while it runs, from anywhere.
        let busy = std::fs::OpenOptions::new().write(true).open(&program).unwrap_err();
        assert_eq!(busy.kind(), std::io::ErrorKind::ExecutableFileBusy);

        // Replaced from outside: the server does not execute the new file.
        std::fs::remove_file(&program).unwrap();
        std::fs::write(&program, &other).unwrap();
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
        if nobody {
            chown(&program, Some(UNPRIVILEGED), None).unwrap();
        }
        for n in 0..4 {
            let id = format!("after-{n}");
            let said = run(
                &mut client,
                &id,
                "echo confined; echo x > /etc/x",
                policy.clone(),
                &world.work,
            );
            let said = said.await;
            assert!(
                said.contains("confined\n") && said.contains("Read-only file system"),
                "{said}"
            );
        }
        let file = format!("file://{}/from-helper", world.work.display());
        let params = json!({"path": file, "dataBase64": "eA==", "sandbox": policy});
        let answer = client.call("fs/writeFile", params).await;
        assert!(answer["result"].is_object(), "{answer}");
        let first = warden(server.pid()).unwrap();
        crate::support::send(first, rustix::process::Signal::KILL);
        eventually("another warden", || {
            warden(server.pid()).is_some_and(|next| {
                let exe = std::fs::metadata(format!("/proc/{next}/exe"));
                next != first && exe.is_ok_and(|exe| exe.ino() == before.ino())
            })
        })
        .await;
        assert!(!marker.exists(), "{}", std::fs::read_to_string(&marker).unwrap());
    }
}

#[tokio::test]
async fn no_helper_keeper_or_spare_has_a_variable_of_the_server() {
    for seed in 0..3 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut names = vec!["CODEX_API_KEY".to_owned(), "CODEX_RENDEZVOUS_NATS".to_owned()];
        names.extend((0..4).map(|n| format!("{}_{n}", random.uppercase())));
        let world = World::new(false);
        let mut command = codex();
        command.arg("exec-server").current_dir(&world.work);
        for name in &names {
            command.env(name, format!("{SECRET}{}", random.u64(..)));
        }
        let server = Running::start_with(&mut command);
        let mut client = server.client().await;
        let policy = world.policies().swap_remove(1);
        let file = format!("file://{}/from-helper", world.work.display());
        let params = json!({"path": file, "dataBase64": "eA==", "sandbox": policy});
        let answer = client.call("fs/writeFile", params).await;
        assert!(answer["result"].is_object(), "{answer}");
        let environ = |pid| std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let leaks = |pid| String::from_utf8_lossy(&environ(pid)).contains(SECRET);
        assert!(leaks(server.pid()), "seed {seed}: the server itself has them");
        // The helper waits for more requests, below its keeper.
        let children = all_below(server.pid());
        assert!(children.len() > 2, "{children:?}");
        for (pid, line) in children {
            assert!(!leaks(pid), "seed {seed}: {pid} ({line})");
        }
    }
}
