//! Copies a file, a link or a tree.
//!
//! Invariant: below the two given paths no link is followed on either side. A source file is opened
//! first and then inspected by its descriptor; a link in the destination tree is replaced, never
//! written through.
//!
//! A failed copy removes what it created. A new directory is filled under a temporary name
//! (`.NAME.RANDOM.tmp`) and renamed when it is complete. Existing files are written in place, and keep
//! what was written; except in an atomic copy of one file, which is a [`Replacement`].

use codex_exec_server_protocol::PathUri;
use codex_exec_server_protocol::files::FsCopyParams;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, SeekFrom, Stat};
use rustix::io::{Errno, retry_on_intr};

use super::directory::{for_each_name, join};
use super::replace::{Replacement, with_temporary_name};
use super::resolve::{self, DIRECTORY, LISTING, Links, REGULAR, Resolver, bytes_path, file_type};
use super::{Cancel, FileError};

/// Maximum depth of a copied tree: each level holds two descriptors open.
const MAX_DEPTH: usize = 256;
/// Bytes copied between two checks of the cancel token.
const STEP: usize = 16 << 20;

pub(super) fn copy(
    resolver: Resolver,
    params: &FsCopyParams,
    cancel: &Cancel,
) -> Result<(), FileError> {
    let FsCopyParams { source_path, destination_path, recursive, .. } = params;
    cancel.check()?;
    let (directory, name) = resolver.parent("copy", source_path, Links::Follow)?;
    let from = Location { directory: directory.as_fd(), name, path: source_path.clone() };
    let stat = from.stat()?;
    match file_type(&stat) {
        FileType::RegularFile | FileType::Symlink => {}
        FileType::Directory if *recursive => {}
        FileType::Directory => {
            let reason = "is a directory; set recursive to copy it";
            return Err(FileError::refused(source_path, reason));
        }
        _ => return Err(resolve::special_file_error(source_path, &stat)),
    }
    if params.atomic {
        return match file_type(&stat) {
            FileType::RegularFile => replace_file(resolver, &from, destination_path, cancel),
            _ => Err(FileError::refused(
                source_path,
                "is not a regular file; atomic copies only regular files",
            )),
        };
    }
    let (directory, name) = resolver.parent("copy to", destination_path, Links::Follow)?;
    let to = Location { directory: directory.as_fd(), name, path: destination_path.clone() };
    match file_type(&stat) {
        FileType::Directory => {
            refuse_into_itself(&stat, &to)?;
            let copying = Copying { top: (stat.st_dev, stat.st_ino), cancel };
            copying.copy_tree(&from, &to, DestinationParent::Shared, 0).map(drop)
        }
        FileType::Symlink => copy_link(&from, &to).map(drop),
        _ => copy_file(&from, &to, Existing::Follow, cancel).map(drop),
    }
}

/// A name in an open directory, and its path for messages.
struct Location<'a> {
    directory: BorrowedFd<'a>,
    name: &'a [u8],
    path: PathUri,
}

impl Location<'_> {
    fn failed(&self) -> impl Fn(Errno) -> FileError + '_ {
        |errno| FileError::os("copy", &self.path, errno)
    }

    fn stat(&self) -> Result<Stat, FileError> {
        rustix::fs::statat(self.directory, bytes_path(self.name), AtFlags::SYMLINK_NOFOLLOW)
            .map_err(self.failed())
    }

    fn open(&self, flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
        let name = bytes_path(self.name);
        retry_on_intr(|| rustix::fs::openat(self.directory, name, flags | OFlags::CLOEXEC, mode))
    }

    fn unlink(&self) -> Result<(), Errno> {
        rustix::fs::unlinkat(self.directory, bytes_path(self.name), AtFlags::empty())
    }
}

/// How to treat a destination that is a link.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Existing {
    /// The client named the link: write to its target.
    Follow,
    /// The link is in a destination tree: replace it.
    Replace,
}

fn same_file(a: &Stat, b: &Stat) -> bool {
    (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)
}

/// Walks from the destination up to the root, by descriptor, and looks for the source.
fn refuse_into_itself(source: &Stat, to: &Location<'_>) -> Result<(), FileError> {
    let refused = || FileError::refused(&to.path, "cannot copy a directory into itself");
    let failed = to.failed();
    let mut at = to
        .open(DIRECTORY - OFlags::NOFOLLOW, Mode::empty())
        .or_else(|_| rustix::fs::openat(to.directory, ".", DIRECTORY, Mode::empty()));
    let mut below: Option<Stat> = None;
    loop {
        let fd = at.map_err(&failed)?;
        let stat = rustix::fs::fstat(&fd).map_err(&failed)?;
        if same_file(source, &stat) {
            return Err(refused());
        }
        if below.is_some_and(|below| same_file(&below, &stat)) {
            return Ok(());
        }
        below = Some(stat);
        at = rustix::fs::openat(&fd, "..", DIRECTORY, Mode::empty());
    }
}

/// What a copy created at a name.
#[derive(PartialEq, Eq)]
enum Created {
    /// Nothing: the name existed before.
    Nothing,
    /// These names, in a directory that existed before.
    Inside(Vec<(Vec<u8>, Self)>),
    /// A file or link.
    Entry,
    /// A directory with this device and inode.
    Tree((u64, u64)),
}

impl Created {
    /// Removes it again, if it is still what the copy created.
    fn undo(self, directory: BorrowedFd<'_>, name: &[u8]) {
        match self {
            Self::Nothing => {}
            Self::Inside(created) => {
                if let Ok(inner) =
                    rustix::fs::openat(directory, bytes_path(name), LISTING, Mode::empty())
                {
                    undo_all(inner.as_fd(), created);
                }
            }
            Self::Entry => {
                let _ = rustix::fs::unlinkat(directory, bytes_path(name), AtFlags::empty());
            }
            Self::Tree(identity) => {
                let flags = AtFlags::SYMLINK_NOFOLLOW;
                let found = rustix::fs::statat(directory, bytes_path(name), flags);
                if found.is_ok_and(|stat| (stat.st_dev, stat.st_ino) == identity) {
                    discard(directory, name);
                }
            }
        }
    }
}

/// Removes what was created in a directory, in reverse order.
fn undo_all(directory: BorrowedFd<'_>, created: Vec<(Vec<u8>, Created)>) {
    created.into_iter().rev().for_each(|(name, created)| created.undo(directory, &name));
}

/// Removes a name and everything below it, as far as possible.
fn discard(directory: BorrowedFd<'_>, name: &[u8]) {
    let name = bytes_path(name);
    if rustix::fs::unlinkat(directory, name, AtFlags::empty()).is_ok() {
        return;
    }
    let open = || rustix::fs::openat(directory, name, LISTING, Mode::empty());
    // The copy may be unreadable or unwritable like its source, but we own it.
    let opened = open().or_else(|_| {
        rustix::fs::chmodat(directory, name, Mode::RWXU, AtFlags::empty()).and_then(|()| open())
    });
    let Ok(inner) = opened else { return };
    let _ = rustix::fs::fchmod(&inner, Mode::RWXU);
    let mut names = Vec::new();
    let each = |name: &[u8], _| {
        names.push(name.to_vec());
        Ok(true)
    };
    let _ = for_each_name(inner.as_fd(), each, |_| FileError::Cancelled);
    names.iter().for_each(|name| discard(inner.as_fd(), name));
    let _ = rustix::fs::unlinkat(directory, name, AtFlags::REMOVEDIR);
}

/// Whether the copy owns the destination directory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum DestinationParent {
    /// It existed before.
    Shared,
    /// The copy created it, and removes it as a whole on failure.
    Own,
}

/// A tree copy.
struct Copying<'a> {
    /// Device and inode of the source.
    top: (u64, u64),
    cancel: &'a Cancel,
}

impl Copying<'_> {
    fn copy_tree(
        &self,
        from: &Location<'_>,
        to: &Location<'_>,
        parent: DestinationParent,
        depth: usize,
    ) -> Result<Created, FileError> {
        if depth == MAX_DEPTH {
            let reason = format!("is more than {MAX_DEPTH} directories deep; copy it in parts");
            return Err(FileError::limit(&from.path, reason));
        }
        let source = from.open(LISTING, Mode::empty()).map_err(from.failed())?;
        let stat = rustix::fs::fstat(&source).map_err(from.failed())?;
        if depth > 0 && (stat.st_dev, stat.st_ino) == self.top {
            return Err(FileError::refused(&from.path, "the tree was moved into itself"));
        }
        // Writable for us until it is filled, whatever the source's mode is.
        let make = |name: &[u8]| rustix::fs::mkdirat(to.directory, bytes_path(name), Mode::RWXU);
        if parent == DestinationParent::Own {
            make(to.name).map_err(to.failed())?;
            let destination = to.open(LISTING, Mode::empty()).map_err(to.failed())?;
            self.fill(&source, &stat, from, &destination, to, DestinationParent::Own, depth)?;
            return Ok(Created::Nothing);
        }
        match to.stat() {
            Ok(_) => {
                let follow = if depth == 0 { OFlags::NOFOLLOW } else { OFlags::empty() };
                let destination = to.open(LISTING - follow, Mode::empty()).map_err(to.failed())?;
                let parent = DestinationParent::Shared;
                let created = self.fill(&source, &stat, from, &destination, to, parent, depth)?;
                return Ok(Created::Inside(created));
            }
            Err(FileError::Os { errno, .. }) if errno == Errno::NOENT.raw_os_error() => {}
            Err(error) => return Err(error),
        }
        let ((), fresh) = with_temporary_name(to.name, make).map_err(to.failed())?;
        let staged = Location { directory: to.directory, name: &fresh, path: to.path.clone() };
        let filled = || {
            let destination = staged.open(LISTING, Mode::empty()).map_err(to.failed())?;
            let created = rustix::fs::fstat(&destination).map_err(to.failed())?;
            self.fill(&source, &stat, from, &destination, to, DestinationParent::Own, depth)?;
            let (fresh, name) = (bytes_path(&fresh), bytes_path(to.name));
            rustix::fs::renameat(to.directory, fresh, to.directory, name).map_err(to.failed())?;
            Ok(Created::Tree((created.st_dev, created.st_ino)))
        };
        filled().inspect_err(|_| discard(to.directory, &fresh))
    }

    /// Copies the entries of `source` to `destination`; returns what it created there, if that is
    /// shared.
    #[expect(clippy::too_many_arguments, reason = "two places, what they are, and where we are")]
    fn fill(
        &self,
        source: &OwnedFd,
        stat: &Stat,
        from: &Location<'_>,
        destination: &OwnedFd,
        to: &Location<'_>,
        parent: DestinationParent,
        depth: usize,
    ) -> Result<Vec<(Vec<u8>, Created)>, FileError> {
        let mut names = Vec::new();
        let each = |name: &[u8], _| {
            names.push(name.to_vec());
            Ok(true)
        };
        for_each_name(source.as_fd(), each, from.failed())?;
        let mut created = Vec::new();
        let mut all = || {
            for name in &names {
                self.cancel.check()?;
                let path = join(&from.path, name)?;
                let from = Location { directory: source.as_fd(), name, path };
                let path = join(&to.path, name)?;
                let to = Location { directory: destination.as_fd(), name, path };
                let result = self.copy_entry(&from, &to, parent, depth)?;
                // What is in our own directory is removed with it.
                if parent == DestinationParent::Shared && result != Created::Nothing {
                    created.push((name.clone(), result));
                }
            }
            set_mode(destination.as_fd(), stat, to)
        };
        match all() {
            Ok(()) => Ok(created),
            Err(error) => {
                undo_all(destination.as_fd(), created);
                Err(error)
            }
        }
    }

    fn copy_entry(
        &self,
        from: &Location<'_>,
        to: &Location<'_>,
        parent: DestinationParent,
        depth: usize,
    ) -> Result<Created, FileError> {
        let stat = match from.stat() {
            Ok(stat) => stat,
            // Removed since it was listed.
            Err(FileError::Os { errno, .. }) if errno == Errno::NOENT.raw_os_error() => {
                return Ok(Created::Nothing);
            }
            Err(error) => return Err(error),
        };
        match file_type(&stat) {
            FileType::Directory => self.copy_tree(from, to, parent, depth + 1),
            FileType::RegularFile => copy_file(from, to, Existing::Replace, self.cancel),
            FileType::Symlink => copy_link(from, to),
            _ => Ok(Created::Nothing),
        }
    }
}

/// Copies a file atomically: the destination is replaced once the copy is complete.
fn replace_file(
    resolver: Resolver,
    from: &Location<'_>,
    to: &PathUri,
    cancel: &Cancel,
) -> Result<(), FileError> {
    let (source, stat) = open_source(from)?;
    // A new file does not inherit set-id bits, which would grant the rights of its owner.
    let mode = Mode::from_raw_mode(stat.st_mode) & Mode::from_raw_mode(0o777);
    let replacement = Replacement::begin(resolver, to, Links::Follow, Some(mode))?;
    if replacement.old().is_some_and(|old| same_file(old, &stat)) {
        return Err(FileError::refused(to, "is the same file as the source"));
    }
    let failed = |errno| FileError::os("copy", to, errno);
    copy_content(&source, &stat, replacement.file(), &from.failed(), &failed, cancel)?;
    let now = rustix::fs::fstat(&source).map_err(from.failed())?;
    let version = |stat: &Stat| {
        (stat.st_size, stat.st_mtime, stat.st_mtime_nsec, stat.st_ctime, stat.st_ctime_nsec)
    };
    if version(&now) != version(&stat) {
        let reason = "changed while it was being copied, so the copy was discarded; copy it again";
        return Err(FileError::refused(&from.path, reason));
    }
    replacement.commit()
}

fn open_source(from: &Location<'_>) -> Result<(OwnedFd, Stat), FileError> {
    let source = from
        .open(OFlags::RDONLY | OFlags::NOFOLLOW | REGULAR, Mode::empty())
        .map_err(from.failed())?;
    resolve::require_regular(source, &from.path)
}

fn copy_file(
    from: &Location<'_>,
    to: &Location<'_>,
    existing: Existing,
    cancel: &Cancel,
) -> Result<Created, FileError> {
    let (source, stat) = open_source(from)?;
    let (destination, created) = open_destination(to, existing)?;
    let created = if created { Created::Entry } else { Created::Nothing };
    match fill(&source, &stat, &destination, from, to, cancel) {
        Ok(()) => Ok(created),
        Err(error) => {
            created.undo(to.directory, to.name);
            Err(error)
        }
    }
}

fn fill(
    source: &OwnedFd,
    stat: &Stat,
    destination: &OwnedFd,
    from: &Location<'_>,
    to: &Location<'_>,
    cancel: &Cancel,
) -> Result<(), FileError> {
    let found = rustix::fs::fstat(destination).map_err(to.failed())?;
    if file_type(&found) != FileType::RegularFile {
        return Err(resolve::special_file_error(&to.path, &found));
    }
    if same_file(stat, &found) {
        return Err(FileError::refused(&to.path, "is the same file as the source"));
    }
    if found.st_size != 0 {
        rustix::fs::ftruncate(destination, 0).map_err(to.failed())?;
    }
    copy_content(source, stat, destination, &from.failed(), &to.failed(), cancel)?;
    set_mode(destination.as_fd(), stat, to)
}

/// Opens the destination without truncating it; returns whether it is new.
fn open_destination(to: &Location<'_>, existing: Existing) -> Result<(OwnedFd, bool), FileError> {
    let named = |errno| resolve::explain_special_file(to.failed()(errno), &to.path);
    let fresh = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | REGULAR;
    let private = Mode::RUSR | Mode::WUSR;
    match to.open(fresh, private) {
        Ok(fd) => return Ok((fd, true)),
        Err(Errno::EXIST) => {}
        Err(errno) => return Err(named(errno)),
    }
    let stat = to.stat()?;
    match (file_type(&stat), existing) {
        (FileType::RegularFile, _) => {}
        (FileType::Symlink, Existing::Follow) => {
            resolve::reject_special_files(&to.path, Links::Follow)?;
            let flags = OFlags::WRONLY | OFlags::CREATE | REGULAR;
            let fd = to.open(flags, Mode::from_raw_mode(0o666)).map_err(named)?;
            return Ok((fd, false));
        }
        (FileType::Symlink, Existing::Replace) => {
            to.unlink().map_err(to.failed())?;
            return Ok((to.open(fresh, private).map_err(named)?, true));
        }
        _ => return Err(resolve::special_file_error(&to.path, &stat)),
    }
    let fd = to.open(OFlags::WRONLY | OFlags::NOFOLLOW | REGULAR, Mode::empty()).map_err(named)?;
    Ok((fd, false))
}

/// Clones the file where the filesystem can; else copies in the kernel; else reads and writes.
fn copy_content(
    source: &OwnedFd,
    stat: &Stat,
    destination: &OwnedFd,
    reading: &impl Fn(Errno) -> FileError,
    writing: &impl Fn(Errno) -> FileError,
    cancel: &Cancel,
) -> Result<(), FileError> {
    if rustix::fs::ioctl_ficlone(destination, source).is_ok() {
        return Ok(());
    }
    // Files of /proc report size 0 but have content.
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    let mut at = 0;
    while at < size {
        cancel.check()?;
        // Preserve holes. A filesystem that cannot report them reports data.
        let data = match rustix::fs::seek(source, SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(Errno::NXIO) => break,
            Err(_) => at,
        };
        let hole = rustix::fs::seek(source, SeekFrom::Hole(data)).unwrap_or(size).min(size);
        at = match copy_range(source, destination, data, hole, cancel) {
            Ok(Some(at)) => at,
            Ok(None) => break,
            Err(CopyError::Cancelled) => return Err(FileError::Cancelled),
            Err(CopyError::Failed(errno)) => return Err(writing(errno)),
        };
    }
    // Bytes that were added meanwhile, or that the size does not include.
    let end = copy_rest(source, destination, at.max(size), size, reading, writing, cancel)?;
    rustix::fs::ftruncate(destination, end).map_err(writing)
}

enum CopyError {
    Cancelled,
    Failed(Errno),
}

/// Copies `at..end` in the kernel. `None` if the source ended early.
fn copy_range(
    source: &OwnedFd,
    destination: &OwnedFd,
    at: u64,
    end: u64,
    cancel: &Cancel,
) -> Result<Option<u64>, CopyError> {
    let (mut read, mut written) = (at, at);
    while read < end {
        cancel.check().map_err(|_| CopyError::Cancelled)?;
        let step = STEP.min(usize::try_from(end - read).unwrap_or(STEP));
        let copied = rustix::fs::copy_file_range(
            source,
            Some(&mut read),
            destination,
            Some(&mut written),
            step,
        );
        match copied {
            Ok(0) => return copy_range_by_reading(source, destination, read, end, cancel),
            Ok(_) | Err(Errno::INTR) => {}
            // Not supported between these filesystems, by this kernel, or for this file.
            Err(
                Errno::XDEV
                | Errno::INVAL
                | Errno::NOSYS
                | Errno::OPNOTSUPP
                | Errno::PERM
                | Errno::IO
                | Errno::BADF
                | Errno::OVERFLOW,
            ) => return copy_range_by_reading(source, destination, read, end, cancel),
            Err(errno) => return Err(CopyError::Failed(errno)),
        }
    }
    Ok(Some(read))
}

fn copy_range_by_reading(
    source: &OwnedFd,
    destination: &OwnedFd,
    mut at: u64,
    end: u64,
    cancel: &Cancel,
) -> Result<Option<u64>, CopyError> {
    let mut buffer = vec![0; 256 << 10];
    while at < end {
        cancel.check().map_err(|_| CopyError::Cancelled)?;
        let step = buffer.len().min(usize::try_from(end - at).unwrap_or(usize::MAX));
        let got = retry_on_intr(|| rustix::io::pread(source, &mut buffer[..step], at))
            .map_err(CopyError::Failed)?;
        if got == 0 {
            return Ok(None);
        }
        let mut done = 0;
        while done < got {
            done += retry_on_intr(|| {
                rustix::io::pwrite(destination, &buffer[done..got], at + done as u64)
            })
            .map_err(CopyError::Failed)?;
        }
        at += got as u64;
    }
    Ok(Some(at))
}

/// Copies from `at` to the end of the source; returns the position of the end.
fn copy_rest(
    source: &OwnedFd,
    destination: &OwnedFd,
    at: u64,
    size: u64,
    reading: &impl Fn(Errno) -> FileError,
    writing: &impl Fn(Errno) -> FileError,
    cancel: &Cancel,
) -> Result<u64, FileError> {
    // The common case: nothing was added.
    let mut probe = [0; 1];
    if retry_on_intr(|| rustix::io::pread(source, &mut probe, at)).map_err(reading)? == 0 {
        let now = rustix::fs::fstat(source).map_err(reading)?;
        let now = u64::try_from(now.st_size).unwrap_or(0);
        return Ok(if size == 0 { at } else { size.min(now) });
    }
    let mut at = at;
    loop {
        match copy_range_by_reading(source, destination, at, at + STEP as u64, cancel) {
            Ok(Some(next)) => at = next,
            Ok(None) => {
                let stat = rustix::fs::fstat(destination).map_err(writing)?;
                return Ok(u64::try_from(stat.st_size).unwrap_or(at));
            }
            Err(CopyError::Cancelled) => return Err(FileError::Cancelled),
            Err(CopyError::Failed(errno)) => return Err(writing(errno)),
        }
    }
}

/// Sets the source's mode; set-id bits only if the copy has the same owner or group, or they would
/// grant the rights of another user.
fn set_mode(
    destination: BorrowedFd<'_>,
    source: &Stat,
    to: &Location<'_>,
) -> Result<(), FileError> {
    let own = rustix::fs::fstat(destination).map_err(to.failed())?;
    let mut mode = Mode::from_raw_mode(source.st_mode);
    if own.st_uid != source.st_uid {
        mode -= Mode::SUID;
    }
    if own.st_gid != source.st_gid {
        mode -= Mode::SGID;
    }
    resolve::inherit_mode(destination, mode).map_err(to.failed())
}

fn copy_link(from: &Location<'_>, to: &Location<'_>) -> Result<Created, FileError> {
    let target = rustix::fs::readlinkat(from.directory, bytes_path(from.name), Vec::new())
        .map_err(from.failed())?;
    match rustix::fs::symlinkat(&*target, to.directory, bytes_path(to.name)) {
        Err(Errno::EXIST) => {}
        done => return done.map(|()| Created::Entry).map_err(to.failed()),
    }
    // An existing file or link is replaced in one step; a directory is not.
    let (from, found) = (from.stat()?, to.stat()?);
    if same_file(&from, &found) {
        return Err(FileError::refused(&to.path, "is the same link as the source"));
    }
    if file_type(&found) == FileType::Directory {
        return Err(to.failed()(Errno::ISDIR));
    }
    let ((), fresh) = with_temporary_name(to.name, |fresh| {
        rustix::fs::symlinkat(&*target, to.directory, bytes_path(fresh))
    })
    .map_err(to.failed())?;
    let (fresh, name) = (bytes_path(&fresh), bytes_path(to.name));
    rustix::fs::renameat(to.directory, fresh, to.directory, name).map_err(|errno| {
        let _ = rustix::fs::unlinkat(to.directory, fresh, AtFlags::empty());
        to.failed()(errno)
    })?;
    Ok(Created::Nothing)
}
