//! Aliases: files that are mounted more than once.
//!
//! Invariant: protection belongs to the file, not to its path. What is denied, or read-only inside of
//! something writable, is so through every mount that shows it. An entry for a path on another mount is
//! an entry for the file itself: it decides if it is more specific on the file's path within its file
//! system, and of two for the same file the one that denies decides. No entry opens files of the
//! server.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use codex_exec_server_protocol::AccessMode;

use super::access::exceeds;
use super::facts::{Identity, Mount, Node, ResolvedPath, Resolver};
use super::kernel_trees;
use super::path_trace::PathTrace;
use super::paths::{ancestors, is_within, order, parent};
use super::policy::{PolicyError, ProtectedName, Region, ResolvedPolicy};

/// The server's own files.
#[derive(Debug, Default)]
pub(super) struct ServerFiles {
    /// Existing ones, and the most access that any policy may grant to them.
    pub(super) found: Vec<(PathBuf, Node, AccessMode)>,
    /// Missing ones: the existing directory, and the missing names below it.
    pub(super) missing: Vec<(PathBuf, PathBuf)>,
    /// Paths to them that no entry names.
    pub(super) unnamed: Vec<PathBuf>,
}

/// An alias: its path, the access it is lowered to, and its mount id.
pub(super) type Lowered = (PathBuf, AccessMode, u64);

/// Combines entries for the same file under different paths. Call it once all entries are known, before
/// anything is derived from them.
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

/// The aliases through which directories are writable.
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
/// something writable without an entry for it.
pub(super) fn add_aliases(
    policy: &mut ResolvedPolicy,
    resolver: &mut Resolver<'_>,
    traces: &mut Vec<PathTrace>,
    mounts: &[Mount],
    mount_table: &MountTable<'_>,
    metadata: &[(PathBuf, Node)],
    server_files: &ServerFiles,
) -> Result<(), PolicyError> {
    let kernel = kernel_trees::lowered(mounts, resolver.facts());
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

/// Drops protected metadata whose surroundings turned out to be denied: its read-only region would
/// grant access there, not restrict it.
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

/// Lowers the access to aliases.
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

/// What is at a path, if it is visible through this mount. Looks up every directory of the path, since
/// each may have to be pinned.
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
        // Another mount covers it.
        ResolvedPath::Found(..) | ResolvedPath::Missing(..) => None,
        ResolvedPath::Unreachable(obstacle) => {
            traces.push(PathTrace::blocked(path, obstacle));
            None
        }
    }
}

/// Restricts the server's files under every alias, whatever the entries say.
fn restrict_server_files(
    policy: &mut ResolvedPolicy,
    resolver: &mut Resolver<'_>,
    traces: &mut Vec<PathTrace>,
    server_files: &mut ServerFiles,
    mount_table: &MountTable<'_>,
) -> Result<(), PolicyError> {
    let mut paths: Vec<PathBuf> = Vec::new();
    for (path, node, most) in &server_files.found {
        mount_table.require_known_mount(path, *node)?;
        let names = mount_table.all_aliases(path, *node, |_| true).into_iter();
        // The whole disk may be mounted inside of it.
        for (name, mount) in names.filter(|(name, _)| name != Path::new("/")) {
            paths.push(name.clone());
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
        paths.push(path.clone());
    }
    for (parent, missing) in &server_files.missing {
        paths.push(parent.join(missing));
        let Ok(Some(node)) = resolver.lookup(parent) else { continue };
        let names = mount_table.aliases(parent, node.identity.mount);
        paths.extend(names.into_iter().map(|(name, _)| name.join(missing)));
    }
    // No entry may create them either.
    policy.missing_roots.retain(|root| !paths.iter().any(|path| is_within(&root.path(), path)));
    Ok(())
}

/// Denies a file under all paths that entries grant, if one entry denies it.
fn deny_same_files(policy: &mut ResolvedPolicy, mount_table: &MountTable<'_>) {
    // An entry for the whole disk applies to paths, not to files.
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

/// Limits entries for paths inside the kernel's file systems like entries for the whole file system.
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

/// Protects a missing name under every alias of its directory.
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

/// Pins a link under every alias.
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

/// Whether a path is visible through this mount. Looks up every directory of the path.
fn is_visible_through(resolver: &mut Resolver<'_>, path: &Path, mount: u64) -> bool {
    matches!(
        resolver.resolve(path),
        ResolvedPath::Found(found, node) if found == path && node.identity.mount == mount
    )
}

/// Aliases of denied and read-only regions.
fn aliases(
    policy: &ResolvedPolicy,
    mount_table: &MountTable<'_>,
    entries: &HashSet<File>,
    derived: &HashSet<&Path>,
) -> Vec<Lowered> {
    let mut aliases = Vec::new();
    for (path, region) in &policy.regions {
        // An entry for the whole disk applies to paths, not to files.
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

/// Aliases of protected metadata.
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

/// The files that entries name, as far as they may have aliases.
fn named_files(
    policy: &ResolvedPolicy,
    mount_table: &MountTable<'_>,
    derived: &HashSet<&Path>,
) -> HashSet<File> {
    let entries = policy.regions.iter().filter(|(path, _)| !derived.contains(&**path));
    entries.filter_map(|(path, region)| mount_table.file(path, region.node)).collect()
}

/// Whether a more specific entry decides on what a mount shows: one for a path between the directory
/// and the mount's root, within the file system.
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

/// Identifies a file: its file system, and its path within that.
#[derive(Debug, PartialEq, Eq, Hash)]
struct File {
    file_system: (u32, u32),
    inside: PathBuf,
}

/// The mount table, indexed.
pub(crate) struct MountTable<'m> {
    mounts: &'m [Mount],
    by_id: HashMap<u64, &'m Mount>,
    /// Mounts of file systems that are mounted more than once. Not `/proc`, since a sandbox sees only
    /// its own.
    by_file_system: HashMap<(u32, u32), Vec<&'m Mount>>,
}

impl<'m> MountTable<'m> {
    pub(crate) fn new(mounts: &'m [Mount]) -> Self {
        let mut by_file_system: HashMap<(u32, u32), Vec<&Mount>> = HashMap::new();
        for mount in mounts.iter().filter(|mount| mount.kind != "proc") {
            by_file_system.entry(mount.file_system).or_default().push(mount);
        }
        by_file_system.retain(|_, mounts| mounts.len() > 1);
        let by_id = mounts.iter().map(|mount| (mount.id, mount)).collect();
        Self { mounts, by_id, by_file_system }
    }

    /// Refuses a path whose aliases cannot be determined: its mount is not in the table, but others of
    /// the same file system are (in a chroot, for example).
    fn require_known_mount(&self, path: &Path, node: Node) -> Result<(), PolicyError> {
        let is_known =
            self.by_id.get(&node.identity.mount).is_some_and(|mount| is_within(path, &mount.point));
        let has_others =
            || self.mounts.iter().any(|mount| mount.file_system == node.identity.device);
        if is_known || !has_others() {
            return Ok(());
        }
        let why = format!("`{}` is on a mount that the table does not list", path.display());
        Err(PolicyError::Mounts(why))
    }

    /// The file at a path on a mount, if it may have aliases.
    fn file(&self, path: &Path, node: Node) -> Option<File> {
        let (mount, _) = self.others(node.identity.mount)?;
        let below = path.strip_prefix(&mount.point).ok()?;
        Some(File { file_system: mount.file_system, inside: join(&mount.root, below) })
    }

    /// A mount, and all mounts of its file system.
    fn others(&self, mount: u64) -> Option<(&'m Mount, &[&'m Mount])> {
        let mount = *self.by_id.get(&mount)?;
        Some((mount, self.by_file_system.get(&mount.file_system)?))
    }

    /// The aliases of a file through other mounts, with their mount ids.
    pub(crate) fn aliases(&self, path: &Path, mount: u64) -> Vec<(PathBuf, u64)> {
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

    /// Mounts of directories below this one.
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

    /// All aliases of a file, of parts of it, and of what is mounted below it.
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
