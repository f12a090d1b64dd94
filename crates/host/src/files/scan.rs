//! What `fs/search` and `fs/glob` share: which files of a tree are looked at.

use codex_exec_server_protocol::PathUri;
use codex_exec_server_protocol::files::FsPathError;
use ignore::overrides::{Override, OverrideBuilder};
use ignore::{Walk, WalkBuilder};

use super::{FileError, FilesConfig};

/// The rules of one request.
pub(super) struct Rules<'a> {
    pub root: &'a PathUri,
    pub include: &'a [String],
    pub exclude: &'a [String],
    pub respect_gitignore: bool,
    pub hidden: bool,
    pub case_insensitive: bool,
}

impl Rules<'_> {
    /// Every entry below the root the rules let through, sorted, links not followed.
    pub fn walk(&self, config: &FilesConfig) -> Result<Walk, FileError> {
        let root = self.root.as_path();
        // The root itself may be a link; what is below it may not lead out.
        let stat =
            rustix::fs::stat(root).map_err(|errno| FileError::os("search", self.root, errno))?;
        let is_directory = super::resolve::file_type(&stat) == rustix::fs::FileType::Directory;
        let mut walk = WalkBuilder::new(root);
        walk.standard_filters(false)
            .hidden(!self.hidden)
            .ignore(self.respect_gitignore)
            .git_ignore(self.respect_gitignore)
            .git_exclude(self.respect_gitignore)
            .parents(self.respect_gitignore)
            // A tree that was not cloned has rules too.
            .require_git(false)
            .follow_links(false)
            .sort_by_file_name(std::cmp::Ord::cmp);
        if is_directory {
            walk.overrides(self.overrides(config)?);
        }
        Ok(walk.build())
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

/// Patterns come from outside; their size is bounded before anything is compiled.
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

/// An error of the walk, with the path it is about; the root where it does not say.
pub(super) fn walk_error(root: &PathUri, error: &ignore::Error) -> FsPathError {
    let path = path_of(error).and_then(|path| PathUri::try_from(path).ok());
    let message = error.io_error().map_or_else(|| error.to_string(), ToString::to_string);
    FsPathError { path: path.unwrap_or_else(|| root.clone()), message }
}

fn path_of(error: &ignore::Error) -> Option<&std::path::Path> {
    match error {
        ignore::Error::WithPath { path, .. } => Some(path),
        ignore::Error::WithDepth { err, .. } | ignore::Error::WithLineNumber { err, .. } => {
            path_of(err)
        }
        ignore::Error::Loop { child, .. } => Some(child),
        _ => None,
    }
}

/// Bytes an answer may still grow.
pub(super) struct Room(pub usize);

impl Room {
    pub fn take(&mut self, bytes: usize) -> bool {
        match self.0.checked_sub(bytes) {
            Some(left) => {
                self.0 = left;
                true
            }
            None => false,
        }
    }
}

/// Keeps the first errors only.
pub(super) fn note(errors: &mut Vec<FsPathError>, error: FsPathError, config: &FilesConfig) {
    if errors.len() < config.max_scan_errors {
        errors.push(error);
    }
}
