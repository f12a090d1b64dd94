//! File systems of others, some of whose directories ignore case: random trees and policies, decided in memory.
//! What an entry takes away, no other spelling gives back; else the policy is refused.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use codex_exec_server_protocol::AccessMode;
use codex_linux_sandbox::decide::facts::{Facts, Identity, Mount, Node, NodeKind};
use codex_linux_sandbox::decide::policy::{
    PolicyError, Resolved, ServerState, Surroundings, resolve,
};
use codex_linux_sandbox::decide::writable_history::WritableHistory;
use codex_linux_sandbox::{Limits, OwnFiles};

use super::decisions::{context, path_entry};
use super::support::{Random, glob, root};

const CASES: u64 = 1_500;
const SHARE: &str = "/share";
const KINDS: [&str; 5] = ["fuse.sshfs", "9p", "virtiofs", "nfs4", "overlay"];
const NAMES: [&str; 4] = ["Ab", "cD", "ef", "12"];

/// A file of the share. The root has the share as its only directory.
#[derive(Debug, Default)]
struct Place {
    number: u64,
    ignores_case: bool,
    inside: BTreeMap<String, Place>,
}

#[derive(Debug)]
struct Machine {
    share: Place,
    kind: &'static str,
}

impl Place {
    /// `folding` of 100 directories ignore case; this one if it shows none, too, if the one around it does.
    fn generate(
        random: &mut Random,
        depth: usize,
        folding: usize,
        around: bool,
        count: &mut u64,
    ) -> Self {
        *count += 1;
        let mut place = Self { number: *count, ..Self::default() };
        place.ignores_case = random.below(100) < folding;
        if depth < 3 {
            for name in NAMES {
                if depth == 0 || random.below(3) > 0 {
                    let inside =
                        Self::generate(random, depth + 1, folding, place.ignores_case, count);
                    place.inside.insert(name.to_owned(), inside);
                }
            }
        }
        if !place.tells() {
            place.ignores_case = around;
        }
        place
    }

    /// Whether its names show if it ignores case.
    fn tells(&self) -> bool {
        self.inside.keys().any(|name| name.bytes().any(|byte| byte.is_ascii_alphabetic()))
    }

    fn find(&self, name: &str) -> Option<&Self> {
        let same = |stored: &str| match self.ignores_case {
            true => stored.eq_ignore_ascii_case(name),
            false => stored == name,
        };
        self.inside.iter().find(|(stored, _)| same(stored)).map(|(_, place)| place)
    }
}

impl Machine {
    fn find(&self, path: &Path) -> Option<&Place> {
        let mut below = path.strip_prefix(SHARE).ok()?.components();
        below.try_fold(&self.share, |place, name| place.find(name.as_os_str().to_str()?))
    }
}

impl Machine {
    /// Whether a directory, or one above it, ignores case.
    fn ignores_case_along(&self, path: &Path) -> bool {
        path.ancestors().filter_map(|above| self.find(above)).any(|place| place.ignores_case)
    }
}

impl Facts for Machine {
    fn lookup(&self, path: &Path) -> io::Result<Node> {
        let (device, inode, mount) = match path {
            path if path == Path::new("/") => (1, 1, 1),
            path => (2, self.find(path).ok_or(io::ErrorKind::NotFound)?.number, 2),
        };
        let identity = Identity { device: (8, device), inode, mount };
        Ok(Node { kind: NodeKind::Directory, identity })
    }

    fn read_link(&self, _: &Path) -> io::Result<PathBuf> {
        Err(io::ErrorKind::InvalidInput.into())
    }

    fn list(&self, path: &Path) -> io::Result<Vec<(OsString, NodeKind)>> {
        let place = self.find(path).ok_or(io::ErrorKind::NotFound)?;
        Ok(place.inside.keys().map(|name| (name.into(), NodeKind::Directory)).collect())
    }

    fn read_start(&self, _: &Path) -> io::Result<Vec<u8>> {
        Err(io::ErrorKind::InvalidInput.into())
    }

    fn mounts(&self) -> io::Result<Vec<Mount>> {
        let mount = |id, point: &str, kind: &str| Mount {
            id,
            file_system: (8, id as u32),
            root: "/".into(),
            point: point.into(),
            kind: kind.to_owned(),
        };
        Ok(vec![mount(1, "/", "ext4"), mount(2, SHARE, self.kind)])
    }
}

/// All paths of one or two names more than are there, in every spelling.
fn spellings(directory: &Path, depth: usize, paths: &mut Vec<PathBuf>) {
    paths.push(directory.to_owned());
    if depth < 3 {
        for name in NAMES {
            spellings(&directory.join(name), depth + 1, paths);
            if name.bytes().any(|byte| byte.is_ascii_alphabetic()) {
                spellings(&directory.join(name.to_ascii_lowercase()), depth + 1, paths);
                spellings(&directory.join(name.to_ascii_uppercase()), depth + 1, paths);
            }
        }
    }
}

/// What a path leads to: a file, or a name that is missing in one.
fn target(machine: &Machine, path: &Path) -> Option<(u64, Option<String>)> {
    if let Some(place) = machine.find(path) {
        return Some((place.number, None));
    }
    let (above, name) = (machine.find(path.parent()?)?, path.file_name()?.to_str()?);
    let name = if above.ignores_case { name.to_ascii_lowercase() } else { name.to_owned() };
    Some((above.number, Some(name)))
}

#[test]
fn no_other_spelling_has_more_access() {
    let mut all = Vec::new();
    spellings(Path::new(SHARE), 0, &mut all);
    let (mut decided, mut refused) = (0, 0);
    for seed in 0..CASES {
        let mut random = Random(seed);
        let kind = KINDS[random.below(KINDS.len())];
        // Layers are alike in all directories.
        let some: &[usize] = if kind == "overlay" { &[0, 100] } else { &[0, 0, 20, 100] };
        let folding = *random.pick(some);
        let share = Place::generate(&mut random, 0, folding, false, &mut 1);
        let machine = Machine { share, kind };
        let accesses = [AccessMode::Deny, AccessMode::Read, AccessMode::Write];
        let mut entries = vec![root(AccessMode::Read)];
        if random.below(2) == 0 {
            entries.push(path_entry(SHARE, AccessMode::Write));
        }
        for _ in 0..1 + random.below(3) {
            let path = random.pick(&all);
            entries.push(path_entry(path.to_str().unwrap(), *random.pick(&accesses)));
        }
        // (A single directory that ignores case is looked for only where a name is restricted.)
        let pattern = (folding != 20 && random.below(4) == 0)
            .then(|| *random.pick(&["ab", "AB", "Ab", "cd", "EF", "12"]));
        entries.extend(pattern.map(|name| glob(&format!("{SHARE}/**/{name}"))));
        let (own_files, history) = (OwnFiles::default(), WritableHistory::default());
        let state =
            ServerState { own_files: &own_files, writable_history: &history, ceiling: None };
        let context = context(entries);
        let limits = Limits::default();
        let resolved = resolve(&context, Surroundings::default(), &machine, &limits, state);
        match resolved {
            Ok(Resolved::Restricted(policy)) => {
                decided += 1;
                let matches = |path: &&PathBuf| {
                    pattern.is_some_and(|name| path.ends_with(name)) && machine.find(path).is_some()
                };
                for path in all.iter().filter(matches) {
                    let access = policy.access.access(path);
                    assert_eq!(access, AccessMode::Deny, "seed {seed}: {path:?}\n{context:?}");
                }
                let permitted = |path: &Path| match policy.access.access(path) {
                    AccessMode::Deny => 0,
                    AccessMode::Read => 1,
                    AccessMode::Write => 2,
                };
                let deciding = |path: &'_ PathBuf| -> PathBuf {
                    let mut above = path.ancestors();
                    above.find(|above| policy.access.named(above).is_some()).unwrap().to_owned()
                };
                // A restriction is an entry that takes access away.
                let is_restricted = |path: &&&PathBuf| {
                    let entry = deciding(path);
                    entry.parent().is_some_and(|around| permitted(&entry) < permitted(around))
                };
                // A missing name matters where it can be created.
                let matters = |path: &&PathBuf| {
                    let is_writable = path.parent().is_some_and(|above| permitted(above) == 2);
                    machine.find(path).is_some() || is_writable
                };
                let mut targets: BTreeMap<_, Vec<&PathBuf>> = BTreeMap::new();
                for path in all.iter().filter(matters) {
                    targets.entry(target(&machine, path)).or_default().push(path);
                }
                targets.remove(&None);
                for same in targets.values() {
                    for restricted in same.iter().filter(is_restricted) {
                        // It falls to what is around the restriction.
                        let evades = |path: &&&PathBuf| {
                            permitted(path) > permitted(restricted)
                                && deciding(restricted).starts_with(deciding(path))
                        };
                        assert_eq!(
                            same.iter().find(evades),
                            None,
                            "seed {seed}: another spelling of {restricted:?}\n{context:?}"
                        );
                    }
                }
            }
            Err(PolicyError::Spelling { at, .. }) => {
                refused += 1;
                assert!(machine.ignores_case_along(&at), "seed {seed}: {at:?} {context:?}");
            }
            Err(PolicyError::PatternSpelling { .. }) => {
                refused += 1;
                assert!(folding > 0 && pattern.is_some(), "seed {seed}: {context:?}");
            }
            other => panic!("seed {seed}: {other:?}"),
        }
    }
    assert!(decided > CASES / 4 && refused > CASES / 10, "{decided} {refused}");
}
