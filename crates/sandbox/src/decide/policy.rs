//! Resolves a [`SandboxContext`] against a file system.
//!
//! Invariant: every path in a [`ResolvedPolicy`] is link-free, so entries and kernel refer to the same
//! files.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use codex_exec_server_protocol::{
    AccessMode, FileSystemEntry, FileSystemPath, FileSystemPolicy, MissingPathBehavior,
    NetworkPolicy, PathUri, PermissionProfile, RestrictedFileSystem, SandboxContext, SpecialPath,
};

use super::access::{AccessMap, exceeds};
use super::alias::ServerFiles;
use super::facts::{Facts, Mount, Node, NodeKind, Obstacle, ResolvedPath, Resolver};
use super::glob::Glob;
use super::path_trace::{self, PathTrace};
use super::paths::{is_within, order, parent};
pub use super::policy_error::PolicyError;
use super::writable_history::WritableHistory;
use super::{alias, ceiling, expand, metadata, spelling};
use crate::{Limits, OwnFiles};

/// What a program needs to start, as far as it exists.
pub const MINIMAL: [&str; 8] =
    ["/bin", "/sbin", "/usr", "/etc", "/lib", "/lib64", "/nix/store", "/run/current-system/sw"];

/// What a policy is resolved against, besides the file system.
#[derive(Debug, Clone, Copy, Default)]
pub struct Surroundings<'a> {
    /// Working directory of the process, used if the context has no `cwd`.
    pub cwd: Option<&'a Path>,
    /// `$TMPDIR` of the process.
    pub tmpdir: Option<&'a OsStr>,
}

/// An existing path with the access of its entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Access to the path and everything below it.
    pub access: AccessMode,
    /// The file at the path.
    pub node: Node,
    /// Denied because it belongs to the server.
    pub is_server_file: bool,
}

/// A name that must stay absent.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProtectedName {
    /// The existing directory.
    pub parent: PathBuf,
    /// The missing names below it; the last one is the protected name.
    pub missing: Vec<OsString>,
    /// The access of the entry: read or deny.
    pub access: AccessMode,
}

/// Devices that every program may expect.
pub(crate) const DEVICES: [&str; 6] =
    ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty"];

/// A policy with all paths resolved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvedPolicy {
    /// The access of every named path, existing or not.
    pub access: AccessMap,
    /// Existing paths, parents first (see `paths::order`).
    pub regions: Vec<(PathBuf, Region)>,
    /// Names that must not be created.
    pub protected: Vec<ProtectedName>,
    /// Links followed while resolving, with their targets.
    pub links: BTreeMap<PathBuf, PathBuf>,
    /// Links that must be neither replaced nor removed.
    pub pinned_links: BTreeMap<PathBuf, Node>,
    /// Directories that must be neither replaced nor removed.
    pub pinned_directories: BTreeSet<PathBuf>,
    /// All lookups.
    pub known: HashMap<OsString, Option<Node>>,
    /// Writable paths that do not exist.
    pub missing_roots: Vec<MissingRoot>,
    /// Patterns deny something.
    pub has_patterns: bool,
    /// The policy's own depth limit truncated the expansion of patterns.
    pub globs_truncated: bool,
    /// The host's devices stay: the entries restrict nothing.
    pub host_devices: bool,
    /// Whether the network is available.
    pub network: NetworkPolicy,
}

/// A writable path that does not exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingRoot {
    /// The existing directory, link-free.
    pub parent: PathBuf,
    /// The missing names below it.
    pub missing: Vec<OsString>,
}

impl MissingRoot {
    /// The path to create.
    pub(super) fn path(&self) -> PathBuf {
        let mut path = self.parent.clone();
        path.extend(&self.missing);
        path
    }

    /// Whether it must be created for the entry to grant anything. If the directory around it is
    /// writable, the process can create what it needs, perhaps a file; protected metadata is never
    /// created.
    fn is_needed(&self, access: &AccessMap) -> bool {
        let path = self.path();
        let is_metadata = |name: &OsStr| metadata::NAMES.iter().any(|known| name == *known);
        access.access(&path) == AccessMode::Write
            && access.access(&self.parent) != AccessMode::Write
            && !path.iter().any(is_metadata)
    }
}

/// What the server contributes to resolving a policy.
#[derive(Debug, Clone, Copy)]
pub struct ServerState<'a> {
    /// Files of the server that no policy opens.
    pub own_files: &'a OwnFiles,
    /// Where its sandboxes could have created links.
    pub writable_history: &'a WritableHistory,
    /// A policy that no other exceeds.
    pub ceiling: Option<&'a SandboxContext>,
}

/// What a policy restricts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resolved {
    /// Nothing.
    Unrestricted,
    /// The network, and the server's own files; everything else is writable.
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
    let context = &*ceiling::bounded(context, server.ceiling);
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
    let cwd = context.cwd.as_ref().map(PathUri::as_path).or(around.cwd);
    let roots: Vec<&Path> = if context.project_root_is_cwd {
        cwd.into_iter().collect()
    } else {
        context.workspace_roots.iter().map(PathUri::as_path).collect()
    };
    let mounts = facts.mounts().map_err(|error| PolicyError::Mounts(error.to_string()))?;
    let mount_table = alias::MountTable::new(&mounts);
    let tables = Tables { mounts: &mounts, mount_table: &mount_table, limits, server };
    let asked = Entries { file_system, cwd, roots: &roots, tmpdir: around.tmpdir };
    let resolving = Resolving::new(Resolver::new(facts), network, file_system.entries.len());
    let (mut resolver, mut policy) = asked.resolve(resolving, tables)?;
    policy.host_devices = grants_everything(file_system);
    if let Some(ceiling) = server.ceiling {
        let file_system = &ceiling::entries(ceiling);
        let permitted = Entries { file_system, cwd: None, roots: &[], tmpdir: None };
        let resolving = Resolving::new(resolver, network, file_system.entries.len());
        let most;
        (resolver, most) = permitted.resolve(resolving, tables)?;
        policy = ceiling::intersect(policy, most);
    }
    // A missing name needs protection only where it could be created; a link or a directory only where
    // it could be replaced.
    let access = &policy.access;
    let is_writable = |path: &Path| access.access(path) == AccessMode::Write;
    policy.protected.retain(|name| is_writable(&name.parent));
    policy.pinned_links.retain(|link, _| parent(link).is_some_and(is_writable));
    policy.pinned_directories.retain(|directory| parent(directory).is_some_and(is_writable));
    policy.missing_roots.retain(|root| root.is_needed(access));
    policy.protected.sort();
    // Nor does a name below another protected one.
    policy.protected.dedup_by(|a, b| a.parent == b.parent && a.missing.starts_with(&b.missing));
    spelling::check(&policy, facts, &mounts)?;
    Ok(Resolved::Restricted(Box::new(finished(policy, resolver))))
}

/// What entries are resolved against, the same for a request and for the ceiling.
#[derive(Clone, Copy)]
struct Tables<'a> {
    mounts: &'a [Mount],
    mount_table: &'a alias::MountTable<'a>,
    limits: &'a Limits,
    server: ServerState<'a>,
}

/// The entries of a policy, and what their special paths mean.
struct Entries<'a> {
    file_system: &'a RestrictedFileSystem,
    cwd: Option<&'a Path>,
    roots: &'a [&'a Path],
    tmpdir: Option<&'a OsStr>,
}

impl Entries<'_> {
    /// Decides on every path, by these entries alone: which of them decides on a file that is mounted twice,
    /// what is protected as metadata, and whether a process could have created a link, does not depend on
    /// the entries of another policy.
    fn resolve<'a>(
        &self,
        mut resolving: Resolving<'a>,
        tables: Tables<'_>,
    ) -> Result<(Resolver<'a>, ResolvedPolicy), PolicyError> {
        let Tables { mounts, mount_table, limits, server } = tables;
        let (file_system, cwd) = (self.file_system, self.cwd);
        let globs = resolving.entries(file_system, cwd, self.roots, self.tmpdir)?;
        let own_depth = file_system.glob_scan_max_depth.map(|depth| depth.get() as usize);
        let base = resolving.glob_base(&globs, cwd);
        let mut unlistable = Vec::new();
        if !globs.is_empty() {
            resolving.policy.has_patterns = true;
            let granted = resolving.granted(mount_table);
            let (base, resolver) = (base.as_deref(), &mut resolving.resolver);
            let found = expand::expand(&globs, base, own_depth, &granted, limits, resolver)?;
            for path in found.matches {
                resolving.pattern_match(&path);
            }
            for path in found.unlistable {
                // No entry and no pattern means this directory itself: as metadata it is still protected.
                if resolving.policy.access.named(&path).is_none() {
                    unlistable.push(path.clone());
                }
                resolving.pattern_match(&path);
            }
            resolving.traces.extend(found.traces);
            resolving.policy.globs_truncated = found.truncated;
        }
        resolving.refuse_processes(mounts)?;
        resolving.sandbox_trees();
        resolving.own_files(&server.own_files.denied, AccessMode::Deny);
        resolving.own_files(&server.own_files.read_only, AccessMode::Read);
        let Resolving { mut resolver, mut policy, mut traces, mut server_files } = resolving;
        let roots: Vec<PathBuf> = self
            .roots
            .iter()
            .filter_map(|root| match resolver.resolve(root) {
                // Cached, because it may have to be pinned.
                ResolvedPath::Found(path, _) => resolver.lookup(&path).is_ok().then_some(path),
                _ => None,
            })
            .collect();
        merge(&mut policy.regions);
        alias::merge_aliased_entries(
            &mut policy,
            &mut resolver,
            &mut traces,
            &mut server_files,
            mount_table,
        )?;
        merge(&mut policy.regions);
        let mut workspaces = roots;
        workspaces.extend(alias::writable_names(&workspaces, &policy, &mut resolver, mount_table));
        let mut unnamed = unlistable;
        unnamed.extend_from_slice(&server_files.unnamed);
        let metadata =
            metadata::protect(&mut policy, &workspaces, &unnamed, &mut resolver, &mut traces)?;
        path_trace::check(
            &traces,
            &mut policy,
            server.writable_history,
            &mut resolver,
            mount_table,
        )?;
        traces.clear();
        alias::add_aliases(
            &mut policy,
            &mut resolver,
            &mut traces,
            mounts,
            mount_table,
            &metadata,
            &server_files,
        )?;
        alias::drop_metadata_in_denied(&mut policy, &metadata, &server_files);
        path_trace::check(
            &traces,
            &mut policy,
            server.writable_history,
            &mut resolver,
            mount_table,
        )?;
        Ok((resolver, policy))
    }
}

/// Whether the entries let everything be written, and nothing else: that restricts no path, whatever more
/// of them say that something may be written.
fn grants_everything(file_system: &RestrictedFileSystem) -> bool {
    let root = FileSystemPath::Special { value: SpecialPath::Root };
    let is_write = |entry: &FileSystemEntry| entry.access == AccessMode::Write;
    file_system.entries.iter().all(is_write)
        && file_system.entries.iter().any(|entry| entry.path == root)
}

/// A policy that restricts only the network: everything is writable except the server's credentials.
/// Missing ones need no protection, since there is nothing to read.
fn network_only(facts: &dyn Facts, server: ServerState<'_>) -> Result<Resolved, PolicyError> {
    let mut resolving = Resolving::new(Resolver::new(facts), NetworkPolicy::Restricted, 1);
    let ResolvedPath::Found(root, node) = resolving.resolver.resolve(Path::new("/")) else {
        return Err(PolicyError::Unreachable {
            name: "/".into(),
            at: "/".into(),
            why: "it cannot be inspected".into(),
        });
    };
    resolving.region(root, node, AccessMode::Write);
    resolving.own_files(&server.own_files.denied, AccessMode::Deny);
    let Resolving { mut resolver, mut policy, mut traces, mut server_files } = resolving;
    policy.protected.clear();
    merge(&mut policy.regions);
    let mounts = facts.mounts().map_err(|error| PolicyError::Mounts(error.to_string()))?;
    let mount_table = alias::MountTable::new(&mounts);
    path_trace::check(&traces, &mut policy, server.writable_history, &mut resolver, &mount_table)?;
    traces.clear();
    alias::merge_aliased_entries(
        &mut policy,
        &mut resolver,
        &mut traces,
        &mut server_files,
        &mount_table,
    )?;
    alias::pin_link_aliases(&mut policy, &mount_table, &mut resolver);
    path_trace::check(&traces, &mut policy, server.writable_history, &mut resolver, &mount_table)?;
    spelling::check(&policy, facts, &mounts)?;
    Ok(Resolved::NetworkOnly(Box::new(finished(policy, resolver))))
}

/// Completes a policy.
fn finished(mut policy: ResolvedPolicy, mut resolver: Resolver<'_>) -> ResolvedPolicy {
    merge(&mut policy.regions);
    policy.links = std::mem::take(&mut resolver.links).into_iter().collect();
    policy.known = resolver.into_known();
    policy
}

struct Resolving<'a> {
    resolver: Resolver<'a>,
    policy: ResolvedPolicy,
    /// Traces that are not direct.
    traces: Vec<PathTrace>,
    server_files: ServerFiles,
}

/// Sorts regions and merges those with the same path.
fn merge(regions: &mut Vec<(PathBuf, Region)>) {
    regions.sort_by(|(a, _), (b, _)| order(a, b));
    regions.dedup_by(|(path, next), (previous, merged)| {
        let same = path.as_os_str() == previous.as_os_str();
        if same {
            merged.access = merged.access.max(next.access);
            merged.is_server_file &= next.is_server_file;
        }
        same
    });
}

impl<'a> Resolving<'a> {
    fn new(resolver: Resolver<'a>, network: NetworkPolicy, entries: usize) -> Self {
        Self {
            resolver,
            policy: ResolvedPolicy::empty(network, entries),
            traces: Vec::new(),
            server_files: ServerFiles::default(),
        }
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
                            // Not joined: an empty subpath would add a slash.
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
        let resolved = match skip_missing {
            true => self.follow(path, access),
            false => self.follow_and_protect(path, access),
        };
        match resolved {
            ResolvedPath::Found(path, node) => self.region(path, node, access),
            ResolvedPath::Missing(parent, missing) if missing.len() > metadata::MAX_MISSING => {
                let obstacle = Obstacle { path: parent, errno: libc::ENAMETOOLONG };
                self.traces.push(PathTrace::blocked(path.to_owned(), obstacle));
            }
            ResolvedPath::Missing(parent, missing) if !skip_missing => {
                let mut path = parent.clone();
                path.extend(&missing);
                self.policy.access.insert(path, access);
                if access == AccessMode::Write {
                    self.policy.missing_roots.push(MissingRoot { parent, missing });
                } else {
                    self.policy.protected.push(ProtectedName { parent, missing, access });
                }
            }
            ResolvedPath::Missing(..) | ResolvedPath::Unreachable(_) => {}
        }
    }

    /// Resolves a path, and records its trace unless it is direct.
    fn follow(&mut self, path: &Path, access: AccessMode) -> ResolvedPath {
        let (resolved, trace) = PathTrace::follow(&mut self.resolver, path, access);
        if !trace.is_direct() {
            self.traces.push(trace);
        }
        resolved
    }

    /// Like `follow`, and protects the missing directories that a restricted path leads through.
    fn follow_and_protect(&mut self, path: &Path, access: AccessMode) -> ResolvedPath {
        let traces = self.traces.len();
        let resolved = self.follow(path, access);
        for trace in &self.traces[traces..] {
            self.policy.protected.extend(trace.assumed_names());
        }
        resolved
    }

    /// The paths that entries grant, with all their aliases.
    fn granted(&self, mount_table: &alias::MountTable<'_>) -> expand::Granted {
        let mut paths = Vec::new();
        let regions = self.policy.regions.iter();
        for (path, region) in regions.filter(|(_, region)| region.access != AccessMode::Deny) {
            let others = mount_table.aliases(path, region.node.identity.mount);
            paths.extend(others.into_iter().map(|(name, _)| name));
            paths.push(path.clone());
        }
        expand::Granted::new(paths)
    }

    /// Refuses entries and patterns that lead through per-process parts of `/proc`.
    fn refuse_processes(&self, mounts: &[Mount]) -> Result<(), PolicyError> {
        let proc = (Path::new("/proc"), Path::new("/"));
        let others = mounts.iter().filter(|mount| mount.kind == "proc");
        let trees: Vec<(&Path, &Path)> =
            others.map(|mount| (&*mount.point, &*mount.root)).chain([proc]).collect();
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
        for trace in &self.traces {
            for link in &trace.links {
                refuse(&trace.name, link)?;
            }
            if let Some(target) = &trace.target {
                refuse(&trace.name, target)?;
            }
        }
        for (path, _) in self.policy.access.iter() {
            refuse(path, path)?;
        }
        Ok(())
    }

    /// The base directory of relative patterns, link-free.
    fn glob_base(&mut self, globs: &[Glob], cwd: Option<&Path>) -> Option<PathBuf> {
        let cwd = cwd.filter(|_| globs.iter().any(|glob| !glob.absolute))?;
        match self.follow(cwd, AccessMode::Deny) {
            ResolvedPath::Found(path, _) => Some(path),
            // Nothing there can match; an obstacle is recorded.
            ResolvedPath::Missing(..) | ResolvedPath::Unreachable(_) => None,
        }
    }

    /// Every sandbox has its own `/dev` and `/proc`: its `/dev` contains only what entries name, and
    /// its `/proc` is read-only.
    fn sandbox_trees(&mut self) {
        self.policy.access.set("/dev".into(), AccessMode::Deny);
        self.policy.access.set("/proc".into(), AccessMode::Read);
        for (path, region) in &mut self.policy.regions {
            if region.access == AccessMode::Write && is_within(path, Path::new("/proc")) {
                region.access = AccessMode::Read;
                self.policy.access.set(path.clone(), AccessMode::Read);
            }
        }
    }

    /// Limits the access to the server's files to `most`: its credentials, and programs that it runs
    /// outside. This overrides entries for paths inside of them too.
    fn own_files(&mut self, paths: &[PathBuf], most: AccessMode) {
        for path in paths {
            // As for a denied path: links on the way are pinned.
            let (path, node) = match self.follow_and_protect(path, AccessMode::Deny) {
                ResolvedPath::Found(path, node) => (path, node),
                // Nothing inside may create it for the server to find.
                ResolvedPath::Missing(parent, missing) => {
                    let access = AccessMode::Read;
                    self.server_files.missing.push((parent.clone(), missing.iter().collect()));
                    self.policy.protected.push(ProtectedName { parent, missing, access });
                    continue;
                }
                ResolvedPath::Unreachable(obstacle) => {
                    self.retain_obstacle(&obstacle);
                    continue;
                }
            };
            self.server_files.found.push((path.clone(), node, most));
            let exceeds = |access| exceeds(access, most);
            let policy = &mut self.policy;
            let reads_only = most == AccessMode::Read && exceeds(policy.access.access(&path));
            if policy.access.named(&path).is_none() {
                self.server_files.unnamed.push(path.clone());
            }
            let opens = |other: &Path, access| exceeds(access) && is_within(other, &path);
            policy.regions.retain(|(other, region)| !opens(other, region.access));
            policy.protected.retain(|name| !opens(&name.parent, name.access));
            policy.access.retain(|other, access| !opens(other, access));
            if reads_only || exceeds(policy.access.access(&path)) {
                policy.access.insert(path.clone(), most);
                let is_server_file = most == AccessMode::Deny;
                policy.regions.push((path, Region { access: most, node, is_server_file }));
            }
        }
    }

    /// A file where a directory would be needed prevents anything below it. Makes it read-only, so that
    /// it stays, unless an entry makes it writable.
    fn retain_obstacle(&mut self, obstacle: &Obstacle) {
        let (path, policy) = (&obstacle.path, &mut self.policy);
        if obstacle.errno == libc::ENOTDIR
            && policy.access.access(path) == AccessMode::Write
            && policy.access.named(path).is_none()
            && let Ok(Some(node)) = self.resolver.lookup(path)
            && let Some(trace) = self.traces.last_mut()
        {
            trace.obstacle = None;
            self.region(path.clone(), node, AccessMode::Read);
        }
    }

    /// Denies a path that a pattern matches. For a link, denies the target and pins the link.
    fn pattern_match(&mut self, path: &Path) {
        if let ResolvedPath::Found(path, node) = self.follow(path, AccessMode::Deny) {
            self.region(path, node, AccessMode::Deny);
        }
    }

    fn region(&mut self, path: PathBuf, node: Node, access: AccessMode) {
        self.policy.access.insert(path.clone(), access);
        self.policy.regions.push((path, Region { access, node, is_server_file: false }));
    }
}

/// Whether a path, relative to the root of a `/proc`, is per-process.
fn is_of_process(inside: &Path) -> bool {
    let first = inside.components().find_map(|component| match component {
        Component::Normal(name) => Some(name.as_bytes()),
        _ => None,
    });
    first.is_some_and(|name| {
        matches!(name, b"self" | b"thread-self") || name.iter().all(u8::is_ascii_digit)
    })
}

/// The relative path of a `subpath`.
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
    /// A policy that permits nothing, with room for this many entries.
    fn empty(network: NetworkPolicy, entries: usize) -> Self {
        Self {
            access: AccessMap::with_capacity(entries),
            regions: Vec::with_capacity(entries),
            protected: Vec::new(),
            links: BTreeMap::new(),
            pinned_links: BTreeMap::new(),
            pinned_directories: BTreeSet::new(),
            known: HashMap::new(),
            missing_roots: Vec::new(),
            has_patterns: false,
            globs_truncated: false,
            host_devices: false,
            network,
        }
    }

    /// The same policy with nothing writable but devices: it allows reading exactly what this one does,
    /// and has no names to protect.
    pub(crate) fn for_reading(&self) -> Self {
        let mut policy = self.clone();
        let is_device = |path: &Path| {
            is_within(path, Path::new("/dev")) && !is_within(path, Path::new("/dev/shm"))
        };
        for (path, region) in &mut policy.regions {
            if region.access == AccessMode::Write && !is_device(path) {
                region.access = AccessMode::Read;
            }
        }
        for (path, access) in self.access.iter() {
            if access == AccessMode::Write && !is_device(path) {
                policy.access.set(path.to_owned(), AccessMode::Read);
            }
        }
        let access = &policy.access;
        let is_writable = |path: &Path| access.access(path) == AccessMode::Write;
        policy.protected.retain(|name| is_writable(&name.parent));
        policy.pinned_links.retain(|link, _| parent(link).is_some_and(is_writable));
        policy.pinned_directories.retain(|directory| parent(directory).is_some_and(is_writable));
        policy.missing_roots.clear();
        policy
    }

    /// Whether this is one of the devices that every sandbox has. An entry for exactly the device can deny it.
    pub(crate) fn has_device(&self, path: &Path) -> bool {
        DEVICES.iter().any(|device| path == Path::new(device))
            && self.access.named(path) != Some(AccessMode::Deny)
    }

    /// The file at a region, or at a directory above one.
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
