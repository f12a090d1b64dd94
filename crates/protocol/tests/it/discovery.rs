//! `environmentConfig/read`, `capabilityRoots/discoverV1` and `capabilities/discoverV2`.

use codex_exec_server_protocol::PathUri;
use codex_exec_server_protocol::discovery::*;
use codex_exec_server_protocol::environment_config::*;

use crate::golden::{golden, reads_as, refuses};

fn path(text: &str) -> PathUri {
    text.parse().unwrap()
}

fn file(name: &str, contents: &str) -> CapabilityFile {
    CapabilityFile { path: path(name), contents: contents.into() }
}

#[test]
fn config() {
    golden(
        &EnvironmentConfigReadParams {
            cwd: path("/srv/a b"),
            config_paths: vec![vec!["mcp_servers".into(), "a.b".into()]],
            requirements_paths: vec![],
        },
        r#"{"cwd":"file:///srv/a%20b","configPaths":[["mcp_servers","a.b"]],"requirementsPaths":[]}"#,
    );
    for text in [
        r#"{"cwd":"/srv","configPaths":[["a"]],"requirementsPaths":[]}"#,
        r#"{"cwd":"file:///srv","configPaths":[["a"]]}"#,
        r#"{"cwd":"file:///srv","requirementsPaths":[["a"]]}"#,
        r#"{"configPaths":[["a"]],"requirementsPaths":[]}"#,
        r#"{"cwd":"file:///srv","configPaths":["a"],"requirementsPaths":[]}"#,
    ] {
        refuses::<EnvironmentConfigReadParams>(text);
    }
    golden(
        &EnvironmentConfigReadResponse {
            user_home_dir: None,
            codex_home_dir: path("/home/me/.codex"),
            hostname: Some("host".into()),
            config: ConfigLayers {
                layers: vec![ConfigLayer {
                    source: "system (/etc/codex/config.toml)".into(),
                    base_dir: path("/etc/codex"),
                    toml: "a = 1\n".into(),
                }],
                cloud_insertion_index: 1,
            },
            requirements: ConfigLayers::default(),
        },
        r#"{"userHomeDir":null,"codexHomeDir":"file:///home/me/.codex","hostname":"host","config":{"layers":[{"source":"system (/etc/codex/config.toml)","baseDir":"file:///etc/codex","toml":"a = 1\n"}],"cloudInsertionIndex":1},"requirements":{"layers":[],"cloudInsertionIndex":0}}"#,
    );
}

#[test]
fn roots() {
    let asked = CapabilityRootsDiscoverParams {
        roots: vec![CapabilityRoot { id: "a".into(), path: path("/a"), sandbox: None }],
    };
    golden(&asked, r#"{"roots":[{"id":"a","path":"file:///a"}]}"#);
    reads_as(r#"{"roots":[{"id":"a","path":"file:///a","sandbox":null}]}"#, &asked);
    refuses::<CapabilityRootsDiscoverParams>(r#"{"roots":[{"path":"file:///a"}]}"#);
    refuses::<CapabilityRootsDiscoverParams>("{}");
    let found = DiscoveredRoot {
        plugin: Some(PluginFiles {
            manifest: file("/a/.codex-plugin/plugin.json", "{}"),
            mcp_config: Some(file("/a/.mcp.json", "M")),
            apps_config: None,
        }),
        skills: vec![SkillFiles { instructions: file("/a/SKILL.md", "S"), metadata: None }],
        warnings: vec!["w".into()],
        ..DiscoveredRoot::empty("a".into(), path("/a"))
    };
    golden(
        &CapabilityRootsDiscoverResponse { roots: vec![found] },
        r#"{"roots":[{"id":"a","path":"file:///a","plugin":{"manifest":{"path":"file:///a/.codex-plugin/plugin.json","contents":"{}"},"mcpConfig":{"path":"file:///a/.mcp.json","contents":"M"},"appsConfig":null},"skills":[{"instructions":{"path":"file:///a/SKILL.md","contents":"S"},"metadata":null}],"namespaceManifests":[],"warnings":["w"],"error":null}]}"#,
    );
}

#[test]
fn installed() {
    golden(
        &CapabilitiesDiscoverParams { cwd: path("/a"), sandbox: None },
        r#"{"cwd":"file:///a"}"#,
    );
    refuses::<CapabilitiesDiscoverParams>("{}");
    let skill = DiscoveredSkill {
        name: "p:s".into(),
        description: "d".into(),
        short_description: None,
        path: path("/r/SKILL.md"),
        discovery_root: None,
        dependencies: Some(SkillDependencies {
            tools: vec![SkillTool {
                kind: "mcp".into(),
                value: "v".into(),
                ..SkillTool::default()
            }],
        }),
        policy: Some(SkillPolicy {
            allow_implicit_invocation: Some(false),
            products: vec!["codex".into()],
        }),
    };
    let manifest = file("/r/.codex-plugin/plugin.json", "{}");
    golden(
        &CapabilitiesDiscoverResponse {
            plugins: vec![DiscoveredPlugin {
                id: "p@m".into(),
                display_name: "P".into(),
                remote_plugin_id: None,
                version: "local".into(),
                root: path("/r"),
                files: PluginFiles { manifest, mcp_config: None, apps_config: None },
                skills: vec![skill.clone()],
            }],
            skills: vec![DiscoveredSkill {
                dependencies: None,
                policy: None,
                discovery_root: Some(DiscoveryRoot { id: "root".into(), path: path("/r") }),
                ..skill
            }],
            warnings: vec![],
        },
        r#"{"plugins":[{"id":"p@m","displayName":"P","remotePluginId":null,"version":"local","root":"file:///r","files":{"manifest":{"path":"file:///r/.codex-plugin/plugin.json","contents":"{}"},"mcpConfig":null,"appsConfig":null},"skills":[{"name":"p:s","description":"d","shortDescription":null,"path":"file:///r/SKILL.md","dependencies":{"tools":[{"type":"mcp","value":"v","description":null,"transport":null,"command":null,"url":null,"oauthCallbackPort":null}]},"policy":{"allowImplicitInvocation":false,"products":["codex"]}}]}],"skills":[{"name":"p:s","description":"d","shortDescription":null,"path":"file:///r/SKILL.md","discoveryRoot":{"id":"root","path":"file:///r"},"dependencies":null,"policy":null}],"warnings":[]}"#,
    );
}
