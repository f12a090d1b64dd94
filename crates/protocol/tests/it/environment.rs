//! `environment/info` and `environment/status`.

use codex_exec_server_protocol::environment::*;
use codex_exec_server_protocol::{Assurance, PathUri};

use crate::golden::{golden, reads_as};

fn path(text: &str) -> PathUri {
    text.parse().unwrap()
}

#[test]
fn info() {
    let mut info = EnvironmentInfo {
        shell: ShellInfo { name: "bash".into(), path: "/bin/bash".into() },
        executor_version: "1.2.3".into(),
        provider_id: Some("sha256:00".into()),
        cwd: Some(path("/work dir")),
        user_home_dir: Some(path("/root")),
        platform_os: "linux".into(),
        prepend_path_dirs: vec![path("/opt/bin")],
        temporary_directories: Some(vec![path("/var/tmp")]),
        temp_dir: Some(path("/tmp")),
        sandbox_assurance: Some(Assurance::Namespaces),
        capabilities: Capabilities { process_list: true, ..Capabilities::default() },
    };
    let text = serde_json::to_string(&info).unwrap();
    let (members, capabilities) = text.split_once(r#","capabilities":"#).unwrap();
    assert_eq!(
        members,
        r#"{"shell":{"name":"bash","path":"/bin/bash"},"executorVersion":"1.2.3","providerId":"sha256:00","cwd":"file:///work%20dir","userHomeDir":"file:///root","platformOs":"linux","prependPathDirs":["file:///opt/bin"],"temporaryDirectories":["file:///var/tmp"],"tempDir":"file:///tmp","sandboxAssurance":"namespaces""#
    );
    assert!(capabilities.contains(r#""processList":true"#), "{capabilities}");
    reads_as(&text, &info);

    // A directory that is gone is null; what is not known is left out.
    (info.cwd, info.user_home_dir, info.temp_dir) = (None, None, None);
    (info.temporary_directories, info.sandbox_assurance) = (None, None);
    let text = serde_json::to_string(&info).unwrap();
    assert!(text.contains(r#""cwd":null,"platformOs""#), "{text}");
    assert!(!text.contains("tempDir") && !text.contains("temporaryDirectories"), "{text}");
    reads_as(&text, &info);
}

/// The recorded answer of another server, with members of its own.
#[test]
fn environment_info_of_other_servers_parses() {
    let text = r#"{"shell":{"name":"bash","path":"/bin/bash"},"executorVersion":"0.166.0","providerId":"sha256:b5","cwd":"file:///tmp","userHomeDir":"file:///root","platformOs":"linux","prependPathDirs":["file:///opt/x"],"temporaryDirectories":[],"tempDir":"file:///tmp","capabilities":{"networkProxyLaunch":true,"networkProxyReviewDomains":true,"credentialMasking":true,"capabilityDiscoverySandbox":true,"fsWatchMissing":true,"capabilityDiscoveryV2":true,"environmentConfigRead":true,"httpHeaderEnvVars":true,"sandboxedFileStreaming":true,"fileWriteStreaming":true,"shellSnapshotV2":true,"windowsMxc":false}}"#;
    let info: EnvironmentInfo = serde_json::from_str(text).unwrap();
    assert_eq!(info.executor_version, "0.166.0");
    assert_eq!(info.cwd, Some(path("/tmp")));
    assert!(info.capabilities.file_write_streaming && info.capabilities.fs_watch_missing);
    assert!(!info.capabilities.process_list, "absent is false");
    assert_eq!(info.sandbox_assurance, None);
    // The oldest said nothing at all.
    reads_as("{}", &EnvironmentInfo::default());
    reads_as(r#"{"cwd":null}"#, &EnvironmentInfo::default());
}

#[test]
fn non_boolean_capability_counts_as_absent() {
    let capabilities: Capabilities = serde_json::from_str(
        r#"{"processList":"yes","processResize":{"v":1},"fsWatchMissing":true}"#,
    )
    .unwrap();
    let only = Capabilities { fs_watch_missing: true, ..Capabilities::default() };
    assert_eq!(capabilities, only);
}

#[test]
fn capability_names_match_the_contract() {
    let text = serde_json::to_string(&Capabilities::default()).unwrap();
    for name in [
        "networkProxyLaunch",
        "networkProxyReviewDomains",
        "credentialMasking",
        "credentialMaskingCustomProviders",
        "capabilityDiscoverySandbox",
        "capabilityDiscoveryV2",
        "environmentConfigRead",
        "httpHeaderEnvVars",
        "sandboxedFileStreaming",
        "fileWriteStreaming",
        "fsWatchMissing",
        "shellSnapshotV2",
        "windowsMxc",
        "linuxRootWritePreservesDevices",
        "linuxApprovedRootWritePreservesRestrictions",
        "networkPortRules",
        "processResize",
        "processList",
        "processSignals",
    ] {
        assert!(text.contains(&format!(r#""{name}":false"#)), "{name} in {text}");
    }
}

#[test]
fn status() {
    golden(&EnvironmentStatusResponse { status: "ready".into() }, r#"{"status":"ready"}"#);
    golden(&EnvironmentStatusParams {}, "{}");
    golden(&EnvironmentInfoParams {}, "{}");
}
