//! Enforcement without namespaces: Landlock and seccomp for policies that they express exactly; others
//! are refused.
//!
//! Invariant: a Landlock rule can only grant, so a policy that denies something, or makes it read-only,
//! inside of what it grants is refused, never approximated. Only from the kernel's trees a grant to read is kept
//! away, by granting what is around them instead. A rule belongs to a directory, not to its path: it grants the
//! same by every name that the directory has, what is mounted below another name included.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use codex_exec_server_protocol::AccessMode;

use super::{Base, Enforcement, Grant, Isolation, PlanError, Rule, Tree};
use crate::capabilities::{Capabilities, NEEDED_LANDLOCK};
use crate::decide::access::exceeds;
use crate::decide::alias::MountTable;
use crate::decide::facts::{Facts, Mount, NodeKind};
use crate::decide::kernel_trees::must_stay_apart;
use crate::decide::paths::is_within;
use crate::decide::policy::{DEVICES, Resolved, ResolvedPolicy};

/// Where devices are.
const DEV: &str = "/dev";

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
    let mounts = facts.mounts().map_err(|error| PlanError::Unsupported {
        reason: format!("the mount table cannot be read: {error}"),
        remedy: "mount /proc".to_owned(),
    })?;
    let apart = trees_apart(&mounts, facts);
    if let Resolved::Restricted(policy) | Resolved::NetworkOnly(policy) = resolved
        && let Some(path) = inexpressible(policy, &apart)
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
        let dev = Path::new(DEV);
        let is_apart = |path: &Path| {
            path == dev || apart.iter().any(|tree| tree != dev && is_within(path, tree))
        };
        rules.retain(|rule| !is_apart(&rule.path) && policy.access.named(&rule.path).is_some());
        let table = MountTable::new(&mounts);
        let names = Names { policy, mounts: &mounts, table: &table, apart: &apart, facts };
        let mut granted = Vec::new();
        for rule in rules.drain(..) {
            match rule.grant {
                Grant::Read => names.read_around(rule.path, &mut granted)?,
                Grant::Write => {
                    if let Some(other) = names.less_elsewhere(&rule.path, AccessMode::Write) {
                        return Err(other.refusal(&rule.path));
                    }
                    granted.push(rule);
                }
                _ => granted.push(rule),
            }
        }
        *rules = granted;
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

/// Trees that no grant around them includes: all devices, and what shows or takes what belongs to other processes.
fn trees_apart(mounts: &[Mount], facts: &dyn Facts) -> BTreeSet<PathBuf> {
    let apart = mounts.iter().filter(|mount| must_stay_apart(mount, facts));
    apart.map(|mount| mount.point.clone()).chain([DEV.into()]).collect()
}

/// What rules are checked against: by which other names they would grant what.
struct Names<'a> {
    policy: &'a ResolvedPolicy,
    mounts: &'a [Mount],
    table: &'a MountTable<'a>,
    apart: &'a BTreeSet<PathBuf>,
    facts: &'a dyn Facts,
}

/// What a rule would grant by another name of its directory.
struct Elsewhere {
    /// The other name.
    name: PathBuf,
    /// A path there with less access.
    less: PathBuf,
    /// It is one of the kernel's trees.
    is_apart: bool,
}

impl Elsewhere {
    fn refusal(&self, path: &Path) -> PlanError {
        PlanError::Unsupported {
            reason: format!(
                "namespaces are not available, and Landlock alone cannot grant `{}` without `{}`, because \
                 `{}` is the same directory",
                path.display(),
                self.less.display(),
                self.name.display()
            ),
            remedy: "grant access only to the directories that need it".to_owned(),
        }
    }
}

impl Names<'_> {
    /// Grants reading of everything below a path but the trees apart, where there are any: of each name that is
    /// there now.
    fn read_around(&self, path: PathBuf, rules: &mut Vec<Rule>) -> Result<(), PlanError> {
        let is_around = |above: &Path, tree: &PathBuf| tree != above && is_within(tree, above);
        let elsewhere = self.less_elsewhere(&path, AccessMode::Read);
        match elsewhere {
            Some(other) if !other.is_apart => return Err(other.refusal(&path)),
            // The tree is mounted on this directory, by its other name.
            Some(other) if other.less == other.name => return Ok(()),
            None if !self.apart.iter().any(|tree| is_around(&path, tree)) => {
                rules.push(Rule { path, grant: Grant::Read });
                return Ok(());
            }
            Some(_) | None => {}
        }
        let names = self.facts.list(&path).map_err(|error| PlanError::Unsupported {
            reason: format!(
                "namespaces are not available, and `{}`, which has trees of the kernel in it, cannot be \
                 listed ({error})",
                path.display()
            ),
            remedy: "grant access only to the directories that need it".to_owned(),
        })?;
        for (name, kind) in names {
            let below = path.join(name);
            if matches!(kind, NodeKind::Directory | NodeKind::File) && !self.apart.contains(&below)
            {
                self.read_around(below, rules)?;
            }
        }
        rules.push(Rule { path, grant: Grant::List });
        Ok(())
    }

    /// What a rule for this path would grant that the policy does not, by another name of the directory. (Reading
    /// the same files by both names is no more.)
    fn less_elsewhere(&self, path: &Path, granted: AccessMode) -> Option<Elsewhere> {
        let is_less = |access| exceeds(granted, access);
        let mount = self.facts.lookup(path).ok()?.identity.mount;
        self.table.aliases(path, mount).into_iter().find_map(|(name, through)| {
            let less = |less: &Path, is_apart| {
                Some(Elsewhere { name: name.clone(), less: less.to_owned(), is_apart })
            };
            let access = &self.policy.access;
            // By the other name, what mounts below the path cover is open, too.
            let is_covered = || {
                let mut mounts = self.mounts.iter();
                mounts.any(|other| other.point != path && is_within(&other.point, path))
            };
            if is_less(access.access(&name)) && (granted == AccessMode::Write || is_covered()) {
                return less(&name, false);
            }
            if let Some(tree) = self.apart.iter().find(|tree| is_within(tree, &name)) {
                return less(tree, true);
            }
            let mounted = self.mounts.iter().filter(|mount| mount.id != through);
            let mut mounted = mounted.filter(|mount| is_within(&mount.point, &name));
            if let Some(mount) = mounted.find(|mount| is_less(access.access(&mount.point))) {
                return less(&mount.point, false);
            }
            let mut regions = self.policy.regions.iter();
            let region = regions
                .find(|(at, region)| at != path && is_within(at, &name) && is_less(region.access));
            region.and_then(|(at, _)| less(at, false))
        })
    }
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
fn inexpressible<'p>(policy: &'p ResolvedPolicy, apart: &BTreeSet<PathBuf>) -> Option<&'p Path> {
    let mut stack: Vec<(&Path, AccessMode)> = Vec::new();
    for (path, region) in &policy.regions {
        while stack.last().is_some_and(|(above, _)| !is_within(path, above)) {
            stack.pop();
        }
        if let Some((_, above)) = stack.last() {
            let is_apart = *above == AccessMode::Read && apart.contains(path);
            let less = exceeds(*above, region.access) && !is_apart;
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
