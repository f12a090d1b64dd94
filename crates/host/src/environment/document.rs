//! One TOML file, and the part of it that was asked for.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags};
use toml::{Table, Value};

/// A file larger than this is not a configuration.
const MAX_BYTES: u64 = 4 << 20;

/// A configuration file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    /// The system does not let us read it.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A directory, FIFO or device.
    #[error("{} is not a file", .0.display())]
    NotAFile(PathBuf),
    /// More than anybody configures.
    #[error("{} is larger than {MAX_BYTES} bytes", .0.display())]
    TooLarge(PathBuf),
    /// Not text.
    #[error("{} is not UTF-8: {source}", path.display())]
    NotText {
        /// The file.
        path: PathBuf,
        /// Where.
        source: std::str::Utf8Error,
    },
    /// Not TOML.
    #[error("{}:{line}:{column}: {reason}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// Counted from 1, in characters.
        column: usize,
        /// What is wrong there.
        reason: String,
    },
    /// A value that decides which files are read is not what it has to be.
    #[error("{}: {reason}", path.display())]
    Value {
        /// The file.
        path: PathBuf,
        /// Which value, and what it has to be.
        reason: String,
    },
}

/// A parsed file.
#[derive(Debug)]
pub(super) struct Document {
    pub path: PathBuf,
    pub table: Table,
}

impl Document {
    /// Reads a file; `None` if there is none of that name.
    pub(super) fn read(path: &Path) -> Result<Option<Self>, DocumentError> {
        let Some(bytes) = read(path)? else { return Ok(None) };
        let path = path.to_owned();
        let text = match std::str::from_utf8(&bytes) {
            Ok(text) => text.strip_prefix('\u{feff}').unwrap_or(text),
            Err(source) => return Err(DocumentError::NotText { path, source }),
        };
        match text.parse::<Table>() {
            Ok(table) => Ok(Some(Self { path, table })),
            Err(error) => {
                let before = &text[..error.span().map_or(0, |span| floor(text, span.start))];
                let line = before.matches('\n').count() + 1;
                let last = before.rfind('\n').map_or(0, |newline| newline + 1);
                let column = before[last..].chars().count() + 1;
                let reason = error.message().trim().to_owned();
                Err(DocumentError::Syntax { path, line, column, reason })
            }
        }
    }

    pub(super) fn value_error(&self, reason: impl Into<String>) -> DocumentError {
        DocumentError::Value { path: self.path.clone(), reason: reason.into() }
    }
}

fn floor(text: &str, index: usize) -> usize {
    text.floor_char_boundary(index.min(text.len()))
}

fn read(path: &Path) -> Result<Option<Vec<u8>>, DocumentError> {
    let failed = |source| DocumentError::Read { path: path.to_owned(), source };
    // A FIFO is not waited for.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(file) => file,
        Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => return Ok(None),
        Err(errno) => return Err(failed(errno.into())),
    };
    let stat = rustix::fs::fstat(&file).map_err(|errno| failed(errno.into()))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(DocumentError::NotAFile(path.to_owned()));
    }
    let mut bytes = Vec::new();
    let read = std::fs::File::from(file).take(MAX_BYTES + 1).read_to_end(&mut bytes);
    read.map_err(failed)?;
    match bytes.len() as u64 > MAX_BYTES {
        true => Err(DocumentError::TooLarge(path.to_owned())),
        false => Ok(Some(bytes)),
    }
}

/// What the paths name, in the order of the document. A path that leads on through something that is no
/// table selects that; one that leads nowhere leaves the tables on its way.
pub(super) fn select(table: &Table, paths: &[&[String]]) -> Table {
    let mut selected = Table::new();
    for (key, value) in table {
        let tails = paths.iter().filter_map(|path| match path.split_first() {
            Some((first, tail)) if first == key => Some(tail),
            _ => None,
        });
        let tails: Vec<&[String]> = tails.collect();
        if tails.is_empty() {
            continue;
        }
        let value = match value {
            Value::Table(inner) if tails.iter().all(|tail| !tail.is_empty()) => {
                Value::Table(select(inner, &tails))
            }
            whole => whole.clone(),
        };
        selected.insert(key.clone(), value);
    }
    selected
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selected(text: &str, paths: &[&[&str]]) -> String {
        let paths: Vec<Vec<String>> =
            paths.iter().map(|path| path.iter().map(ToString::to_string).collect()).collect();
        let table = text.parse().unwrap();
        let paths: Vec<&[String]> = paths.iter().map(Vec::as_slice).collect();
        toml::to_string(&select(&table, &paths)).unwrap()
    }

    #[test]
    fn selection_keeps_the_order_of_the_file_and_drops_the_rest() {
        let text = "model=\"x\"\n[z]\nb=1 # why\na=2\n[y]\nq=1\n[z.t]\nc=3\n";
        assert_eq!(
            selected(text, &[&["y"], &["z"]]),
            "[z]\nb = 1\na = 2\n\n[z.t]\nc = 3\n\n[y]\nq = 1\n"
        );
        assert_eq!(selected(text, &[&["z", "a"]]), "[z]\na = 2\n");
        assert_eq!(selected(text, &[&["z.t"]]), "");
    }

    #[test]
    fn a_path_that_leads_nowhere_leaves_its_tables() {
        let text = "[a]\nb=\"1\"\n[a.c]\nd=1\n[[a.l]]\nz=1\n";
        assert_eq!(selected(text, &[&["a", "nope"]]), "[a]\n");
        assert_eq!(selected(text, &[&["a", "c", "nope"]]), "[a.c]\n");
        assert_eq!(
            selected(text, &[&["a", "b", "c"]]),
            "[a]\nb = \"1\"\n",
            "it leads through a value"
        );
        assert_eq!(selected(text, &[&["a", "l", "0"]]), "[[a.l]]\nz = 1\n");
        assert_eq!(selected(text, &[&["a", "b"], &["a"]]), selected(text, &[&["a"]]));
    }

    #[test]
    fn an_error_names_file_line_and_column() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config.toml");
        std::fs::write(&path, "é = 1\n[a\n").unwrap();
        let error = Document::read(&path).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{}:2:3: ", path.display())), "{error}");
    }

    #[test]
    fn a_fifo_is_refused_at_once() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config.toml");
        rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, Mode::RUSR, 0).unwrap();
        assert!(matches!(Document::read(&path), Err(DocumentError::NotAFile(_))));
    }
}
