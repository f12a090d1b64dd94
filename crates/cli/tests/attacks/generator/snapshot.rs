//! A snapshot of everything below a directory.

use std::collections::{BTreeMap, HashMap};
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Directory,
    File,
    Link,
    Device,
    Other,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Object {
    pub kind: Kind,
    pub inode: u64,
    pub mode: u32,
    pub owner: (u32, u32),
    pub links: u64,
    pub modified: (i64, i64),
    /// The content of a file, or the target of a link.
    pub content: Vec<u8>,
    pub attributes: Vec<u8>,
}

impl Object {
    /// The difference between two objects, as text.
    pub(crate) fn difference(&self, other: &Self) -> Option<String> {
        let linked = self.kind != Kind::Directory && self.links != other.links;
        if self.kind != other.kind {
            Some(format!("kind {:?} to {:?}", self.kind, other.kind))
        } else if self.content != other.content {
            let text = |object: &Self| String::from_utf8_lossy(&object.content).into_owned();
            Some(format!("content {:?} to {:?}", text(self), text(other)))
        } else if self.mode != other.mode {
            Some(format!("mode {:o} to {:o}", self.mode, other.mode))
        } else if self.owner != other.owner {
            Some(format!("owner {:?} to {:?}", self.owner, other.owner))
        } else if linked {
            Some(format!("links {} to {}", self.links, other.links))
        } else if self.attributes != other.attributes {
            Some("extended attributes".into())
        } else if self.modified != other.modified {
            Some("time of modification".into())
        } else {
            None
        }
    }
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Snapshot {
    pub objects: BTreeMap<PathBuf, Object>,
}

impl Snapshot {
    pub(crate) fn take(base: &Path) -> Self {
        let mut snapshot = Self::default();
        snapshot.look(base);
        snapshot
    }

    fn look(&mut self, path: &Path) {
        // Removed after the listing: a placeholder, which is temporary.
        let Ok(found) = path.symlink_metadata() else { return };
        let file_type = found.file_type();
        let mut attributes = vec![0; 256];
        let size = rustix::fs::llistxattr(path, &mut attributes[..]).unwrap_or(0);
        attributes.truncate(size);
        let mut object = Object {
            kind: Kind::Other,
            inode: found.ino(),
            mode: found.mode() & 0o7777,
            owner: (found.uid(), found.gid()),
            links: found.nlink(),
            modified: (found.mtime(), found.mtime_nsec()),
            content: Vec::new(),
            attributes,
        };
        if file_type.is_dir() {
            object.kind = Kind::Directory;
            let listed = opened(path, &object, |path| std::fs::read_dir(path));
            self.objects.insert(path.to_owned(), object);
            for entry in listed.into_iter().flatten().flatten() {
                self.look(&entry.path());
            }
            return;
        }
        if file_type.is_symlink() {
            object.kind = Kind::Link;
            let target = std::fs::read_link(path).unwrap_or_default();
            object.content = target.into_os_string().into_encoded_bytes();
        } else if file_type.is_file() {
            object.kind = Kind::File;
            object.content = opened(path, &object, content).unwrap_or_default();
        } else if file_type.is_block_device() || file_type.is_char_device() {
            object.kind = Kind::Device;
        }
        self.objects.insert(path.to_owned(), object);
    }

    pub(crate) fn by_inode(&self) -> HashMap<u64, (&Path, &Object)> {
        self.objects.iter().map(|(path, object)| (object.inode, (path.as_path(), object))).collect()
    }

    pub(crate) fn name_of(&self, inode: u64) -> String {
        let named = self.objects.iter().find(|(_, object)| object.inode == inode);
        named.map(|(path, _)| path.display().to_string()).unwrap_or_default()
    }

    /// The names in a directory, under its first name.
    pub(crate) fn names_in(&self, directory: u64) -> BTreeMap<PathBuf, u64> {
        let above = self.objects.iter().find(|(_, object)| object.inode == directory);
        let Some((above, _)) = above else { return BTreeMap::new() };
        let below = self.objects.iter().filter(|(path, _)| path.parent() == Some(above));
        below.map(|(path, object)| (path.clone(), object.inode)).collect()
    }

    /// An empty directory of the mode that placeholders have.
    pub(crate) fn is_placeholder(&self, path: &Path) -> bool {
        let object = &self.objects[path];
        object.kind == Kind::Directory
            && object.mode == 0o1755
            && !self.objects.keys().any(|other| other.parent() == Some(path))
    }
}

/// The content of a file; for a large one, which is a program, its beginning and its size.
fn content(path: &Path) -> std::io::Result<Vec<u8>> {
    const LARGE: u64 = 1 << 20;
    let file = std::fs::File::open(path)?;
    let size = file.metadata()?.len();
    let mut content = Vec::new();
    file.take(LARGE).read_to_end(&mut content)?;
    if size > LARGE {
        content.extend(size.to_le_bytes());
    }
    Ok(content)
}

/// Accesses a path whose mode may exclude its owner.
fn opened<T>(
    path: &Path,
    object: &Object,
    what: impl Fn(&Path) -> std::io::Result<T>,
) -> std::io::Result<T> {
    let first = what(path);
    if first.is_ok() || rustix::process::geteuid().is_root() {
        return first;
    }
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o700))?;
    let again = what(path);
    std::fs::set_permissions(path, PermissionsExt::from_mode(object.mode))?;
    again
}

/// Removes a tree, whatever its modes.
pub(crate) fn remove(base: &Path) {
    if std::fs::remove_dir_all(base).is_ok() {
        return;
    }
    fn open(path: &Path) {
        let _ = std::fs::set_permissions(path, PermissionsExt::from_mode(0o700));
        for entry in std::fs::read_dir(path).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                open(&entry.path());
            }
        }
    }
    open(base);
    let _ = std::fs::remove_dir_all(base);
}
