//! The operator's policy: what no request exceeds, whatever the client asks for.
//!
//! Invariant: every process and every file request runs in a sandbox that permits at most what the policy
//! permits; what cannot be held to it is refused.

use std::path::{Path, PathBuf};

use codex_exec_host::process::Environment;
use codex_exec_server_protocol::process::ExecParams;
use codex_exec_server_protocol::{
    AccessMode, ErrorKind, FileSystemEntry, FileSystemPath, FileSystemPolicy, NetworkPolicy,
    PathUri, PermissionProfile, RestrictedFileSystem, RpcError, SandboxContext, SpecialPath,
};
use serde::Deserialize;

use crate::auth::{AuthConfigError, open_private};

/// What the clients of a server may do at most.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct OperatorPolicy {
    /// Directories and files that can be read. Default: all.
    pub read: Vec<PathBuf>,
    /// Directories and files that can be written. Default: none.
    pub write: Vec<PathBuf>,
    /// Directories and files that can be neither read nor written. Of several paths the most specific one
    /// decides. Default: none.
    pub deny: Vec<PathBuf>,
    /// Whether processes can reach the network. Default false.
    pub network: bool,
    /// Whether `http/request` is served. Default: as `network`.
    pub http_request: Option<bool>,
    /// Variables that a process can get from the server or from the client when it starts; a name may end with
    /// `*`. Default: all.
    pub env: Option<Vec<String>>,
}

/// Why a policy cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PolicyFileError {
    /// The file cannot be read, or others can write it.
    #[error(transparent)]
    File(#[from] AuthConfigError),
    /// The file is not a policy.
    #[error("{path} is not a policy: {reason}")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

impl Default for OperatorPolicy {
    fn default() -> Self {
        Self {
            read: vec!["/".into()],
            write: Vec::new(),
            deny: Vec::new(),
            network: false,
            http_request: None,
            env: None,
        }
    }
}

impl OperatorPolicy {
    /// Everything can be read, nothing written; no network.
    pub fn read_only() -> Self {
        Self::default()
    }

    /// Reads a policy in TOML. Others than this user and root must not be able to write the file.
    pub fn from_file(path: &Path) -> Result<Self, PolicyFileError> {
        let invalid = |reason: String| PolicyFileError::Invalid { path: path.to_owned(), reason };
        let text = std::io::read_to_string(open_private(path)?);
        let text = text.map_err(|error| invalid(error.to_string()))?;
        let policy: Self = toml::from_str(&text).map_err(|error| invalid(error.to_string()))?;
        policy.check().map_err(invalid)?;
        Ok(policy)
    }

    fn check(&self) -> Result<(), String> {
        for path in self.read.iter().chain(&self.write).chain(&self.deny) {
            let is_plain = path.components().all(|component| {
                !matches!(component, std::path::Component::ParentDir | std::path::Component::CurDir)
            });
            if !path.is_absolute() || !is_plain || PathUri::try_from(path.as_path()).is_err() {
                return Err(format!("`{}` is not an absolute path without `..`", path.display()));
            }
        }
        for name in self.env.iter().flatten() {
            if name.is_empty() || name[..name.len() - 1].contains('*') {
                return Err(format!("`{name}` is not a name that may end with `*`"));
            }
        }
        Ok(())
    }

    /// The policy as a sandbox. Of equal paths the lesser access counts.
    pub(crate) fn ceiling(&self) -> SandboxContext {
        let mut entries: Vec<FileSystemEntry> = Vec::new();
        let lists = [
            (&self.deny, AccessMode::Deny),
            (&self.read, AccessMode::Read),
            (&self.write, AccessMode::Write),
        ];
        for (paths, access) in lists {
            for path in paths {
                // Checked when the policy was read; a path that cannot be named is not granted.
                let Ok(uri) = PathUri::try_from(path.as_path()) else { continue };
                let path = match path.as_os_str() == "/" {
                    true => FileSystemPath::Special { value: SpecialPath::Root },
                    false => FileSystemPath::Path { path: uri },
                };
                entries.push(FileSystemEntry::new(path, access));
            }
        }
        let network = match self.network {
            true => NetworkPolicy::Enabled,
            false => NetworkPolicy::Restricted,
        };
        let file_system = FileSystemPolicy::Restricted(RestrictedFileSystem {
            entries,
            glob_scan_max_depth: None,
        });
        SandboxContext::new(PermissionProfile::Managed { file_system, network })
    }

    /// Puts a process without a sandbox into one, or refuses it.
    pub(crate) fn hold_process(&self, params: &mut ExecParams) -> Result<(), RpcError> {
        if !self.network && (params.network_proxy.is_some() || params.enforce_managed_network) {
            return Err(refused("a network", "network"));
        }
        hold(&mut params.sandbox);
        Ok(())
    }

    /// Removes variables that no process may have.
    pub(crate) fn hold_environment(&self, environment: &mut Environment) {
        if self.env.is_some() {
            environment
                .retain(|name, _| name.to_str().is_some_and(|name| self.allows_variable(name)));
        }
    }

    /// Whether a process, or a header of `http/request`, may have this variable.
    pub(crate) fn allows_variable(&self, name: &str) -> bool {
        let matches = |pattern: &String| match pattern.strip_suffix('*') {
            Some(start) => name.starts_with(start),
            None => name == pattern,
        };
        self.env.as_ref().is_none_or(|patterns| patterns.iter().any(matches))
    }

    /// Refuses `http/request`, if the operator does.
    pub(crate) fn check_http<'a>(
        &self,
        mut variables: impl Iterator<Item = &'a str>,
    ) -> Result<(), RpcError> {
        if !self.http_request.unwrap_or(self.network) {
            return Err(refused("http/request", "http_request"));
        }
        match variables.find(|name| !self.allows_variable(name)) {
            Some(name) => Err(refused(&format!("the variable {name}"), "env")),
            None => Ok(()),
        }
    }
}

/// Puts a request without a sandbox into one: the server bounds it by the policy.
pub(crate) fn hold(sandbox: &mut Option<SandboxContext>) {
    sandbox.get_or_insert_with(|| SandboxContext::new(PermissionProfile::Disabled));
}

pub(crate) fn refused(what: &str, member: &str) -> RpcError {
    let message = format!("the operator's policy does not permit {what} (`{member}`)");
    RpcError::invalid_params(ErrorKind::OperatorPolicy, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<OperatorPolicy, PolicyFileError> {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("policy.toml");
        std::fs::write(&file, text).unwrap();
        OperatorPolicy::from_file(&file)
    }

    #[test]
    fn the_policy_in_the_documentation_is_valid() {
        let page = include_str!("../../../docs/operating.md");
        let (_, example) = page.split_once("```toml\n").unwrap();
        let policy = parse(example.split_once("```").unwrap().0).unwrap();
        assert_eq!(policy.deny, [PathBuf::from("/srv/work/keys")]);
    }

    #[test]
    fn policies_are_parsed_or_refused() {
        let policy = parse(
            "read = ['/usr', '/srv']\nwrite = ['/srv/work']\ndeny = ['/srv/work/keys']\nnetwork = true\n\
             http_request = false\nenv = ['PATH', 'LC_*']",
        )
        .unwrap();
        assert_eq!(policy.write, [PathBuf::from("/srv/work")]);
        assert!(policy.network && policy.http_request == Some(false));
        for (name, allowed) in
            [("PATH", true), ("PATHS", false), ("LC_ALL", true), ("LC_", true), ("path", false)]
        {
            assert_eq!(policy.allows_variable(name), allowed, "{name}");
        }
        assert_eq!(parse("").unwrap(), OperatorPolicy::read_only());
        for bad in [
            "reads = ['/']",
            "read = '/'",
            "write = ['work']",
            "write = ['/srv/../etc']",
            "env = ['*A']",
            "env = ['']",
            "network = 1",
            "not toml",
        ] {
            assert!(matches!(parse(bad), Err(PolicyFileError::Invalid { .. })), "{bad}");
        }
    }
}
