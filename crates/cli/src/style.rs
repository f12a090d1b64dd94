//! Text for terminals: colours (unless `NO_COLOR` is set), quoting and escaping.

use std::io::IsTerminal;

/// Colours, if the output is a terminal.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Style {
    on: bool,
}

impl Style {
    /// The style for stdout.
    pub(crate) fn stdout() -> Self {
        Self { on: std::io::stdout().is_terminal() && colour_wanted() }
    }

    /// Whether text is coloured.
    pub(crate) fn is_on(self) -> bool {
        self.on
    }

    pub(crate) fn bold(self, text: &str) -> String {
        self.wrap("1", text)
    }

    pub(crate) fn dim(self, text: &str) -> String {
        self.wrap("2", text)
    }

    pub(crate) fn red(self, text: &str) -> String {
        self.wrap("1;31", text)
    }

    pub(crate) fn green(self, text: &str) -> String {
        self.wrap("32", text)
    }

    pub(crate) fn blue(self, text: &str) -> String {
        self.wrap("1;34", text)
    }

    pub(crate) fn magenta(self, text: &str) -> String {
        self.wrap("35", text)
    }

    fn wrap(self, code: &str, text: &str) -> String {
        if self.on && !text.is_empty() {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }
}

fn colour_wanted() -> bool {
    let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    !set("NO_COLOR") && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Quotes a word for a shell.
pub(crate) fn quoted(word: &str) -> String {
    match shlex::try_quote(word) {
        Ok(quoted) => quoted.into_owned(),
        Err(_) => word.to_owned(),
    }
}

/// Whether the character controls a terminal, or changes where and whether others are shown: control
/// characters, bidirectional controls, line separators, and characters of no width that only hide text.
pub(crate) fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200b}' | '\u{200e}' | '\u{200f}' | '\u{feff}')
        || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}')
        || matches!(c, '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// The filter for one line of text from another machine, so that it cannot control the terminal.
pub(crate) fn printable(text: &str) -> String {
    if !text.chars().any(is_unsafe) {
        return text.to_owned();
    }
    text.chars().map(|c| if is_unsafe(c) { '\u{fffd}' } else { c }).collect()
}

/// The same for several lines: line ends and tabs stay.
pub(crate) fn printable_lines(text: &str) -> String {
    let stays = |c: char| matches!(c, '\n' | '\t') || !is_unsafe(c);
    text.chars().map(|c| if stays(c) { c } else { '\u{fffd}' }).collect()
}

/// A name for a terminal: bytes that are not UTF-8 as `\xNN`.
pub(crate) fn escaped(name: &[u8]) -> String {
    let mut out = String::new();
    for chunk in name.utf8_chunks() {
        out.push_str(&printable(chunk.valid()));
        chunk.invalid().iter().for_each(|byte| out.push_str(&format!("\\x{byte:02x}")));
    }
    out
}

/// A name for stdout: unchanged for a program, escaped for a terminal.
pub(crate) fn name_for_stdout(name: &[u8]) -> Vec<u8> {
    match std::io::stdout().is_terminal() {
        true => escaped(name).into_bytes(),
        false => name.to_vec(),
    }
}

/// A table with headings and aligned columns. The last column is not padded.
pub(crate) fn table(rows: &[Vec<String>], heading: impl Fn(&str) -> String) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max()
    };
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let mut out = String::new();
    for (at, row) in rows.iter().enumerate() {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            line.push_str(cell);
            if column + 1 < row.len() {
                let pad = widths[column] - cell.chars().count() + 2;
                line.extend(std::iter::repeat_n(' ', pad));
            }
        }
        let line = line.trim_end();
        out.push_str(&if at == 0 { heading(line) } else { line.to_owned() });
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let rows = [vec!["A", "BB"], vec!["long", "x"]];
        let rows: Vec<Vec<String>> =
            rows.into_iter().map(|row| row.into_iter().map(str::to_owned).collect()).collect();
        assert_eq!(table(&rows, str::to_owned), "A     BB\nlong  x\n");
    }

    #[test]
    fn names_cannot_control_the_terminal() {
        assert_eq!(printable("a\x1b[2Jb"), "a\u{fffd}[2Jb");
        assert_eq!(printable("a\nb\u{9b}"), "a\u{fffd}b\u{fffd}");
        assert_eq!(printable("gpj.\u{202e}exe"), "gpj.\u{fffd}exe");
        assert_eq!(printable_lines("a\r\n\tb\u{7f}"), "a\u{fffd}\n\tb\u{fffd}");
        let kept = "é ⭐ 👩\u{200d}🚀 می\u{200c}شود";
        assert_eq!(printable(kept), kept, "joiners are part of words");
    }
}
