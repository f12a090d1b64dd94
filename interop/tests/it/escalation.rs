//! A command that the user of their client approves: it runs on our server without a sandbox, or, where the
//! profile denies paths, in one that denies nothing else.

use serde_json::{Value, json};

use crate::app_server::{Settings, Turn, turn};
use crate::model::{Step, call};
use crate::programs::{Implementation, Server, home};
use crate::tap::Tap;

/// Asks to run without the sandbox.
fn escalated(cmd: &str) -> Step {
    call(
        "exec_command",
        json!({"cmd": cmd, "yield_time_ms": 30_000, "sandbox_permissions": "require_escalated",
            "justification": "may I?"}),
    )
}

/// A turn of their client with a profile that lets it write only `workspace`, and denies `secret` if `deny`.
fn approved(deny: bool, without: Option<&str>) -> (Turn, Tap, tempfile::TempDir) {
    let machine = home();
    let at = |name: &str| machine.path().join(name);
    for name in ["workspace", "outside"] {
        std::fs::create_dir(at(name)).unwrap();
    }
    std::fs::write(at("secret"), "hush").unwrap();
    let server = Server::start(Implementation::Ours);
    let tap = Tap::start(&server.url, without);
    let denied = match deny {
        true => format!(", {:?} = \"deny\"", at("secret")),
        false => String::new(),
    };
    let profile = format!(
        "permissions.work.filesystem={{\":root\" = \"read\", {:?} = \"write\"{denied}}}",
        at("workspace")
    );
    let settings = Settings {
        url: tap.url.clone(),
        config: vec!["default_permissions=\"work\"".to_owned(), profile],
        thread: json!({"approvalPolicy": "on-request"}),
        workspace: at("workspace"),
    };
    let script = format!(
        "cat {}; echo made > {}; ls /dev | wc -l",
        at("secret").display(),
        at("outside/made").display()
    );
    let turn = turn(&settings, vec![escalated(&script)]);
    (turn, tap, machine)
}

/// How often the sandbox of a start has an entry with this access.
fn entries(sandbox: &Value, access: &str) -> usize {
    let entries = &sandbox["permissions"]["file_system"]["entries"];
    entries.as_array().unwrap().iter().filter(|entry| entry["access"] == access).count()
}

#[test]
#[ignore = "interop/run runs it"]
fn an_approved_command_keeps_the_denied_paths() {
    let (turn, tap, machine) = approved(true, None);
    assert_eq!(turn.approvals.len(), 1, "{}", turn.log);
    let starts = tap.messages.of("process/start");
    assert_eq!(starts.len(), 1, "{starts:?}");
    let sandbox = &starts[0]["sandbox"];
    assert_eq!(sandbox["sandboxOverride"], "escalatedSandboxWithRestrictions", "{sandbox}");
    assert_eq!(entries(sandbox, "deny"), 1, "{sandbox}");
    assert!(!turn.tool_outputs[0].contains("hush"), "{:?}", turn.tool_outputs);
    let made = std::fs::read_to_string(machine.path().join("outside/made")).unwrap();
    assert_eq!(made, "made\n", "everything else is writable");
}

#[test]
#[ignore = "interop/run runs it"]
fn an_approved_command_is_refused_if_the_server_does_not_keep_denied_paths() {
    let (turn, tap, machine) = approved(true, Some("linuxApprovedRootWritePreservesRestrictions"));
    assert!(tap.messages.of("process/start").is_empty(), "{:?}", turn.tool_outputs);
    assert!(!machine.path().join("outside/made").exists());
    assert!(turn.tool_outputs[0].contains("exec-server"), "{:?}", turn.tool_outputs);
}

#[test]
#[ignore = "interop/run runs it"]
fn an_approved_command_without_denied_paths_has_no_sandbox() {
    for without in [None, Some("linuxApprovedRootWritePreservesRestrictions")] {
        let (turn, tap, machine) = approved(false, without);
        assert_eq!(turn.approvals.len(), 1, "{}", turn.log);
        let starts = tap.messages.of("process/start");
        assert!(starts.len() == 1 && starts[0]["sandbox"].is_null(), "{starts:?}");
        assert!(turn.tool_outputs[0].contains("hush"), "{:?}", turn.tool_outputs);
        assert!(machine.path().join("outside/made").exists());
    }
}
