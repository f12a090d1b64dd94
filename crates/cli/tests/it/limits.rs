//! Limits as flags: of a command, of a server, and what a server in a delegated group does about them.

use serde_json::{Value, json};

use crate::cgroup::Group;
use crate::commands::{Server, codex, everywhere, output};
use crate::skipped::runs_as_root;
use crate::support::{eventually, start};

#[test]
fn exceeded_limits_are_named_and_output_is_complete() {
    everywhere(|codex| {
        let run = |flags: &[&str], script: &str| {
            output(codex("run").args(flags).args(["-n", "--", "sh", "-c", script]))
        };
        let idle = run(&["--idle-timeout", "400ms"], "echo early; sleep 60");
        idle.failed(124, "--idle-timeout of 400ms");
        assert_eq!(idle.out, "early\n");
        let forks = "echo early; for n in 1 2 3 4 5 6 7 8; do sleep 60 & done; wait";
        let pids = run(&["--pids", "4"], forks);
        pids.failed(137, "--pids of 4");
        assert_eq!(pids.out, "early\n");
        let printed = run(&["--max-output", "2K"], "yes | head -c 100000; sleep 60");
        printed.failed(137, "--max-output of 2K");
        assert!(printed.out.len() > 2048);
        let memory = "exec python3 -c 'import time; x = b\"x\" * (96 << 20); time.sleep(60)'";
        run(&["--memory", "48M"], memory).failed(137, "--memory of 48M");
        let within = run(&["--memory", "500M", "--pids", "50", "--cpu-time", "1m"], "echo fine");
        assert_eq!(within.success(), "fine\n");
        let sandbox = ["--sandbox", "read-only", "--pids", "10"];
        run(&sandbox, forks).failed(137, "--pids of 10");
        let burns = "while :; do :; done & while :; do :; done";
        let sandbox = ["--sandbox", "read-only", "--cpu-time", "300ms"];
        run(&sandbox, burns).failed(137, "--cpu-time of 300ms");
    });
}

#[test]
fn json_events_tell_limits_reason_and_usage() {
    let flags = ["run", "--json", "--timeout", "300ms", "--pids", "100"];
    let said = output(codex().args(flags).args(["--", "sleep", "60"]));
    assert_eq!(said.code, Some(124));
    let events: Vec<Value> =
        said.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let limits = json!({
        "wallMs": {"value": 300, "by": "server"},
        "pids": {"value": 100, "by": "watchdog"},
    });
    assert_eq!(events[0]["limits"], limits);
    let exited = events.iter().find(|event| event["type"] == "exited").unwrap();
    assert_eq!((&exited["endedBy"], &exited["exitCode"]), (&json!("wall"), &json!(137)));
    assert!(exited["usage"]["cpuUs"].is_u64(), "{exited}");
}

#[test]
fn the_server_limits_what_asks_for_nothing() {
    let state = tempfile::tempdir().unwrap();
    let server = Server::with(&["--limit", "wall=400ms", "--max-limit", "pids=40"]);
    let said = output(server.codex("run").args(["--", "sleep", "60"]));
    said.failed(124, "the server's limit of 400ms");
    let refused = output(server.codex("run").args(["--pids", "41", "--", "true"]));
    refused.failed(125, "this server allows at most 40");
    let detached = ["--detach", "limited", "--timeout", "1h", "--", "sleep", "600"];
    let codex_with_state = |subcommand| {
        let mut command = server.codex(subcommand);
        command.env("XDG_STATE_HOME", state.path());
        command
    };
    assert_eq!(output(codex_with_state("run").args(detached)).code, Some(0));
    let listed = output(codex_with_state("ps").arg("limited")).success();
    assert!(listed.contains("wall 1h, pids 40"), "{listed}");
    assert_eq!(output(codex_with_state("kill").arg("limited")).code, Some(0));
    let bad = output(codex().args(["exec-server", "--session-limit", "memory=1G"]));
    bad.failed(1, "--limit memory=VALUE");
}

/// Here the kernel counts the CPU time, of processes that were never waited for, too; and the group of the
/// program is gone after it.
#[tokio::test]
async fn a_delegated_group_counts_for_a_program() {
    if !runs_as_root() {
        return;
    }
    let Some(group) = Group::new("limits") else { return };
    group.delegate();
    let server = group.server();
    let mut client = server.client().await;
    // A parent that ignores SIGCHLD never learns what its children used.
    let script =
        "trap '' CHLD; while :; do (i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done) & wait; done";
    let mut params = start("burn", script);
    params["limits"] = json!({"cpuMs": 400, "wallMs": 50_000});
    let started = client.call("process/start", params).await;
    let limits = json!({
        "wallMs": {"value": 50_000, "by": "server"},
        "cpuMs": {"value": 400, "by": "cgroup"},
    });
    assert_eq!(started["result"]["limits"], limits, "{started}");
    let exited = loop {
        let event = client.notification().await;
        if event["method"] == "process/exited" {
            break event;
        }
    };
    assert_eq!(exited["params"]["endedBy"], "cpu", "{exited}");
    assert!(exited["params"]["usage"]["cpuUs"].as_u64().unwrap() >= 400_000, "{exited}");
    let programs = || {
        let below = group.below().into_iter();
        below
            .flat_map(|directory| std::fs::read_dir(directory).unwrap())
            .filter(|entry| {
                let name = entry.as_ref().unwrap().file_name();
                name.to_string_lossy().starts_with("program-")
            })
            .count()
    };
    eventually("the program's group is removed", || programs() == 0).await;
    drop(server);
    eventually("all groups are removed", || group.below().is_empty()).await;
}
