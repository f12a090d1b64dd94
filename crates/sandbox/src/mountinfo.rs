//! Parses the kernel's mount table, `/proc/PID/mountinfo`.
//!
//! Invariant: one malformed line makes the whole table an error; no line is skipped.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// A mount.
#[derive(Debug, PartialEq, Eq)]
pub struct Line<'t> {
    /// Mount id.
    pub id: u64,
    /// Id of the mount that it is mounted on.
    pub parent: u64,
    /// Device of its file system, major and minor.
    pub file_system: (u32, u32),
    /// The directory of the file system that is mounted.
    pub root: PathBuf,
    /// The mount point, as seen from the root of the process.
    pub point: PathBuf,
    /// The options of the mount, separated by commas.
    options: &'t [u8],
    /// The type of the file system.
    pub kind: &'t [u8],
}

impl<'t> Line<'t> {
    /// The options of the mount.
    pub fn options(&self) -> impl Iterator<Item = &'t [u8]> {
        self.options.split(|byte| *byte == b',')
    }
}

/// Parses a table; `None` if a line is malformed.
pub fn parse(table: &[u8]) -> Option<Vec<Line<'_>>> {
    table.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()).map(line).collect()
}

/// `ID PARENT MAJOR:MINOR ROOT POINT OPTIONS [TAG...] - TYPE SOURCE OPTIONS`
fn line(text: &[u8]) -> Option<Line<'_>> {
    let path = |word: &[u8]| PathBuf::from(OsString::from_vec(unescape(word)));
    let mut words = text.split(|byte| *byte == b' ');
    let mut text = || std::str::from_utf8(words.next()?).ok();
    let (id, parent) = (text()?.parse().ok()?, text()?.parse().ok()?);
    let (major, minor) = text()?.split_once(':')?;
    let file_system = (major.parse().ok()?, minor.parse().ok()?);
    let (root, point, options) = (path(words.next()?), path(words.next()?), words.next()?);
    let kind = words.skip_while(|word| *word != b"-").nth(1)?;
    Some(Line { id, parent, file_system, root, point, options, kind })
}

/// Decodes a path: the kernel writes some bytes as three octal digits.
fn unescape(text: &[u8]) -> Vec<u8> {
    let mut path = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&byte, after)) = rest.split_first() {
        let octal = match after {
            [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', ..] if byte == b'\\' => {
                Some((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'))
            }
            _ => None,
        };
        path.push(octal.unwrap_or(byte));
        rest = if octal.is_some() { &after[3..] } else { after };
    }
    path
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn mountinfo_lines_are_parsed() {
        let table = br"36 35 98:0 /mnt1 /a\040b\134c ro,noatime,nosuid shared:1 - ext3 /dev/x rw
37 36 0:5 / /dev rw - devtmpfs none rw
";
        let lines = parse(table).unwrap();
        let [first, second] = &lines[..] else { panic!("{lines:?}") };
        assert_eq!((first.id, first.parent, first.file_system), (36, 35, (98, 0)));
        assert_eq!(
            (first.root.as_path(), first.point.as_path()),
            (Path::new("/mnt1"), Path::new(r"/a b\c"))
        );
        assert_eq!(first.options().collect::<Vec<_>>(), [&b"ro"[..], b"noatime", b"nosuid"]);
        assert_eq!((first.kind, second.kind), (&b"ext3"[..], &b"devtmpfs"[..]));
    }

    #[test]
    fn malformed_line_invalidates_the_table() {
        for bad in [
            "36 35 98:0",
            "x 35 98:0 / / rw - ext4 x rw",
            "36 35 98 / / rw - ext4 x rw",
            "36 35 98:0 / / rw ext4",
        ] {
            let table = format!("37 36 0:5 / /dev rw - devtmpfs none rw\n{bad}\n");
            assert_eq!(parse(table.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn own_mount_table_is_parsed() {
        let table = std::fs::read("/proc/thread-self/mountinfo").unwrap();
        assert!(parse(&table).unwrap().iter().any(|line| line.point == Path::new("/proc")));
    }
}
