//! `codex apply-patch`.

use crate::commands::{codex, everywhere, output, output_of, read};

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
fn what_changed_is_printed_as_git_does() {
    everywhere(|codex| {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("a.txt"), "hello\n").unwrap();
        std::fs::write(path("old.txt"), "old\n").unwrap();
        let cwd = directory.path().to_str().unwrap();
        let said = output_of(codex("apply-patch").args(["-C", cwd]), PATCH.as_bytes());
        assert_eq!(said.well(), "A notes/new.txt\nM a.txt\nD old.txt\n");
        assert_eq!(read(path("notes/new.txt")), "first\n");
        assert_eq!(read(path("a.txt")), "bye\n");
        assert!(!path("old.txt").exists());

        let again = output_of(codex("apply-patch").args(["-C", cwd]), PATCH.as_bytes());
        again.failed(1, "nothing was changed");
        assert_eq!(read(path("a.txt")), "bye\n");
    });
}

#[test]
fn a_patch_from_a_file_or_none_at_all() {
    let directory = tempfile::tempdir().unwrap();
    let patch = directory.path().join("p");
    std::fs::write(&patch, "*** Begin Patch\n*** Add File: x\n+y\n*** End Patch\n").unwrap();
    let mut apply = codex();
    apply.arg("apply-patch").arg(&patch).current_dir(directory.path());
    assert_eq!(output(&mut apply).well(), "A x\n");
    assert_eq!(read(directory.path().join("x")), "y\n");
    output_of(codex().arg("apply-patch"), b"no patch").failed(1, "*** Begin Patch");
    output(codex().args(["apply-patch", "/no/such"])).failed(1, "cannot read the patch");
}
