//! On a machine without full assurance, requests are refused unless they name the weaker level.

use std::os::unix::process::CommandExt;
use std::process::Command;

use serde_json::{Value, json};

use crate::commands::output;
use crate::skipped::runs_as_root;
use crate::support::{Client, Running, codex, start};

/// The user id of `nobody`.
const UNPRIVILEGED: u32 = 65_534;

/// The program in an environment without user namespaces, as root or as nobody.
pub(crate) fn without_namespaces(home: &std::path::Path, nobody: bool) -> Command {
    let mut command = Command::new("unshare");
    command
        .args(["--user", "--map-root-user", "sh", "-c"])
        .arg("echo 0 > /proc/sys/user/max_user_namespaces && exec \"$0\" \"$@\"")
        .arg(env!("CARGO_BIN_EXE_codex"))
        .env_remove("RUST_LOG")
        .env_remove("CODEX_HOME")
        .env("HOME", home);
    if nobody {
        command.uid(UNPRIVILEGED).gid(UNPRIVILEGED);
    }
    command
}

fn users() -> Vec<bool> {
    if runs_as_root() { vec![false, true] } else { vec![false] }
}

fn read_only(assurance: Option<&str>) -> Value {
    let mut sandbox = json!({"permissions": {"type": "read-only"}, "cwd": "file:///"});
    if let Some(assurance) = assurance {
        sandbox["assurance"] = assurance.into();
    }
    sandbox
}

/// The responses to a process and to a file request.
async fn ask(client: &mut Client, id: &str, assurance: Option<&str>) -> [Value; 2] {
    let mut params = start(id, "echo ran; echo x > /var/tmp/x");
    params["sandbox"] = read_only(assurance);
    let started = client.call("process/start", params).await;
    if started["result"].is_object() {
        let (said, code) = client.closed(id).await;
        assert!(said.contains("ran") && code != 0, "{said} {code}");
    }
    let path = "file:///var/tmp/must-not-be";
    let write = json!({"path": path, "dataBase64": "eA==", "sandbox": read_only(assurance)});
    [started, client.call("fs/writeFile", write).await]
}

fn refused([started, written]: &[Value; 2]) {
    assert_eq!(started["error"]["code"], -32602, "{started}");
    assert_eq!(written["error"]["code"], -32600, "{written}");
    for answer in [started, written] {
        let message = answer["error"]["message"].as_str().unwrap();
        for part in
            ["missing: user namespace", "user.max_user_namespaces", "--sandbox-assurance landlock"]
        {
            assert!(message.contains(part), "{part}: {answer}");
        }
    }
}

fn accepted([started, written]: &[Value; 2]) {
    assert_eq!(started["result"]["sandboxType"], "linuxSeccomp", "{started}");
    assert_eq!(started["result"]["sandboxAssurance"], "landlock", "{started}");
    let message = written["error"]["message"].as_str().unwrap_or_default();
    assert!(message.contains("Operation not permitted"), "held, not refused: {written}");
}

#[tokio::test]
async fn without_namespaces_a_request_is_refused_unless_landlock_is_named() {
    let home = tempfile::tempdir().unwrap();
    for nobody in users() {
        let server =
            Running::start_with(without_namespaces(home.path(), nobody).arg("exec-server"));
        let mut client = server.client().await;
        refused(&ask(&mut client, "default", None).await);
        refused(&ask(&mut client, "full", Some("full")).await);
        refused(&ask(&mut client, "namespaces", Some("namespaces")).await);
        accepted(&ask(&mut client, "landlock", Some("landlock")).await);

        let mut command = without_namespaces(home.path(), nobody);
        command.args(["exec-server", "--sandbox-assurance", "landlock"]);
        let server = Running::start_with(&mut command);
        let mut client = server.client().await;
        accepted(&ask(&mut client, "default", None).await);
        refused(&ask(&mut client, "full", Some("full")).await);
        let info = client.call("environment/info", json!({})).await;
        assert_eq!(info["result"]["sandboxAssurance"], "landlock", "{info}");
    }
}

#[test]
fn without_namespaces_doctor_names_the_setting() {
    let home = tempfile::tempdir().unwrap();
    for nobody in users() {
        let said = output(without_namespaces(home.path(), nobody).arg("doctor"));
        assert_eq!(said.code, Some(1), "{said:?}");
        for part in [
            "--  user namespace ",
            "sysctl -w user.max_user_namespaces=15000 (it is 0)",
            "assurance: landlock\n",
            "--sandbox-assurance landlock",
            "other processes are visible",
        ] {
            assert!(said.out.contains(part), "{part}: {said:?}");
        }
        let sandbox = |options: &[&str]| {
            let mut command = without_namespaces(home.path(), nobody);
            output(command.arg("sandbox").args(options).args(["--", "echo", "ran"]))
        };
        sandbox(&[]).failed(125, "missing: user namespace");
        assert_eq!(sandbox(&["--assurance", "landlock"]).success(), "ran\n");
    }
}

#[tokio::test]
async fn a_machine_with_every_feature_offers_full_assurance() {
    let said = output(codex().arg("doctor"));
    assert!(said.success().contains("\nassurance: full\n"));
    let server = Running::start(&["--sandbox-assurance", "landlock"]);
    let mut client = server.client().await;
    for (n, assurance) in [None, Some("landlock"), Some("full")].into_iter().enumerate() {
        let mut params = start(&format!("p{n}"), "true");
        params["sandbox"] = read_only(assurance);
        let answer = client.call("process/start", params).await;
        assert_eq!(answer["result"]["sandboxAssurance"], "full", "{answer}");
    }
    let answer = client.call("process/start", start("free", "true")).await;
    assert_eq!(answer["result"].get("sandboxAssurance"), None, "{answer}");
    let mut params = start("bad", "true");
    params["sandbox"] = read_only(Some("best"));
    let answer = client.call("process/start", params).await;
    assert_eq!(answer["error"]["code"], -32602, "{answer}");
    let mut run = codex();
    run.args(["run", "--json", "--sandbox", "read-only", "--sandbox-assurance", "full"]);
    let said = output(run.args(["--", "true"])).success();
    assert!(said.contains(r#""sandboxAssurance":"full""#), "{said}");
}
