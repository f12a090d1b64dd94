//! Files that are mounted more than once: random mounts, entries, patterns, files of the server and
//! metadata, decided in memory and compared with the documented rule.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use codex_exec_server_protocol::{AccessMode, FileSystemEntry, SandboxContext};
use codex_linux_sandbox::decide::facts::{Facts, Identity, Mount, Node, NodeKind};
use codex_linux_sandbox::decide::glob::Glob;
use codex_linux_sandbox::decide::policy::{
    PolicyError, Resolved, ResolvedPolicy, ServerState, Surroundings, resolve,
};
use codex_linux_sandbox::decide::writable_history::WritableHistory;
use codex_linux_sandbox::{Limits, OwnFiles};

use super::decisions::{context, path_entry};
use super::support::{Random, glob, root};

/// A file: the number of its disk, and its path there.
type Object = (u32, PathBuf);

/// Two disks, and what of them is mounted where.
#[derive(Default)]
struct Machine {
    /// Files with their content; directories have none.
    disks: [BTreeMap<PathBuf, Option<String>>; 2],
    mounts: Vec<Mount>,
}

const NAMES: [&str; 3] = ["a", "b", "c"];

impl Machine {
    /// Three levels on each disk, of which the last is files; the second disk is at `/b/b`.
    fn new() -> Self {
        let mut machine = Self::default();
        for disk in &mut machine.disks {
            disk.insert("/".into(), None);
            for first in NAMES {
                disk.insert(format!("/{first}").into(), None);
                for second in NAMES {
                    disk.insert(format!("/{first}/{second}").into(), None);
                    for third in NAMES {
                        let file = format!("/{first}/{second}/{third}");
                        disk.insert(file.into(), Some(String::new()));
                    }
                }
            }
        }
        machine.mount(0, Path::new("/"), Path::new("/"));
        machine.mount(1, Path::new("/"), Path::new("/b/b"));
        machine
    }

    fn mount(&mut self, disk: u32, root: &Path, point: &Path) {
        self.mounts.push(Mount {
            id: self.mounts.len() as u64 + 1,
            file_system: (8, disk),
            root: root.to_owned(),
            point: point.to_owned(),
            kind: "ext4".to_owned(),
        });
    }

    fn mount_of(&self, path: &Path) -> &Mount {
        let around = self.mounts.iter().filter(|mount| path.starts_with(&mount.point));
        around.max_by_key(|mount| mount.point.components().count()).unwrap()
    }

    /// Which file a path would lead to.
    fn object(&self, path: &Path) -> Object {
        let mount = self.mount_of(path);
        let below = path.strip_prefix(&mount.point).unwrap();
        (mount.file_system.1, mount.root.components().chain(below.components()).collect())
    }

    fn content(&self, path: &Path) -> Option<&Option<String>> {
        let (disk, inside) = self.object(path);
        self.disks[disk as usize].get(&inside)
    }

    /// Every path that there is.
    fn paths(&self) -> Vec<PathBuf> {
        let mut paths = vec![PathBuf::from("/")];
        let mut next = 0;
        while let Some(path) = paths.get(next).cloned() {
            next += 1;
            if self.content(&path) == Some(&None) {
                let (disk, inside) = self.object(&path);
                let below =
                    self.disks[disk as usize].keys().filter(|it| it.parent() == Some(&inside));
                paths.extend(below.map(|it| path.join(it.file_name().unwrap())));
            }
        }
        paths
    }
}

impl Facts for Machine {
    fn lookup(&self, path: &Path) -> io::Result<Node> {
        let content = self.content(path).ok_or(io::ErrorKind::NotFound)?;
        let (disk, inside) = self.object(path);
        let inode = self.disks[disk as usize].keys().position(|it| *it == inside).unwrap() as u64;
        let kind = if content.is_none() { NodeKind::Directory } else { NodeKind::File };
        let mount = self.mount_of(path).id;
        Ok(Node { kind, identity: Identity { device: (8, disk), inode, mount } })
    }

    fn read_link(&self, _: &Path) -> io::Result<PathBuf> {
        Err(io::ErrorKind::InvalidInput.into())
    }

    fn list(&self, path: &Path) -> io::Result<Vec<(OsString, NodeKind)>> {
        let (disk, inside) = self.object(path);
        let names = self.disks[disk as usize].iter().filter(|(it, _)| it.parent() == Some(&inside));
        Ok(names
            .map(|(it, content)| {
                let kind = if content.is_none() { NodeKind::Directory } else { NodeKind::File };
                (it.file_name().unwrap().to_owned(), kind)
            })
            .collect())
    }

    fn read_start(&self, path: &Path) -> io::Result<Vec<u8>> {
        let content = self.content(path).and_then(Option::as_ref);
        Ok(content.ok_or(io::ErrorKind::InvalidInput)?.clone().into_bytes())
    }

    fn mounts(&self) -> io::Result<Vec<Mount>> {
        Ok(self.mounts.clone())
    }
}

/// A machine, what a policy says of it, and what the server has on it.
struct Case {
    machine: Machine,
    entries: Vec<(PathBuf, AccessMode)>,
    patterns: Vec<String>,
    own: Vec<(PathBuf, AccessMode)>,
    /// What `.git` of the workspace leads to.
    git: Option<PathBuf>,
}

const PATTERNS: [&str; 6] = ["/**/a", "/a/**", "**/b", "/**/b/c", "/c/*/", "/b/b/**"];

fn generate(seed: u64) -> Case {
    let mut random = Random(seed);
    let mut machine = Machine::new();
    let git = (random.below(2) == 0).then(|| PathBuf::from("/c/.git"));
    if let Some(git) = &git {
        machine.disks[0].insert(git.clone(), Some(String::new()));
    }
    for _ in 0..random.below(4) {
        let paths = machine.paths();
        let point = random.pick(&paths[1..]).clone();
        // Nothing that is mounted is covered, and the workspace stays where it is.
        if machine.mounts.iter().any(|mount| mount.point.starts_with(&point))
            || Path::new("/c/.git").starts_with(&point)
        {
            continue;
        }
        let disk = random.below(2) as u32;
        let is_directory = machine.content(&point) == Some(&None);
        let roots: Vec<PathBuf> = machine.disks[disk as usize]
            .iter()
            .filter(|(_, content)| content.is_none() == is_directory)
            .map(|(path, _)| path.clone())
            .collect();
        let root = random.pick(&roots).clone();
        machine.mount(disk, &root, &point);
    }
    let paths = machine.paths();
    let target = git.map(|pointer| {
        let target = random.pick(&paths[1..]).clone();
        machine.disks[0].insert(pointer, Some(format!("gitdir: {}\n", target.display())));
        target
    });
    let some = [AccessMode::Read, AccessMode::Write, AccessMode::Deny];
    let mut entries: Vec<(PathBuf, AccessMode)> = Vec::new();
    if random.below(4) > 0 {
        entries.push(("/".into(), some[random.below(2)]));
    }
    if random.below(3) > 0 {
        entries.push(("/c".into(), AccessMode::Write));
    }
    for _ in 0..random.below(6) {
        entries.push((random.pick(&paths[1..]).clone(), *random.pick(&some)));
    }
    let mut own = Vec::new();
    for most in [AccessMode::Deny, AccessMode::Read] {
        if random.below(4) == 0 {
            own.push((random.pick(&paths[1..]).clone(), most));
        }
    }
    let patterns = (0..random.below(4) / 2).map(|_| (*random.pick(&PATTERNS)).to_owned());
    let patterns = patterns.collect();
    Case { machine, entries, patterns, own, git: target }
}

fn rank(access: AccessMode) -> u8 {
    match access {
        AccessMode::Deny => 0,
        AccessMode::Read => 1,
        AccessMode::Write => 2,
    }
}

fn less(a: AccessMode, b: AccessMode) -> AccessMode {
    if rank(a) <= rank(b) { a } else { b }
}

/// Of entries that lead to a path, given by how long each is: the longest; deny over write over read.
fn decides(leading: impl Iterator<Item = (usize, AccessMode)>) -> Option<AccessMode> {
    let order = |access| match access {
        AccessMode::Read => 0,
        AccessMode::Write => 1,
        AccessMode::Deny => 2,
    };
    leading.max_by_key(|(length, access)| (*length, order(*access))).map(|(_, access)| access)
}

fn as_entry((path, access): &(PathBuf, AccessMode)) -> FileSystemEntry {
    match path.to_str().unwrap() {
        "/" => root(*access),
        path => path_entry(path, *access),
    }
}

impl Case {
    fn resolved(&self) -> Result<ResolvedPolicy, PolicyError> {
        self.resolved_below(None)
    }

    fn resolved_below(
        &self,
        ceiling: Option<&SandboxContext>,
    ) -> Result<ResolvedPolicy, PolicyError> {
        let mut entries: Vec<FileSystemEntry> = self.entries.iter().map(as_entry).collect();
        entries.extend(self.patterns.iter().map(|pattern| glob(pattern)));
        let mut asked = context(entries);
        asked.cwd = Some("/c".parse().unwrap());
        asked.workspace_roots = vec!["/c".parse().unwrap()];
        let own = |most| {
            let of = self.own.iter().filter(move |(_, access)| *access == most);
            of.map(|(path, _)| path.clone()).collect()
        };
        let own = OwnFiles { denied: own(AccessMode::Deny), read_only: own(AccessMode::Read) };
        let writable_history = WritableHistory::default();
        let state = ServerState { own_files: &own, writable_history: &writable_history, ceiling };
        let limits = Limits::default();
        match resolve(&asked, Surroundings::default(), &self.machine, &limits, state)? {
            Resolved::Restricted(policy) => Ok(*policy),
            other => panic!("{other:?}"),
        }
    }

    /// The entries, and every match of a pattern as one; but for matches below another, unless something
    /// is granted between the two or further below: all there is denied with the one above.
    fn all_entries(&self, paths: &[PathBuf]) -> Vec<(PathBuf, AccessMode)> {
        let mut matches: Vec<&PathBuf> = Vec::new();
        for pattern in &self.patterns {
            let glob = Glob::parse(pattern).unwrap();
            let base = Path::new(if glob.absolute { "/" } else { "/c" });
            matches.extend(paths.iter().filter(|path| {
                let fits = !glob.directories_only || self.machine.content(path) == Some(&None);
                let below = path.strip_prefix(base).ok().filter(|below| *below != Path::new(""));
                fits && below.is_some_and(|below| glob.matches(below.iter()))
            }));
        }
        let grants = self.entries.iter().filter(|(_, access)| *access != AccessMode::Deny);
        let grants: Vec<Object> = grants.map(|(path, _)| self.machine.object(path)).collect();
        let granted: Vec<&PathBuf> =
            paths.iter().filter(|path| grants.contains(&self.machine.object(path))).collect();
        let counts = |path: &PathBuf| {
            let mut above =
                matches.iter().filter(|above| path != **above && path.starts_with(above));
            above.all(|above| {
                let mut below = granted.iter().filter(|it| *it != above && it.starts_with(above));
                below.any(|it| it.starts_with(path) || path.starts_with(it))
            })
        };
        let mut all = self.entries.clone();
        let counted = matches.iter().filter(|path| counts(path));
        all.extend(counted.map(|path| ((*path).clone(), AccessMode::Deny)));
        all
    }

    /// The files that are at a path, and those that are mounted below it.
    fn objects_at(&self, path: &Path) -> Vec<Object> {
        let below = self.machine.mounts.iter().filter(|mount| mount.point.starts_with(path));
        let mut objects: Vec<Object> =
            below.map(|mount| (mount.file_system.1, mount.root.clone())).collect();
        objects.push(self.machine.object(path));
        objects
    }

    fn rule(&self, paths: &[PathBuf]) -> Rule<'_> {
        let all = self.all_entries(paths);
        let object = |(path, access): &(PathBuf, AccessMode)| (self.machine.object(path), *access);
        // An entry for the whole disk applies to paths.
        let by_object = all.iter().filter(|(path, _)| path != Path::new("/")).map(object).collect();
        let own = self.own.iter().map(|(path, most)| (&**path, self.objects_at(path), *most));
        let own = own.collect();
        let mut rule = Rule { machine: &self.machine, all, by_object, own, metadata: Vec::new() };
        let is_named = |path: &Path| rule.all.iter().any(|(named, _)| named == path);
        let (workspace, pointer) = (Path::new("/c"), Path::new("/c/.git"));
        // Permission to write everywhere is no grant of the workspace.
        let is_granted = |(named, _): &(PathBuf, AccessMode)| {
            named != Path::new("/") && workspace.starts_with(named)
        };
        if let Some(git) = &self.git
            && rule.all.iter().any(is_granted)
            && !is_named(pointer)
            && rule.most(workspace) == AccessMode::Write
        {
            let places = [pointer, git].into_iter().filter(|place| !is_named(place));
            let objects = |place: &Path| {
                let objects = self.objects_at(place).into_iter();
                objects.map(|object| (place.to_owned(), object)).collect::<Vec<_>>()
            };
            rule.metadata = places.flat_map(objects).collect();
        }
        rule
    }
}

/// The documented rule.
struct Rule<'c> {
    machine: &'c Machine,
    all: Vec<(PathBuf, AccessMode)>,
    by_object: Vec<(Object, AccessMode)>,
    own: Vec<(&'c Path, Vec<Object>, AccessMode)>,
    metadata: Vec<(PathBuf, Object)>,
}

impl Rule<'_> {
    /// The most that may be done with what a path leads to.
    fn most(&self, path: &Path) -> AccessMode {
        let length = |path: &Path| path.components().count();
        let object = self.machine.object(path);
        let is_in = |above: &Object| above.0 == object.0 && object.1.starts_with(&above.1);
        let by_name = self.all.iter().filter(|(above, _)| path.starts_with(above));
        let by_name = decides(by_name.map(|(above, access)| (length(above), *access)));
        let mut most = by_name.unwrap_or(AccessMode::Deny);
        // An entry for another mount of the whole disk does not apply to the disk itself.
        let whole = (0, PathBuf::from("/"));
        let is_on_root = self.machine.mount_of(path).point == Path::new("/");
        let is_in = |above: &Object| is_in(above) && !(is_on_root && *above == whole);
        let entries = || self.by_object.iter().filter(|(above, _)| is_in(above));
        let by_object = decides(entries().map(|(above, access)| (length(&above.1), *access)));
        most = less(most, by_object.unwrap_or(AccessMode::Write));
        for (own, objects, at_most) in &self.own {
            if path.starts_with(own) || objects.iter().any(is_in) {
                most = less(most, *at_most);
            }
        }
        for (place, protected) in self.metadata.iter().filter(|(_, above)| is_in(above)) {
            let is_granted =
                |entry: &Object| entry.0 == protected.0 && entry.1.starts_with(&protected.1);
            // What is mounted below it may be granted by that path.
            let mut by_name = self.all.iter().map(|(entry, _)| entry);
            let by_name = by_name.any(|entry| entry.starts_with(place) && path.starts_with(entry));
            if !by_name && !entries().any(|(entry, _)| is_granted(entry)) {
                most = less(most, AccessMode::Read);
            }
        }
        most
    }
}

/// What the regions alone say, which is what is mounted.
fn planned(policy: &ResolvedPolicy, path: &Path) -> AccessMode {
    let region = path.ancestors().find_map(|above| policy.region(above));
    region.map_or(AccessMode::Deny, |region| region.access)
}

#[test]
fn protection_holds_through_every_mount() {
    let (mut refused, mut exact, mut compared) = (0, 0, 0);
    let cases = 600;
    for seed in 0..cases {
        let case = generate(seed);
        let policy = match case.resolved() {
            Ok(policy) => policy,
            Err(_) => {
                refused += 1;
                continue;
            }
        };
        let paths = case.machine.paths();
        let rule = case.rule(&paths);
        for path in &paths {
            let (found, most) = (planned(&policy, path), rule.most(path));
            assert_eq!(policy.access.access(path), found, "seed {seed}: {}", path.display());
            assert!(
                rank(found) <= rank(most),
                "seed {seed}: {} is {found:?}, at most {most:?}\nentries {:?}\npatterns {:?}\nown \
                 {:?}\ngit {:?}\nmounts {:#?}",
                path.display(),
                case.entries,
                case.patterns,
                case.own,
                case.git,
                case.machine
                    .mounts
                    .iter()
                    .map(|it| (&it.point, it.file_system.1, &it.root))
                    .collect::<Vec<_>>(),
            );
            compared += 1;
            exact += usize::from(found == most);
        }
    }
    assert!(refused * 20 < cases, "{refused} of {cases} refused");
    assert!(exact * 100 > compared * 95, "only {exact} of {compared} are granted what they may be");
}

/// What an operator permits holds for the file, too, whatever paths a request names.
#[test]
fn no_request_exceeds_the_ceiling_through_any_mount() {
    let (mut refused, mut exact, mut compared) = (0, 0, 0);
    let cases = 600;
    for seed in 0..cases {
        let case = generate(seed);
        let paths = case.machine.paths();
        let mut random = Random(seed ^ 0x5eed);
        let some = [AccessMode::Read, AccessMode::Write, AccessMode::Deny];
        let mut entries = vec![(PathBuf::from("/"), some[random.below(2)])];
        for _ in 0..random.below(5) {
            entries.push((random.pick(&paths[1..]).clone(), *random.pick(&some)));
        }
        let ceiling = context(entries.iter().map(as_entry).collect());
        let Ok(policy) = case.resolved_below(Some(&ceiling)) else {
            refused += 1;
            continue;
        };
        let rule = case.rule(&paths);
        let operator = Case {
            machine: Machine {
                disks: case.machine.disks.clone(),
                mounts: case.machine.mounts.clone(),
            },
            entries,
            patterns: Vec::new(),
            own: Vec::new(),
            git: None,
        };
        let permitted = operator.rule(&paths);
        for path in &paths {
            let found = planned(&policy, path);
            assert_eq!(policy.access.access(path), found, "seed {seed}: {}", path.display());
            let most = less(rule.most(path), permitted.most(path));
            assert!(
                rank(found) <= rank(most),
                "seed {seed}: {} is {found:?}, at most {most:?}\nentries {:?}\nceiling {:?}\nmounts {:?}",
                path.display(),
                case.entries,
                operator.entries,
                case.machine.mounts,
            );
            compared += 1;
            exact += usize::from(found == most);
        }
    }
    assert!(refused * 20 < cases, "{refused} of {cases} refused");
    assert!(exact * 100 > compared * 90, "only {exact} of {compared} are granted what they may be");
}
