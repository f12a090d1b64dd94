//! Runs operations in this process, on the calling thread.

use std::ops::ControlFlow;
use std::sync::Arc;

use codex_exec_server_protocol::files::*;

use super::cached_paths::CachedPaths;
use super::handles::Handles;
use super::resolve::Resolver;
use super::{
    Cancel, ChangeMemory, Event, FileError, FileRequest, FilesConfig, Operation, Outcome, content,
    copy, directory, glob, metadata, missing, names, remove, search, walk, watch,
};

/// Runs operations in this process and holds the handles of one connection. Dropping it closes them and
/// discards uncommitted replacements.
#[derive(Debug)]
pub struct Executor {
    config: Arc<FilesConfig>,
    resolver: Resolver,
    handles: Handles,
    cached_paths: CachedPaths,
    changes: Arc<ChangeMemory>,
}

impl Executor {
    /// An executor without open handles.
    pub fn new(config: Arc<FilesConfig>) -> Self {
        Self::with_changes_in(config, None)
    }

    /// Like [`new`](Self::new); the changes that its watches hold are also within `changes`.
    pub fn with_changes_in(config: Arc<FilesConfig>, changes: Option<Arc<ChangeMemory>>) -> Self {
        Self {
            resolver: Resolver::new(config.use_openat2),
            handles: Handles::default(),
            cached_paths: CachedPaths::default(),
            changes: ChangeMemory::new(config.max_watch_memory, changes),
            config,
        }
    }

    /// Runs one operation to completion. Blocks, and needs no runtime.
    ///
    /// Returns soon after `cancel` is cancelled or `emit` breaks. [`Operation::Watch`] and
    /// [`Operation::WatchMissing`] respond with [`Event::Started`] and continue to run;
    /// [`Operation::CancelSearch`] and [`Operation::Unwatch`] do nothing here, because the connection
    /// holds the tokens.
    pub fn execute(
        &self,
        operation: Operation,
        cancel: &Cancel,
        emit: &dyn Fn(Event) -> ControlFlow<()>,
    ) -> Result<Outcome, FileError> {
        self.execute_within(u64::MAX, operation, cancel, emit)
    }

    /// Like [`execute`](Self::execute), but fails with [`FileError::NeedsMemory`] if the outcome would
    /// carry more than `room` bytes of a file or of a directory, whose size is unknown before it is read.
    pub fn execute_within(
        &self,
        room: u64,
        operation: Operation,
        cancel: &Cancel,
        emit: &dyn Fn(Event) -> ControlFlow<()>,
    ) -> Result<Outcome, FileError> {
        cancel.check()?;
        self.cached_paths.classify_pending();
        operation.perform(&OperationContext {
            config: &self.config,
            resolver: self.resolver,
            handles: &self.handles,
            changes: &self.changes,
            room,
            cancel,
            emit,
        })
    }

    /// Runs a small operation if it waits for neither disk nor network; else returns `None`.
    pub fn execute_if_cached(&self, operation: &Operation) -> Option<Result<Outcome, FileError>> {
        match operation {
            Operation::GetMetadata(params)
                if self.cached_paths.contains(&params.path, params.follow_symlinks.into()) =>
            {
                Some(metadata::get_metadata(self.resolver, params).map(Outcome::GetMetadata))
            }
            Operation::ReadFile(params)
                if self.cached_paths.contains(&params.path, params.follow_symlinks.into()) =>
            {
                let read = content::read_file_if_cached(self.resolver, params)?;
                Some(read.map(Outcome::ReadFile))
            }
            _ => None,
        }
    }

    /// The limits.
    pub fn config(&self) -> &Arc<FilesConfig> {
        &self.config
    }
}

/// What an operation needs to run.
pub(super) struct OperationContext<'a> {
    config: &'a FilesConfig,
    resolver: Resolver,
    handles: &'a Handles,
    changes: &'a Arc<ChangeMemory>,
    /// See [`Executor::execute_within`].
    room: u64,
    cancel: &'a Cancel,
    emit: &'a dyn Fn(Event) -> ControlFlow<()>,
}

/// Implements a request.
pub(super) trait Perform: FileRequest {
    /// Runs the request to completion on this thread.
    fn perform(self, context: &OperationContext<'_>) -> Result<Self::Response, FileError>;
}

macro_rules! perform {
    ($($params:ty: |$context:ident, $request:pat_param| $run:expr;)*) => {
        $(impl Perform for $params {
            fn perform(self, $context: &OperationContext<'_>) -> Result<Self::Response, FileError> {
                let $request = &self;
                $run
            }
        })*
    };
}

/// The empty response.
fn done((): ()) -> FsDone {
    FsDone {}
}

perform! {
    FsReadFileParams: |context, params| {
        content::read_file(context.resolver, params, context.config.max_read_file_bytes, context.room, context.cancel)
    };
    FsOpenParams: |context, params| context.handles.open(context.resolver, params.clone(), context.config);
    FsReadBlockParams: |context, params| context.handles.read_block(params, context.config);
    FsWriteBlockParams: |context, params| context.handles.write_block(params, context.config).map(done);
    FsCloseParams: |context, params| context.handles.close(params, context.cancel).map(done);
    FsWriteFileParams: |context, params| content::write_file(context.resolver, params, context.cancel).map(done);
    FsCreateDirectoryParams: |context, params| {
        directory::create_directory(context.resolver, params).map(done)
    };
    FsGetMetadataParams: |context, params| metadata::get_metadata(context.resolver, params);
    FsCanonicalizeParams: |_at, params| metadata::canonicalize(params);
    FsReadDirectoryParams: |context, params| {
        directory::read_directory(params, context.config, context.room, context.cancel)
    };
    FsWalkParams: |context, params| walk::walk(context.resolver, params, context.config, context.cancel);
    FsRemoveParams: |context, params| remove::remove(context.resolver, params, context.cancel).map(done);
    FsCopyParams: |context, params| copy::copy(context.resolver, params, context.cancel).map(done);
    FsRenameParams: |context, params| names::rename(context.resolver, params).map(done);
    FsSymlinkParams: |context, params| names::symlink(context.resolver, params).map(done);
    FsSetModeParams: |context, params| metadata::set_mode(context.resolver, params).map(done);
    FsSearchParams: |context, params| {
        search::search(context.resolver, params, context.config, context.cancel, context.emit)
    };
    FsGlobParams: |context, params| glob::glob(context.resolver, params, context.config, context.cancel);
    FsWatchParams: |context, params| {
        watch::watch(params, context.config, context.changes, context.cancel, context.emit).map(done)
    };
    FsWatchMissingParams: |context, params| {
        missing::watch_missing(params, context.config, context.cancel, context.emit)
            .map(|()| FsWatchMissingResponse { watching: false })
    };
    // The connection holds the tokens and handles these.
    FsCancelSearchParams: |_at, _params| Ok(FsDone {});
    FsUnwatchParams: |_at, _params| Ok(FsDone {});
}
