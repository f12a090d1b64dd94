//! The same files by other names: what is mounted more than once, and the kernel's own file systems
//! away from their places.
//!
//! Invariant: protection belongs to the file, not to its name. What is denied, or read-only inside of
//! something writable, is so through every mount that shows it. An entry that names another mount is an
//! entry for the file it shows: it decides if it is more specific on the file's own path in its file
//! system, and of two for the same file the one that denies does. What belongs to the server is opened by
//! no entry at all. A second `/proc` shows processes of the host, and is denied; the other file systems of
//! the kernel steer it, and are never writable.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use codex_exec_server_protocol::AccessMode;

use super::facts::{Identity, Mount, Node, ResolvedPath, Resolver};
use super::path_trace::PathTrace;
use super::paths::{ancestors, is_within, order, parent};
use super::policy::{PolicyError, ProtectedName, Region, ResolvedPolicy};

/// File systems that are interfaces of the kernel rather than places for files.
const KERNEL: [&str; 30] = [
    "sysfs",
    "cgroup",
    "cgroup2",
    "debugfs",
    "tracefs",
    "securityfs",
    "bpf",
    "configfs",
    "efivarfs",
    "binfmt_misc",
    "pstore",
    "fusectl",
    "selinuxfs",
    "devtmpfs",
    "rpc_pipefs",
    // Terminals and message queues of the host.
    "devpts",
    "mqueue",
    "binder",
    "cpuset",
    "functionfs",
    "gadgetfs",
    "ibmasmfs",
    "nfsd",
    "ocfs2_dlmfs",
    "openpromfs",
    "resctrl",
    "s390_hypfs",
    "smackfs",
    "spufs",
    "xenfs",
];

/// What belongs to the server.
#[derive(Debug, Default)]
pub(super) struct ServerFiles {
    /// What exists, and the most that any policy grants of it.
    pub(super) found: Vec<(PathBuf, Node, AccessMode)>,
    /// What does not: the directory that exists, and the names missing below it.
    pub(super) missing: Vec<(PathBuf, PathBuf)>,
    /// Names of it that no entry has.
    pub(super) unnamed: Vec<PathBuf>,
}

/// A name through another mount: its path, the access it is lowered to, and the mount.
type Lowered = (PathBuf, AccessMode, u64);

/// Applies to each entry what is said of the same file by another name. To be asked once every entry is
/// known, and before anything is derived from them.
pub(super) fn merge_aliased_entries(
    policy: &mut ResolvedPolicy,
    resolver: &mut Resolver<'_>,
    traces: &mut Vec<PathTrace>,
    server_files: &mut ServerFiles,
    mount_table: &MountTable<'_>,
) -> Result<(), PolicyError> {
    let restricts = |(path, region): &&(PathBuf, Region)| {
        region.access != AccessMode::Write && path != Path::new("/")
    };
    for (path, region) in policy.regions.iter().filter(restricts) {
        mount_table.require_known_mount(path, region.node)?;
    }
    restrict_server_files(policy, resolver, traces, server_files, mount_table)?;
    deny_same_files(policy, mount_table);
    Ok(())
}

/// The names by which directories can be written through other mounts.
pub(super) fn writable_names(
    directories: &[PathBuf],
    policy: &ResolvedPolicy,
    resolver: &mut Resolver<'_>,
    mount_table: &MountTable<'_>,
) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for directory in directories {
        let Ok(Some(node)) = resolver.lookup(directory) else { continue };
        for (name, mount) in mount_table.aliases(directory, node.identity.mount) {
            if policy.access.access(&name) == AccessMode::Write
                && is_visible_through(resolver, &name, mount)
            {
                found.push(name);
            }
        }
    }
    found
}

/// Adds the regions, missing names and links of every alias. `metadata` is what is read-only inside of
/// something writable without an entry that says so.
pub(super) fn add_aliases(
    policy: &mut ResolvedPolicy,
    resolver: &mut Resolver<'_>,
    traces: &mut Vec<PathTrace>,
    mounts: &[Mount],
    mount_table: &MountTable<'_>,
    metadata: &[(PathBuf, Node)],
    server_files: &ServerFiles,
) -> Result<(), PolicyError> {
    let kernel: Vec<Lowered> = kernel_trees(mounts).collect();
    restrict_kernel_trees(policy, &kernel);
    let mut lowered = kernel;
    let derived: HashSet<&Path> = metadata
        .iter()
        .map(|(path, _)| &**path)
        .chain(server_files.unnamed.iter().map(|it| &**it))
        .collect();
    let entries = named_files(policy, mount_table, &derived);
    lowered.extend(aliases(policy, mount_table, &entries, &derived));
    lowered.extend(metadata_aliases(policy, mount_table, &entries, metadata)?);
    lower(policy, resolver, traces, lowered);
    protect_missing_aliases(policy, mount_table, resolver);
    pin_link_aliases(policy, mount_table, resolver);
    Ok(())
}

/// Drops what was made read-only for being protected where all around it has turned out to be denied: it is
/// to take something away there, not to grant it.
pub(super) fn drop_metadata_in_denied(
    policy: &mut ResolvedPolicy,
    metadata: &[(PathBuf, Node)],
    server_files: &ServerFiles,
) {
    let mut lowered: Vec<&PathBuf> = metadata.iter().map(|(path, _)| path).collect();
    lowered.extend(&server_files.unnamed);
    lowered.sort_by(|a, b| order(a, b));
    for path in lowered {
        let around = parent(path).map(|above| policy.access.access(above));
        if around == Some(AccessMode::Deny) && policy.access.named(path) == Some(AccessMode::Read) {
            policy.access.remove(path);
            policy.regions.retain(|(place, _)| place != path);
        }
    }
}

/// Lowers the access of places that are seen through a mount.
fn lower(
    policy: &mut ResolvedPolicy,
    resolver: &mut Resolver<'_>,
    traces: &mut Vec<PathTrace>,
    lowered: Vec<Lowered>,
) {
    for (path, access, mount) in lowered {
        if !exceeds(policy.access.access(&path), access) {
            continue;
        }
        if let Some((path, node)) = visible_at(resolver, traces, path, mount) {
            policy.access.set(path.clone(), access);
            policy.regions.retain(|(other, _)| *other != path);
            policy.regions.push((path, Region { access, node, is_server_file: false }));
        }
    }
}

/// Whether an access is more than another.
fn exceeds(access: AccessMode, most: AccessMode) -> bool {
    match most {
        AccessMode::Deny => access != AccessMode::Deny,
        AccessMode::Read => access == AccessMode::Write,
        AccessMode::Write => false,
    }
}

/// What is at a path, if it is seen through this mount. Every directory on the way is looked at, for it may
/// have to keep its name.
fn visible_at(
    resolver: &mut Resolver<'_>,
    traces: &mut Vec<PathTrace>,
    path: PathBuf,
    mount: u64,
) -> Option<(PathBuf, Node)> {
    match resolver.resolve(&path) {
        ResolvedPath::Found(found, node) if found == path && node.identity.mount == mount => {
            Some((path, node))
        }
        // Another mount covers it: it is not seen by this name.
        ResolvedPath::Found(..) | ResolvedPath::Missing(..) => None,
        ResolvedPath::Unreachable(obstacle) => {
            traces.push(PathTrace::blocked(path, obstacle));
            None
        }
    }
}

/// What belongs to the server is opened by no name, whatever the entries say.
fn restrict_server_files(
    policy: &mut ResolvedPolicy,
    resolver: &mut Resolver<'_>,
    traces: &mut Vec<PathTrace>,
    server_files: &mut ServerFiles,
    mount_table: &MountTable<'_>,
) -> Result<(), PolicyError> {
    let mut places: Vec<PathBuf> = Vec::new();
    for (path, node, most) in &server_files.found {
        mount_table.require_known_mount(path, *node)?;
        let names = mount_table.all_aliases(path, *node, |_| true).into_iter();
        // The whole disk may be mounted inside of it.
        for (name, mount) in names.filter(|(name, _)| name != Path::new("/")) {
            places.push(name.clone());
            let opens = |place: &Path, access| exceeds(access, *most) && is_within(place, &name);
            if !exceeds(policy.access.access(&name), *most)
                && !policy.access.iter().any(|(place, access)| opens(place, access))
            {
                continue;
            }
            let Some((_, node)) = visible_at(resolver, traces, name.clone(), mount) else {
                continue;
            };
            if policy.access.named(&name).is_none() {
                server_files.unnamed.push(name.clone());
            }
            policy.regions.retain(|(place, region)| !opens(place, region.access));
            policy.protected.retain(|missing| !opens(&missing.parent, missing.access));
            policy.access.retain(|place, access| !opens(place, access));
            if exceeds(policy.access.access(&name), *most) {
                policy.access.set(name.clone(), *most);
                let is_server_file = *most == AccessMode::Deny;
                policy.regions.push((name, Region { access: *most, node, is_server_file }));
            }
        }
        places.push(path.clone());
    }
    for (parent, missing) in &server_files.missing {
        places.push(parent.join(missing));
        let Ok(Some(node)) = resolver.lookup(parent) else { continue };
        let names = mount_table.aliases(parent, node.identity.mount);
        places.extend(names.into_iter().map(|(name, _)| name.join(missing)));
    }
    // Nor does an entry have any of it made.
    policy.missing_roots.retain(|root| !places.iter().any(|path| is_within(&root.path(), path)));
    Ok(())
}

/// What one entry denies, no other grants by another name of the same file.
fn deny_same_files(policy: &mut ResolvedPolicy, mount_table: &MountTable<'_>) {
    // What is said of the whole disk is said of names, not of files.
    let is_root = |path: &Path| path == Path::new("/");
    let file = |(path, region): &(PathBuf, Region)| {
        (!is_root(path)).then(|| mount_table.file(path, region.node)).flatten()
    };
    let denied: HashSet<File> = policy
        .regions
        .iter()
        .filter(|(_, region)| region.access == AccessMode::Deny)
        .filter_map(file)
        .collect();
    if denied.is_empty() {
        return;
    }
    for entry in &mut policy.regions {
        if entry.1.access != AccessMode::Deny
            && file(entry).is_some_and(|file| denied.contains(&file))
        {
            entry.1.access = AccessMode::Deny;
            policy.access.set(entry.0.clone(), AccessMode::Deny);
        }
    }
}

/// An entry that names something inside of the kernel's file systems grants no more than one that names
/// all of it.
fn restrict_kernel_trees(policy: &mut ResolvedPolicy, kernel: &[Lowered]) {
    for (path, region) in &mut policy.regions {
        let tree = kernel.iter().find(|(_, _, mount)| *mount == region.node.identity.mount);
        let most = match tree {
            Some((_, most, _)) => *most,
            None => continue,
        };
        if most == AccessMode::Deny || region.access == AccessMode::Write {
            region.access = most;
            policy.access.set(path.clone(), most);
        }
    }
}

/// A name that may not come into being may not do so through another mount of its directory.
fn protect_missing_aliases(
    policy: &mut ResolvedPolicy,
    mount_table: &MountTable<'_>,
    resolver: &mut Resolver<'_>,
) {
    let mut found = Vec::new();
    for name in &policy.protected {
        let Ok(Some(parent)) = resolver.lookup(&name.parent) else { continue };
        for (alias, mount) in mount_table.aliases(&name.parent, parent.identity.mount) {
            if is_visible_through(resolver, &alias, mount) {
                found.push(ProtectedName { parent: alias, ..name.clone() });
            }
        }
    }
    policy.protected.append(&mut found);
}

/// A link that stays does so by every name.
pub(super) fn pin_link_aliases(
    policy: &mut ResolvedPolicy,
    mount_table: &MountTable<'_>,
    resolver: &mut Resolver<'_>,
) {
    let mut found = Vec::new();
    for (link, node) in &policy.pinned_links {
        for (alias, mount) in mount_table.aliases(link, node.identity.mount) {
            let directory = parent(&alias).unwrap_or(&alias);
            if policy.access.access(directory) == AccessMode::Write
                && is_visible_through(resolver, directory, mount)
                && let Ok(Some(node)) = resolver.lookup(&alias)
            {
                found.push((alias, node));
            }
        }
    }
    policy.pinned_links.extend(found);
}

/// Whether a path is seen through this mount. Looks at every directory on the way.
fn is_visible_through(resolver: &mut Resolver<'_>, path: &Path, mount: u64) -> bool {
    matches!(
        resolver.resolve(path),
        ResolvedPath::Found(found, node) if found == path && node.identity.mount == mount
    )
}

/// The kernel's file systems where they are not replaced by the sandbox's own.
fn kernel_trees(mounts: &[Mount]) -> impl Iterator<Item = Lowered> {
    let is_replaced =
        |path: &Path| ["/proc", "/dev"].iter().any(|tree| is_within(path, Path::new(tree)));
    mounts.iter().filter(move |mount| !is_replaced(&mount.point)).filter_map(|mount| {
        let access = match mount.kind.as_str() {
            "proc" => AccessMode::Deny,
            kind if KERNEL.contains(&kind) => AccessMode::Read,
            _ => return None,
        };
        Some((mount.point.clone(), access, mount.id))
    })
}

/// Where else the files of denied and read-only regions can be seen.
fn aliases(
    policy: &ResolvedPolicy,
    mount_table: &MountTable<'_>,
    entries: &HashSet<File>,
    derived: &HashSet<&Path>,
) -> Vec<Lowered> {
    let mut aliases = Vec::new();
    for (path, region) in &policy.regions {
        // What is said of the whole disk is said of names, not of files.
        if region.access == AccessMode::Write || path == Path::new("/") {
            continue;
        }
        let decides =
            |part: &Mount| !has_entry_between(entries, path, region.node, part, mount_table);
        let mut names = mount_table.aliases(path, region.node.identity.mount);
        names.extend(mount_table.partial_mounts(path, region.node, decides));
        for (alias, mount) in names {
            if policy.access.named(&alias).is_none() || derived.contains(&*alias) {
                aliases.push((alias, region.access, mount));
            }
        }
    }
    aliases
}

/// Where else protected metadata can be seen.
fn metadata_aliases(
    policy: &ResolvedPolicy,
    mount_table: &MountTable<'_>,
    entries: &HashSet<File>,
    metadata: &[(PathBuf, Node)],
) -> Result<Vec<Lowered>, PolicyError> {
    let mut aliases = Vec::new();
    for (path, node) in metadata.iter().filter(|(path, _)| path != Path::new("/")) {
        mount_table.require_known_mount(path, *node)?;
        let decides = |part: &Mount| !has_entry_between(entries, path, *node, part, mount_table);
        for (alias, mount) in mount_table.all_aliases(path, *node, decides) {
            if policy.access.named(&alias).is_none() {
                aliases.push((alias, AccessMode::Read, mount));
            }
        }
    }
    Ok(aliases)
}

/// The files that an entry names, as far as they may have other names.
fn named_files(
    policy: &ResolvedPolicy,
    mount_table: &MountTable<'_>,
    derived: &HashSet<&Path>,
) -> HashSet<File> {
    let entries = policy.regions.iter().filter(|(path, _)| !derived.contains(&**path));
    entries.filter_map(|(path, region)| mount_table.file(path, region.node)).collect()
}

/// Whether an entry decides on what a mount shows rather than what is said of a directory above it: on a
/// path between the two, in the file system.
fn has_entry_between(
    entries: &HashSet<File>,
    path: &Path,
    node: Node,
    part: &Mount,
    mount_table: &MountTable<'_>,
) -> bool {
    let Some(above) = mount_table.file(path, node) else { return false };
    ancestors(&part.root).take_while(|inside| *inside != above.inside).any(|inside| {
        entries.contains(&File { file_system: above.file_system, inside: inside.to_owned() })
    })
}

/// A file, whatever it is called: its file system, and its path below the root of that.
#[derive(Debug, PartialEq, Eq, Hash)]
struct File {
    file_system: (u32, u32),
    inside: PathBuf,
}

/// The mounts, by what can be asked of them.
pub(super) struct MountTable<'m> {
    mounts: &'m [Mount],
    by_id: HashMap<u64, &'m Mount>,
    /// Those of file systems that are mounted more than once. Not of `/proc`, of which a sandbox has its
    /// own, and no other.
    by_file_system: HashMap<(u32, u32), Vec<&'m Mount>>,
}

impl<'m> MountTable<'m> {
    pub(super) fn new(mounts: &'m [Mount]) -> Self {
        let mut by_file_system: HashMap<(u32, u32), Vec<&Mount>> = HashMap::new();
        for mount in mounts.iter().filter(|mount| mount.kind != "proc") {
            by_file_system.entry(mount.file_system).or_default().push(mount);
        }
        by_file_system.retain(|_, mounts| mounts.len() > 1);
        let by_id = mounts.iter().map(|mount| (mount.id, mount)).collect();
        Self { mounts, by_id, by_file_system }
    }

    /// Refuses a place whose other names cannot be told: its mount is not in the table, which has others
    /// of the same file system (in a changed root, say).
    fn require_known_mount(&self, path: &Path, node: Node) -> Result<(), PolicyError> {
        let is_known =
            self.by_id.get(&node.identity.mount).is_some_and(|mount| is_within(path, &mount.point));
        let has_others =
            || self.mounts.iter().any(|mount| mount.file_system == node.identity.device);
        if is_known || !has_others() {
            return Ok(());
        }
        let why = format!("`{}` is on a mount that it does not have", path.display());
        Err(PolicyError::Mounts(why))
    }

    /// Which file is at a path that is reached through a mount, if it may have other names.
    fn file(&self, path: &Path, node: Node) -> Option<File> {
        let (mount, _) = self.others(node.identity.mount)?;
        let below = path.strip_prefix(&mount.point).ok()?;
        Some(File { file_system: mount.file_system, inside: join(&mount.root, below) })
    }

    /// A mount, and all of its file system.
    fn others(&self, mount: u64) -> Option<(&'m Mount, &[&'m Mount])> {
        let mount = *self.by_id.get(&mount)?;
        Some((mount, self.by_file_system.get(&mount.file_system)?))
    }

    /// The names that a file, reached through a mount, has through others, each with its mount.
    pub(super) fn aliases(&self, path: &Path, mount: u64) -> Vec<(PathBuf, u64)> {
        let mut names = Vec::new();
        let Some((mount, all)) = self.others(mount) else { return names };
        let Ok(below) = path.strip_prefix(&mount.point) else { return names };
        let inside = join(&mount.root, below);
        for other in all.iter().filter(|other| other.id != mount.id) {
            if let Ok(below) = inside.strip_prefix(&other.root) {
                names.push((join(&other.point, below), other.id));
            }
        }
        names
    }

    /// Where parts of what is below a directory are mounted.
    fn partial_mounts(
        &self,
        path: &Path,
        node: Node,
        wanted: impl Fn(&Mount) -> bool,
    ) -> Vec<(PathBuf, u64)> {
        let Some(file) = self.file(path, node) else { return Vec::new() };
        let all = self.by_file_system.get(&file.file_system).into_iter().flatten();
        all.filter(|other| other.root != file.inside && is_within(&other.root, &file.inside))
            .filter(|other| other.id != node.identity.mount && wanted(other))
            .map(|other| (other.point.clone(), other.id))
            .collect()
    }

    /// Every other name of a file and of parts of it, and of what is mounted below it.
    fn all_aliases(
        &self,
        path: &Path,
        node: Node,
        wanted: impl Fn(&Mount) -> bool,
    ) -> Vec<(PathBuf, u64)> {
        let mut names = self.aliases(path, node.identity.mount);
        names.extend(self.partial_mounts(path, node, wanted));
        let is_below = |mount: &&Mount| mount.point != path && is_within(&mount.point, path);
        for mount in self.mounts.iter().filter(is_below) {
            names.extend(self.aliases(&mount.point, mount.id));
            let identity = Identity { mount: mount.id, ..node.identity };
            names.extend(self.partial_mounts(&mount.point, Node { identity, ..node }, |_| true));
        }
        names
    }
}

fn join(path: &Path, below: &Path) -> PathBuf {
    if below.as_os_str().is_empty() { path.to_owned() } else { path.join(below) }
}
