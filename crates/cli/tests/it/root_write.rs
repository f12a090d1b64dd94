//! Permission to write everywhere: alone it leaves the machine as it is, devices included; the denials
//! and read-only entries beside it hold, whatever `sandboxOverride` says of the reason.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Value, json};

use crate::support::{Client, Running, start};

const OVERRIDES: [&str; 4] = [
    "",
    r#""noOverride""#,
    r#""escalatedSandboxWithRestrictions""#,
    r#""bypassSandboxFirstAttempt""#,
];

fn uri(path: &Path) -> String {
    format!("file://{}", path.display())
}

fn entry(path: &Value, access: &str) -> Value {
    json!({"path": path, "access": access})
}

fn path(path: &Path, access: &str) -> Value {
    entry(&json!({"type": "path", "path": uri(path)}), access)
}

/// Write everywhere, and these entries.
fn root_write(more: &[Value], network: &str) -> Value {
    let mut entries = vec![entry(&json!({"type": "special", "value": {"kind": "root"}}), "write")];
    entries.extend_from_slice(more);
    let file_system = json!({"type": "restricted", "entries": entries});
    json!({"permissions": {"type": "managed", "file_system": file_system, "network": network}, "cwd": "file:///"})
}

/// The entries that a client adds for a command that the user has approved.
fn approved(denied: &[Value]) -> Vec<Value> {
    let metadata = ["/.git", "/.agents", "/.codex", "/.aws"];
    let metadata = metadata.iter().map(|name| path(Path::new(name), "write"));
    denied.iter().cloned().chain(metadata).collect()
}

fn with_override(mut sandbox: Value, text: &str) -> Value {
    if !text.is_empty() {
        sandbox["sandboxOverride"] = serde_json::from_str(text).unwrap();
    }
    sandbox
}

async fn run(client: &mut Client, id: &str, sandbox: &Value, script: &str) -> (String, i64) {
    let mut params = start(id, script);
    params["sandbox"] = sandbox.clone();
    let answer = client.call("process/start", params).await;
    assert!(answer.get("error").is_none(), "{answer}");
    client.closed(id).await
}

fn names(directory: &str) -> BTreeSet<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// What `linuxRootWritePreservesDevices` announces.
#[tokio::test]
async fn without_restrictions_the_hosts_devices_are_there() {
    let server = Running::start(&[]);
    let mut client = server.client().await;
    let unrestricted = json!({"permissions": {"type": "managed",
        "file_system": {"type": "unrestricted"}, "network": "restricted"}});
    let disabled = json!({"permissions": {"type": "disabled"}});
    for (n, sandbox) in
        [root_write(&[], "enabled"), root_write(&[], "restricted"), unrestricted, disabled]
            .iter()
            .enumerate()
    {
        for (m, reason) in OVERRIDES.iter().enumerate() {
            let sandbox = with_override(sandbox.clone(), reason);
            let script = "ls -A /dev; echo to-null > /dev/null && head -c 1 /dev/zero | wc -c";
            let (text, code) = run(&mut client, &format!("{n}-{m}"), &sandbox, script).await;
            let inside: BTreeSet<String> = text.lines().map(str::to_owned).collect();
            let missing: Vec<_> = names("/dev").difference(&inside).cloned().collect();
            assert_eq!((code, missing), (0, vec![]), "{sandbox}: {text}");
        }
    }
}

/// What `linuxApprovedRootWritePreservesRestrictions` announces.
#[tokio::test]
async fn denials_hold_beside_permission_to_write_everywhere() {
    let server = Running::start(&[]);
    let mut client = server.client().await;
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let work = directory.path().canonicalize().unwrap();
    for name in ["secret", "denied/secret", "deep/.env", "read-only", ".git/config"] {
        std::fs::create_dir_all(work.join(name).parent().unwrap()).unwrap();
        std::fs::write(work.join(name), "TOPSECRET").unwrap();
    }
    let before = names("/");
    let glob = json!({"type": "glob_pattern", "pattern": format!("{}/**/.env", work.display())});
    let denied = [
        path(&work.join("secret"), "deny"),
        path(&work.join("denied"), "deny"),
        entry(&glob, "deny"),
    ];
    let script = format!(
        "cd {} || exit 9\n\
         for name in secret denied/secret deep/.env; do cat $name && echo GIVEN-AWAY $name; done 2>/dev/null\n\
         for name in secret denied/secret deep/.env; do echo x > $name && echo WRITTEN $name; done 2>/dev/null\n\
         echo new > new && echo new > .git/new && echo new > deep/new && echo ok\n\
         ls -A /dev | wc -l\n\
         echo x > read-only && echo WRITTEN read-only\n\
         grep -E '^(CapEff|Seccomp|NoNewPrivs):' /proc/self/status",
        work.display()
    );
    for (n, reason) in OVERRIDES.iter().enumerate() {
        for read_only in [false, true] {
            let mut entries = approved(&denied);
            if read_only {
                entries.push(path(&work.join("read-only"), "read"));
            }
            for network in ["enabled", "restricted"] {
                let mut sandbox = with_override(root_write(&entries, network), reason);
                sandbox["workspaceRoots"] = json!([uri(&work)]);
                let id = format!("{n}-{read_only}-{network}");
                let (text, _) = run(&mut client, &id, &sandbox, &script).await;
                assert!(!text.contains("TOPSECRET") && !text.contains("GIVEN-AWAY"), "{text}");
                for name in ["secret", "denied/secret", "deep/.env"] {
                    assert!(!text.contains(&format!("WRITTEN {name}")), "{text}");
                    assert_eq!(std::fs::read_to_string(work.join(name)).unwrap(), "TOPSECRET");
                }
                assert_eq!(text.contains("WRITTEN read-only"), !read_only, "{text}");
                let devices: usize =
                    text.lines().find_map(|line| line.trim().parse().ok()).unwrap();
                assert!(text.contains("ok\n") && devices < 20, "{text}");
                assert!(text.contains("NoNewPrivs:\t1") && text.contains("Seccomp:\t2"), "{text}");
                assert!(text.contains("CapEff:\t0000000000000000"), "{text}");
                for new in ["new", ".git/new", "deep/new"] {
                    std::fs::remove_file(work.join(new)).unwrap();
                }
                std::fs::write(work.join("read-only"), "TOPSECRET").unwrap();
            }
        }
    }
    // The same for what a helper does.
    let sandbox = root_write(&approved(&denied), "enabled");
    for (name, refused) in
        [("secret", true), ("denied/secret", true), ("deep/.env", true), ("read-only", false)]
    {
        let params = json!({"path": uri(&work.join(name)), "sandbox": sandbox});
        let answer = client.call("fs/readFile", params).await;
        assert_eq!(answer.get("error").is_some(), refused, "{name}: {answer}");
    }
    drop((client, server));
    assert_eq!(names("/"), before, "entries for paths that do not exist leave nothing behind");
}

#[tokio::test]
async fn any_other_reason_is_refused() {
    let server = Running::start(&[]);
    let mut client = server.client().await;
    for reason in ["null", r#""""#, r#""NoOverride""#, r#""other""#, "1", "{}"] {
        let sandbox = with_override(root_write(&[], "enabled"), reason);
        let mut params = start("p", "true");
        params["sandbox"] = sandbox.clone();
        let answer = client.call("process/start", params).await;
        assert_eq!(answer["error"]["code"], -32602, "{reason}: {answer}");
        let params = json!({"path": "file:///etc/hostname", "sandbox": sandbox});
        let answer = client.call("fs/readFile", params).await;
        assert_eq!(answer["error"]["code"], -32602, "{reason}: {answer}");
    }
}

/// Every look of a discovery is made inside the sandbox.
#[tokio::test]
async fn a_discovery_sees_what_its_sandbox_shows() {
    let server = Running::start(&[]);
    let mut client = server.client().await;
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let work = directory.path().canonicalize().unwrap();
    for name in ["root/a/SKILL.md", "root/denied/SKILL.md", "other/SKILL.md"] {
        std::fs::create_dir_all(work.join(name).parent().unwrap()).unwrap();
        std::fs::write(work.join(name), "TOPSECRET").unwrap();
    }
    std::os::unix::fs::symlink(work.join("other"), work.join("root/link")).unwrap();
    let file_system = json!({"type": "restricted", "entries": [
        entry(&json!({"type": "special", "value": {"kind": "minimal"}}), "read"),
        path(&work.join("root"), "read"),
        path(&work.join("root/denied"), "deny"),
    ]});
    let permissions =
        json!({"type": "managed", "file_system": file_system, "network": "restricted"});
    let sandbox = json!({"permissions": permissions, "cwd": uri(&work)});
    let roots: Vec<Value> = ["root", "other", "root/denied"]
        .iter()
        .map(|name| json!({"id": name, "path": uri(&work.join(name)), "sandbox": sandbox}))
        .collect();
    let answer = client.call("capabilityRoots/discoverV1", json!({"roots": roots})).await;
    let roots = &answer["result"]["roots"];
    let skills = roots[0]["skills"].as_array().unwrap();
    assert_eq!(skills.len(), 1, "{answer}");
    assert_eq!(skills[0]["instructions"]["path"], uri(&work.join("root/a/SKILL.md")));
    assert!(roots[1]["error"].is_string() && roots[1]["skills"] == json!([]), "{answer}");
    assert_eq!(roots[2]["skills"], json!([]), "{answer}");
    // Nothing is installed where the home cannot be seen.
    let params = json!({"cwd": uri(&work), "sandbox": sandbox});
    let answer = client.call("capabilities/discoverV2", params).await;
    assert_eq!(answer["result"], json!({"plugins": [], "skills": [], "warnings": []}));
}
