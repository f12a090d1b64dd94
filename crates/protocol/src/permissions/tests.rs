//! Golden JSON for every spelling, and round trips of arbitrary policies.

use std::num::NonZeroU32;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::PathUri;

fn path(text: &str) -> PathUri {
    text.parse().unwrap()
}

fn read(text: &str) -> SandboxContext {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn special(value: SpecialPath, access: AccessMode) -> FileSystemEntry {
    FileSystemEntry::new(FileSystemPath::Special { value }, access)
}

/// The example of the contract, byte for byte what we write ourselves.
#[test]
fn the_newest_spelling_is_read_and_written() {
    let text = r#"{"permissions":{"type":"managed","file_system":{"type":"restricted","entries":[{"path":{"type":"special","value":{"kind":"root"}},"access":"read"},{"path":{"type":"special","value":{"kind":"project_roots"}},"access":"write"},{"path":{"type":"path","path":"file:///opt/data"},"access":"read"},{"path":{"type":"glob_pattern","pattern":"**/.env"},"access":"deny"}],"glob_scan_max_depth":8},"network":"restricted"},"cwd":"file:///srv/app","workspaceRoots":["file:///srv/app"],"windowsSandboxLevel":"disabled","windowsSandboxPrivateDesktop":false,"windowsSandboxProxySettingsMode":"preserve","useLegacyLandlock":false}"#;
    let context = read(text);
    assert_eq!(context.cwd, Some(path("/srv/app")));
    assert_eq!(context.workspace_roots, [path("/srv/app")]);
    let PermissionProfile::Managed { file_system, network } = &context.permissions else {
        panic!("{context:?}");
    };
    assert_eq!(*network, NetworkPolicy::Restricted);
    let FileSystemPolicy::Restricted(restricted) = file_system else { panic!("{context:?}") };
    assert_eq!(restricted.glob_scan_max_depth, NonZeroU32::new(8));
    assert_eq!(
        restricted.entries,
        [
            special(SpecialPath::Root, AccessMode::Read),
            special(SpecialPath::ProjectRoots { subpath: None }, AccessMode::Write),
            FileSystemEntry::new(
                FileSystemPath::Path { path: path("/opt/data") },
                AccessMode::Read
            ),
            FileSystemEntry::new(
                FileSystemPath::GlobPattern { pattern: "**/.env".to_owned() },
                AccessMode::Deny
            ),
        ]
    );
    assert_eq!(serde_json::to_string(&context).unwrap(), text);
}

#[test]
fn all_spellings_of_a_policy_are_equal() {
    for text in [
        r#"{"type":"read-only","network_access":false}"#,
        r#"{"type":"read-only"}"#,
        r#"{"type":"ReadOnly","networkAccess":false,"somethingNew":[1]}"#,
        r#"{"type":"readOnly"}"#,
        r#""read-only""#,
        r#"{"permissions":{"type":"read-only"}}"#,
        r#"{"permissions":"read-only"}"#,
        r#"{"permissions":{"type":"managed","network":"restricted","file_system":{"type":"restricted","entries":[{"access":"read","path":{"type":"special","value":{"kind":"root"}}}]}}}"#,
    ] {
        assert_eq!(read(text).permissions, PermissionProfile::read_only(), "{text}");
    }
    for text in [
        r#"{"type":"workspace-write","writable_roots":[],"network_access":false,"exclude_tmpdir_env_var":false,"exclude_slash_tmp":false}"#,
        r#"{"type":"WorkspaceWrite","writableRoots":[]}"#,
        r#"{"permissions":{"type":"workspaceWrite"}}"#,
    ] {
        assert_eq!(read(text).permissions, PermissionProfile::workspace_write(), "{text}");
    }
    for text in [
        r#"{"type":"danger-full-access"}"#,
        r#"{"type":"DangerFullAccess"}"#,
        r#"{"type":"disabled"}"#,
        r#"{"permissions":{"type":"disabled"}}"#,
    ] {
        assert_eq!(read(text).permissions, PermissionProfile::full_access(), "{text}");
    }
    for (text, network) in [
        (r#"{"type":"external-sandbox","network_access":"restricted"}"#, NetworkPolicy::Restricted),
        (r#"{"type":"external-sandbox","network_access":"enabled"}"#, NetworkPolicy::Enabled),
        (r#"{"type":"ExternalSandbox","networkAccess":true}"#, NetworkPolicy::Enabled),
        (r#"{"type":"external-sandbox"}"#, NetworkPolicy::Restricted),
        (r#"{"permissions":{"type":"external","network":"enabled"}}"#, NetworkPolicy::Enabled),
        (r#"{"permissions":{"type":"external"}}"#, NetworkPolicy::Restricted),
    ] {
        assert_eq!(read(text).permissions, PermissionProfile::External { network }, "{text}");
    }
}

#[test]
fn members_of_older_policies_are_understood() {
    let context = read(
        r#"{"type":"workspace-write","writable_roots":["/data","file:///more"],"network_access":true,"exclude_tmpdir_env_var":true,"exclude_slash_tmp":true}"#,
    );
    let PermissionProfile::Managed { file_system, network } = context.permissions else { panic!() };
    assert_eq!(network, NetworkPolicy::Enabled);
    let FileSystemPolicy::Restricted(restricted) = file_system else { panic!() };
    assert_eq!(
        restricted.entries,
        [
            special(SpecialPath::Root, AccessMode::Read),
            special(SpecialPath::ProjectRoots { subpath: None }, AccessMode::Write),
            FileSystemEntry::new(FileSystemPath::Path { path: path("/data") }, AccessMode::Write),
            FileSystemEntry::new(FileSystemPath::Path { path: path("/more") }, AccessMode::Write),
        ]
    );
}

/// In an older policy the project root is `cwd`, whatever else is named.
#[test]
fn the_project_root_of_an_older_policy_is_its_cwd() {
    let context = read(r#"{"type":"workspace-write"}"#);
    assert!(context.project_root_is_cwd);
    let context = read(
        r#"{"permissions":{"type":"workspace-write"},"cwd":"/w","workspaceRoots":["/elsewhere"]}"#,
    );
    assert!(!context.project_root_is_cwd);
    assert_eq!(context.workspace_roots, [path("/w")]);
    let context = read(
        r#"{"permissions":{"type":"managed","file_system":{"type":"unrestricted"}},"cwd":"/w"}"#,
    );
    assert!(context.workspace_roots.is_empty() && !context.project_root_is_cwd);
}

#[test]
fn special_paths_round_trip() {
    for (value, kind, written) in [
        (json!({"kind": "root"}), SpecialPath::Root, json!({"kind": "root"})),
        (json!({"kind": "minimal"}), SpecialPath::Minimal, json!({"kind": "minimal"})),
        (json!({"kind": "tmpdir"}), SpecialPath::Tmpdir, json!({"kind": "tmpdir"})),
        (json!({"kind": "slash_tmp"}), SpecialPath::SlashTmp, json!({"kind": "slash_tmp"})),
        (
            json!({"kind": "current_working_directory"}),
            SpecialPath::ProjectRoots { subpath: None },
            json!({"kind": "project_roots"}),
        ),
        (
            json!({"kind": "project_roots", "subpath": "docs"}),
            SpecialPath::ProjectRoots { subpath: Some("docs".to_owned()) },
            json!({"kind": "project_roots", "subpath": "docs"}),
        ),
        (
            json!({"kind": "project_roots", "subpath": null}),
            SpecialPath::ProjectRoots { subpath: None },
            json!({"kind": "project_roots"}),
        ),
        (
            json!({"kind": "moon", "phase": {"of": [1, 2.5, null]}}),
            SpecialPath::Unknown(json!({"kind": "moon", "phase": {"of": [1, 2.5, null]}})),
            json!({"kind": "moon", "phase": {"of": [1, 2.5, null]}}),
        ),
    ] {
        let read: SpecialPath = serde_json::from_value(value.clone()).unwrap();
        assert_eq!(read, kind, "{value}");
        assert_eq!(serde_json::to_value(&read).unwrap(), written, "{value}");
    }
}

#[test]
fn none_means_deny_and_skip_is_preserved() {
    let entry: FileSystemEntry = serde_json::from_value(json!({
        "path": {"type": "path", "path": "/x"}, "access": "none", "missing_path_behavior": "skip",
    }))
    .unwrap();
    assert_eq!(entry.access, AccessMode::Deny);
    assert_eq!(entry.missing_path_behavior, Some(MissingPathBehavior::Skip));
    assert_eq!(
        serde_json::to_value(&entry).unwrap(),
        json!({
            "path": {"type": "path", "path": "file:///x"},
            "access": "deny",
            "missing_path_behavior": "skip",
        })
    );
}

#[test]
fn windows_members_are_preserved() {
    let context = read(
        r#"{"permissions":{"type":"disabled"},"windowsSandboxLevel":"elevated","windowsSandboxPrivateDesktop":true,"windowsSandboxProxySettingsMode":"none","useLegacyLandlock":true,"cwd":null,"workspaceRoots":null}"#,
    );
    let again: SandboxContext = read(&serde_json::to_string(&context).unwrap());
    assert_eq!(again, context);
    assert_eq!(context.windows_sandbox_level, "elevated");
    assert!(context.windows_sandbox_private_desktop && context.use_legacy_landlock);
}

#[test]
fn malformed_policies_are_rejected() {
    for text in [
        "{}",
        "[]",
        "7",
        "null",
        r#""everything""#,
        r#"{"type":"everything"}"#,
        r#"{"permissions":null}"#,
        r#"{"permissions":{}}"#,
        r#"{"permissions":{"type":"managed"}}"#,
        r#"{"permissions":{"type":"managed","file_system":{"type":"half"}}}"#,
        r#"{"permissions":{"type":"managed","file_system":{"type":"restricted","entries":{}}}}"#,
        r#"{"permissions":{"type":"managed","file_system":{"type":"restricted","glob_scan_max_depth":0}}}"#,
        r#"{"permissions":{"type":"managed","file_system":{"type":"restricted","glob_scan_max_depth":-1}}}"#,
        r#"{"permissions":{"type":"managed","file_system":{"type":"unrestricted"},"network":"some"}}"#,
        r#"{"permissions":{"type":"managed","file_system":{"type":"restricted","entries":[{"path":{"type":"path","path":"relative"},"access":"read"}]}}}"#,
        r#"{"permissions":{"type":"managed","file_system":{"type":"restricted","entries":[{"path":{"type":"path","path":"/x"},"access":"own"}]}}}"#,
        r#"{"permissions":{"type":"managed","file_system":{"type":"restricted","entries":[{"path":{"type":"elsewhere"},"access":"read"}]}}}"#,
        r#"{"permissions":{"type":"managed","file_system":{"type":"restricted","entries":[{"path":{"type":"special","value":{}},"access":"read"}]}}}"#,
        r#"{"permissions":{"type":"managed","file_system":{"type":"restricted","entries":[{"path":{"type":"special","value":{"kind":"project_roots","subpath":3}},"access":"read"}]}}}"#,
        r#"{"type":"workspace-write","writable_roots":["relative"]}"#,
        r#"{"permissions":{"type":"disabled"},"cwd":"relative"}"#,
    ] {
        assert!(serde_json::from_str::<SandboxContext>(text).is_err(), "{text}");
    }
}

#[test]
fn policy_constructors_match_their_spellings() {
    assert_eq!(PermissionProfile::full_access(), PermissionProfile::Disabled);
    assert_eq!(
        PermissionProfile::from_legacy(&LegacySandboxPolicy::workspace_write()),
        PermissionProfile::workspace_write()
    );
    assert_eq!("read-only".parse(), Ok(PermissionProfile::read_only()));
    assert!("managed".parse::<PermissionProfile>().is_err());
    assert_eq!(PermissionProfile::full_access().network(), NetworkPolicy::Enabled);
    assert_eq!(PermissionProfile::read_only().network(), NetworkPolicy::Restricted);
    let context =
        SandboxContext::in_workspace(PermissionProfile::workspace_write(), path("/srv/app"));
    assert_eq!(read(&serde_json::to_string(&context).unwrap()), context);
}

fn any_special() -> impl Strategy<Value = SpecialPath> {
    prop_oneof![
        Just(SpecialPath::Root),
        Just(SpecialPath::Minimal),
        Just(SpecialPath::Tmpdir),
        Just(SpecialPath::SlashTmp),
        proptest::option::of("[a-z/]{1,9}")
            .prop_map(|subpath| SpecialPath::ProjectRoots { subpath }),
        ("x[a-z]{1,9}", proptest::option::of(any::<i64>())).prop_map(|(kind, number)| {
            let mut value = json!({ "kind": kind });
            if let Some(number) = number {
                value["member"] = Value::from(number);
            }
            SpecialPath::Unknown(value)
        }),
    ]
}

fn any_entry() -> impl Strategy<Value = FileSystemEntry> {
    let path = prop_oneof![
        proptest::collection::vec(1u8..=255, 0..20).prop_map(|mut tail| {
            tail.insert(0, b'/');
            FileSystemPath::Path { path: PathUri::from_native(tail).unwrap() }
        }),
        any_special().prop_map(|value| FileSystemPath::Special { value }),
        "\\PC{0,20}".prop_map(|pattern| FileSystemPath::GlobPattern { pattern }),
    ];
    let access =
        prop_oneof![Just(AccessMode::Read), Just(AccessMode::Write), Just(AccessMode::Deny)];
    let missing = proptest::option::of(Just(MissingPathBehavior::Skip));
    (path, access, missing).prop_map(|(path, access, missing_path_behavior)| FileSystemEntry {
        path,
        access,
        missing_path_behavior,
    })
}

fn any_profile() -> impl Strategy<Value = PermissionProfile> {
    let network = prop_oneof![Just(NetworkPolicy::Restricted), Just(NetworkPolicy::Enabled)];
    let entries = proptest::collection::vec(any_entry(), 0..8);
    let depth = proptest::option::of(any::<NonZeroU32>());
    (0..4, network, entries, depth).prop_map(|(kind, network, entries, glob_scan_max_depth)| {
        match kind {
            0 => PermissionProfile::Disabled,
            1 => PermissionProfile::External { network },
            2 => {
                PermissionProfile::Managed { file_system: FileSystemPolicy::Unrestricted, network }
            }
            _ => PermissionProfile::Managed {
                file_system: FileSystemPolicy::Restricted(RestrictedFileSystem {
                    entries,
                    glob_scan_max_depth,
                }),
                network,
            },
        }
    })
}

#[test]
fn unknown_assurance_level_is_rejected() {
    let with = |level: &str| {
        let text = format!(r#"{{"permissions":{{"type":"read-only"}},"assurance":{level}}}"#);
        serde_json::from_str::<SandboxContext>(&text).map(|context| context.assurance)
    };
    assert_eq!(with("null").unwrap(), None);
    assert_eq!(with(r#""landlock""#).unwrap(), Some(Assurance::Landlock));
    assert_eq!(read(r#"{"type":"read-only","assurance":"full"}"#).assurance, Some(Assurance::Full));
    for bad in [r#""best""#, r#""""#, "1", r#""Full""#] {
        with(bad).unwrap_err();
    }
}

#[test]
fn the_reason_of_permissions_is_known_or_refused() {
    let with = |reason: &str| {
        let text =
            format!(r#"{{"permissions":{{"type":"read-only"}},"sandboxOverride":{reason}}}"#);
        serde_json::from_str::<SandboxContext>(&text).map(|context| context.sandbox_override)
    };
    assert_eq!(with(r#""noOverride""#).unwrap(), Some(SandboxOverride::NoOverride));
    for name in ["escalatedSandboxWithRestrictions", "bypassSandboxFirstAttempt"] {
        let known = with(&format!("{name:?}")).unwrap();
        assert_eq!(serde_json::to_string(&known).unwrap(), format!("{name:?}"));
    }
    assert_eq!(read(r#"{"type":"read-only"}"#).sandbox_override, None);
    for bad in ["null", r#""""#, r#""NoOverride""#, "1", "{}"] {
        with(bad).unwrap_err();
    }
}

proptest! {
    #[test]
    fn policies_round_trip(
        permissions in any_profile(),
        cwd: bool,
        roots in 0usize..3,
        level in 0usize..4,
    ) {
        let context = SandboxContext {
            assurance: Assurance::ALL.get(level).copied(),
            cwd: cwd.then(|| path("/srv/app")),
            workspace_roots: (0..roots).map(|n| path(&format!("/srv/{n}"))).collect(),
            ..SandboxContext::new(permissions)
        };
        let text = serde_json::to_string(&context).unwrap();
        prop_assert!(!text.contains("current_working_directory"));
        prop_assert_eq!(serde_json::from_str::<SandboxContext>(&text).unwrap(), context);
    }

    #[test]
    fn any_text_parses_or_fails_without_panic(text in "[{}\\[\\]\":,a-z0-9]{0,40}") {
        let _ = serde_json::from_str::<SandboxContext>(&text);
    }
}
