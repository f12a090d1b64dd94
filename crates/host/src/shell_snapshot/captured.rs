//! Parses what the capture script printed.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use super::script::full_mark;
use super::words::{self, Line};
use super::{ShellKind, SnapshotError};
use crate::process::Environment;

/// The state of a shell, as bytes: nothing in a shell has to be UTF-8.
#[derive(Default, PartialEq, Eq)]
pub struct CapturedState {
    pub(super) umask: Vec<u8>,
    /// Options of `set -o`.
    pub(super) options: Vec<(Vec<u8>, bool)>,
    /// Options of bash's `shopt`.
    pub(super) shell_options: Vec<(Vec<u8>, bool)>,
    pub(super) aliases: Vec<Alias>,
    pub(super) functions: Vec<u8>,
    /// The names of the functions, as far as the shell lists them.
    pub(super) function_names: Vec<Vec<u8>>,
    /// Functions that are exported, and are not to be.
    pub(super) unexported: Vec<Vec<u8>>,
    /// Flags such as `-fx`, and the name of the function that has them.
    pub(super) attributes: Vec<(Vec<u8>, Vec<u8>)>,
    pub(super) fpath: Vec<Vec<u8>>,
    pub(super) variables: Environment,
}

/// Counts only: the state of a shell may hold secrets.
impl std::fmt::Debug for CapturedState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CapturedState")
            .field("aliases", &self.aliases.len())
            .field("functions", &self.functions.len())
            .field("variables", &self.variables.len())
            .finish_non_exhaustive()
    }
}

/// An alias.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Alias {
    pub(super) scope: AliasScope,
    pub(super) name: Vec<u8>,
    pub(super) value: Vec<u8>,
}

/// Where an alias is expanded; other shells than zsh have only the first kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AliasScope {
    Command,
    Global,
    Suffix,
}

impl CapturedState {
    /// Parses the shell's whole stdout. Before and after the marks is what the profile printed.
    pub fn parse(kind: ShellKind, mark: &str, output: &[u8]) -> Result<Self, SnapshotError> {
        let mark = &full_mark(mark)[..];
        let start = ["\0", mark, "\0"].concat();
        let end = ["end\0", mark, "\0"].concat();
        let begin = find(output, start.as_bytes()).ok_or(SnapshotError::Incomplete)? + start.len();
        let body = &output[begin..];
        let length = find(body, end.as_bytes()).ok_or(SnapshotError::Incomplete)?;
        // A field ends with a NUL, so the end is a field of its own.
        let mut fields = match body[..length].split_last() {
            None => return Err(SnapshotError::Incomplete),
            Some((0, fields)) => fields.split(|&byte| byte == 0),
            Some(_) => return Err(SnapshotError::Incomplete),
        };
        let mut state = Self::default();
        while let Some(tag) = fields.next() {
            let mut field = || fields.next().map(<[u8]>::to_vec).ok_or(SnapshotError::Incomplete);
            match tag {
                b"umask" => state.umask = field()?.trim_ascii().to_vec(),
                b"set" => state.options = listed_options(&field()?),
                b"shopt" => state.shell_options = listed_options(&field()?),
                b"alias" => state.alias(AliasScope::Command, field()?, field()?),
                b"galias" => state.alias(AliasScope::Global, field()?, field()?),
                b"salias" => state.alias(AliasScope::Suffix, field()?, field()?),
                b"aliases" => state.listed_aliases(&field()?)?,
                b"functions" => state.functions = field()?,
                b"function" => state.function_names.push(field()?),
                b"attributes" => {
                    let listed = listed_functions(&field()?);
                    state.function_names.extend(listed.iter().map(|(_, name)| name.clone()));
                    // Those with no more than `-f` say nothing.
                    state.attributes =
                        listed.into_iter().filter(|(flags, _)| flags != b"-f").collect();
                }
                b"fpath" => state.fpath.push(field()?),
                b"variable" => {
                    let (name, value) = (field()?, field()?);
                    state.variables.insert(OsString::from_vec(name), OsString::from_vec(value));
                }
                b"exports" => state.listed_exports(&field()?)?,
                _ => return Err(SnapshotError::Incomplete),
            }
        }
        let complete = !state.umask.is_empty() && !state.options.is_empty();
        let complete = complete && (kind != ShellKind::Bash || !state.shell_options.is_empty());
        if complete { Ok(state) } else { Err(SnapshotError::Incomplete) }
    }

    fn alias(&mut self, scope: AliasScope, name: Vec<u8>, value: Vec<u8>) {
        self.aliases.push(Alias { scope, name, value });
    }

    /// Lines such as `ll='ls -l'`, with or without `alias` before them.
    fn listed_aliases(&mut self, text: &[u8]) -> Result<(), SnapshotError> {
        for line in words::lines(text).ok_or(SnapshotError::Unsupported("aliases"))? {
            let Some((name, value)) = line.assignment() else { continue };
            self.alias(AliasScope::Command, name, value);
        }
        Ok(())
    }

    /// Lines such as `export A='b'`; a line without a value exports a variable that is not set.
    fn listed_exports(&mut self, text: &[u8]) -> Result<(), SnapshotError> {
        for line in words::lines(text).ok_or(SnapshotError::Unsupported("variables"))? {
            let Some((name, value)) = line.assignment() else { continue };
            self.variables.insert(OsString::from_vec(name), OsString::from_vec(value));
        }
        Ok(())
    }
}

/// Lines such as `set -o errexit`, `set +o errexit`, `shopt -s extglob`, `shopt -u extglob`.
fn listed_options(text: &[u8]) -> Vec<(Vec<u8>, bool)> {
    let option = |line: &[u8]| {
        let mut words = line.split(|&byte| byte == b' ').skip(1);
        let on = matches!(words.next()?, b"-o" | b"-s");
        let name = words.next()?;
        let is_name = |byte: &u8| byte.is_ascii_alphanumeric() || b"_-".contains(byte);
        (!name.is_empty() && name.iter().all(is_name)).then(|| (name.to_vec(), on))
    };
    text.split(|&byte| byte == b'\n').filter_map(option).collect()
}

/// Lines such as `declare -fx name`.
fn listed_functions(text: &[u8]) -> Vec<(Vec<u8>, Vec<u8>)> {
    let function = |line: &[u8]| {
        let mut words = line.splitn(3, |&byte| byte == b' ').skip(1);
        let (flags, name) = (words.next()?, words.next()?);
        let letters = flags.strip_prefix(b"-f")?.iter().all(u8::is_ascii_alphabetic);
        letters.then(|| (flags.to_vec(), name.to_vec()))
    };
    text.split(|&byte| byte == b'\n').filter_map(function).collect()
}

fn find(text: &[u8], part: &[u8]) -> Option<usize> {
    text.windows(part.len()).position(|window| window == part)
}

impl Line {
    /// The name and value in the last word.
    fn assignment(self) -> Option<(Vec<u8>, Vec<u8>)> {
        let word = self.0.into_iter().next_back()?;
        let equals = word.iter().position(|&byte| byte == b'=').filter(|&at| at > 0)?;
        Some((word[..equals].to_vec(), word[equals + 1..].to_vec()))
    }
}
