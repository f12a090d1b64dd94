//! Builds the environment of a child: the client's variables on top of those its policy inherits.
//!
//! Invariant: the variables of [`NEVER_PASSED_ON`] reach no child, whatever the request says. A policy is
//! measured before its patterns are compiled.

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

/// Maximum bytes of all patterns of an [`EnvPolicy`] together, and of all names that it sets.
const MAX_POLICY_BYTES: usize = 64 << 10;

/// Patterns of at most this many bytes together compile in no noticeable time.
const CHEAP_POLICY_BYTES: usize = 1 << 10;

/// An [`EnvPolicy`] cannot be applied.
#[derive(Debug, thiserror::Error)]
pub enum EnvPolicyError {
    /// A pattern does not parse.
    #[error("envPolicy: {0}")]
    Glob(#[from] globset::Error),
    /// The patterns, or the names in `set`, are too long.
    #[error("envPolicy: {what} have {bytes} bytes; at most {MAX_POLICY_BYTES} are allowed")]
    TooLong {
        /// The patterns or the names.
        what: &'static str,
        /// Their length, with one byte more for each.
        bytes: usize,
    },
}

/// Whether applying this policy can take long enough to delay others on the same thread; refusing it
/// never does.
pub(super) fn is_costly(policy: &EnvPolicy) -> bool {
    (CHEAP_POLICY_BYTES + 1..=MAX_POLICY_BYTES).contains(&total_len(patterns(policy)))
}

fn check_size(policy: &EnvPolicy) -> Result<(), EnvPolicyError> {
    let check = |what, bytes| match bytes > MAX_POLICY_BYTES {
        true => Err(EnvPolicyError::TooLong { what, bytes }),
        false => Ok(()),
    };
    check("exclude and includeOnly", total_len(patterns(policy)))?;
    check("the names in set", total_len(policy.set.0.keys()))
}

fn patterns(policy: &EnvPolicy) -> impl Iterator<Item = &String> {
    policy.exclude.iter().chain(&policy.include_only)
}

/// The length of all texts, where each counts one byte more.
fn total_len<'a>(texts: impl Iterator<Item = &'a String>) -> usize {
    texts.map(|text| text.len() + 1).sum()
}

/// The environment of a child, by name.
pub type Environment = BTreeMap<OsString, OsString>;

/// Puts `env` on top of what `policy` takes from `server`.
pub(super) fn build(
    server: impl IntoIterator<Item = (OsString, OsString)>,
    policy: Option<&EnvPolicy>,
    env: &Env,
) -> Result<Environment, EnvPolicyError> {
    let mut out = match policy {
        None => Environment::new(),
        Some(policy) => {
            check_size(policy)?;
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
) -> Result<Environment, EnvPolicyError> {
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
) -> Result<(), EnvPolicyError> {
    let set = |name: &OsStr| name.to_str().is_some_and(|name| policy.set.0.contains_key(name));
    let set: Vec<_> = variables.extract_if(.., |name, _| set(name)).collect();
    drop_excluded(variables, policy)?;
    variables.extend(set);
    keep_included(variables, policy)
}

fn drop_excluded(out: &mut Environment, policy: &EnvPolicy) -> Result<(), EnvPolicyError> {
    if !policy.ignore_default_excludes {
        drop_matching(out, DEFAULT_EXCLUDES)?;
    }
    drop_matching(out, &policy.exclude)
}

fn keep_included(out: &mut Environment, policy: &EnvPolicy) -> Result<(), EnvPolicyError> {
    if !policy.include_only.is_empty() {
        let keep = globs(&policy.include_only)?;
        out.retain(|name, _| keep.is_match(name));
    }
    Ok(())
}

fn overlay(out: &mut Environment, env: &Env) {
    out.extend(env.0.iter().map(|(name, value)| (name.into(), value.into())));
}

fn drop_matching(
    out: &mut Environment,
    patterns: &[impl AsRef<str>],
) -> Result<(), EnvPolicyError> {
    if !patterns.is_empty() {
        let set = globs(patterns)?;
        out.retain(|name, _| !set.is_match(OsStr::from_bytes(name.as_bytes())));
    }
    Ok(())
}

fn globs(patterns: &[impl AsRef<str>]) -> Result<GlobSet, EnvPolicyError> {
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

    #[test]
    fn a_policy_is_measured_before_it_is_compiled() {
        let list = |count: usize| vec!["ABCDEFG".to_owned(); count];
        let at_limit = MAX_POLICY_BYTES / 8;
        let set = |count: usize| (0..count).map(|n| (format!("A{n:06}"), "x".repeat(99))).collect();
        let policy = |exclude, include_only, set| EnvPolicy {
            exclude: list(exclude),
            include_only: list(include_only),
            set,
            ..EnvPolicy::default()
        };
        let cases = [
            (policy(at_limit, 0, Env::default()), true),
            (policy(at_limit - 9, 9, Env::default()), true),
            (policy(at_limit, 1, Env::default()), false),
            (policy(0, at_limit + 1, Env::default()), false),
            (policy(0, 0, set(at_limit)), true),
            (policy(0, 0, set(at_limit + 1)), false),
        ];
        for (policy, allowed) in cases {
            let built = build([], Some(&policy), &Env::default());
            match allowed {
                true => drop(built.unwrap()),
                false => assert!(matches!(built, Err(EnvPolicyError::TooLong { .. })), "{built:?}"),
            }
        }
        // Too long, and invalid as well: nothing looked at the patterns.
        let exclude = vec!["[".to_owned(); MAX_POLICY_BYTES];
        let policy = EnvPolicy { exclude, ..EnvPolicy::default() };
        let refused = build([], Some(&policy), &Env::default());
        assert!(matches!(refused, Err(EnvPolicyError::TooLong { .. })), "{refused:?}");
    }
}
