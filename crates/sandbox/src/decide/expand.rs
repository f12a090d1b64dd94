//! Expands glob patterns to existing files.
//!
//! Invariant: the expansion is limited in depth, names and matches, and refused beyond that, never
//! truncated: a partly expanded pattern would deny less than requested. A directory that can be entered
//! but not listed may hold matches that only a process that knows their names finds: it is denied as a whole,
//! except what entries grant below it, or refused where an entry grants the directory itself. One that cannot
//! be entered either is reported. Links are matched but not searched; a link that a pattern names explicitly is
//! followed and pinned. A literal component is looked up, not searched for. Everything below a matching
//! directory is denied with it, except what an entry grants there, which is searched like anything
//! else.

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};

use codex_exec_server_protocol::AccessMode;

use super::facts::{NodeKind, Obstacle, ResolvedPath, Resolver, can_enter};
use super::glob::{Glob, Position};
use super::path_trace::PathTrace;
use super::paths::{is_within, order};
use super::policy::PolicyError;
use crate::Limits;

/// A directory to visit.
struct Pending {
    path: PathBuf,
    depth: usize,
    /// The patterns and their positions.
    states: Vec<(usize, Position)>,
    /// Already denied: visit only paths to what is granted below it.
    denied: bool,
    /// Where the patterns begin.
    is_base: bool,
}

/// Granted paths with all their aliases, in [`order`].
pub(super) struct Granted(Vec<PathBuf>);

impl Granted {
    pub(super) fn new(mut paths: Vec<PathBuf>) -> Self {
        paths.sort_by(|a, b| order(a, b));
        Self(paths)
    }

    fn contains(&self, path: &Path) -> bool {
        self.0.binary_search_by(|granted| order(granted, path)).is_ok()
    }

    /// Whether a granted path is at or below this one.
    fn contains_within(&self, path: &Path) -> bool {
        let next = self.0.partition_point(|granted| order(granted, path).is_lt());
        self.0.get(next).is_some_and(|granted| is_within(granted, path))
    }

    /// The names in this directory that lead to granted paths.
    fn names_in(&self, directory: &Path) -> Vec<OsString> {
        let next = self.0.partition_point(|granted| order(granted, directory).is_lt());
        let within = self.0[next..].iter().take_while(|granted| is_within(granted, directory));
        let below = within.filter_map(|granted| granted.strip_prefix(directory).ok());
        let mut names: Vec<OsString> =
            below.filter_map(|below| below.iter().next()).map(OsStr::to_owned).collect();
        names.sort();
        names.dedup();
        names
    }
}

/// The result of an expansion.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// Every path that one of the patterns matches.
    pub(super) matches: Vec<PathBuf>,
    /// Directories that can be entered but not listed, so that matches in them cannot be found.
    pub(super) unlistable: Vec<PathBuf>,
    /// Directories that could not be listed, and links that were followed.
    pub(super) traces: Vec<PathTrace>,
    /// The policy's own depth limit ended the expansion early.
    pub(super) truncated: bool,
}

/// Expands the patterns below their bases. `own_depth` is the policy's own limit, where the expansion
/// ends; without one, the patterns are expanded completely or refused.
pub(super) fn expand(
    globs: &[Glob],
    base: Option<&Path>,
    own_depth: Option<usize>,
    granted: &Granted,
    limits: &Limits,
    resolver: &mut Resolver<'_>,
) -> Result<Found, PolicyError> {
    let max_depth = own_depth.unwrap_or(limits.glob_depth);
    let mut pending = Vec::new();
    for absolute in [false, true] {
        let mut states = Vec::new();
        for (index, glob) in globs.iter().enumerate().filter(|(_, g)| g.absolute == absolute) {
            let mut positions = Vec::new();
            glob.close(Glob::START, &mut positions);
            states.extend(positions.into_iter().map(|position| (index, position)));
        }
        let base = if absolute { Some(Path::new("/")) } else { base };
        if let Some(base) = base.filter(|_| !states.is_empty()) {
            pending.push(Pending {
                path: base.to_owned(),
                depth: 0,
                states,
                denied: false,
                is_base: true,
            });
        }
    }
    let mut found = Found::default();
    let mut names_seen = 0;
    while let Some(mut directory) = pending.pop() {
        let (names, searched) = match names_in(&directory, globs, resolver, &mut found.traces) {
            Names::LookedUp(names) => (names, false),
            Names::Listed(names) => (names, true),
            Names::Unlistable => {
                if !directory.denied {
                    if directory.is_base || granted.contains(&directory.path) {
                        return Err(PolicyError::GlobUnlistable(directory.path));
                    }
                    directory.denied = true;
                    found.unlistable.push(directory.path.clone());
                }
                let names = granted.names_in(&directory.path);
                (look_up(&directory, names, resolver, &mut found.traces), true)
            }
        };
        // Literal components are not searched, so they do not count as depth.
        let depth = directory.depth + usize::from(searched);
        names_seen += names.len();
        if names_seen > limits.glob_names {
            return Err(PolicyError::GlobScan(limits.glob_names));
        }
        for (name, kind) in names {
            let mut path = directory.path.join(&name);
            if directory.denied && !granted.contains_within(&path) {
                continue;
            }
            let mut states = Vec::new();
            let mut matched = false;
            for &(index, position) in &directory.states {
                let glob = &globs[index];
                let mut next = Vec::new();
                let hit = glob.step(position, &name, &mut next);
                matched |= hit && (!glob.directories_only || kind == NodeKind::Directory);
                states.extend(next.into_iter().map(|position| (index, position)));
            }
            if matched {
                found.matches.push(path.clone());
            }
            if found.matches.len() + found.unlistable.len() > limits.glob_matches {
                return Err(PolicyError::GlobMatches(limits.glob_matches));
            }
            let mut kind = kind;
            // The pattern names this link explicitly: it means the target.
            if kind == NodeKind::Link && !searched && !states.is_empty() {
                let (resolved, trace) = PathTrace::follow(resolver, &path, AccessMode::Deny);
                found.traces.push(trace);
                let ResolvedPath::Found(target, node) = resolved else { continue };
                (path, kind) = (target, node.kind);
            }
            let denied = matched || (directory.denied && !granted.contains(&path));
            if denied && !granted.contains_within(&path) {
                continue;
            }
            if kind == NodeKind::Directory && !states.is_empty() {
                // A pattern that does not name the kernel's trees does not mean files in them.
                if searched && matches!(path.to_str(), Some("/proc" | "/sys")) {
                    continue;
                }
                if depth < max_depth {
                    states.sort_unstable();
                    states.dedup();
                    pending.push(Pending { path, depth, states, denied, is_base: false });
                } else if own_depth.is_some() {
                    found.truncated = true;
                } else {
                    return Err(PolicyError::GlobDepth(path));
                }
            }
        }
    }
    if found.matches.len() + found.unlistable.len() > limits.glob_matches {
        return Err(PolicyError::GlobMatches(limits.glob_matches));
    }
    found.matches.sort();
    Ok(found)
}

/// The names in a directory that patterns may match.
enum Names {
    /// The patterns name what they mean.
    LookedUp(Vec<(OsString, NodeKind)>),
    /// All names.
    Listed(Vec<(OsString, NodeKind)>),
    /// The directory can be entered but not listed.
    Unlistable,
}

fn names_in(
    directory: &Pending,
    globs: &[Glob],
    resolver: &mut Resolver<'_>,
    blocked_traces: &mut Vec<PathTrace>,
) -> Names {
    let literals: Option<Vec<OsString>> = directory
        .states
        .iter()
        .map(|&(index, position)| globs[index].literal(position).map(OsStr::to_owned))
        .collect();
    if let Some(mut names) = literals {
        names.sort_unstable();
        names.dedup();
        return Names::LookedUp(look_up(directory, names, resolver, blocked_traces));
    }
    match resolver.facts().list(&directory.path) {
        Ok(names) => Names::Listed(names),
        Err(error) => {
            let is_denied = error.raw_os_error() == Some(libc::EACCES);
            if is_denied && can_enter(resolver.facts(), &directory.path) {
                return Names::Unlistable;
            }
            blocked_traces.push(blocked(directory, &error));
            Names::Listed(Vec::new())
        }
    }
}

/// Those of the names that exist.
fn look_up(
    directory: &Pending,
    names: Vec<OsString>,
    resolver: &mut Resolver<'_>,
    blocked_traces: &mut Vec<PathTrace>,
) -> Vec<(OsString, NodeKind)> {
    let mut found = Vec::new();
    for name in names {
        match resolver.lookup(&directory.path.join(&name)) {
            Ok(Some(node)) => found.push((name, node.kind)),
            Ok(None) => {}
            Err(error) => blocked_traces.push(blocked(directory, &error)),
        }
    }
    found
}

fn blocked(directory: &Pending, error: &io::Error) -> PathTrace {
    let obstacle = Obstacle::looking_up(&directory.path, error);
    PathTrace::blocked(directory.path.clone(), obstacle)
}
