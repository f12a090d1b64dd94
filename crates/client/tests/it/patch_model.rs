//! A model of files with several names: random trees of hard links, symlinks and links to directories,
//! random patches of them, and an oracle that applies each section with `std::fs`. It compares the files
//! on disk. `cargo xtask torture` uses it, too.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};

/// One section of a patch.
#[derive(Debug, Clone)]
enum Section {
    Add { path: String, line: String },
    Delete { path: String },
    Update { path: String, to: Option<String>, line: Option<String> },
}

fn text(sections: &[Section]) -> String {
    let mut text = "*** Begin Patch\n".to_owned();
    for section in sections {
        text += &match section {
            Section::Add { path, line } => format!("*** Add File: {path}\n+{line}\n"),
            Section::Delete { path } => format!("*** Delete File: {path}\n"),
            Section::Update { path, to, line } => {
                let to = to.as_ref().map(|to| format!("*** Move to: {to}\n")).unwrap_or_default();
                let hunk = line.as_ref().map(|line| format!("@@\n+{line}\n")).unwrap_or_default();
                format!("*** Update File: {path}\n{to}{hunk}")
            }
        };
    }
    text + "*** End Patch\n"
}

/// Every path below a directory: the target of a link; otherwise the content, and the earlier path of the
/// same file, if any.
fn names(root: &Path) -> BTreeMap<PathBuf, String> {
    fn walk(root: &Path, at: &Path, found: &mut BTreeMap<PathBuf, (Option<u64>, String)>) {
        for entry in fs::read_dir(at).unwrap() {
            let path = entry.unwrap().path();
            let is = path.symlink_metadata().unwrap();
            let name = path.strip_prefix(root).unwrap().to_owned();
            if is.is_symlink() {
                found.insert(name, (None, format!("-> {}", path.read_link().unwrap().display())));
            } else if is.is_dir() {
                found.insert(name, (None, "directory".to_owned()));
                walk(root, &path, found);
            } else {
                found.insert(name, (Some(is.ino()), fs::read_to_string(&path).unwrap()));
            }
        }
    }
    let mut found = BTreeMap::new();
    walk(root, root, &mut found);
    let first = |inode: u64| {
        let mut same = found.iter().filter(|(_, (other, _))| *other == Some(inode));
        same.next().map(|(name, _)| name.display().to_string()).unwrap()
    };
    let shown = |(name, (inode, said)): (&PathBuf, &(Option<u64>, String))| {
        let same = inode.map(|inode| format!(" = {}", first(inode))).unwrap_or_default();
        (name.clone(), format!("{said}{same}"))
    };
    found.iter().map(shown).collect()
}

/// The path with its parent directories resolved.
fn entry(path: &Path) -> io::Result<PathBuf> {
    Ok(path.parent().unwrap().canonicalize()?.join(path.file_name().unwrap()))
}

fn is_link(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|is| is.is_symlink())
}

fn refused(why: &str) -> io::Error {
    io::Error::other(why.to_owned())
}

/// Writes through every kind of link, except a broken one.
fn write(path: &Path, content: &str) -> io::Result<()> {
    if is_link(path) && !path.exists() {
        return Err(refused("leads nowhere"));
    }
    fs::create_dir_all(path.parent().unwrap())?;
    fs::write(path, content)
}

/// Applies a section with `std::fs`.
fn oracle(root: &Path, section: &Section) -> io::Result<()> {
    match section {
        Section::Add { path, line } => write(&root.join(path), &format!("{line}\n")),
        Section::Delete { path } => {
            let path = root.join(path);
            fs::read(&path)?;
            fs::remove_file(path)
        }
        Section::Update { path, to, line } => {
            let from = root.join(path);
            let added = line.as_ref().map(|line| format!("{line}\n")).unwrap_or_default();
            let content = fs::read_to_string(&from)? + &added;
            let Some(to) = to.as_ref().map(|to| root.join(to)) else {
                return write(&from, &content);
            };
            if entry(&to).is_ok_and(|to| to == entry(&from).unwrap()) {
                return write(&from, &content);
            }
            if is_link(&to) && to.exists() && to.canonicalize()? == from.canonicalize()? {
                if is_link(&from) && entry(&to)?.parent() != entry(&from)?.parent() {
                    return Err(refused("two links to one file"));
                }
                write(&from, &content)?;
                return fs::rename(from, to);
            }
            // Another name of the same file loses nothing; another file would be lost.
            if to.exists() && fs::metadata(&to)?.ino() != fs::metadata(&from)?.ino() {
                return Err(refused("there is another file"));
            }
            write(&to, &content)?;
            fs::remove_file(from)
        }
    }
}

/// Creates the same random tree in each of the roots.
fn plant(random: &mut fastrand::Rng, roots: &[&Path], chains: bool) {
    let each = |what: &dyn Fn(&Path)| roots.iter().for_each(|root| what(root));
    let mut files = Vec::new();
    each(&|root| ["d", "e"].iter().for_each(|name| fs::create_dir(root.join(name)).unwrap()));
    each(&|root| symlink("d", root.join("dl")).unwrap());
    each(&|root| symlink("../e", root.join("d/el")).unwrap());
    for n in 0..random.usize(1..5) {
        let name = format!("{}f{n}", random.choice(["", "d/", "e/"]).unwrap());
        each(&|root| fs::write(root.join(&name), format!("content {n}\n")).unwrap());
        files.push(name);
    }
    for n in 0..random.usize(0..3) {
        let of = random.choice(&files).unwrap().clone();
        let name = format!("{}h{n}", random.choice(["", "d/", "e/"]).unwrap());
        each(&|root| fs::hard_link(root.join(&of), root.join(&name)).unwrap());
        files.push(name);
    }
    for n in 0..random.usize(0..4) {
        let of = random.choice(&files).unwrap().clone();
        let (directory, up) = random.choice([("", ""), ("d/", "../"), ("e/", "../")]).unwrap();
        let name = format!("{directory}s{n}");
        each(&|root| symlink(format!("{up}{of}"), root.join(&name)).unwrap());
        if chains {
            files.push(name);
        }
    }
    if random.u8(0..4) == 0 {
        each(&|root| symlink("nowhere", root.join("s9")).unwrap());
    }
}

/// A random path, which may exist, in a random spelling.
fn path(random: &mut fastrand::Rng, existing: &[String]) -> String {
    let directory = |random: &mut fastrand::Rng| {
        random.choice(["", "d/", "e/", "dl/", "d/el/", "dl/el/", "n0/"]).unwrap()
    };
    match random.u8(0..8) {
        0 => format!("{}n{}", directory(random), random.u8(0..2)),
        1..5 => {
            let name = random.choice(existing).unwrap();
            match name.split_once('/') {
                Some(("d", name)) if random.bool() => format!("dl/{name}"),
                Some(("e", name)) if random.bool() => format!("d/el/{name}"),
                _ => name.clone(),
            }
        }
        _ => {
            let name = random.choice(["f0", "f1", "h0", "s0", "s1", "s9"]).unwrap();
            format!("{}{name}", directory(random))
        }
    }
}

fn sections(random: &mut fastrand::Rng, existing: &[String], count: usize) -> Vec<Section> {
    (0..count)
        .map(|n| {
            let at = path(random, existing);
            let line = format!("line {n}");
            match random.u8(0..6) {
                0 => Section::Add { path: at, line },
                1 => Section::Delete { path: at },
                2 | 3 => Section::Update { path: at, to: None, line: Some(line) },
                _ => {
                    let line = random.bool().then_some(line);
                    Section::Update { path: at, to: Some(path(random, existing)), line }
                }
            }
        })
        .collect()
}

/// A random tree, a random patch of it, and the oracle's result.
#[derive(Debug)]
pub(crate) struct Case {
    seed: u64,
    real: tempfile::TempDir,
    model: tempfile::TempDir,
    before: BTreeMap<PathBuf, String>,
    sections: Vec<Section>,
    expected: io::Result<()>,
}

impl Case {
    pub(crate) fn random(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let (real, model) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let count = random.usize(1..4);
        // A client cannot resolve a link through a removed name, so chains of links appear only in patches
        // of one section.
        plant(&mut random, &[real.path(), model.path()], count == 1);
        let before = names(real.path());
        let is_file = |(name, said): (&PathBuf, &String)| {
            let fit = said != "directory" && !matches!(name.to_str(), Some("dl" | "d/el"));
            fit.then(|| name.to_str().unwrap().to_owned())
        };
        let existing: Vec<String> = before.iter().filter_map(is_file).collect();
        let sections = sections(&mut random, &existing, count);
        let expected = sections.iter().try_for_each(|section| oracle(model.path(), section));
        Self { seed, real, model, before, sections, expected }
    }

    pub(crate) fn patch(&self) -> String {
        text(&self.sections)
    }

    /// The directory to apply the patch in.
    pub(crate) fn root(&self) -> &Path {
        self.real.path()
    }

    /// Compares the files with the oracle's: a patch that the oracle applies has the same result, and any
    /// other changes nothing. `said` is part of the error.
    pub(crate) fn judge(&self, applied: bool, said: &str) -> Result<(), String> {
        let Self { seed, sections, before, expected, .. } = self;
        let now = names(self.real.path());
        let wanted = if applied { &names(self.model.path()) } else { before };
        if applied == expected.is_ok() && now == *wanted {
            return Ok(());
        }
        Err(format!(
            "patch of seed {seed}: {sections:#?}\nin {before:#?}\noracle: {expected:?}, {wanted:#?}\n\
             applied: {applied}, {said}, {now:#?}"
        ))
    }
}
