//! `codex sandbox`.

use std::io::Read;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::Signal;

use crate::commands::{codex, output, output_of, read, read_until};
use crate::skipped::runs_as_root;
use crate::support::{eventually, is_running, numbers, send, wait};
use crate::terminal::Terminal;

/// A directory that workspace-write does not make writable by itself, unlike `/tmp`.
fn outside() -> tempfile::TempDir {
    tempfile::tempdir_in("/var/tmp").unwrap()
}

fn sandbox(cwd: &Path, options: &[&str], command: &[&str]) -> Command {
    let mut codex = codex();
    codex.current_dir(cwd).arg("sandbox").args(options).arg("--").args(command);
    codex
}

fn sh(cwd: &Path, options: &[&str], script: &str) -> Command {
    sandbox(cwd, options, &["sh", "-c", script])
}

#[test]
fn by_default_nothing_can_be_written() {
    let here = outside();
    std::fs::write(here.path().join("old"), "old").unwrap();
    assert_eq!(output(&mut sh(here.path(), &[], "cat old")).success(), "old");
    for script in ["echo x > new", "echo x > old", "rm old", "mv old new", "echo x > /tmp/new"] {
        let said = output(&mut sh(here.path(), &[], script));
        assert_ne!(said.code, Some(0), "{script}: {said:?}");
        assert!(said.err.contains("Read-only file system"), "{script}: {said:?}");
    }
    assert_eq!(read(here.path().join("old")), "old");
    assert!(!here.path().join("new").exists());
}

#[test]
fn a_workspace_can_be_written_and_its_metadata_cannot() {
    let (here, other) = (outside(), outside());
    let options = ["--profile", "workspace-write"];
    output(&mut sh(here.path(), &options, "echo in > in")).success();
    assert_eq!(read(here.path().join("in")), "in\n");
    for script in [
        format!("echo x > {}/out", other.path().display()),
        "mkdir .git".into(),
        "touch .codex/x".into(),
    ] {
        assert_ne!(output(&mut sh(here.path(), &options, &script)).code, Some(0), "{script}");
    }
    assert!(!other.path().join("out").exists());
    let mut left: Vec<_> =
        std::fs::read_dir(here.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["in"], "and no litter");
}

#[test]
fn more_directories_can_be_made_writable() {
    let (here, one, two, three) = (outside(), outside(), outside(), outside());
    let name = |directory: &tempfile::TempDir| directory.path().to_str().unwrap().to_owned();
    let script = format!(
        "echo 1 > {0}/x && echo 2 > {1}/x && ! echo 3 2>/dev/null > {2}/x && ! echo 2>/dev/null > x",
        name(&one),
        name(&two),
        name(&three)
    );
    let relative = format!("../{}", two.path().file_name().unwrap().to_str().unwrap());
    let options = ["--writable", &name(&one), "--writable", &relative];
    output(&mut sh(here.path(), &options, &script)).success();
    assert_eq!(read(one.path().join("x")) + &read(two.path().join("x")), "1\n2\n");
    assert!(!three.path().join("x").exists());
    let missing = output(&mut sandbox(here.path(), &["--writable", "missing"], &["true"]));
    missing.failed(125, "--writable missing: No such file");
}

#[test]
fn a_directory_behind_a_link_that_a_command_could_have_made_is_not_made_writable() {
    let (here, other) = (outside(), outside());
    std::fs::create_dir(here.path().join("real")).unwrap();
    let workspace = ["--profile", "workspace-write"];
    let link = format!("ln -s {} link", other.path().display());
    output(&mut sh(here.path(), &workspace, &link)).success();
    for name in ["link", "./link", "real/../link"] {
        let options = [workspace[0], workspace[1], "--writable", name];
        let said = output(&mut sh(here.path(), &options, "echo x > link/new"));
        said.failed(125, here.path().join("link").to_str().unwrap());
    }
    assert!(!other.path().join("new").exists());
    let options = ["--writable", "real/../real"];
    output(&mut sh(here.path(), &options, "echo x > real/new")).success();
}

#[test]
fn streams_lead_to_no_change_of_devices_pipes_and_directories() {
    let here = outside();
    std::fs::write(here.path().join("secret"), "secret").unwrap();
    // Through a directory, the command could reach everything in it.
    for direction in ["<", "0<", "2<"] {
        let script = format!("\"$0\" sandbox -- cat /proc/self/fd/0/secret {direction} .");
        let mut outer = Command::new("sh");
        outer.args(["-c", &script]).arg(env!("CARGO_BIN_EXE_codex")).current_dir(here.path());
        let said = output(&mut outer);
        assert_eq!(said.code, Some(125), "{said:?}");
        assert!(!said.out.contains("secret") || said.out.is_empty(), "{said:?}");
    }
    // Devices and pipes work, and keep their modes and times.
    let fifo = here.path().join("fifo");
    let made = Command::new("mkfifo").arg(&fifo).status().unwrap();
    assert!(made.success());
    let look = |path: &Path| {
        use std::os::unix::fs::MetadataExt;
        let found = path.metadata().unwrap();
        (found.mode(), found.uid(), found.atime(), found.mtime(), found.ctime_nsec())
    };
    let before = look(Path::new("/dev/zero"));
    // The pipe cannot be opened for writing either; every sandbox may write to this device.
    let script = "python3 -c 'import os, stat
pipe = stat.S_ISFIFO(os.fstat(0).st_mode)
for fd in (0, 1):
    for call in (lambda: os.fchmod(fd, 0o600), lambda: os.utime(fd, (1, 1)),
                 lambda: os.chmod(f\"/proc/self/fd/{fd}\", 0o600),
                 lambda: os.open(\"/proc/self/fd/0\" if pipe else \"/\", os.O_WRONLY | os.O_NONBLOCK)):
        try:
            call()
            os.write(2, b\"changed\")
        except OSError:
            pass
os.write(2, str(len(os.read(0, 4))).encode())'";
    let mut run = sh(here.path(), &[], script);
    run.stdin(std::fs::File::open("/dev/zero").unwrap());
    run.stdout(std::fs::OpenOptions::new().write(true).open("/dev/null").unwrap());
    let said = run.stderr(Stdio::piped()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&said.stderr), "4", "{said:?}");
    assert_eq!(look(Path::new("/dev/zero")), before);
    let options = std::fs::OpenOptions::new().read(true).write(true).open(&fifo).unwrap();
    std::io::Write::write_all(&mut &options, b"word").unwrap();
    let before = fifo.metadata().unwrap().permissions();
    let mut run = sh(here.path(), &[], script);
    run.stdin(std::fs::File::open(&fifo).unwrap()).stdout(Stdio::null());
    let said = run.stderr(Stdio::piped()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&said.stderr), "4", "{said:?}");
    assert_eq!(fifo.metadata().unwrap().permissions(), before);
}

#[test]
fn the_network_is_available_only_with_the_flag() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let connect = format!("exec 3<>/dev/tcp/127.0.0.1/{}", listener.local_addr().unwrap().port());
    let here = outside();
    let command = ["bash", "-c", &connect];
    let said = output(&mut sandbox(here.path(), &[], &command));
    assert_ne!(said.code, Some(0), "{said:?}");
    output(&mut sandbox(here.path(), &["--network"], &command)).success();
    listener.accept().unwrap();
}

#[test]
fn a_profile_can_be_a_file() {
    let here = outside();
    let file = here.path().join("policy.json");
    let profile = ["--profile", "policy.json"];
    let policy = r#"{"type":"managed","network":"restricted","file_system":{"type":"restricted",
        "entries":[{"path":{"type":"special","value":{"kind":"root"}},"access":"read"},
                   {"path":{"type":"special","value":{"kind":"project_roots"}},"access":"write"},
                   {"path":{"type":"glob_pattern","pattern":"**/.env"},"access":"deny"}]}}"#;
    std::fs::write(&file, policy).unwrap();
    std::fs::write(here.path().join(".env"), "token").unwrap();
    let said = output(&mut sh(here.path(), &profile, "echo granted > granted; cat .env"));
    assert_eq!((said.code, said.out.as_str()), (Some(1), ""), "{said:?}");
    assert_eq!(read(here.path().join("granted")), "granted\n");
    // A profile can disable the sandbox.
    std::fs::write(&file, r#"{"type":"danger-full-access"}"#).unwrap();
    assert_eq!(output(&mut sh(here.path(), &profile, "cat .env; exit 3")).code, Some(3));
    output(&mut sandbox(here.path(), &profile, &["no-such-command"]))
        .failed(127, "no-such-command");
}

#[test]
fn an_invalid_profile_is_refused_and_nothing_runs() {
    let here = outside();
    let file = here.path().join("bad.json");
    let entry = |path: &str, access: &str| {
        format!(
            r#"{{"type":"managed","network":"restricted","file_system":{{"type":"restricted",
                "entries":[{{"path":{path},"access":"{access}"}}]}}}}"#
        )
    };
    let glob = r#"{"type":"glob_pattern","pattern":"**/.env"}"#;
    for (policy, words) in [
        ("".to_owned(), "is not a valid sandbox policy"),
        ("not json".to_owned(), "is not a valid sandbox policy"),
        ("[]".to_owned(), "is not a valid sandbox policy"),
        (r#"{"type":"nope"}"#.to_owned(), "is not a valid sandbox policy"),
        (entry(glob, "write"), "glob patterns can only deny"),
        (entry(r#"{"type":"special","value":{"kind":"slash_tmp"}}"#, "read"), "working directory"),
    ] {
        std::fs::write(&file, &policy).unwrap();
        let run = ["touch", "/tmp/../var/tmp/never"];
        let said = output(&mut sandbox(here.path(), &["--profile", "bad.json"], &run));
        said.failed(125, words);
    }
    let missing = output(&mut sandbox(here.path(), &["--profile", "nope.json"], &["true"]));
    missing.failed(125, "pass read-only, workspace-write or the path of a JSON file");
}

#[test]
fn exit_codes_and_streams_are_forwarded() {
    let here = outside();
    assert_eq!(output(&mut sh(here.path(), &[], "exit 7")).code, Some(7));
    assert_eq!(output(&mut sh(here.path(), &[], "kill -9 $$")).code, Some(137));
    let said = output_of(&mut sh(here.path(), &[], "cat; echo err >&2"), b"in\n");
    assert_eq!((said.out.as_str(), said.err.as_str()), ("in\n", "err\n"));
    let said = output(&mut sandbox(here.path(), &[], &["no-such-command"]));
    said.failed(127, "cannot run `no-such-command` in the sandbox: No such file");
    let file = here.path().join("file");
    std::fs::write(&file, "").unwrap();
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o644)).unwrap();
    output(&mut sandbox(here.path(), &[], &["./file"])).failed(126, "Permission denied");
    // The environment is that of this command, and the directory too.
    let mut command = sh(here.path(), &[], "echo $GREETING; pwd");
    let expected = format!("hi\n{}\n", here.path().canonicalize().unwrap().display());
    assert_eq!(output(command.env("GREETING", "hi")).success(), expected);
}

#[test]
fn signals_reach_the_command() {
    let here = outside();
    for signal in [Signal::TERM, Signal::INT, Signal::USR1] {
        // Nothing is started after `ready`: dash loses signals while it does that.
        let script = "trap 'exit 5' TERM INT USR1; sleep 600 >/dev/null 2>&1 & echo ready; \
                      while :; do wait; done";
        let mut child = sh(here.path(), &[], script).stdout(Stdio::piped()).spawn().unwrap();
        read_until(child.stdout.as_mut().unwrap(), "ready");
        send(child.id(), signal);
        assert_eq!(wait(&mut child).code(), Some(5), "{signal:?}");
    }
    let script = "echo ready; exec sleep 1000";
    let mut child = sh(here.path(), &[], script).stdout(Stdio::piped()).spawn().unwrap();
    read_until(child.stdout.as_mut().unwrap(), "ready");
    send(child.id(), Signal::HUP);
    assert_eq!(wait(&mut child).code(), Some(128 + 1));
}

#[test]
fn nothing_outlives_the_sandbox() {
    let here = outside();
    let script = "(setsid sleep 1000 &) ; echo ready; exec sleep 1000";
    let mut child = sh(here.path(), &[], script).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    read_until(&mut stdout, "ready");
    child.kill().unwrap();
    child.wait().unwrap();
    // The daemon holds the pipe, so the end of the pipe means that the daemon is gone.
    stdout.read_to_end(&mut Vec::new()).unwrap();
}

#[tokio::test]
async fn other_processes_of_the_job_cannot_be_signalled() {
    let here = outside();
    // A job with two processes: a bystander and the sandbox, which tries to kill its group.
    let job = format!(
        "sleep 1000 & echo $!; cd {}; \"$0\" sandbox -- sh -c 'trap \"\" TERM; kill -TERM 0'; echo $?",
        here.path().display()
    );
    let codex = codex();
    let mut command = Command::new("setsid");
    command.args(["--wait", "sh", "-c", &job]).arg(codex.get_program());
    let mut child = command.stdout(Stdio::piped()).stdin(Stdio::null()).spawn().unwrap();
    let text = read_until(child.stdout.as_mut().unwrap(), "\n");
    let bystander = numbers(&text)[0];
    let mut rest = String::new();
    wait(&mut child);
    assert!(is_running(bystander), "{text}");
    send(bystander, Signal::KILL);
    eventually("the bystander has gone", || !is_running(bystander)).await;
    child.stdout.take().unwrap().read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "0\n");
}

#[test]
fn the_command_controls_the_terminal() {
    let here = outside();
    let script = "trap 'echo interrupted; exit 9' INT; test -t 0 && test -t 1 || exit 3; \
                  sleep 600 >/dev/null 2>&1 & echo ready; while :; do wait; done";
    let mut terminal = Terminal::start(&sh(here.path(), &[], script));
    terminal.shows("ready");
    terminal.type_in("\x03");
    terminal.shows("interrupted");
    assert_eq!(terminal.ends().code(), Some(9));
    let mut terminal =
        Terminal::start(&sh(here.path(), &[], "stty size < /dev/tty; read x; echo got $x"));
    terminal.shows("24 80");
    terminal.type_in("words\n");
    terminal.shows("got words");
    assert_eq!(terminal.ends().code(), Some(0));
}

/// A shell has taken its terminal back from a stopped job, which continues in the background; it would
/// exit if the job took the terminal again.
#[tokio::test]
async fn a_job_in_the_background_leaves_the_terminal_to_the_shell() {
    let here = outside();
    let gate = here.path().join("gate");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &gate,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RWXU,
        0,
    )
    .unwrap();
    let mut shell = codex_in(here.path(), "bash", &["--norc", "--noprofile", "-i"]);
    let mut terminal = Terminal::start(shell.env("PS1", "> "));
    terminal.shows("> ");
    // The echo of the input does not contain the awaited text.
    for pipe in ["", " | cat"] {
        terminal.type_in(&format!(
            "$CODEX sandbox -- sh -c 'echo u\"\"p; read x < {}; echo d\"\"one'{pipe}\n",
            gate.display()
        ));
        terminal.shows("up\r\n");
        terminal.type_in("\x1a");
        terminal.shows("Stopped");
        terminal.type_in("bg; jobs -p %%; echo n\"\"ow\n");
        terminal.shows("jobs -p %%");
        let leader = *numbers(&terminal.shows("now\r\n")).last().unwrap();
        terminal.shows("> ");
        std::fs::write(&gate, "go on\n").unwrap();
        terminal.shows("done\r\n");
        eventually("the job has ended", || !is_running(leader)).await;
        terminal.type_in("echo still $((40 + 2))\n");
        terminal.shows("still 42");
    }
    terminal.type_in("exit 7\n");
    assert_eq!(terminal.ends().code(), Some(7));
}

/// The sandbox opens a file given as standard input again; the caller does not notice.
#[test]
fn the_caller_shares_the_offset_of_standard_input() {
    let here = outside();
    let lines: String = (1..=4000).map(|number| format!("line {number}\n")).collect();
    std::fs::write(here.path().join("lines"), lines).unwrap();
    let script = "{ read a; $CODEX sandbox -- sh -c 'read b; read c; echo $c'; read d; echo $d; \
                  $CODEX sandbox -- true; read e; echo $e; } < lines";
    let mut shell = codex_in(here.path(), "sh", &["-c", script]);
    assert_eq!(output(&mut shell).success(), "line 3\nline 4\nline 5\n");
}

/// A file of another user, which the caller could open and the user cannot, is read through its descriptor.
#[test]
fn standard_input_of_another_user_is_read() {
    use std::os::unix::process::CommandExt;
    if !runs_as_root() {
        return;
    }
    let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
    std::fs::write(&file, "words\n").unwrap();
    // One of them is the id that a user namespace shows for unknown users.
    for user in [65_534, 12_345] {
        let mut run = codex();
        run.args(["sandbox", "--", "sh", "-c", "cat; ! chmod 777 /dev/stdin 2>&1"]);
        run.current_dir("/").env("HOME", "/nonexistent").uid(user).gid(user);
        run.stdin(std::fs::File::open(&file).unwrap()).stderr(Stdio::inherit());
        let said = run.output().unwrap();
        let text = String::from_utf8_lossy(&said.stdout);
        assert!(said.status.success() && text.starts_with("words\n"), "{user}: {said:?}");
        let mode = std::fs::metadata(&file).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{user}");
    }
    // Its own file, which its mode does not let it open: it can be read, and does not change.
    let mut run = codex();
    let script = "cat; ! chmod 777 /proc/self/fd/0 2> /dev/null";
    run.args(["sandbox", "--", "sh", "-c", script]).current_dir("/").env("HOME", "/nonexistent");
    run.uid(12_345).gid(12_345).stdin(std::fs::File::open(&file).unwrap());
    std::os::unix::fs::chown(&file, Some(12_345), Some(12_345)).unwrap();
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o200)).unwrap();
    let said = run.output().unwrap();
    assert!(said.status.success() && said.stdout == b"words\n", "{said:?}");
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o200);
    // A file whose name was removed but has another cannot be opened again: nothing runs.
    let here = outside();
    let (first, second) = (here.path().join("first"), here.path().join("second"));
    std::fs::write(&first, "words\n").unwrap();
    std::fs::hard_link(&first, &second).unwrap();
    let input = std::fs::File::open(&first).unwrap();
    std::fs::remove_file(&first).unwrap();
    let mut run = sandbox(here.path(), &[], &["cat"]);
    let said = run.stdin(input).output().unwrap();
    assert_eq!(said.status.code(), Some(125), "{said:?}");
}

/// Types a line into a shell that starts a sandbox, and waits until the sandbox has stopped itself.
fn stopped(line: &str) -> (tempfile::TempDir, Terminal, u32) {
    let here = outside();
    let mut shell = codex_in(here.path(), "bash", &["--norc", "--noprofile", "-i"]);
    let mut terminal = Terminal::start(shell.env("PS1", "out> "));
    terminal.shows("out> ");
    terminal.type_in(&format!("$CODEX sandbox -- {line}\n"));
    if line.contains("bash") {
        terminal.shows("in> ");
        terminal.type_in("suspend\n");
    }
    terminal.shows("Stopped");
    terminal.shows("out> ");
    terminal.type_in("jobs -p %%; echo n\"\"ow\n");
    terminal.shows("jobs -p %%");
    let leader = *numbers(&terminal.shows("now\r\n")).last().unwrap();
    (here, terminal, leader)
}

const STOPS_ITSELF: &str = "sh -c 'kill -STOP $$; echo d\"\"one; exit 9'";
const SHELL_INSIDE: &str = "env PS1='in> ' bash --norc --noprofile -i";

#[test]
fn a_command_that_stops_itself_gives_the_terminal_back() {
    let (_here, mut terminal, _) = stopped(STOPS_ITSELF);
    terminal.type_in("fg; echo code $?\n");
    terminal.shows("done\r\n");
    terminal.shows("code 9\r\n");
    let (_here, mut terminal, _) = stopped(SHELL_INSIDE);
    for _ in 0..2 {
        terminal.type_in("echo still $((40 + 2))\n");
        terminal.shows("still 42\r\n");
        terminal.shows("out> ");
        // The shell inside controls the terminal again, and can read from it.
        terminal.type_in("fg\n");
        terminal.shows("bash");
        terminal.type_in("echo inside $((40 + 2))\n");
        terminal.shows("inside 42\r\n");
        terminal.shows("in> ");
        terminal.type_in("suspend\n");
        terminal.shows("Stopped");
        terminal.shows("out> ");
    }
    terminal.type_in("fg\n");
    terminal.shows("bash");
    terminal.type_in("exit 7\n");
    terminal.shows("out> ");
    terminal.type_in("echo code $?\n");
    terminal.shows("code 7\r\n");
}

#[tokio::test]
async fn a_stopped_sandbox_ends_with_its_terminal_and_on_a_signal() {
    for line in [STOPS_ITSELF, SHELL_INSIDE] {
        let (_here, terminal, leader) = stopped(line);
        assert!(is_running(leader));
        drop(terminal);
        eventually("the sandbox has ended", || !is_running(leader)).await;
    }
    // As for any stopped job, the shell continues it to receive the signal.
    let (_here, mut terminal, leader) = stopped(STOPS_ITSELF);
    terminal.type_in("kill %%\n");
    eventually("the sandbox has ended", || !is_running(leader)).await;
    // Another process can continue it too.
    let (_here, mut terminal, leader) = stopped(STOPS_ITSELF);
    send(leader, Signal::TERM);
    send(leader, Signal::CONT);
    eventually("the sandbox has ended", || !is_running(leader)).await;
    terminal.type_in("exit\n");
}

/// Only the sandbox can do this for a shell inside, which cannot name the previous owner of the terminal.
#[test]
fn the_terminal_is_taken_back_from_a_shell_inside() {
    let here = outside();
    let script = "$CODEX sandbox -- bash --norc --noprofile -ic 'sleep 0; exit 3'; echo code $?; \
                  read x; echo got $x";
    let mut terminal = Terminal::start(&codex_in(here.path(), "sh", &["-c", script]));
    terminal.shows("code 3");
    terminal.type_in("words\n");
    terminal.shows("got words");
    assert_eq!(terminal.ends().code(), Some(0));
}

/// A shell that knows the binary as `$CODEX`.
fn codex_in(cwd: &Path, shell: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new("env");
    command.arg("-C").arg(cwd).arg(shell).args(arguments);
    command.env("CODEX", codex().get_program());
    command
}
