//! `codex search`: prints matching lines of files on the server.

use std::ffi::{OsStr, OsString};
use std::io::{IsTerminal, Write};
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;

use anyhow::bail;
use clap::Args;
use codex_exec_server::{
    FsSearchFile, FsSearchLineKind, FsSearchParams, FsSearchResponse, PathUri,
};

use crate::exit::{self, print_stderr};
use crate::on::{ConnectOptions, OnArgs, block_on};
use crate::remote_path::{self, strip_colon};
use crate::style::{Style, name_for_stdout, printable, quoted};

/// Search files on the server
///
/// Prints the lines that match a regular expression, in a directory and its subdirectories. Skips hidden
/// and binary files and what .gitignore excludes.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codex search 'fn main' --on ws://127.0.0.1:4500
  codex search -i -g '*.rs' -C 2 'unwrap\\(\\)' src
  codex search -l panic | xargs -d '\\n' codex cat      names only
  codex search -F 'a.b[0]' . | cut -d: -f2             a pipe gets PATH:LINE:TEXT

Exit codes: 0 a line matches; 1 no line matches; 2 failure, or no line matches and some files could
  not be read.")]
pub(crate) struct SearchArgs {
    #[command(flatten)]
    on: OnArgs,

    /// Ignore case
    #[arg(short, long)]
    ignore_case: bool,

    /// Treat the pattern as plain text
    #[arg(short = 'F', long)]
    fixed_strings: bool,

    /// Match whole words
    #[arg(short, long)]
    word: bool,

    /// Search only files that match; a leading ! excludes them; can be repeated
    #[arg(short, long, value_name = "GLOB")]
    glob: Vec<String>,

    /// Print only the names of files with a match
    #[arg(short = 'l', long, conflicts_with = "context")]
    files_with_matches: bool,

    /// Show this many lines around each match
    #[arg(short = 'C', long, value_name = "N", default_value_t = 0)]
    context: u32,

    /// Search hidden files too
    #[arg(long)]
    hidden: bool,

    /// Search files that .gitignore excludes too
    #[arg(long)]
    no_ignore: bool,

    /// Stop after this many matching lines
    #[arg(short, long, value_name = "N", default_value_t = 10_000)]
    max: u32,

    /// The regular expression to search for
    pattern: String,

    /// The directory or file to search
    #[arg(default_value = ".")]
    path: OsString,
}

pub(crate) fn run(args: &SearchArgs) -> anyhow::Result<ExitCode> {
    block_on(args.search()).map_err(exit::with_code(2))
}

impl SearchArgs {
    async fn search(&self) -> anyhow::Result<ExitCode> {
        let connected = self.on.connect(ConnectOptions::default()).await?;
        if !connected.client.capabilities().fs_search {
            bail!(
                "this server cannot search; run a command instead: codex run{} -- grep -rn {} {}",
                self.on.flag(),
                quoted(&self.pattern),
                quoted(&strip_colon(&self.path).to_string_lossy())
            );
        }
        let root = remote_path::resolve(&connected, strip_colon(&self.path))?;
        let found = connected.client.fs_search(self.params(root.clone())).await?;
        let mut out =
            Printer { root: &root, written: strip_colon(&self.path), style: Style::stdout() };
        let printed = match self.files_with_matches {
            true => out.print_names(&found),
            false => out.print(&found),
        };
        connected.close().await;
        printed?;
        for error in &found.errors {
            print_stderr(format_args!(
                "{}: {}",
                remote_path::display(&error.path),
                printable(&error.message)
            ));
        }
        if found.truncated {
            print_stderr(format_args!(
                "stopped after {} matching lines; raise --max, or narrow the search",
                found.matches
            ));
        }
        Ok(match (found.matches, found.errors.is_empty()) {
            (1.., _) => ExitCode::SUCCESS,
            (0, true) => ExitCode::from(1),
            // The unreadable files may match.
            (0, false) => ExitCode::from(2),
        })
    }

    fn params(&self, root: PathUri) -> FsSearchParams {
        let mut params = FsSearchParams::new(root, &self.pattern);
        params.literal = self.fixed_strings;
        params.case_insensitive = self.ignore_case;
        params.word = self.word;
        params.hidden = self.hidden;
        params.respect_gitignore = !self.no_ignore;
        params.before_context = self.context;
        params.after_context = self.context;
        params.max_matches = Some(self.max);
        params.max_matches_per_file = self.files_with_matches.then_some(1);
        for glob in &self.glob {
            match glob.strip_prefix('!') {
                Some(glob) => params.exclude.push(glob.to_owned()),
                None => params.include.push(glob.clone()),
            }
        }
        params
    }
}

struct Printer<'a> {
    root: &'a PathUri,
    written: &'a OsStr,
    style: Style,
}

impl Printer<'_> {
    fn print(&mut self, found: &FsSearchResponse) -> std::io::Result<()> {
        let mut out = std::io::BufWriter::new(std::io::stdout().lock());
        let headings = std::io::stdout().is_terminal();
        for (at, file) in found.files.iter().enumerate() {
            if headings && at > 0 {
                writeln!(out)?;
            }
            self.file(&mut out, file, headings)?;
        }
        out.flush()
    }

    fn print_names(&self, found: &FsSearchResponse) -> std::io::Result<()> {
        let mut out = std::io::BufWriter::new(std::io::stdout().lock());
        for file in &found.files {
            out.write_all(&self.name(&file.path))?;
            writeln!(out)?;
        }
        out.flush()
    }

    fn file(
        &self,
        out: &mut impl Write,
        file: &FsSearchFile,
        heading: bool,
    ) -> std::io::Result<()> {
        let name = self.name(&file.path);
        if heading {
            // Escaped for a terminal, so it is valid UTF-8.
            writeln!(out, "{}", self.style.magenta(&String::from_utf8_lossy(&name)))?;
        }
        let mut last = None;
        for line in &file.lines {
            if last.is_some_and(|last| line.line_number > last + 1) && self.has_context(file) {
                writeln!(out, "--")?;
            }
            last = Some(line.line_number);
            let (mark, number) = match line.kind {
                FsSearchLineKind::Match => (':', self.style.green(&line.line_number.to_string())),
                FsSearchLineKind::Context => ('-', line.line_number.to_string()),
            };
            let ranges = line.ranges.iter().map(|range| (range.start, range.end));
            let text = self.text(&line.text, ranges);
            let cut = if line.text_truncated { "…" } else { "" };
            if heading {
                writeln!(out, "{number}{mark}{text}{cut}")?;
            } else {
                out.write_all(&name)?;
                writeln!(out, "{mark}{number}{mark}{text}{cut}")?;
            }
        }
        Ok(())
    }

    fn has_context(&self, file: &FsSearchFile) -> bool {
        file.lines.iter().any(|line| line.kind == FsSearchLineKind::Context)
    }

    /// The path of a file, beginning as the user wrote the search path.
    fn name(&self, path: &PathUri) -> Vec<u8> {
        let (root, written) = (self.root.as_bytes(), self.written.as_bytes());
        let tail =
            path.as_bytes().strip_prefix(root).map(|tail| tail.strip_prefix(b"/").unwrap_or(tail));
        let name = match (tail, written) {
            (None, _) => path.as_bytes().to_vec(),
            (Some(b""), _) => written.to_vec(),
            (Some(tail), b"." | b"./") => tail.to_vec(),
            (Some(tail), _) => {
                let slashes = written.iter().rev().take_while(|&&byte| byte == b'/').count();
                [&written[..written.len() - slashes], b"/", tail].concat()
            }
        };
        name_for_stdout(&name)
    }

    /// The text of a line: with matches marked and control characters removed for a terminal, unchanged
    /// for a program.
    fn text(&self, text: &str, ranges: impl Iterator<Item = (u64, u64)>) -> String {
        if !self.style.is_on() {
            return if std::io::stdout().is_terminal() { sanitize(text) } else { text.to_owned() };
        }
        let mut out = String::new();
        let mut at = 0;
        for (start, end) in ranges {
            let (Ok(start), Ok(end)) = (usize::try_from(start), usize::try_from(end)) else {
                break;
            };
            let (Some(before), Some(hit)) = (text.get(at..start), text.get(start..end)) else {
                break;
            };
            out.push_str(&sanitize(before));
            out.push_str(&self.style.red(&sanitize(hit)));
            at = end;
        }
        out.push_str(&sanitize(text.get(at..).unwrap_or_default()));
        out
    }
}

fn sanitize(text: &str) -> String {
    text.split('\t').map(printable).collect::<Vec<_>>().join("\t")
}
