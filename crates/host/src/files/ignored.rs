//! Applies `.gitignore` and `.ignore` files.
//!
//! Invariant: a tree cannot harm a search. Rules are read from regular files only, up to a size limit,
//! without following links (as git does), so a FIFO or an endless device with such a name is skipped.
//! What their rules will take is estimated before they are compiled.

use std::io::Read;
use std::path::{Path, PathBuf};

use ignore::Match;
use ignore::gitignore::{Gitignore, GitignoreBuilder};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::fs::{FileType, Mode, OFlags};

use super::resolve::{DIRECTORY, Links, REGULAR, Resolver, file_type};

/// Longer rule files are cut at a line.
const MAX_RULES: u64 = 1 << 20;

/// The rules of one directory.
pub(super) struct Level {
    path: PathBuf,
    ignore: Gitignore,
    gitignore: Gitignore,
    exclude: Gitignore,
    /// Git's rules from above a repository do not apply inside it.
    is_repository: bool,
    /// The estimated memory of the rules, in bytes.
    pub cost: usize,
    /// Rule files that do not apply because they would take too much memory.
    pub refused: Vec<&'static str>,
}

/// Rule files that a directory has.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct RuleFiles {
    ignore: bool,
    gitignore: bool,
    git: bool,
}

impl RuleFiles {
    pub(super) fn record(&mut self, name: &[u8]) {
        match name {
            b".ignore" => self.ignore = true,
            b".gitignore" => self.gitignore = true,
            b".git" => self.git = true,
            _ => {}
        }
    }
}

impl Level {
    /// Reads the rules in `directory`, whose path is `path`, as long as they fit into `room` bytes.
    pub(super) fn read(
        resolver: Resolver,
        directory: BorrowedFd<'_>,
        path: &Path,
        has: RuleFiles,
        room: usize,
    ) -> Option<Self> {
        if !has.ignore && !has.gitignore && !has.git {
            return None;
        }
        let (mut cost, mut refused) = (0, Vec::new());
        let mut rules = |wanted: bool, name: &'static str| {
            let mut builder = GitignoreBuilder::new(path);
            let text = if wanted { read_rules(resolver, directory, name) } else { None };
            let text = text.unwrap_or_default();
            let needed = text.lines().map(rule_cost).sum::<usize>();
            if needed > room - cost {
                refused.push(name);
                return Gitignore::empty();
            }
            cost += needed;
            for line in text.lines() {
                // Skip a line that does not parse; the others count.
                let _ = builder.add_line(None, line);
            }
            builder.build().unwrap_or_else(|_| {
                refused.push(name);
                Gitignore::empty()
            })
        };
        let ignore = rules(has.ignore, ".ignore");
        let gitignore = rules(has.gitignore, ".gitignore");
        let exclude = rules(has.git, ".git/info/exclude");
        let path = path.to_owned();
        Some(Self { path, ignore, gitignore, exclude, is_repository: has.git, cost, refused })
    }

    /// The directory.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The rules of the directories above `root`, outermost first. The inner ones take from `room` first.
    pub(super) fn above(resolver: Resolver, root: &Path, mut room: usize) -> Vec<Self> {
        let Ok(root) = std::fs::canonicalize(root) else { return Vec::new() };
        let mut levels = Vec::new();
        for directory in root.ancestors().skip(1) {
            let Ok(fd) = rustix::fs::open(directory, DIRECTORY, Mode::empty()) else { continue };
            let has = RuleFiles { ignore: true, gitignore: true, git: is_repository(fd.as_fd()) };
            let level = Self::read(resolver, fd.as_fd(), directory, has, room);
            room -= level.as_ref().map_or(0, |level| level.cost);
            levels.extend(level);
        }
        levels.reverse();
        levels
    }
}

/// An estimate of the memory that a rule takes while it is compiled: one with wildcards becomes a regular
/// expression, the others are texts in a table.
fn rule_cost(line: &str) -> usize {
    let line = line.trim_end();
    if line.is_empty() || line.starts_with('#') {
        return 0;
    }
    let is_text = !line.strip_prefix("*.").unwrap_or(line).contains(['*', '?', '[', '{', '\\']);
    256 + line.len() * if is_text { 8 } else { 384 }
}

fn is_repository(directory: BorrowedFd<'_>) -> bool {
    rustix::fs::accessat(
        directory,
        ".git",
        rustix::fs::Access::EXISTS,
        rustix::fs::AtFlags::empty(),
    )
    .is_ok()
}

fn read_rules(resolver: Resolver, directory: BorrowedFd<'_>, name: &str) -> Option<String> {
    // Check before opening, and again after: the second check decides.
    let regular = |stat: &rustix::fs::Stat| file_type(stat) == FileType::RegularFile;
    let found = rustix::fs::statat(directory, name, rustix::fs::AtFlags::SYMLINK_NOFOLLOW).ok()?;
    if !regular(&found) {
        return None;
    }
    let flags = OFlags::RDONLY | REGULAR;
    let fd = resolver.open_below(directory, name.as_bytes(), flags, Links::Refuse).ok()?;
    if !regular(&rustix::fs::fstat(&fd).ok()?) {
        return None;
    }
    let mut bytes = Vec::new();
    std::fs::File::from(fd).take(MAX_RULES).read_to_end(&mut bytes).ok()?;
    if bytes.len() as u64 == MAX_RULES {
        bytes.truncate(bytes.iter().rposition(|&b| b == b'\n').unwrap_or(0));
    }
    let text = String::from_utf8_lossy(&bytes).into_owned();
    Some(text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text))
}

/// What the rules say about a path: the innermost match decides, and `.ignore` takes precedence over
/// `.gitignore`.
pub(super) fn verdict<'a>(
    levels: impl DoubleEndedIterator<Item = &'a Level>,
    path: &Path,
    real_path: Option<&PathBuf>,
    is_directory: bool,
) -> Match<()> {
    let (mut ignore, mut gitignore, mut exclude) = (Match::None, Match::None, Match::None);
    let mut in_repository = true;
    for level in levels.rev() {
        let says = |rules: &Gitignore| {
            if rules.is_empty() {
                return Match::None;
            }
            // Rules from above the root apply to its real path.
            let path = match real_path {
                Some(real) if !path.starts_with(rules.path()) => real.as_path(),
                _ => path,
            };
            if !path.starts_with(rules.path()) {
                return Match::None;
            }
            rules.matched(path, is_directory).map(|_| ())
        };
        ignore = ignore.or(says(&level.ignore));
        if in_repository {
            gitignore = gitignore.or(says(&level.gitignore));
            exclude = exclude.or(says(&level.exclude));
        }
        in_repository &= !level.is_repository;
    }
    ignore.or(gitignore).or(exclude)
}
