//! Sandbox policies, by name or from a file.

use anyhow::Context;
use clap::Args;
use codex_exec_server::PathUri;
use codex_exec_server::client::{PermissionProfile, SandboxContext};
use codex_linux_sandbox::Assurance;

use crate::hosts::HostRules;
use crate::places_file::PlaceSettings;

/// The value of `--sandbox` for no sandbox.
const NONE: &str = "none";

/// `--sandbox`.
#[derive(Debug, Clone, Args)]
pub(crate) struct SandboxArgs {
    /// Confine it to a sandbox: read-only, workspace-write (may write to the working directory and to
    /// temporary directories; no network), a JSON file with your own permissions, or none (to leave out
    /// that of a place)
    #[arg(long, value_name = "SANDBOX")]
    pub sandbox: Option<String>,

    /// Weakest sandbox level to accept: full, namespaces or landlock [default: the server's]
    #[arg(long, value_name = "LEVEL", requires = "sandbox")]
    pub sandbox_assurance: Option<Assurance>,
}

impl SandboxArgs {
    /// These flags, with the sandbox of the place if no other is given.
    #[must_use]
    pub(crate) fn or_of(&self, settings: Option<&PlaceSettings>) -> Self {
        let of_place = || settings.and_then(|settings| settings.sandbox.clone());
        Self { sandbox: self.sandbox.clone().or_else(of_place), ..self.clone() }
    }

    /// The sandbox, unless it is `none`.
    fn given(&self) -> Option<&str> {
        self.sandbox.as_deref().filter(|given| *given != NONE)
    }

    /// Whether there is a sandbox.
    pub(crate) fn is_given(&self) -> bool {
        self.given().is_some()
    }

    /// The host rules of the policy file, if there is one.
    pub(crate) fn hosts(&self) -> anyhow::Result<Option<HostRules>> {
        self.given().map_or(Ok(None), hosts)
    }

    /// The sandbox, with this directory as its workspace unless a file says otherwise.
    pub(crate) fn context(&self, workspace: &PathUri) -> anyhow::Result<Option<SandboxContext>> {
        let Some(given) = self.given() else { return Ok(None) };
        let mut context = context(given, workspace)?;
        context.assurance = self.sandbox_assurance.or(context.assurance);
        Ok(Some(context))
    }
}

/// The host rules in the policy file, if this names one and it has some.
pub(crate) fn hosts(given: &str) -> anyhow::Result<Option<HostRules>> {
    match given {
        "read-only" | "workspace-write" => Ok(None),
        file => HostRules::in_policy(file, &read(file)?),
    }
}

fn read(file: &str) -> anyhow::Result<Vec<u8>> {
    std::fs::read(file).with_context(|| {
        format!(
            "cannot read the sandbox policy `{file}`; pass read-only, workspace-write or the path of \
             a JSON file"
        )
    })
}

/// The policy of this name or in this file, with this directory as its workspace unless the file says
/// otherwise.
pub(crate) fn context(given: &str, workspace: &PathUri) -> anyhow::Result<SandboxContext> {
    let mut context = match given {
        "read-only" => SandboxContext::new(PermissionProfile::read_only()),
        "workspace-write" => SandboxContext::new(PermissionProfile::workspace_write()),
        file => {
            let text = read(file)?;
            serde_json::from_slice(&text).with_context(|| {
                format!(
                    "{file} is not a valid sandbox policy; an example: \
                     {{\"type\":\"workspace-write\",\"network_access\":true}}"
                )
            })?
        }
    };
    if context.cwd.is_none() {
        context.cwd = Some(workspace.clone());
        if context.workspace_roots.is_empty() {
            context.workspace_roots = vec![workspace.clone()];
        }
    }
    context.project_root_is_cwd = false;
    Ok(context)
}
