//! `codex places`, and `--on NAME`.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

use crate::commands::{CommandOutput, Server, codex, output, read};

struct Home(tempfile::TempDir);

impl Home {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn file(&self) -> PathBuf {
        self.0.path().join("config/codex-exec/config.toml")
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = codex();
        command.args(arguments).env("XDG_CONFIG_HOME", self.0.path().join("config"));
        command.env("XDG_STATE_HOME", self.0.path().join("state"));
        command
    }

    fn run(&self, arguments: &[&str]) -> CommandOutput {
        output(&mut self.command(arguments))
    }
}

#[test]
fn a_place_names_a_server_with_its_settings() {
    let (home, server) = (Home::new(), Server::start());
    let directory = tempfile::tempdir().unwrap();
    let cwd = directory.path().canonicalize().unwrap();
    let shown = cwd.to_str().unwrap();
    home.run(&["places", "list"]).failed(0, "codex places add");
    let add = ["places", "add", "build", "--on", &server.url, "-C", shown, "-e", "COLOUR=red"];
    home.run(&add).failed(0, "added `build`");
    assert_eq!(home.file().metadata().unwrap().permissions().mode() & 0o777, 0o600);
    home.run(&add).failed(1, "--replace");
    let script = ["run", "--on", "build", "--", "sh", "-c", "pwd; echo $COLOUR"];
    assert_eq!(home.run(&script).success(), format!("{shown}\nred\n"));
    // A flag beats the file.
    let script = [
        "run",
        "--on",
        "build",
        "-C",
        "/",
        "-e",
        "COLOUR=blue",
        "--",
        "sh",
        "-c",
        "pwd; echo $COLOUR",
    ];
    assert_eq!(home.run(&script).success(), "/\nblue\n");
    // Relative paths start from its directory, and the variable takes a name, too.
    std::fs::write(cwd.join("file"), "there\n").unwrap();
    let mut cat = home.command(&["cat", "file"]);
    assert_eq!(output(cat.env("CODEX_EXEC_SERVER_URL", "build")).success(), "there\n");
    assert!(home.run(&["places", "list"]).success().contains(&server.url));
    let listed = home.run(&["places", "list", "--json"]).success();
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    assert_eq!((&listed[0]["name"], &listed[0]["cwd"]), (&"build".into(), &shown.into()));
    assert!(home.run(&["places", "test"]).success().starts_with("build: connected"));

    home.run(&["run", "--on", "biuld", "--", "true"]).failed(2, "did you mean `build`?");
    home.run(&["run", "--on", "staging", "--", "true"]).failed(2, "codex places list");
    home.run(&["places", "remove", "Build"]).failed(1, "did you mean `build`?");
    home.run(&["places", "remove", "build"]).failed(0, "removed");
    assert_eq!(read(home.file()), "");
    home.run(&["run", "--on", "build", "--", "true"]).failed(2, "no place is named `build`");
}

#[test]
fn a_place_that_fails_is_reported_by_test() {
    let home = Home::new();
    home.run(&["places", "add", "gone", "--on", "ws://127.0.0.1:1"]).failed(0, "added");
    home.run(&["places", "test"]).failed(1, "check that the server runs");
    home.run(&["places", "test", "gnoe"]).failed(1, "did you mean `gone`?");
}

/// The token of a place goes to its server, beats that of the variable, and is found again for a session.
#[test]
fn the_token_of_a_place_goes_to_its_server() {
    let home = Home::new();
    let token = home.0.path().join("token");
    let shown = token.to_str().unwrap();
    home.run(&["exec-server", "token", shown]).failed(0, "created");
    home.run(&["exec-server", "token", shown]).failed(1, "cannot create the token file");
    assert_eq!(token.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(read(&token).trim().len(), 64);
    let server = Server::with(&["--ws-auth", "capability-token", "--ws-token-file", shown]);
    home.run(&["run", "--on", &server.url, "--", "true"]).failed(125, "--token-file");
    home.run(&["places", "add", "p", "--on", &server.url, "--token-file", shown])
        .failed(0, "added");
    let mut run = home.command(&["run", "--on", "p", "--", "echo", "in"]);
    assert_eq!(output(run.env("CODEX_EXEC_SERVER_TOKEN", "wrong")).success(), "in\n");
    home.run(&["run", "--on", "p", "--detach", "job", "--", "echo", "done"])
        .failed(0, "running as");
    assert_eq!(home.run(&["logs", "-f", "job"]).success(), "done\n");
    // Not to another server of the same name.
    let other = Server::with(&["--ws-auth", "capability-token", "--ws-token-file", shown]);
    home.run(&["places", "add", "p", "--replace", "--on", &other.url, "--token-file", shown])
        .failed(0, "added");
    assert_eq!(home.run(&["logs", "job"]).code, Some(1));
}

#[test]
fn a_file_that_others_can_write_is_refused() {
    let home = Home::new();
    home.run(&["places", "add", "p", "--on", "ws://127.0.0.1:1"]).failed(0, "added");
    let file = home.file();
    let set = |path: &std::path::Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    for mode in [0o602, 0o620, 0o666] {
        set(&file, mode);
        home.run(&["run", "--on", "p", "--", "true"]).failed(2, "others can write");
        home.run(&["places", "list"]).failed(1, "others can write");
    }
    set(&file, 0o644);
    set(file.parent().unwrap(), 0o777);
    home.run(&["places", "list"]).failed(1, "others can write the directory");
    set(file.parent().unwrap(), 0o700);
    assert!(home.run(&["places", "list"]).success().contains("ws://127.0.0.1:1"));
    std::fs::write(&file, "[places.p]\non = \"ws://h\"\ntoken = \"secret\"\n").unwrap();
    home.run(&["places", "list"]).failed(1, "unknown field");
}

/// A place's sandbox holds for `run`, and `--sandbox none` leaves it out.
#[test]
fn the_sandbox_of_a_place_is_a_default() {
    let (home, server) = (Home::new(), Server::start());
    let add = ["places", "add", "p", "--on", &server.url, "--sandbox", "/no/such.json"];
    home.run(&add).failed(0, "added");
    home.run(&["run", "--on", "p", "--", "true"]).failed(125, "/no/such.json");
    home.run(&["run", "--on", "p", "--sandbox", "none", "--", "true"]).success();
}
