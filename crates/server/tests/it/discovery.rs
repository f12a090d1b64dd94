//! `capabilityRoots/discoverV1` and `capabilities/discoverV2`.

use std::path::Path;

use serde_json::{Value, json};

use crate::support::*;

fn write(path: &Path, text: impl AsRef<[u8]>) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
}

fn uri(path: &Path) -> String {
    format!("file://{}", path.display())
}

async fn discover(client: &mut Client, root: &Path) -> Value {
    let params = json!({"roots": [{"id": "it", "path": uri(root)}]});
    client.call("capabilityRoots/discoverV1", params).await.unwrap()["roots"][0].take()
}

/// The paths of files in a list, below the root.
fn below(root: &Path, files: &Value, member: &str) -> Vec<String> {
    let path = |file: &Value| match member {
        "" => file["path"].clone(),
        member => file[member]["path"].clone(),
    };
    let short = |path: Value| path.as_str().unwrap().replace(&format!("{}/", uri(root)), "");
    files.as_array().unwrap().iter().map(path).map(short).collect()
}

#[tokio::test]
async fn a_root_is_searched_six_levels_deep_hidden_and_linked_directories_included() {
    let (root, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let at = |name: &str| root.path().join(name);
    write(&at("a/SKILL.md"), "---\nname: a\n---\n");
    write(&at("a/agents/openai.yaml"), "policy: {}\n");
    write(&at(".hidden/b/SKILL.md"), "no front matter");
    write(&at("c/skill.md"), "another name");
    write(&at("not-text/SKILL.md"), b"\xff");
    write(&at("large/SKILL.md"), vec![b'x'; (1 << 20) + 1]);
    write(&at("full/SKILL.md"), vec![b'x'; 1 << 20]);
    write(&at("1/2/3/4/5/6/SKILL.md"), "deep");
    write(&at("1/2/3/4/5/6/7/SKILL.md"), "too deep");
    write(&outside.path().join("o/SKILL.md"), "outside");
    std::os::unix::fs::symlink(outside.path(), at("link")).unwrap();
    std::os::unix::fs::symlink(root.path(), at("loop")).unwrap();
    let mut client = Client::ready(&server()).await;
    let found = discover(&mut client, root.path()).await;
    assert_eq!(
        below(root.path(), &found["skills"], "instructions"),
        [
            ".hidden/b/SKILL.md",
            "1/2/3/4/5/6/SKILL.md",
            "a/SKILL.md",
            "full/SKILL.md",
            "link/o/SKILL.md"
        ]
    );
    assert_eq!(found["skills"][2]["metadata"]["contents"], "policy: {}\n");
    assert_eq!(found["skills"][0]["metadata"], Value::Null);
    let warnings = found["warnings"].as_array().unwrap();
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(
        warnings[0].as_str().unwrap().ends_with("exceeds the 1048576-byte limit"),
        "{warnings:?}"
    );
    assert!(warnings[1].as_str().unwrap().contains("is not UTF-8"), "{warnings:?}");
    assert_eq!((&found["plugin"], &found["error"]), (&Value::Null, &Value::Null));
}

#[tokio::test]
async fn a_plugin_is_found_by_its_preferred_manifest() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    let manifest = r#"{"name":"p","mcpServers":"./m.json","apps":"../a.json"}"#;
    write(&at(".codex-plugin/plugin.json"), manifest);
    write(&at(".claude-plugin/plugin.json"), "{}");
    write(&at("m.json"), "M");
    write(&at(".mcp.json"), "not this");
    write(&at(".app.json"), "A");
    write(&at("nested/.cursor-plugin/plugin.json"), "{}");
    write(&at("skills/s/SKILL.md"), "s");
    let mut client = Client::ready(&server()).await;
    let found = discover(&mut client, root.path()).await;
    let plugin = &found["plugin"];
    assert_eq!(plugin["manifest"]["contents"], manifest);
    assert_eq!(plugin["mcpConfig"]["contents"], "M");
    assert_eq!(plugin["appsConfig"]["contents"], "A", "an unusable path is as none");
    assert_eq!(
        below(root.path(), &found["namespaceManifests"], ""),
        [".codex-plugin/plugin.json", "nested/.cursor-plugin/plugin.json"]
    );
    let warnings = found["warnings"].as_array().unwrap();
    assert!(warnings[0].as_str().unwrap().ends_with("path must start with `./`"), "{warnings:?}");
    // From inside, the plugin around it gives the names.
    let found = discover(&mut client, &at("skills")).await;
    assert_eq!(found["plugin"], Value::Null);
    assert_eq!(found["namespaceManifests"][0]["contents"], manifest);
}

#[tokio::test]
async fn a_root_that_fails_is_alone_and_their_number_is_bounded() {
    let root = tempfile::tempdir().unwrap();
    write(&root.path().join("SKILL.md"), "x");
    let mut client = Client::ready(&server()).await;
    let paths = [root.path().join("none"), root.path().join("SKILL.md"), root.path().to_owned()];
    let roots: Vec<Value> = paths
        .iter()
        .enumerate()
        .map(|(id, path)| json!({"id": id.to_string(), "path": uri(path)}))
        .collect();
    let found = client.call("capabilityRoots/discoverV1", json!({"roots": roots})).await.unwrap();
    let error = |n: usize| found["roots"][n]["error"].as_str().unwrap_or_default();
    let missing = format!("failed to inspect capability root {}: No such file", uri(&paths[0]));
    assert!(error(0).starts_with(&missing), "{found}");
    assert_eq!(error(1), format!("capability root {} is not a directory", uri(&paths[1])));
    assert_eq!(found["roots"][2]["skills"].as_array().unwrap().len(), 1);
    assert_eq!(found["roots"][2]["id"], "2");

    let none = client.call("capabilityRoots/discoverV1", json!({"roots": []})).await.unwrap();
    assert_eq!(none, json!({"roots": []}));
    let many = vec![json!({"id": "x", "path": "file:///none"}); 129];
    let refused =
        client.call("capabilityRoots/discoverV1", json!({"roots": many})).await.unwrap_err();
    let message = "capability root discovery accepts at most 128 roots";
    assert_eq!((refused.code, refused.message.as_str()), (-32600, message));
}

/// The files of a root together are bounded, and so are those of an answer.
#[tokio::test]
async fn what_is_too_much_is_left_out_with_a_warning() {
    let root = tempfile::tempdir().unwrap();
    for n in 0..20 {
        write(&root.path().join(format!("{n:02}/SKILL.md")), vec![b'x'; 1 << 20]);
    }
    let mut client = Client::ready(&server()).await;
    let found = discover(&mut client, root.path()).await;
    assert_eq!(found["skills"].as_array().unwrap().len(), 16);
    assert_eq!(found["warnings"].as_array().unwrap().len(), 4);
    let roots: Vec<Value> =
        (0..3).map(|n| json!({"id": n.to_string(), "path": uri(root.path())})).collect();
    let found = client.call("capabilityRoots/discoverV1", json!({"roots": roots})).await.unwrap();
    let count = |root: &Value| root["skills"].as_array().unwrap().len();
    let all: usize = found["roots"].as_array().unwrap().iter().map(count).sum();
    assert_eq!(all, 24);
}

#[tokio::test]
async fn installed_skills_and_plugins_are_described() {
    let home = tempfile::tempdir().unwrap();
    let at = |name: &str| home.path().join(name);
    let skill = |name: &str| format!("---\nname: {name}\ndescription: use: it\n---\n");
    write(&at("codex/skills/.system/a/SKILL.md"), skill("a"));
    write(&at("codex/skills/bad/SKILL.md"), "no front matter");
    write(
        &at(".agents/skills/b/SKILL.md"),
        "---\ndescription: d\nmetadata:\n  short-description: s\n---\n",
    );
    write(
        &at(".agents/skills/b/agents/openai.yaml"),
        "policy: {allow_implicit_invocation: false}\n",
    );
    let plugin = at("codex/plugins/cache/market/tool/local");
    let manifest = r#"{"name":"Tool","version":"1.2.0","interface":{"displayName":"The tool"},"mcpServers":{"s":{}}}"#;
    write(&plugin.join(".codex-plugin/plugin.json"), manifest);
    write(&plugin.join("skills/c/SKILL.md"), skill("c"));
    write(&at("codex/plugins/cache/market/tool/9.0.0/.codex-plugin/plugin.json"), "{}");
    let server = server_with(|config| {
        config.environment.user_home = Some(at(""));
        config.environment.codex_home = Some(at("codex"));
    });
    let mut client = Client::ready(&server).await;
    let found =
        client.call("capabilities/discoverV2", json!({"cwd": "file:///none"})).await.unwrap();
    let root = |path: &Path| uri(&path.canonicalize().unwrap());
    let codex_skills = root(&at("codex/skills"));
    let agents = uri(&at(".agents/skills"));
    assert_eq!(
        found["skills"],
        json!([
            {"name": "a", "description": "use: it", "shortDescription": null,
             "path": format!("{codex_skills}/.system/a/SKILL.md"),
             "discoveryRoot": {"id": "codex-home-skills", "path": codex_skills},
             "dependencies": null, "policy": null},
            {"name": "b", "description": "d", "shortDescription": "s",
             "path": format!("{agents}/b/SKILL.md"),
             "discoveryRoot": {"id": "user-agent-skills", "path": agents},
             "dependencies": null, "policy": {"allowImplicitInvocation": false, "products": []}},
        ])
    );
    let plugin = root(&plugin);
    let file = json!({"path": format!("{plugin}/.codex-plugin/plugin.json"), "contents": manifest});
    let inline = json!({"path": file["path"], "contents": "{\"s\":{}}"});
    assert_eq!(
        found["plugins"],
        json!([{"id": "tool@market", "displayName": "The tool", "remotePluginId": null,
            "version": "local", "root": plugin,
            "files": {"manifest": file, "mcpConfig": inline, "appsConfig": null},
            "skills": [{"name": "Tool:c", "description": "use: it", "shortDescription": null,
                "path": format!("{plugin}/skills/c/SKILL.md"), "dependencies": null, "policy": null}]}])
    );
    let warning = "some capability metadata could not be loaded; discovery may be incomplete";
    assert_eq!(found["warnings"], json!([warning]));
}

/// Nothing here can be confined, so nothing is looked at.
#[tokio::test]
async fn a_sandbox_that_cannot_be_enforced_is_refused() {
    let root = tempfile::tempdir().unwrap();
    write(&root.path().join("SKILL.md"), "x");
    let sandbox = json!({"permissions": {"type": "read-only"}, "cwd": "file:///"});
    let mut client = Client::ready(&server()).await;
    let asked = json!({"roots": [{"id": "it", "path": uri(root.path()), "sandbox": sandbox}]});
    let found = client.call("capabilityRoots/discoverV1", asked).await.unwrap();
    assert!(found["roots"][0]["error"].as_str().unwrap().contains("sandbox"), "{found}");
    assert_eq!(found["roots"][0]["skills"], json!([]));
    let params = json!({"cwd": "file:///", "sandbox": sandbox});
    let refused = client.call("capabilities/discoverV2", params).await.unwrap_err();
    assert_eq!(refused.code, -32600, "{refused:?}");
}
