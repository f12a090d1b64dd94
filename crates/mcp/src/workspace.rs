//! What the tools of a session work on, and the policy that holds for each of them.

use std::fmt;
use std::sync::Arc;

use codex_exec_client::{ExecCommand, ExecServerClient, Files};
use codex_exec_server_protocol::{NetworkPolicy, PathUri, SandboxContext};

use crate::config::McpConfig;

/// The policy of a workspace, fixed by the person who starts the server.
#[derive(Clone)]
pub struct Policy {
    sandbox: Option<SandboxContext>,
    prepare: Arc<Prepare>,
    fetch: bool,
}

type Prepare = dyn Fn(ExecCommand) -> ExecCommand + Send + Sync;

impl Policy {
    /// Holds files and commands to this sandbox; `None` restricts nothing. `prepare` adds to each command
    /// what else the person decides, such as variables or a proxy; it comes before the sandbox, which it
    /// cannot undo.
    pub fn new(
        sandbox: Option<SandboxContext>,
        prepare: impl Fn(ExecCommand) -> ExecCommand + Send + Sync + 'static,
    ) -> Self {
        let network = sandbox.as_ref().map(|sandbox| sandbox.permissions.network());
        let fetch = network.is_none_or(|network| network == NetworkPolicy::Enabled);
        Self { sandbox, prepare: Arc::new(prepare), fetch }
    }

    /// Takes the tool `fetch` away, although the sandbox leaves the network open: requests of the server
    /// itself go around the proxy of a command.
    #[must_use]
    pub fn without_fetch(mut self) -> Self {
        self.fetch = false;
        self
    }

    pub(crate) fn may_fetch(&self) -> bool {
        self.fetch
    }

    /// Whether a call may set this variable: not what a sandbox may grant the place of.
    pub(crate) fn may_set(&self, variable: &str) -> bool {
        self.sandbox.is_none() || variable != "TMPDIR"
    }
}

impl fmt::Debug for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Policy")
            .field("sandbox", &self.sandbox)
            .field("fetch", &self.fetch)
            .finish_non_exhaustive()
    }
}

/// A client of an exec-server, a directory there, and a policy.
#[derive(Debug)]
pub struct Workspace {
    pub(crate) client: ExecServerClient,
    pub(crate) cwd: PathUri,
    pub(crate) policy: Policy,
    pub(crate) config: McpConfig,
}

impl Workspace {
    /// Tools work on this client's server; relative paths start at `cwd`.
    pub fn new(
        client: ExecServerClient,
        cwd: PathUri,
        policy: Policy,
        config: McpConfig,
    ) -> Arc<Self> {
        Arc::new(Self { client, cwd, policy, config })
    }

    /// Files, under the policy.
    pub(crate) fn files(&self) -> Files {
        self.client.files().in_sandbox(self.policy.sandbox.clone())
    }

    /// The sandbox of the policy.
    pub(crate) fn sandbox(&self) -> Option<&SandboxContext> {
        self.policy.sandbox.as_ref()
    }

    /// The command, under the policy.
    pub(crate) fn confine(&self, command: ExecCommand) -> ExecCommand {
        let command = (self.policy.prepare)(command);
        match self.sandbox() {
            Some(sandbox) => command.sandbox(sandbox.clone()),
            None => command,
        }
    }

    /// Resolves a path as a model writes it: absolute, a `file:` URI, below `~`, or relative to the workspace.
    pub(crate) fn resolve(&self, written: &str) -> Result<PathUri, String> {
        let invalid =
            |error: &dyn fmt::Display| format!("invalid path `{}`: {error}", shown(written));
        if written.starts_with('/') || written.starts_with("file:") {
            return written.parse().map_err(|error| invalid(&error));
        }
        if written == "~" || written.starts_with("~/") {
            let Some(home) = self.client.info().user_home_dir.clone() else {
                return Err("the server does not report its home directory; write an absolute \
                            path"
                    .to_owned());
            };
            let below = written.trim_start_matches('~').trim_start_matches('/');
            return home.join(below).map_err(|error| invalid(&error));
        }
        self.cwd.join(written).map_err(|error| invalid(&error))
    }

    /// A path for people and models: relative to the workspace if it is inside.
    pub(crate) fn display(&self, path: &PathUri) -> String {
        let (root, path) = (self.cwd.as_bytes(), path.as_bytes());
        let inside = match path.strip_prefix(root) {
            Some(b"") => Some(&b"."[..]),
            Some([b'/', rest @ ..]) => Some(rest),
            Some(rest) if root == b"/" => Some(rest),
            _ => None,
        };
        String::from_utf8_lossy(inside.unwrap_or(path)).into_owned()
    }
}

/// The beginning of a text that a model wrote, for messages.
pub(crate) fn shown(text: &str) -> String {
    let cut: String = text.chars().take(200).collect();
    if cut.len() < text.len() { cut + "…" } else { cut }
}
