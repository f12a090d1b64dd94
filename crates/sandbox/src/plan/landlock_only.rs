//! Enforcement without namespaces: Landlock and seccomp for policies that they express exactly; others
//! are refused.
//!
//! Invariant: a Landlock rule can only grant, so a policy that denies something, or makes it read-only,
//! inside of what it grants is refused, never approximated.

use std::path::{Path, PathBuf};

use codex_exec_server_protocol::AccessMode;

use super::{Base, Enforcement, Grant, Isolation, PlanError, Rule, Tree};
use crate::capabilities::{Capabilities, NEEDED_LANDLOCK};
use crate::decide::facts::Facts;
use crate::decide::paths::is_within;
use crate::decide::policy::{DEVICES, Resolved, ResolvedPolicy};

/// Trees that control the kernel. With namespaces a sandbox has its own, or cannot write there.
const KERNEL_TREES: [&str; 3] = ["/proc", "/sys", "/dev"];

pub(super) fn convert(
    enforcement: &mut Enforcement,
    resolved: &Resolved,
    facts: &dyn Facts,
    capabilities: &Capabilities,
) -> Result<(), PlanError> {
    let remedy = capabilities.namespace_remedy();
    let unsupported = |reason: String| PlanError::Unsupported { reason, remedy: remedy.to_owned() };
    if !capabilities.seccomp {
        return Err(unsupported("neither namespaces nor seccomp are available".to_owned()));
    }
    if capabilities.landlock_abi < NEEDED_LANDLOCK {
        return Err(unsupported(format!(
            "namespaces are not available, and Landlock has version {}, but {NEEDED_LANDLOCK} is \
             needed",
            capabilities.landlock_abi
        )));
    }
    if let Resolved::Restricted(policy) = resolved
        && let Some(path) = contains_kernel_trees(policy)
    {
        return Err(PlanError::Unsupported {
            reason: format!(
                "namespaces are not available, and with `{}` writable the command could write to the \
                 kernel's /proc, /sys and /dev",
                path.display()
            ),
            remedy: format!("grant write access only to the directories that need it, or {remedy}"),
        });
    }
    if let Resolved::Restricted(policy) | Resolved::NetworkOnly(policy) = resolved
        && let Some(path) = inexpressible(policy)
    {
        return Err(unsupported(format!(
            "namespaces are not available, and Landlock alone cannot exclude `{}` from the grant \
             around it",
            path.display()
        )));
    }
    if let Resolved::Restricted(policy) = resolved {
        let rules = enforcement.rules.get_or_insert_default();
        // Without namespaces `/dev` is the host's, so grant only what is named in it. `/proc` is the
        // host's too; nearly every program reads it, and Landlock keeps it from inspecting other
        // processes.
        rules.retain(|rule| {
            rule.path != Path::new("/dev") && policy.access.named(&rule.path).is_some()
        });
        for path in DEVICES.map(PathBuf::from) {
            if policy.has_device(&path) && facts.lookup(&path).is_ok() {
                rules.push(Rule { path, grant: Grant::Device });
            }
        }
    }
    enforcement.isolation = Isolation::LandlockOnly;
    enforcement.tree =
        Tree { base: Base::WritableHost, operations: Vec::new(), placeholders: Vec::new() };
    Ok(())
}

/// A writable path that contains one of the kernel's trees.
fn contains_kernel_trees(policy: &ResolvedPolicy) -> Option<&Path> {
    let is_around = |path: &Path| {
        KERNEL_TREES.iter().any(|tree| path != Path::new(tree) && is_within(Path::new(tree), path))
    };
    let mut writable =
        policy.regions.iter().filter(|(_, region)| region.access == AccessMode::Write);
    writable.find(|(path, _)| is_around(path)).map(|(path, _)| path.as_path())
}

/// A path with less access than one around it.
fn inexpressible(policy: &ResolvedPolicy) -> Option<&Path> {
    let mut stack: Vec<(&Path, AccessMode)> = Vec::new();
    for (path, region) in &policy.regions {
        while stack.last().is_some_and(|(above, _)| !is_within(path, above)) {
            stack.pop();
        }
        if let Some((_, above)) = stack.last() {
            let less = match region.access {
                AccessMode::Deny => *above != AccessMode::Deny,
                AccessMode::Read => *above == AccessMode::Write,
                AccessMode::Write => false,
            };
            if less {
                return Some(path);
            }
        }
        stack.push((path, region.access));
    }
    policy
        .protected
        .first()
        .map(|name| name.parent.as_path())
        .or_else(|| policy.pinned_links.keys().next().map(PathBuf::as_path))
        .or_else(|| policy.pinned_directories.first().map(PathBuf::as_path))
}
