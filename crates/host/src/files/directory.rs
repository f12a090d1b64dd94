//! Lists and creates directories.

use std::mem::MaybeUninit;

use codex_exec_server_protocol::PathUri;
use codex_exec_server_protocol::files::{
    FsCreateDirectoryParams, FsReadDirectoryEntry, FsReadDirectoryParams, FsReadDirectoryResponse,
};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir};
use rustix::io::Errno;

use super::resolve::{self, DIRECTORY, LISTING, Links, Resolver, bytes_path, file_type};
use super::{Cancel, FileError, FilesConfig};

/// Buffer for names read from the kernel, in bytes.
const LISTING_BUFFER: usize = 32 << 10;

/// Calls `each` with every name of a directory except `.` and `..`, until it returns false.
pub(super) fn for_each_name(
    directory: BorrowedFd<'_>,
    mut each: impl FnMut(&[u8], FileType) -> Result<bool, FileError>,
    failed: impl Fn(Errno) -> FileError,
) -> Result<(), FileError> {
    let mut buffer = Box::<[u8]>::new_uninit_slice(LISTING_BUFFER);
    let buffer: &mut [MaybeUninit<u8>] = &mut buffer;
    let mut names = RawDir::new(directory, buffer);
    while let Some(entry) = names.next() {
        let entry = match entry {
            Ok(entry) => entry,
            // The directory was removed meanwhile: there are no more names.
            Err(Errno::NOENT) => break,
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(failed(errno)),
        };
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." && !each(name, entry.file_type())? {
            break;
        }
    }
    Ok(())
}

/// The kind of an entry: as listed or, for links (and filesystems that do not report it), the kind of
/// the target. `None` for a dangling link or a removed name.
pub(super) fn kind_of_target(
    directory: BorrowedFd<'_>,
    name: &[u8],
    listed: FileType,
) -> Result<Option<FileType>, Errno> {
    if !matches!(listed, FileType::Symlink | FileType::Unknown) {
        return Ok(Some(listed));
    }
    match rustix::fs::statat(directory, bytes_path(name), AtFlags::empty()) {
        Ok(stat) => Ok(Some(file_type(&stat))),
        Err(Errno::NOENT | Errno::LOOP | Errno::NOTDIR) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// The kind of an entry itself, without following a link. `None` if it is gone.
pub(super) fn kind_of_name(
    directory: BorrowedFd<'_>,
    name: &[u8],
) -> Result<Option<FileType>, Errno> {
    match rustix::fs::statat(directory, bytes_path(name), AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(file_type(&stat))),
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// Maximum dangling links in a listing: together with the maximum of entries, as many JSON values as a
/// receiver accepts.
const MAX_DEAD_LINKS: usize = 10_000;

/// Memory of an entry besides its texts: the entry itself, its allocations, and its member names as JSON.
const ENTRY_OVERHEAD: u64 = 160;

/// Lists a directory within `room` bytes, as far as `FilesConfig::max_directory_answer_bytes` allows more.
///
/// A listing that needs more than `room` is only counted: the error says how much it needs.
pub(super) fn read_directory(
    params: &FsReadDirectoryParams,
    config: &FilesConfig,
    room: u64,
    cancel: &Cancel,
) -> Result<FsReadDirectoryResponse, FileError> {
    let (path, limit) = (&params.path, config.max_directory_entries);
    let failed = |errno| FileError::os("read directory", path, errno);
    let flags = LISTING - OFlags::NOFOLLOW;
    let directory =
        rustix::io::retry_on_intr(|| rustix::fs::open(path.as_path(), flags, Mode::empty()))
            .map_err(failed)?;
    let mut answer = FsReadDirectoryResponse::default();
    let largest = config.max_directory_answer_bytes as u64;
    let (mut names, mut entries, mut dead_links, mut bytes) = (0_usize, 0, 0, 0);
    let each = |name: &[u8], listed| {
        names += 1;
        if names.is_multiple_of(1024) {
            cancel.check()?;
        }
        let text = String::from_utf8_lossy(name);
        let kind = match kind_of_target(directory.as_fd(), name, listed) {
            Ok(kind) => kind,
            // A link whose target cannot be inspected is skipped.
            Err(_) => return Ok(true),
        };
        let is_dead_link = kind.is_none();
        if is_dead_link && listed != FileType::Symlink {
            return Ok(true);
        }
        if is_dead_link && dead_links >= MAX_DEAD_LINKS.min(limit) {
            answer.truncated = true;
            return Ok(true);
        }
        let is_lossy = matches!(text, std::borrow::Cow::Owned(_)) && !is_dead_link;
        let uri = if is_lossy { path.encoded_len() + 1 + 3 * name.len() } else { 0 };
        let cost = ENTRY_OVERHEAD + (json_len(&text) + uri) as u64;
        if (!is_dead_link && entries == limit) || bytes + cost > largest {
            answer.truncated = true;
            return Ok(false);
        }
        bytes += cost;
        *if is_dead_link { &mut dead_links } else { &mut entries } += 1;
        if bytes > room {
            // What does not fit is not kept.
            answer = FsReadDirectoryResponse::default();
            return Ok(true);
        }
        let Some(kind) = kind else {
            answer.dead_links.push(text.into_owned());
            return Ok(true);
        };
        answer.entries.push(FsReadDirectoryEntry {
            file_name_uri: is_lossy.then(|| join(path, name)).transpose()?,
            file_name: text.into_owned(),
            is_directory: kind == FileType::Directory,
            is_file: kind == FileType::RegularFile,
        });
        Ok(true)
    };
    for_each_name(directory.as_fd(), each, failed)?;
    if bytes > room {
        return Err(FileError::NeedsMemory { bytes });
    }
    answer.entries.sort_unstable_by(|a, b| a.file_name.cmp(&b.file_name));
    answer.dead_links.sort_unstable();
    Ok(answer)
}

/// The length of a text as JSON, rounded up.
fn json_len(text: &str) -> usize {
    text.bytes()
        .map(|byte| {
            if byte < 0x20 {
                6
            } else if matches!(byte, b'"' | b'\\') {
                2
            } else {
                1
            }
        })
        .sum()
}

pub(super) fn join(directory: &PathUri, name: &[u8]) -> Result<PathUri, FileError> {
    directory.join(name).map_err(|error| FileError::refused(directory, error.to_string()))
}

pub(super) fn create_directory(
    resolver: Resolver,
    params: &FsCreateDirectoryParams,
) -> Result<(), FileError> {
    let FsCreateDirectoryParams { path, recursive, follow_symlinks, .. } = params;
    let failed = |errno| FileError::os("create directory", path, errno);
    let mode = Mode::from_raw_mode(0o777);
    if path.file_name().is_empty() {
        return if *recursive { Ok(()) } else { Err(failed(Errno::EXIST)) };
    }
    match (recursive, Links::from(*follow_symlinks)) {
        (false, links) => {
            let (parent, name) = resolver.parent("create directory", path, links)?;
            let made = rustix::fs::mkdirat(&parent, bytes_path(name), mode);
            if made == Err(Errno::EXIST) && links == Links::Refuse {
                refuse_link(parent.as_fd(), name, path)?;
            }
            made.map_err(failed)
        }
        (true, Links::Follow) => std::fs::create_dir_all(path.as_path())
            .map_err(|error| FileError::io("create directory", path, &error))
            .and_then(|()| refuse_placeholder(path)),
        (true, Links::Refuse) => {
            make_all_without_links(path)?;
            refuse_placeholder(path)
        }
    }
}

/// In a sandbox, a placeholder holds each protected name that does not exist. It is a directory, but
/// not the requested one, and is removed afterwards.
fn refuse_placeholder(path: &PathUri) -> Result<(), FileError> {
    let found = rustix::fs::statx(
        rustix::fs::CWD,
        path.as_path(),
        AtFlags::empty(),
        rustix::fs::StatxFlags::MODE,
    );
    let is_placeholder = found.is_ok_and(|found| {
        found.stx_attributes.contains(rustix::fs::StatxAttributes::MOUNT_ROOT)
            && u32::from(found.stx_mode) & 0o7777 == crate::sandbox::PLACEHOLDER_MODE
    });
    match is_placeholder {
        true => Err(FileError::os("create directory", path, Errno::ROFS)),
        false => Ok(()),
    }
}

/// Creates each directory and opens it through its parent's descriptor, so that a link put there
/// meanwhile is detected.
fn make_all_without_links(path: &PathUri) -> Result<(), FileError> {
    let failed = |errno| FileError::os("create directory", path, errno);
    let mut at = rustix::fs::open("/", DIRECTORY, Mode::empty()).map_err(failed)?;
    for name in path.as_bytes().split(|&b| b == b'/').filter(|name| !name.is_empty()) {
        let open = || rustix::fs::openat(&at, bytes_path(name), DIRECTORY, Mode::empty());
        let next = match open() {
            Err(Errno::NOENT) => {
                match rustix::fs::mkdirat(&at, bytes_path(name), Mode::from_raw_mode(0o777)) {
                    Ok(()) | Err(Errno::EXIST) => open(),
                    Err(errno) => Err(errno),
                }
            }
            other => other,
        };
        at = match next {
            Ok(next) => next,
            Err(errno @ (Errno::NOTDIR | Errno::LOOP)) => {
                refuse_link(at.as_fd(), name, path)?;
                return Err(failed(errno));
            }
            Err(errno) => return Err(failed(errno)),
        };
    }
    Ok(())
}

/// Refines an error: was the name a link?
fn refuse_link(directory: BorrowedFd<'_>, name: &[u8], path: &PathUri) -> Result<(), FileError> {
    match rustix::fs::statat(directory, bytes_path(name), AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) if resolve::file_type(&stat) == FileType::Symlink => {
            Err(FileError::SymlinkRefused { path: path.clone() })
        }
        _ => Ok(()),
    }
}
