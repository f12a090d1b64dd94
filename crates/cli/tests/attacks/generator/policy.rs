//! A random policy, and its JSON.

use serde_json::{Value, json};

use super::random::Random;
use super::tree::{Tree, What};
use crate::program;

/// Ordered from least to most access.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Access {
    Deny,
    Read,
    Write,
}

#[derive(Debug, Clone)]
pub(crate) enum Name {
    Root,
    Minimal,
    ProjectRoots(Option<String>),
    Path(String),
    Glob(String),
    Tmpdir,
    SlashTmp,
}

#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub name: Name,
    pub access: Access,
    pub skip_missing: bool,
}

#[derive(Debug, Clone)]
pub(crate) struct Policy {
    pub entries: Vec<Entry>,
    pub roots: Vec<String>,
    pub cwd: String,
    pub tmpdir: Option<String>,
    pub glob_depth: Option<u32>,
    pub network: bool,
}

impl Policy {
    pub(crate) fn generate(random: &mut Random, tree: &Tree) -> Self {
        let base = &tree.base;
        let work = format!("{base}/w");
        let mut roots = vec![work.clone()];
        for _ in 0..2 {
            if random.percent(20) {
                roots.push(some_path(random, tree, 15));
            }
        }
        if random.percent(3) {
            roots.clear();
        }
        let mut policy = Self {
            entries: Vec::new(),
            roots,
            cwd: if random.percent(75) { work } else { tree.any_directory(random) },
            tmpdir: random.percent(30).then(|| some_path(random, tree, 25)),
            glob_depth: random.percent(20).then(|| random.between(1, 4) as u32),
            network: random.percent(15),
        };
        match random.below(20) {
            0..=9 => policy.add(Name::Root, Access::Read),
            10..=17 => policy.add(Name::Minimal, Access::Read),
            18 => policy.add(Name::Root, Access::Write),
            _ => {}
        }
        if random.percent(85) {
            let below =
                random.percent(12).then(|| (*random.pick(&["sub", "sec", "td"])).to_owned());
            policy.add(Name::ProjectRoots(below), Access::Write);
        }
        for _ in 0..random.below(5) {
            let path = some_path(random, tree, 20);
            let access = *random.pick(&[Access::Deny, Access::Deny, Access::Read, Access::Write]);
            let skip_missing = random.percent(5);
            policy.entries.push(Entry { name: Name::Path(path), access, skip_missing });
        }
        if random.percent(35) {
            let glob = match random.below(9) {
                // Directories as well, of which something inside may be granted.
                5 => "**/a".to_owned(),
                6 => format!("{base}/w/**/{}", random.pick(&["sub", "den", "*"])),
                7 => "**/*b".to_owned(),
                0 => "**/x.key".to_owned(),
                1 => "*.key".to_owned(),
                2 => format!("{base}/w/**/*.key"),
                3 => format!("{}/*.key", random.pick(&["sub", "sec", "a", "sub/a"])),
                _ => "**/.env".to_owned(),
            };
            policy.add(Name::Glob(glob), Access::Deny);
            if random.percent(50) {
                let inside = random.pick(&["sub", "sub/a", "a", "den", "sec/a"]);
                let access = *random.pick(&[Access::Read, Access::Write]);
                policy.add(Name::Path(format!("{base}/w/{inside}")), access);
            }
        }
        if policy.tmpdir.is_some() && random.percent(80) {
            policy.add(Name::Tmpdir, Access::Write);
        }
        if random.percent(if base.starts_with("/tmp") { 4 } else { 12 }) {
            policy.add(Name::SlashTmp, Access::Write);
        }
        policy
    }

    fn add(&mut self, name: Name, access: Access) {
        self.entries.push(Entry { name, access, skip_missing: false });
    }

    pub(crate) fn wire(&self) -> Value {
        let special = |kind: &str| json!({"type": "special", "value": {"kind": kind}});
        let mut entries: Vec<Value> = vec![json!(
            {"path": {"type": "path", "path": program::DIRECTORY}, "access": "read"}
        )];
        for entry in &self.entries {
            let path = match &entry.name {
                Name::Root => special("root"),
                Name::Minimal => special("minimal"),
                Name::Tmpdir => special("tmpdir"),
                Name::SlashTmp => special("slash_tmp"),
                Name::ProjectRoots(None) => special("project_roots"),
                Name::ProjectRoots(Some(below)) => json!(
                    {"type": "special", "value": {"kind": "project_roots", "subpath": below}}
                ),
                Name::Path(path) => json!({"type": "path", "path": path}),
                Name::Glob(pattern) => json!({"type": "glob_pattern", "pattern": pattern}),
            };
            let access = match entry.access {
                Access::Deny => "deny",
                Access::Read => "read",
                Access::Write => "write",
            };
            let mut entry_on_wire = json!({"path": path, "access": access});
            if entry.skip_missing {
                entry_on_wire["missing_path_behavior"] = "skip".into();
            }
            entries.push(entry_on_wire);
        }
        let mut file_system = json!({"type": "restricted", "entries": entries});
        if let Some(depth) = self.glob_depth {
            file_system["glob_scan_max_depth"] = depth.into();
        }
        json!({
            "permissions": {
                "type": "managed",
                "network": if self.network { "enabled" } else { "restricted" },
                "file_system": file_system,
            },
            "cwd": self.cwd,
            "workspaceRoots": self.roots,
        })
    }

    /// Every path below the case's directory that the policy names.
    pub(crate) fn named(&self) -> Vec<String> {
        let mut named = self.roots.clone();
        named.push(self.cwd.clone());
        named.extend(self.tmpdir.clone());
        for entry in &self.entries {
            match &entry.name {
                Name::Path(path) => named.push(path.clone()),
                Name::ProjectRoots(Some(below)) => {
                    named.extend(self.roots.iter().map(|root| format!("{root}/{below}")));
                }
                _ => {}
            }
        }
        named
    }
}

/// A path that exists, or one that is missing that many times in a hundred.
fn some_path(random: &mut Random, tree: &Tree, missing: usize) -> String {
    if random.percent(missing) {
        let name = *random.pick(&["new", "td", "den", "new/er"]);
        return format!("{}/{name}", tree.any_directory(random));
    }
    let links = tree.paths(|what| matches!(what, What::Link(_)));
    if !links.is_empty() && random.percent(15) {
        let link = random.pick(&links).clone();
        return if random.percent(50) { link } else { format!("{link}/f") };
    }
    if random.percent(70) {
        tree.any_directory(random)
    } else {
        let files = tree.paths(|what| matches!(what, What::File(_)));
        random.pick(&files).clone()
    }
}
