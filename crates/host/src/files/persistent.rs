//! Handles that survive their connection, as long as its session lasts.
//!
//! Invariant: repeating a request on such a handle, on the same connection or the next, changes nothing
//! and gets the same response. So a client that lost its connection repeats its pending requests and
//! continues: a second open of the same file with the same id returns the same handle, a block has its
//! own offset, and the results of a close and of the blocks before it are remembered. Read data is not
//! remembered: a closed handle cannot be read. Dropping the table discards uncommitted replacements.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::ops::ControlFlow;
use std::sync::Arc;

use codex_exec_server_protocol::files::{
    FsCloseParams, FsDone, FsOpenParams, FsOpenResponse, FsWriteBlockParams,
};
use parking_lot::{Mutex, MutexGuard, RwLock, RwLockWriteGuard};
use tokio::sync::OwnedMutexGuard;

use super::{Cancel, Executor, FileError, FilesConfig, Operation, Outcome, Turns};

/// Closed handles whose result is remembered.
const MAX_CLOSED: usize = 256;

/// Blocks per handle whose results are remembered after its close: more than are ever pending, so a
/// client can repeat any of them.
const MAX_BLOCKS: usize = 256;

/// The persistent handles of one session.
#[derive(Debug)]
pub struct PersistentHandles {
    executor: Executor,
    table: Mutex<Table>,
    /// The queue of requests of all connections of the session.
    turns: Turns,
}

#[derive(Debug, Default)]
struct Table {
    handles: HashMap<String, Arc<PersistentHandle>>,
    /// The closed ones among them, oldest first.
    closed: VecDeque<String>,
}

#[derive(Debug)]
struct PersistentHandle {
    params: FsOpenParams,
    /// Locked for writing while the handle is opened or closed, and for reading while a block is
    /// transferred: later requests wait, and no block of an older connection is written after the
    /// close.
    state: RwLock<State>,
    /// Orders requests across connections: a block of a lost connection is written before one of the
    /// next connection that overwrites it.
    turn: Arc<tokio::sync::Mutex<()>>,
    /// The last blocks written, with their results.
    written: Mutex<VecDeque<(Block, Result<(), FileError>)>>,
}

/// Identifies a block that was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Block {
    offset: u64,
    len: usize,
    content: u64,
}

impl Block {
    fn of(params: &FsWriteBlockParams) -> Self {
        let FsWriteBlockParams { offset, chunk, .. } = params;
        let (words, rest) = chunk.as_chunks::<8>();
        // A fast hash; a client that forges a collision harms only itself.
        let mix =
            |sum: u64, word: u64| (sum ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        let content = words.iter().fold(0, |sum, word| mix(sum, u64::from_le_bytes(*word)));
        let content = rest.iter().fold(content, |sum, &byte| mix(sum, u64::from(byte)));
        Self { offset: *offset, len: chunk.len(), content }
    }
}

#[derive(Debug)]
enum State {
    Open,
    /// Opening failed.
    Failed(FileError),
    Closed {
        commit: bool,
        result: Result<(), FileError>,
    },
}

impl PersistentHandles {
    /// A table without handles.
    pub fn new(config: Arc<FilesConfig>) -> Self {
        Self { executor: Executor::new(config), table: Mutex::default(), turns: Turns::default() }
    }

    /// The session's queue: a change that was running when its connection was lost takes effect before
    /// the requests of the next connection.
    pub(super) fn turns(&self) -> &Turns {
        &self.turns
    }

    /// Whether this handle is in the table.
    pub(super) fn has(&self, handle_id: &str) -> bool {
        self.table().handles.contains_key(handle_id)
    }

    /// Waits until earlier requests on the same handle are done.
    pub(super) async fn turn(&self, operation: &Operation) -> Option<OwnedMutexGuard<()>> {
        let handle_id = match operation {
            Operation::Close(params) => &params.handle_id,
            Operation::ReadBlock(params) => &params.handle_id,
            Operation::WriteBlock(params) => &params.handle_id,
            _ => return None,
        };
        let turn = self.table().handles.get(handle_id)?.turn.clone();
        Some(turn.lock_owned().await)
    }

    /// Runs an operation on a handle. Blocks, and is not cancelled when the connection is lost: the
    /// client may reconnect for the result.
    pub(super) fn execute(&self, operation: Operation) -> Result<Outcome, FileError> {
        match operation {
            Operation::Open(params) => self.open(params),
            Operation::Close(params) => self.close(params).map(|()| Outcome::Close(FsDone {})),
            Operation::ReadBlock(ref params) => self.read(&params.handle_id.clone(), operation),
            Operation::WriteBlock(params) => self.write(params),
            other => self.run(other),
        }
    }

    fn open(&self, params: FsOpenParams) -> Result<Outcome, FileError> {
        let handle_id = params.handle_id.clone();
        let handle = Arc::new(PersistentHandle {
            params: params.clone(),
            state: RwLock::new(State::Open),
            turn: Arc::default(),
            written: Mutex::default(),
        });
        let opening = lock_state(&handle);
        let before = match self.table().handles.entry(handle_id.clone()) {
            Entry::Occupied(before) => Some(before.get().clone()),
            Entry::Vacant(free) => {
                free.insert(handle.clone());
                None
            }
        };
        if let Some(before) = before {
            if before.params != params {
                return Err(FileError::HandleTaken { handle_id });
            }
            let state = before.state.read();
            return match &*state {
                State::Open | State::Closed { .. } => {
                    Ok(Outcome::Open(FsOpenResponse { handle_id }))
                }
                State::Failed(error) => Err(error.clone()),
            };
        }
        let opened = self.run(Operation::Open(params));
        if let Err(error) = &opened {
            // For requests that wait for this open; a later one may try again.
            let mut opening = opening;
            *opening = State::Failed(error.clone());
            self.table().handles.remove(&handle_id);
        }
        opened
    }

    fn handle(&self, handle_id: &str) -> Result<Arc<PersistentHandle>, FileError> {
        let handle = self.table().handles.get(handle_id).cloned();
        handle.ok_or_else(|| FileError::UnknownHandle { handle_id: handle_id.into() })
    }

    fn read(&self, handle_id: &str, operation: Operation) -> Result<Outcome, FileError> {
        let handle = self.handle(handle_id)?;
        let state = handle.state.read();
        match &*state {
            State::Open => self.run(operation),
            State::Failed(_) | State::Closed { .. } => {
                Err(FileError::UnknownHandle { handle_id: handle_id.into() })
            }
        }
    }

    fn write(&self, params: FsWriteBlockParams) -> Result<Outcome, FileError> {
        let handle = self.handle(&params.handle_id)?;
        let block = Block::of(&params);
        let state = handle.state.read();
        if !matches!(*state, State::Open) {
            let written = handle.written();
            let known = written.iter().rev().find(|(known, _)| *known == block);
            let unknown = || Err(FileError::UnknownHandle { handle_id: params.handle_id.clone() });
            let result = known.map_or_else(unknown, |(_, result)| result.clone());
            return result.map(|()| Outcome::WriteBlock(FsDone {}));
        }
        let result = self.run(Operation::WriteBlock(params));
        let mut written = handle.written();
        written.push_back((block, result.as_ref().map(|_| ()).map_err(Clone::clone)));
        if written.len() > MAX_BLOCKS {
            written.pop_front();
        }
        result
    }

    fn close(&self, params: FsCloseParams) -> Result<(), FileError> {
        let FsCloseParams { handle_id, commit, .. } = params.clone();
        let unknown = || match commit {
            true => Err(FileError::UnknownHandle { handle_id: handle_id.clone() }),
            false => Ok(()),
        };
        let Some(handle) = self.table().handles.get(&handle_id).cloned() else { return unknown() };
        let mut state = lock_state(&handle);
        match &*state {
            State::Open => {}
            State::Failed(_) => return unknown(),
            State::Closed { commit: committed, result } => {
                return if *committed == commit { result.clone() } else { unknown() };
            }
        }
        let result = self.run(Operation::Close(params)).map(|_| ());
        *state = State::Closed { commit, result: result.clone() };
        drop(state);
        let mut table = self.table();
        table.closed.push_back(handle_id);
        if table.closed.len() > MAX_CLOSED
            && let Some(oldest) = table.closed.pop_front()
        {
            table.handles.remove(&oldest);
        }
        result
    }

    fn run(&self, operation: Operation) -> Result<Outcome, FileError> {
        self.executor.execute(operation, &Cancel::new(), &|_| ControlFlow::Continue(()))
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock()
    }
}

impl PersistentHandle {
    fn written(&self) -> MutexGuard<'_, VecDeque<(Block, Result<(), FileError>)>> {
        self.written.lock()
    }
}

fn lock_state(handle: &PersistentHandle) -> RwLockWriteGuard<'_, State> {
    handle.state.write()
}
