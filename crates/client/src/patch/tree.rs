//! The files that a patch names, as its sections so far leave them.
//!
//! Invariant: a file is known by what it is, not by what it is called. However many names lead to it
//! (hard links, symbolic links, links among the directories on the way), there is one [`Object`] with
//! one content.

use std::collections::{HashMap, HashSet};

use codex_exec_server_protocol::PathUri;
use codex_exec_server_protocol::files::FsGetMetadataParams;

use super::PatchError;
use crate::error::ExecServerError;
use crate::files::Files;

pub(super) struct Tree<'a> {
    files: &'a Files,
    cwd: &'a PathUri,
    /// Directories by what the patch calls them, and what they really are called.
    directories: HashMap<PathUri, PathUri>,
    /// Directories that are there once the patch has made files in them.
    made: HashSet<PathUri>,
    /// By their own name in a directory's real name.
    entries: HashMap<PathUri, Entry>,
    objects: Vec<Object>,
    /// Objects by device and inode.
    identities: HashMap<(u64, u64), ObjectId>,
}

/// What a name in a directory is.
#[derive(Clone)]
enum Entry {
    Missing,
    File {
        object: ObjectId,
        /// The patch makes it, so it is not there yet.
        fresh: bool,
    },
    /// A symbolic link, and where it ends.
    Link(PathUri),
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct ObjectId(usize);

/// A regular file, whatever it is called.
pub(super) struct Object {
    pub content: Vec<u8>,
    /// Its permission bits, if the server tells.
    pub mode: Option<u32>,
    /// It has, or may have, other names, which have to see a change.
    pub shared: bool,
    /// The server tells what it is, so that it cannot be taken for two.
    pub identified: bool,
}

/// Where a path of the patch leads.
pub(super) struct Found {
    /// The name itself, in a directory without links on the way.
    pub entry: PathUri,
    /// The name that a link at `entry` ends at; else the same.
    pub real: PathUri,
    pub object: ObjectId,
    /// The patch makes it, so it is not there yet.
    pub fresh: bool,
}

impl Found {
    pub(super) fn is_link(&self) -> bool {
        self.entry != self.real
    }
}

/// What is done to a path, and what the patch calls it: for errors.
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

    /// The name that a path means, and the file it leads to, if there is one.
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

    /// A new file at a name that is free.
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

    /// A name goes.
    pub(super) fn remove(&mut self, entry: &PathUri) {
        self.entries.insert(entry.clone(), Entry::Missing);
    }

    /// A file, or a link to one, takes another name, whatever had it.
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

    /// The name in its directory's real name. Directories that are missing are taken as they are.
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
                // It may be written where it may not be looked at.
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

    /// Nothing is there, unless it is a link that leads nowhere: a write would go where it leads.
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
