//! Random steps of an attacker, with every name that it knows in every spelling.
//!
//! No step ends in a name outside the case's directory, so that a hole in the sandbox harms nothing else: a
//! link to `/` is only ever a prefix.

use serde_json::{Value, json};

use super::policy::Policy;
use super::random::Random;
use super::tree::{Tree, What};

/// One step, as arguments of the attacker's program.
#[derive(Debug, Clone)]
pub(crate) struct Step(pub Vec<String>);

impl Step {
    fn new(words: &[&str]) -> Self {
        Self(words.iter().map(|&word| word.to_owned()).collect())
    }

    pub(crate) fn text(&self) -> String {
        self.0.join(" ")
    }

    /// The same as requests, in every possible way: each way is one or several requests.
    pub(crate) fn requests(&self) -> Vec<Vec<(&'static str, Value)>> {
        let word = |n: usize| self.0.get(n).map_or("", String::as_str);
        let x = "eA==";
        let (a, b) = (word(1), word(2));
        match word(0) {
            "read" | "reopen-read" => vec![
                vec![("fs/readFile", json!({"path": a}))],
                vec![
                    ("fs/open", json!({"handleId": "h", "path": a})),
                    ("fs/readBlock", json!({"handleId": "h", "offset": 0, "len": 4096})),
                    ("fs/close", json!({"handleId": "h"})),
                ],
            ],
            "write" | "append" | "truncate" | "open" | "reopen-write" => vec![
                vec![("fs/writeFile", json!({"path": a, "dataBase64": x}))],
                vec![("fs/writeFile", json!({"path": a, "dataBase64": x, "atomic": true}))],
                vec![
                    ("fs/open", json!({"handleId": "h", "path": a, "mode": "replace"})),
                    ("fs/writeBlock", json!({"handleId": "h", "offset": 0, "chunk": x})),
                    ("fs/close", json!({"handleId": "h", "commit": true})),
                ],
                vec![
                    ("fs/open", json!({"handleId": "h", "path": a, "mode": "replaceAtomic"})),
                    ("fs/writeBlock", json!({"handleId": "h", "offset": 0, "chunk": x})),
                    ("fs/close", json!({"handleId": "h", "commit": true})),
                ],
            ],
            "mkdir" => vec![
                vec![("fs/createDirectory", json!({"path": a}))],
                vec![("fs/createDirectory", json!({"path": a, "recursive": false}))],
            ],
            "unlink" | "rmdir" => vec![
                vec![("fs/remove", json!({"path": a}))],
                vec![("fs/remove", json!({"path": a, "recursive": false}))],
            ],
            "rename" | "exchange" => {
                let renaming = |overwrite: bool| json!({"sourcePath": a, "destinationPath": b, "overwrite": overwrite});
                vec![vec![("fs/rename", renaming(false))], vec![("fs/rename", renaming(true))]]
            }
            "symlink" => vec![vec![("fs/symlink", json!({"path": b, "target": a}))]],
            "chmod" | "fchmod" => {
                let mode = u32::from_str_radix(a, 8).unwrap_or(0o777);
                vec![vec![("fs/setMode", json!({"path": b, "mode": mode}))]]
            }
            "copy" | "link" => vec![vec![(
                "fs/copy",
                json!({"sourcePath": a, "destinationPath": b, "recursive": true}),
            )]],
            "list" => vec![
                vec![("fs/readDirectory", json!({"path": a}))],
                vec![(
                    "fs/walk",
                    json!({"path": a, "options": {"maxDepth": 9, "maxDirectories": 999,
                           "maxEntries": 999, "followDirectorySymlinks": true}}),
                )],
                vec![("fs/glob", json!({"path": a, "patterns": ["**"], "hidden": true}))],
                vec![(
                    "fs/search",
                    json!({"path": a, "pattern": "z", "hidden": true, "respectGitignore": false}),
                )],
            ],
            _ => vec![
                vec![("fs/getMetadata", json!({"path": a}))],
                vec![("fs/canonicalize", json!({"path": a}))],
            ],
        }
    }
}

/// An attacker, and the names that it knows.
pub(crate) struct Attacker {
    base: String,
    /// Every name that exists or existed.
    names: Vec<String>,
    directories: Vec<String>,
    /// Names in the policies, and those around `.git`.
    interesting: Vec<String>,
    /// Names in a policy, whose replacement has the most effect.
    granted: Vec<String>,
    links: Vec<String>,
    /// Prefixes that lead to the root.
    roots: Vec<String>,
    fresh: usize,
}

impl Attacker {
    pub(crate) fn new(tree: &Tree, policies: &[Policy]) -> Self {
        let granted: Vec<String> = policies.iter().flat_map(Policy::named).collect();
        let names = tree.paths(|_| true);
        let mut interesting = granted.clone();
        for name in &names {
            let special = name.contains("/.git")
                || name.contains("/gd")
                || name.contains("/main/")
                || name.ends_with(".key")
                || name.ends_with(".env")
                || granted.iter().any(|it| name.starts_with(&format!("{it}/")));
            if special {
                interesting.push(name.clone());
            }
        }
        for object in &tree.objects {
            let target = match &object.what {
                What::File(text) => text.strip_prefix("gitdir: ").map(str::trim_end),
                What::Link(target) => Some(target.as_str()),
                _ => None,
            };
            if let Some(target) = target
                && let Some(base) = target.find(&tree.base)
            {
                interesting.push(target[base..].to_owned());
            }
        }
        for root in policies.iter().flat_map(|policy| &policy.roots) {
            for name in [".git", ".agents", ".codex", ".git/hooks"] {
                interesting.push(format!("{root}/{name}"));
            }
        }
        Self {
            base: tree.base.clone(),
            directories: tree.directories()[1..].to_vec(),
            links: tree.paths(|what| matches!(what, What::Link(_))),
            names,
            interesting,
            granted,
            roots: Vec::new(),
            fresh: 0,
        }
    }

    fn any(&self, random: &mut Random) -> String {
        let from = if random.percent(55) { &self.interesting } else { &self.names };
        random.pick(from).clone()
    }

    fn directory(&self, random: &mut Random) -> String {
        if random.percent(40) {
            format!("{}/w", self.base)
        } else {
            random.pick(&self.directories).clone()
        }
    }

    fn fresh(&mut self, random: &mut Random) -> String {
        self.fresh += 1;
        format!("{}/x{}", self.directory(random), self.fresh)
    }

    /// A random spelling of a name.
    fn spell(&self, random: &mut Random, path: &str) -> String {
        match random.below(100) {
            0..=11 => format!("/..{path}"),
            12..=13 => format!("/../..{path}"),
            14..=19 => format!("/proc/self/root{path}"),
            20..=22 => format!("/proc/self/root/..{path}"),
            23..=25 => format!("/proc/self/cwd/../../../../../../../..{path}"),
            26..=30 => format!("../../../../../../../..{path}"),
            31..=33 => format!("/proc/1/root{path}"),
            34..=43 if !self.roots.is_empty() => format!("{}{path}", random.pick(&self.roots)),
            44..=46 => format!("{}/w/sub/..{}", self.base, &path.replacen(&self.base, "/..", 1)),
            _ => path.to_owned(),
        }
    }

    fn moved(&mut self, from: &str, to: &str) {
        let below = format!("{from}/");
        for list in [&mut self.names, &mut self.interesting] {
            let more: Vec<String> = list
                .iter()
                .filter_map(|name| name.strip_prefix(&below))
                .map(|rest| format!("{to}/{rest}"))
                .collect();
            list.extend(more);
            list.push(to.to_owned());
        }
    }

    /// A random operation on a name.
    fn touch(&mut self, random: &mut Random, path: &str) -> Step {
        let name = self.spell(random, path);
        let mode = *random.pick(&["777", "000", "555", "755", "4755", "2755", "644"]);
        match random.below(40) {
            0..=9 => Step::new(&["read", &name]),
            10..=15 => Step::new(&["write", &name, "attack"]),
            16 => Step::new(&["truncate", &name, "0"]),
            17..=18 => Step::new(&["chmod", mode, &name]),
            19 => Step::new(&["fchmod", mode, &name]),
            20 => Step::new(&["utimes", &name]),
            21 => Step::new(&["setxattr", &name]),
            22 => Step::new(&["unlink", &name]),
            23 => Step::new(&["rmdir", &name]),
            24 => Step::new(&["mkdir", &name]),
            25..=26 => Step::new(&["list", &name]),
            27 => Step::new(&["reopen-read", &name]),
            28 => Step::new(&["reopen-write", &name, "attack"]),
            29 => Step::new(&["chown", "65534", "65534", &name]),
            30 => Step::new(&["append", &name, "attack"]),
            31 => Step::new(&["mkfifo", &name]),
            32 => Step::new(&["lock", &name]),
            33 => Step::new(&["stat", &name]),
            34 => Step::new(&["fallocate", &name]),
            35 => {
                let directory = self.directory(random);
                Step::new(&["temporary", &directory, &name, "attack"])
            }
            36 => Step::new(&["write", &format!("{name}/new"), "attack"]),
            37 => Step::new(&["mkdir", &format!("{name}/new")]),
            38 => Step::new(&["bind-unix", &name]),
            _ => Step::new(&["chdir", &name]),
        }
    }

    /// A random step.
    pub(crate) fn step(&mut self, random: &mut Random) -> Step {
        let path = self.any(random);
        match random.below(12) {
            0 => {
                let (from, to) = (self.spell(random, &path), self.fresh(random));
                self.moved(&path, &to);
                Step::new(&[*random.pick(&["rename", "link", "copy"]), &from, &to])
            }
            1 => {
                let other = self.any(random);
                let word = *random.pick(&["rename", "exchange", "link", "copy"]);
                Step::new(&[word, &self.spell(random, &path), &self.spell(random, &other)])
            }
            2 => {
                let place = self.fresh(random);
                let target = self.spell(random, &path);
                self.moved(&path, &place);
                Step::new(&["symlink", &target, &place])
            }
            3 => {
                let place = self.fresh(random);
                self.roots.push(place.clone());
                let target = *random.pick(&["/..", "/", "/proc/self/root", "/../.."]);
                Step::new(&["symlink", target, &place])
            }
            _ => self.touch(random, &path),
        }
    }

    /// An attack over two requests: the preparation, and the use.
    pub(crate) fn two_request_attack(&mut self, random: &mut Random) -> (Vec<Step>, Vec<Step>) {
        match random.below(6) {
            5 => self.move_parent(random),
            0 | 1 => {
                let path = self.replaced(random);
                self.replace(random, &path)
            }
            2 => self.close(random),
            3 => self.move_parent(random),
            _ => {
                let found = (!self.links.is_empty()).then(|| random.pick(&self.links).clone());
                let path = found.unwrap_or_else(|| self.replaced(random));
                self.replace(random, &path)
            }
        }
    }

    fn replaced(&self, random: &mut Random) -> String {
        let path = random.pick(&self.granted).clone();
        if random.percent(25) { above(&path, &self.base, random) } else { path }
    }

    /// Redirects a name in a policy.
    fn replace(&mut self, random: &mut Random, path: &str) -> (Vec<Step>, Vec<Step>) {
        let old = self.fresh(random);
        let mut first = match random.below(4) {
            0 => vec![Step::new(&["rmdir", path]), Step::new(&["unlink", path])],
            _ => vec![Step::new(&["rename", path, &old])],
        };
        self.moved(path, &old);
        let target = match random.below(4) {
            0 => self.base.clone(),
            1 => format!("{}/out", self.base),
            _ => random.pick(&self.directories).clone(),
        };
        if random.percent(75) {
            let target = if random.percent(20) { format!("/..{target}") } else { target.clone() };
            first.push(Step::new(&["symlink", &target, path]));
        } else {
            first.push(Step::new(&["mkdir", path]));
        }
        let below = format!("{target}/");
        let mut through: Vec<String> = self
            .names
            .iter()
            .filter_map(|name| name.strip_prefix(&below).map(|rest| format!("{path}/{rest}")))
            .collect();
        through
            .extend(through.iter().map(|name| name.replacen(path, &target, 1)).collect::<Vec<_>>());
        through.push(format!("{path}/new"));
        through.push(format!("{target}/new"));
        self.names.extend(through.iter().cloned());
        let mut then = Vec::new();
        for _ in 0..random.between(2, 5) {
            let name =
                if random.percent(70) { random.pick(&through).clone() } else { self.any(random) };
            then.push(self.touch(random, &name));
        }
        (first, then)
    }

    /// Closes a path in the first request, and opens it in the second.
    fn close(&mut self, random: &mut Random) -> (Vec<Step>, Vec<Step>) {
        let path = random.pick(&self.interesting).clone();
        let closed =
            if random.percent(15) { path.clone() } else { above(&path, &self.base, random) };
        let mode = *random.pick(&["000", "555", "400", "311"]);
        let first = vec![Step::new(&["chmod", mode, &closed])];
        let mut then = vec![Step::new(&["chmod", "755", &closed])];
        let below: Vec<String> = self
            .names
            .iter()
            .filter(|name| name.starts_with(&format!("{path}/")))
            .cloned()
            .collect();
        then.push(Step::new(&["read", &path]));
        for _ in 0..random.between(2, 4) {
            let name = if below.is_empty() || random.percent(40) {
                path.clone()
            } else {
                random.pick(&below).clone()
            };
            then.push(self.touch(random, &name));
        }
        then.push(Step::new(&["mkdir", &path]));
        (first, then)
    }

    /// Moves a parent directory, and accesses its content at the new path.
    fn move_parent(&mut self, random: &mut Random) -> (Vec<Step>, Vec<Step>) {
        let path = random.pick(&self.interesting).clone();
        let carried =
            if random.percent(20) { path.clone() } else { above(&path, &self.base, random) };
        let place = self.fresh(random);
        let mut first = vec![Step::new(&["rename", &carried, &place])];
        match random.below(3) {
            0 => first.push(Step::new(&["mkdir", &carried])),
            1 => {
                let target = random.pick(&self.directories).clone();
                first.push(Step::new(&["symlink", &target, &carried]));
            }
            _ => {}
        }
        let there = path.replacen(&carried, &place, 1);
        self.moved(&carried, &place);
        let below: Vec<String> =
            self.names.iter().filter(|name| name.starts_with(&there)).cloned().collect();
        let mut then = vec![Step::new(&["read", &there])];
        for _ in 0..random.between(1, 4) {
            let name = if below.is_empty() { there.clone() } else { random.pick(&below).clone() };
            then.push(self.touch(random, &name));
        }
        (first, then)
    }
}

/// A directory above a path, inside the base.
fn above(path: &str, base: &str, random: &mut Random) -> String {
    let mut all = Vec::new();
    let mut path = path;
    while let Some((parent, _)) = path.rsplit_once('/') {
        if parent.len() <= base.len() {
            break;
        }
        all.push(parent);
        path = parent;
    }
    if all.is_empty() { format!("{base}/w") } else { (*random.pick(&all)).to_owned() }
}
