//! The crate exports every published name, and nothing else.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The published names; this module fails to compile if one is missing.
#[allow(unused_imports)]
mod published {
    use codex_exec_server::{
        DEFAULT_LISTEN_URL, ExecServerClient, ExecServerClientConnectOptions, ExecServerError,
        ExecServerListenUrlParseError, ExecServerRuntimePaths, RemoteEnvironmentConfig,
        RemoteExecServerConnectArgs, RemoteExecutorConfig, run_main, run_remote_environment,
        run_remote_executor,
    };
}

fn crates() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a crate is in a directory").to_owned()
}

fn facade() -> String {
    std::fs::read_to_string(crates().join("exec-server/src/lib.rs")).expect("the facade")
}

/// The words of the code, without comments.
fn words(source: &str) -> BTreeSet<&str> {
    let code = source.lines().filter(|line| !line.trim_start().starts_with("//"));
    code.flat_map(|line| line.split(|c: char| !c.is_alphanumeric() && c != '_')).collect()
}

/// The public types that a source file declares.
fn declared(source: &str) -> impl Iterator<Item = &str> {
    source.lines().filter_map(|line| {
        let rest = line.strip_prefix("pub struct ").or_else(|| line.strip_prefix("pub enum "))?;
        rest.split(|c: char| !c.is_alphanumeric()).next()
    })
}

#[test]
fn every_message_of_the_protocol_is_exported() {
    let facade = facade();
    let exported = words(&facade);
    let protocol = crates().join("protocol/src");
    let mut files: Vec<_> = ["environment.rs", "http.rs", "process.rs", "session.rs"]
        .iter()
        .map(|name| protocol.join(name))
        .collect();
    let of_files = std::fs::read_dir(protocol.join("files")).expect("the fs messages");
    files.extend(of_files.map(|entry| entry.expect("an entry").path()));
    let mut missing = Vec::new();
    let mut seen = 0;
    for file in files {
        let source = std::fs::read_to_string(&file).expect("a source file");
        for name in declared(&source) {
            seen += 1;
            if !exported.contains(name) {
                missing.push(name.to_owned());
            }
        }
    }
    assert!(seen > 80, "only {seen} messages were found: where have they gone?");
    assert!(missing.is_empty(), "exec-server/src/lib.rs does not export {missing:?}");
}

#[test]
fn the_crate_has_no_code_and_no_glob_exports() {
    let facade = facade();
    let exported = words(&facade);
    for code in ["fn", "mod", "struct", "enum", "impl", "trait", "static", "macro_rules"] {
        assert!(!exported.contains(code), "`{code}` in a crate that only re-exports");
    }
    assert!(!facade.contains("::*"), "a glob re-export");
}
