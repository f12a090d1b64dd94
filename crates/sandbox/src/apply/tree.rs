//! Builds the tree: performs the operations of a [`Tree`] with the mount calls of Linux 5.12 and newer.
//!
//! Invariant: no link is followed, and each bound or masked file is the planned one. If names are
//! replaced meanwhile the build fails; it never goes elsewhere.

use std::borrow::Cow;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::placeholder::{self, HeldPlaceholders};
use super::proof::{self, Expected, ProvenMounts};
use super::sys::{self, ATTR_NODEV, ATTR_NOSUID, ATTR_RDONLY};
use super::{at, during, streams};
use crate::decide::facts::Identity;
use crate::decide::paths::is_within;
use crate::plan::{Base, Enforcement, Operation, SkeletonNode, Tree};
use crate::status::{CHANGED, Failure, Stage};

/// Names in the private file system.
const MASKED_DIRECTORY: &str = "masked-directory";
const MASKED_FILE: &str = "masked-file";
const PLACEHOLDER: &str = "placeholder";
const SHARED_MEMORY: &str = "shared-memory";

/// Where to mount the private file system: a path that a later mount covers.
fn scratch_mount_point(tree: &Tree) -> &'static Path {
    let is_at = |path: &Path| {
        tree.operations.iter().any(|operation| operation.path(&tree.placeholders) == path)
    };
    let dev = Path::new("/dev");
    if is_at(dev) { dev } else { Path::new("/proc") }
}

/// The terminal's name in a sandbox with its own `/dev`.
const CONSOLE: &str = "/dev/console";

pub(super) fn build(
    enforcement: &Enforcement,
    held: &HeldPlaceholders,
    terminal: Option<OwnedFd>,
    shares_pids: bool,
) -> Result<ProvenMounts, Failure> {
    let tree = &enforcement.tree;
    let terminal = terminal.filter(|_| can_mount_terminal(tree));
    let host = sys::open_absolute(Path::new("/")).map_err(during(Stage::Sources))?;
    let files = raise_descriptor_limit(tree)?;
    let sources = open_sources(tree, &host, held, shares_pids)?;
    base(tree, &host)?;
    let scratch = Scratch::make(tree, enforcement.shared_memory, terminal.is_some())?;
    let mut expected = Vec::with_capacity(tree.operations.len() + 2);
    scratch.attach_hidden(tree, &host, &mut expected)?;
    let root = match tree.base {
        Base::ReadOnlyHost | Base::WritableHost => host,
        Base::Empty => {
            let root = scratch.clone("s0", ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV)?;
            // Attach to the old root directly: another mount there would cover the new one.
            sys::attach(&root, &host).map_err(during(Stage::Root))?;
            root
        }
    };
    let attributes = match tree.base {
        Base::Empty => ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV,
        _ => base_attributes(tree),
    };
    let with_submounts = tree.base != Base::Empty;
    expected.push(expect(&root, Path::new("/"), attributes, with_submounts, Stage::Root)?);
    let mut builder = TreeBuilder { enforcement, held, root, scratch, sources };
    for (index, operation) in tree.operations.iter().enumerate() {
        expected.extend(builder.mount_operation(index, operation)?);
    }
    if let Some(terminal) = terminal {
        let path = Path::new(CONSOLE);
        let attributes = streams::TERMINAL_ATTRIBUTES;
        expected.push(expect(&terminal, path, attributes, false, Stage::Tree)?);
        sys::attach_named(&terminal, &builder.root, relative_to_root(path))
            .map_err(at(Stage::Tree, path))?;
    }
    if tree.base == Base::Empty {
        let failed = during(Stage::Root);
        rustix::process::fchdir(&builder.root).map_err(&failed)?;
        rustix::process::pivot_root(".", ".").map_err(&failed)?;
        rustix::mount::unmount(".", rustix::mount::UnmountFlags::DETACH).map_err(&failed)?;
    }
    rustix::process::chdir("/").map_err(during(Stage::Root))?;
    let proven = proof::check(&expected)?;
    if let Some(before) = files {
        let _ = setrlimit(Resource::Nofile, before);
    }
    Ok(proven)
}

/// Whether the tree has its own `/dev` without a `console`.
fn can_mount_terminal(tree: &Tree) -> bool {
    tree.operations.iter().any(|operation| match operation {
        Operation::Skeleton { path, nodes, .. } => {
            path == Path::new("/dev")
                && !nodes.iter().any(|node| node.path() == Path::new("console"))
        }
        _ => false,
    })
}

/// Records a new mount for the verification of the tree.
fn expect(
    mount: &OwnedFd,
    path: &Path,
    attributes: u64,
    with_submounts: bool,
    stage: Stage,
) -> Result<Expected, Failure> {
    let id = sys::node_of(mount).map_err(at(stage, path))?.identity.mount;
    Ok(Expected { id, path: path.to_owned(), attributes, with_submounts })
}

/// A large policy needs an open descriptor for each path while the tree is built.
fn raise_descriptor_limit(tree: &Tree) -> Result<Option<Rlimit>, Failure> {
    let before = getrlimit(Resource::Nofile);
    let needed = tree.operations.len() as u64 + 64;
    if before.current.is_none_or(|current| current >= needed) {
        return Ok(None);
    }
    let raised = Rlimit { current: before.maximum, maximum: before.maximum };
    setrlimit(Resource::Nofile, raised).map_err(during(Stage::Sources))?;
    Ok(Some(before))
}

/// Step `Sources`: opens everything to be bound, while the host's tree is still visible.
fn open_sources(
    tree: &Tree,
    host: &OwnedFd,
    held: &HeldPlaceholders,
    shares_pids: bool,
) -> Result<HashMap<usize, OwnedFd>, Failure> {
    let mut sources = HashMap::new();
    for (index, operation) in tree.operations.iter().enumerate() {
        let (path, identity) = match operation {
            // Only root can change the host's devices, and root needs no such trick.
            Operation::Bind { path, device: true, .. } => {
                let source = sys::clone_named(host, relative_to_root(path));
                sources.insert(index, source.map_err(at(Stage::Sources, path))?);
                continue;
            }
            Operation::Proc if shares_pids => {
                let source = sys::clone_named(host, Path::new("proc"));
                sources.insert(index, source.map_err(during(Stage::Proc))?);
                continue;
            }
            Operation::Bind { path, identity, .. } => {
                (Cow::Borrowed(path.as_path()), Some(identity))
            }
            Operation::PinnedLink { path, identity } => {
                (Cow::Borrowed(path.as_path()), Some(identity))
            }
            Operation::Placeholder { index, level } if is_bound(tree, held, *index, *level) => {
                (operation.path(&tree.placeholders), None)
            }
            _ => continue,
        };
        let failed = at(Stage::Sources, &path);
        let target = match sys::open_below(host, &path) {
            Ok(target) => target,
            Err(Errno::LOOP | Errno::NOENT | Errno::NOTDIR) => {
                return Err(changed(Stage::Sources, &path));
            }
            Err(errno) => return Err(failed(errno)),
        };
        if let Some(identity) = identity {
            require_identity(&target, identity, Stage::Sources, &path)?;
        }
        sources.insert(index, sys::clone_tree(&target).map_err(failed)?);
    }
    Ok(sources)
}

/// Whether what is at this level of a protected name is bound. Otherwise something of the private file
/// system is mounted there, and a source would only have to be dissolved again.
fn is_bound(tree: &Tree, held: &HeldPlaceholders, name: u32, level: u32) -> bool {
    let (placeholder, name) = (&tree.placeholders[name as usize], name as usize);
    let covered = placeholder.hidden || held.is_placeholder(name);
    held.exists(name) && !(placeholder.is_last(level) && covered)
}

fn changed(stage: Stage, path: &Path) -> Failure {
    Failure::new(
        stage,
        CHANGED,
        format!("{} was replaced while the sandbox was being built", path.display()),
    )
}

/// Mount ids differ in the new namespace; device and inode do not.
fn require_identity(
    target: &OwnedFd,
    planned: &Identity,
    stage: Stage,
    path: &Path,
) -> Result<(), Failure> {
    let found = sys::node_of(target).map_err(at(stage, path))?.identity;
    if (found.device, found.inode) == (planned.device, planned.inode) {
        Ok(())
    } else {
        Err(changed(stage, path))
    }
}

/// Step `Base`: stops propagation from the host, and makes everything that is not bound read-only.
fn base(tree: &Tree, host: &OwnedFd) -> Result<(), Failure> {
    sys::mount_attributes(host, base_attributes(tree), true).map_err(during(Stage::Base))
}

/// Attributes of every mount of the host's tree.
fn base_attributes(tree: &Tree) -> u64 {
    let has_own_devices = tree.operations.iter().any(|o| matches!(o, Operation::Terminals));
    match tree.base {
        Base::ReadOnlyHost => ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV,
        Base::WritableHost if has_own_devices => ATTR_NOSUID | ATTR_NODEV,
        Base::WritableHost => ATTR_NOSUID,
        Base::Empty => 0,
    }
}

/// The private file system, with a directory for each skeleton, mask and shared memory.
struct Scratch {
    mount: Option<OwnedFd>,
}

impl Scratch {
    /// Step `Scratch`.
    fn make(tree: &Tree, size: u64, with_terminal: bool) -> Result<Self, Failure> {
        let needed = tree.operations.iter().any(|operation| {
            matches!(
                operation,
                Operation::Skeleton { .. }
                    | Operation::Mask { .. }
                    | Operation::SharedMemory
                    | Operation::Placeholder { .. }
            )
        });
        if !needed {
            return Ok(Self { mount: None });
        }
        let failed = during(Stage::Scratch);
        let size = size.to_string();
        let options = [("mode", "0755"), ("size", size.as_str())];
        let mount =
            sys::new_mount(c"tmpfs", &options, ATTR_NOSUID | ATTR_NODEV).map_err(&failed)?;
        let umask = rustix::process::umask(Mode::empty());
        let made = fill(&mount, tree, with_terminal);
        rustix::process::umask(umask);
        made.map_err(failed)?;
        Ok(Self { mount: Some(mount) })
    }

    /// Mounts it where the new `/dev` or `/proc` will cover it. A mount outside the tree would be
    /// dissolved when its descriptor is closed, for which the kernel waits for all processors; this one
    /// goes with the whole tree. Never on the root: there it would cover the new root.
    fn attach_hidden(
        &self,
        tree: &Tree,
        host: &OwnedFd,
        expected: &mut Vec<Expected>,
    ) -> Result<(), Failure> {
        let Some(mount) = &self.mount else { return Ok(()) };
        let path = scratch_mount_point(tree);
        let target = sys::open_below(host, path).map_err(at(Stage::Scratch, path))?;
        sys::attach(mount, target).map_err(at(Stage::Scratch, path))?;
        // It goes with the old root, unless the host's tree stays.
        if tree.base != Base::Empty {
            let quiet = ATTR_NOSUID | ATTR_NODEV;
            expected.push(expect(mount, path, quiet, false, Stage::Scratch)?);
        }
        Ok(())
    }

    /// One of its directories as a separate mount.
    fn clone(&self, name: &str, attributes: u64) -> Result<OwnedFd, Failure> {
        let failed = during(Stage::Scratch);
        let mount = self.mount.as_ref().ok_or_else(|| failed(Errno::NOENT))?;
        let clone = sys::clone_named(mount, Path::new(name)).map_err(&failed)?;
        // The private file system is nodev and nosuid already.
        if attributes & ATTR_RDONLY != 0 {
            sys::mount_attributes(&clone, attributes, false).map_err(&failed)?;
        }
        Ok(clone)
    }
}

fn fill(mount: &OwnedFd, tree: &Tree, with_terminal: bool) -> rustix::io::Result<()> {
    let directory =
        |path: &Path, mode: u32| rustix::fs::mkdirat(mount, path, Mode::from_raw_mode(mode));
    let file = |path: &Path| {
        let mode = Mode::from_raw_mode(0o444);
        rustix::fs::mknodat(mount, path, FileType::RegularFile, mode, 0)
    };
    let mut masks = (false, false);
    for (index, operation) in tree.operations.iter().enumerate() {
        match operation {
            Operation::Mask { directory: true, .. } | Operation::Placeholder { .. } => {
                masks.0 = true;
            }
            Operation::Mask { directory: false, .. } => masks.1 = true,
            Operation::SharedMemory => directory(Path::new(SHARED_MEMORY), 0o1777)?,
            Operation::Skeleton { path, nodes, listable } => {
                let top = format!("s{index}");
                directory(Path::new(&top), 0o755)?;
                if with_terminal
                    && let Ok(name) = Path::new(CONSOLE).strip_prefix(path)
                    && path == Path::new("/dev")
                {
                    file(&Path::new(&top).join(name))?;
                }
                for node in nodes {
                    match node {
                        SkeletonNode::Directory(path) => {
                            directory(&Path::new(&top).join(path), 0o755)?;
                        }
                        SkeletonNode::File(path) => file(&Path::new(&top).join(path))?,
                        SkeletonNode::Link(path, target) => {
                            rustix::fs::symlinkat(target, mount, Path::new(&top).join(path))?;
                        }
                    }
                }
                if !listable {
                    // Its entries can be reached by name, but not listed.
                    hide(mount, Path::new(&top), nodes)?;
                }
            }
            _ => {}
        }
    }
    if masks.0 {
        directory(Path::new(MASKED_DIRECTORY), 0)?;
        directory(Path::new(PLACEHOLDER), placeholder::MODE)?;
    }
    if masks.1 {
        // A nonexistent device, on a nodev mount: no process can open it, whatever its capabilities.
        // Reading an empty file would succeed.
        let mode = Mode::empty();
        rustix::fs::mknodat(mount, MASKED_FILE, FileType::CharacterDevice, mode, 0)?;
    }
    Ok(())
}

fn hide(mount: &OwnedFd, top: &Path, nodes: &[SkeletonNode]) -> rustix::io::Result<()> {
    let mode = Mode::from_raw_mode(0o111);
    for node in nodes.iter().rev() {
        if let SkeletonNode::Directory(path) = node {
            rustix::fs::chmodat(mount, top.join(path), mode, rustix::fs::AtFlags::empty())?;
        }
    }
    rustix::fs::chmodat(mount, top, mode, rustix::fs::AtFlags::empty())
}

/// A mount that is ready to be attached.
struct PreparedMount {
    mount: OwnedFd,
    attributes: u64,
    /// Whether it may have submounts.
    with_submounts: bool,
}

/// Step `Tree`: performs the operations.
struct TreeBuilder<'a> {
    enforcement: &'a Enforcement,
    held: &'a HeldPlaceholders,
    root: OwnedFd,
    scratch: Scratch,
    sources: HashMap<usize, OwnedFd>,
}

impl TreeBuilder<'_> {
    /// Performs one operation.
    fn mount_operation(
        &mut self,
        index: usize,
        operation: &Operation,
    ) -> Result<Option<Expected>, Failure> {
        let path = operation.path(&self.enforcement.tree.placeholders);
        let failed = at(Stage::Tree, &path);
        let Some(prepare) = self.prepare(index, operation, &path)? else { return Ok(None) };
        let PreparedMount { mount, attributes, with_submounts } = &prepare;
        let expected = expect(mount, &path, *attributes, *with_submounts, Stage::Tree)?;
        if is_in_new_dev(operation, &path) {
            sys::attach_named(mount, &self.root, relative_to_root(&path)).map_err(failed)?;
            return Ok(Some(expected));
        }
        let target = match sys::open_below(&self.root, &path) {
            Ok(target) => target,
            // A denied path of the kernel's trees that the new ones do not have.
            Err(Errno::NOENT) if matches!(operation, Operation::Mask { identity: None, .. }) => {
                return Ok(None);
            }
            Err(Errno::LOOP | Errno::NOENT | Errno::NOTDIR) => {
                return Err(changed(Stage::Tree, &path));
            }
            Err(errno) => return Err(failed(errno)),
        };
        if let Operation::Mask { identity: Some(identity), .. } = operation {
            require_identity(&target, identity, Stage::Tree, &path)?;
        }
        sys::attach(mount, &target).map_err(failed)?;
        Ok(Some(expected))
    }

    /// The mount for an operation; `None` if there is nothing to mount.
    fn prepare(
        &mut self,
        index: usize,
        operation: &Operation,
        path: &Path,
    ) -> Result<Option<PreparedMount>, Failure> {
        let quiet = ATTR_NOSUID | ATTR_NODEV;
        let closed = quiet | ATTR_RDONLY;
        let own = |mount: OwnedFd, attributes: u64| {
            Ok(Some(PreparedMount { mount, attributes, with_submounts: false }))
        };
        match operation {
            Operation::Skeleton { path, .. } if path == Path::new("/") => Ok(None),
            Operation::Skeleton { .. } => {
                own(self.scratch.clone(&format!("s{index}"), closed)?, closed)
            }
            Operation::Mask { directory, .. } => {
                let name = if *directory { MASKED_DIRECTORY } else { MASKED_FILE };
                own(self.scratch.clone(name, closed)?, closed)
            }
            // A device can be written on a read-only mount; its mode and owner cannot.
            Operation::Bind { device: true, .. } => {
                self.bound(index, path, ATTR_NOSUID | ATTR_RDONLY)
            }
            Operation::Bind { writable: true, .. } => self.bound(index, path, quiet),
            Operation::Bind { .. } | Operation::PinnedLink { .. } => {
                self.bound(index, path, closed)
            }
            Operation::Placeholder { index: name, level } => {
                let placeholder = &self.enforcement.tree.placeholders[*name as usize];
                if !self.held.exists(*name as usize) {
                    Ok(None)
                } else if !placeholder.is_last(*level) {
                    self.bound(index, path, quiet)
                } else if placeholder.hidden {
                    own(self.scratch.clone(MASKED_DIRECTORY, closed)?, closed)
                } else if self.held.is_placeholder(*name as usize) {
                    // Keep the host's placeholder out of reach: a process inside could lock it.
                    own(self.scratch.clone(PLACEHOLDER, closed)?, closed)
                } else {
                    self.bound(index, path, closed)
                }
            }
            Operation::Proc => {
                if let Some(mount) = self.sources.get(&index) {
                    limit_watches(mount);
                    return self.bound(index, path, closed);
                }
                own(proc(self.enforcement.processes)?, closed)
            }
            Operation::Terminals => {
                let options = [("ptmxmode", "0666"), ("mode", "0620")];
                let mount = sys::new_mount(c"devpts", &options, ATTR_NOSUID);
                own(mount.map_err(at(Stage::Tree, path))?, ATTR_NOSUID)
            }
            Operation::SharedMemory => own(self.scratch.clone(SHARED_MEMORY, quiet)?, quiet),
        }
    }

    /// A source from the host, with these attributes.
    fn bound(
        &mut self,
        index: usize,
        path: &Path,
        attributes: u64,
    ) -> Result<Option<PreparedMount>, Failure> {
        let Some(mount) = self.sources.remove(&index) else { return Ok(None) };
        sys::mount_attributes(&mount, attributes, true).map_err(at(Stage::Tree, path))?;
        Ok(Some(PreparedMount { mount, attributes, with_submounts: true }))
    }
}

/// Whether the path is in the new `/dev`, where no other process changes names.
fn is_in_new_dev(operation: &Operation, path: &Path) -> bool {
    match operation {
        Operation::Terminals | Operation::SharedMemory => true,
        Operation::Bind { device: true, .. } => is_within(path, Path::new("/dev")),
        _ => false,
    }
}

/// A path relative to the root.
fn relative_to_root(path: &Path) -> &Path {
    path.strip_prefix("/").unwrap_or(path)
}

/// Step `Proc`: a `/proc` that shows only this namespace's processes and is read-only: root inside is
/// still user 0, who may write to `/proc/sys`.
fn proc(processes: u32) -> Result<OwnedFd, Failure> {
    let failed = during(Stage::Proc);
    let mount = sys::new_mount(c"proc", &[], ATTR_NOSUID | ATTR_NODEV).map_err(&failed)?;
    limit_pids(&mount, processes);
    limit_watches(&mount);
    sys::mount_attributes(&mount, ATTR_NOSUID | ATTR_NODEV | ATTR_RDONLY, false)
        .map_err(&failed)?;
    Ok(mount)
}

/// Limits the processes of this PID namespace, including root's, where the kernel supports that (6.14).
/// On older kernels the limit is machine-wide, and this namespace cannot set it.
fn limit_pids(proc: &OwnedFd, processes: u32) {
    // The kernel reserves the first 300 pids once it has wrapped around.
    set(proc, "sys/kernel/pid_max", u64::from(processes.saturating_add(300).min(4_194_304)));
}

/// Limits resources that are counted per user to half of the user's limit, to leave some to other
/// sandboxes.
fn limit_watches(proc: &OwnedFd) {
    for (all, own) in [
        ("sys/fs/inotify/max_user_instances", "sys/user/max_inotify_instances"),
        ("sys/fs/inotify/max_user_watches", "sys/user/max_inotify_watches"),
    ] {
        if let Some(limit) = get(proc, all) {
            set(proc, own, limit / 2);
        }
    }
}

fn get(proc: &OwnedFd, name: &str) -> Option<u64> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file = rustix::fs::openat(proc, name, flags, Mode::empty()).ok()?;
    let mut text = [0; 32];
    let read = rustix::io::read(&file, &mut text).ok()?;
    std::str::from_utf8(&text[..read]).ok()?.trim().parse().ok()
}

/// Best effort: older kernels have no such limit.
fn set(proc: &OwnedFd, name: &str, value: u64) {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    if let Ok(file) = rustix::fs::openat(proc, name, flags, Mode::empty()) {
        let _ = rustix::io::write(&file, value.to_string().as_bytes());
    }
}
