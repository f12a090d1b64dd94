//! Turns a resolved policy into the ordered steps of a plan.
//!
//! Invariant: one pass over the regions in path order, with the enclosing regions on a stack, so the
//! cost is linear; a step is emitted only where the access changes.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use codex_exec_server_protocol::{AccessMode, Assurance, NetworkPolicy};

use super::landlock_only;
use super::{
    Base, Enforcement, Grant, Isolation, Operation, Placeholder, Rule, SkeletonNode, Tree,
};
use crate::Limits;
use crate::capabilities::Capabilities;
use crate::decide::facts::{Facts, NodeKind};
use crate::decide::paths::{ancestors, is_within, order, parent};
use crate::decide::policy::{DEVICES, Region, Resolved, ResolvedPolicy};

/// Why a policy cannot be enforced on this machine. Nothing has run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The machine lacks something.
    #[error("{reason}; {remedy}")]
    Unsupported {
        /// What is missing.
        reason: String,
        /// How to get it.
        remedy: String,
    },
    /// The policy protects too many missing names.
    #[error("the policy protects {found} names that do not exist yet; at most {limit} can be")]
    Placeholders {
        /// Their number.
        found: usize,
        /// The maximum.
        limit: usize,
    },
}

/// Where devices are.
const DEV: &str = "/dev";

/// Links that every program may expect in `/dev`.
const DEVICE_LINKS: [(&str, &str); 5] = [
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
];

/// Builds the steps for a resolved policy; `None` if there is nothing to enforce.
pub(crate) fn build(
    resolved: &Resolved,
    facts: &dyn Facts,
    capabilities: &Capabilities,
    limits: &Limits,
) -> Result<Option<Enforcement>, PlanError> {
    let (tree, rules, network) = match resolved {
        Resolved::Unrestricted => return Ok(None),
        Resolved::NetworkOnly(policy) => {
            (tree(policy, facts, capabilities, Devices::Host)?, None, policy.network)
        }
        Resolved::Restricted(policy) => {
            if policy.protected.len() > limits.placeholders {
                return Err(PlanError::Placeholders {
                    found: policy.protected.len(),
                    limit: limits.placeholders,
                });
            }
            let devices = if policy.host_devices { Devices::Host } else { Devices::Own };
            (tree(policy, facts, capabilities, devices)?, Some(rules(policy)), policy.network)
        }
    };
    let mut enforcement = Enforcement {
        isolation: Isolation::Namespaces,
        assurance: capabilities.assurance().unwrap_or(Assurance::Landlock),
        tree,
        rules,
        network_restricted: network == NetworkPolicy::Restricted,
        processes: limits.processes,
        shared_memory: limits.shared_memory,
    };
    if !capabilities.namespaces() {
        landlock_only::convert(&mut enforcement, resolved, facts, capabilities)?;
    }
    Ok(Some(enforcement))
}

/// A region around the current one.
struct Enclosing<'a> {
    path: &'a Path,
    access: AccessMode,
    /// Its skeleton operation, if it is denied and something inside is granted.
    skeleton: Option<usize>,
    /// Its mask operation, until something inside turns out to be granted.
    mask: Option<usize>,
}

/// What `/dev` contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Devices {
    /// A few devices, and what the policy names in the host's.
    Own,
    /// The host's `/dev`, unchanged.
    Host,
}

fn tree(
    policy: &ResolvedPolicy,
    facts: &dyn Facts,
    capabilities: &Capabilities,
    devices: Devices,
) -> Result<Tree, PlanError> {
    let root = Path::new("/");
    let (base, root_access) = match policy.region(root).map(|region| region.access) {
        Some(AccessMode::Write) => (Base::WritableHost, AccessMode::Write),
        Some(AccessMode::Read) => (Base::ReadOnlyHost, AccessMode::Read),
        Some(AccessMode::Deny) | None => (Base::Empty, AccessMode::Deny),
    };
    let mut building = Building::default();
    let mut stack = vec![Enclosing { path: root, access: root_access, skeleton: None, mask: None }];
    if base == Base::Empty {
        stack[0].skeleton = Some(building.skeleton(root, true));
    }
    building.proc(stack[0].skeleton);
    if devices == Devices::Own {
        building.dev(policy, facts, stack[0].skeleton);
    }
    let dev = Path::new(DEV);
    for (path, region) in &policy.regions {
        let is_own_tree = path == Path::new("/proc") || building.dev.is_some() && path == dev;
        if is_own_tree && region.access == AccessMode::Deny {
            return Err(PlanError::Unsupported {
                reason: format!("`{}` cannot be denied as a whole", path.display()),
                remedy: "remove the entry: the sandbox has its own; deny paths inside of it"
                    .to_owned(),
            });
        }
        if path == root || path == dev || building.devices.contains(path) {
            continue;
        }
        if is_within(path, Path::new("/proc")) {
            // The sandbox has its own `/proc`; only denied paths in it make a difference.
            if region.access == AccessMode::Deny && path != Path::new("/proc") {
                building.operations.push(Operation::Mask {
                    path: path.clone(),
                    identity: None,
                    directory: region.is_directory(),
                    is_server_file: region.is_server_file,
                });
            }
            continue;
        }
        while !is_within(path, stack[stack.len() - 1].path) {
            stack.pop();
        }
        if building.dev.is_some()
            && is_within(path, dev)
            && !stack.iter().any(|above| above.path == dev)
        {
            // The sandbox's own `/dev` is empty except for what is named.
            let skeleton = building.dev;
            stack.push(Enclosing { path: dev, access: AccessMode::Deny, skeleton, mask: None });
        }
        let above = stack.len() - 1;
        if stack[above].access == region.access {
            continue;
        }
        if stack[above].access == AccessMode::Write {
            building.pin_ancestors(path, stack[above].path, policy);
        }
        let mut mask = None;
        building.mounted.insert(path.as_os_str());
        if region.access == AccessMode::Deny {
            mask = Some(building.operations.len());
            building.operations.push(Operation::Mask {
                path: path.clone(),
                identity: Some(region.node.identity),
                directory: region.is_directory(),
                is_server_file: region.is_server_file,
            });
        } else {
            let enclosing = &mut stack[above];
            if let Some(index) = enclosing.mask.take() {
                building.mask_to_skeleton(index);
                enclosing.skeleton = Some(index);
            }
            if let Some(index) = enclosing.skeleton {
                let inside = path.strip_prefix(enclosing.path).unwrap_or(path);
                building.mount_point(index, inside, region.is_directory());
            }
            let (writable, device) =
                (region.access == AccessMode::Write, building.is_device(path, region));
            // A device is writable on any mount; only a missing Landlock rule prevents that, and a rule
            // for a directory around it cannot be narrowed.
            let below_writable = || {
                policy.regions.iter().any(|(around, region)| {
                    region.access == AccessMode::Write && around != path && is_within(path, around)
                })
            };
            if device && !writable && (capabilities.landlock_abi == 0 || below_writable()) {
                return Err(PlanError::Unsupported {
                    reason: format!("the device `{}` cannot be made read-only", path.display()),
                    remedy: "grant write access to it, or no access".to_owned(),
                });
            }
            let identity = region.node.identity;
            building.operations.push(Operation::Bind {
                path: path.clone(),
                identity,
                writable,
                device,
            });
        }
        stack.push(Enclosing { path, access: region.access, skeleton: None, mask });
    }
    building.links(policy);
    for name in &policy.protected {
        building.pin_with_ancestors(&name.parent, policy);
    }
    for path in policy.pinned_links.keys() {
        building.pin_with_ancestors(parent(path).unwrap_or(root), policy);
    }
    for path in &policy.pinned_directories {
        building.pin_with_ancestors(path, policy);
    }
    for (path, node) in &policy.pinned_links {
        building
            .operations
            .push(Operation::PinnedLink { path: path.clone(), identity: node.identity });
    }
    let placeholders: Vec<Placeholder> = policy
        .protected
        .iter()
        .map(|name| Placeholder {
            parent: name.parent.clone(),
            missing: name.missing.clone(),
            hidden: name.access == AccessMode::Deny,
        })
        .collect();
    for (index, placeholder) in placeholders.iter().enumerate() {
        for level in 0..placeholder.missing.len() as u32 {
            building.operations.push(Operation::Placeholder { index: index as u32, level });
        }
    }
    if let Some(unknown) = building.unknown {
        return Err(PlanError::Unsupported {
            reason: format!("the name `{}` cannot be protected", unknown.display()),
            remedy: "this is a bug; please report it".to_owned(),
        });
    }
    Ok(Tree { base, operations: building.finish(&placeholders), placeholders })
}

#[derive(Default)]
struct Building<'a> {
    operations: Vec<Operation>,
    /// The nodes of each skeleton, by the index of its operation.
    nodes: BTreeMap<usize, BTreeMap<PathBuf, SkeletonNode>>,
    /// Directories that were made mount points, so that they cannot be renamed.
    pinned: HashSet<OsString>,
    /// Paths that are mount points already.
    mounted: HashSet<&'a OsStr>,
    /// A directory that must not be renamed but is unknown or not writable.
    unknown: Option<PathBuf>,
    /// The skeleton of `/dev`.
    dev: Option<usize>,
    /// The file system that the host's `/dev` is on.
    dev_file_system: Option<(u32, u32)>,
    /// Devices that every sandbox has.
    devices: BTreeSet<PathBuf>,
}

impl<'a> Building<'a> {
    fn skeleton(&mut self, path: &Path, listable: bool) -> usize {
        let index = self.operations.len();
        self.operations.push(Operation::Skeleton {
            path: path.to_owned(),
            nodes: Vec::new(),
            listable,
        });
        self.nodes.insert(index, BTreeMap::new());
        index
    }

    fn mask_to_skeleton(&mut self, index: usize) {
        if let Operation::Mask { path, .. } = &self.operations[index] {
            let path = path.clone();
            self.operations[index] =
                Operation::Skeleton { path, nodes: Vec::new(), listable: false };
            self.nodes.insert(index, BTreeMap::new());
        }
    }

    /// Creates a mount point inside a skeleton.
    fn mount_point(&mut self, skeleton: usize, inside: &Path, directory: bool) {
        let Some(nodes) = self.nodes.get_mut(&skeleton) else { return };
        for above in inside.ancestors().skip(1) {
            if !above.as_os_str().is_empty() {
                nodes
                    .entry(above.to_owned())
                    .or_insert_with(|| SkeletonNode::Directory(above.to_owned()));
            }
        }
        nodes.entry(inside.to_owned()).or_insert_with(|| {
            if directory {
                SkeletonNode::Directory(inside.to_owned())
            } else {
                SkeletonNode::File(inside.to_owned())
            }
        });
    }

    /// A directory above a protected path could be renamed and replaced; a mount point cannot. So each
    /// directory between a protected path and the enclosing mount is bound onto itself.
    fn pin_ancestors(&mut self, path: &Path, mount: &Path, policy: &ResolvedPolicy) {
        let Some(above) = parent(path) else { return };
        for directory in ancestors(above).take_while(|directory| *directory != mount) {
            let name = directory.as_os_str();
            if self.pinned.contains(name) || self.mounted.contains(name) {
                break;
            }
            let node = policy.node(directory);
            let is_writable = policy.access.access(directory) == AccessMode::Write;
            let Some(node) = node.filter(|_| is_writable) else {
                self.unknown = Some(directory.to_owned());
                return;
            };
            self.pinned.insert(name.to_owned());
            self.operations.push(Operation::Bind {
                path: directory.to_owned(),
                identity: node.identity,
                writable: true,
                device: false,
            });
        }
    }

    /// Pins a directory and its ancestors up to the enclosing mount.
    fn pin_with_ancestors(&mut self, directory: &Path, policy: &ResolvedPolicy) {
        let root = Path::new("/");
        let mount = ancestors(directory).find(|above| self.mounted.contains(above.as_os_str()));
        let mount = mount.unwrap_or(root).to_owned();
        if directory != mount {
            self.pin_ancestors(&directory.join("."), &mount, policy);
        }
    }

    /// A new `/proc`: no sandbox shares the host's.
    fn proc(&mut self, root: Option<usize>) {
        if let Some(root) = root {
            self.mount_point(root, Path::new("proc"), true);
        }
        self.operations.push(Operation::Proc);
    }

    /// A `/dev` for the sandbox.
    fn dev(&mut self, policy: &ResolvedPolicy, facts: &dyn Facts, root: Option<usize>) {
        if let Some(root) = root {
            self.mount_point(root, Path::new("dev"), true);
        }
        let dev = Path::new(DEV);
        let skeleton = self.skeleton(dev, true);
        self.dev = Some(skeleton);
        self.mounted.insert(OsStr::new(DEV));
        self.dev_file_system = facts.lookup(dev).ok().map(|node| node.identity.device);
        for path in DEVICES.map(PathBuf::from) {
            if !policy.has_device(&path) {
                continue;
            }
            if let Ok(node) = facts.lookup(&path) {
                self.mount_point(skeleton, path.strip_prefix(dev).unwrap_or(&path), false);
                self.operations.push(Operation::Bind {
                    path: path.clone(),
                    identity: node.identity,
                    writable: true,
                    device: true,
                });
                self.devices.insert(path);
            }
        }
        let named_within = |own: &Path| policy.regions.iter().any(|(path, _)| is_within(path, own));
        if !named_within(&dev.join("pts")) {
            self.mount_point(skeleton, Path::new("pts"), true);
            self.operations.push(Operation::Terminals);
        }
        let writes = policy.regions.iter().any(|(_, region)| region.access == AccessMode::Write);
        if writes && !named_within(&dev.join("shm")) {
            self.mount_point(skeleton, Path::new("shm"), true);
            self.operations.push(Operation::SharedMemory);
        }
        if let Some(nodes) = self.nodes.get_mut(&skeleton) {
            for (link, target) in DEVICE_LINKS {
                nodes.insert(link.into(), SkeletonNode::Link(link.into(), target.into()));
            }
        }
    }

    /// Whether a region in `/dev` is a device or a directory of devices. Other file systems there
    /// (shared memory, huge pages) hold files.
    fn is_device(&self, path: &Path, region: &Region) -> bool {
        is_within(path, Path::new(DEV))
            && (region.node.kind == NodeKind::Other
                || Some(region.node.identity.device) == self.dev_file_system
                || is_within(path, Path::new("/dev/pts")))
    }

    /// Creates the links in skeletons that lead to granted paths: `/bin` as a link to `usr/bin`, for
    /// example.
    fn links(&mut self, policy: &ResolvedPolicy) {
        let skeletons: Vec<(PathBuf, usize)> = self
            .nodes
            .keys()
            .filter_map(|&index| match &self.operations[index] {
                Operation::Skeleton { path, .. } => Some((path.clone(), index)),
                _ => None,
            })
            .collect();
        let at: BTreeMap<&Path, usize> =
            skeletons.iter().map(|(path, index)| (path.as_path(), *index)).collect();
        for (link, target) in &policy.links {
            // The nearest region above decides whether the link exists anyway.
            let nearest = link.ancestors().skip(1).find_map(|above| {
                let skeleton = at.get(above).copied();
                let granted =
                    policy.region(above).is_some_and(|region| region.access != AccessMode::Deny);
                (skeleton.is_some() || granted).then_some((above, skeleton))
            });
            let Some((above, Some(skeleton))) = nearest else { continue };
            let Ok(inside) = link.strip_prefix(above) else { continue };
            self.mount_point(skeleton, inside, true);
            if let Some(nodes) = self.nodes.get_mut(&skeleton) {
                nodes.insert(
                    inside.to_owned(),
                    SkeletonNode::Link(inside.to_owned(), target.clone()),
                );
            }
        }
    }

    fn finish(self, placeholders: &[Placeholder]) -> Vec<Operation> {
        let Self { mut operations, mut nodes, .. } = self;
        for (index, operation) in operations.iter_mut().enumerate() {
            if let Operation::Skeleton { nodes: held, .. } = operation {
                *held = nodes.remove(&index).unwrap_or_default().into_values().collect();
            }
        }
        // Stable, so that equal paths keep their order.
        operations.sort_by(|a, b| order(&a.path(placeholders), &b.path(placeholders)));
        operations
    }
}

impl Operation {
    /// The path that the operation applies to.
    pub fn path<'p>(&'p self, placeholders: &[Placeholder]) -> Cow<'p, Path> {
        match self {
            Self::Skeleton { path, .. }
            | Self::Bind { path, .. }
            | Self::Mask { path, .. }
            | Self::PinnedLink { path, .. } => Cow::Borrowed(path),
            Self::Placeholder { index, level } => Cow::Owned(
                placeholders
                    .get(*index as usize)
                    .map(|placeholder| placeholder.path_to(*level as usize + 1))
                    .unwrap_or_default(),
            ),
            Self::Proc => Cow::Borrowed(Path::new("/proc")),
            Self::Terminals => Cow::Borrowed(Path::new("/dev/pts")),
            Self::SharedMemory => Cow::Borrowed(Path::new("/dev/shm")),
        }
    }
}

/// The Landlock rules: coarser than the tree, since a rule cannot revoke what one above it grants.
fn rules(policy: &ResolvedPolicy) -> Vec<Rule> {
    let mut rules: Vec<Rule> = Vec::new();
    let mut stack: Vec<(&Path, AccessMode)> = Vec::new();
    for (path, region) in &policy.regions {
        while stack.last().is_some_and(|(above, _)| !is_within(path, above)) {
            stack.pop();
        }
        let above = stack.iter().map(|(_, access)| *access).max();
        let grant = match region.access {
            AccessMode::Deny => continue,
            AccessMode::Read => Grant::Read,
            AccessMode::Write => Grant::Write,
        };
        if above.is_none_or(|above| above < region.access) {
            rules.push(Rule { path: path.clone(), grant });
            stack.push((path, region.access));
        }
    }
    let shared_memory = rules.iter().any(|rule| rule.grant == Grant::Write);
    rules.push(Rule { path: "/proc".into(), grant: Grant::Read });
    // A device can be written to on a read-only mount, so grant writing only to these.
    rules.push(Rule { path: DEV.into(), grant: Grant::Read });
    let devices = DEVICES.map(PathBuf::from).into_iter();
    rules.extend(devices.map(|path| Rule { path, grant: Grant::Device }));
    rules.push(Rule { path: "/dev/pts".into(), grant: Grant::Device });
    if shared_memory {
        rules.push(Rule { path: "/dev/shm".into(), grant: Grant::Write });
    }
    rules
}
