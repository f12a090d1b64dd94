//! Verifies the tree before anything runs in it: compares the kernel's mount table with the plan.
//!
//! Invariant: the target starts only if every mount in its namespace was planned, with the planned
//! attributes and path, or is a submount of a planned bind with attributes at least as strict; no
//! unplanned mount covers a planned one; and `/..` is `/`. A bug in building the tree ends in a
//! refusal, not in an escape.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, statx};
use rustix::io::Errno;

use super::sys::{ATTR_NODEV, ATTR_NOSUID, ATTR_RDONLY};
use super::{at, during};
use crate::status::{CHANGED, Failure, Stage};
use crate::{host, mountinfo};

/// The mount table of the reading process.
const TABLE: &str = "/proc/self/mountinfo";

/// An expected mount.
#[derive(Debug)]
pub(super) struct Expected {
    /// Its id in the new namespace.
    pub(super) id: u64,
    /// Its path, as seen from the new root.
    pub(super) path: PathBuf,
    /// Attributes that it must have.
    pub(super) attributes: u64,
    /// Whether it may have submounts.
    pub(super) with_submounts: bool,
}

/// A row of the mount table.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    id: u64,
    parent: u64,
    path: PathBuf,
    attributes: u64,
}

/// Step `Proof`: compares this process's mounts with the planned ones, and `/..` with `/`.
pub(super) fn check(expected: &[Expected]) -> Result<ProvenMounts, Failure> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let table = rustix::fs::open(TABLE, flags, Mode::empty());
    let table = File::from(table.map_err(at(Stage::Proof, Path::new(TABLE)))?);
    compare(&read_table(&table)?, expected)
        .map_err(|what| Failure::new(Stage::Proof, CHANGED, what))?;
    root_has_no_parent()?;
    Ok(ProvenMounts(table.into()))
}

/// Reads the mounts of this process.
fn read_table(mut table: &File) -> Result<Vec<Mount>, Failure> {
    // The table has no size: an empty buffer would grow by many short reads.
    let mut text = Vec::with_capacity(16 << 10);
    table.read_to_end(&mut text).map_err(|error| {
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        Failure::new(Stage::Proof, errno, TABLE)
    })?;
    let lines = mountinfo::parse(&text).ok_or_else(|| during(Stage::Proof)(Errno::INVAL))?;
    Ok(lines.into_iter().map(Mount::from).collect())
}

/// The verified mount table, held open to notice later changes.
pub(super) struct ProvenMounts(OwnedFd);

/// The verified table of this process, in a helper.
static PROVEN: OnceLock<(OwnedFd, AtomicBool)> = OnceLock::new();

impl ProvenMounts {
    /// Makes [`mounts_intact`] use this table.
    pub(super) fn watch(self) {
        let _ = PROVEN.set((self.0, AtomicBool::new(true)));
    }

    pub(super) fn number(&self) -> i32 {
        self.0.as_raw_fd()
    }
}

/// Whether the mounts of the sandbox that this helper runs in are unchanged since they were verified:
/// the kernel removes a mount when the file under it is removed. True outside of sandboxes, and for
/// sandboxes without mounts.
pub fn mounts_intact() -> bool {
    let Some((table, intact)) = PROVEN.get() else { return true };
    let mut fds = [PollFd::new(table, PollFlags::PRI)];
    let asked = rustix::io::retry_on_intr(|| poll(&mut fds, Some(&Timespec::default())));
    // The kernel reports a change only once.
    if asked.is_err() || fds[0].revents().intersects(PollFlags::PRI | PollFlags::ERR) {
        intact.store(false, Ordering::Relaxed);
    }
    intact.load(Ordering::Relaxed)
}

/// Checks that the root is its own parent, on the same mount.
fn root_has_no_parent() -> Result<(), Failure> {
    let look = |path: &Path| {
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
        let stat = statx(CWD, path, flags, host::WANTED).map_err(at(Stage::Proof, path))?;
        Ok::<_, Failure>(host::node(&stat).identity)
    };
    let (root, above) = (look(Path::new("/"))?, look(Path::new("/.."))?);
    if root == above {
        Ok(())
    } else {
        Err(Failure::new(Stage::Proof, libc::EXDEV, "/.. leads out of the root"))
    }
}

/// Returns the first difference.
fn compare(mounts: &[Mount], expected: &[Expected]) -> Result<(), String> {
    let by_id: HashMap<u64, &Mount> = mounts.iter().map(|mount| (mount.id, mount)).collect();
    let planned: HashMap<u64, &Expected> = expected.iter().map(|mount| (mount.id, mount)).collect();
    expected.iter().try_for_each(|wanted| check_planned(wanted, &by_id))?;
    let others = mounts.iter().filter(|mount| !planned.contains_key(&mount.id));
    others.into_iter().try_for_each(|mount| check_submount(mount, &by_id, &planned))
}

/// Checks that a planned mount is at its path, with its attributes.
fn check_planned(wanted: &Expected, by_id: &HashMap<u64, &Mount>) -> Result<(), String> {
    let Some(found) = by_id.get(&wanted.id) else {
        return Err(format!("the mount of {} is gone", wanted.path.display()));
    };
    if found.path != wanted.path {
        let (found, wanted) = (found.path.display(), wanted.path.display());
        return Err(format!("a mount for {wanted} is at {found}"));
    }
    check_attributes(found, wanted.attributes)
}

/// Checks that an unplanned mount is a submount of a planned one, covers nothing, and is as strict.
fn check_submount(
    mount: &Mount,
    by_id: &HashMap<u64, &Mount>,
    planned: &HashMap<u64, &Expected>,
) -> Result<(), String> {
    let around = enclosing(mount, by_id, planned).filter(|around| around.with_submounts);
    let Some(around) = around else {
        return Err(format!("{} is mounted and was not planned", mount.path.display()));
    };
    if mount.path == around.path {
        return Err(format!("{} is covered by another mount", around.path.display()));
    }
    check_attributes(mount, around.attributes)
}

/// The planned mount that contains an unplanned one.
fn enclosing<'e>(
    mount: &Mount,
    by_id: &HashMap<u64, &Mount>,
    planned: &HashMap<u64, &'e Expected>,
) -> Option<&'e Expected> {
    let mut parent = mount.parent;
    // A valid table has no cycles.
    for _ in 0..=by_id.len() {
        if let Some(found) = planned.get(&parent) {
            return Some(found);
        }
        parent = by_id.get(&parent)?.parent;
    }
    None
}

fn check_attributes(mount: &Mount, attributes: u64) -> Result<(), String> {
    let missing = attributes & !mount.attributes;
    if missing == 0 {
        return Ok(());
    }
    let names = [(ATTR_RDONLY, "read-only"), (ATTR_NOSUID, "nosuid"), (ATTR_NODEV, "nodev")];
    let missing: Vec<&str> =
        names.iter().filter(|(bit, _)| missing & bit != 0).map(|(_, name)| *name).collect();
    Err(format!("{} is not mounted {}", mount.path.display(), missing.join(", ")))
}

impl From<mountinfo::Line<'_>> for Mount {
    fn from(line: mountinfo::Line<'_>) -> Self {
        let attributes = line.options().map(|option| match option {
            b"ro" => ATTR_RDONLY,
            b"nosuid" => ATTR_NOSUID,
            b"nodev" => ATTR_NODEV,
            _ => 0,
        });
        let attributes = attributes.fold(0, |all, one| all | one);
        Self { id: line.id, parent: line.parent, path: line.point, attributes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUIET: u64 = ATTR_NOSUID | ATTR_NODEV;

    fn mount(id: u64, parent: u64, path: &str, attributes: u64) -> Mount {
        Mount { id, parent, path: path.into(), attributes }
    }

    fn expected(id: u64, path: &str, attributes: u64, with_submounts: bool) -> Expected {
        Expected { id, path: path.into(), attributes, with_submounts }
    }

    /// A root, a bind with a submount, and a read-only bind in it.
    fn plan() -> Vec<Expected> {
        vec![
            expected(10, "/", QUIET | ATTR_RDONLY, false),
            expected(11, "/srv", QUIET, true),
            expected(12, "/srv/.git", QUIET | ATTR_RDONLY, true),
        ]
    }

    fn table() -> Vec<Mount> {
        vec![
            mount(10, 1, "/", QUIET | ATTR_RDONLY),
            mount(11, 10, "/srv", QUIET),
            mount(12, 11, "/srv/.git", QUIET | ATTR_RDONLY),
            mount(13, 11, "/srv/cache", QUIET),
        ]
    }

    #[test]
    fn planned_table_is_accepted() {
        assert_eq!(compare(&table(), &plan()), Ok(()));
    }

    #[test]
    fn every_deviation_is_refused() {
        type Deviation = Box<dyn Fn(&mut Vec<Mount>)>;
        let deviations: Vec<Deviation> = vec![
            // The old root left on top of the new one.
            Box::new(|table| table.push(mount(20, 10, "/", 0))),
            Box::new(|table| table.push(mount(20, 10, "/tmp", QUIET | ATTR_RDONLY))),
            Box::new(|table| table.push(mount(20, 11, "/srv", QUIET))),
            Box::new(|table| table.push(mount(20, 12, "/srv/.git/x", QUIET))),
            Box::new(|table| table.push(mount(20, 99, "/elsewhere", QUIET | ATTR_RDONLY))),
            Box::new(|table| drop(table.remove(2))),
            Box::new(|table| table[0].attributes = QUIET),
            Box::new(|table| table[1].attributes = ATTR_NODEV),
            Box::new(|table| table[3].attributes = ATTR_NOSUID),
            Box::new(|table| table[2].path = "/srv/.gut".into()),
            Box::new(|table| table[3].parent = 13),
        ];
        for (index, deviate) in deviations.iter().enumerate() {
            let mut table = table();
            deviate(&mut table);
            assert!(compare(&table, &plan()).is_err(), "deviation {index}");
        }
    }

    #[test]
    fn attributes_are_read_from_the_table() {
        let table = br"36 35 98:0 /mnt1 /a ro,noatime,nosuid shared:1 - ext3 /dev/x rw,nodev";
        let read_table: Vec<Mount> =
            mountinfo::parse(table).unwrap().into_iter().map(Mount::from).collect();
        assert_eq!(read_table, [mount(36, 35, "/a", ATTR_RDONLY | ATTR_NOSUID)]);
    }
}
