//! What their client does with each capability of our server: on the wire, with the capability and without.
//!
//! | capability or member | tests |
//! | --- | --- |
//! | `environmentConfigRead` | here; `environment` calls a tool of the server's configuration |
//! | `httpHeaderEnvVars` | `environment::tools_that_need_a_token_are_used_only_if_headers_can_have_variables` |
//! | `fsWatchMissing`, `shellSnapshotV2`, `capabilityDiscoveryV2`, `capabilityDiscoverySandbox` | here |
//! | `linuxApprovedRootWritePreservesRestrictions` | `escalation`, with denied paths and without |
//! | `networkProxyLaunch`, `networkProxyReviewDomains`, `credentialMasking`, `credentialMaskingCustomProviders` | `network` |
//! | `prependPathDirs`, `providerId`, nothing at all | here |
//! | `executorVersion` | `compatibility`: `capabilityDiscoveryV2` counts only from a release on |
//! | `fileWriteStreaming`, `sandboxedFileStreaming`, `linuxRootWritePreservesDevices` | here: sessions work without them; no session was seen that uses them |

use serde_json::{Value, json};

use crate::app_server::{Settings, turn};
use crate::model::exec;
use crate::programs::{Implementation, Server, home};
use crate::real_client::session;
use crate::tap::{Messages, Tap, hide};

/// The requests of their client for one command, and the command's output.
fn requests(without: Option<&str>, settings: &[&str], script: &str) -> (Messages, String) {
    requests_through(settings, script, hide(without))
}

/// The same, where their client sees our server's messages as `change` makes them.
fn requests_through(
    settings: &[&str],
    script: &str,
    change: impl Fn(&str) -> String + Send + Sync + 'static,
) -> (Messages, String) {
    let server = Server::with(Implementation::Ours, |command| {
        command.env("SHELL", "/bin/bash");
    });
    let tap = Tap::changing(&server.url, change);
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
    assert_eq!(read[0]["configPaths"], json!([["mcp_servers"]]));
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

/// Ours has no directories for `PATH`, so the command is the model's own; with one it has a prefix.
#[test]
#[ignore = "interop/run runs it"]
fn commands_have_a_prefix_for_the_directories_of_programs() {
    let settings = ["features.login_shell_package_path=true"];
    let (messages, _) = requests(None, &settings, "echo plain");
    assert_eq!(messages.of("process/start")[0]["argv"][2], "echo plain");
    let bundled = |text: &str| {
        text.replace("\"prependPathDirs\":[]", "\"prependPathDirs\":[\"file:///opt/bundled\"]")
    };
    for (settings, prefixed) in [(&settings[..], true), (&[], false)] {
        let (messages, output) = requests_through(settings, "echo $PATH", bundled);
        let script = messages.of("process/start")[0]["argv"][2].as_str().unwrap().to_owned();
        assert!(script.ends_with("echo $PATH"), "{script}");
        assert_eq!(script.contains("/opt/bundled"), prefixed, "{script}");
        assert_eq!(output.contains("/opt/bundled:"), prefixed, "{output}");
    }
}

/// A server of ours whose home has a skill, and a directory with another one that an application may select.
fn skills() -> (Server, tempfile::TempDir) {
    let machine = home();
    for name in ["skills/homely", "selected/chosen"] {
        let directory = machine.path().join(name);
        std::fs::create_dir_all(&directory).unwrap();
        let text = format!("---\nname: {0}\ndescription: about-{0}\n---\n", name.replace('/', "-"));
        std::fs::write(directory.join("SKILL.md"), text).unwrap();
    }
    let server = Server::with(Implementation::Ours, |command| {
        command.env("CODEX_HOME", machine.path());
    });
    (server, machine)
}

#[test]
#[ignore = "interop/run runs it"]
fn installed_skills_are_discovered_if_announced() {
    for (without, found) in [(None, true), (Some("capabilityDiscoveryV2"), false)] {
        let (server, _machine) = skills();
        let tap = Tap::start(&server.url, without);
        let settings = Settings {
            url: tap.url.clone(),
            config: vec!["features.executor_capability_discovery_v2=true".to_owned()],
            ..Settings::default()
        };
        let turn = turn(&settings, vec![exec("echo r$((1 + 1))n")]);
        assert!(turn.tool_outputs[0].contains("r2n"), "{:?}", turn.tool_outputs);
        assert_eq!(tap.messages.of("capabilities/discoverV2").len(), usize::from(found));
        assert!(tap.messages.of("capabilityRoots/discoverV1").is_empty(), "no fallback");
        assert_eq!(turn.prompt.contains("about-skills-homely"), found, "{}", turn.prompt);
    }
}

/// An application selects a root. Where the profile denies paths, it is searched in a sandbox, or, without
/// `capabilityDiscoverySandbox`, not by this method.
#[test]
#[ignore = "interop/run runs it"]
fn selected_roots_are_discovered_in_the_sandbox_of_the_profile() {
    for (deny, without, asked) in [
        (false, None, true),
        (false, Some("capabilityDiscoverySandbox"), true),
        (true, None, true),
        (true, Some("capabilityDiscoverySandbox"), false),
    ] {
        let (server, machine) = skills();
        let tap = Tap::start(&server.url, without);
        let root = machine.path().join("selected");
        let mut config = vec!["features.executor_capability_discovery=true".to_owned()];
        if deny {
            let denied = machine.path().join("skills");
            config.push("default_permissions=\"work\"".to_owned());
            config.push(format!(
                "permissions.work.filesystem={{\":root\" = \"read\", {denied:?} = \"deny\"}}"
            ));
        }
        let location = json!({"type": "environment", "environmentId": "remote", "path": root});
        let thread = json!({"selectedCapabilityRoots": [{"id": "r1", "location": location}]});
        let settings = Settings { url: tap.url.clone(), config, thread, ..Settings::default() };
        let turn = turn(&settings, vec![exec("true")]);
        let sent = tap.messages.of("capabilityRoots/discoverV1");
        let case = format!("deny {deny}, without {without:?}");
        assert_eq!(sent.len(), usize::from(asked), "{case}: {sent:?}");
        if asked {
            assert_eq!(sent[0]["roots"][0]["id"], "r1", "{case}: {sent:?}");
            assert_eq!(sent[0]["roots"][0]["sandbox"].is_object(), deny, "{case}: {sent:?}");
            assert!(turn.prompt.contains("about-selected-chosen"), "{case}: {}", turn.prompt);
        }
    }
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

/// No capability at all, no provider, no directories of programs.
#[test]
#[ignore = "interop/run runs it"]
fn sessions_work_without_any_capability() {
    let (messages, output) = requests_through(&[], "echo r$((1 + 1))n", |text| {
        let Ok(mut message) = serde_json::from_str::<Value>(text) else { return text.to_owned() };
        let Some(info) = message["result"].get_mut("environmentInfo") else {
            return text.to_owned();
        };
        let members = info.as_object_mut().unwrap();
        members.retain(|name, _| !["providerId", "prependPathDirs"].contains(&name.as_str()));
        for bit in members["capabilities"].as_object_mut().unwrap().values_mut() {
            *bit = Value::Bool(false);
        }
        message.to_string()
    });
    assert!(output.contains("r2n"), "{output}");
    for method in ["environmentConfig/read", "fs/watchMissing"] {
        assert!(messages.of(method).is_empty(), "{method}");
    }
}
