//! Walks a tree for `fs/search` and `fs/glob`, applying their rules.
//!
//! Invariant: names are sorted, and a directory comes before its entries; no link below the root is
//! followed; each result is a name in an open directory, so it can be opened without resolving its path
//! again.

use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use codex_exec_server_protocol::files::FsPathError;
use codex_exec_server_protocol::{DecodeLimits, PathUri};
use ignore::Match;
use ignore::overrides::{Override, OverrideBuilder};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags};
use rustix::io::Errno;

use super::directory::for_each_name;
use super::error::errno_message;
use super::ignored::{self, Level, RuleFiles};
use super::resolve::{LISTING, Links, Resolver, bytes_path, file_type};
use super::{Cancel, FileError, FilesConfig};

/// Maximum depth: each level holds a descriptor open.
const MAX_DEPTH: usize = 200;

/// The rules of one request.
pub(super) struct Rules<'a> {
    pub root: &'a PathUri,
    pub include: &'a [String],
    pub exclude: &'a [String],
    pub respect_gitignore: bool,
    pub hidden: bool,
    pub case_insensitive: bool,
}

/// An entry that the rules include.
pub(super) struct Found<'a> {
    /// The open directory …
    pub directory: BorrowedFd<'a>,
    /// … and the name in it.
    pub name: &'a Path,
    /// The absolute path.
    pub path: &'a Path,
    /// The kind of the entry itself; links are not followed.
    pub kind: FileType,
    /// The request's own path, which is a file (or a link to one).
    pub is_root: bool,
}

/// An item of a scan.
pub(super) enum Scanned<'a> {
    Entry(Found<'a>),
    Failed(FsPathError),
}

/// An open directory of the walk.
struct OpenDirectory {
    fd: OwnedFd,
    path: PathBuf,
    /// Names still to visit, in reverse order.
    names: Vec<(Vec<u8>, FileType)>,
    rules: Option<Level>,
}

impl Rules<'_> {
    /// Calls `each` until it breaks, the scan is cancelled, or the walk is complete.
    pub(super) fn scan(
        &self,
        resolver: Resolver,
        config: &FilesConfig,
        cancel: &Cancel,
        mut each: impl FnMut(Scanned<'_>) -> ControlFlow<()>,
    ) -> Result<(), FileError> {
        let root = self.root.as_path();
        let failed = |errno| FileError::os("search", self.root, errno);
        let stat = rustix::fs::stat(root).map_err(failed)?;
        if file_type(&stat) != FileType::Directory {
            let kind = file_type(&stat);
            let found = Found { directory: CWD, name: root, path: root, kind, is_root: true };
            let _ = each(Scanned::Entry(found));
            return Ok(());
        }
        let overrides = self.overrides(config)?;
        let fd =
            rustix::fs::open(root, LISTING - OFlags::NOFOLLOW, Mode::empty()).map_err(failed)?;
        let mut room = config.max_ignore_memory;
        let above = match self.respect_gitignore {
            true => Level::above(resolver, root, room),
            false => Vec::new(),
        };
        room -= above.iter().map(|level| level.cost).sum::<usize>();
        let real_root = std::fs::canonicalize(root).ok().filter(|real| real != root);
        let mut stack =
            vec![self.enter(resolver, fd, root.to_owned(), config, room).map_err(|error| {
                match error {
                    EnterError::Os(errno) => failed(errno),
                    EnterError::TooMany => FileError::limit(self.root, TOO_MANY),
                }
            })?];
        let mut refused: Vec<FsPathError> = above.iter().flat_map(refused_rules).collect();
        refused.extend(stack.iter().filter_map(|open| open.rules.as_ref()).flat_map(refused_rules));
        room -= stack.iter().map(OpenDirectory::rules_cost).sum::<usize>();
        while let Some(open) = stack.last_mut() {
            if cancel.is_cancelled() {
                return Ok(());
            }
            for error in refused.drain(..) {
                if each(Scanned::Failed(error)).is_break() {
                    return Ok(());
                }
            }
            let Some((name, kind)) = open.names.pop() else {
                room += open.rules_cost();
                stack.pop();
                continue;
            };
            let name = bytes_path(&name);
            let path = open.path.join(name);
            let is_directory = kind == FileType::Directory;
            let real_path = real_root
                .as_ref()
                .map(|real| real.join(path.strip_prefix(root).unwrap_or(Path::new(""))));
            let levels = || above.iter().chain(stack.iter().filter_map(|open| open.rules.as_ref()));
            if self.excludes(&overrides, levels(), &path, real_path.as_ref(), is_directory) {
                continue;
            }
            let Some(open) = stack.last() else { break };
            let directory = open.fd.as_fd();
            let found = Found { directory, name, path: &path, kind, is_root: false };
            if each(Scanned::Entry(found)).is_break() {
                return Ok(());
            }
            if !is_directory {
                continue;
            }
            let entered = if stack.len() >= MAX_DEPTH {
                Err(EnterError::Os(Errno::NAMETOOLONG))
            } else {
                resolver
                    .open_below(directory, name.as_os_str().as_bytes(), LISTING, Links::Refuse)
                    .map_err(EnterError::Os)
                    .and_then(|fd| self.enter(resolver, fd, path.clone(), config, room))
            };
            match entered {
                Ok(below) => {
                    room -= below.rules_cost();
                    refused.extend(below.rules.iter().flat_map(refused_rules));
                    stack.push(below);
                }
                Err(error) => {
                    let Ok(path) = PathUri::try_from(path.as_path()) else { continue };
                    let message = match error {
                        EnterError::Os(errno) => errno_message(errno.raw_os_error()),
                        EnterError::TooMany => TOO_MANY.into(),
                    };
                    if each(Scanned::Failed(FsPathError { path, message })).is_break() {
                        return Ok(());
                    }
                }
            }
        }
        Ok(())
    }

    fn enter(
        &self,
        resolver: Resolver,
        fd: OwnedFd,
        path: PathBuf,
        config: &FilesConfig,
        room: usize,
    ) -> Result<OpenDirectory, EnterError> {
        let (mut names, mut rule_files, mut too_many) = (Vec::new(), RuleFiles::default(), false);
        let each = |name: &[u8], kind| {
            rule_files.record(name);
            let kind = match kind {
                FileType::Unknown => {
                    rustix::fs::statat(&fd, bytes_path(name), AtFlags::SYMLINK_NOFOLLOW)
                        .map_or(FileType::Unknown, |stat| file_type(&stat))
                }
                kind => kind,
            };
            names.push((name.to_vec(), kind));
            too_many = names.len() > config.max_scan_names;
            Ok(!too_many)
        };
        // The caller knows the path.
        let failed = |errno| FileError::os("search", self.root, errno);
        match for_each_name(fd.as_fd(), each, failed) {
            Ok(()) => {}
            Err(FileError::Os { errno, .. }) => {
                return Err(EnterError::Os(Errno::from_raw_os_error(errno)));
            }
            Err(_) => return Err(EnterError::Os(Errno::IO)),
        }
        if too_many {
            return Err(EnterError::TooMany);
        }
        names.sort_unstable_by(|a, b| b.0.cmp(&a.0));
        let rules = self
            .respect_gitignore
            .then(|| Level::read(resolver, fd.as_fd(), &path, rule_files, room))
            .flatten();
        Ok(OpenDirectory { fd, path, names, rules })
    }

    fn excludes<'l>(
        &self,
        overrides: &Override,
        levels: impl DoubleEndedIterator<Item = &'l Level>,
        path: &Path,
        real_path: Option<&PathBuf>,
        is_directory: bool,
    ) -> bool {
        match overrides.matched(path, is_directory) {
            Match::Ignore(_) => return true,
            Match::Whitelist(_) => return false,
            Match::None => {}
        }
        match ignored::verdict(levels, path, real_path, is_directory) {
            Match::Ignore(()) => true,
            Match::Whitelist(()) => false,
            Match::None => {
                let name = path.file_name().map_or(b"".as_slice(), OsStrExt::as_bytes);
                !self.hidden && name.starts_with(b".")
            }
        }
    }

    fn overrides(&self, config: &FilesConfig) -> Result<Override, FileError> {
        let globs = || self.include.iter().chain(self.exclude);
        check_patterns(globs().map(String::as_str), config)?;
        let mut overrides = OverrideBuilder::new(self.root.as_path());
        let bad = |glob: &str, error: &ignore::Error| FileError::Pattern {
            pattern: glob.into(),
            reason: error.to_string(),
        };
        if self.case_insensitive {
            overrides.case_insensitive(true).map_err(|error| bad("", &error))?;
        }
        for glob in self.include {
            // A leading `!` would turn an include into an exclude.
            let plain = if glob.starts_with('!') { format!("\\{glob}") } else { glob.clone() };
            overrides.add(&plain).map_err(|error| bad(glob, &error))?;
        }
        for glob in self.exclude {
            overrides.add(&format!("!{glob}")).map_err(|error| bad(glob, &error))?;
        }
        overrides.build().map_err(|error| bad("", &error))
    }
}

impl OpenDirectory {
    fn rules_cost(&self) -> usize {
        self.rules.as_ref().map_or(0, |rules| rules.cost)
    }
}

/// The rule files of a level that do not apply, as errors of the scan.
fn refused_rules(level: &Level) -> impl Iterator<Item = FsPathError> {
    level.refused.iter().filter_map(|name| {
        let path = PathUri::try_from(level.path().join(name).as_path()).ok()?;
        Some(FsPathError { path, message: "has too many rules; they are not applied".into() })
    })
}

enum EnterError {
    Os(Errno),
    TooMany,
}

const TOO_MANY: &str = "has too many entries to search";

/// Limits the size of patterns, which come from the client, before compiling them.
pub(super) fn check_patterns<'a>(
    patterns: impl IntoIterator<Item = &'a str>,
    config: &FilesConfig,
) -> Result<(), FileError> {
    let total: usize = patterns.into_iter().map(|pattern| pattern.len() + 1).sum();
    if total > config.max_pattern_bytes {
        let allowed = format!("at most {} bytes", config.max_pattern_bytes);
        return Err(FileError::out_of_range("length of all patterns", total as u64, allowed));
    }
    Ok(())
}

/// The remaining space of a response.
pub(super) struct ResponseBudget {
    bytes: usize,
    /// JSON values: receivers refuse a message with too many.
    values: usize,
}

impl ResponseBudget {
    /// The space of a response within the limits of `config`.
    pub(super) fn new(config: &FilesConfig) -> Self {
        // Each error has two members; the rest of a response has a few.
        let others = 3 * config.max_scan_errors + 64;
        let values = DecodeLimits::default().values.saturating_sub(others);
        Self { bytes: config.max_scan_answer_bytes, values }
    }

    pub(super) fn take(&mut self, bytes: usize, values: usize) -> bool {
        match (self.bytes.checked_sub(bytes), self.values.checked_sub(values)) {
            (Some(bytes), Some(values)) => {
                *self = Self { bytes, values };
                true
            }
            _ => false,
        }
    }
}

/// Records an error, up to the maximum and as long as there is space in the response.
pub(super) fn record_error(
    errors: &mut Vec<FsPathError>,
    error: FsPathError,
    config: &FilesConfig,
    budget: &mut ResponseBudget,
) {
    let bytes = error.path.encoded_len() + error.message.len() + 64;
    // Their values are set aside.
    if errors.len() < config.max_scan_errors && budget.take(bytes, 0) {
        errors.push(error);
    }
}
