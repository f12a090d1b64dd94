//! Which directories a project has, and whether the user trusts them.
//!
//! Invariant: a file of a project is read only if the user's or the administrator's configuration trusts
//! its directory: by that directory's own path, else by that of the project's root, else by that of the
//! main checkout of its git repository. The first of these that the configuration names decides. A
//! repository's own files never make it trusted: a linked worktree counts for its main checkout only if
//! that checkout points back.

use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use toml::Value;

use super::document::{Document, DocumentError};

/// What marks a project's root, unless `project_root_markers` says otherwise.
const MARKERS: &[&str] = &[".git"];

/// What the configuration says about projects.
#[derive(Debug)]
pub(super) struct Projects {
    markers: Vec<String>,
    /// Later entries win.
    trust: Vec<(String, bool)>,
}

impl Projects {
    /// From files, lowest precedence first.
    pub(super) fn of<'d>(
        documents: impl Iterator<Item = &'d Document>,
    ) -> Result<Self, DocumentError> {
        let mut markers = MARKERS.iter().map(ToString::to_string).collect();
        let mut trust = Vec::new();
        for document in documents {
            if let Some(value) = document.table.get("project_root_markers") {
                let names = value.as_array().and_then(|array| {
                    array.iter().map(|name| name.as_str().map(str::to_owned)).collect()
                });
                markers = names.ok_or_else(|| {
                    document.value_error("project_root_markers must be an array of strings")
                })?;
            }
            let Some(projects) = document.table.get("projects") else { continue };
            let projects = projects.as_table();
            let projects =
                projects.ok_or_else(|| document.value_error("projects must be a table"))?;
            for (path, project) in projects {
                trust.extend(
                    trust_level(document, path, project)?.map(|level| (path.clone(), level)),
                );
            }
        }
        Ok(Self { markers, trust })
    }

    /// The directories of the project around `cwd` that are trusted, outermost first.
    pub(super) fn trusted_directories(&self, cwd: &Path) -> Vec<PathBuf> {
        let root = cwd.ancestors().find(|directory| self.is_root(directory)).unwrap_or(cwd);
        let repository = repository(cwd);
        let fallback =
            self.level(root).or_else(|| repository.and_then(|repository| self.level(&repository)));
        let mut directories: Vec<PathBuf> = cwd
            .ancestors()
            // Both are ancestors of `cwd`.
            .take_while(|directory| directory.as_os_str().len() >= root.as_os_str().len())
            .filter(|directory| self.level(directory).or(fallback).unwrap_or(false))
            .map(Path::to_owned)
            .collect();
        directories.reverse();
        directories
    }

    fn is_root(&self, directory: &Path) -> bool {
        self.markers.iter().any(|marker| match marker.as_str() {
            ".git" => is_repository(directory),
            other => directory.join(other).exists(),
        })
    }

    /// What the configuration says about this very directory: by its real path, else as it is spelled.
    fn level(&self, directory: &Path) -> Option<bool> {
        let named = |path: &Path| {
            let entry = self
                .trust
                .iter()
                .rev()
                .find(|(name, _)| name.as_bytes() == path.as_os_str().as_bytes());
            entry.map(|(_, trusted)| *trusted)
        };
        directory.canonicalize().ok().and_then(|real| named(&real)).or_else(|| named(directory))
    }
}

fn trust_level(
    document: &Document,
    path: &str,
    project: &Value,
) -> Result<Option<bool>, DocumentError> {
    let Some(project) = project.as_table() else {
        return Err(document.value_error(format!("projects.{path:?} must be a table")));
    };
    match project.get("trust_level").map(Value::as_str) {
        None => Ok(None),
        Some(Some("trusted")) => Ok(Some(true)),
        Some(Some("untrusted")) => Ok(Some(false)),
        Some(_) => Err(document.value_error(format!(
            "projects.{path:?}.trust_level must be \"trusted\" or \"untrusted\""
        ))),
    }
}

/// Whether a directory has a `.git` that is a repository or points to one; an empty directory of that
/// name is neither.
fn is_repository(directory: &Path) -> bool {
    let git = directory.join(".git");
    git.is_file() || git.join("HEAD").symlink_metadata().is_ok()
}

/// The main checkout of the repository around a directory.
fn repository(cwd: &Path) -> Option<PathBuf> {
    let checkout = cwd.ancestors().find(|directory| is_repository(directory))?;
    Some(main_checkout(checkout).unwrap_or_else(|| checkout.to_owned()))
}

/// The main checkout of a linked worktree: its `.git` names a directory of the repository, and that
/// directory names this `.git`.
fn main_checkout(checkout: &Path) -> Option<PathBuf> {
    let pointer = checkout.join(".git");
    let administered = checkout.join(first_line(&pointer)?.strip_prefix("gitdir:")?.trim());
    let back = administered.join(first_line(&administered.join("gitdir"))?.trim());
    if back.canonicalize().ok()? != pointer.canonicalize().ok()? {
        return None;
    }
    let common = administered.join(first_line(&administered.join("commondir"))?.trim());
    let common = common.canonicalize().ok()?;
    let is_git = common.components().next_back() == Some(Component::Normal(".git".as_ref()));
    is_git.then(|| common.parent().map(Path::to_owned)).flatten()
}

/// The first line of a small file.
fn first_line(path: &Path) -> Option<String> {
    use std::io::Read;
    let mut text = String::new();
    if !path.is_file() {
        return None;
    }
    std::fs::File::open(path).ok()?.take(8192).read_to_string(&mut text).ok()?;
    text.lines().next().map(str::to_owned)
}
