//! The help as it stands, so that a change of it is seen.

use crate::commands::{codex, output};

#[test]
fn help() {
    let whole = output(codex().arg("help")).well();
    insta::assert_snapshot!("codex", whole);
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
        let help = output(codex().args([subcommand, "--help"])).well();
        assert!(help.contains("Examples:"), "{subcommand} gives no examples");
        assert!(help.contains("--on <WHERE>"), "{subcommand} works in one place only");
        insta::assert_snapshot!(subcommand, help);
    }
}
