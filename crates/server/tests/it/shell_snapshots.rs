//! `shellSnapshot` of `process/start`: when a profile runs, and what its capture leaves behind.

use std::path::Path;
use std::time::Duration;

use codex_exec_serving::Server;
use serde_json::{Value, json};

use crate::support::*;

/// A home whose profile counts its runs.
struct Home(tempfile::TempDir);

impl Home {
    fn new(profile: &str) -> Self {
        let home = tempfile::tempdir().unwrap();
        let counting = format!("echo x >> $HOME/runs\n{profile}\n");
        std::fs::write(home.path().join(".bash_profile"), counting).unwrap();
        Self(home)
    }

    fn file(&self, name: &str) -> String {
        std::fs::read_to_string(self.0.path().join(name)).unwrap_or_default()
    }

    /// How often the profile has run.
    fn runs(&self) -> usize {
        self.file("runs").lines().count()
    }

    fn start(&self, id: &str, script: &str) -> Start {
        start(id, &["/bin/bash", "-lc", script])
            .env("HOME", self.0.path())
            .with("shellSnapshot", snapshot("scope", "bash", "/bin/bash"))
    }
}

fn snapshot(scope: &str, name: &str, path: &str) -> Value {
    json!({"scopeId": scope, "shell": {"name": name, "path": path}})
}

/// Each test has processes with ids of its own.
async fn output(client: &mut Client, start: Start) -> String {
    client.run(start).await.text()
}

async fn ready(change: impl FnOnce(&mut codex_exec_serving::ServerConfig)) -> (Server, Client) {
    let server = server_with(change);
    let client = Client::ready(&server).await;
    (server, client)
}

#[tokio::test]
async fn a_profile_runs_once_for_each_scope_directory_and_policy() {
    let home = Home::new("export FROM=profile; f() { echo function; }");
    let (_server, mut client) = ready(|_| {}).await;
    let policy = json!({"inherit": "none", "exclude": ["FR*"]});
    let cases = [
        (home.start("1", "f; echo $FROM"), 1, "function\nprofile\n"),
        (home.start("2", "f; echo $FROM"), 1, "function\nprofile\n"),
        (home.start("3", "echo $FROM $A").env("A", "b"), 1, "profile b\n"),
        (home.start("4", "echo $FROM").env("FROM", "request"), 1, "request\n"),
        (
            home.start("5", "f").with("shellSnapshot", snapshot("2", "bash", "/bin/bash")),
            2,
            "function\n",
        ),
        (home.start("6", "pwd").with("cwd", "file:///usr"), 3, "/usr\n"),
        (home.start("7", "f; echo ${FROM-none}").with("envPolicy", policy), 4, "function\nnone\n"),
        (home.start("8", "f").tty(), 4, "function\r\n"),
        (home.start("9", "f; [[ -e /dev/fd/3 ]] || echo closed"), 4, "function\nclosed\n"),
    ];
    for (start, runs, expected) in cases {
        let asked = start.0.to_string();
        assert_eq!(output(&mut client, start).await, expected, "{asked}");
        assert_eq!(home.runs(), runs, "{asked}");
    }
    // Other command lines run as they are.
    for argv in [json!(["/bin/bash", "-c", "echo -c"]), json!(["bash", "-lc", "echo other"])] {
        let id = argv[2].as_str().unwrap().to_owned();
        let start = home.start(&id, "").with("argv", argv);
        assert!(id.ends_with(output(&mut client, start).await.trim()));
    }
    assert_eq!(home.runs(), 5, "`bash` by another path is a login shell");
}

#[tokio::test]
async fn a_snapshot_belongs_to_its_session() {
    let home = Home::new("");
    let server = server();
    for n in 1..=2 {
        let mut client = Client::ready(&server).await;
        client.run(home.start("p", "true")).await;
        client.run(home.start("q", "true")).await;
        assert_eq!(home.runs(), n);
    }
}

#[tokio::test]
async fn scopes_and_shells_are_validated() {
    let home = Home::new("");
    let (_server, mut client) = ready(|_| {}).await;
    let scope = "shell snapshot scope must be non-empty and at most 256 bytes";
    let long = "x".repeat(257);
    for (asked, expected) in [
        (snapshot("", "bash", "/bin/bash"), scope),
        (snapshot(&long, "bash", "/bin/bash"), scope),
        (snapshot("s", "fish", "/bin/bash"), "shell snapshots are unsupported for shell `fish`"),
    ] {
        let refused =
            client.start(home.start("p", "true").with("shellSnapshot", asked)).await.unwrap_err();
        assert_eq!((refused.code, refused.message.as_str()), (-32602, expected));
    }
    // The scope counts even if the command line is no login shell's; the shell's name does not.
    let other = || start("p", &["true"]);
    let refused = client
        .start(other().with("shellSnapshot", snapshot("", "bash", "/bin/bash")))
        .await
        .unwrap_err();
    assert_eq!(refused.message, scope);
    client.run(other().with("shellSnapshot", snapshot("s", "fish", "/bin/fish"))).await;
    let longest = "x".repeat(256);
    let accepted = home.start("q", "echo ran");
    let accepted = accepted.with("shellSnapshot", snapshot(&longest, "bash", "/bin/bash"));
    assert_eq!(output(&mut client, accepted).await, "ran\n");
}

#[tokio::test]
async fn concurrent_first_uses_share_one_capture() {
    let home = Home::new("");
    let (_server, mut client) = ready(|_| {}).await;
    let ids: Vec<String> = (0..8).map(|n| n.to_string()).collect();
    for id in &ids {
        client.send_request("process/start", home.start(id, "echo ran").0).await;
    }
    for id in &ids {
        assert_eq!(client.until_closed(id).await.text(), "ran\n");
    }
    assert_eq!(home.runs(), 1);
}

/// A model of the cache: the scopes in the order of their use.
#[tokio::test]
async fn the_least_recently_used_snapshot_goes_first() {
    let home = Home::new("");
    let (_server, mut client) = ready(|config| config.shell_snapshots.entries = 3).await;
    let mut random = fastrand::Rng::with_seed(5);
    let (mut model, mut runs): (Vec<u8>, _) = (Vec::new(), 0);
    for n in 0..40 {
        let scope = random.u8(0..5);
        if let Some(at) = model.iter().position(|used| *used == scope) {
            model.remove(at);
        } else {
            runs += 1;
        }
        model.push(scope);
        model.drain(..model.len().saturating_sub(3));
        let asked = snapshot(&scope.to_string(), "bash", "/bin/bash");
        client.run(home.start(&n.to_string(), "true").with("shellSnapshot", asked)).await;
        assert_eq!(home.runs(), runs, "use {n} of scope {scope}");
    }
}

/// The command runs as an ordinary login shell, and the capture is not tried again.
#[tokio::test]
async fn a_failed_capture_is_remembered() {
    let capturing = "[[ $BASH_EXECUTION_STRING == *__codex_* ]]";
    for (failure, seconds) in [
        (format!("if {capturing}; then exit 3; fi"), 10),
        (format!("if {capturing}; then head -c 600000 /dev/zero; fi"), 10),
        (format!("if {capturing}; then exec true; fi"), 10),
        (format!("if {capturing}; then sleep 1000; fi"), 0),
    ] {
        let home = Home::new(&failure);
        let (_server, mut client) = ready(|config| {
            if seconds == 0 {
                config.shell_snapshots.timeout = Duration::from_millis(300);
            }
        })
        .await;
        for n in 0..3 {
            let start = home.start(&n.to_string(), "shopt -q login_shell && echo login");
            assert_eq!(output(&mut client, start).await, "login\n", "{failure}");
            assert_eq!(home.runs(), n + 2, "{failure}");
        }
    }
}

#[tokio::test]
async fn a_listed_process_has_the_command_line_of_its_request() {
    let home = Home::new("");
    let (_server, mut client) = ready(|_| {}).await;
    client.start(home.start("p", "read line").piped()).await.unwrap();
    let listed = client.call("process/list", json!({})).await.unwrap();
    let listed = listed["processes"].as_array().unwrap();
    assert_eq!(listed.len(), 1, "the capture is not listed: {listed:?}");
    assert_eq!(listed[0]["argv"], json!(["/bin/bash", "-lc", "read line"]));
}

async fn until_gone(pid: &str) {
    let process = Path::new("/proc").join(pid.trim());
    assert!(!pid.trim().is_empty());
    tokio::time::timeout(PATIENCE, async {
        while process.exists() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .expect("it is still there");
}

#[tokio::test]
async fn what_a_capture_started_ends_with_it() {
    let home = Home::new("setsid sleep 1000 > /dev/null 2>&1 < /dev/null & echo $! > $HOME/pid");
    let (_server, mut client) = ready(|_| {}).await;
    assert_eq!(output(&mut client, home.start("p", "echo ran")).await, "ran\n");
    assert_eq!(home.runs(), 1);
    until_gone(&home.file("pid")).await;
}

#[tokio::test]
async fn the_end_of_a_session_ends_its_captures() {
    let home = Home::new("echo $$ > $HOME/pid.new; mv $HOME/pid.new $HOME/pid; sleep 1000");
    let (server, mut client) = ready(|config| {
        config.detach_ttl = Duration::ZERO;
        // The capture ends for no other reason.
        config.shell_snapshots.timeout = Duration::from_secs(1000);
    })
    .await;
    client.send_request("process/start", home.start("p", "true").0).await;
    tokio::time::timeout(PATIENCE, async {
        while home.file("pid").is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .unwrap();
    drop(client);
    until_gone(&home.file("pid")).await;
    server.shut_down().await;
    assert_eq!(home.runs(), 1, "no login shell was started instead");
}
