//! Parses the text of a patch into sections and hunks.

use super::PatchError;
use super::unified::{self, FileDiff};

/// A whole patch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Patch {
    /// The sections, in the order of the text.
    pub sections: Vec<PatchSection>,
}

/// The change of one file. Paths are as written in the patch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PatchSection {
    /// Creates a file with these lines, or replaces it.
    Add {
        /// The file.
        path: String,
        /// The lines, without line endings.
        lines: Vec<String>,
    },
    /// Removes a file.
    Delete {
        /// The file.
        path: String,
    },
    /// Changes a file, moves it, or both.
    Update {
        /// The file.
        path: String,
        /// Its new path.
        move_to: Option<String>,
        /// The hunks, in the order of the file.
        hunks: Vec<Hunk>,
    },
    /// Changes a file by a unified diff.
    Diff(FileDiff),
}

/// A change at one position of a file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hunk {
    /// Lines that precede the position, outermost first.
    pub headers: Vec<String>,
    /// Context, removed and inserted lines.
    pub lines: Vec<HunkLine>,
    /// The lines are at the end of the file.
    pub at_end: bool,
}

/// A line of a hunk, without its line ending.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HunkLine {
    /// A line that stays.
    Context(String),
    /// A line that is removed.
    Remove(String),
    /// A line that is inserted.
    Insert(String),
}

const BEGIN: &str = "*** Begin Patch";
const END: &str = "*** End Patch";
const ADD: &str = "*** Add File: ";
const DELETE: &str = "*** Delete File: ";
const UPDATE: &str = "*** Update File: ";
const MOVE: &str = "*** Move to: ";
const END_OF_FILE: &str = "*** End of File";

impl Patch {
    /// Parses a patch. Ignores blank lines around it. A text that does not begin with `*** Begin Patch` may be a
    /// unified diff, plain or of git, whose hunks have to fit exactly, at their lines or near them.
    ///
    /// ```
    /// use codex_exec_client::Patch;
    /// let patch = Patch::parse("*** Begin Patch\n*** Delete File: old.txt\n*** End Patch\n")?;
    /// assert_eq!(patch.sections.len(), 1);
    /// # Ok::<_, codex_exec_client::PatchError>(())
    /// ```
    pub fn parse(text: &str) -> Result<Self, PatchError> {
        if unified::is_unified(text) {
            let files = unified::parse(text)?;
            return Ok(Self { sections: files.into_iter().map(PatchSection::Diff).collect() });
        }
        let lines: Vec<&str> =
            text.lines().map(|line| line.strip_suffix('\r').unwrap_or(line)).collect();
        let first = lines.iter().position(|line| !line.trim().is_empty()).unwrap_or(0);
        let last = lines.iter().rposition(|line| !line.trim().is_empty()).unwrap_or(0);
        let is = |at: usize, word: &str| lines.get(at).is_some_and(|line| line.trim() == word);
        if !is(first, BEGIN) {
            return Err(syntax(
                first,
                format!("a patch starts with `{BEGIN}`, or is a unified diff"),
            ));
        }
        if last == first || !is(last, END) {
            return Err(syntax(last, format!("a patch ends with `{END}`")));
        }
        let mut parser = Parser { lines: &lines[..last], at: first + 1 };
        let mut sections = Vec::new();
        while parser.at < last {
            if parser.lines[parser.at].trim().is_empty() {
                parser.at += 1;
                continue;
            }
            sections.push(parser.section()?);
        }
        if sections.is_empty() {
            return Err(PatchError::Empty);
        }
        Ok(Self { sections })
    }
}

fn syntax(at: usize, problem: impl Into<String>) -> PatchError {
    PatchError::Syntax { line: at + 1, problem: problem.into() }
}

struct Parser<'a> {
    lines: &'a [&'a str],
    at: usize,
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Option<&'a str> {
        self.lines.get(self.at).copied()
    }

    fn path(&mut self, prefix: &str) -> Result<Option<String>, PatchError> {
        // Tolerates spaces before the marker, which generated text sometimes has.
        let Some(path) = self.peek().and_then(|line| line.trim_start().strip_prefix(prefix)) else {
            return Ok(None);
        };
        let path = path.trim();
        if path.is_empty() {
            return Err(syntax(self.at, format!("`{}` needs a path", prefix.trim_end())));
        }
        self.at += 1;
        Ok(Some(path.to_owned()))
    }

    fn section(&mut self) -> Result<PatchSection, PatchError> {
        if let Some(path) = self.path(ADD)? {
            let mut lines = Vec::new();
            while let Some(line) = self.peek().and_then(|line| line.strip_prefix('+')) {
                lines.push(line.to_owned());
                self.at += 1;
            }
            return Ok(PatchSection::Add { path, lines });
        }
        if let Some(path) = self.path(DELETE)? {
            return Ok(PatchSection::Delete { path });
        }
        if let Some(path) = self.path(UPDATE)? {
            return self.update(path);
        }
        Err(syntax(
            self.at,
            format!("expected `{ADD}PATH`, `{DELETE}PATH`, `{UPDATE}PATH` or `{END}`"),
        ))
    }

    fn update(&mut self, path: String) -> Result<PatchSection, PatchError> {
        let began = self.at;
        // With a space before it, it is a line of the file.
        let move_to = match self.peek() {
            Some(line) if line.starts_with(MOVE) => self.path(MOVE)?,
            _ => None,
        };
        let mut hunks = Vec::new();
        while let Some(line) = self.peek() {
            let is_hunk = line.starts_with("@@") || is_hunk_line(line);
            if !is_hunk {
                break;
            }
            // Blank lines may separate sections.
            if line.trim().is_empty() && self.rest_is_no_hunk() {
                break;
            }
            hunks.push(self.hunk()?);
        }
        if hunks.is_empty() && move_to.is_none() {
            return Err(syntax(
                began,
                format!("the update of {path} has no hunk; start one with `@@`"),
            ));
        }
        Ok(PatchSection::Update { path, move_to, hunks })
    }

    /// Whether nothing but blank lines comes before the next marker.
    fn rest_is_no_hunk(&self) -> bool {
        let next = self.lines[self.at..].iter().find(|line| !line.trim().is_empty());
        next.is_none_or(|line| line.starts_with("*** "))
    }

    fn hunk(&mut self) -> Result<Hunk, PatchError> {
        let mut hunk = Hunk::default();
        while let Some(header) = self.peek().and_then(|line| line.strip_prefix("@@")) {
            let header = header.strip_prefix(' ').unwrap_or(header);
            if !header.trim().is_empty() {
                hunk.headers.push(header.to_owned());
            }
            self.at += 1;
        }
        let began = self.at;
        while let Some(line) = self.peek() {
            // With a space before it, it is a line of the file.
            if line.trim_end() == END_OF_FILE {
                hunk.at_end = true;
                self.at += 1;
                break;
            }
            if !is_hunk_line(line) || (line.is_empty() && self.rest_is_no_hunk()) {
                break;
            }
            hunk.lines.push(match line.split_at(line.len().min(1)) {
                ("-", rest) => HunkLine::Remove(rest.to_owned()),
                ("+", rest) => HunkLine::Insert(rest.to_owned()),
                // An empty line is context whose leading space was lost.
                (_, rest) => HunkLine::Context(rest.to_owned()),
            });
            self.at += 1;
        }
        if hunk.lines.is_empty() {
            let found = self.peek().unwrap_or("the end of the patch");
            return Err(syntax(
                began,
                format!("expected a line that starts with a space, `-` or `+`, found: {found}"),
            ));
        }
        Ok(hunk)
    }
}

fn is_hunk_line(line: &str) -> bool {
    line.is_empty() || line.starts_with([' ', '-', '+'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_in_the_format_description_parses() {
        let text = "*** Begin Patch
*** Add File: notes/new.txt
+first line
+second line
*** Delete File: old.txt
*** Update File: src/app.py
*** Move to: src/main.py
@@ def greet():
-print(\"Hi\")
+print(\"Hello\")
*** End of File
*** End Patch
";
        let patch = Patch::parse(text).unwrap();
        let [PatchSection::Add { lines, .. }, PatchSection::Delete { path }, update] =
            &patch.sections[..]
        else {
            panic!("{patch:?}");
        };
        assert_eq!((lines.len(), path.as_str()), (2, "old.txt"));
        let PatchSection::Update { path, move_to, hunks } = update else { panic!("{update:?}") };
        assert_eq!((path.as_str(), move_to.as_deref()), ("src/app.py", Some("src/main.py")));
        assert_eq!(hunks[0].headers, ["def greet():"]);
        assert!(hunks[0].at_end);
        assert_eq!(
            hunks[0].lines,
            [HunkLine::Remove("print(\"Hi\")".into()), HunkLine::Insert("print(\"Hello\")".into())]
        );
    }

    #[test]
    fn several_hunks_headers_and_blank_context_lines_parse() {
        let text = "\n*** Begin Patch\n*** Update File: a\n x\n-y\n@@ class A\n@@ fn b\n k\n\n+l\n@@\n+z\n\n*** Delete File: b\n*** End Patch\n\n";
        let patch = Patch::parse(text).unwrap();
        let PatchSection::Update { hunks, .. } = &patch.sections[0] else { panic!() };
        assert_eq!(hunks.len(), 3);
        assert_eq!(hunks[1].headers, ["class A", "fn b"]);
        assert_eq!(hunks[1].lines.len(), 3, "{:?}", hunks[1]);
        assert_eq!(hunks[2].lines, [HunkLine::Insert("z".into())]);
        assert_eq!(patch.sections.len(), 2);
    }

    #[test]
    fn markers_after_a_space_are_lines_of_the_file() {
        let text = "*** Begin Patch\n*** Update File: a\n *** Move to: b\n-x\n *** End of File\n *** End Patch\n *** Update File: c\n+y\n*** End of File\n*** End Patch";
        let patch = Patch::parse(text).unwrap();
        let [PatchSection::Update { move_to: None, hunks, .. }] = &patch.sections[..] else {
            panic!("{patch:?}");
        };
        let keep = |text: &str| HunkLine::Context(text.to_owned());
        assert_eq!(
            hunks[0].lines,
            [
                keep("*** Move to: b"),
                HunkLine::Remove("x".into()),
                keep("*** End of File"),
                keep("*** End Patch"),
                keep("*** Update File: c"),
                HunkLine::Insert("y".into()),
            ]
        );
        assert!(hunks[0].at_end);
        assert_eq!(hunks.len(), 1);
    }

    #[test]
    fn a_syntax_error_names_its_line() {
        for (text, line, words) in [
            ("", 1, "starts with"),
            ("hello", 1, "starts with"),
            ("*** Begin Patch", 1, "ends with"),
            ("*** Begin Patch\n*** Add File: \n*** End Patch", 2, "path"),
            ("*** Begin Patch\n*** Add File: x\nno plus\n*** End Patch", 3, "expected"),
            ("*** Begin Patch\n*** Update File: x\n*** End Patch", 3, "no hunk"),
            ("*** Begin Patch\n*** Update File: x\n@@\n*** End Patch", 4, "a line that starts"),
        ] {
            match Patch::parse(text) {
                Err(PatchError::Syntax { line: at, problem }) => {
                    assert_eq!(at, line, "{text}: {problem}");
                    assert!(problem.contains(words), "{text}: {problem}");
                }
                other => panic!("{text}: {other:?}"),
            }
        }
        let empty = Patch::parse("*** Begin Patch\n*** End Patch");
        assert!(matches!(empty, Err(PatchError::Empty)));
    }
}
