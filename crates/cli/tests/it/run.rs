//! `codex run`.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;

use crate::commands::{CommandOutput, Server, codex, everywhere, output, output_of, read_until};
use crate::terminal::Terminal;

#[test]
fn streams_and_exit_code_are_forwarded() {
    everywhere(|codex| {
        let said = output(codex("run").args(["--", "sh", "-c", "echo out; echo err >&2; exit 7"]));
        assert_eq!((said.code, &*said.out, &*said.err), (Some(7), "out\n", "err\n"));
        let killed = output(codex("run").args(["--", "sh", "-c", "kill -9 $$"]));
        assert_eq!(killed.code, Some(137));
    });
}

/// What a command writes to one stream and then to the other comes out in that order, though there are two
/// pipes; with `--merge` every order does.
#[test]
fn order_of_stdout_and_stderr_is_kept() {
    // Stdout and stderr of codex are one pipe here, as after 2>&1.
    let printed = |mut command: std::process::Command| {
        let (mut reader, writer) = std::io::pipe().unwrap();
        command.stdin(Stdio::null()).stdout(writer.try_clone().unwrap()).stderr(writer);
        let mut child = command.spawn().unwrap();
        drop(command);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        child.wait().unwrap();
        text
    };
    everywhere(|codex| {
        let mut random = fastrand::Rng::with_seed(6);
        let mut reversed = 0;
        for (script, expected) in
            [("echo out; echo err >&2", "out\nerr\n"), ("echo err >&2; echo out", "err\nout\n")]
                .repeat(10)
        {
            let mut command = codex("run");
            command.args(["-n", "--", "sh", "-c", script]);
            let text = printed(command);
            assert_eq!(text.len(), expected.len(), "{text}");
            reversed += i32::from(text != expected);
        }
        // Without the order of arrival it is a third of them or more.
        assert!(reversed <= 1, "{reversed} of 20 came out reversed");
        let lines: Vec<u8> = (0..300).map(|_| random.u8(1..3)).collect();
        let script: String = lines.iter().map(|fd| format!("echo {fd} >&{fd}\n")).collect();
        let mut command = codex("run");
        command.args(["-n", "--merge", "--", "sh", "-c", &script]);
        let expected: String = lines.iter().map(|fd| format!("{fd}\n")).collect();
        assert_eq!(printed(command), expected);
    });
    let missing = output(codex().args(["run", "-n", "--merge", "--", "no-such-program"]));
    assert_eq!(missing.code, Some(127));
}

#[test]
fn a_megabyte_of_input_comes_out_as_it_went_in() {
    let input: Vec<u8> = (0..1u32 << 18).flat_map(u32::to_le_bytes).collect();
    everywhere(|codex| {
        let mut child = codex("run")
            .args(["--", "sh", "-c", "cat; echo the end >&2"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let bytes = input.clone();
        let writer = std::thread::spawn(move || stdin.write_all(&bytes));
        let output = child.wait_with_output().unwrap();
        writer.join().unwrap().unwrap();
        assert!(output.status.success());
        assert!(output.stdout == input, "{} bytes came out", output.stdout.len());
        assert_eq!(output.stderr, b"the end\n");
    });
}

#[test]
fn unneeded_input_is_left_for_the_next_command() {
    let script = r#"while read -r line; do "$0" run -n -- echo "got $line"; done"#;
    let mut shell = codex();
    let binary = shell.get_program().to_owned();
    shell = std::process::Command::new("sh");
    shell.args(["-c", script]).arg(binary).env_remove("CODEX_EXEC_SERVER_URL");
    let said = output_of(&mut shell, b"one\ntwo\nthree\n");
    assert_eq!(said.success(), "got one\ngot two\ngot three\n");
}

#[test]
fn signals_are_forwarded() {
    use rustix::process::{Pid, Signal, kill_process};
    everywhere(|codex| {
        for (signal, name, code) in [
            (Signal::INT, "INT", 11),
            (Signal::TERM, "TERM", 12),
            (Signal::HUP, "HUP", 13),
            (Signal::USR1, "USR1", 14),
            (Signal::USR2, "USR2", 15),
        ] {
            let script = format!(
                "trap 'echo told; exit {code}' {name}; sleep 600 >/dev/null 2>&1 & echo ready; \
                 while :; do wait; done"
            );
            let mut child = codex("run")
                .args(["-n", "--", "sh", "-c", &script])
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut stdout = child.stdout.take().unwrap();
            read_until(&mut stdout, "ready");
            kill_process(Pid::from_child(&child), signal).unwrap();
            read_until(&mut stdout, "told");
            assert_eq!(child.wait().unwrap().code(), Some(code));
        }
    });
}

#[test]
fn timeout_kills_the_command_and_prints_it() {
    everywhere(|codex| {
        let mut run = codex("run");
        let said =
            output(run.args(["--timeout", "300ms", "--", "sh", "-c", "echo early; sleep 60"]));
        said.failed(124, "--timeout of 300ms");
        assert_eq!(said.out, "early\n");
    });
}

#[test]
fn a_closed_output_is_no_error_message() {
    everywhere(|codex| {
        let mut child = codex("run")
            .args(["--", "yes"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdout = child.stdout.take().unwrap();
        stdout.read_exact(&mut [0; 10]).unwrap();
        drop(stdout);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(141));
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    });
}

#[test]
fn output_of_descendants_is_printed_after_the_exit() {
    let said = output(codex().args(["run", "--", "sh", "-c", "(sleep 0.3; echo late) & echo now"]));
    assert_eq!(said.success(), "now\nlate\n");
}

#[test]
fn the_environment_is_local_here_and_the_servers_there() {
    let show =
        ["--", "sh", "-c", "echo [$GREETING] [$API_TOKEN] [$EXTRA] [$CODEX_EXEC_SERVER_TOKEN]"];
    let ours = |command: &mut std::process::Command| {
        command.env("GREETING", "hi").env("API_TOKEN", "t").env("CODEX_EXEC_SERVER_TOKEN", "x");
        command.args(["-e", "EXTRA=more"]).args(show);
        output(command).success()
    };
    assert_eq!(ours(codex().arg("run")), "[hi] [t] [more] []\n");
    let server = Server::start();
    assert_eq!(ours(&mut server.codex("run")), "[] [] [more] []\n");
    let passed =
        output(server.codex("run").env("GREETING", "hi").args(["-e", "GREETING"]).args(show));
    assert_eq!(passed.success(), "[hi] [] [] []\n");
    let none = output(server.codex("run").args(["--inherit", "none", "--", "/usr/bin/env"]));
    assert_eq!(none.success(), "");
}

#[test]
fn json_prints_events() {
    everywhere(|codex| {
        let script = r"printf 'a\377'; exit 3";
        let said = output(codex("run").args(["--json", "--", "bash", "-c", script]));
        assert_eq!(said.code, Some(3));
        let lines: Vec<serde_json::Value> =
            said.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let kinds: Vec<&str> = lines.iter().map(|line| line["type"].as_str().unwrap()).collect();
        assert_eq!(kinds, ["started", "output", "exited", "closed"]);
        assert_eq!(lines[1]["base64"], "Yf8=");
        assert_eq!(lines[2]["exitCode"], 3);
    });
}

#[test]
fn failed_starts_have_the_exit_codes_of_a_shell() {
    let directory = tempfile::tempdir().unwrap();
    let broken = directory.path().join("broken");
    std::fs::write(&broken, "\x01no program").unwrap();
    std::fs::set_permissions(&broken, PermissionsExt::from_mode(0o755)).unwrap();
    everywhere(|codex| {
        output(codex("run").args(["--", "no-such-command"]))
            .failed(127, "command `no-such-command` not found");
        output(codex("run").args(["--", "/etc/passwd"])).failed(126, "cannot be executed");
        output(codex("run").arg("--").arg(&broken)).failed(126, "cannot be executed");
        output(codex("run").args(["-C", "/no/such", "--", "ls"])).failed(125, "--cwd");
    });
    output(codex().args(["run", "-t", "--", "ls"])).failed(125, "-t needs a terminal");
    output(codex().args(["run"])).failed(2, "COMMAND");
    // An unknown flag is not the command.
    output(codex().args(["run", "--timout", "5s", "--", "ls"])).failed(2, "'--timout'");
    output(codex().args(["sandbox", "--netwrk", "ls"])).failed(2, "'--netwrk'");
}

#[test]
fn tty_gives_the_command_a_terminal_of_the_local_size() {
    everywhere(|codex| {
        let mut run = codex("run");
        run.args(["-t", "--", "bash", "--norc"]);
        let mut terminal = Terminal::start(&run);
        let before = terminal.settings();
        terminal.type_in("stty size; echo $TERM; tty -s && echo yes\n");
        terminal.shows("24 80\r\nxterm\r\nyes");
        terminal.resize(30, 100);
        terminal.type_in(
            "until [ \"$(stty size)\" = '30 100' ]; do sleep 0.05; done; echo re''sized\n",
        );
        terminal.shows("resized");
        // Ctrl-C is sent like any other key.
        terminal.type_in(
            "sh -c 'trap \"echo in''terrupted; exit\" INT; echo ar''med; sleep 1000 & wait'\n",
        );
        terminal.shows("armed");
        terminal.type_in("\x03");
        terminal.shows("interrupted");
        terminal.shows("bash-");
        terminal.type_in("exit 9\n");
        assert_eq!(terminal.ends().code(), Some(9));
        terminal.is_again(&before);
    });
}

#[test]
fn run_leaves_nothing_running() {
    let directory = tempfile::tempdir().unwrap();
    let pid = directory.path().join("pid");
    let script = format!("setsid sleep 1000 >/dev/null 2>&1 & echo $! > {}", pid.display());
    output(codex().args(["run", "--", "bash", "-c", &script])).success();
    let pid = std::fs::read_to_string(pid).unwrap();
    assert!(!std::path::Path::new(&format!("/proc/{}", pid.trim())).exists());
}

#[test]
fn json_reports_limits_and_failures() {
    let events = |said: &CommandOutput| -> Vec<serde_json::Value> {
        said.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    everywhere(|codex| {
        let said = output(codex("run").args(["--json", "--", "/no/such"]));
        said.failed(127, "not found");
        let failed = &events(&said)[0];
        assert_eq!(
            (&failed["type"], &failed["kind"]),
            (&"failed".into(), &"programNotFound".into())
        );
        assert_eq!(failed["exitCode"], 127);
        let said = output(codex("run").args(["--json", "--timeout", "1s", "--", "sleep", "1000"]));
        assert_eq!(said.code, Some(124), "{said:?}");
        let exited = events(&said).into_iter().find(|event| event["type"] == "exited").unwrap();
        assert_eq!(exited["endedBy"], "wall");
    });
    let said = output(codex().args(["run", "--json", "--on", "ws://127.0.0.1:1", "--", "x"]));
    assert_eq!(said.code, Some(125), "{said:?}");
    let failed = &events(&said)[0];
    assert_eq!((&failed["kind"], &failed["exitCode"]), (&"connectionRefused".into(), &125.into()));
}
