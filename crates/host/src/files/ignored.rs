//! Applies `.gitignore` and `.ignore` files.
//!
//! Invariant: a tree cannot harm a search. Rules are read from regular files only, up to a size limit,
//! without following links (as git does), so a FIFO or an endless device with such a name is skipped.

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
    ignore: Gitignore,
    gitignore: Gitignore,
    exclude: Gitignore,
    /// Git's rules from above a repository do not apply inside it.
    is_repository: bool,
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
    /// Reads the rules in `directory`, whose path is `path`.
    pub(super) fn read(
        resolver: Resolver,
        directory: BorrowedFd<'_>,
        path: &Path,
        has: RuleFiles,
    ) -> Option<Self> {
        if !has.ignore && !has.gitignore && !has.git {
            return None;
        }
        let rules = |wanted: bool, name: &str| {
            let mut builder = GitignoreBuilder::new(path);
            let text = if wanted { read_rules(resolver, directory, name) } else { None };
            for line in text.unwrap_or_default().lines() {
                // Skip a line that does not parse; the others count.
                let _ = builder.add_line(None, line);
            }
            builder.build().unwrap_or_else(|_| Gitignore::empty())
        };
        Some(Self {
            ignore: rules(has.ignore, ".ignore"),
            gitignore: rules(has.gitignore, ".gitignore"),
            exclude: rules(has.git, ".git/info/exclude"),
            is_repository: has.git,
        })
    }

    /// The rules of the directories above `root`, outermost first.
    pub(super) fn above(resolver: Resolver, root: &Path) -> Vec<Self> {
        let Ok(root) = std::fs::canonicalize(root) else { return Vec::new() };
        let mut levels = Vec::new();
        for directory in root.ancestors().skip(1) {
            let Ok(fd) = rustix::fs::open(directory, DIRECTORY, Mode::empty()) else { continue };
            let has = RuleFiles { ignore: true, gitignore: true, git: is_repository(fd.as_fd()) };
            levels.extend(Self::read(resolver, fd.as_fd(), directory, has));
        }
        levels.reverse();
        levels
    }
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
