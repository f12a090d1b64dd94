//! Applies hunks to the lines of a file. Pure.
//!
//! Invariant: only lines that a hunk removes or inserts change; context, line endings and a missing
//! newline at the end stay as they are.

use super::PatchError;
use super::parse::{Hunk, HunkLine};

/// Returns the content with the hunks applied.
pub(super) fn update(path: &str, content: &[u8], hunks: &[Hunk]) -> Result<Vec<u8>, PatchError> {
    let file: Vec<Line<'_>> = content.split_inclusive(|&b| b == b'\n').map(Line::split).collect();
    let ended = file.last().is_none_or(|last| last.end != End::None);
    let count = |end| file.iter().filter(|line| line.end == end).count();
    let usual = if count(End::Windows) > count(End::Unix) { End::Windows } else { End::Unix };
    let texts: Vec<&[u8]> = file.iter().map(|line| line.text).collect();

    let mut out: Vec<Line<'_>> = Vec::with_capacity(file.len());
    let mut at = 0;
    for (n, hunk) in hunks.iter().enumerate() {
        let start = locate(path, n + 1, hunk, &texts, at)?;
        out.extend_from_slice(&file[at..start]);
        at = start;
        for line in &hunk.lines {
            match line {
                HunkLine::Context(_) => {
                    out.push(file[at]);
                    at += 1;
                }
                HunkLine::Remove(_) => at += 1,
                HunkLine::Insert(text) => out.push(Line { text: text.as_bytes(), end: usual }),
            }
        }
    }
    out.extend_from_slice(&file[at..]);

    let mut content = Vec::with_capacity(content.len());
    for (n, line) in out.iter().enumerate() {
        content.extend_from_slice(line.text);
        let is_last = n + 1 == out.len();
        content.extend_from_slice(match line.end {
            _ if is_last && !ended => b"",
            End::None => usual.bytes(),
            end => end.bytes(),
        });
    }
    Ok(content)
}

/// A line of the file, or an inserted one.
#[derive(Debug, Clone, Copy)]
struct Line<'a> {
    text: &'a [u8],
    end: End,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Unix,
    Windows,
    /// Only the last line of a file can have none.
    None,
}

impl<'a> Line<'a> {
    fn split(line: &'a [u8]) -> Self {
        let (text, end) = if let Some(text) = line.strip_suffix(b"\r\n") {
            (text, End::Windows)
        } else if let Some(text) = line.strip_suffix(b"\n") {
            (text, End::Unix)
        } else {
            (line, End::None)
        };
        Self { text, end }
    }
}

impl End {
    fn bytes(self) -> &'static [u8] {
        match self {
            Self::Unix => b"\n",
            Self::Windows => b"\r\n",
            Self::None => b"",
        }
    }
}

/// Where the hunk's old lines start, at or after `from`.
fn locate(
    path: &str,
    number: usize,
    hunk: &Hunk,
    lines: &[&[u8]],
    from: usize,
) -> Result<usize, PatchError> {
    let mismatch = |problem: String, wanted: &[&str]| PatchError::Mismatch {
        path: path.to_owned(),
        hunk: number,
        problem,
        wanted: wanted.join("\n"),
    };
    let mut at = from;
    for header in &hunk.headers {
        let wanted = [header.as_str()];
        at = match find(lines, &wanted, at, false) {
            Some(found) => found + 1,
            None => {
                let problem = format!("its `@@` line was not found after line {at}");
                return Err(mismatch(problem, &wanted));
            }
        };
    }
    let old: Vec<&str> = hunk
        .lines
        .iter()
        .filter_map(|line| match line {
            HunkLine::Context(text) | HunkLine::Remove(text) => Some(text.as_str()),
            HunkLine::Insert(_) => None,
        })
        .collect();
    if old.is_empty() {
        // Nothing to find: insert after the header, or at the end.
        return Ok(if hunk.headers.is_empty() || hunk.at_end { lines.len() } else { at });
    }
    let found = find(lines, &old, at, hunk.at_end).or_else(|| {
        // The header itself may be the first line of context.
        hunk.headers
            .last()
            .and_then(|_| find(lines, &old, at.saturating_sub(1).max(from), hunk.at_end))
    });
    found.ok_or_else(|| {
        let place = if hunk.at_end { "at the end of the file" } else { "after" };
        let problem = if hunk.at_end {
            format!("its lines were not found {place}")
        } else {
            format!("its lines were not found {place} line {at}")
        };
        mismatch(problem, &old)
    })
}

/// Finds consecutive lines: first exactly, then with more and more leniency about white space and
/// typography.
fn find(lines: &[&[u8]], wanted: &[&str], from: usize, at_end: bool) -> Option<usize> {
    let last = lines.len().checked_sub(wanted.len())?;
    let first = if at_end { last.max(from) } else { from };
    if first > last {
        return None;
    }
    (0..4).find_map(|leniency| {
        let wanted: Vec<String> = wanted.iter().map(|line| normalized(line, leniency)).collect();
        (first..=last).find(|&start| {
            wanted.iter().zip(&lines[start..]).all(|(wanted, line)| {
                match std::str::from_utf8(line) {
                    Ok(line) => normalized(line, leniency) == *wanted,
                    Err(_) => *line == wanted.as_bytes(),
                }
            })
        })
    })
}

/// The line as it is compared at a level of leniency: 0 exact, 1 without trailing white space, 2 without
/// white space at both ends, 3 also with typographic characters as ASCII.
fn normalized(line: &str, leniency: u8) -> String {
    match leniency {
        0 => line.to_owned(),
        1 => line.trim_end().to_owned(),
        2 => line.trim().to_owned(),
        _ => line.trim().chars().map(ascii_equivalent).collect(),
    }
}

fn ascii_equivalent(c: char) -> char {
    match c {
        '\u{2010}'..='\u{2015}' | '\u{2212}' => '-',
        '\u{2018}'..='\u{201B}' => '\'',
        '\u{201C}'..='\u{201F}' => '"',
        '\u{00A0}' | '\u{2000}'..='\u{200A}' | '\u{202F}' | '\u{205F}' | '\u{3000}' => ' ',
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::super::parse::{Patch, PatchSection};
    use super::*;

    fn apply(content: &str, hunks: &str) -> Result<String, PatchError> {
        let text = format!("*** Begin Patch\n*** Update File: f\n{hunks}\n*** End Patch");
        let patch = Patch::parse(&text).unwrap();
        let PatchSection::Update { hunks, .. } = &patch.sections[0] else { panic!() };
        update("f", content.as_bytes(), hunks).map(|bytes| String::from_utf8(bytes).unwrap())
    }

    #[test]
    fn each_hunk_is_found_after_the_previous_one() {
        assert_eq!(apply("a\nb\na\nb\n", "@@\n-a\n+1\n@@\n-a\n+2").unwrap(), "1\nb\n2\nb\n");
        assert_eq!(apply("a\nb\na\n", "@@ b\n-a\n+2").unwrap(), "a\nb\n2\n");
        let code = "class A\n  def f\n    x\nclass B\n  def f\n    x\n";
        let changed = apply(code, "@@ class B\n@@   def f\n-    x\n+    y").unwrap();
        assert_eq!(changed, "class A\n  def f\n    x\nclass B\n  def f\n    y\n");
    }

    #[test]
    fn insertions_without_context_go_after_the_header_or_to_the_end() {
        assert_eq!(apply("a\nb\n", "@@ a\n+x").unwrap(), "a\nx\nb\n");
        assert_eq!(apply("a\nb\n", "@@\n+x").unwrap(), "a\nb\nx\n");
        assert_eq!(apply("", "@@\n+x").unwrap(), "x\n");
    }

    #[test]
    fn end_of_file_anchors_a_hunk() {
        assert_eq!(apply("a\nb\na\n", "@@\n-a\n+z\n*** End of File").unwrap(), "a\nb\nz\n");
        let error = apply("a\nb\n", "@@\n-a\n+z\n*** End of File").unwrap_err();
        assert!(error.to_string().contains("end of the file"), "{error}");
    }

    #[test]
    fn line_ends_are_kept() {
        assert_eq!(apply("a\r\nb\r\n", "@@\n a\n-b\n+c").unwrap(), "a\r\nc\r\n");
        assert_eq!(apply("a\nb", "@@\n-b\n+c").unwrap(), "a\nc");
        assert_eq!(apply("a\n", "@@\n-a").unwrap(), "");
    }

    #[test]
    fn a_last_line_without_an_ending_gets_the_usual_one_if_lines_follow() {
        assert_eq!(apply("a\r\nb", "@@\n a\n-b").unwrap(), "a");
        assert_eq!(apply("a\r\nb\r\nc", "@@\n c\n+d").unwrap(), "a\r\nb\r\nc\r\nd");
        assert_eq!(apply("a\r\nb", "@@\n a\n+x").unwrap(), "a\r\nx\r\nb");
        assert_eq!(apply("a\nb\r\nc", "@@\n-a\n+x\n b").unwrap(), "x\nb\r\nc", "mixed");
    }

    proptest::proptest! {
        /// Editing a file with one kind of line ending equals editing its list of lines.
        #[test]
        fn files_of_one_style_are_edited_as_lists(
            lines in proptest::collection::vec(0..2u8, 1..12),
            edits in proptest::collection::vec(0..4u8, 12),
            windows: bool,
            ended: bool,
        ) {
            // Lines are unique, so that a hunk matches at one position.
            let lines: Vec<String> = lines.iter().enumerate().map(|(n, l)| format!("{n}-{l}")).collect();
            let end = if windows { "\r\n" } else { "\n" };
            let text = |lines: &[String]| {
                let last = if ended && !lines.is_empty() { end } else { "" };
                format!("{}{last}", lines.join(end))
            };
            let (mut hunk, mut expected) = (String::from("@@"), Vec::new());
            for (line, edit) in lines.iter().zip(&edits) {
                match edit {
                    0 => hunk += &format!("\n-{line}"),
                    1 => {
                        hunk += &format!("\n {line}\n+new {line}");
                        expected.extend([line.clone(), format!("new {line}")]);
                    }
                    2 => {
                        hunk += &format!("\n-{line}\n+new {line}");
                        expected.push(format!("new {line}"));
                    }
                    _ => {
                        hunk += &format!("\n {line}");
                        expected.push(line.clone());
                    }
                }
            }
            // A single line without an ending does not show which ending the file uses.
            proptest::prop_assume!(ended || lines.len() > 1 || !windows);
            proptest::prop_assert_eq!(apply(&text(&lines), &hunk).unwrap(), text(&expected));
        }
    }

    #[test]
    fn context_matches_leniently_and_stays_as_it_is() {
        assert_eq!(apply("  a  \nb\n", "@@\n a\n-b\n+c").unwrap(), "  a  \nc\n");
        assert_eq!(
            apply("say “hi” – ok\nb\n", "@@\n say \"hi\" - ok\n-b\n+c").unwrap(),
            "say “hi” – ok\nc\n"
        );
        assert_eq!(apply(" x\nx\n", "@@\n-x\n+y").unwrap(), " x\ny\n", "exact comes first");
    }

    #[test]
    fn a_mismatch_names_the_hunk_and_the_lines() {
        let error = apply("a\n", "@@\n-a\n+b\n@@\n-nope\n+c").unwrap_err();
        let words = error.to_string();
        assert!(words.contains("hunk 2 of f") && words.contains("nope"), "{words}");
    }
}
