//! Reads whole files, and writes them in place or by replacement.

use bytes::Bytes;
use codex_exec_server_protocol::PathUri;
use codex_exec_server_protocol::files::{FsReadFileParams, FsReadFileResponse, FsWriteFileParams};
use rustix::buffer::spare_capacity;
use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::{Errno, IoSliceMut, ReadWriteFlags, retry_on_intr};

use super::replace::Replacement;
use super::resolve::{self, Links, REGULAR, Resolver};
use super::{Cancel, FileError};
use crate::buffer;

/// Reads the content into one buffer, unless it is larger than `room`.
pub(super) fn read_file(
    resolver: Resolver,
    params: &FsReadFileParams,
    limit: u64,
    room: u64,
    cancel: &Cancel,
) -> Result<FsReadFileResponse, FileError> {
    let path = &params.path;
    let (fd, stat) = resolve::open_to_read(resolver, path, params.follow_symlinks.into())?;
    let too_large = || FileError::TooLarge { path: path.clone(), limit };
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    let check = |bytes: u64| match bytes {
        _ if bytes > limit => Err(too_large()),
        _ if bytes > room => Err(FileError::NeedsMemory { bytes }),
        _ => Ok(()),
    };
    check(size)?;
    let failed = |errno| FileError::os("read", path, errno);
    // The size is a hint: the file may grow or shrink meanwhile, and in /proc it is 0.
    let mut data = buffer::with_capacity(size as usize).map_err(|_| failed(Errno::NOMEM))?;
    loop {
        cancel.check()?;
        if data.len() == data.capacity() {
            // This is probably the end: check without growing the buffer.
            let mut probe = [0; 4096];
            let got = retry_on_intr(|| rustix::io::read(&fd, &mut probe)).map_err(failed)?;
            if got == 0 {
                break;
            }
            data.try_reserve(got.max(64 << 10)).map_err(|_| failed(Errno::NOMEM))?;
            data.extend_from_slice(&probe[..got]);
        } else if retry_on_intr(|| rustix::io::read(&fd, spare_capacity(&mut data)))
            .map_err(failed)?
            == 0
        {
            break;
        }
        check(data.len() as u64)?;
    }
    Ok(FsReadFileResponse { data: buffer::into_bytes(data).into() })
}

/// Reads a small file, if all of it is in memory.
pub(super) fn read_file_if_cached(
    resolver: Resolver,
    params: &FsReadFileParams,
) -> Option<Result<FsReadFileResponse, FileError>> {
    const SMALL: usize = 64 << 10;
    let opened = resolve::open_to_read(resolver, &params.path, params.follow_symlinks.into());
    let (fd, stat) = match opened {
        Ok(opened) => opened,
        Err(error) => return Some(Err(error)),
    };
    let size = usize::try_from(stat.st_size).ok().filter(|&size| size <= SMALL)?;
    // One more byte shows whether the file has grown.
    let mut data = vec![0; size + 1];
    let into = &mut [IoSliceMut::new(&mut data)];
    let got = rustix::io::preadv2(&fd, into, 0, ReadWriteFlags::NOWAIT).ok()?;
    data.truncate(got);
    (got == size).then(|| Ok(FsReadFileResponse { data: Bytes::from(data).into() }))
}

/// Replaces the content; in place unless `atomic` is set.
pub(super) fn write_file(
    resolver: Resolver,
    params: &FsWriteFileParams,
    cancel: &Cancel,
) -> Result<(), FileError> {
    cancel.check()?;
    let (path, links) = (&params.path, Links::from(params.follow_symlinks));
    let mode = params.mode.map(resolve::permission_bits).transpose()?;
    // A write that has begun is not cancelled: half a file is of no use.
    if params.atomic {
        let replacement = Replacement::begin(resolver, path, links, mode)?;
        write_all(replacement.file(), &params.data, path)?;
        replacement.commit()
    } else {
        let file = open_to_write(resolver, path, links, mode)?;
        write_all(&file, &params.data, path)
    }
}

/// Opens a regular file for writing, empty: creates it, or truncates it in place.
pub(super) fn open_to_write(
    resolver: Resolver,
    path: &PathUri,
    links: Links,
    mode: Option<Mode>,
) -> Result<OwnedFd, FileError> {
    resolve::reject_special_files(path, links)?;
    let open = |flags, mode| {
        resolver
            .open("open", path, OFlags::WRONLY | REGULAR | flags, mode, links)
            .map_err(|error| resolve::explain_special_file(error, path))
    };
    let default = Mode::from_raw_mode(0o666);
    let fd = match mode {
        None => open(OFlags::CREATE, default)?,
        Some(mode) => match open(OFlags::CREATE | OFlags::EXCL, Mode::RUSR | Mode::WUSR) {
            Ok(fd) => {
                rustix::fs::fchmod(&fd, mode).map_err(|errno| {
                    // A sandbox, for example, refuses set-id bits. Remove the new file.
                    remove_new(resolver, &fd, path, links);
                    FileError::os("set the mode of", path, errno)
                })?;
                fd
            }
            Err(error) if is(&error, Errno::EXIST) => match open(OFlags::empty(), default) {
                // A dangling link: create its target, as `open` would.
                Err(error) if is(&error, Errno::NOENT) => {
                    open(OFlags::CREATE, mode & Mode::from_raw_mode(0o777))?
                }
                other => other?,
            },
            Err(error) => return Err(error),
        },
    };
    let (fd, stat) = resolve::require_regular(fd, path)?;
    if stat.st_size != 0 {
        rustix::fs::ftruncate(&fd, 0).map_err(|errno| FileError::os("truncate", path, errno))?;
    }
    Ok(fd)
}

/// Removes a new file, if the path still leads to it.
fn remove_new(resolver: Resolver, made: &OwnedFd, path: &PathUri, links: Links) {
    let Ok((parent, name)) = resolver.parent("remove", path, links) else { return };
    let name = resolve::bytes_path(name);
    let there = rustix::fs::statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW);
    if let (Ok(there), Ok(made)) = (there, rustix::fs::fstat(made))
        && (there.st_dev, there.st_ino) == (made.st_dev, made.st_ino)
    {
        let _ = rustix::fs::unlinkat(&parent, name, AtFlags::empty());
    }
}

fn is(error: &FileError, wanted: Errno) -> bool {
    matches!(error, FileError::Os { errno, .. } if *errno == wanted.raw_os_error())
}

fn write_all(file: &OwnedFd, data: &[u8], path: &PathUri) -> Result<(), FileError> {
    let mut rest = data;
    while !rest.is_empty() {
        let wrote = retry_on_intr(|| rustix::io::write(file, rest))
            .map_err(|errno| FileError::os("write", path, errno))?;
        rest = &rest[wrote..];
    }
    Ok(())
}
