//! The files that a patch names, as its sections so far leave them.
//!
//! Invariant: each file is one [`Object`] with one content, however many names lead to it (hard links,
//! symbolic links, links among its parent directories).

use std::collections::{HashMap, HashSet};

use codex_exec_server_protocol::PathUri;
use codex_exec_server_protocol::files::FsGetMetadataParams;

use super::PatchError;
use crate::error::ExecServerError;
use crate::files::Files;

pub(super) struct Tree<'a> {
    files: &'a Files,
    cwd: &'a PathUri,
    /// The resolved paths of directories, by the paths in the patch.
    directories: HashMap<PathUri, PathUri>,
    /// Directories that exist once the patch has created files in them.
    made: HashSet<PathUri>,
    /// Entries by their name in a resolved directory.
    entries: HashMap<PathUri, Entry>,
    objects: Vec<Object>,
    /// Objects by device and inode.
    identities: HashMap<(u64, u64), ObjectId>,
}

/// What a name in a directory refers to.
#[derive(Clone)]
enum Entry {
    Missing,
    File {
        object: ObjectId,
        /// The patch creates it.
        fresh: bool,
    },
    /// A symbolic link, and the end of its chain.
    Link(PathUri),
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct ObjectId(usize);

/// A regular file.
pub(super) struct Object {
    pub content: Vec<u8>,
    /// Its permission bits, if the server reports them.
    pub mode: Option<u32>,
    /// It may have other names, which must see a change.
    pub shared: bool,
    /// The server identifies it, so that two names of it are known as one file.
    pub identified: bool,
}

/// The file at a path of the patch.
pub(super) struct Found {
    /// The name, in its resolved directory.
    pub entry: PathUri,
    /// The target of a link at `entry`; otherwise the same.
    pub real: PathUri,
    pub object: ObjectId,
    /// The patch creates it.
    pub fresh: bool,
}

impl Found {
    pub(super) fn is_link(&self) -> bool {
        self.entry != self.real
    }
}

/// A change and its path as written in the patch, for errors.
#[derive(Clone, Copy)]
pub(super) struct Operation<'a> {
    pub verb: &'static str,
    pub path: &'a str,
}

impl Operation<'_> {
    pub(super) fn refused(self, problem: impl Into<String>) -> PatchError {
        let (verb, path) = (self.verb, self.path.to_owned());
        PatchError::Target { verb, path, problem: problem.into() }
    }

    fn failed(self, error: ExecServerError) -> PatchError {
        match error {
            ExecServerError::Server { message, .. } => self.refused(message),
            error => PatchError::Unchanged(error),
        }
    }
}

impl<'a> Tree<'a> {
    pub(super) fn new(files: &'a Files, cwd: &'a PathUri) -> Self {
        Self {
            files,
            cwd,
            directories: HashMap::new(),
            made: HashSet::new(),
            entries: HashMap::new(),
            objects: Vec::new(),
            identities: HashMap::new(),
        }
    }

    pub(super) fn object(&mut self, id: ObjectId) -> &mut Object {
        &mut self.objects[id.0]
    }

    /// The entry of a path, and its file if it exists.
    pub(super) async fn find(
        &mut self,
        operation: Operation<'_>,
    ) -> Result<(PathUri, Option<Found>), PatchError> {
        let resolved = self.resolve(operation.path)?;
        let entry = self.entry_of(operation, &resolved).await?;
        let found = match self.load(operation, &entry).await? {
            Entry::Missing => None,
            Entry::File { object, fresh } => {
                Some(Found { entry: entry.clone(), real: entry.clone(), object, fresh })
            }
            Entry::Link(real) => match self.load(operation, &real).await? {
                Entry::File { object, fresh } => {
                    Some(Found { entry: entry.clone(), real, object, fresh })
                }
                _ => return Err(operation.refused("it is a broken link")),
            },
        };
        Ok((entry, found))
    }

    /// Records a new file at a free name.
    pub(super) fn create(
        &mut self,
        operation: Operation<'_>,
        entry: &PathUri,
        content: Vec<u8>,
        mode: Option<u32>,
    ) -> Result<(), PatchError> {
        if self.made.contains(entry) {
            return Err(operation.refused("it is a directory"));
        }
        let mut below = entry.clone();
        while let Ok(above) = below.join("..")
            && above != below
        {
            if matches!(self.entries.get(&above), Some(Entry::File { .. } | Entry::Link(_))) {
                return Err(operation.refused("a parent of it is a file, not a directory"));
            }
            self.made.insert(above.clone());
            below = above;
        }
        let object = self.add(Object { content, mode, shared: false, identified: true });
        self.entries.insert(entry.clone(), Entry::File { object, fresh: true });
        Ok(())
    }

    /// Records that a name is removed.
    pub(super) fn remove(&mut self, entry: &PathUri) {
        self.entries.insert(entry.clone(), Entry::Missing);
    }

    /// Records that a file, or a link to one, is renamed and replaces the new name.
    pub(super) fn rename(&mut self, found: &Found, to: &PathUri) {
        self.remove(&found.entry);
        let moved = match found.is_link() {
            true => Entry::Link(found.real.clone()),
            false => Entry::File { object: found.object, fresh: true },
        };
        self.entries.insert(to.clone(), moved);
    }

    fn add(&mut self, object: Object) -> ObjectId {
        self.objects.push(object);
        ObjectId(self.objects.len() - 1)
    }

    fn resolve(&self, path: &str) -> Result<PathUri, PatchError> {
        let resolved = if path.starts_with('/') || path.starts_with("file:") {
            path.parse()
        } else {
            self.cwd.join(path)
        };
        resolved.map_err(|error| PatchError::Path(error.to_string()))
    }

    /// The path with its directory resolved; missing directories stay as they are.
    async fn entry_of(
        &mut self,
        operation: Operation<'_>,
        resolved: &PathUri,
    ) -> Result<PathUri, PatchError> {
        let joined = |at: &PathUri, name: &[u8]| {
            at.join(name).map_err(|error| PatchError::Path(error.to_string()))
        };
        let mut names = Vec::new();
        let mut at = resolved.clone();
        let mut real = loop {
            let above = joined(&at, b"..")?;
            if above == at {
                break at;
            }
            names.push(at.file_name().to_vec());
            if let Some(known) = self.directories.get(&above) {
                break known.clone();
            }
            match self.files.canonicalize(&above).await {
                Ok(real) => {
                    self.directories.insert(above, real.clone());
                    break real;
                }
                Err(error) if error.is_not_found() => at = above,
                // It may be writable although it cannot be resolved.
                Err(ExecServerError::Server { .. }) => break above,
                Err(error) => return Err(operation.failed(error)),
            }
        };
        for name in names.iter().rev() {
            real = joined(&real, name)?;
        }
        Ok(real)
    }

    async fn load(
        &mut self,
        operation: Operation<'_>,
        entry: &PathUri,
    ) -> Result<Entry, PatchError> {
        if let Some(known) = self.entries.get(entry) {
            return Ok(known.clone());
        }
        let loaded = self.load_uncached(operation, entry).await?;
        self.entries.insert(entry.clone(), loaded.clone());
        Ok(loaded)
    }

    async fn load_uncached(
        &mut self,
        operation: Operation<'_>,
        entry: &PathUri,
    ) -> Result<Entry, PatchError> {
        let metadata = match self.files.metadata(entry).await {
            Ok(metadata) => metadata,
            Err(error) if error.is_not_found() => return self.missing(operation, entry).await,
            Err(error) => return Err(operation.failed(error)),
        };
        if metadata.is_directory {
            return Err(operation.refused("it is a directory"));
        }
        if !metadata.is_file {
            return Err(operation.refused("it is not a regular file"));
        }
        if metadata.is_symlink {
            let real = self.files.canonicalize(entry).await;
            return Ok(Entry::Link(real.map_err(|error| operation.failed(error))?));
        }
        let identity = metadata.device.zip(metadata.inode);
        if let Some(&object) = identity.and_then(|identity| self.identities.get(&identity)) {
            return Ok(Entry::File { object, fresh: false });
        }
        let content = self.files.read_file(entry).await.map_err(|error| operation.failed(error))?;
        let object = self.add(Object {
            content: content.to_vec(),
            mode: metadata.mode.map(|mode| mode & 0o777),
            shared: metadata.nlink != Some(1),
            identified: identity.is_some() || metadata.nlink == Some(1),
        });
        if let Some(identity) = identity {
            self.identities.insert(identity, object);
        }
        Ok(Entry::File { object, fresh: false })
    }

    /// Distinguishes a missing file from a broken link, through which a write would go elsewhere.
    async fn missing(
        &self,
        operation: Operation<'_>,
        entry: &PathUri,
    ) -> Result<Entry, PatchError> {
        let mut params = FsGetMetadataParams::new(entry.clone());
        params.follow_symlinks = false;
        match self.files.call::<codex_exec_server_protocol::call::FsGetMetadata>(params).await {
            Err(error) if error.is_not_found() => Ok(Entry::Missing),
            Ok(_) | Err(ExecServerError::Server { .. }) => {
                Err(operation.refused("it is a broken link"))
            }
            Err(error) => Err(operation.failed(error)),
        }
    }
}
