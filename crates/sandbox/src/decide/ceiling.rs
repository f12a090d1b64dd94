//! The ceiling: a policy of the server's operator, which no other exceeds.
//!
//! Invariant: under a ceiling every file has at most the access that the ceiling gives it. Both policies are
//! resolved first, each by itself: neither a link, nor a second mount, nor an entry of the request leads
//! around the ceiling.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use codex_exec_server_protocol::{
    AccessMode, FileSystemEntry, FileSystemPath, FileSystemPolicy, NetworkPolicy,
    PermissionProfile, RestrictedFileSystem, SandboxContext, SpecialPath,
};

use super::policy::{Region, ResolvedPolicy};

/// The same request with a file system that entries decide on, and with the network only if both have it.
/// Without a ceiling, unchanged.
pub(crate) fn bounded<'a>(
    context: &'a SandboxContext,
    ceiling: Option<&SandboxContext>,
) -> Cow<'a, SandboxContext> {
    let Some(ceiling) = ceiling else { return Cow::Borrowed(context) };
    let network = match (context.permissions.network(), ceiling.permissions.network()) {
        (NetworkPolicy::Enabled, NetworkPolicy::Enabled) => NetworkPolicy::Enabled,
        _ => NetworkPolicy::Restricted,
    };
    let mut context = context.clone();
    let file_system = match context.permissions {
        PermissionProfile::Managed {
            file_system: file_system @ FileSystemPolicy::Restricted(_),
            ..
        } => file_system,
        // The whole disk, as far as the ceiling lets it.
        _ => {
            let root = FileSystemPath::Special { value: SpecialPath::Root };
            let entries = vec![FileSystemEntry::new(root, AccessMode::Write)];
            FileSystemPolicy::Restricted(RestrictedFileSystem {
                entries,
                glob_scan_max_depth: None,
            })
        }
    };
    context.permissions = PermissionProfile::Managed { file_system, network };
    Cow::Owned(context)
}

/// The entries of a ceiling. One without entries permits nothing.
pub(super) fn entries(ceiling: &SandboxContext) -> RestrictedFileSystem {
    match &ceiling.permissions {
        PermissionProfile::Managed {
            file_system: FileSystemPolicy::Restricted(file_system),
            ..
        } => file_system.clone(),
        _ => RestrictedFileSystem::default(),
    }
}

/// The lesser of two accesses.
fn least(a: AccessMode, b: AccessMode) -> AccessMode {
    match (a, b) {
        (AccessMode::Deny, _) | (_, AccessMode::Deny) => AccessMode::Deny,
        (AccessMode::Read, _) | (_, AccessMode::Read) => AccessMode::Read,
        (AccessMode::Write, AccessMode::Write) => AccessMode::Write,
    }
}

/// What both policies permit. Each gives one access to a path and all below it, up to its next entry; so the
/// lesser access at the paths of both is the lesser one everywhere.
pub(super) fn intersect(mut request: ResolvedPolicy, most: ResolvedPolicy) -> ResolvedPolicy {
    // A device that only one of the two names is one that the other one has anyway.
    let access = |policy: &ResolvedPolicy, path: &Path| match policy.has_device(path) {
        true => policy.access.named(path).unwrap_or(AccessMode::Write),
        false => policy.access.access(path),
    };
    let both = |path: &Path| least(access(&request, path), access(&most, path));
    let paths = request.access.iter().chain(most.access.iter());
    let access: Vec<_> = paths.map(|(path, _)| (path.to_owned(), both(path))).collect();
    let regions = request.regions.iter().chain(&most.regions);
    // Nor is a `/dev` that only one of the two names denied: both together have the sandbox's own.
    let is_named = |(path, region): &&(PathBuf, Region)| {
        path != Path::new("/dev")
            || region.access == AccessMode::Deny
            || both(path) != AccessMode::Deny
    };
    let regions: BTreeMap<PathBuf, Region> = regions
        .filter(is_named)
        .map(|(path, region)| (path.clone(), Region { access: both(path), ..*region }))
        .collect();
    for (path, access) in access {
        request.access.set(path, access);
    }
    request.regions = regions.into_iter().collect();
    request.protected.extend(most.protected);
    request.pinned_links.extend(most.pinned_links);
    request.pinned_directories.extend(most.pinned_directories);
    request.missing_roots.extend(most.missing_roots);
    request.host_devices = false;
    request
}
