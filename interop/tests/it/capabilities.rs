//! What their client does with each capability of our server: on the wire, with the capability and without.

use serde_json::Value;

use crate::model::exec;
use crate::programs::{Implementation, Server};
use crate::real_client::session;
use crate::tap::{Messages, Tap};

/// The requests of their client for one command, and the command's output.
fn requests(without: Option<&'static str>, settings: &[&str], script: &str) -> (Messages, String) {
    let server = Server::with(Implementation::Ours, |command| {
        command.env("SHELL", "/bin/bash");
    });
    let tap = Tap::start(&server.url, without);
    let session = session("danger-full-access", vec![exec(script)], |command| {
        command.env("CODEX_EXEC_SERVER_URL", &tap.url);
        for setting in settings {
            command.args(["-c", setting]);
        }
    });
    (tap.messages, session.tool_outputs[0].clone())
}

/// The requests with and without a capability; the command works in both.
fn both(capability: &'static str, settings: &[&str]) -> [Messages; 2] {
    [None, Some(capability)].map(|without| {
        let (messages, output) = requests(without, settings, "echo r$((1 + 1))n");
        assert!(output.contains("r2n"), "{capability}: {output}");
        messages
    })
}

#[test]
#[ignore = "interop/run runs it"]
fn a_default_session_is_as_documented() {
    let (messages, _) = requests(None, &[], "true");
    let hello = messages.of("initialize");
    assert_eq!(hello.len(), 1);
    assert_eq!(hello[0]["clientName"], "codex-environment");
    assert!(messages.of("environment/info").is_empty(), "`initialize` has it");
    let start = &messages.of("process/start")[0];
    assert_eq!(start["argv"][1], "-lc");
    assert!(start.get("shellSnapshot").is_none_or(Value::is_null), "{start}");
}

#[test]
#[ignore = "interop/run runs it"]
fn environment_config_is_read_if_announced() {
    let [with, without] = both("environmentConfigRead", &[]);
    let read = with.of("environmentConfig/read");
    assert_eq!(read.len(), 1, "{read:?}");
    assert_eq!(read[0]["configPaths"], serde_json::json!([["mcp_servers"]]));
    assert!(without.of("environmentConfig/read").is_empty());
}

#[test]
#[ignore = "interop/run runs it"]
fn missing_paths_are_watched_if_announced() {
    let [with, without] = both("fsWatchMissing", &[]);
    assert!(!with.of("fs/watchMissing").is_empty());
    assert!(without.of("fs/watchMissing").is_empty());
    // It looks again before each step instead.
    let probes = |messages: &Messages| messages.of("fs/getMetadata").len();
    assert!(probes(&without) > probes(&with), "{} {}", probes(&without), probes(&with));
}

#[test]
#[ignore = "interop/run runs it"]
fn snapshots_are_requested_if_announced() {
    let [with, without] = both("shellSnapshotV2", &["features.shell_snapshot_v2=true"]);
    let start = &with.of("process/start")[0];
    let asked = &start["shellSnapshot"];
    assert_eq!(asked["shell"]["path"], start["argv"][0], "{start}");
    assert!(asked["scopeId"].as_str().unwrap().ends_with(":remote"), "{start}");
    let start = &without.of("process/start")[0];
    assert!(start.get("shellSnapshot").is_none_or(Value::is_null), "{start}");
}

/// Ours has no directories for `PATH`, so the command is the model's own.
#[test]
#[ignore = "interop/run runs it"]
fn commands_have_no_prefix_for_path() {
    let settings = ["features.login_shell_package_path=true"];
    let (messages, _) = requests(None, &settings, "echo plain");
    assert_eq!(messages.of("process/start")[0]["argv"][2], "echo plain");
}

/// A plain session needs none of these.
#[test]
#[ignore = "interop/run runs it"]
fn sessions_work_without_streams_and_device_promises() {
    for capability in [
        "fileWriteStreaming",
        "sandboxedFileStreaming",
        "linuxRootWritePreservesDevices",
        "linuxApprovedRootWritePreservesRestrictions",
        "capabilityDiscoverySandbox",
    ] {
        let [with, without] = both(capability, &[]);
        let starts = |messages: &Messages| messages.of("process/start").len();
        assert_eq!(starts(&with), starts(&without), "{capability}");
    }
}
