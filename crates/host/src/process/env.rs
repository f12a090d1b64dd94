//! Builds the environment of a child: the client's variables on top of those its policy inherits.
//!
//! Invariant: the variables of [`NEVER_PASSED_ON`] reach no child, whatever the request says.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use codex_exec_server_protocol::process::{Env, EnvInherit, EnvPolicy};
use globset::{GlobBuilder, GlobSet, GlobSetBuilder};

/// The server's own credentials and switches: no child gets these variables, not even from the client.
pub const NEVER_PASSED_ON: &[&str] = &[
    "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN",
    "NODE_REPL_AUTH_TOKEN",
    "OPENAI_FEDERATION_RULE_ID",
    "OPENAI_IDENTITY_TOKEN_FILE",
    "OPENAI_WORKLOAD_IDENTITY_CONTEXT",
    "CODEX_EXEC_SERVER_EXIT_ON_STDIN_CLOSE",
];

/// Variables that the server signs in with: no policy inherits them, but a client may set them itself.
pub const NEVER_INHERITED: &[&str] = &[
    "CODEX_ACCESS_TOKEN",
    "CODEX_API_KEY",
    "CODEX_CONNECTORS_TOKEN",
    "CODEX_EXEC_SERVER_REMOTE_BEARER_TOKEN",
    "CODEX_EXEC_SERVER_TOKEN",
    "CODEX_RENDEZVOUS_NATS",
];

/// The variables of `inherit: "core"`.
const CORE: &[&str] = &[
    "PATH", "SHELL", "TMPDIR", "TEMP", "TMP", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "LOGNAME",
    "USER",
];

/// Excluded by default; see `ignoreDefaultExcludes`.
const DEFAULT_EXCLUDES: &[&str] = &["*KEY*", "*SECRET*", "*TOKEN*"];

/// A pattern of an [`EnvPolicy`] does not parse.
#[derive(Debug, thiserror::Error)]
#[error("envPolicy: {0}")]
pub struct BadGlob(#[from] globset::Error);

/// The environment of a child, by name.
pub type Environment = BTreeMap<OsString, OsString>;

/// Puts `env` on top of what `policy` takes from `server`.
pub(super) fn build(
    server: impl IntoIterator<Item = (OsString, OsString)>,
    policy: Option<&EnvPolicy>,
    env: &Env,
) -> Result<Environment, BadGlob> {
    let mut out = match policy {
        None => Environment::new(),
        Some(policy) => {
            let own = |name: &OsStr| NEVER_INHERITED.iter().any(|never| name == *never);
            inherit(server.into_iter().filter(|(name, _)| !own(name)), policy)?
        }
    };
    overlay(&mut out, env);
    out.retain(|name, _| !NEVER_PASSED_ON.iter().any(|never| name == *never));
    Ok(out)
}

fn inherit(
    server: impl IntoIterator<Item = (OsString, OsString)>,
    policy: &EnvPolicy,
) -> Result<Environment, BadGlob> {
    let start: fn(&OsStr) -> bool = match policy.inherit {
        EnvInherit::All => |_| true,
        EnvInherit::Core => |name| CORE.iter().any(|core| name.eq_ignore_ascii_case(core)),
        EnvInherit::None => |_| false,
    };
    let mut out: Environment = server.into_iter().filter(|(name, _)| start(name)).collect();
    drop_excluded(&mut out, policy)?;
    overlay(&mut out, &policy.set);
    keep_included(&mut out, policy)?;
    Ok(out)
}

/// Drops what `policy` would not let through if `variables` were the server's own. Names in its `set` may
/// be excluded otherwise.
pub(crate) fn retain_allowed(
    variables: &mut Environment,
    policy: &EnvPolicy,
) -> Result<(), BadGlob> {
    let set = |name: &OsStr| name.to_str().is_some_and(|name| policy.set.0.contains_key(name));
    let set: Vec<_> = variables.extract_if(.., |name, _| set(name)).collect();
    drop_excluded(variables, policy)?;
    variables.extend(set);
    keep_included(variables, policy)
}

fn drop_excluded(out: &mut Environment, policy: &EnvPolicy) -> Result<(), BadGlob> {
    if !policy.ignore_default_excludes {
        drop_matching(out, DEFAULT_EXCLUDES)?;
    }
    drop_matching(out, &policy.exclude)
}

fn keep_included(out: &mut Environment, policy: &EnvPolicy) -> Result<(), BadGlob> {
    if !policy.include_only.is_empty() {
        let keep = globs(&policy.include_only)?;
        out.retain(|name, _| keep.is_match(name));
    }
    Ok(())
}

fn overlay(out: &mut Environment, env: &Env) {
    out.extend(env.0.iter().map(|(name, value)| (name.into(), value.into())));
}

fn drop_matching(out: &mut Environment, patterns: &[impl AsRef<str>]) -> Result<(), BadGlob> {
    if !patterns.is_empty() {
        let set = globs(patterns)?;
        out.retain(|name, _| !set.is_match(OsStr::from_bytes(name.as_bytes())));
    }
    Ok(())
}

fn globs(patterns: &[impl AsRef<str>]) -> Result<GlobSet, BadGlob> {
    let mut set = GlobSetBuilder::new();
    for pattern in patterns {
        set.add(GlobBuilder::new(pattern.as_ref()).case_insensitive(true).build()?);
    }
    Ok(set.build()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SERVER: &[(&str, &str)] = &[
        ("PATH", "/bin"),
        ("HOME", "/root"),
        ("LANG", "C"),
        ("GITHUB_TOKEN", "t"),
        ("my_api_key", "k"),
        ("EDITOR", "vi"),
        ("NODE_REPL_AUTH_TOKEN", "n"),
        ("OPENAI_IDENTITY_TOKEN_FILE", "f"),
        ("CODEX_API_KEY", "k"),
    ];

    fn names(policy: Option<&EnvPolicy>, env: &[(&str, &str)]) -> Vec<String> {
        let server = SERVER.iter().map(|&(name, value)| (name.into(), value.into()));
        let env = env.iter().copied().collect();
        build(server, policy, &env)
            .unwrap()
            .into_keys()
            .map(|name| name.into_string().unwrap())
            .collect()
    }

    #[test]
    fn without_a_policy_only_client_variables_are_set() {
        assert_eq!(names(None, &[]), Vec::<String>::new());
        assert_eq!(names(None, &[("A", "1"), ("MY_TOKEN", "2")]), ["A", "MY_TOKEN"]);
    }

    #[test]
    fn policy_inherits_from_the_server_and_drops_secrets() {
        let all = EnvPolicy::default();
        assert_eq!(names(Some(&all), &[]), ["EDITOR", "HOME", "LANG", "PATH"]);
        let core = EnvPolicy { inherit: EnvInherit::Core, ..EnvPolicy::default() };
        assert_eq!(names(Some(&core), &[]), ["HOME", "LANG", "PATH"]);
        let none = EnvPolicy { inherit: EnvInherit::None, ..EnvPolicy::default() };
        assert_eq!(names(Some(&none), &[("A", "1")]), ["A"]);
    }

    #[test]
    fn sign_in_credentials_are_not_inherited() {
        let all = EnvPolicy { ignore_default_excludes: true, ..EnvPolicy::default() };
        assert!(!names(Some(&all), &[]).contains(&"CODEX_API_KEY".to_owned()));
        assert_eq!(names(None, &[("CODEX_API_KEY", "theirs")]), ["CODEX_API_KEY"]);
    }

    #[test]
    fn policy_steps_apply_in_order() {
        let policy = EnvPolicy {
            ignore_default_excludes: true,
            exclude: vec!["git*".into(), "EDIT?R".into()],
            set: [("GIT_DIR", "/g"), ("X", "1")].into_iter().collect(),
            include_only: vec!["g*".into(), "path".into(), "*_KEY".into()],
            ..EnvPolicy::default()
        };
        // `set` comes after `exclude`, `includeOnly` after `set`, `env` after all.
        assert_eq!(names(Some(&policy), &[("Y", "2")]), ["GIT_DIR", "PATH", "Y", "my_api_key"]);
    }

    #[test]
    fn server_credentials_are_never_passed_on() {
        let policy = EnvPolicy { ignore_default_excludes: true, ..EnvPolicy::default() };
        let names = names(Some(&policy), &[("NODE_REPL_AUTH_TOKEN", "x")]);
        assert!(names.iter().all(|name| !NEVER_PASSED_ON.contains(&name.as_str())), "{names:?}");
        assert!(names.contains(&"GITHUB_TOKEN".to_owned()));
    }

    #[test]
    fn invalid_glob_is_an_error() {
        let policy = EnvPolicy { exclude: vec!["[".into()], ..EnvPolicy::default() };
        build([], Some(&policy), &Env::default()).unwrap_err();
    }
}
