//! `codex apply-patch`.

use rustix::process::{Pid, Resource, Rlimit};

use crate::commands::{codex, everywhere, output, output_of, read};
use crate::support::Running;

const PATCH: &str = "\
*** Begin Patch
*** Add File: notes/new.txt
+first
*** Update File: a.txt
@@
-hello
+bye
*** Delete File: old.txt
*** End Patch
";

#[test]
fn changed_files_are_printed_as_in_git_status() {
    everywhere(|codex| {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("a.txt"), "hello\n").unwrap();
        std::fs::write(path("old.txt"), "old\n").unwrap();
        let cwd = directory.path().to_str().unwrap();
        let said = output_of(codex("apply-patch").args(["-C", cwd]), PATCH.as_bytes());
        assert_eq!(said.success(), "A notes/new.txt\nM a.txt\nD old.txt\n");
        assert_eq!(read(path("notes/new.txt")), "first\n");
        assert_eq!(read(path("a.txt")), "bye\n");
        assert!(!path("old.txt").exists());

        let again = output_of(codex("apply-patch").args(["-C", cwd]), PATCH.as_bytes());
        again.failed(1, "nothing was changed");
        assert_eq!(read(path("a.txt")), "bye\n");
    });
}

#[test]
fn a_patch_is_read_from_a_file_or_required() {
    let directory = tempfile::tempdir().unwrap();
    let patch = directory.path().join("p");
    std::fs::write(&patch, "*** Begin Patch\n*** Add File: x\n+y\n*** End Patch\n").unwrap();
    let mut apply = codex();
    apply.arg("apply-patch").arg(&patch).current_dir(directory.path());
    assert_eq!(output(&mut apply).success(), "A x\n");
    assert_eq!(read(directory.path().join("x")), "y\n");
    output_of(codex().arg("apply-patch"), b"no patch").failed(1, "*** Begin Patch");
    output(codex().args(["apply-patch", "/no/such"])).failed(1, "cannot read the patch");
}

#[test]
fn a_file_stays_as_it_was_if_its_write_fails() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    std::fs::write(path("a"), "hello\n").unwrap();
    std::fs::write(path("linked"), "hello\n").unwrap();
    std::fs::hard_link(path("linked"), path("other")).unwrap();
    let long = "x".repeat(3 << 20);
    // Limits the file size to half of what the patch needs, like a full disk.
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", "trap '' XFSZ; exec \"$0\" exec-server"]).arg(codex().get_program());
    let server = Running::start_with(&mut shell);
    let pid = Pid::from_raw(server.pid().try_into().unwrap());
    let limit = Rlimit { current: Some(3 << 19), maximum: Some(3 << 19) };
    rustix::process::prlimit(pid, Resource::Fsize, limit).unwrap();
    let apply = |body: &str| {
        let mut apply = codex();
        apply.args(["apply-patch", "--on", &server.url, "-C"]).arg(directory.path());
        output_of(&mut apply, format!("*** Begin Patch\n{body}\n*** End Patch\n").as_bytes())
    };
    for name in ["a", "linked"] {
        let said = apply(&format!("*** Update File: {name}\n@@\n-hello\n+{long}"));
        said.failed(1, "nothing was changed");
        assert_eq!(read(path(name)), "hello\n");
    }
    apply(&format!("*** Add File: d/new\n+{long}")).failed(1, "nothing was changed");
    assert!(!path("d").exists());
    let said = apply(&format!("*** Add File: small\n+x\n*** Update File: a\n@@\n-hello\n+{long}"));
    said.failed(1, "done: A small; not done: M a");
    assert_eq!((read(path("small")), read(path("a"))), ("x\n".into(), "hello\n".into()));
}
