//! Runs operations in this process, on the calling thread.

use std::ops::ControlFlow;
use std::sync::Arc;

use super::at_hand::AtHand;
use super::handles::Handles;
use super::resolve::Resolver;
use super::{
    Cancel, Event, FileError, FilesConfig, Operation, Outcome, content, copy, directory, glob,
    metadata, missing, names, remove, search, walk, watch,
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
        let (config, resolver, handles) = (&*self.config, self.resolver, &self.handles);
        let done = |()| Outcome::Done;
        match operation {
            Operation::ReadFile(params) => {
                content::read_file(resolver, &params, config.max_read_file_bytes, room, cancel)
                    .map(Outcome::ReadFile)
            }
            Operation::Open(params) => handles.open(resolver, params, config).map(Outcome::Open),
            Operation::ReadBlock(params) => {
                handles.read_block(&params, config).map(Outcome::ReadBlock)
            }
            Operation::WriteBlock(params) => handles.write_block(&params, config).map(done),
            Operation::Close(params) => handles.close(&params, cancel).map(done),
            Operation::WriteFile(params) => {
                content::write_file(resolver, &params, cancel).map(done)
            }
            Operation::CreateDirectory(params) => {
                directory::create_directory(resolver, &params).map(done)
            }
            Operation::GetMetadata(params) => {
                metadata::get_metadata(resolver, &params).map(Outcome::Metadata)
            }
            Operation::Canonicalize(params) => {
                metadata::canonicalize(&params).map(Outcome::Canonicalize)
            }
            Operation::ReadDirectory(params) => {
                directory::read_directory(&params, config.max_directory_entries, cancel)
                    .map(Outcome::ReadDirectory)
            }
            Operation::Walk(params) => {
                walk::walk(resolver, &params, config, cancel).map(Outcome::Walk)
            }
            Operation::Remove(params) => remove::remove(resolver, &params, cancel).map(done),
            Operation::Copy(params) => copy::copy(resolver, &params, cancel).map(done),
            Operation::Rename(params) => names::rename(resolver, &params).map(done),
            Operation::Symlink(params) => names::symlink(resolver, &params).map(done),
            Operation::SetMode(params) => metadata::set_mode(resolver, &params).map(done),
            Operation::Search(params) => {
                search::search(resolver, &params, config, cancel, emit).map(Outcome::Search)
            }
            Operation::Glob(params) => {
                glob::glob(resolver, &params, config, cancel).map(Outcome::Glob)
            }
            Operation::WatchMissing(params) => {
                missing::watch_missing(&params, config, cancel, emit).map(done)
            }
            Operation::Watch(params) => watch::watch(&params, config, cancel, emit).map(done),
            Operation::CancelSearch(_) | Operation::Unwatch(_) => Ok(Outcome::Done),
        }
    }

    /// Runs an operation if it is a small one that waits for nothing, neither disk nor network;
    /// otherwise leaves it alone.
    pub fn execute_now(&self, operation: &Operation) -> Option<Result<Outcome, FileError>> {
        match operation {
            Operation::GetMetadata(params)
                if self.at_hand.holds(&params.path, params.follow_symlinks.into()) =>
            {
                Some(metadata::get_metadata(self.resolver, params).map(Outcome::Metadata))
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
