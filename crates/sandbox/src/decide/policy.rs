//! From intent to places: a [`SandboxContext`] resolved against one file system.
//!
//! Invariant: every path in a [`ResolvedPolicy`] is free of links, so that the kernel, which works
//! on what a name leads to, and the entries, which are names, speak of the same thing.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use codex_exec_server_protocol::{
    AccessMode, FileSystemEntry, FileSystemPath, FileSystemPolicy, MissingPathBehavior,
    NetworkPolicy, PathUri, PermissionProfile, RestrictedFileSystem, SandboxContext, SpecialPath,
};

use super::access::AccessMap;
use super::alias::Own;
use super::facts::{Facts, Mount, Node, NodeKind, Obstacle, Place, Resolver};
use super::glob::{Glob, GlobError};
use super::order::{is_within, order, parent};
use super::way::{self, Way};
use super::written::Written;
use super::{alias, metadata, scan};
use crate::{Limits, OwnFiles};

/// What a program needs to start; those that exist.
pub const MINIMAL: [&str; 8] =
    ["/bin", "/sbin", "/usr", "/etc", "/lib", "/lib64", "/nix/store", "/run/current-system/sw"];

/// Why a policy cannot be resolved. Nothing has run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// An entry is relative to a directory nobody named.
    #[error("the policy is relative to a working directory, but the request names none; set `cwd`")]
    CwdNeeded,
    /// A pattern that allows.
    #[error("pattern `{0}` allows something; glob patterns can only deny")]
    GlobAllows(String),
    /// A pattern that means nothing.
    #[error("pattern `{pattern}` cannot be used: {source}")]
    GlobInvalid {
        /// As it came.
        pattern: String,
        /// What is wrong with it.
        source: GlobError,
    },
    /// More files match than can be hidden one by one.
    #[error(
        "the glob patterns match more than {0} files; deny a directory instead, or narrow them"
    )]
    GlobMatches(usize),
    /// The tree below the patterns is too large to look through.
    #[error("the glob patterns cover more than {0} files; lower `glob_scan_max_depth`")]
    GlobScan(usize),
    /// A policy longer than any real one.
    #[error("the policy has {found} entries; at most {limit} are enforced")]
    Entries {
        /// As many as came.
        found: usize,
        /// As many as are allowed.
        limit: usize,
    },
    /// `subpath` has to stay below the workspace root.
    #[error("subpath `{0}` of project_roots leaves the workspace root")]
    Subpath(String),
    /// A pattern reaches deeper than it was expanded.
    #[error(
        "the glob patterns reach below `{0}`, deeper than the server expands them; set \
         `glob_scan_max_depth`, or narrow them"
    )]
    GlobDepth(PathBuf),
    /// A grant by way of a link that may lead anywhere tomorrow.
    #[error(
        "`{}` cannot be granted: `{}` is a link in a directory that sandboxed processes can write \
         to; grant its target, or replace it with a directory",
        .name.display(), .link.display()
    )]
    Link {
        /// As the policy names it.
        name: PathBuf,
        /// The link.
        link: PathBuf,
    },
    /// What is named cannot be looked at, so it cannot be protected.
    #[error("`{}` cannot be protected or granted: `{}`: {why}", .name.display(), .at.display())]
    Unreachable {
        /// As the policy names it, or as it follows from what it names.
        name: PathBuf,
        /// Where it ends.
        at: PathBuf,
        /// What the system said.
        why: String,
    },
    /// What processes have in `/proc` is one thing for the server and another inside.
    #[error(
        "`{}` leads through `{}`, a process's own part of /proc, which is another for the sandbox than for \
         the server; name the place it leads to",
        .name.display(), .at.display()
    )]
    Process {
        /// As the policy names it.
        name: PathBuf,
        /// What belongs to a process.
        at: PathBuf,
    },
    /// Without the mounts nobody knows what else leads to a place.
    #[error("cannot read the mount table: {0}")]
    Mounts(String),
    /// A denial of something this version does not know cannot be kept.
    #[error("the policy denies a special path of unknown kind: {0}")]
    UnknownDenied(String),
}

/// What a policy is resolved against besides the file system.
#[derive(Debug, Clone, Copy, Default)]
pub struct Surroundings<'a> {
    /// The directory the process runs in, used where the context has no `cwd`.
    pub cwd: Option<&'a Path>,
    /// `$TMPDIR` of the process.
    pub tmpdir: Option<&'a OsStr>,
}

/// A place that exists, and the access of the entry that named it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// What may be done there and below.
    pub access: AccessMode,
    /// What is there.
    pub node: Node,
    /// Denied because it is the server's own.
    pub own: bool,
}

/// A name that has to stay absent.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProtectedName {
    /// The directory that exists.
    pub parent: PathBuf,
    /// What is missing below it; the last is the one that is protected.
    pub missing: Vec<OsString>,
    /// What the entry said: read, or deny.
    pub access: AccessMode,
}

/// A policy with every name resolved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvedPolicy {
    /// The access of every named path, whether it exists or not.
    pub access: AccessMap,
    /// Places that exist, parents first (see `order`).
    pub regions: Vec<(PathBuf, Region)>,
    /// Names that may not come into being.
    pub protected: Vec<ProtectedName>,
    /// Links met while resolving, with their targets.
    pub links: BTreeMap<PathBuf, PathBuf>,
    /// Links that may be neither replaced nor removed.
    pub pinned_links: BTreeMap<PathBuf, Node>,
    /// Directories that may be neither replaced nor removed.
    pub kept_directories: BTreeSet<PathBuf>,
    /// Everything that was looked at on the way.
    pub known: HashMap<OsString, Option<Node>>,
    /// Places that are to be written and do not exist.
    pub missing_roots: Vec<MissingRoot>,
    /// The policy's own bound kept patterns from being expanded as deep as they go.
    pub globs_cut: bool,
    /// The host's devices stay: the entries restrict nothing.
    pub host_devices: bool,
    /// Whether the network can be reached.
    pub network: NetworkPolicy,
}

/// A place that is to be written and does not exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingRoot {
    /// The directory that exists, without links.
    pub parent: PathBuf,
    /// The names that are missing below it.
    pub missing: Vec<OsString>,
}

impl MissingRoot {
    /// Where it is to be.
    pub(super) fn path(&self) -> PathBuf {
        let mut path = self.parent.clone();
        path.extend(&self.missing);
        path
    }

    /// Whether it has to be made for the entry to grant anything. Where all around is writable the
    /// process makes what it likes, a file perhaps; and nobody's metadata is touched.
    fn is_needed(&self, access: &AccessMap) -> bool {
        let path = self.path();
        let is_metadata = |name: &OsStr| metadata::NAMES.iter().any(|known| name == *known);
        access.access(&path) == AccessMode::Write
            && access.access(&self.parent) != AccessMode::Write
            && !path.iter().any(is_metadata)
    }
}

/// What a server knows besides the policy and the file system.
#[derive(Debug, Clone, Copy)]
pub struct ServerState<'a> {
    /// Files of its own that no policy opens.
    pub own_files: &'a OwnFiles,
    /// Where its sandboxes could have put links.
    pub written: &'a Written,
}

/// What there is to enforce.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resolved {
    /// Nothing.
    Unrestricted,
    /// The network, and files of the server that no policy opens; all else is writable.
    NetworkOnly(Box<ResolvedPolicy>),
    /// Paths, and the network if it is restricted.
    Restricted(Box<ResolvedPolicy>),
}

/// Resolves a policy against a file system.
pub fn resolve(
    context: &SandboxContext,
    around: Surroundings<'_>,
    facts: &dyn Facts,
    limits: &Limits,
    server: ServerState<'_>,
) -> Result<Resolved, PolicyError> {
    let network = context.permissions.network();
    let PermissionProfile::Managed {
        file_system: FileSystemPolicy::Restricted(file_system), ..
    } = &context.permissions
    else {
        return match network {
            NetworkPolicy::Enabled => Ok(Resolved::Unrestricted),
            NetworkPolicy::Restricted => network_only(facts, server),
        };
    };
    if file_system.entries.len() > limits.entries {
        return Err(PolicyError::Entries {
            found: file_system.entries.len(),
            limit: limits.entries,
        });
    }
    let mut resolving = Resolving::new(facts, network, file_system.entries.len());
    let cwd = context.cwd.as_ref().map(PathUri::as_path).or(around.cwd);
    let roots: Vec<&Path> = if context.project_root_is_cwd {
        cwd.into_iter().collect()
    } else {
        context.workspace_roots.iter().map(PathUri::as_path).collect()
    };
    let globs = resolving.entries(file_system, cwd, &roots, around.tmpdir)?;
    resolving.policy.host_devices = grants_everything(file_system);
    let own_depth = file_system.glob_scan_max_depth.map(|depth| depth.get() as usize);
    let base = resolving.glob_base(&globs, cwd);
    let mounts = facts.mounts().map_err(|error| PolicyError::Mounts(error.to_string()))?;
    let table = alias::Table::new(&mounts);
    if !globs.is_empty() {
        let granted = resolving.granted(&table);
        let (base, resolver) = (base.as_deref(), &mut resolving.resolver);
        let found = scan::expand(&globs, base, own_depth, &granted, limits, resolver)?;
        for path in found.matches {
            resolving.pattern_match(&path);
        }
        resolving.ways.extend(found.ways);
        resolving.policy.globs_cut = found.cut;
    }
    resolving.refuse_processes(&mounts)?;
    resolving.own_trees();
    resolving.own_files(&server.own_files.denied, AccessMode::Deny);
    resolving.own_files(&server.own_files.read_only, AccessMode::Read);
    let Resolving { mut resolver, mut policy, mut ways, mut own } = resolving;
    let roots: Vec<PathBuf> = roots
        .iter()
        .filter_map(|root| match resolver.resolve(root) {
            // Remembered, for it may have to keep its name.
            Place::Found(path, _) => resolver.lookup(&path).is_ok().then_some(path),
            _ => None,
        })
        .collect();
    merge(&mut policy.regions);
    alias::join_entries(&mut policy, &mut resolver, &mut ways, &mut own, &table)?;
    merge(&mut policy.regions);
    let mut workspaces = roots;
    workspaces.extend(alias::writable_names(&workspaces, &policy, &mut resolver, &table));
    let metadata =
        metadata::protect(&mut policy, &workspaces, &own.unnamed, &mut resolver, &mut ways)?;
    way::check(&ways, &mut policy, server.written, &mut resolver, &table)?;
    ways.clear();
    alias::close(&mut policy, &mut resolver, &mut ways, &mounts, &table, &metadata, &own)?;
    alias::open_nothing(&mut policy, &metadata, &own);
    way::check(&ways, &mut policy, server.written, &mut resolver, &table)?;
    // Only where it could be created does a missing name need protection, and only where it could be
    // replaced a link or a directory.
    let access = &policy.access;
    let is_writable = |path: &Path| access.access(path) == AccessMode::Write;
    policy.protected.retain(|name| is_writable(&name.parent));
    policy.pinned_links.retain(|link, _| parent(link).is_some_and(is_writable));
    policy.kept_directories.retain(|directory| parent(directory).is_some_and(is_writable));
    policy.missing_roots.retain(|root| root.is_needed(access));
    policy.protected.sort();
    // Nor does one below another that may not come into being.
    policy.protected.dedup_by(|a, b| a.parent == b.parent && a.missing.starts_with(&b.missing));
    Ok(Resolved::Restricted(Box::new(finished(policy, resolver))))
}

/// Whether the entries let everything be written, and nothing else: that restricts no path, whatever more
/// of them say that something may be written.
fn grants_everything(file_system: &RestrictedFileSystem) -> bool {
    let root = FileSystemPath::Special { value: SpecialPath::Root };
    let is_write = |entry: &FileSystemEntry| entry.access == AccessMode::Write;
    file_system.entries.iter().all(is_write)
        && file_system.entries.iter().any(|entry| entry.path == root)
}

/// A policy that leaves the file system as it is: all of it is writable, but for the server's credentials.
/// Those that do not exist yet are left alone: there is nothing to read.
fn network_only(facts: &dyn Facts, server: ServerState<'_>) -> Result<Resolved, PolicyError> {
    let mut resolving = Resolving::new(facts, NetworkPolicy::Restricted, 1);
    let Place::Found(root, node) = resolving.resolver.resolve(Path::new("/")) else {
        return Err(PolicyError::Unreachable {
            name: "/".into(),
            at: "/".into(),
            why: "it cannot be inspected".into(),
        });
    };
    resolving.region(root, node, AccessMode::Write);
    resolving.own_files(&server.own_files.denied, AccessMode::Deny);
    let Resolving { mut resolver, mut policy, mut ways, mut own } = resolving;
    policy.protected.clear();
    merge(&mut policy.regions);
    let mounts = facts.mounts().map_err(|error| PolicyError::Mounts(error.to_string()))?;
    let table = alias::Table::new(&mounts);
    way::check(&ways, &mut policy, server.written, &mut resolver, &table)?;
    ways.clear();
    alias::join_entries(&mut policy, &mut resolver, &mut ways, &mut own, &table)?;
    alias::pinned_links(&mut policy, &table, &mut resolver);
    way::check(&ways, &mut policy, server.written, &mut resolver, &table)?;
    Ok(Resolved::NetworkOnly(Box::new(finished(policy, resolver))))
}

/// A policy to which nothing is added any more.
fn finished(mut policy: ResolvedPolicy, mut resolver: Resolver<'_>) -> ResolvedPolicy {
    merge(&mut policy.regions);
    policy.links = std::mem::take(&mut resolver.links).into_iter().collect();
    policy.known = resolver.into_known();
    policy
}

struct Resolving<'a> {
    resolver: Resolver<'a>,
    policy: ResolvedPolicy,
    /// The ways that are not plain.
    ways: Vec<Way>,
    own: Own,
}

/// Sorts regions, and makes one of several at the same path.
fn merge(regions: &mut Vec<(PathBuf, Region)>) {
    regions.sort_by(|(a, _), (b, _)| order(a, b));
    regions.dedup_by(|(path, next), (above, kept)| {
        let same = path.as_os_str() == above.as_os_str();
        if same {
            kept.access = kept.access.max(next.access);
            kept.own &= next.own;
        }
        same
    });
}

impl<'a> Resolving<'a> {
    fn new(facts: &'a dyn Facts, network: NetworkPolicy, entries: usize) -> Self {
        let policy = ResolvedPolicy {
            access: AccessMap::with_capacity(entries),
            regions: Vec::with_capacity(entries),
            protected: Vec::new(),
            links: BTreeMap::new(),
            pinned_links: BTreeMap::new(),
            kept_directories: BTreeSet::new(),
            known: HashMap::new(),
            missing_roots: Vec::new(),
            globs_cut: false,
            host_devices: false,
            network,
        };
        Self { resolver: Resolver::new(facts), policy, ways: Vec::new(), own: Own::default() }
    }

    fn entries(
        &mut self,
        file_system: &RestrictedFileSystem,
        cwd: Option<&Path>,
        roots: &[&Path],
        tmpdir: Option<&OsStr>,
    ) -> Result<Vec<Glob>, PolicyError> {
        let mut globs = Vec::new();
        for entry in &file_system.entries {
            let access = entry.access;
            let skip = entry.missing_path_behavior == Some(MissingPathBehavior::Skip);
            match &entry.path {
                FileSystemPath::Path { path } => self.entry(path.as_path(), access, skip),
                FileSystemPath::GlobPattern { pattern } => {
                    if access != AccessMode::Deny {
                        return Err(PolicyError::GlobAllows(pattern.clone()));
                    }
                    let glob = Glob::parse(pattern).map_err(|source| PolicyError::GlobInvalid {
                        pattern: pattern.clone(),
                        source,
                    })?;
                    if !glob.absolute && cwd.is_none() {
                        return Err(PolicyError::CwdNeeded);
                    }
                    globs.push(glob);
                }
                FileSystemPath::Special { value } => match value {
                    SpecialPath::Root => self.entry(Path::new("/"), access, skip),
                    SpecialPath::SlashTmp => self.entry(Path::new("/tmp"), access, skip),
                    SpecialPath::Minimal => {
                        for path in MINIMAL {
                            self.entry(Path::new(path), access, true);
                        }
                    }
                    SpecialPath::Tmpdir => {
                        let tmpdir = tmpdir.map(Path::new).filter(|path| path.is_absolute());
                        if let Some(tmpdir) = tmpdir {
                            self.entry(tmpdir, access, skip);
                        }
                    }
                    SpecialPath::ProjectRoots { subpath } => {
                        if roots.is_empty() && cwd.is_none() {
                            return Err(PolicyError::CwdNeeded);
                        }
                        let below = below_root(subpath.as_deref())?;
                        for root in roots {
                            // Not joined: where nothing is below, that would add a slash.
                            let path: PathBuf =
                                root.components().chain(below.components()).collect();
                            self.entry(&path, access, skip);
                        }
                    }
                    SpecialPath::Unknown(value) if access == AccessMode::Deny => {
                        return Err(PolicyError::UnknownDenied(value.to_string()));
                    }
                    SpecialPath::Unknown(_) => {}
                },
            }
        }
        Ok(globs)
    }

    fn entry(&mut self, path: &Path, access: AccessMode, skip_missing: bool) {
        match self.follow(path, access) {
            Place::Found(path, node) => self.region(path, node, access),
            Place::Missing(parent, missing) if missing.len() > metadata::MOST_MISSING => {
                let obstacle = Obstacle { path: parent, errno: libc::ENAMETOOLONG };
                self.ways.push(Way::blocked(path.to_owned(), obstacle));
            }
            Place::Missing(parent, missing) if !skip_missing => {
                let mut path = parent.clone();
                path.extend(&missing);
                self.policy.access.insert(path, access);
                if access == AccessMode::Write {
                    self.policy.missing_roots.push(MissingRoot { parent, missing });
                } else {
                    self.policy.protected.push(ProtectedName { parent, missing, access });
                }
            }
            Place::Missing(..) | Place::Unreachable(_) => {}
        }
    }

    /// Follows a path, and remembers its way if it is not plain.
    fn follow(&mut self, path: &Path, access: AccessMode) -> Place {
        let (place, way) = Way::follow(&mut self.resolver, path, access);
        if !way.is_plain() {
            self.ways.push(way);
        }
        place
    }

    /// What the entries grant, by every name that it has.
    fn granted(&self, table: &alias::Table<'_>) -> scan::Granted {
        let mut paths = Vec::new();
        let regions = self.policy.regions.iter();
        for (path, region) in regions.filter(|(_, region)| region.access != AccessMode::Deny) {
            let others = table.second_names(path, region.node.identity.mount);
            paths.extend(others.into_iter().map(|(name, _)| name));
            paths.push(path.clone());
        }
        scan::Granted::new(paths)
    }

    /// Refuses entries and patterns that lead through what processes have in `/proc`.
    fn refuse_processes(&self, mounts: &[Mount]) -> Result<(), PolicyError> {
        let own = (Path::new("/proc"), Path::new("/"));
        let others = mounts.iter().filter(|mount| mount.kind == "proc");
        let trees: Vec<(&Path, &Path)> =
            others.map(|mount| (&*mount.point, &*mount.root)).chain([own]).collect();
        let refuse = |name: &Path, at: &Path| {
            let is_of_process = |(point, root): &(&Path, &Path)| {
                is_within(at, point)
                    && at.strip_prefix(point).is_ok_and(|below| is_of_process(&root.join(below)))
            };
            if trees.iter().any(is_of_process) {
                return Err(PolicyError::Process { name: name.to_owned(), at: at.to_owned() });
            }
            Ok(())
        };
        for way in &self.ways {
            for link in &way.links {
                refuse(&way.name, link)?;
            }
            if let Some(place) = &way.place {
                refuse(&way.name, place)?;
            }
        }
        for (path, _) in self.policy.access.iter() {
            refuse(path, path)?;
        }
        Ok(())
    }

    /// The directory that relative patterns begin at, without links.
    fn glob_base(&mut self, globs: &[Glob], cwd: Option<&Path>) -> Option<PathBuf> {
        let cwd = cwd.filter(|_| globs.iter().any(|glob| !glob.absolute))?;
        match self.follow(cwd, AccessMode::Deny) {
            Place::Found(path, _) => Some(path),
            // Nothing is there that could match; what is in the way is remembered.
            Place::Missing(..) | Place::Unreachable(_) => None,
        }
    }

    /// Every sandbox has a `/dev` and a `/proc` of its own, whatever is said of the host's: of the former
    /// nothing is seen but what an entry names inside of it, and into the latter nothing is written.
    fn own_trees(&mut self) {
        self.policy.access.set("/dev".into(), AccessMode::Deny);
        self.policy.access.set("/proc".into(), AccessMode::Read);
        for (path, region) in &mut self.policy.regions {
            if region.access == AccessMode::Write && is_within(path, Path::new("/proc")) {
                region.access = AccessMode::Read;
                self.policy.access.set(path.clone(), AccessMode::Read);
            }
        }
    }

    /// What no entry opens further than `most`: the server's credentials, and the programs it runs
    /// outside. Nor does an entry for something inside of them.
    fn own_files(&mut self, paths: &[PathBuf], most: AccessMode) {
        for path in paths {
            // As for anything denied: the links on its way stay.
            let (path, node) = match self.follow(path, AccessMode::Deny) {
                Place::Found(path, node) => (path, node),
                // Nobody inside puts something there for the server to find.
                Place::Missing(parent, missing) => {
                    let access = AccessMode::Read;
                    self.own.missing.push((parent.clone(), missing.iter().collect()));
                    self.policy.protected.push(ProtectedName { parent, missing, access });
                    continue;
                }
                Place::Unreachable(obstacle) => {
                    self.keep_obstacle(&obstacle);
                    continue;
                }
            };
            self.own.found.push((path.clone(), node, most));
            let above = |access| match most {
                AccessMode::Deny => access != AccessMode::Deny,
                _ => access == AccessMode::Write,
            };
            let policy = &mut self.policy;
            let reads_only = most == AccessMode::Read && above(policy.access.access(&path));
            if policy.access.named(&path).is_none() {
                self.own.unnamed.push(path.clone());
            }
            let opens = |place: &Path, access| above(access) && is_within(place, &path);
            policy.regions.retain(|(place, region)| !opens(place, region.access));
            policy.protected.retain(|name| !opens(&name.parent, name.access));
            policy.access.retain(|place, access| !opens(place, access));
            if reads_only || above(policy.access.access(&path)) {
                policy.access.insert(path.clone(), most);
                let own = most == AccessMode::Deny;
                policy.regions.push((path, Region { access: most, node, own }));
            }
        }
    }

    /// A file where a directory would be needed: as long as it stays, nothing comes into being below it. So
    /// it does, unless an entry says that it may be written.
    fn keep_obstacle(&mut self, obstacle: &Obstacle) {
        let (path, policy) = (&obstacle.path, &mut self.policy);
        if obstacle.errno == libc::ENOTDIR
            && policy.access.access(path) == AccessMode::Write
            && policy.access.named(path).is_none()
            && let Ok(Some(node)) = self.resolver.lookup(path)
            && let Some(way) = self.ways.last_mut()
        {
            way.obstacle = None;
            self.region(path.clone(), node, AccessMode::Read);
        }
    }

    /// A name that a pattern matches. If it is a link, what it leads to is denied, and the link stays.
    fn pattern_match(&mut self, path: &Path) {
        if let Place::Found(path, node) = self.follow(path, AccessMode::Deny) {
            self.region(path, node, AccessMode::Deny);
        }
    }

    fn region(&mut self, path: PathBuf, node: Node, access: AccessMode) {
        self.policy.access.insert(path.clone(), access);
        self.policy.regions.push((path, Region { access, node, own: false }));
    }
}

/// Whether a path, from the root of a `/proc`, is a process's or leads to one.
fn is_of_process(inside: &Path) -> bool {
    let first = inside.components().find_map(|component| match component {
        Component::Normal(name) => Some(name.as_bytes()),
        _ => None,
    });
    first.is_some_and(|name| {
        matches!(name, b"self" | b"thread-self") || name.iter().all(u8::is_ascii_digit)
    })
}

/// The relative path a `subpath` stands for.
fn below_root(subpath: Option<&str>) -> Result<PathBuf, PolicyError> {
    let Some(subpath) = subpath else { return Ok(PathBuf::new()) };
    let leaves =
        |component: Component<'_>| !matches!(component, Component::Normal(_) | Component::CurDir);
    let path = Path::new(OsStr::from_bytes(subpath.as_bytes()));
    if path.components().any(leaves) || subpath.contains('\0') {
        return Err(PolicyError::Subpath(subpath.to_owned()));
    }
    Ok(path.to_owned())
}

impl ResolvedPolicy {
    /// What is at a directory above a region, or at a region.
    pub fn node(&self, path: &Path) -> Option<Node> {
        match self.known.get(path.as_os_str()) {
            Some(known) => *known,
            None => self.region(path).map(|region| region.node),
        }
    }

    /// The region at exactly this path.
    pub fn region(&self, path: &Path) -> Option<&Region> {
        let found = self.regions.binary_search_by(|(at, _)| order(at, path));
        found.ok().map(|index| &self.regions[index].1)
    }
}

impl Region {
    /// Whether it is a directory.
    pub fn is_directory(&self) -> bool {
        self.node.kind == NodeKind::Directory
    }
}
