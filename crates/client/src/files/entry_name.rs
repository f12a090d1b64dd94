//! The one check of a name that a server sent, before it names anything on this machine.
//!
//! Invariant: a name that passed is one component of a path: it cannot lead out of its directory.

use codex_exec_server_protocol::PathUri;
use codex_exec_server_protocol::files::FsReadDirectoryEntry;

/// The longest name of a file on Linux, in bytes.
const MAX_NAME: usize = 255;

/// The path and the name of an entry in the server's listing of `directory`.
pub(super) fn checked(
    directory: &PathUri,
    entry: &FsReadDirectoryEntry,
) -> Result<(PathUri, Vec<u8>), &'static str> {
    let name = match &entry.file_name_uri {
        Some(uri) => uri.file_name(),
        None => entry.file_name.as_bytes(),
    };
    if !is_component(name) {
        return Err("not a valid file name");
    }
    let path = directory.join(name).map_err(|_| "not a valid path")?;
    match &entry.file_name_uri {
        Some(uri) if *uri != path => Err("not in this directory"),
        _ => Ok((path, name.to_vec())),
    }
}

/// Whether the name is one component of a path, and neither `.` nor `..`.
fn is_component(name: &[u8]) -> bool {
    !name.is_empty()
        && name.len() <= MAX_NAME
        && name != b"."
        && name != b".."
        && !name.contains(&b'/')
        && !name.contains(&0)
        && (cfg!(unix) || !name.iter().any(|byte| b"\\:".contains(byte)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::{Component, Path};

    #[test]
    fn a_checked_name_is_a_normal_component_below_its_directory() {
        let parts = ["a", "..", ".", "/", "\0", "%2e", ".ssh", "\u{1b}", "é", &"x".repeat(256)];
        let directory: PathUri = "/srv/tree".parse().unwrap();
        let mut random = fastrand::Rng::with_seed(3);
        let (mut passed, mut failed) = (0, 0);
        for _ in 0..5_000 {
            let mut name = String::new();
            for _ in 0..random.usize(..4) {
                name.push_str(parts[random.usize(..parts.len())]);
            }
            let uri = match random.u32(..3) {
                0 => None,
                1 => directory.join(&name).ok(),
                _ => format!("/srv/{name}").parse().ok(),
            };
            let json = serde_json::json!({"fileName": name, "fileNameUri": uri, "isDirectory": false,
                "isFile": true});
            let entry: FsReadDirectoryEntry = serde_json::from_value(json).unwrap();
            let Ok((path, checked)) = checked(&directory, &entry) else {
                failed += 1;
                continue;
            };
            passed += 1;
            let local = Path::new(std::str::from_utf8(&checked).unwrap());
            let components: Vec<_> = local.components().collect();
            assert!(matches!(components[..], [Component::Normal(_)]), "{name:?}");
            assert_eq!(local.as_os_str(), components[0].as_os_str(), "{name:?}");
            let below = path.as_bytes().strip_prefix(b"/srv/tree/").unwrap();
            assert_eq!(below, checked, "{name:?}");
        }
        assert!(passed > 200 && failed > 200, "{passed} {failed}");
    }
}
