//! Runs operations in this process, on the calling thread.

use std::ops::ControlFlow;
use std::sync::Arc;

use codex_exec_server_protocol::files::*;

use super::at_hand::AtHand;
use super::handles::Handles;
use super::resolve::Resolver;
use super::{
    Cancel, Event, FileError, FileRequest, FilesConfig, Operation, Outcome, content, copy,
    directory, glob, metadata, missing, names, remove, search, walk, watch,
};

/// The filesystem of this process, and the handles one connection has opened on it. Dropping it
/// closes them; what was not committed is gone.
#[derive(Debug)]
pub struct Executor {
    config: Arc<FilesConfig>,
    resolver: Resolver,
    handles: Handles,
    at_hand: AtHand,
}

impl Executor {
    /// An executor without open handles.
    pub fn new(config: Arc<FilesConfig>) -> Self {
        let resolver = Resolver::new(config.use_openat2);
        Self { config, resolver, handles: Handles::default(), at_hand: AtHand::default() }
    }

    /// Runs one operation to its end; it blocks, and does not need a runtime.
    ///
    /// Once `cancel` is cancelled, or `emit` breaks, it returns soon. [`Operation::Watch`] and
    /// [`Operation::WatchMissing`] answer by [`Event::Started`] and then run on;
    /// [`Operation::CancelSearch`] and [`Operation::Unwatch`] concern whoever holds the tokens, and
    /// do nothing here.
    pub fn execute(
        &self,
        operation: Operation,
        cancel: &Cancel,
        emit: &dyn Fn(Event) -> ControlFlow<()>,
    ) -> Result<Outcome, FileError> {
        self.execute_within(u64::MAX, operation, cancel, emit)
    }

    /// Like [`execute`](Self::execute), for an outcome that carries at most `room` bytes of a file whose
    /// size is not known before it is opened: otherwise it is [`FileError::NeedsMemory`].
    pub fn execute_within(
        &self,
        room: u64,
        operation: Operation,
        cancel: &Cancel,
        emit: &dyn Fn(Event) -> ControlFlow<()>,
    ) -> Result<Outcome, FileError> {
        cancel.check()?;
        self.at_hand.learn();
        operation.perform(&At {
            config: &self.config,
            resolver: self.resolver,
            handles: &self.handles,
            room,
            cancel,
            emit,
        })
    }

    /// Runs an operation if it is a small one that waits for nothing, neither disk nor network;
    /// otherwise leaves it alone.
    pub fn execute_now(&self, operation: &Operation) -> Option<Result<Outcome, FileError>> {
        match operation {
            Operation::GetMetadata(params)
                if self.at_hand.holds(&params.path, params.follow_symlinks.into()) =>
            {
                Some(metadata::get_metadata(self.resolver, params).map(Outcome::GetMetadata))
            }
            Operation::ReadFile(params)
                if self.at_hand.holds(&params.path, params.follow_symlinks.into()) =>
            {
                let read = content::read_file_now(self.resolver, params)?;
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

/// Where an operation runs, and what it may take.
pub(super) struct At<'a> {
    config: &'a FilesConfig,
    resolver: Resolver,
    handles: &'a Handles,
    /// See [`Executor::execute_within`].
    room: u64,
    cancel: &'a Cancel,
    emit: &'a dyn Fn(Event) -> ControlFlow<()>,
}

/// The code that runs a request.
pub(super) trait Perform: FileRequest {
    /// Runs it to its end on this thread.
    fn perform(self, at: &At<'_>) -> Result<Self::Response, FileError>;
}

macro_rules! perform {
    ($($params:ty: |$at:ident, $request:pat_param| $run:expr;)*) => {
        $(impl Perform for $params {
            fn perform(self, $at: &At<'_>) -> Result<Self::Response, FileError> {
                let $request = &self;
                $run
            }
        })*
    };
}

/// Nothing to tell but that it is done.
fn done((): ()) -> FsDone {
    FsDone {}
}

perform! {
    FsReadFileParams: |at, params| {
        content::read_file(at.resolver, params, at.config.max_read_file_bytes, at.room, at.cancel)
    };
    FsOpenParams: |at, params| at.handles.open(at.resolver, params.clone(), at.config);
    FsReadBlockParams: |at, params| at.handles.read_block(params, at.config);
    FsWriteBlockParams: |at, params| at.handles.write_block(params, at.config).map(done);
    FsCloseParams: |at, params| at.handles.close(params, at.cancel).map(done);
    FsWriteFileParams: |at, params| content::write_file(at.resolver, params, at.cancel).map(done);
    FsCreateDirectoryParams: |at, params| {
        directory::create_directory(at.resolver, params).map(done)
    };
    FsGetMetadataParams: |at, params| metadata::get_metadata(at.resolver, params);
    FsCanonicalizeParams: |_at, params| metadata::canonicalize(params);
    FsReadDirectoryParams: |at, params| {
        directory::read_directory(params, at.config.max_directory_entries, at.cancel)
    };
    FsWalkParams: |at, params| walk::walk(at.resolver, params, at.config, at.cancel);
    FsRemoveParams: |at, params| remove::remove(at.resolver, params, at.cancel).map(done);
    FsCopyParams: |at, params| copy::copy(at.resolver, params, at.cancel).map(done);
    FsRenameParams: |at, params| names::rename(at.resolver, params).map(done);
    FsSymlinkParams: |at, params| names::symlink(at.resolver, params).map(done);
    FsSetModeParams: |at, params| metadata::set_mode(at.resolver, params).map(done);
    FsSearchParams: |at, params| {
        search::search(at.resolver, params, at.config, at.cancel, at.emit)
    };
    FsGlobParams: |at, params| glob::glob(at.resolver, params, at.config, at.cancel);
    FsWatchParams: |at, params| watch::watch(params, at.config, at.cancel, at.emit).map(done);
    FsWatchMissingParams: |at, params| {
        missing::watch_missing(params, at.config, at.cancel, at.emit)
            .map(|()| FsWatchMissingResponse { watching: false })
    };
    // These concern whoever holds the tokens.
    FsCancelSearchParams: |_at, _params| Ok(FsDone {});
    FsUnwatchParams: |_at, _params| Ok(FsDone {});
}
