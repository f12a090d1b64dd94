//! Expands glob patterns to existing files.
//!
//! Invariant: the expansion is limited in depth, names and matches, and refused beyond that, never
//! truncated: a partly expanded pattern would deny less than requested. A directory that cannot be
//! listed is reported. Links are matched but not searched; a link that a pattern names explicitly is
//! followed and pinned. A literal component is looked up, not searched for. Everything below a matching
//! directory is denied with it, except what an entry grants there, which is searched like anything
//! else.

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};

use codex_exec_server_protocol::AccessMode;

use super::facts::{NodeKind, Obstacle, ResolvedPath, Resolver};
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
}

/// The result of an expansion.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// Every path that one of the patterns matches.
    pub(super) matches: Vec<PathBuf>,
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
            pending.push(Pending { path: base.to_owned(), depth: 0, states, denied: false });
        }
    }
    let mut found = Found::default();
    let mut names_seen = 0;
    while let Some(directory) = pending.pop() {
        let (names, searched) = names_in(&directory, globs, resolver, &mut found.traces);
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
                if found.matches.len() > limits.glob_matches {
                    return Err(PolicyError::GlobMatches(limits.glob_matches));
                }
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
                    pending.push(Pending { path, depth, states, denied });
                } else if own_depth.is_some() {
                    found.truncated = true;
                } else {
                    return Err(PolicyError::GlobDepth(path));
                }
            }
        }
    }
    found.matches.sort();
    Ok(found)
}

fn names_in(
    directory: &Pending,
    globs: &[Glob],
    resolver: &mut Resolver<'_>,
    blocked_traces: &mut Vec<PathTrace>,
) -> (Vec<(OsString, NodeKind)>, bool) {
    let mut blocked_by = |error: &io::Error| {
        let obstacle = Obstacle::looking_up(&directory.path, error);
        blocked_traces.push(PathTrace::blocked(directory.path.clone(), obstacle));
    };
    let literals: Option<Vec<&OsStr>> =
        directory.states.iter().map(|&(index, position)| globs[index].literal(position)).collect();
    match literals {
        Some(mut names) => {
            names.sort_unstable();
            names.dedup();
            let mut found = Vec::new();
            for name in names {
                match resolver.lookup(&directory.path.join(name)) {
                    Ok(Some(node)) => found.push((name.to_owned(), node.kind)),
                    Ok(None) => {}
                    Err(error) => blocked_by(&error),
                }
            }
            (found, false)
        }
        None => match resolver.facts().list(&directory.path) {
            Ok(names) => (names, true),
            Err(error) => {
                blocked_by(&error);
                (Vec::new(), true)
            }
        },
    }
}
