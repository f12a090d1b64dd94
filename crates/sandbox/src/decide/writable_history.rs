//! Where sandboxed processes of this server could have created links.
//!
//! Invariant: it only grows. A directory that any policy has made writable stays in it while the server
//! runs, because links left there do.

use std::collections::HashSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::paths::ancestors;

/// Maximum directories; beyond that, every directory counts as written.
const LIMIT: usize = 65_536;

/// The directories that policies of this server have made writable.
#[derive(Debug, Clone, Default)]
pub struct WritableHistory {
    directories: HashSet<OsString>,
}

impl WritableHistory {
    /// Whether a sandboxed process could have changed the names in this directory. The path must be
    /// link-free.
    pub fn covers(&self, directory: &Path) -> bool {
        !self.directories.is_empty()
            && ancestors(directory).any(|above| self.directories.contains(above.as_os_str()))
    }

    /// Adds a directory; call it before a policy that makes it writable takes effect.
    pub fn add(&mut self, directory: PathBuf) {
        if self.covers(&directory) {
            return;
        }
        if self.directories.len() == LIMIT {
            self.directories.clear();
            self.directories.insert("/".into());
        } else {
            self.directories.insert(directory.into_os_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn covers_descendants_only() {
        let mut written = WritableHistory::default();
        assert!(!written.covers(Path::new("/")));
        written.add("/a/b".into());
        for (path, covered) in
            [("/a/b", true), ("/a/b/c/d", true), ("/a", false), ("/a/bc", false), ("/", false)]
        {
            assert_eq!(written.covers(Path::new(path)), covered, "{path}");
        }
    }

    #[test]
    fn covers_everything_beyond_the_limit() {
        let mut written = WritableHistory::default();
        for number in 0..=LIMIT {
            written.add(format!("/d/{number}").into());
        }
        assert!(written.covers(Path::new("/elsewhere")));
    }
}
