//! `codex run --detach`, `ps`, `logs`, `attach` and `kill`.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use crate::commands::{CommandOutput, Server, codex, output};

struct Home {
    directory: tempfile::TempDir,
    server: Server,
}

impl Home {
    fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap(), server: Server::start() }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = codex();
        command.args(arguments).env("XDG_STATE_HOME", self.directory.path());
        command
    }

    fn run(&self, arguments: &[&str]) -> CommandOutput {
        output(&mut self.command(arguments))
    }

    fn detach(&self, name: &str, script: &str) -> CommandOutput {
        self.run(&["run", "--on", &self.server.url, "--detach", name, "--", "sh", "-c", script])
    }

    fn processes(&self) -> serde_json::Value {
        serde_json::from_str(&self.run(&["ps", "--json"]).out).unwrap()
    }
}

#[test]
fn a_detached_command_keeps_running_and_is_attached() {
    let home = Home::new();
    let gate = home.directory.path().join("gate");
    let script = format!(
        "echo one; echo two >&2; until [ -e {} ]; do sleep 0.05; done; echo three; exit 5",
        gate.display()
    );
    let said = home.detach("build", &script);
    assert_eq!((said.code, &*said.out), (Some(0), "build\n"), "{said:?}");
    let file = home.directory.path().join("codex/sessions/build.json");
    assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);

    assert_eq!(home.processes()[0]["exited"], false);
    let table = home.run(&["ps"]).success();
    assert!(table.contains("build  running"), "{table}");
    let table = home.run(&["ps", "build"]).success();
    assert!(table.starts_with("ID "), "{table}");
    home.detach("build", "true").failed(125, "is already in use");

    std::fs::write(&gate, "").unwrap();
    let followed = home.run(&["logs", "-f", "build"]);
    assert_eq!((&*followed.out, &*followed.err), ("one\nthree\n", "two\n"));
    let attached = home.run(&["attach", "build"]);
    assert_eq!((attached.code, &*attached.out), (Some(5), "one\nthree\n"), "{attached:?}");
    // Output and exit code stay, and the name is free.
    assert_eq!(home.run(&["logs", "build"]).out, "one\nthree\n");
    assert_eq!(home.processes()[0]["exitCode"], 5);
    home.detach("build", "echo again");
    assert_eq!(home.run(&["logs", "-f", "build"]).out, "again\n");
    assert_eq!(home.processes().as_array().unwrap().len(), 1);
}

#[test]
fn kill_sends_signals_and_frees_names() {
    let home = Home::new();
    home.detach("s", "sleep 1000");
    home.run(&["kill", "s"]).success();
    home.run(&["logs", "-f", "s"]).success();
    assert_eq!(home.processes()[0]["exitCode"], 143);
    let said = home.run(&["kill", "s"]);
    assert!(said.err.contains("already exited with code 143"), "{said:?}");
    home.detach("s", "trap '' TERM; sleep 1000");
    home.run(&["kill", "--signal", "kill", "s"]).success();
    home.run(&["kill", "s"]).failed(1, "no detached process");
}

#[test]
fn processes_are_found_by_session_id() {
    let home = Home::new();
    home.detach("p", "echo hello");
    let file = home.directory.path().join("codex/sessions/p.json");
    let saved: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    std::fs::remove_file(&file).unwrap();
    let session = saved["sessionId"].as_str().unwrap();
    let url = home.server.url.as_str();
    let with = |subcommand, id| home.run(&[subcommand, "--on", url, "--session", session, id]);
    // Until its end, since it may not have written anything yet.
    let follow = ["logs", "-f", "--on", url, "--session", session, "p"];
    assert_eq!(home.run(&follow).success(), "hello\n");
    assert_eq!(with("logs", "p").success(), "hello\n");
    with("logs", "q").failed(1, "it has p");
    assert_eq!(with("attach", "p").success(), "hello\n");
    home.run(&["logs", "--session", session, "p"]).failed(1, "add --on");
    home.run(&["logs", "--on", url, "--session", "nonsense", "p"]).failed(1, "unknown session");
}

#[test]
fn detach_without_a_lasting_server_says_what_to_do() {
    let home = Home::new();
    home.run(&["run", "--detach", "x", "--", "ls"]).failed(125, "codex exec-server");
    home.run(&["run", "--on", "stdio:cat", "--detach", "x", "--", "ls"]).failed(125, "--on ws://");
    home.run(&["run", "--detach", "../x", "--", "ls"]).failed(2, "letters");
    home.run(&["attach", "none"]).failed(125, "codex ps");
}

#[test]
fn a_session_whose_server_is_gone_is_reported() {
    let mut home = Home::new();
    home.detach("x", "sleep 1000");
    home.server = Server::start();
    let table = home.run(&["ps"]).success();
    assert!(table.contains("server not running"), "{table}");
    home.run(&["logs", "x"]).failed(1, "cannot reattach to `x`");
}

/// A command without a saved name could run for a day, so it does not start.
#[test]
fn a_command_whose_name_cannot_be_saved_does_not_start() {
    let home = Home::new();
    let ran = home.directory.path().join("ran");
    let nowhere = home.directory.path().join("codex/sessions");
    std::fs::create_dir(home.directory.path().join("codex")).unwrap();
    std::os::unix::fs::symlink("no/where", &nowhere).unwrap();
    home.detach("x", &format!("touch {}", ran.display())).failed(125, "cannot save the session");
    let listed = home.run(&["run", "--on", &home.server.url, "--", "ls", &ran.to_string_lossy()]);
    assert_ne!(listed.code, Some(0), "{listed:?}");
    std::fs::remove_file(&nowhere).unwrap();
    // The name of a command that the server refuses is free again.
    let url = home.server.url.as_str();
    home.run(&["run", "--on", url, "--detach", "x", "--", "/no/such"]).failed(127, "not found");
    home.detach("x", "true");
    home.run(&["attach", "x"]).success();
}

/// Descendants of a command are killed when its name becomes free.
/// Listing, reading and killing do not wait for a client that watches.
#[test]
fn a_watched_process_is_listed_read_and_killed() {
    let home = Home::new();
    home.detach("job", "echo one; exec sleep 1000");
    let mut follow = home.command(&["logs", "-f", "job"]);
    let mut follow = follow.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut shown = [0; 4];
    std::io::Read::read_exact(&mut follow.stdout.take().unwrap(), &mut shown).unwrap();
    assert_eq!(&shown, b"one\n", "it follows");
    assert_eq!(home.run(&["logs", "job"]).out, "one\n");
    assert_eq!(home.processes()[0]["exited"], false);
    home.run(&["kill", "--signal", "term", "job"]).success();
    assert!(follow.wait().unwrap().success(), "it has seen the end");
    home.detach("job", "echo two");
    assert_eq!(home.run(&["logs", "-f", "job"]).out, "two\n", "the name is free");
}

#[test]
fn attach_after_the_exit_leaves_nothing_running() {
    let home = Home::new();
    let pid = home.directory.path().join("pid");
    let script = format!("setsid sleep 1000 >/dev/null 2>&1 & echo $! > {}; exit 3", pid.display());
    home.detach("d", &script);
    home.run(&["logs", "-f", "d"]).success();
    let daemon: u32 = std::fs::read_to_string(&pid).unwrap().trim().parse().unwrap();
    assert!(crate::support::is_running(daemon));
    assert_eq!(home.run(&["attach", "d"]).code, Some(3));
    let until = std::time::Instant::now() + crate::support::PATIENCE;
    while crate::support::is_running(daemon) {
        assert!(std::time::Instant::now() < until, "the daemon goes on");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// The server retains 16 MiB: attach reports that there was more, and returns the command's exit code.
#[test]
fn attach_returns_the_exit_code_despite_dropped_output() {
    let home = Home::new();
    home.detach("much", "head -c 20000000 /dev/zero | tr '\\0' x; exit 7");
    // Output dropped while attached is a failure.
    home.run(&["logs", "-f", "much"]);
    let said = home.run(&["attach", "much"]);
    assert_eq!(said.code, Some(7), "{}", said.err);
    assert!(said.err.contains("dropped") || said.err.contains("lost"), "{}", said.err);
    assert!(said.out.len() <= 16 << 20 && said.out.len() > 8 << 20, "{}", said.out.len());
}

/// If the reader of `attach` closes its output, the command keeps running.
#[test]
fn attach_leaves_a_command_running_when_its_output_cannot_be_written() {
    let home = Home::new();
    home.detach("build", "while :; do echo busy; sleep 0.01; done");
    let mut full = home.command(&["attach", "build"]);
    full.stdout(std::fs::File::options().write(true).open("/dev/full").unwrap());
    assert_eq!(full.output().unwrap().status.code(), Some(125));
    let mut closed = home.command(&["attach", "build"]);
    let (read, write) = std::io::pipe().unwrap();
    drop(read);
    closed.stdout(write);
    assert_eq!(closed.output().unwrap().status.code(), Some(141));
    assert_eq!(home.processes()[0]["exited"], false);
    home.run(&["kill", "-s", "kill", "build"]).success();

    // The exit code of a finished command is not lost either.
    home.detach("ended", "echo last; exit 9");
    home.run(&["logs", "-f", "ended"]).success();
    let mut full = home.command(&["attach", "ended"]);
    full.stdout(std::fs::File::options().write(true).open("/dev/full").unwrap());
    assert_eq!(full.output().unwrap().status.code(), Some(125));
    let said = home.run(&["attach", "ended"]);
    assert_eq!((said.code, &*said.out), (Some(9), "last\n"), "{said:?}");
}

#[test]
fn kill_of_a_process_that_ignores_the_signal_says_what_to_do() {
    let home = Home::new();
    let ready = home.directory.path().join("ready");
    let script =
        format!("trap '' TERM HUP; touch {}; while :; do sleep 0.1; done", ready.display());
    home.detach("stubborn", &script);
    let until = std::time::Instant::now() + crate::support::PATIENCE;
    while !ready.exists() {
        assert!(std::time::Instant::now() < until, "it does not start");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    for signal in ["SIGTERM", "hup"] {
        let said = home.run(&["kill", "-s", signal, "stubborn"]);
        said.failed(0, "`stubborn` still runs");
        assert!(said.err.contains("codex kill -s kill stubborn"), "{said:?}");
    }
    home.run(&["kill", "-s", "CONT", "stubborn"]).success();
    home.run(&["kill", "-s", "SIGKILL", "stubborn"]).success();
    home.detach("stubborn", "true");
    home.run(&["attach", "stubborn"]).success();
}

/// The same name on two servers, of which this home has saved one: `--on` decides.
#[test]
fn a_saved_name_does_not_lead_to_another_server_than_the_one_of_on() {
    let (home, other) = (Home::new(), Home::new());
    home.detach("job", "echo here; exec sleep 1000");
    other.detach("job", "echo there; exec sleep 1000");
    let there = ["--on", &other.server.url, "job"];
    let on = |command: &str, more: &[&str]| home.run(&[&[command], more, &there[..]].concat());
    assert_eq!(on("logs", &[]).success(), "there\n");
    let by_variable =
        output(home.command(&["logs", "job"]).env("CODEX_EXEC_SERVER_URL", &other.server.url));
    assert_eq!(by_variable.out, "there\n");
    on("kill", &["-s", "kill"]).success();
    assert_eq!(other.run(&["attach", "job"]).code, Some(137), "it was killed there");
    assert_eq!(home.processes()[0]["exited"], false, "and not here");
    assert_eq!(home.run(&["logs", "--on", &home.server.url, "job"]).success(), "here\n");
    // A server without that name is not replaced by another.
    let empty = Server::start();
    home.run(&["kill", "--on", &empty.url, "job"]).failed(1, &home.server.url);
    home.run(&["kill", "--on", "ws://127.0.0.1:1", "job"]).failed(1, "127.0.0.1:1");
    assert_eq!(home.processes()[0]["exited"], false);
}
