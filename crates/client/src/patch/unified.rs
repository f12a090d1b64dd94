//! Unified diffs, plain and of git: parsing, and applying them to content. Pure.
//!
//! Invariant: a hunk applies as `git apply` applies it: its old lines are there exactly, line ends included, at the
//! line that its header names or else nearest to it, and no line is changed twice. A hunk without context before
//! (after) it is at the beginning (end) of the file. What this cannot do (binary patches, links, changed modes, copies)
//! is an error, never left out.

use super::PatchError;

/// The change of one file by a unified diff.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FileDiff {
    /// The file before; `None` if the diff creates it.
    pub old: Option<String>,
    /// The file after; `None` if the diff deletes it.
    pub new: Option<String>,
    /// Permission bits of a new file.
    pub mode: Option<u32>,
    /// The hunks, in the order of the file.
    pub hunks: Vec<DiffHunk>,
}

/// A hunk of a unified diff.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DiffHunk {
    /// Where the new lines start, counted from 1; 0 if there are none.
    new_start: usize,
    /// Where the old lines start, counted from 1; 0 if there are none.
    old_start: usize,
    /// Each line with its marker and its end.
    lines: Vec<(Marker, Vec<u8>)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Marker {
    Context,
    Remove,
    Insert,
}

/// Whether the text is a unified diff rather than a patch with `*** Begin Patch`.
pub(super) fn is_unified(text: &str) -> bool {
    let first = text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
    if first.trim() == "*** Begin Patch" {
        return false;
    }
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let next = lines.peek().copied().unwrap_or_default();
        if line.starts_with("diff --git ") || (line.starts_with("--- ") && next.starts_with("+++ "))
        {
            return true;
        }
    }
    false
}

/// Parses a unified diff. Ignores text before and between the files, such as a commit's message.
pub(super) fn parse(text: &str) -> Result<Vec<FileDiff>, PatchError> {
    let lines: Vec<&str> = text.split_inclusive('\n').collect();
    let mut parser = Parser { lines: &lines, at: 0 };
    let mut files = Vec::new();
    while parser.at < parser.lines.len() {
        let line = parser.text();
        if let Some(names) = line.strip_prefix("diff --git ") {
            files.push(parser.git_file(names)?);
        } else if line.starts_with("--- ") && parser.text_at(1).starts_with("+++ ") {
            files.push(parser.plain_file()?);
        } else {
            if line.starts_with("@@ -") {
                return Err(parser.error("a hunk without the names of its file before it"));
            }
            parser.at += 1;
        }
    }
    if files.is_empty() { Err(PatchError::Empty) } else { Ok(files) }
}

struct Parser<'a> {
    lines: &'a [&'a str],
    at: usize,
}

impl<'a> Parser<'a> {
    /// The current line, without its end.
    fn text(&self) -> &'a str {
        self.text_at(0)
    }

    fn text_at(&self, offset: usize) -> &'a str {
        let line = self.lines.get(self.at + offset).copied().unwrap_or_default();
        let line = line.strip_suffix('\n').unwrap_or(line);
        line.strip_suffix('\r').unwrap_or(line)
    }

    fn error(&self, problem: impl Into<String>) -> PatchError {
        PatchError::Syntax { line: self.at + 1, problem: problem.into() }
    }

    /// A file of git, after `diff --git`.
    fn git_file(&mut self, names: &str) -> Result<FileDiff, PatchError> {
        let mut file = FileDiff::default();
        let (mut created, mut deleted, mut named) = (false, false, false);
        let header = self.at;
        self.at += 1;
        while self.at < self.lines.len() {
            let line = self.text();
            let after = |prefix| line.strip_prefix(prefix);
            if after("diff --git ").is_some() {
                break;
            } else if let Some(mode) = after("new file mode ") {
                created = true;
                file.mode = Some(self.mode(mode)?);
            } else if let Some(mode) = after("deleted file mode ") {
                deleted = true;
                self.mode(mode)?;
            } else if after("old mode ").is_some() || after("new mode ").is_some() {
                return Err(self.error(
                    "it changes permissions, which apply-patch cannot; remove the line, and run chmod",
                ));
            } else if let Some(name) = after("rename from ") {
                (file.old, named) = (Some(self.unquoted(name)?), true);
            } else if let Some(name) = after("rename to ") {
                (file.new, named) = (Some(self.unquoted(name)?), true);
            } else if after("copy from ").is_some() || after("copy to ").is_some() {
                return Err(self.error(
                    "it copies a file, which apply-patch cannot; make the diff without -C",
                ));
            } else if after("GIT binary patch").is_some() || after("Binary files ").is_some() {
                return Err(
                    self.error("a binary patch, which apply-patch cannot apply; copy the file")
                );
            } else if after("--- ").is_some() && self.text_at(1).starts_with("+++ ") {
                let (old, new) = self.names()?;
                if !named {
                    (file.old, file.new) = (old, new);
                }
                file.hunks = self.hunks()?;
                return Ok(file);
            } else if !["index ", "similarity index ", "dissimilarity index "]
                .iter()
                .any(|prefix| line.starts_with(prefix))
            {
                break;
            }
            self.at += 1;
        }
        if named {
            return Ok(file);
        }
        // An empty file has no hunks, and its names only here.
        let name = same_name(names).ok_or(PatchError::Syntax {
            line: header + 1,
            problem: "expected `diff --git a/PATH b/PATH`".into(),
        })?;
        let name = self.unquoted(&name)?;
        match (created, deleted) {
            (true, false) => file.new = Some(name),
            (false, true) => file.old = Some(name),
            _ => return Err(self.error("the file has neither hunks nor another change")),
        }
        Ok(file)
    }

    /// A file of `diff -u`. It is never renamed: the names may be those of two copies.
    fn plain_file(&mut self) -> Result<FileDiff, PatchError> {
        let (old, new) = self.names()?;
        let hunks = self.hunks()?;
        let whole =
            |start: fn(&DiffHunk) -> usize| matches!(&hunks[..], [hunk] if start(hunk) == 0);
        let (creates, deletes) = (whole(|hunk| hunk.old_start), whole(|hunk| hunk.new_start));
        let name = new.clone().or_else(|| old.clone());
        Ok(FileDiff {
            old: name.clone().filter(|_| old.is_some() && !creates),
            new: name.filter(|_| new.is_some() && !deletes),
            mode: None,
            hunks,
        })
    }

    /// The names after `---` and `+++`; `None` for /dev/null.
    fn names(&mut self) -> Result<(Option<String>, Option<String>), PatchError> {
        let old = self.name("--- ")?;
        self.at += 1;
        let new = self.name("+++ ")?;
        self.at += 1;
        let prefixed = |name: &Option<String>, prefix: char| {
            name.as_ref().is_none_or(|name| {
                name.strip_prefix(prefix).is_some_and(|rest| rest.starts_with('/'))
            })
        };
        let strip = [('a', 'b'), ('i', 'w'), ('c', 'i'), ('c', 'w'), ('o', 'w')]
            .iter()
            .any(|&(a, b)| prefixed(&old, a) && prefixed(&new, b));
        let stripped = |name: Option<String>| match strip {
            true => name.map(|name| name[2..].to_owned()),
            false => name,
        };
        let names = (stripped(old), stripped(new));
        match names {
            (None, None) => Err(self.error("both names are /dev/null")),
            names => Ok(names),
        }
    }

    fn name(&self, prefix: &str) -> Result<Option<String>, PatchError> {
        let name = self.text().strip_prefix(prefix).unwrap_or_default();
        // A time may follow a tab.
        let name =
            if name.starts_with('"') { name } else { name.split('\t').next().unwrap_or_default() };
        let name = self.unquoted(name)?;
        if name.is_empty() {
            return Err(self.error(format!("expected a path after `{}`", prefix.trim_end())));
        }
        Ok(Some(name).filter(|name| name != "/dev/null"))
    }

    /// A name as git writes it: in quotes, with escapes, if it has special characters.
    fn unquoted(&self, name: &str) -> Result<String, PatchError> {
        let invalid = || self.error(format!("invalid quoted path {name}"));
        let Some(inside) = name.strip_prefix('"') else { return Ok(name.to_owned()) };
        let mut bytes = inside.bytes();
        let mut out = Vec::new();
        loop {
            match bytes.next().ok_or_else(invalid)? {
                b'"' => break,
                b'\\' => match bytes.next().ok_or_else(invalid)? {
                    digit @ b'0'..=b'3' => {
                        let mut value = u32::from(digit - b'0');
                        for _ in 0..2 {
                            let digit =
                                bytes.next().filter(u8::is_ascii_digit).ok_or_else(invalid)?;
                            value = value * 8 + u32::from(digit - b'0');
                        }
                        out.push(u8::try_from(value).map_err(|_| invalid())?);
                    }
                    b'n' => out.push(b'\n'),
                    b't' => out.push(b'\t'),
                    b'r' => out.push(b'\r'),
                    b'a' => out.push(7),
                    b'b' => out.push(8),
                    b'v' => out.push(11),
                    b'f' => out.push(12),
                    other @ (b'"' | b'\\') => out.push(other),
                    _ => return Err(invalid()),
                },
                byte => out.push(byte),
            }
        }
        String::from_utf8(out).map_err(|_| self.error(format!("the path {name} is not UTF-8")))
    }

    /// The permission bits of a regular file.
    fn mode(&self, mode: &str) -> Result<u32, PatchError> {
        match u32::from_str_radix(mode.trim(), 8) {
            Ok(mode) if mode & 0o170_000 == 0o100_000 => Ok(mode & 0o777),
            _ => Err(self.error(format!("mode {mode}: apply-patch changes regular files only"))),
        }
    }

    fn hunks(&mut self) -> Result<Vec<DiffHunk>, PatchError> {
        let mut hunks = Vec::new();
        while self.text().starts_with("@@ ") {
            hunks.push(self.hunk()?);
        }
        match hunks.is_empty() {
            true => Err(self.error("expected a hunk: `@@ -LINE,COUNT +LINE,COUNT @@`")),
            false => Ok(hunks),
        }
    }

    fn hunk(&mut self) -> Result<DiffHunk, PatchError> {
        let header = || self.error("expected `@@ -LINE,COUNT +LINE,COUNT @@`");
        let mut words = self.text().split(' ').skip(1);
        let mut range = |marker: char| {
            let range = words.next()?.strip_prefix(marker)?;
            let (start, count) = range.split_once(',').unwrap_or((range, "1"));
            Some((start.parse::<usize>().ok()?, count.parse::<usize>().ok()?))
        };
        let (old_start, mut old) = range('-').ok_or_else(header)?;
        let (new_start, mut new) = range('+').ok_or_else(header)?;
        let mut hunk = DiffHunk { new_start, old_start, lines: Vec::new() };
        self.at += 1;
        while old > 0 || new > 0 {
            let Some(line) = self.lines.get(self.at).copied() else {
                return Err(self.error(TOO_SHORT));
            };
            let (marker, rest) = match line.as_bytes().first() {
                Some(b'+') => (Marker::Insert, &line[1..]),
                Some(b'-') => (Marker::Remove, &line[1..]),
                Some(b' ') => (Marker::Context, &line[1..]),
                // A context line whose space was lost.
                Some(b'\n') => (Marker::Context, line),
                Some(b'\\') if self.unended(&mut hunk) => continue,
                _ => return Err(self.error(TOO_SHORT)),
            };
            let (uses_old, uses_new) = (marker != Marker::Insert, marker != Marker::Remove);
            let too_many = || self.error("the hunk has more lines than its header says");
            old = old.checked_sub(uses_old.into()).ok_or_else(too_many)?;
            new = new.checked_sub(uses_new.into()).ok_or_else(too_many)?;
            let mut bytes = rest.as_bytes().to_vec();
            if bytes.last() != Some(&b'\n') {
                bytes.push(b'\n');
            }
            hunk.lines.push((marker, bytes));
            self.at += 1;
        }
        self.unended(&mut hunk);
        if self.lines.get(self.at).is_some_and(|line| line.starts_with(['+', ' '])) {
            return Err(self.error("the hunk has more lines than its header says"));
        }
        Ok(hunk)
    }

    /// Takes `\ No newline at end of file`, if it is here: the line before has no end.
    fn unended(&mut self, hunk: &mut DiffHunk) -> bool {
        let is_mark = self.lines.get(self.at).is_some_and(|line| line.starts_with("\\ "));
        match hunk.lines.last_mut() {
            Some((_, line)) if is_mark => {
                line.pop();
                self.at += 1;
                true
            }
            _ => false,
        }
    }
}

const TOO_SHORT: &str = "the hunk has fewer lines than its header says";

/// The name in `a/NAME b/NAME`, if both are the same.
fn same_name(names: &str) -> Option<String> {
    if let Some(inside) = names.strip_prefix('"') {
        let end = inside.find("\" ")? + 2;
        let (first, second) = (&names[..end], &names[end + 1..]);
        let rest = |name: &str| Some(format!("\"{}", name.get(3..)?));
        return (rest(first) == rest(second)).then(|| rest(first))?;
    }
    let middle = names.len() / 2;
    let (first, second) = (names.get(..middle)?, names.get(middle + 1..)?);
    let strip = |name: &str, prefix: &str| name.strip_prefix(prefix).unwrap_or(name).to_owned();
    let (first, second) = (strip(first, "a/"), strip(second, "b/"));
    (first == second && names.as_bytes().get(middle) == Some(&b' ')).then_some(first)
}

/// Returns the content with the hunks applied.
pub(super) fn update(
    path: &str,
    content: &[u8],
    hunks: &[DiffHunk],
) -> Result<Vec<u8>, PatchError> {
    let mut image: Vec<(&[u8], bool)> =
        content.split_inclusive(|&byte| byte == b'\n').map(|line| (line, false)).collect();
    for (number, hunk) in hunks.iter().enumerate() {
        let side = |skip: Marker| -> Vec<&[u8]> {
            hunk.lines
                .iter()
                .filter(|(marker, _)| *marker != skip)
                .map(|(_, line)| line.as_slice())
                .collect()
        };
        let (old, new) = (side(Marker::Insert), side(Marker::Remove));
        let Some(at) = hunk.locate(&old, &image) else {
            let wanted = old.iter().map(|line| String::from_utf8_lossy(line)).collect::<String>();
            return Err(PatchError::Mismatch {
                path: path.to_owned(),
                hunk: number + 1,
                problem: format!(
                    "its lines were not found at or near line {}",
                    hunk.old_start.max(1)
                ),
                wanted: wanted.trim_end_matches('\n').to_owned(),
            });
        };
        image.splice(at..at + old.len(), new.into_iter().map(|line| (line, true)));
    }
    Ok(image.into_iter().flat_map(|(line, _)| line).copied().collect())
}

impl DiffHunk {
    /// Where the old lines are: at the place that the header names, or else nearest to it, forward first.
    fn locate(&self, old: &[&[u8]], image: &[(&[u8], bool)]) -> Option<usize> {
        let is_context = |line: Option<&(Marker, Vec<u8>)>| {
            line.is_some_and(|(marker, _)| *marker == Marker::Context)
        };
        let without = !self.lines.iter().any(|(marker, _)| *marker == Marker::Context);
        // A diff with -U0 has nothing but its line numbers.
        let is_bare = without && self.old_start > 1;
        let at_start = self.old_start <= 1 && !is_bare;
        let at_end = !is_context(self.lines.last()) && !is_bare;
        let last = image.len().checked_sub(old.len())?;
        let fits = |at: usize| {
            (!at_start || at == 0)
                && (!at_end || at == last)
                && at <= last
                && image[at..at + old.len()]
                    .iter()
                    .zip(old)
                    .all(|((line, patched), wanted)| !patched && line == wanted)
        };
        let stated = match (at_start, at_end) {
            (true, _) => 0,
            (false, true) => last,
            // Lines that earlier hunks inserted or removed are counted in the new numbers.
            (false, false) => {
                self.new_start.saturating_sub(usize::from(self.new_start > 0)).min(last)
            }
        };
        if is_bare {
            let stated = if old.is_empty() { self.new_start - 1 } else { stated };
            return fits(stated).then_some(stated);
        }
        (0..=image.len())
            .flat_map(|by| [stated.checked_add(by), stated.checked_sub(by)])
            .flatten()
            .find(|&at| fits(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn apply(content: &str, diff: &str) -> Result<String, PatchError> {
        let files = parse(diff)?;
        update("f", content.as_bytes(), &files[0].hunks)
            .map(|bytes| String::from_utf8(bytes).unwrap())
    }

    #[test]
    fn hunks_apply_at_their_line_or_nearest_to_it() {
        let diff = "--- f\n+++ f\n@@ -2,3 +2,3 @@\n a\n-x\n+y\n a\n";
        assert_eq!(apply("0\na\nx\na\nx\na\n", diff).unwrap(), "0\na\ny\na\nx\na\n");
        assert_eq!(apply("0\n1\n2\na\nx\na\nz\n", diff).unwrap(), "0\n1\n2\na\ny\na\nz\n");
        assert!(apply("0\na\nx \na\n", diff).is_err(), "white space counts");
    }

    #[test]
    fn the_end_of_the_last_line_is_exact() {
        let diff = "--- f\n+++ f\n@@ -1,2 +1,2 @@\n a\n-b\n\\ No newline at end of file\n+b\n";
        assert_eq!(apply("a\nb", diff).unwrap(), "a\nb\n");
        assert!(apply("a\nb\n", diff).is_err());
    }

    #[test]
    fn names_of_git_and_of_diff_are_told_apart() {
        let files = parse(
            "From: x\n\nmessage\n---\n f | 2 +-\ndiff --git a/old name b/new\nsimilarity index 90%\n\
             rename from old name\nrename to new\n--- a/old name\n+++ b/new\n@@ -1 +1 @@\n-a\n+b\n\
             diff --git \"a/n\\303\\244\" \"b/n\\303\\244\"\nnew file mode 100755\nindex 0..e\n\
             diff --git a/e b/e\ndeleted file mode 100644\nindex e..0\n\n\
             --- f.orig\t2026-01-01\n+++ f\t2026-01-02\n@@ -1 +1 @@\n-a\n+b\n-- \n2.39\n",
        )
        .unwrap();
        let names: Vec<_> = files
            .iter()
            .map(|file| (file.old.as_deref(), file.new.as_deref(), file.mode))
            .collect();
        assert_eq!(
            names,
            [
                (Some("old name"), Some("new"), None),
                (None, Some("nä"), Some(0o755)),
                (Some("e"), None, None),
                (Some("f"), Some("f"), None),
            ]
        );
    }

    #[test]
    fn what_cannot_be_applied_is_an_error() {
        for bad in [
            "diff --git a/f b/f\nold mode 100644\nnew mode 100755\n",
            "diff --git a/f b/f\nGIT binary patch\n",
            "diff --git a/f b/f\nnew file mode 120000\n--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+x\n",
            "diff --git a/f b/g\ncopy from f\ncopy to g\n",
            "--- f\n+++ f\n@@ -1,2 +1 @@\n-a\n",
            "--- f\n+++ f\n@@ -1 +1 @@\n-a\n+b\n+c\n",
            "--- f\n+++ f\nnothing\n",
            "--- /dev/null\n+++ /dev/null\n@@ -1 +1 @@\n-a\n+b\n",
        ] {
            parse(bad).unwrap_err();
        }
    }
}
