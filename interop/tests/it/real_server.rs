//! Our command line on their server, by websocket and over stdio. The command line reports features that
//! their server lacks, and an alternative.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::programs::{Implementation, ProgramOutput, Server, home, output, output_of};
use crate::terminal::Terminal;

/// A server of theirs, and our command line on it.
struct Place {
    on: String,
    _server: Option<Server>,
    home: tempfile::TempDir,
}

impl Place {
    fn websocket() -> Self {
        let server = Server::start(Implementation::Theirs);
        Self { on: server.url.clone(), _server: Some(server), home: home() }
    }

    fn stdio() -> Self {
        Self { on: Implementation::Theirs.stdio(), _server: None, home: home() }
    }

    /// Runs a test by websocket and over stdio.
    fn each(test: impl Fn(&Self)) {
        test(&Self::websocket());
        test(&Self::stdio());
    }

    fn codex(&self, subcommand: &str) -> Command {
        let mut command = Implementation::Ours.program(self.home.path());
        command.args([subcommand, "--on", &self.on]);
        command
    }

    fn sh(&self, more: &[&str], script: &str) -> ProgramOutput {
        output(self.codex("run").args(more).args(["--", "sh", "-c", script]))
    }

    /// Runs a subcommand that uses a saved name.
    fn named(&self, arguments: &[&str]) -> ProgramOutput {
        output(Implementation::Ours.program(self.home.path()).args(arguments))
    }
}

fn path(directory: &Path, name: &str) -> String {
    directory.join(name).to_str().unwrap().to_owned()
}

#[test]
#[ignore = "interop/run runs it"]
fn commands() {
    Place::each(|place| {
        let result = place.sh(&[], "echo out; echo err >&2; exit 3");
        assert_eq!((result.code, &*result.out, &*result.err), (Some(3), "out\n", "err\n"));
        let result = place.sh(&["-e", "GREETING=hi", "--cwd", "/"], "echo $GREETING; pwd");
        assert_eq!(result.success(), "hi\n/\n");
        assert_eq!(place.sh(&[], "kill -9 $$").code, Some(137));
        assert_eq!(place.sh(&[], "seq 300000").success().lines().count(), 300_000);
        output(place.codex("run").args(["--", "no-such-program"]))
            .assert_failed(127, "no-such-program");
        place.sh(&["--timeout", "500ms"], "sleep 1000").assert_failed(124, "--timeout");
        let result = place.sh(&["--json"], "echo hi; exit 2");
        assert_eq!(result.code, Some(2), "{result:?}");
        let text = result.out.lines().map(serde_json::from_str::<serde_json::Value>);
        let events: Vec<serde_json::Value> = text.map(Result::unwrap).collect();
        // Their server may report the exit before the output.
        assert!(events.iter().any(|event| event["text"] == "hi\n"), "{result:?}");
        assert_eq!(events.last().unwrap()["type"], "closed", "{result:?}");
    });
}

#[test]
#[ignore = "interop/run runs it"]
fn input_reaches_the_command_and_its_end_is_reported() {
    Place::each(|place| {
        let result = output_of(place.codex("run").args(["--", "head", "-n", "1"]), b"a\nb\n");
        assert_eq!(result.success(), "a\n");
        // Their server cannot close stdin; the command line says so.
        let script = "cat & sleep 3; kill $!";
        let result = output_of(place.codex("run").args(["--", "sh", "-c", script]), b"typed\n");
        assert!(result.err.contains("this server cannot close a command's stdin"), "{result:?}");
    });
}

#[test]
#[ignore = "interop/run runs it"]
fn terminals() {
    let place = Place::websocket();
    let mut terminal = Terminal::start(place.codex("run").args(["-t", "--", "sh"]));
    terminal.type_in("stty size; tty > /dev/null && echo on-a-terminal\r");
    terminal.shows("24 80");
    terminal.shows("on-a-terminal\r\n");
    terminal.type_in("exit 6\r");
    assert_eq!(terminal.ends().code(), Some(6));

    let mut terminal = Terminal::start(place.codex("shell").args(["--name", "left"]));
    terminal.type_in("echo in-$((40 + 2))\r");
    terminal.shows("in-42");
    terminal.type_in("\r~.");
    terminal.shows("for a time that the server chooses");
    assert!(terminal.ends().success());
    let mut back = Implementation::Ours.program(place.home.path());
    let mut terminal = Terminal::start(back.args(["attach", "left"]));
    terminal.type_in("echo back-$((40 + 2)); exit 5\r");
    terminal.shows("back-42");
    assert_eq!(terminal.ends().code(), Some(5));
}

#[test]
#[ignore = "interop/run runs it"]
fn sandboxes() {
    Place::each(|place| {
        let work = home();
        let root = work.path().to_str().unwrap();
        let denied = place.sh(&["--sandbox", "read-only", "--cwd", root], "echo x > file");
        denied.assert_failed(denied.code.unwrap(), "with --ask, codex offers to run it without");
        assert!(denied.code != Some(0) && !work.path().join("file").exists(), "{denied:?}");
        let result = place.sh(&["--sandbox", "workspace-write", "--cwd", root], "echo x > file");
        assert_eq!(result.code, Some(0), "{result:?}");
        let outside = path(home().path(), "outside");
        let script = format!("echo x > {outside}");
        let denied = place.sh(&["--sandbox", "workspace-write", "--cwd", root], &script);
        assert!(denied.code != Some(0) && !Path::new(&outside).exists(), "{denied:?}");
    });
    // Asked at the terminal, and approved.
    let place = Place::websocket();
    let work = home();
    let mut command = place.codex("run");
    command.args(["--sandbox", "read-only", "--ask", "--cwd"]).arg(work.path());
    let mut terminal = Terminal::start(command.args(["--", "sh", "-c", "echo x > file"]));
    terminal.shows("[y/N]");
    terminal.type_in("y\r");
    assert!(terminal.ends().success());
    assert!(work.path().join("file").exists());
}

/// Their server retains 1 MiB of output; our command line's output is read slowly, at first not at all.
#[test]
#[ignore = "interop/run runs it"]
fn a_slow_reader_gets_every_byte() {
    Place::each(|place| {
        let mut command = place.codex("run");
        command.args(["--", "seq", "1", "3000000"]).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        for n in 1..=3_000_000 {
            // Much longer than the server needs to write all of it.
            if n == 1000 {
                std::thread::sleep(Duration::from_secs(3));
            }
            assert_eq!(lines.next().unwrap().unwrap(), n.to_string());
        }
        assert!(lines.next().is_none());
        assert!(child.wait().unwrap().success());
    });
}

#[test]
#[ignore = "interop/run runs it"]
fn files() {
    Place::each(|place| {
        let work = home();
        let at = |name: &str| path(work.path(), name);
        let content: Vec<u8> = (0..3_000_000u32).flat_map(u32::to_le_bytes).collect();
        std::fs::write(at("here"), &content).unwrap();
        output(place.codex("cp").args([at("here"), format!(":{}", at("there"))])).success();
        output(place.codex("cp").args([format!(":{}", at("there")), at("back")])).success();
        assert!(std::fs::read(at("back")).unwrap() == content, "it comes back as it went");

        std::fs::create_dir_all(at("tree/deep")).unwrap();
        std::fs::write(at("tree/deep/leaf"), "leaf\n").unwrap();
        output(place.codex("cp").args(["-r", &at("tree"), &format!(":{}", at("up"))])).success();
        output(place.codex("cp").args(["-r", &format!(":{}", at("up")), &at("down")])).success();
        assert_eq!(std::fs::read_to_string(at("down/deep/leaf")).unwrap(), "leaf\n");
        assert_eq!(output(place.codex("cat").arg(at("up/deep/leaf"))).success(), "leaf\n");
        assert_eq!(output(place.codex("ls").arg(at("up"))).success(), "deep\n");
        output(place.codex("rm").arg(at("up"))).assert_failed(1, "-r");
        output(place.codex("rm").args(["-rf", &at("up")])).success();
        assert!(!Path::new(&at("up")).exists());
        output(place.codex("cat").arg(at("up"))).assert_failed(1, "up");
    });
}

#[test]
#[ignore = "interop/run runs it"]
fn patches() {
    Place::each(|place| {
        let (work, outside) = (home(), home());
        let target = outside.path().join("target");
        std::fs::write(&target, "a\n").unwrap();
        std::os::unix::fs::symlink(&target, work.path().join("link")).unwrap();
        std::fs::write(work.path().join("one"), "a\n").unwrap();
        let apply = |name: &str, more: &[&str]| {
            let patch =
                format!("*** Begin Patch\n*** Update File: {name}\n@@\n-a\n+b\n*** End Patch\n");
            let mut command = place.codex("apply-patch");
            command.args(more).arg("--cwd").arg(work.path());
            output_of(&mut command, patch.as_bytes())
        };
        let refused = apply("link", &["--sandbox", "workspace-write"]);
        assert!(refused.err.contains("nothing was changed"), "{refused:?}");
        assert_eq!(std::fs::read_to_string(&target).unwrap(), "a\n");
        assert_eq!(apply("one", &["--sandbox", "workspace-write"]).code, Some(0));
        assert_eq!(std::fs::read_to_string(work.path().join("one")).unwrap(), "b\n");
        assert_ne!(apply("one", &[]).code, Some(0), "its lines are not there any more");
    });
}

#[test]
#[ignore = "interop/run runs it"]
fn detached_process_is_reattached() {
    let place = Place::websocket();
    let gate = path(place.home.path(), "gate");
    let script = format!("echo one; until [ -e {gate} ]; do sleep 0.05; done; echo two; exit 5");
    let result = place.sh(&["--detach", "job"], &script);
    assert_eq!((result.code, &*result.out), (Some(0), "job\n"), "{result:?}");
    assert!(result.err.contains("this server ignores --keep"), "{result:?}");
    let table = place.named(&["ps"]).success();
    assert!(table.contains("job") && table.contains("(server cannot list processes)"), "{table}");
    place.named(&["ps", "job"]).assert_failed(1, "this server cannot list its processes");
    assert!(place.named(&["logs", "job"]).out.contains("one"));
    std::fs::write(&gate, "").unwrap();
    let attached = place.named(&["attach", "job"]);
    assert_eq!((attached.code, &*attached.out), (Some(5), "one\ntwo\n"), "{attached:?}");

    assert_eq!(place.sh(&["--detach", "long"], "sleep 1000").code, Some(0));
    place
        .named(&["kill", "--signal", "hup", "long"])
        .assert_failed(1, "supports only interrupt and kill");
    assert_eq!(place.named(&["kill", "--signal", "kill", "long"]).code, Some(0));

    // A server behind a command ends with it.
    Place::stdio().sh(&["--detach", "none"], "true").assert_failed(125, "ends with its connection");
    // A session that the server does not know.
    let unknown = output(place.codex("ps").args(["--session", "no-such-session"]));
    assert_eq!(unknown.code, Some(1), "{unknown:?}");
    assert!(unknown.err.contains("no-such-session"), "{unknown:?}");
}

#[test]
#[ignore = "interop/run runs it"]
fn missing_features_are_reported() {
    Place::each(|place| {
        let info = output(&mut place.codex("info")).success();
        for line in ["no   search files (search)", "no   resize terminals (shell, run -t)"] {
            assert!(info.contains(line), "{info}");
        }
        assert!(info.contains("linux"), "{info}");
        let result = output(place.codex("search").args(["needle", "/etc"]));
        result.assert_failed(2, "this server cannot search; run a command instead: codex run");
    });
}
