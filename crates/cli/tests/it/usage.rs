//! Help, usage errors and completions. `snapshots/` contains the help; set `UPDATE_SNAPSHOTS` to update it.

use std::process::{Command, Output};

use crate::support::codex;

fn run(arguments: &[&str]) -> Output {
    codex().args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn snapshot(name: &str, found: &str) {
    let path = format!("{}/tests/it/snapshots/{name}.txt", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("UPDATE_SNAPSHOTS").is_some() {
        std::fs::write(&path, found).unwrap();
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(found, kept, "{name} has changed; UPDATE_SNAPSHOTS=1 accepts that");
}

#[test]
fn help_matches_its_snapshots() {
    for (name, arguments) in [
        ("help", &["--help"][..]),
        ("help-short", &["-h"]),
        ("exec-server-help", &["exec-server", "--help"]),
        ("exec-server-help-short", &["exec-server", "-h"]),
        ("sandbox-help", &["sandbox", "--help"]),
        ("mcp-help", &["mcp", "--help"]),
        ("protocol-schema-help", &["protocol", "schema", "--help"]),
        ("completion-help", &["completion", "--help"]),
    ] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(0), "{name}");
        assert_eq!(text(&output.stderr), "", "{name}");
        snapshot(name, text(&output.stdout));
    }
}

#[test]
fn every_server_command_has_on_and_examples() {
    for subcommand in [
        "run",
        "shell",
        "ps",
        "attach",
        "logs",
        "kill",
        "cp",
        "cat",
        "ls",
        "rm",
        "search",
        "apply-patch",
        "info",
    ] {
        let output = run(&[subcommand, "--help"]);
        let help = text(&output.stdout);
        assert!(help.contains("Examples:"), "{subcommand}");
        assert!(help.contains("--on <SERVER>"), "{subcommand}");
        snapshot(&format!("{subcommand}-help"), help);
    }
}

#[test]
fn help_and_version_go_to_stdout() {
    let version = run(&["--version"]);
    assert_eq!(text(&version.stdout), concat!("codex ", env!("CARGO_PKG_VERSION"), "\n"));
    assert_eq!((version.status.code(), text(&version.stderr)), (Some(0), ""));
}

#[test]
fn a_wrong_command_line_prints_usage_and_exits_with_2() {
    for arguments in [
        &[][..],
        &["nope"],
        &["--nope"],
        &["exec-server", "--nope"],
        &["exec-server", "extra"],
        &["exec-server", "--concurrent-requests", "0"],
        &["exec-server", "--concurrent-requests", "many"],
        &["exec-server", "--detach-ttl", "soon"],
        &["exec-server", "--detach-ttl"],
        &["exec-server", "--log-format", "xml"],
        &["exec-server", "--ws-auth", "nope"],
        &["exec-server", "--ws-token-file", "a", "--ws-token-sha256", "b"],
        &["exec-server", "--listen", "http://x"],
        &["sandbox"],
        &["sandbox", "--profile"],
        &["sandbox", "--writable", "--", "true"],
        &["completion"],
        &["completion", "tcsh"],
    ] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert_eq!(text(&output.stdout), "", "{arguments:?}");
        let stderr = text(&output.stderr);
        assert!(stderr.contains("Usage:") || stderr.contains("--help"), "{arguments:?}: {stderr}");
    }
}

#[test]
fn an_invalid_listen_url_is_named() {
    for url in
        ["nope", "", "ws://localhost:1", "ws://1.2.3.4", "unix:", "vsock:x", "tcp://1.2.3.4:5"]
    {
        let output = run(&["exec-server", "--listen", url]);
        let stderr = text(&output.stderr);
        let message = format!("unsupported --listen URL `{url}`; expected ws://IP:PORT, ");
        assert!(stderr.contains(&message), "{stderr}");
        assert_eq!(output.status.code(), Some(2));
        assert_eq!(text(&output.stdout), "");
    }
}

#[test]
fn an_address_in_use_is_reported() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let output = run(&["exec-server", "--listen", &format!("ws://{address}")]);
    let stderr = text(&output.stderr);
    assert!(stderr.contains(&format!("cannot listen on ws://{address}: ")), "{stderr}");
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(1), ""));
}

#[test]
fn completions_are_valid_scripts() {
    for shell in ["bash", "zsh", "fish"] {
        let output = run(&["completion", shell]);
        assert_eq!(output.status.code(), Some(0));
        let script = text(&output.stdout);
        assert!(script.contains("exec-server") && script.contains("detach-ttl"), "{shell}");
        // If the shell is installed, it has to accept the script.
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("script");
        std::fs::write(&file, script).unwrap();
        match Command::new(shell).arg("-n").arg(&file).output() {
            Ok(parsed) => assert!(parsed.status.success(), "{shell}: {}", text(&parsed.stderr)),
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::NotFound),
        }
    }
}

#[test]
fn the_name_codex_exec_server_implies_the_subcommand() {
    let directory = tempfile::tempdir().unwrap();
    let link = directory.path().join("codex-exec-server");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_codex"), &link).unwrap();
    let output = Command::new(&link).arg("--listen").arg("nope").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("unsupported --listen URL `nope`"));
    let version = Command::new(&link).arg("--version").output().unwrap();
    assert!(text(&version.stdout).starts_with("codex "), "{version:?}");
    let help = Command::new(&link).args(["exec-server", "--help"]).output().unwrap();
    assert!(text(&help.stdout).contains("Usage: codex exec-server "), "{help:?}");
    let mut command = Command::new(&link);
    let server = crate::support::Running::start_with(command.args(["--detach-ttl", "5"]));
    server.signal(rustix::process::Signal::TERM);
    assert_eq!(server.ended().code(), Some(0));
}

#[test]
fn output_that_cannot_be_written_is_no_panic_and_no_success() {
    let full = || std::fs::File::options().write(true).open("/dev/full").unwrap();
    let home = tempfile::tempdir().unwrap();
    for (arguments, code) in
        [(&["login", "status"][..], 1), (&["logout"], 0), (&["ls", "--nope"], 2)]
    {
        let mut command = codex();
        command.args(arguments).env("CODEX_HOME", home.path()).env_remove("CODEX_API_KEY");
        let status = command.stderr(full()).status().unwrap();
        assert_eq!(status.code(), Some(code), "{arguments:?}");
    }
    for arguments in [&["--help"][..], &["--version"], &["ls", "--help"]] {
        let output = codex().args(arguments).stdout(full()).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        assert!(!output.stderr.is_empty(), "{arguments:?}");
    }
}

/// A closed stream is not `/dev/null`: the output is lost, and the exit code says so, as on a full disk.
#[test]
fn output_to_a_closed_stream_is_no_success() {
    let home = tempfile::tempdir().unwrap();
    let run = |arguments: &str, closed: &str| {
        let script = format!("exec \"$0\" {arguments} {closed}");
        let mut command = std::process::Command::new("sh");
        command.args(["-c", &script]).arg(codex().get_program());
        command.env("CODEX_HOME", home.path()).env_remove("CODEX_EXEC_SERVER_URL");
        command.output().unwrap().status.code()
    };
    for (arguments, code) in [
        ("run -n -- seq 10", 125),
        ("run -n --json -- seq 10", 125),
        ("cat /etc/passwd", 1),
        ("ls /", 1),
        ("search root /etc/passwd", 2),
        ("--help", 1),
        ("--version", 1),
    ] {
        assert_eq!(run(arguments, ">&-"), Some(code), "{arguments}");
        assert_eq!(run(arguments, ">/dev/full"), Some(code), "{arguments}");
        // Opened for both directions, as by a supervisor.
        assert_eq!(run(arguments, "1<>/dev/null 2<>/dev/null"), Some(0), "{arguments}");
        assert_eq!(run(arguments, "<&- 2>&-"), Some(0), "{arguments}");
    }
    assert_eq!(run("run -n -- sh -c 'seq 10 >&2'", "2>&-"), Some(125));
    // What writes nothing does not fail.
    assert_eq!(run("run -n -- true", ">&- 2>&-"), Some(0));
}

/// Bash offers the names of places and of detached processes, and no flag for a word that does not begin like one.
#[test]
fn bash_completes_names_and_offers_no_flags_unasked() {
    let home = tempfile::tempdir().unwrap();
    let path = |name: &str| home.path().join(name);
    std::fs::create_dir_all(path("config/codex-exec")).unwrap();
    let places = "[places.build]\non = \"ws://h\"\n[places.laptop]\non = \"env:x\"\n";
    std::fs::write(path("config/codex-exec/config.toml"), places).unwrap();
    std::fs::create_dir_all(path("state/codex/sessions")).unwrap();
    let saved = r#"{"url":"ws://h","sessionId":"s","processId":"p"}"#;
    std::fs::write(path("state/codex/sessions/job.json"), saved).unwrap();
    for file in ["config/codex-exec", "config/codex-exec/config.toml", "state/codex/sessions"] {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(path(file), std::fs::Permissions::from_mode(0o700)).unwrap();
    }
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_codex"), path("codex")).unwrap();
    std::fs::write(path("script"), run(&["completion", "bash"]).stdout).unwrap();
    let complete = |words: &[&str]| -> Vec<String> {
        let (last, before) = (words[words.len() - 1], words[words.len() - 2]);
        let script = "source \"$0\"; COMP_WORDS=(\"${@:3}\"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); \
                      _codex_with_names codex \"$1\" \"$2\"; printf '%s\\n' \"${COMPREPLY[@]}\"";
        let mut command = Command::new("bash");
        command.args(["-c", script]).arg(path("script")).args([last, before]).args(words);
        command.env("PATH", format!("{}:/usr/bin:/bin", home.path().display()));
        command.env("XDG_CONFIG_HOME", path("config")).env("XDG_STATE_HOME", path("state"));
        let output = command.output().unwrap();
        text(&output.stdout).lines().map(str::to_owned).filter(|line| !line.is_empty()).collect()
    };
    assert_eq!(complete(&["codex", "run", "--on", ""]), ["build", "laptop"]);
    assert_eq!(complete(&["codex", "shell", "--on", "l"]), ["laptop"]);
    assert_eq!(complete(&["codex", "places", "remove", "b"]), ["build"]);
    for subcommand in ["attach", "logs", "kill"] {
        assert_eq!(complete(&["codex", subcommand, ""]), ["job"]);
    }
    assert!(complete(&["codex", ""]).contains(&"run".to_owned()));
    for words in [&["codex", ""][..], &["codex", "run", ""], &["codex", "cp", ""]] {
        let offered = complete(words);
        assert!(!offered.iter().any(|word| word.starts_with('-')), "{words:?}: {offered:?}");
    }
    assert!(complete(&["codex", "cp", "-"]).contains(&"--recursive".to_owned()));
    assert!(!complete(&["codex", "cp", "-"]).contains(&"-".to_owned()));
}
