//! `--sandbox` and `--ask`.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use crate::commands::{everywhere, output, output_of, read};
use crate::terminal::Terminal;

/// A directory that workspace-write does not make writable by itself, unlike `/tmp`.
fn outside() -> tempfile::TempDir {
    tempfile::tempdir_in("/var/tmp").unwrap()
}

fn sandboxed(mut command: Command, sandbox: &str, cwd: &Path, script: &str) -> Command {
    command.args(["-C", cwd.to_str().unwrap(), "--sandbox", sandbox, "--ask"]);
    command.args(["sh", "-c", script]);
    command
}

#[test]
fn ask_offers_to_run_without_the_sandbox() {
    everywhere(|codex| {
        let directory = outside();
        let file = directory.path().join("greeting");
        let run = || sandboxed(codex("run"), "read-only", directory.path(), "echo hi > greeting");
        let mut terminal = Terminal::start(&run());
        terminal.shows("Run it again without the sandbox? [y/N]");
        assert!(!file.exists());
        terminal.type_in("n\n");
        assert_ne!(terminal.ends().code(), Some(0));
        assert!(!file.exists());

        let mut terminal = Terminal::start(&run());
        terminal.shows("[y/N]");
        terminal.type_in("y\n");
        assert_eq!(terminal.ends().code(), Some(0));
        assert_eq!(read(&file), "hi\n");
    });
}

#[test]
fn ask_without_a_terminal_keeps_the_first_result() {
    everywhere(|codex| {
        let directory = outside();
        let run = sandboxed(codex("run"), "read-only", directory.path(), "echo hi > greeting");
        // In a session without a terminal.
        let mut alone = Command::new("setsid");
        alone.arg("--wait").arg(run.get_program()).args(run.get_args());
        let said = output(&mut alone);
        assert_ne!(said.code, Some(0));
        assert!(said.err.contains("--ask needs a terminal"), "{said:?}");
        assert!(!directory.path().join("greeting").exists());
    });
}

#[test]
fn workspace_write_allows_writes_to_the_workspace_only() {
    everywhere(|codex| {
        let (workspace, other) = (outside(), outside());
        let script = format!("echo in > here && echo out > {}/there", other.path().display());
        let mut run = codex("run");
        run.args(["-C", workspace.path().to_str().unwrap(), "--sandbox", "workspace-write"]);
        let said = output(run.args(["sh", "-c", &script]));
        assert_ne!(said.code, Some(0));
        assert!(said.err.contains("--ask"), "{said:?}");
        assert_eq!(read(workspace.path().join("here")), "in\n");
        assert!(!other.path().join("there").exists());
    });
}

#[test]
fn a_sandbox_can_be_a_file() {
    let directory = outside();
    let file = directory.path().join("sandbox.json");
    let roots = format!(
        r#"{{"type":"workspace-write","writable_roots":["{}"]}}"#,
        directory.path().display()
    );
    std::fs::write(&file, roots).unwrap();
    let inner = outside();
    everywhere(|codex| {
        let script = format!("echo granted > {}/granted", directory.path().display());
        let mut run = codex("run");
        run.args(["-C", inner.path().to_str().unwrap(), "--sandbox", file.to_str().unwrap()]);
        output(run.args(["sh", "-c", &script])).success();
        assert_eq!(read(directory.path().join("granted")), "granted\n");
        std::fs::remove_file(directory.path().join("granted")).unwrap();
        let bad = output(codex("run").args(["--sandbox", "no-such-thing", "true"]));
        bad.failed(125, "workspace-write");
    });
}

#[test]
fn patches_under_a_sandbox_stay_in_the_workspace() {
    everywhere(|codex| {
        let (workspace, other) = (outside(), outside());
        let target = other.path().join("target");
        std::fs::write(&target, "old\n").unwrap();
        symlink(&target, workspace.path().join("link")).unwrap();
        std::fs::write(workspace.path().join("one"), "old\n").unwrap();
        std::fs::hard_link(workspace.path().join("one"), workspace.path().join("two")).unwrap();
        let patch = |name: &str| {
            format!("*** Begin Patch\n*** Update File: {name}\n@@\n-old\n+new\n*** End Patch\n")
        };
        let apply = |name: &str| {
            let mut apply = codex("apply-patch");
            let cwd = workspace.path().to_str().unwrap();
            apply.args(["-C", cwd, "--sandbox", "workspace-write"]);
            output_of(&mut apply, patch(name).as_bytes())
        };
        let refused = apply("link");
        assert_eq!(refused.code, Some(1), "{refused:?}");
        assert_eq!(read(&target), "old\n");
        assert_eq!(apply("one").success(), "M one\n");
        assert_eq!(read(workspace.path().join("two")), "new\n");
    });
}
