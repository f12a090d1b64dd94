//! Parses and matches git-style patterns, without a file system.
//!
//! Invariant: matching proceeds by component with a set of positions, so its cost is bounded by the
//! number of names times the pattern length (no backtracking across components).

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

/// A parsed pattern.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Glob {
    parts: Vec<Part>,
    /// The pattern begins at the root, not at the working directory.
    pub absolute: bool,
    /// The pattern ended with a slash.
    pub directories_only: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    /// `**`: any number of directories.
    AnyDepth,
    /// A name without wildcards.
    Literal(Vec<u8>),
    /// A name with wildcards.
    Wild(Vec<Token>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Token {
    Byte(u8),
    Any,
    AnyRun,
    Class { negated: bool, ranges: Vec<(u8, u8)> },
}

/// Why a pattern cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum GlobError {
    /// The pattern is empty.
    #[error("the pattern is empty")]
    Empty,
    /// `!pattern` would make an exception, which a denial cannot.
    #[error("a pattern that denies cannot be negated")]
    Negated,
    /// `[` without `]`.
    #[error("a character class is not closed")]
    OpenClass,
    /// `[:name:]` with a name that POSIX does not define.
    #[error(
        "a character class has an unknown name; `[:alpha:]`, `[:digit:]` and the like are known"
    )]
    UnknownClass,
    /// Git ignores a trailing space, other tools include it in the name.
    #[error("the pattern ends with a blank; write `\\ ` for a name that does")]
    TrailingBlank,
    /// `..` would leave the base directory.
    #[error("`..` is not allowed in a pattern")]
    Parent,
    /// Alternatives, which git's patterns lack: taken literally, they would deny nothing.
    #[error("`{{` is not allowed in a pattern; write one pattern for each alternative, or `\\{{`")]
    Braces,
    /// A URI, which as a path would deny nothing.
    #[error("it is a URI; write a path, such as `/home/user/**/*.key`")]
    Uri,
    /// No file name contains NUL.
    #[error("the pattern contains a NUL byte")]
    Nul,
}

/// A position in a pattern; [`Glob::START`] is at the base directory.
pub type Position = usize;

impl Glob {
    /// The position before the first component.
    pub const START: Position = 0;

    /// Parses a pattern as in `.gitignore`.
    pub fn parse(pattern: &str) -> Result<Self, GlobError> {
        if pattern.contains('\0') {
            return Err(GlobError::Nul);
        }
        if is_uri(pattern) {
            return Err(GlobError::Uri);
        }
        if pattern.starts_with('!') {
            return Err(GlobError::Negated);
        }
        let escapes = |text: &str| text.bytes().rev().take_while(|&byte| byte == b'\\').count();
        if pattern.strip_suffix(' ').is_some_and(|before| escapes(before) % 2 == 0) {
            return Err(GlobError::TrailingBlank);
        }
        let absolute = pattern.starts_with('/');
        let directories_only = pattern.ends_with('/');
        let names: Vec<&str> =
            pattern.split('/').filter(|name| !name.is_empty() && *name != ".").collect();
        if names.is_empty() {
            return Err(GlobError::Empty);
        }
        let mut parts = Vec::with_capacity(names.len() + 1);
        // A pattern without a slash matches at any depth.
        let anywhere = !pattern.trim_end_matches('/').contains('/');
        if anywhere && names[0] != "**" {
            parts.push(Part::AnyDepth);
        }
        for name in &names {
            let part = parse_name(name.as_bytes())?;
            // `**/**` equals `**`, and would only double the positions.
            if part != Part::AnyDepth || parts.last() != Some(&Part::AnyDepth) {
                parts.push(part);
            }
        }
        if parts.last() == Some(&Part::AnyDepth) {
            parts.push(Part::Wild(vec![Token::AnyRun]));
        }
        Ok(Self { parts, absolute, directories_only })
    }

    /// Advances from `position` over one name: pushes the next positions on `next`; true if the pattern
    /// matches here. The positions must be closed (see [`Glob::close`]).
    pub fn step(&self, position: Position, name: &OsStr, next: &mut Vec<Position>) -> bool {
        let name = name.as_bytes();
        let matched = match &self.parts[position] {
            Part::AnyDepth => {
                self.close(position, next);
                return false;
            }
            Part::Literal(literal) => literal == name,
            Part::Wild(tokens) => wild(tokens, name),
        };
        if matched {
            if position + 1 == self.parts.len() {
                return true;
            }
            self.close(position + 1, next);
        }
        false
    }

    /// Pushes `position` and, before a `**`, also the position after it.
    pub fn close(&self, position: Position, next: &mut Vec<Position>) {
        if !next.contains(&position) {
            next.push(position);
        }
        if self.parts[position] == Part::AnyDepth && !next.contains(&(position + 1)) {
            next.push(position + 1);
        }
    }

    /// The only name that can match at this position, if there is one.
    pub fn literal(&self, position: Position) -> Option<&OsStr> {
        match &self.parts[position] {
            Part::Literal(name) => Some(OsStr::from_bytes(name)),
            _ => None,
        }
    }

    /// Whether the pattern matches this path relative to the base.
    pub fn matches<'n>(&self, names: impl IntoIterator<Item = &'n OsStr>) -> bool {
        let mut positions = Vec::new();
        self.close(Self::START, &mut positions);
        let mut matched = false;
        for name in names {
            let mut next = Vec::new();
            matched = false;
            for &position in &positions {
                matched |= self.step(position, name, &mut next);
            }
            positions = next;
        }
        matched
    }
}

/// Whether it begins like a URI: a scheme and `://`, or `file:/`.
fn is_uri(pattern: &str) -> bool {
    let Some((scheme, rest)) = pattern.split_once(':') else { return false };
    let is_scheme = scheme.starts_with(|first: char| first.is_ascii_alphabetic())
        && scheme.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.'));
    is_scheme
        && (rest.starts_with("//") || rest.starts_with('/') && scheme.eq_ignore_ascii_case("file"))
}

fn parse_name(name: &[u8]) -> Result<Part, GlobError> {
    if name == b".." {
        return Err(GlobError::Parent);
    }
    if name == b"**" {
        return Ok(Part::AnyDepth);
    }
    let mut tokens = Vec::with_capacity(name.len());
    let mut at = 0;
    while at < name.len() {
        match name[at] {
            b'\\' if at + 1 < name.len() => {
                at += 1;
                tokens.push(Token::Byte(name[at]));
            }
            b'{' => return Err(GlobError::Braces),
            b'?' => tokens.push(Token::Any),
            b'*' if tokens.last() == Some(&Token::AnyRun) => {}
            b'*' => tokens.push(Token::AnyRun),
            b'[' => {
                let (class, after) = parse_class(name, at + 1)?;
                tokens.push(class);
                at = after;
                continue;
            }
            byte => tokens.push(Token::Byte(byte)),
        }
        at += 1;
    }
    let literal: Option<Vec<u8>> = tokens
        .iter()
        .map(|token| match token {
            Token::Byte(byte) => Some(*byte),
            _ => None,
        })
        .collect();
    Ok(match literal {
        Some(literal) => Part::Literal(literal),
        None => Part::Wild(tokens),
    })
}

fn parse_class(name: &[u8], mut at: usize) -> Result<(Token, usize), GlobError> {
    let negated = matches!(name.get(at), Some(b'!' | b'^'));
    at += usize::from(negated);
    let start = at;
    let mut ranges = Vec::new();
    loop {
        let mut low = *name.get(at).ok_or(GlobError::OpenClass)?;
        if low == b']' && at > start {
            return Ok((Token::Class { negated, ranges }, at + 1));
        }
        if let Some((named, after)) = parse_named_class(name, at)? {
            ranges.extend_from_slice(named);
            at = after;
            continue;
        }
        if low == b'\\' {
            at += 1;
            low = *name.get(at).ok_or(GlobError::OpenClass)?;
        }
        at += 1;
        if name.get(at) == Some(&b'-') && name.get(at + 1).is_some_and(|&b| b != b']') {
            ranges.push((low, name[at + 1]));
            at += 2;
        } else {
            ranges.push((low, low));
        }
    }
}

/// Byte ranges of a class.
type Ranges = &'static [(u8, u8)];

/// Parses `[:name:]` at this position of a class: its ranges and the position after it.
fn parse_named_class(pattern: &[u8], at: usize) -> Result<Option<(Ranges, usize)>, GlobError> {
    let Some(rest) = pattern[at..].strip_prefix(b"[:") else { return Ok(None) };
    let end = rest.iter().position(|&byte| byte == b']').ok_or(GlobError::OpenClass)?;
    // Otherwise the bracket is literal.
    let Some(name) = rest[..end].strip_suffix(b":") else { return Ok(None) };
    let ranges: Ranges = match name {
        b"alnum" => &[(b'0', b'9'), (b'A', b'Z'), (b'a', b'z')],
        b"alpha" => &[(b'A', b'Z'), (b'a', b'z')],
        b"blank" => &[(b' ', b' '), (b'\t', b'\t')],
        b"cntrl" => &[(0, 31), (127, 127)],
        b"digit" => &[(b'0', b'9')],
        b"graph" => &[(b'!', b'~')],
        b"lower" => &[(b'a', b'z')],
        b"print" => &[(b' ', b'~')],
        b"punct" => &[(b'!', b'/'), (b':', b'@'), (b'[', b'`'), (b'{', b'~')],
        b"space" => &[(b'\t', b'\r'), (b' ', b' ')],
        b"upper" => &[(b'A', b'Z')],
        b"xdigit" => &[(b'0', b'9'), (b'A', b'F'), (b'a', b'f')],
        _ => return Err(GlobError::UnknownClass),
    };
    Ok(Some((ranges, at + 2 + end + 1)))
}

/// Matches one name, backtracking only to the last `*`.
fn wild(tokens: &[Token], name: &[u8]) -> bool {
    let (mut t, mut n) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        let matched = match tokens.get(t) {
            Some(Token::AnyRun) => {
                star = Some((t, n));
                t += 1;
                continue;
            }
            Some(Token::Any) => true,
            Some(Token::Byte(byte)) => *byte == name[n],
            Some(Token::Class { negated, ranges }) => {
                ranges.iter().any(|(low, high)| (*low..=*high).contains(&name[n])) != *negated
            }
            None => false,
        };
        if matched {
            t += 1;
            n += 1;
        } else if let Some((star_t, star_n)) = star {
            star = Some((star_t, star_n + 1));
            t = star_t + 1;
            n = star_n + 1;
        } else {
            return false;
        }
    }
    tokens[t..].iter().all(|token| *token == Token::AnyRun)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn matches(pattern: &str, path: &str) -> bool {
        Glob::parse(pattern).unwrap().matches(Path::new(path).iter())
    }

    #[test]
    fn patterns_match_like_git() {
        for (pattern, yes, no) in [
            (".env", &[".env", "a/.env", "a/b/.env"][..], &["env", ".env/x", "a.env"][..]),
            ("**/.env", &[".env", "a/.env", "a/b/.env"], &["a/.envx"]),
            ("a/*.key", &["a/x.key", "a/.key"], &["x.key", "a/b/x.key", "b/a/x.key"]),
            ("a/**/z", &["a/z", "a/b/z", "a/b/c/z"], &["z", "a/b", "b/a/z"]),
            ("secrets/**", &["secrets/x", "secrets/a/b"], &["secrets", "x/secrets/y"]),
            ("*.p[e-g]m", &["x.pem", "a/y.pgm"], &["x.pam", "pem"]),
            ("[!a]?", &["bc", "x/zz"], &["ab", "b"]),
            ("a*b*c", &["abc", "aXbYc", "aabbcc"], &["ab", "acb"]),
            ("\\*", &["*"], &["x"]),
            ("*", &["x", "a/b"], &[]),
            ("**", &["x", "a/b/c"], &[]),
            ("build/", &["build", "a/build"], &["builds"]),
            ("key[[:digit:]].pem", &["key1.pem", "a/key9.pem"], &["key.pem", "keyd.pem"]),
            ("[![:alpha:]_-]x", &["1x", ".x"], &["ax", "_x", "-x", "x"]),
            ("[[:upper:]a-c[:space:]]", &["Q", "b", " "], &["d", "[", ":"]),
            ("[[:x]", &["[", ":", "x"], &["y", "]"]),
            ("end\\ ", &["end "], &["end"]),
        ] {
            for path in yes {
                assert!(matches(pattern, path), "{pattern} should match {path}");
            }
            for path in no {
                assert!(!matches(pattern, path), "{pattern} should not match {path}");
            }
        }
    }

    #[test]
    fn meaningless_patterns_are_refused() {
        for (pattern, error) in [
            ("", GlobError::Empty),
            ("/", GlobError::Empty),
            ("./.", GlobError::Empty),
            ("!x", GlobError::Negated),
            ("a/[b", GlobError::OpenClass),
            ("../x", GlobError::Parent),
            ("a\0b", GlobError::Nul),
            ("file:///a/*.key", GlobError::Uri),
            ("FILE:/a/*.key", GlobError::Uri),
            ("vscode-remote://a/**", GlobError::Uri),
            ("a[[:word:]]", GlobError::UnknownClass),
            ("a[[:digit:]", GlobError::OpenClass),
            ("a ", GlobError::TrailingBlank),
            ("a\\\\ ", GlobError::TrailingBlank),
        ] {
            assert_eq!(Glob::parse(pattern), Err(error), "{pattern:?}");
        }
    }

    #[test]
    fn hostile_patterns_stay_cheap() {
        let pattern = format!("{}b", "a*".repeat(400));
        let name = "a".repeat(255);
        assert!(!matches(&pattern, &name));
        let pattern = format!("{}x", "**/a/".repeat(60));
        assert!(!matches(&pattern, &"a/".repeat(200)));
    }
}
