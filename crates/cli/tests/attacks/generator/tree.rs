//! The trusted tree that a case starts with.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use super::random::Random;
use crate::server::User;

#[derive(Debug, Clone)]
pub(crate) enum What {
    Directory,
    File(String),
    Link(String),
    /// Another name of a file.
    Hard(String),
}

#[derive(Debug, Clone)]
pub(crate) struct Object {
    /// Absolute.
    pub path: String,
    pub what: What,
    pub mode: u32,
    /// It belongs to the user who runs the tests, not to the server's.
    pub foreign: bool,
}

/// A tree, in the order in which it is created.
#[derive(Debug, Clone)]
pub(crate) struct Tree {
    pub base: String,
    pub objects: Vec<Object>,
    /// No directory excludes its owner, every `.git` is a directory, and none contains links.
    pub plain: bool,
    tokens: usize,
    seed: u64,
}

const DIRECTORIES: [&str; 8] = ["a", "b", "c", "td", "nest", "den", "gd", "lib"];

impl Tree {
    pub(crate) fn generate(random: &mut Random, base: &str, seed: u64) -> Self {
        let mut tree =
            Self { base: base.to_owned(), objects: Vec::new(), plain: true, tokens: 0, seed };
        tree.directory(base.to_owned());
        for name in ["w", "out", "ro", "w/sub", "w/sec"] {
            tree.directory(format!("{base}/{name}"));
        }
        for _ in 0..random.between(2, 7) {
            let parent = tree.any_directory(random);
            tree.directory(format!("{parent}/{}", random.pick(&DIRECTORIES)));
        }
        let directories = tree.directories();
        for directory in &directories {
            // A name that no attacker knows.
            let name = tree.token('n');
            tree.file(format!("{directory}/{name}"));
            for (name, chance) in [("f", 70), ("x.key", 30), (".env", 15)] {
                if random.percent(chance) {
                    tree.file(format!("{directory}/{name}"));
                }
            }
        }
        tree.git(random, &format!("{base}/w"));
        for directory in &directories[1..] {
            if random.percent(10) {
                tree.git(random, directory);
            }
            for name in [".agents", ".codex"] {
                if random.percent(4) {
                    tree.directory(format!("{directory}/{name}"));
                    tree.file(format!("{directory}/{name}/f"));
                    if random.percent(30) {
                        tree.link_in(random, &format!("{directory}/{name}"), "conf");
                    }
                }
            }
        }
        for git in tree.paths(|what| matches!(what, What::Directory)) {
            let inside = [("/hooks", "post-commit"), ("", "info"), ("", "config.worktree")];
            if git.ends_with("/hooks") && random.percent(30) {
                let (below, name) = *random.pick(&inside);
                let git = git.trim_end_matches("/hooks");
                tree.link_in(random, &format!("{git}{below}"), name);
            }
        }
        for _ in 0..random.below(5) {
            tree.link(random);
        }
        if random.percent(15) {
            // Not of files that name other paths: through a second name they would name others.
            let is_pointer = |text: &str| text.starts_with("gitdir") || text.starts_with("../..");
            let files = tree.paths(|what| matches!(what, What::File(text) if !is_pointer(text)));
            let other = random.pick(&files).clone();
            let path = format!("{}/hard", tree.any_directory(random));
            tree.add(path, What::Hard(other), 0o644);
        }
        if random.percent(4) {
            let closed = random.below(directories.len() - 1) + 1;
            let closed = directories[closed].clone();
            let mode = *random.pick(&[0o000, 0o500, 0o300]);
            for object in &mut tree.objects {
                if object.path == closed {
                    object.mode = mode;
                }
            }
            tree.plain = false;
        }
        if random.percent(12) {
            // Can be entered but not listed: by another user's mode, or by its own.
            let closed = tree.any_directory(random);
            let foreign = random.percent(60);
            for object in tree.objects.iter_mut().filter(|object| object.path == closed) {
                object.mode = if foreign { 0o711 } else { 0o311 };
                object.foreign = foreign;
            }
            tree.plain = false;
        }
        tree
    }

    fn token(&mut self, kind: char) -> String {
        self.tokens += 1;
        format!("{kind}{:x}z{}q", self.seed, self.tokens)
    }

    fn has(&self, path: &str) -> bool {
        self.objects.iter().any(|object| object.path == path)
    }

    fn add(&mut self, path: String, what: What, mode: u32) {
        if !self.has(&path) {
            self.objects.push(Object { path, what, mode, foreign: false });
        }
    }

    fn directory(&mut self, path: String) {
        self.add(path, What::Directory, 0o755);
    }

    fn file(&mut self, path: String) {
        let content = self.token('t');
        self.add(path, What::File(content), 0o644);
    }

    /// The names of a kind, except those that no attacker knows.
    pub(crate) fn paths(&self, wanted: impl Fn(&What) -> bool) -> Vec<String> {
        let all = self.objects.iter().filter(|object| wanted(&object.what));
        all.filter(|object| !is_unknown(&object.path)).map(|object| object.path.clone()).collect()
    }

    pub(crate) fn directories(&self) -> Vec<String> {
        self.paths(|what| matches!(what, What::Directory))
    }

    /// Any but the base.
    pub(crate) fn any_directory(&self, random: &mut Random) -> String {
        let all = self.directories();
        all[1 + random.below(all.len() - 1)].clone()
    }

    /// `.git` of a directory, in any of the forms that git knows.
    fn git(&mut self, random: &mut Random, root: &str) {
        let git = format!("{root}/.git");
        if self.has(&git) {
            return;
        }
        let kind = random.below(14);
        self.plain &= kind < 8;
        let elsewhere = self.any_directory(random);
        let spelled = |random: &mut Random, target: &str| match random.below(4) {
            0 => target.to_owned(),
            1 => format!("/..{target}"),
            2 => through_missing(root, target),
            _ => relative(root, target),
        };
        match kind {
            0..=3 => {}
            4..=7 => self.repository(&git),
            8 => {
                let target = format!("{elsewhere}/gd");
                self.repository(&target);
                let pointer = format!("gitdir: {}\n", spelled(random, &target));
                self.add(git, What::File(pointer), 0o644);
            }
            9 => {
                let target = format!("{elsewhere}/gd");
                self.repository(&target);
                let target = spelled(random, &target);
                self.add(git, What::Link(target), 0o777);
            }
            10 => {
                let pointer = format!("gitdir: {}\n", spelled(random, &format!("{elsewhere}/no")));
                self.add(git, What::File(pointer), 0o644);
            }
            11 => {
                let target = spelled(random, &format!("{elsewhere}/no"));
                self.add(git, What::Link(target), 0o777);
            }
            12 => {
                // A pointer file behind a link.
                let (target, pointer) = (format!("{elsewhere}/gd"), format!("{elsewhere}/pointer"));
                self.repository(&target);
                self.add(pointer.clone(), What::File(format!("gitdir: {target}\n")), 0o644);
                let pointer = spelled(random, &pointer);
                self.add(git, What::Link(pointer), 0o777);
            }
            _ => {
                // A worktree of a repository elsewhere.
                let main = format!("{elsewhere}/main");
                self.repository(&format!("{main}/.git"));
                for name in ["worktrees", "worktrees/one"] {
                    self.directory(format!("{main}/.git/{name}"));
                }
                let own = format!("{main}/.git/worktrees/one");
                self.add(format!("{own}/commondir"), What::File("../..\n".into()), 0o644);
                let pointer = format!("gitdir: {}\n", spelled(random, &own));
                self.add(git, What::File(pointer), 0o644);
            }
        }
    }

    fn repository(&mut self, path: &str) {
        if let Some((parent, _)) = path.rsplit_once('/')
            && !self.has(parent)
        {
            self.directory(parent.to_owned());
        }
        self.directory(path.to_owned());
        self.directory(format!("{path}/hooks"));
        self.file(format!("{path}/hooks/pre-commit"));
        self.file(format!("{path}/config"));
    }

    fn link(&mut self, random: &mut Random) {
        let place = self.any_directory(random);
        let name = *random.pick(&["l", "m", "lnk"]);
        self.link_in(random, &place, name);
    }

    /// A link in a directory, to anything. In metadata it may be unprotectable.
    fn link_in(&mut self, random: &mut Random, place: &str, name: &str) {
        let is_metadata = |part: &str| matches!(part, ".git" | ".agents" | ".codex" | "gd");
        self.plain &= !place.split('/').any(is_metadata);
        let path = format!("{place}/{name}");
        let all = self.paths(|_| true);
        let mut target = random.pick(&all).clone();
        if random.percent(10) {
            target.push_str("/missing");
        }
        let target = match random.below(5) {
            0 | 1 => target,
            4 => through_missing(place, &target),
            2 => format!("/..{target}"),
            _ => relative(place, &target),
        };
        self.add(path, What::Link(target), 0o777);
    }

    /// Creates the tree, owned by this user.
    pub(crate) fn create(&self, user: User) {
        for object in &self.objects {
            let path = Path::new(&object.path);
            match &object.what {
                What::Directory => std::fs::create_dir(path).unwrap(),
                What::File(content) => std::fs::write(path, content).unwrap(),
                What::Link(target) => symlink(target, path).unwrap(),
                What::Hard(other) => std::fs::hard_link(other, path).unwrap(),
            }
            if !object.foreign {
                user.give(path);
            }
        }
        // Children first, since a mode may close a directory.
        for object in self.objects.iter().rev() {
            if matches!(object.what, What::Directory | What::File(_)) {
                std::fs::set_permissions(&object.path, PermissionsExt::from_mode(object.mode))
                    .unwrap();
            }
        }
    }
}

/// Whether an attacker can learn the name only from a listing.
pub(super) fn is_unknown(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or_default();
    name.starts_with('n') && name.ends_with('q') && name.contains('z')
}

/// A path as seen from a directory, through a name in it that does not exist.
fn through_missing(from: &str, to: &str) -> String {
    format!("absent/../{}", relative(from, to))
}

/// A path relative to a directory.
fn relative(from: &str, to: &str) -> String {
    let (from, to): (Vec<&str>, Vec<&str>) = (from.split('/').collect(), to.split('/').collect());
    let same = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
    let mut path = "../".repeat(from.len() - same);
    path.push_str(&to[same..].join("/"));
    if path.is_empty() { ".".into() } else { path.trim_end_matches('/').to_owned() }
}
