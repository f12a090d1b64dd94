//! Which entry decides.
//!
//! Invariant: among the entries whose path is the asked path or an ancestor of it the most specific
//! wins; equally specific ones: deny over write over read; without any entry there is no access.

use std::collections::HashMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use codex_exec_server_protocol::AccessMode;

use super::paths::ancestors;

/// Paths without links, each with the access of the entries that name it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AccessMap {
    named: HashMap<OsString, AccessMode>,
}

impl AccessMap {
    /// Room for so many entries.
    pub fn with_capacity(entries: usize) -> Self {
        Self { named: HashMap::with_capacity(entries) }
    }

    /// Adds an entry. Of two for the same path the stricter in the order of precedence stays.
    pub fn insert(&mut self, path: PathBuf, access: AccessMode) {
        self.named
            .entry(path.into_os_string())
            .and_modify(|old| *old = access.max(*old))
            .or_insert(access);
    }

    /// Forgets all entries but these.
    pub fn retain(&mut self, mut keep: impl FnMut(&Path, AccessMode) -> bool) {
        self.named.retain(|path, access| keep(Path::new(path), *access));
    }

    /// Forgets what is said of exactly this path.
    pub fn remove(&mut self, path: &Path) {
        self.named.remove(path.as_os_str());
    }

    /// Adds an entry that decides, whatever others say of the same path.
    pub fn set(&mut self, path: PathBuf, access: AccessMode) {
        self.named.insert(path.into_os_string(), access);
    }

    /// What may be done with a path that contains no links.
    pub fn access(&self, path: &Path) -> AccessMode {
        ancestors(path).find_map(|above| self.named(above)).unwrap_or(AccessMode::Deny)
    }

    /// The access an entry names for exactly this path.
    pub fn named(&self, path: &Path) -> Option<AccessMode> {
        self.named.get(path.as_os_str()).copied()
    }

    /// Every path that is named, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (&Path, AccessMode)> {
        self.named.iter().map(|(path, access)| (Path::new(path), *access))
    }
}
