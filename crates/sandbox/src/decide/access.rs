//! Which entry decides on a path.
//!
//! Invariant: of the entries for a path or its ancestors, the most specific one decides; of equally
//! specific ones, deny takes precedence over write, and write over read; without an entry there is no
//! access.

use std::collections::HashMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use codex_exec_server_protocol::AccessMode;

use super::paths::ancestors;

/// Link-free paths, each with the access of its entries.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AccessMap {
    named: HashMap<OsString, AccessMode>,
}

impl AccessMap {
    /// Creates a map with capacity for this many entries.
    pub fn with_capacity(entries: usize) -> Self {
        Self { named: HashMap::with_capacity(entries) }
    }

    /// Adds an entry. Of two for the same path, the one that takes precedence stays.
    pub fn insert(&mut self, path: PathBuf, access: AccessMode) {
        self.named
            .entry(path.into_os_string())
            .and_modify(|old| *old = access.max(*old))
            .or_insert(access);
    }

    /// Removes entries for which `keep` returns false.
    pub fn retain(&mut self, mut keep: impl FnMut(&Path, AccessMode) -> bool) {
        self.named.retain(|path, access| keep(Path::new(path), *access));
    }

    /// Removes the entry for exactly this path.
    pub fn remove(&mut self, path: &Path) {
        self.named.remove(path.as_os_str());
    }

    /// Sets the entry for a path, replacing others.
    pub fn set(&mut self, path: PathBuf, access: AccessMode) {
        self.named.insert(path.into_os_string(), access);
    }

    /// The access to a link-free path.
    pub fn access(&self, path: &Path) -> AccessMode {
        ancestors(path).find_map(|above| self.named(above)).unwrap_or(AccessMode::Deny)
    }

    /// The access of the entry for exactly this path.
    pub fn named(&self, path: &Path) -> Option<AccessMode> {
        self.named.get(path.as_os_str()).copied()
    }

    /// All entries, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = (&Path, AccessMode)> {
        self.named.iter().map(|(path, access)| (Path::new(path), *access))
    }
}

/// Whether `access` allows more than `most`.
pub(crate) fn exceeds(access: AccessMode, most: AccessMode) -> bool {
    match most {
        AccessMode::Deny => access != AccessMode::Deny,
        AccessMode::Read => access == AccessMode::Write,
        AccessMode::Write => false,
    }
}
