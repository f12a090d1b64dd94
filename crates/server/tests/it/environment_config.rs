//! `environmentConfig/read`: which files are layers, and what is returned of them.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use codex_exec_server_protocol::ErrorKind;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::*;

/// A machine with directories of its own for the administrator, the user and projects.
struct Machine {
    root: TempDir,
    client: Client,
}

impl Machine {
    async fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        std::fs::create_dir_all(at("home/codex")).unwrap();
        let server = server_with(|config| {
            config.environment.system = at("etc");
            config.environment.user_home = Some(at("home"));
            config.environment.codex_home = Some(at("home/codex"));
        });
        Self { client: Client::ready(&server).await, root }
    }

    fn at(&self, name: &str) -> PathBuf {
        // Temporary directories may be behind a link.
        self.root.path().canonicalize().unwrap().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        write(&self.root.path().join(name), text);
    }

    /// The user's file: a key, and which directories are trusted.
    fn trust(&self, levels: &[(&str, &str)]) {
        let mut text = "m = \"user\"\n".to_owned();
        for (name, level) in levels {
            let path = self.at(name);
            write!(text, "[projects.\"{}\"]\ntrust_level = \"{level}\"\n", path.display()).unwrap();
        }
        self.write("home/codex/config.toml", &text);
    }

    async fn read(
        &mut self,
        cwd: &str,
        config: Value,
        requirements: Value,
    ) -> Result<Value, ErrorResponse> {
        let cwd = format!("file://{}", self.at(cwd).display());
        let params = json!({"cwd": cwd, "configPaths": config, "requirementsPaths": requirements});
        self.client.call("environmentConfig/read", params).await
    }

    /// The values of `m` in the layers of the configuration.
    async fn layers(&mut self, cwd: &str) -> Vec<String> {
        let read = self.read(cwd, json!([["m"]]), json!([])).await.unwrap();
        let layers = read["config"]["layers"].as_array().unwrap();
        let value = |layer: &Value| layer["toml"].as_str().unwrap().trim().to_owned();
        layers.iter().map(value).map(|toml| toml.replace("m = ", "").replace('"', "")).collect()
    }
}

fn write(path: &Path, text: &str) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
}

#[tokio::test]
async fn layers_come_lowest_precedence_first_with_their_directories() {
    let mut machine = Machine::new().await;
    let empty = machine.read("work", json!([["m"]]), json!([["m"]])).await.unwrap();
    assert_eq!(empty["config"], json!({"layers": [], "cloudInsertionIndex": 0}));
    assert_eq!(
        empty["userHomeDir"],
        format!("file://{}", machine.root.path().join("home").display())
    );
    assert_eq!(empty["codexHomeDir"], format!("file://{}", machine.at("home/codex").display()));
    assert!(empty["hostname"].is_string());

    machine.write("etc/config.toml", "m = \"system\"\nother = 1\n");
    machine
        .write("etc/managed_config.toml", "m = \"managed\"\nsandbox_mode = \"workspace-write\"\n");
    machine.write("etc/requirements.toml", "m = \"required\"\n");
    machine.write("home/codex/requirements.toml", "m = \"not read\"\n");
    machine.write("work/.git/HEAD", "");
    machine.write("work/.codex/config.toml", "m = \"project\"\n");
    machine.trust(&[("work", "trusted")]);
    let paths = json!([["m"], ["allowed_sandbox_modes"]]);
    let read = machine.read("work", json!([["m"]]), paths).await.unwrap();
    let layer = |source: String, base: PathBuf, toml: &str| json!({"source": source, "baseDir": format!("file://{}", base.display()), "toml": toml});
    let etc = machine.root.path().join("etc");
    let file = |name: &str| etc.join(name).display().to_string();
    let home = machine.at("home/codex");
    let project = machine.at("work/.codex");
    assert_eq!(
        read["config"],
        json!({"cloudInsertionIndex": 1, "layers": [
            layer(format!("system ({})", file("config.toml")), etc.clone(), "m = \"system\"\n"),
            layer(format!("user ({}/config.toml)", home.display()), home, "m = \"user\"\n"),
            layer(format!("project ({}/config.toml)", project.display()), project, "m = \"project\"\n"),
            layer(
                format!("legacy managed_config.toml ({})", file("managed_config.toml")),
                etc.clone(),
                "m = \"managed\"\n",
            ),
        ]})
    );
    let modes = "allowed_sandbox_modes = [\"read-only\", \"workspace-write\"]\n";
    assert_eq!(
        read["requirements"],
        json!({"cloudInsertionIndex": 1, "layers": [
            layer(file("requirements.toml"), etc.clone(), "m = \"required\"\n"),
            layer(file("managed_config.toml"), etc.clone(), modes),
        ]})
    );
}

#[tokio::test]
async fn a_project_is_read_only_as_far_as_it_is_trusted() {
    let mut machine = Machine::new().await;
    for directory in ["r", "r/a", "r/a/b"] {
        machine
            .write(&format!("{directory}/.codex/config.toml"), &format!("m = \"{directory}\"\n"));
    }
    machine.write("r/.git/HEAD", "ref: refs/heads/main\n");
    for (levels, expected) in [
        (&[][..], &[][..]),
        (&[("r", "trusted")], &["r", "r/a", "r/a/b"]),
        (&[("r", "untrusted")], &[]),
        (&[("r/a/b", "trusted")], &["r/a/b"]),
        (&[("r/a", "trusted")], &["r/a"]),
        (&[("r", "trusted"), ("r/a/b", "untrusted")], &["r", "r/a"]),
        (&[("r", "trusted"), ("r/a", "untrusted")], &["r", "r/a/b"]),
        (&[("r", "untrusted"), ("r/a/b", "trusted")], &["r/a/b"]),
        (&[("home", "trusted"), ("", "trusted")], &[]),
    ] {
        machine.trust(levels);
        let mut layers = vec!["user"];
        layers.extend(expected);
        assert_eq!(machine.layers("r/a/b").await, layers, "{levels:?}");
    }
    // Where the directory does not exist, its ancestors do.
    machine.trust(&[("r", "trusted")]);
    assert_eq!(machine.layers("r/a/b/none").await, ["user", "r", "r/a", "r/a/b"]);
    // Through a link, the real path decides.
    std::os::unix::fs::symlink(machine.at("r"), machine.at("link")).unwrap();
    assert_eq!(machine.layers("link/a").await, ["user", "r", "r/a"]);
    machine.trust(&[("link", "trusted"), ("r", "untrusted")]);
    assert_eq!(machine.layers("link/a").await, ["user"]);
    // A project cannot vouch for itself.
    machine.trust(&[]);
    let own = format!(
        "m = \"r\"\n[projects.\"{}\"]\ntrust_level = \"trusted\"\n",
        machine.at("r").display()
    );
    machine.write("r/.codex/config.toml", &own);
    assert_eq!(machine.layers("r").await, ["user"]);
}

#[tokio::test]
async fn only_a_real_repository_marks_a_project() {
    let mut machine = Machine::new().await;
    for directory in ["q", "q/a"] {
        machine
            .write(&format!("{directory}/.codex/config.toml"), &format!("m = \"{directory}\"\n"));
    }
    std::fs::create_dir(machine.at("q/.git")).unwrap();
    machine.trust(&[("q", "trusted")]);
    assert_eq!(machine.layers("q/a").await, ["user"], "an empty .git");
    machine.write("q/.git/HEAD", "");
    assert_eq!(machine.layers("q/a").await, ["user", "q", "q/a"]);

    // Other markers: the root is elsewhere, and the repository's trust still counts.
    let trust = std::fs::read_to_string(machine.at("home/codex/config.toml")).unwrap();
    machine.write("home/codex/config.toml", &format!("project_root_markers = [\".hg\"]\n{trust}"));
    assert_eq!(machine.layers("q/a").await, ["user", "q/a"]);
    machine.write("home/codex/config.toml", &format!("project_root_markers = 1\n{trust}"));
    let refused = machine.read("q", json!([["m"]]), json!([])).await.unwrap_err();
    assert!(refused.message.contains("project_root_markers"), "{refused:?}");
}

#[tokio::test]
async fn a_worktree_is_trusted_with_its_main_checkout_only_if_that_knows_it() {
    let mut machine = Machine::new().await;
    machine.write("wt/.codex/config.toml", "m = \"wt\"\n");
    machine.write("main/.git/HEAD", "");
    let administered = machine.at("main/.git/worktrees/wt");
    machine.write("wt/.git", &format!("gitdir: {}\n", administered.display()));
    machine.write("main/.git/worktrees/wt/commondir", "../..\n");
    machine.trust(&[("main", "trusted")]);
    assert_eq!(machine.layers("wt").await, ["user"], "anybody can point to a repository");
    machine.write(
        "main/.git/worktrees/wt/gitdir",
        &format!("{}\n", machine.at("other/.git").display()),
    );
    assert_eq!(machine.layers("wt").await, ["user"]);
    machine
        .write("main/.git/worktrees/wt/gitdir", &format!("{}\n", machine.at("wt/.git").display()));
    assert_eq!(machine.layers("wt").await, ["user", "wt"]);
    machine.trust(&[("main", "trusted"), ("wt", "untrusted")]);
    assert_eq!(machine.layers("wt").await, ["user"]);
}

#[tokio::test]
async fn the_users_own_directory_is_no_project_layer() {
    let mut machine = Machine::new().await;
    machine.write("home/.git/HEAD", "");
    std::os::unix::fs::symlink("codex", machine.at("home/.codex")).unwrap();
    machine.trust(&[("home", "trusted")]);
    assert_eq!(machine.layers("home").await, ["user"]);
}

#[tokio::test]
async fn a_broken_file_fails_the_call_unless_its_project_is_not_trusted() {
    let mut machine = Machine::new().await;
    machine.write("p/.git/HEAD", "");
    machine.write("p/.codex/config.toml", "m = 1\n[");
    machine.trust(&[]);
    assert_eq!(machine.layers("p").await, ["user"]);
    machine.trust(&[("p", "trusted")]);
    for (name, text, says) in [
        ("p/.codex/config.toml", "m = 1\n[", "p/.codex/config.toml:2:"),
        ("home/codex/config.toml", "a = \n", "home/codex/config.toml:1:"),
        ("etc/managed_config.toml", "sandbox_mode = \"none\"", "sandbox_mode"),
        ("etc/requirements.toml", "=", "requirements.toml:1:"),
        ("etc/config.toml", "[projects]\nx = 1", "projects"),
    ] {
        machine.write(name, text);
        let params = json!({
            "cwd": format!("file://{}", machine.at("p").display()),
            "configPaths": [["m"]], "requirementsPaths": []
        });
        let refused =
            machine.client.call("environmentConfig/read", params.clone()).await.unwrap_err();
        assert_eq!(refused.code, -32603);
        assert!(
            refused.message.starts_with("failed to load executor-local config: "),
            "{refused:?}"
        );
        assert!(refused.message.contains(says), "{refused:?}");
        let kind = machine.client.kind("environmentConfig/read", params).await;
        assert_eq!(kind, ErrorKind::InvalidConfig);
        std::fs::remove_file(machine.at(name)).unwrap();
    }
}

#[tokio::test]
async fn params_have_to_make_sense() {
    let mut machine = Machine::new().await;
    for (config, requirements, says) in [
        (json!([]), json!([]), "at least one config or requirements path is required"),
        (json!([[]]), json!([]), "TOML paths must contain at least one key segment"),
        (json!([["a"]]), json!([[]]), "TOML paths must contain at least one key segment"),
        (json!([[1]]), json!([]), "string"),
        (json!(null), json!([]), "null"),
    ] {
        let refused = machine.read("w", config, requirements).await.unwrap_err();
        assert_eq!(refused.code, -32602, "{refused:?}");
        assert!(refused.message.contains(says), "{refused:?}");
    }
    for cwd in ["/native", "relative", "http://host/x", "file://host/x", "file:///a%00"] {
        let params = json!({"cwd": cwd, "configPaths": [["m"]], "requirementsPaths": []});
        let refused = machine.client.call("environmentConfig/read", params).await.unwrap_err();
        assert_eq!(refused.code, -32602, "{cwd}: {refused:?}");
    }
    let params = json!({"cwd": "file:///", "configPaths": [["m"]]});
    let refused = machine.client.call("environmentConfig/read", params).await.unwrap_err();
    assert_eq!(refused.code, -32602, "{refused:?}");
}

#[tokio::test]
async fn before_the_greeting_the_errors_name_the_family() {
    let mut client = Client::memory(&server());
    for (method, family) in [
        ("environmentConfig/read", "environment config"),
        ("capabilityRoots/discoverV1", "capability discovery"),
        ("capabilities/discoverV2", "capability discovery"),
    ] {
        let refused = client.call(method, json!({})).await.unwrap_err();
        let message = format!("client must call initialize before using {family} methods");
        assert_eq!((refused.code, refused.message), (-32600, message));
    }
}
