//! An append-only file with one checksummed record per line.
//!
//! Invariant: a record for which `append` returned `Ok` is read back after any crash of the process; a line
//! that a crash or a full disk cut short is ignored.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::secret::digest;

/// Hex digits of a line's checksum.
const CHECKSUM_LEN: usize = 16;

/// A journal that this process writes.
#[derive(Debug)]
pub(crate) struct Journal {
    file: File,
    path: PathBuf,
    len: u64,
}

impl Journal {
    /// Opens the file, creating it if needed, and returns its records.
    pub(crate) fn open<R: DeserializeOwned>(path: &Path) -> io::Result<(Self, Vec<R>)> {
        let mut file = open(path)?;
        let mut text = Vec::new();
        file.read_to_end(&mut text)?;
        let (records, len) = parse(&text);
        let mut journal = Self { file, path: path.to_owned(), len: len as u64 };
        // A torn last line would swallow the next record.
        journal.truncate()?;
        Ok((journal, records))
    }

    /// Adds a record; with `durable` it also survives a crash of the machine.
    pub(crate) fn append<R: Serialize>(&mut self, record: &R, durable: bool) -> io::Result<()> {
        let line = line(record)?;
        let written = self
            .file
            .write_all(&line)
            .and_then(|()| if durable { self.file.sync_data() } else { Ok(()) });
        match written {
            Ok(()) => {
                self.len += line.len() as u64;
                Ok(())
            }
            Err(error) => {
                // Best effort: reading skips a torn line too.
                let _ = self.truncate();
                Err(error)
            }
        }
    }

    /// Bytes in the file.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Replaces all records atomically.
    pub(crate) fn rewrite<R: Serialize>(
        &mut self,
        records: impl Iterator<Item = R>,
    ) -> io::Result<()> {
        let (mut file, beside) = create_beside(&self.path)?;
        give_to_owner(&file, self.path.parent().unwrap_or(Path::new(".")))?;
        let mut text = Vec::new();
        for record in records {
            text.extend_from_slice(&line(&record)?);
        }
        file.write_all(&text)?;
        file.sync_all()?;
        std::fs::rename(&beside, &self.path)?;
        if let Some(directory) = self.path.parent() {
            File::open(directory)?.sync_all()?;
        }
        self.file = file;
        self.len = text.len() as u64;
        Ok(())
    }

    /// Redirects writes to another file; returns the current one.
    #[cfg(test)]
    pub(crate) fn replace_file(&mut self, file: File) -> File {
        std::mem::replace(&mut self.file, file)
    }

    fn truncate(&mut self) -> io::Result<()> {
        self.file.set_len(self.len)?;
        self.file.seek(SeekFrom::Start(self.len))?;
        Ok(())
    }
}

/// A journal that several processes append to, and that one process follows.
#[derive(Debug)]
pub(crate) struct SharedJournal {
    path: PathBuf,
    /// The file that was read, how many bytes of it, and its stamp then.
    seen: Option<(File, u64, Stamp)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    len: u64,
}

impl SharedJournal {
    /// The journal at this path, which need not exist yet.
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path, seen: None }
    }

    /// Returns the records added since the last call, if any. The flag is true if the file was replaced:
    /// the caller then forgets earlier records.
    pub(crate) fn changes<R: DeserializeOwned>(&mut self) -> io::Result<Option<(bool, Vec<R>)>> {
        let stamp = match self.path.metadata() {
            Ok(meta) => Stamp { device: meta.dev(), inode: meta.ino(), len: meta.len() },
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(self.seen.take().map(|_| (true, Vec::new())));
            }
            Err(error) => return Err(error),
        };
        if self.seen.as_ref().is_some_and(|(_, _, seen)| *seen == stamp) {
            return Ok(None);
        }
        let same = self.seen.take().filter(|(_, read, seen)| {
            (seen.device, seen.inode) == (stamp.device, stamp.inode) && *read <= stamp.len
        });
        let fresh = same.is_none();
        let (file, read) = match same {
            Some((file, read, _)) => (file, read),
            None => (File::open(&self.path)?, 0),
        };
        let mut text = vec![0; usize::try_from(stamp.len - read).unwrap_or(0)];
        file.read_exact_at(&mut text, read)?;
        let (records, len) = parse(&text);
        self.seen = Some((file, read + len as u64, stamp));
        Ok(Some((fresh, records)))
    }

    /// Adds a record under the file's lock.
    pub(crate) fn append<R: Serialize>(path: &Path, record: &R) -> io::Result<()> {
        let mut file = open(path)?;
        flock(&file, FlockOperation::LockExclusive)?;
        let mut text = Vec::new();
        file.read_to_end(&mut text)?;
        // End a torn line, so that it damages only itself.
        let mut addition = Vec::new();
        if text.last().is_some_and(|last| *last != b'\n') {
            addition.push(b'\n');
        }
        addition.extend_from_slice(&line(record)?);
        let len = text.len() as u64;
        if let Err(error) = file.write_all(&addition).and_then(|()| file.sync_all()) {
            let _ = file.set_len(len);
            return Err(error);
        }
        Ok(())
    }
}

/// How often to try to create a file whose name another process takes.
const ATTEMPTS: usize = 16;

/// Creates the file that is to replace `path`, with mode 0600. It is always a new one: whatever has the name is
/// removed, and a link that takes its place is not followed.
pub(crate) fn create_beside(path: &Path) -> io::Result<(File, PathBuf)> {
    let beside = path.with_extension("new");
    let mut options = OpenOptions::new();
    options.read(true).append(true).mode(0o600).create_new(true);
    let mut attempts = 0;
    loop {
        let _ = std::fs::remove_file(&beside);
        attempts += 1;
        match options.open(&beside) {
            Ok(file) => return Ok((file, beside)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && attempts < ATTEMPTS => {}
            Err(error) => return Err(error),
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).append(true).mode(0o600);
    match options.clone().create_new(true).open(path) {
        Ok(file) => {
            give_to_owner(&file, path.parent().unwrap_or(Path::new(".")))?;
            Ok(file)
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            options.create(true).open(path)
        }
        Err(error) => Err(error),
    }
}

/// Gives a file that root creates to the owner of the directory, so that the service can read it.
fn give_to_owner(file: &File, directory: &Path) -> io::Result<()> {
    let (made, around) = (file.metadata()?, directory.metadata()?);
    if made.uid() == 0 && around.uid() != 0 {
        fchown(file, Some(around.uid()), Some(around.gid()))?;
    }
    Ok(())
}

pub(crate) fn line<R: Serialize>(record: &R) -> io::Result<Vec<u8>> {
    let json = serde_json::to_string(record)?;
    Ok(format!("{} {json}\n", &digest(json.as_bytes())[..CHECKSUM_LEN]).into_bytes())
}

/// Parses the records in complete lines, and returns the length of those lines. Damaged lines are skipped.
pub(crate) fn parse<R: DeserializeOwned>(text: &[u8]) -> (Vec<R>, usize) {
    let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    let records = text[..whole].split(|byte| *byte == b'\n').filter_map(|line| {
        let (check, json) = line.split_at_checked(CHECKSUM_LEN)?;
        let json = json.strip_prefix(b" ")?;
        if &digest(json).as_bytes()[..CHECKSUM_LEN] != check {
            tracing::warn!("skipped a damaged record");
            return None;
        }
        serde_json::from_slice(json).ok()
    });
    (records.collect(), whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("j.log");
        (dir, path)
    }

    /// Meaningful only as root, who can change owners.
    #[test]
    fn files_created_by_root_belong_to_the_directory_owner() {
        let (dir, path) = file();
        let mine = dir.path().metadata().unwrap().uid();
        let owner = if mine == 0 { 65534 } else { mine };
        std::os::unix::fs::chown(dir.path(), Some(owner), None).unwrap();
        SharedJournal::append(&path, &1u32).unwrap();
        assert_eq!(path.metadata().unwrap().uid(), owner);
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn truncated_journal_yields_whole_records_and_accepts_more() {
        let (_dir, path) = file();
        let (mut journal, none) = Journal::open::<u32>(&path).unwrap();
        assert!(none.is_empty());
        for number in 0..3 {
            journal.append(&number, true).unwrap();
        }
        let whole = std::fs::read(&path).unwrap();
        for cut in 0..=whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let (mut journal, records) = Journal::open::<u32>(&path).unwrap();
            assert!(records.iter().copied().eq(0..records.len() as u32), "{cut}");
            journal.append(&77, false).unwrap();
            let (_, again) = Journal::open::<u32>(&path).unwrap();
            assert_eq!(again.len(), records.len() + 1, "{cut}");
        }
    }

    #[test]
    fn damaged_line_loses_only_itself() {
        let (_dir, path) = file();
        let (mut journal, _) = Journal::open::<String>(&path).unwrap();
        for word in ["one", "two", "three"] {
            journal.append(&word, false).unwrap();
        }
        let text = std::fs::read_to_string(&path).unwrap().replace("two", "tvo");
        std::fs::write(&path, text).unwrap();
        assert_eq!(Journal::open::<String>(&path).unwrap().1, ["one", "three"]);
    }

    #[test]
    fn full_disk_append_fails_without_damage() {
        // A device that is always full.
        let (_dir, path) = file();
        let (mut journal, _) = Journal::open::<u32>(&path).unwrap();
        journal.file = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let error = journal.append(&1, false).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert_eq!(journal.len(), 0);
    }

    #[test]
    fn rewrite_replaces_all_records() {
        let (_dir, path) = file();
        let (mut journal, _) = Journal::open::<u32>(&path).unwrap();
        (0..100).for_each(|number| journal.append(&number, false).unwrap());
        journal.rewrite([7, 8].iter()).unwrap();
        journal.append(&9, false).unwrap();
        assert_eq!(Journal::open::<u32>(&path).unwrap().1, [7, 8, 9]);
    }

    /// Another process keeps putting a link where the new file is about to be created: nothing is ever written
    /// through it.
    #[test]
    fn rewrite_follows_no_link_that_takes_the_name_of_the_new_file() {
        let (dir, path) = file();
        let victim = dir.path().join("victim");
        std::fs::write(&victim, "untouched").unwrap();
        let beside = path.with_extension("new");
        let (mut journal, _) = Journal::open::<u32>(&path).unwrap();
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let _ = std::os::unix::fs::symlink(&victim, &beside);
                }
            });
            for round in 0..2_000_u32 {
                let rewritten = journal.rewrite([round].iter());
                let taken = |error: &io::Error| {
                    matches!(error.kind(), io::ErrorKind::AlreadyExists | io::ErrorKind::NotFound)
                };
                assert!(rewritten.as_ref().err().is_none_or(taken), "{rewritten:?}");
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        assert_eq!(std::fs::read(&victim).unwrap(), b"untouched");
    }

    #[test]
    fn shared_journal_reports_changes_and_replacement() {
        let (_dir, path) = file();
        let mut shared = SharedJournal::new(path.clone());
        assert_eq!(shared.changes::<u32>().unwrap(), None);
        SharedJournal::append(&path, &1).unwrap();
        assert_eq!(shared.changes::<u32>().unwrap(), Some((true, vec![1])));
        assert_eq!(shared.changes::<u32>().unwrap(), None);
        SharedJournal::append(&path, &2).unwrap();
        assert_eq!(shared.changes::<u32>().unwrap(), Some((false, vec![2])));
        std::fs::remove_file(&path).unwrap();
        SharedJournal::append(&path, &3).unwrap();
        assert_eq!(shared.changes::<u32>().unwrap(), Some((true, vec![3])));
    }
}
