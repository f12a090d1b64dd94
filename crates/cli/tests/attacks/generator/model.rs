//! A model of the contract for one tree under one or several policies.
//!
//! Computed from the trusted tree, before an attacker runs, and from the contract alone, without code of the
//! sandbox. Where the contract is ambiguous, the model allows more.
//!
//! Rights belong to objects (inodes). A case grants what any of its policies grants.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Component, Path, PathBuf};

use super::policy::{Access, Name, Policy};
use super::snapshot::{Kind, Snapshot};
use super::tree::is_unknown;

/// The end of a path after its links are followed.
enum Place {
    Found(PathBuf),
    Missing(PathBuf),
    Nowhere,
}

/// A path that must lead somewhere now.
fn follow(path: &Path) -> Place {
    let mut assumed = Vec::new();
    match follow_lead(path, &mut assumed) {
        place if assumed.is_empty() => place,
        _ => Place::Nowhere,
    }
}

/// A path that somebody else may follow later: a missing name before a `..` may be a directory by then,
/// and is one that may not come into being.
fn follow_lead(path: &Path, assumed: &mut Vec<PathBuf>) -> Place {
    let mut pending: Vec<PathBuf> = path.components().rev().map(|c| c.as_os_str().into()).collect();
    let mut here = PathBuf::from("/");
    let mut links = 0;
    while let Some(name) = pending.pop() {
        match name.components().next() {
            Some(Component::RootDir) => here = "/".into(),
            Some(Component::ParentDir) => {
                if here.symlink_metadata().is_err() {
                    assumed.push(here.clone());
                }
                here.pop();
            }
            Some(Component::CurDir) | None => {}
            _ => {
                here.push(&name);
                let Ok(found) = here.symlink_metadata() else {
                    let existing = here.ancestors().find(|it| it.symlink_metadata().is_ok());
                    if existing.is_some_and(|above| !above.is_dir()) {
                        return Place::Nowhere;
                    }
                    continue;
                };
                if found.is_symlink() {
                    links += 1;
                    if links > 40 {
                        return Place::Nowhere;
                    }
                    let target = std::fs::read_link(&here).unwrap();
                    here.pop();
                    pending.extend(target.components().rev().map(|c| c.as_os_str().into()));
                } else if !found.is_dir() && !pending.is_empty() {
                    return Place::Nowhere;
                }
            }
        }
    }
    match here.symlink_metadata() {
        Ok(_) => Place::Found(here),
        Err(_) => Place::Missing(here),
    }
}

/// One policy, resolved.
#[derive(Default)]
struct Resolved {
    named: HashMap<PathBuf, Access>,
    /// Denied only by a pattern: hidden, but may be renamed.
    matched: HashSet<PathBuf>,
    /// Neither the path nor a parent may be moved.
    pinned: Vec<PathBuf>,
    /// Must not be created.
    absent: Vec<PathBuf>,
    /// A missing writable root, which the server creates before a process starts.
    created: Vec<PathBuf>,
}

impl Resolved {
    fn insert(&mut self, path: PathBuf, access: Access) {
        // Deny over write over read.
        let rank = |access: Access| match access {
            Access::Read => 0,
            Access::Write => 1,
            Access::Deny => 2,
        };
        let there = self.named.entry(path).or_insert(access);
        if rank(access) > rank(*there) {
            *there = access;
        }
    }

    fn access(&self, path: &Path) -> Access {
        let nearest = path.ancestors().find_map(|above| self.named.get(above));
        nearest.copied().unwrap_or(Access::Deny)
    }

    fn parent_is_writable(&self, path: &Path) -> bool {
        path.parent().is_some_and(|parent| self.access(parent) == Access::Write)
    }

    fn new(policy: &Policy, tree: &Snapshot) -> Self {
        let mut resolved = Self::default();
        let mut missing = Vec::new();
        let mut writable = Vec::new();
        let mut entry =
            |resolved: &mut Self, path: &Path, access: Access, skip: bool| match follow(path) {
                Place::Found(path) => {
                    if access == Access::Write {
                        writable.push(path.clone());
                    } else {
                        resolved.pinned.push(path.clone());
                    }
                    resolved.insert(path, access);
                }
                Place::Missing(path) if !skip => {
                    resolved.insert(path.clone(), access);
                    if access == Access::Write {
                        resolved.created.push(path);
                    } else {
                        missing.push(path);
                    }
                }
                _ => {}
            };
        for it in &policy.entries {
            let skip = it.skip_missing;
            match &it.name {
                Name::Root => entry(&mut resolved, Path::new("/"), it.access, skip),
                Name::SlashTmp => entry(&mut resolved, Path::new("/tmp"), it.access, skip),
                Name::Path(path) => entry(&mut resolved, Path::new(path), it.access, skip),
                Name::ProjectRoots(below) => {
                    for root in &policy.roots {
                        let path = Path::new(root).join(below.as_deref().unwrap_or(""));
                        entry(&mut resolved, &path, it.access, skip);
                    }
                }
                // Nothing of the case's directory. `$TMPDIR` is that of a process, and a filesystem
                // request may know another: so it grants, but its `.git` is not counted on.
                Name::Minimal | Name::Glob(_) => {}
                Name::Tmpdir => {
                    match policy.tmpdir.as_ref().map(|tmpdir| follow(Path::new(tmpdir))) {
                        Some(Place::Found(path)) => resolved.insert(path, it.access),
                        Some(Place::Missing(path)) => {
                            resolved.insert(path.clone(), it.access);
                            if it.access == Access::Write {
                                resolved.created.push(path);
                            }
                        }
                        Some(Place::Nowhere) | None => {}
                    }
                }
            }
        }
        // Another entry may grant what one protects.
        let mut pinned = std::mem::take(&mut resolved.pinned);
        pinned.retain(|path| resolved.named.get(path) != Some(&Access::Write));
        resolved.pinned = pinned;
        // The whole disk is not the host's /dev, of which a sandbox sees what is named.
        resolved.named.insert("/dev".into(), Access::Deny);
        for it in &policy.entries {
            if let Name::Glob(pattern) = &it.name {
                for path in matches(pattern, policy, tree) {
                    resolved.insert(path.clone(), Access::Deny);
                    resolved.matched.insert(path);
                }
            }
        }
        let named_before: HashSet<PathBuf> = resolved.named.keys().cloned().collect();
        let mut kept = Vec::new();
        // Permission to write everywhere is no grant of the workspace.
        let is_granted = |path: &Path| {
            let named = path.ancestors().find(|above| resolved.named.contains_key(*above));
            named.is_some_and(|above| above.parent().is_some())
                && resolved.access(path) == Access::Write
        };
        let workspaces: Vec<PathBuf> = policy
            .roots
            .iter()
            .filter_map(|root| match follow(Path::new(root)) {
                Place::Found(path) if is_granted(&path) => Some(path),
                _ => None,
            })
            .collect();
        writable.retain(|path| resolved.access(path) == Access::Write);
        for root in writable.iter().chain(&workspaces) {
            for name in [".git", ".agents", ".codex"] {
                let path = root.join(name);
                if named_before.contains(&path) {
                    continue;
                }
                let Ok(found) = path.symlink_metadata() else {
                    if workspaces.contains(root) {
                        missing.push(path);
                    }
                    continue;
                };
                resolved.pinned.push(path.clone());
                let mut place = Place::Found(path.clone());
                if found.is_symlink() {
                    place = follow_lead(&path, &mut missing);
                }
                match place {
                    Place::Found(path) => {
                        if name == ".git" && path.is_file() {
                            pointed_to(&path, &named_before, &mut kept, &mut missing);
                        }
                        let deeper: &[&str] = if name == ".git" { &["hooks", "info"] } else { &[] };
                        linked_from(&path, deeper, &mut kept, &mut missing);
                        kept.push(path);
                    }
                    Place::Missing(path) => missing.push(path),
                    Place::Nowhere => {}
                }
            }
        }
        for path in kept {
            if resolved.access(&path) == Access::Write && !named_before.contains(&path) {
                resolved.named.insert(path.clone(), Access::Read);
                resolved.pinned.push(path);
            }
        }
        missing.retain(|path| {
            let existing = path.ancestors().skip(1).find(|above| above.exists());
            existing.is_some_and(|above| resolved.access(above) == Access::Write)
                && resolved.named.get(path) != Some(&Access::Write)
        });
        resolved.absent = missing;
        resolved
    }

    /// Every name between a writable directory and a protected path in it.
    fn names_that_stay(&self) -> HashSet<PathBuf> {
        let mut stay = HashSet::new();
        for path in &self.pinned {
            let mut path = path.as_path();
            while self.parent_is_writable(path) {
                stay.insert(path.to_owned());
                let Some(parent) = path.parent() else { break };
                path = parent;
            }
        }
        stay
    }
}

/// The directory a `.git` pointer leads to, and of the repository it is a worktree of what runs code.
fn pointed_to(
    file: &Path,
    named: &HashSet<PathBuf>,
    kept: &mut Vec<PathBuf>,
    missing: &mut Vec<PathBuf>,
) {
    let text = std::fs::read_to_string(file).unwrap();
    let Some(target) = text.strip_prefix("gitdir: ").and_then(|rest| rest.lines().next()) else {
        return;
    };
    match follow_lead(&file.parent().unwrap().join(target), missing) {
        Place::Found(path) => {
            // An entry that names the repository decides on it.
            if let Ok(common) = std::fs::read_to_string(path.join("commondir"))
                && let Place::Found(common) = follow(&path.join(common.trim_end()))
                && !named.contains(&common)
            {
                for name in ["hooks", "config"] {
                    let code = common.join(name);
                    if let Place::Found(code) = follow(&code) {
                        kept.push(code);
                    }
                }
                linked_from(&common, &["hooks", "info"], kept, missing);
            }
            linked_from(&path, &["hooks", "info"], kept, missing);
            kept.push(path);
        }
        Place::Missing(path) => missing.push(path),
        Place::Nowhere => {}
    }
}

/// The targets of links in a directory and in some of its subdirectories.
fn linked_from(
    directory: &Path,
    deeper: &[&str],
    kept: &mut Vec<PathBuf>,
    missing: &mut Vec<PathBuf>,
) {
    let mut all = vec![directory.to_owned()];
    for name in deeper {
        if let Place::Found(path) = follow(&directory.join(name)) {
            all.push(path);
        }
    }
    for directory in all {
        let Ok(names) = std::fs::read_dir(directory) else { continue };
        for link in names.map(|name| name.unwrap().path()).filter(|path| path.is_symlink()) {
            match follow_lead(&link, missing) {
                Place::Found(path) => kept.push(path),
                Place::Missing(path) => missing.push(path),
                Place::Nowhere => {}
            }
        }
    }
}

/// The files, no links, that a pattern matches within its depth.
fn matches(pattern: &str, policy: &Policy, tree: &Snapshot) -> Vec<PathBuf> {
    let Place::Found(cwd) = follow(Path::new(&policy.cwd)) else { return Vec::new() };
    let depth = policy.glob_depth.unwrap_or(6) as usize;
    let (base, pattern) = match pattern.split_once("/**/") {
        Some((base, rest)) if base.starts_with('/') => (PathBuf::from(base), format!("**/{rest}")),
        _ => (cwd, pattern.to_owned()),
    };
    let (directory, name) = pattern.rsplit_once('/').unwrap_or(("**", &pattern));
    let fits = |file: &str| match name.strip_prefix('*') {
        Some(end) => file.ends_with(end),
        None => file == name,
    };
    let all = tree.objects.iter().filter(|(_, object)| object.kind != Kind::Link);
    all.filter_map(|(path, _)| {
        let below = path.strip_prefix(&base).ok()?;
        let parent = below.parent()?;
        let there = directory == "**" || parent == Path::new(directory);
        let near = below.components().count() <= depth;
        (there && near && fits(below.file_name()?.to_str()?)).then(|| path.clone())
    })
    .collect()
}

/// What a case allows.
pub(crate) struct Model {
    pub initial: Snapshot,
    /// Inodes that may be changed.
    pub writable: HashSet<u64>,
    /// Directories that are not writable, whose entries must not change.
    pub names: BTreeMap<u64, BTreeMap<PathBuf, u64>>,
    /// Names that must keep referring to the same object.
    pub pinned: Vec<(PathBuf, u64)>,
    pub absent: Vec<PathBuf>,
    /// Directories that may be created, and their parents.
    pub created: HashSet<PathBuf>,
    /// Text that must not leak, and the inode of its file.
    pub secrets: Vec<(String, u64)>,
    /// A file to write and content to read, which show that the sandbox is usable.
    pub may_write: Option<PathBuf>,
    pub may_read: Option<(PathBuf, String)>,
    /// Whether the first policy lets a process enter its working directory.
    pub enters: bool,
}

impl Model {
    pub(crate) fn new(policies: &[Policy], initial: Snapshot) -> Self {
        let resolved: Vec<Resolved> =
            policies.iter().map(|policy| Resolved::new(policy, &initial)).collect();
        let mut rights: HashMap<u64, Access> = HashMap::new();
        let best = |path: &Path| {
            resolved.iter().map(|policy| policy.access(path)).max().unwrap_or(Access::Deny)
        };
        for (path, object) in &initial.objects {
            let right = rights.entry(object.inode).or_insert(Access::Deny);
            *right = best(path).max(*right);
        }
        let writable: HashSet<u64> = rights
            .iter()
            .filter_map(|(inode, right)| (*right == Access::Write).then_some(*inode))
            .collect();
        let mut names: BTreeMap<u64, BTreeMap<PathBuf, u64>> = BTreeMap::new();
        for (path, object) in &initial.objects {
            if object.kind == Kind::Directory && !writable.contains(&object.inode) {
                names.entry(object.inode).or_default();
            }
            if let Some(parent) = path.parent()
                && let Some(above) = initial.objects.get(parent)
                && !writable.contains(&above.inode)
            {
                names.entry(above.inode).or_default().insert(path.clone(), object.inode);
            }
        }
        // A name stays if every policy that could move it protects it.
        let stays: Vec<HashSet<PathBuf>> = resolved.iter().map(Resolved::names_that_stay).collect();
        let mut pinned = Vec::new();
        for (path, object) in &initial.objects {
            let mut could_move = resolved
                .iter()
                .zip(&stays)
                .filter(|(policy, _)| policy.parent_is_writable(path))
                .peekable();
            if could_move.peek().is_some() && could_move.all(|(_, stays)| stays.contains(path)) {
                pinned.push((path.clone(), object.inode));
            }
        }
        let mut absent: Vec<PathBuf> =
            resolved.iter().flat_map(|policy| policy.absent.clone()).collect();
        absent.retain(|path| {
            resolved
                .iter()
                .all(|policy| policy.access(path) != Access::Write || policy.absent.contains(path))
        });
        let created = resolved
            .iter()
            .flat_map(|policy| &policy.created)
            .flat_map(|path| path.ancestors().map(Path::to_owned))
            .collect();
        let mut secrets = Vec::new();
        for (path, object) in &initial.objects {
            if object.kind == Kind::File
                && rights[&object.inode] == Access::Deny
                && object.content.starts_with(b"t")
            {
                secrets.push((String::from_utf8(object.content.clone()).unwrap(), object.inode));
            }
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if is_unknown(name) {
                let above = initial.objects.get(path.parent().unwrap());
                if above.is_some_and(|above| rights[&above.inode] == Access::Deny) {
                    secrets.push((name.to_owned(), object.inode));
                }
            }
        }
        let first = &resolved[0];
        let open = |path: &Path| {
            path.ancestors().all(|above| {
                initial.objects.get(above).is_none_or(|object| object.mode & 0o700 == 0o700)
            })
        };
        let writes = initial.objects.iter().find(|(path, object)| {
            object.kind == Kind::Directory && first.access(path) == Access::Write && open(path)
        });
        let may_write = writes.map(|(path, _)| path.join("control"));
        let reads = initial.objects.iter().find(|(path, object)| {
            object.kind == Kind::File
                && object.content.starts_with(b"t")
                && first.access(path) != Access::Deny
                && path.parent().is_some_and(open)
        });
        let may_read = reads.map(|(path, object)| {
            (path.clone(), String::from_utf8(object.content.clone()).unwrap())
        });
        let enters = match follow(Path::new(&policies[0].cwd)) {
            Place::Found(cwd) => first.access(&cwd) != Access::Deny,
            _ => false,
        };
        Self {
            initial,
            writable,
            names,
            pinned,
            absent,
            created,
            secrets,
            may_write,
            may_read,
            enters,
        }
    }

    /// Whether a new path is a missing root that the server has created.
    fn may_create(&self, path: &Path, now: &Snapshot) -> bool {
        self.created.contains(path)
            && now.objects.get(path).is_some_and(|object| object.kind == Kind::Directory)
    }

    /// A change on the disk, or output, that the case does not allow.
    pub(crate) fn violation(&self, now: &Snapshot, said: &str) -> Option<String> {
        if let Some((secret, inode)) = self.secrets.iter().find(|(it, _)| said.contains(it)) {
            return Some(format!("leak: {secret} of {} came out", self.initial.name_of(*inode)));
        }
        let by_inode = now.by_inode();
        for (directory, names) in &self.names {
            // Removed objects are reported below.
            if !by_inode.contains_key(directory) {
                continue;
            }
            let mut there = now.names_in(*directory);
            there.retain(|name, _| names.contains_key(name) || !self.may_create(name, now));
            if there != *names {
                let odd = there.iter().find(|(name, inode)| names.get(*name) != Some(inode));
                let odd = odd.or_else(|| names.iter().find(|(name, _)| !there.contains_key(*name)));
                return Some(format!("names: {:?}", odd.map(|(name, _)| name)));
            }
        }
        for (path, was) in &self.initial.objects {
            if self.writable.contains(&was.inode) {
                continue;
            }
            let Some((name, is)) = by_inode.get(&was.inode) else {
                return Some(format!("gone: {}", path.display()));
            };
            let holds_created = self.created.iter().any(|it| it.parent() == Some(path));
            if let Some(difference) = was.difference(is)
                && !(holds_created && difference == "time of modification")
            {
                return Some(format!("changed: {} ({difference})", name.display()));
            }
        }
        for (path, inode) in &self.pinned {
            if now.objects.get(path).map(|object| object.inode) != Some(*inode) {
                return Some(format!("moved: {}", path.display()));
            }
        }
        for path in &self.absent {
            if let Some(object) = now.objects.get(path)
                && !now.is_placeholder(path)
                && !self.may_create(path, now)
            {
                return Some(format!("created: {} ({:o})", path.display(), object.mode));
            }
        }
        for (path, object) in &now.objects {
            if object.mode & 0o6000 != 0 {
                return Some(format!("set-id: {} ({:o})", path.display(), object.mode));
            }
            if object.kind == Kind::Device {
                return Some(format!("device: {}", path.display()));
            }
            if object.kind == Kind::File {
                let content = String::from_utf8_lossy(&object.content);
                let held = self.secrets.iter().find(|(secret, inode)| {
                    *inode != object.inode && content.contains(secret.as_str())
                });
                if let Some((secret, _)) = held {
                    return Some(format!("leak: {secret} in {}", path.display()));
                }
            }
        }
        None
    }
}
