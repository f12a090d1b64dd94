//! Files that stay open between requests.
//!
//! Invariant: a handle belongs to one table, the table to one connection. Dropping the table closes
//! every handle and discards uncommitted replacements. A replacement is committed only if every block
//! was written: the first failed block discards it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use bytes::Bytes;
use codex_exec_server_protocol::PathUri;
use codex_exec_server_protocol::files::{
    FsCloseParams, FsOpenMode, FsOpenParams, FsOpenResponse, FsReadBlockParams,
    FsReadBlockResponse, FsWriteBlockParams,
};
use parking_lot::{Mutex, MutexGuard};
use rustix::buffer::spare_capacity;
use rustix::fd::OwnedFd;
use rustix::io::retry_on_intr;

use super::replace::Replacement;
use super::resolve::{self, Links, Resolver};
use super::{Cancel, FileError, FilesConfig, content};

/// The open handles of one connection.
#[derive(Debug, Default)]
pub(super) struct Handles {
    /// `None` while a handle is being opened: its id is reserved.
    open: Mutex<HashMap<String, Option<Arc<Handle>>>>,
}

#[derive(Debug)]
enum Handle {
    Read { file: OwnedFd, path: PathUri },
    Replace { file: OwnedFd, path: PathUri },
    ReplaceAtomic(Mutex<Atomic>),
}

/// A replacement and the state of its blocks.
#[derive(Debug)]
enum Atomic {
    /// All blocks were written.
    Whole(Replacement),
    /// A block failed for this reason; the temporary file is gone.
    Torn(FileError),
}

impl Atomic {
    /// Writes a block. If that fails, by an error or a panic, the replacement is discarded.
    fn write_block(
        &mut self,
        handle_id: &str,
        write: impl FnOnce(&OwnedFd, &PathUri) -> Result<(), FileError>,
    ) -> Result<(), FileError> {
        let panicked = FileError::Helper { reason: "the write panicked".into() };
        match std::mem::replace(self, Self::Torn(panicked)) {
            Self::Whole(replacement) => match write(replacement.file(), replacement.path()) {
                Ok(()) => {
                    *self = Self::Whole(replacement);
                    Ok(())
                }
                Err(error) => {
                    *self = Self::Torn(error.clone());
                    Err(error)
                }
            },
            Self::Torn(cause) => {
                let error = torn(handle_id, &cause);
                *self = Self::Torn(cause);
                Err(error)
            }
        }
    }

    fn commit(&self, handle_id: &str) -> Result<(), FileError> {
        match self {
            Self::Whole(replacement) => replacement.commit(),
            Self::Torn(cause) => Err(torn(handle_id, cause)),
        }
    }
}

fn torn(handle_id: &str, cause: &FileError) -> FileError {
    FileError::Torn { handle_id: handle_id.into(), cause: Box::new(cause.clone()) }
}

impl Handles {
    pub(super) fn open(
        &self,
        resolver: Resolver,
        params: FsOpenParams,
        config: &FilesConfig,
    ) -> Result<FsOpenResponse, FileError> {
        let FsOpenParams { handle_id, path, mode, permissions, .. } = params;
        check_id(&handle_id, config)?;
        let bits = permissions.map(resolve::permission_bits).transpose()?;
        {
            let mut open = self.lock();
            let count = open.len();
            match open.entry(handle_id.clone()) {
                Entry::Occupied(_) => return Err(FileError::HandleTaken { handle_id }),
                Entry::Vacant(_) if count >= config.max_handles => {
                    return Err(too_many_handles(config));
                }
                Entry::Vacant(slot) => slot.insert(None),
            };
        }
        let opened = match mode {
            FsOpenMode::Read => resolve::open_to_read(resolver, &path, Links::Follow)
                .map(|(file, _)| Handle::Read { file, path }),
            FsOpenMode::Replace => content::open_to_write(resolver, &path, Links::Follow, bits)
                .map(|file| Handle::Replace { file, path }),
            FsOpenMode::ReplaceAtomic => Replacement::begin(resolver, &path, Links::Follow, bits)
                .map(|replacement| Handle::ReplaceAtomic(Mutex::new(Atomic::Whole(replacement)))),
        };
        let mut open = self.lock();
        match opened {
            Ok(handle) => {
                open.insert(handle_id.clone(), Some(Arc::new(handle)));
                Ok(FsOpenResponse { handle_id })
            }
            Err(error) => {
                open.remove(&handle_id);
                Err(error)
            }
        }
    }

    pub(super) fn read_block(
        &self,
        params: &FsReadBlockParams,
        config: &FilesConfig,
    ) -> Result<FsReadBlockResponse, FileError> {
        let FsReadBlockParams { handle_id, offset, len, .. } = params;
        let handle = self.get(handle_id)?;
        let Handle::Read { file, path } = &*handle else {
            return Err(wrong_mode(handle_id, "reading"));
        };
        if *len == 0 || *len > config.max_block_bytes as u64 {
            let allowed = format!("1 … {}", config.max_block_bytes);
            return Err(FileError::out_of_range("len", *len, allowed));
        }
        check_offset(*offset, *len)?;
        let (mut chunk, len) = (Vec::with_capacity(*len as usize), *len as usize);
        while chunk.len() < len {
            let at = offset + chunk.len() as u64;
            match retry_on_intr(|| rustix::io::pread(file, spare_capacity(&mut chunk), at)) {
                Ok(0) => break,
                Ok(_) => {}
                Err(errno) => {
                    // The position of a handle after a failed read is undefined.
                    self.lock().remove(handle_id);
                    return Err(FileError::os("read", path, errno));
                }
            }
        }
        chunk.truncate(len);
        let eof = chunk.len() < len;
        Ok(FsReadBlockResponse { chunk: Bytes::from(chunk).into(), eof })
    }

    pub(super) fn write_block(
        &self,
        params: &FsWriteBlockParams,
        config: &FilesConfig,
    ) -> Result<(), FileError> {
        let FsWriteBlockParams { handle_id, offset, chunk, .. } = params;
        let handle = self.get(handle_id)?;
        let write = |file: &OwnedFd, path: &PathUri| {
            if chunk.len() > config.max_block_bytes {
                let (what, allowed) =
                    ("length of chunk", format!("at most {}", config.max_block_bytes));
                return Err(FileError::out_of_range(what, chunk.len() as u64, allowed));
            }
            check_offset(*offset, chunk.len() as u64)?;
            let mut done = 0;
            while done < chunk.len() {
                done += retry_on_intr(|| {
                    rustix::io::pwrite(file, &chunk[done..], offset + done as u64)
                })
                .map_err(|errno| FileError::os("write", path, errno))?;
            }
            Ok(())
        };
        match &*handle {
            Handle::Read { .. } => Err(wrong_mode(handle_id, "writing")),
            Handle::Replace { file, path } => write(file, path),
            Handle::ReplaceAtomic(atomic) => atomic.lock().write_block(handle_id, write),
        }
    }

    pub(super) fn close(&self, params: &FsCloseParams, cancel: &Cancel) -> Result<(), FileError> {
        let FsCloseParams { handle_id, commit, .. } = params;
        let removed = {
            let mut open = self.lock();
            // A handle that is still being opened cannot be closed yet.
            match open.entry(handle_id.clone()) {
                Entry::Occupied(slot) if slot.get().is_some() => slot.remove(),
                _ => None,
            }
        };
        match removed.as_deref() {
            // A client that asks for a commit must learn that there was none.
            None if *commit => Err(FileError::UnknownHandle { handle_id: handle_id.clone() }),
            Some(Handle::ReplaceAtomic(atomic)) if *commit => {
                cancel.check()?;
                atomic.lock().commit(handle_id)
            }
            _ => Ok(()),
        }
    }

    fn get(&self, handle_id: &str) -> Result<Arc<Handle>, FileError> {
        let unknown = || FileError::UnknownHandle { handle_id: handle_id.into() };
        self.lock().get(handle_id).cloned().flatten().ok_or_else(unknown)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Option<Arc<Handle>>>> {
        self.open.lock()
    }
}

pub(super) fn check_id(handle_id: &str, config: &FilesConfig) -> Result<(), FileError> {
    let limit = config.max_handle_id_bytes;
    if handle_id.len() > limit {
        let (what, len) = ("length of handleId", handle_id.len() as u64);
        return Err(FileError::out_of_range(what, len, format!("at most {limit} bytes")));
    }
    Ok(())
}

pub(super) fn too_many_handles(config: &FilesConfig) -> FileError {
    FileError::TooMany { what: "open file handles".into(), limit: config.max_handles as u64 }
}

fn wrong_mode(handle_id: &str, purpose: &str) -> FileError {
    FileError::WrongMode { handle_id: handle_id.into(), purpose: purpose.into() }
}

/// File positions have 63 bits.
fn check_offset(offset: u64, len: u64) -> Result<(), FileError> {
    match offset.checked_add(len) {
        Some(end) if end <= i64::MAX as u64 => Ok(()),
        _ => Err(FileError::out_of_range("offset", offset, "less than 2^63 with its length")),
    }
}
