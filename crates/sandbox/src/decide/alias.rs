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

use super::facts::{Identity, Mount, Node, Place, Resolver};
use super::order::{ancestors, is_within, order, parent};
use super::policy::{PolicyError, ProtectedName, Region, ResolvedPolicy};
use super::way::Way;

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
pub(super) struct Own {
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
pub(super) fn join_entries(
    policy: &mut ResolvedPolicy,
    resolver: &mut Resolver<'_>,
    ways: &mut Vec<Way>,
    own: &mut Own,
    table: &Table<'_>,
) -> Result<(), PolicyError> {
    let restricts = |(path, region): &&(PathBuf, Region)| {
        region.access != AccessMode::Write && path != Path::new("/")
    };
    for (path, region) in policy.regions.iter().filter(restricts) {
        table.judge(path, region.node)?;
    }
    own_files(policy, resolver, ways, own, table)?;
    same_files(policy, table);
    Ok(())
}

/// The names by which directories can be written through other mounts.
pub(super) fn writable_names(
    directories: &[PathBuf],
    policy: &ResolvedPolicy,
    resolver: &mut Resolver<'_>,
    table: &Table<'_>,
) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for directory in directories {
        let Ok(Some(node)) = resolver.lookup(directory) else { continue };
        for (name, mount) in table.second_names(directory, node.identity.mount) {
            if policy.access.access(&name) == AccessMode::Write && shows(resolver, &name, mount) {
                found.push(name);
            }
        }
    }
    found
}

/// Adds the regions, missing names and links of every alias. `metadata` is what is read-only inside of
/// something writable without an entry that says so.
pub(super) fn close(
    policy: &mut ResolvedPolicy,
    resolver: &mut Resolver<'_>,
    ways: &mut Vec<Way>,
    mounts: &[Mount],
    table: &Table<'_>,
    metadata: &[(PathBuf, Node)],
    own: &Own,
) -> Result<(), PolicyError> {
    let kernel: Vec<Lowered> = kernel_trees(mounts).collect();
    inside_kernel_trees(policy, &kernel);
    let mut closed = kernel;
    let derived: HashSet<&Path> = metadata
        .iter()
        .map(|(path, _)| &**path)
        .chain(own.unnamed.iter().map(|it| &**it))
        .collect();
    let entries = named_files(policy, table, &derived);
    closed.extend(second_names(policy, table, &entries, &derived));
    closed.extend(names_of_metadata(policy, table, &entries, metadata)?);
    lower(policy, resolver, ways, closed);
    missing_names(policy, table, resolver);
    pinned_links(policy, table, resolver);
    Ok(())
}

/// Drops what was made read-only for being protected where all around it has turned out to be denied: it is
/// to take something away there, not to grant it.
pub(super) fn open_nothing(policy: &mut ResolvedPolicy, metadata: &[(PathBuf, Node)], own: &Own) {
    let mut lowered: Vec<&PathBuf> = metadata.iter().map(|(path, _)| path).collect();
    lowered.extend(&own.unnamed);
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
    ways: &mut Vec<Way>,
    closed: Vec<Lowered>,
) {
    for (path, access, mount) in closed {
        if !is_above(policy.access.access(&path), access) {
            continue;
        }
        if let Some((path, node)) = seen(resolver, ways, path, mount) {
            policy.access.set(path.clone(), access);
            policy.regions.retain(|(other, _)| *other != path);
            policy.regions.push((path, Region { access, node, own: false }));
        }
    }
}

/// Whether an access is more than another.
fn is_above(access: AccessMode, most: AccessMode) -> bool {
    match most {
        AccessMode::Deny => access != AccessMode::Deny,
        AccessMode::Read => access == AccessMode::Write,
        AccessMode::Write => false,
    }
}

/// What is at a path, if it is seen through this mount. Every directory on the way is looked at, for it may
/// have to keep its name.
fn seen(
    resolver: &mut Resolver<'_>,
    ways: &mut Vec<Way>,
    path: PathBuf,
    mount: u64,
) -> Option<(PathBuf, Node)> {
    match resolver.resolve(&path) {
        Place::Found(found, node) if found == path && node.identity.mount == mount => {
            Some((path, node))
        }
        // Another mount covers it: it is not seen by this name.
        Place::Found(..) | Place::Missing(..) => None,
        Place::Unreachable(obstacle) => {
            ways.push(Way::blocked(path, obstacle));
            None
        }
    }
}

/// What belongs to the server is opened by no name, whatever the entries say.
fn own_files(
    policy: &mut ResolvedPolicy,
    resolver: &mut Resolver<'_>,
    ways: &mut Vec<Way>,
    own: &mut Own,
    table: &Table<'_>,
) -> Result<(), PolicyError> {
    let mut places: Vec<PathBuf> = Vec::new();
    for (path, node, most) in &own.found {
        table.judge(path, *node)?;
        let names = table.all_names(path, *node, |_| true).into_iter();
        // The whole disk may be mounted inside of it.
        for (name, mount) in names.filter(|(name, _)| name != Path::new("/")) {
            places.push(name.clone());
            let opens = |place: &Path, access| is_above(access, *most) && is_within(place, &name);
            if !is_above(policy.access.access(&name), *most)
                && !policy.access.iter().any(|(place, access)| opens(place, access))
            {
                continue;
            }
            let Some((_, node)) = seen(resolver, ways, name.clone(), mount) else { continue };
            if policy.access.named(&name).is_none() {
                own.unnamed.push(name.clone());
            }
            policy.regions.retain(|(place, region)| !opens(place, region.access));
            policy.protected.retain(|missing| !opens(&missing.parent, missing.access));
            policy.access.retain(|place, access| !opens(place, access));
            if is_above(policy.access.access(&name), *most) {
                policy.access.set(name.clone(), *most);
                let own = *most == AccessMode::Deny;
                policy.regions.push((name, Region { access: *most, node, own }));
            }
        }
        places.push(path.clone());
    }
    for (parent, missing) in &own.missing {
        places.push(parent.join(missing));
        let Ok(Some(node)) = resolver.lookup(parent) else { continue };
        let names = table.second_names(parent, node.identity.mount);
        places.extend(names.into_iter().map(|(name, _)| name.join(missing)));
    }
    // Nor does an entry have any of it made.
    policy.missing_roots.retain(|root| !places.iter().any(|own| is_within(&root.path(), own)));
    Ok(())
}

/// What one entry denies, no other grants by another name of the same file.
fn same_files(policy: &mut ResolvedPolicy, table: &Table<'_>) {
    // What is said of the whole disk is said of names, not of files.
    let is_root = |path: &Path| path == Path::new("/");
    let file = |(path, region): &(PathBuf, Region)| {
        (!is_root(path)).then(|| table.file(path, region.node)).flatten()
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
fn inside_kernel_trees(policy: &mut ResolvedPolicy, kernel: &[Lowered]) {
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
fn missing_names(policy: &mut ResolvedPolicy, table: &Table<'_>, resolver: &mut Resolver<'_>) {
    let mut found = Vec::new();
    for name in &policy.protected {
        let Ok(Some(parent)) = resolver.lookup(&name.parent) else { continue };
        for (alias, mount) in table.second_names(&name.parent, parent.identity.mount) {
            if shows(resolver, &alias, mount) {
                found.push(ProtectedName { parent: alias, ..name.clone() });
            }
        }
    }
    policy.protected.append(&mut found);
}

/// A link that stays does so by every name.
pub(super) fn pinned_links(
    policy: &mut ResolvedPolicy,
    table: &Table<'_>,
    resolver: &mut Resolver<'_>,
) {
    let mut found = Vec::new();
    for (link, node) in &policy.pinned_links {
        for (alias, mount) in table.second_names(link, node.identity.mount) {
            let directory = parent(&alias).unwrap_or(&alias);
            if policy.access.access(directory) == AccessMode::Write
                && shows(resolver, directory, mount)
                && let Ok(Some(node)) = resolver.lookup(&alias)
            {
                found.push((alias, node));
            }
        }
    }
    policy.pinned_links.extend(found);
}

/// Whether a path is seen through this mount. Looks at every directory on the way.
fn shows(resolver: &mut Resolver<'_>, path: &Path, mount: u64) -> bool {
    matches!(
        resolver.resolve(path),
        Place::Found(found, node) if found == path && node.identity.mount == mount
    )
}

/// The kernel's file systems where they are not replaced by the sandbox's own.
fn kernel_trees(mounts: &[Mount]) -> impl Iterator<Item = Lowered> {
    let own = |path: &Path| ["/proc", "/dev"].iter().any(|own| is_within(path, Path::new(own)));
    mounts.iter().filter(move |mount| !own(&mount.point)).filter_map(|mount| {
        let access = match mount.kind.as_str() {
            "proc" => AccessMode::Deny,
            kind if KERNEL.contains(&kind) => AccessMode::Read,
            _ => return None,
        };
        Some((mount.point.clone(), access, mount.id))
    })
}

/// Where else the files of denied and read-only regions can be seen.
fn second_names(
    policy: &ResolvedPolicy,
    table: &Table<'_>,
    entries: &HashSet<File>,
    derived: &HashSet<&Path>,
) -> Vec<Lowered> {
    let mut aliases = Vec::new();
    for (path, region) in &policy.regions {
        // What is said of the whole disk is said of names, not of files.
        if region.access == AccessMode::Write || path == Path::new("/") {
            continue;
        }
        let decides = |part: &Mount| !has_entry_between(entries, path, region.node, part, table);
        let mut names = table.second_names(path, region.node.identity.mount);
        names.extend(table.parts(path, region.node, decides));
        for (alias, mount) in names {
            if policy.access.named(&alias).is_none() || derived.contains(&*alias) {
                aliases.push((alias, region.access, mount));
            }
        }
    }
    aliases
}

/// Where else protected metadata can be seen.
fn names_of_metadata(
    policy: &ResolvedPolicy,
    table: &Table<'_>,
    entries: &HashSet<File>,
    metadata: &[(PathBuf, Node)],
) -> Result<Vec<Lowered>, PolicyError> {
    let mut aliases = Vec::new();
    for (path, node) in metadata.iter().filter(|(path, _)| path != Path::new("/")) {
        table.judge(path, *node)?;
        let decides = |part: &Mount| !has_entry_between(entries, path, *node, part, table);
        for (alias, mount) in table.all_names(path, *node, decides) {
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
    table: &Table<'_>,
    derived: &HashSet<&Path>,
) -> HashSet<File> {
    let entries = policy.regions.iter().filter(|(path, _)| !derived.contains(&**path));
    entries.filter_map(|(path, region)| table.file(path, region.node)).collect()
}

/// Whether an entry decides on what a mount shows rather than what is said of a directory above it: on a
/// path between the two, in the file system.
fn has_entry_between(
    entries: &HashSet<File>,
    path: &Path,
    node: Node,
    part: &Mount,
    table: &Table<'_>,
) -> bool {
    let Some(above) = table.file(path, node) else { return false };
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
pub(super) struct Table<'m> {
    mounts: &'m [Mount],
    by_id: HashMap<u64, &'m Mount>,
    /// Those of file systems that are mounted more than once. Not of `/proc`, of which a sandbox has its
    /// own, and no other.
    by_file_system: HashMap<(u32, u32), Vec<&'m Mount>>,
}

impl<'m> Table<'m> {
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
    fn judge(&self, path: &Path, node: Node) -> Result<(), PolicyError> {
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
    pub(super) fn second_names(&self, path: &Path, mount: u64) -> Vec<(PathBuf, u64)> {
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
    fn parts(
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
    fn all_names(
        &self,
        path: &Path,
        node: Node,
        wanted: impl Fn(&Mount) -> bool,
    ) -> Vec<(PathBuf, u64)> {
        let mut names = self.second_names(path, node.identity.mount);
        names.extend(self.parts(path, node, wanted));
        let is_below = |mount: &&Mount| mount.point != path && is_within(&mount.point, path);
        for mount in self.mounts.iter().filter(is_below) {
            names.extend(self.second_names(&mount.point, mount.id));
            let identity = Identity { mount: mount.id, ..node.identity };
            names.extend(self.parts(&mount.point, Node { identity, ..node }, |_| true));
        }
        names
    }
}

fn join(path: &Path, below: &Path) -> PathBuf {
    if below.as_os_str().is_empty() { path.to_owned() } else { path.join(below) }
}
