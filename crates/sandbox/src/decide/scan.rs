//! Expanding glob patterns to the files that exist.
//!
//! Invariant: bounded in depth, in names looked at and in matches, and refused beyond, never cut
//! short: a pattern that was expanded only in part would deny less than asked. Links are matched but
//! not walked through. A name that only literals can match is looked up, not searched for.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use super::facts::{NodeKind, Resolver};
use super::glob::{Glob, Position};
use super::policy::PolicyError;
use crate::Limits;

/// A directory still to be looked at.
struct Pending {
    path: PathBuf,
    depth: usize,
    /// Which patterns are how far.
    states: Vec<(usize, Position)>,
}

/// Every path that one of the patterns matches.
pub(super) fn expand(
    globs: &[Glob],
    cwd: Option<&Path>,
    max_depth: usize,
    limits: &Limits,
    resolver: &mut Resolver<'_>,
) -> Result<Vec<PathBuf>, PolicyError> {
    let mut pending = Vec::new();
    for absolute in [false, true] {
        let mut states = Vec::new();
        for (index, glob) in globs.iter().enumerate().filter(|(_, g)| g.absolute == absolute) {
            let mut positions = Vec::new();
            glob.close(Glob::START, &mut positions);
            states.extend(positions.into_iter().map(|position| (index, position)));
        }
        let base = if absolute { Some(Path::new("/")) } else { cwd };
        if let Some(base) = base.filter(|_| !states.is_empty()) {
            pending.push(Pending { path: base.to_owned(), depth: 0, states });
        }
    }
    let mut matches = Vec::new();
    let mut looked_at = 0;
    while let Some(directory) = pending.pop() {
        let (names, searched) = names_in(&directory, globs, resolver);
        // The literal beginning of a pattern is no search, so it does not count as depth.
        let depth = directory.depth + usize::from(searched);
        looked_at += names.len();
        if looked_at > limits.glob_names {
            return Err(PolicyError::GlobScan(limits.glob_names));
        }
        for (name, kind) in names {
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
                // All below a matching directory is denied with it.
                matches.push(directory.path.join(&name));
                if matches.len() > limits.glob_matches {
                    return Err(PolicyError::GlobMatches(limits.glob_matches));
                }
            } else if kind == NodeKind::Directory && depth < max_depth {
                states.sort_unstable();
                states.dedup();
                if !states.is_empty() {
                    let path = directory.path.join(&name);
                    // The kernel's own trees have no files that a pattern could mean.
                    if !matches!(path.to_str(), Some("/proc" | "/sys" | "/dev")) {
                        pending.push(Pending { path, depth, states });
                    }
                }
            }
        }
    }
    matches.sort();
    Ok(matches)
}

fn names_in(
    directory: &Pending,
    globs: &[Glob],
    resolver: &mut Resolver<'_>,
) -> (Vec<(OsString, NodeKind)>, bool) {
    let literals: Option<Vec<&OsStr>> =
        directory.states.iter().map(|&(index, position)| globs[index].literal(position)).collect();
    match literals {
        Some(mut names) => {
            names.sort_unstable();
            names.dedup();
            let mut found = Vec::new();
            for name in names {
                if let Ok(Some(node)) = resolver.lookup(&directory.path.join(name)) {
                    found.push((name.to_owned(), node.kind));
                }
            }
            (found, false)
        }
        // A directory that cannot be listed here cannot be listed by the process either.
        None => (resolver.facts().list(&directory.path).unwrap_or_default(), true),
    }
}
