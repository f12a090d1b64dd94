//! Paths on the server, as users write them.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Context, bail};
use codex_exec_server::{ExecServerClient, PathUri};

use crate::on::Connected;

/// Resolves a path as written: absolute, below `~`, or relative to the working directory of the place, or else
/// of the server.
pub(crate) fn resolve(
    connected: &Connected,
    written: impl AsRef<OsStr>,
) -> anyhow::Result<PathUri> {
    let written = written.as_ref();
    match &connected.cwd {
        Some(cwd) if is_relative(written) => {
            let cwd = resolve_on(&connected.client, OsStr::new(cwd))
                .with_context(|| format!("invalid cwd `{cwd}` of the place"))?;
            let bad = || format!("invalid path `{}`", written.display());
            cwd.join(written.as_bytes()).with_context(bad)
        }
        _ => resolve_on(&connected.client, written),
    }
}

fn is_relative(written: &OsStr) -> bool {
    let is_uri = written.to_str().is_some_and(|text| text.starts_with("file:"));
    !is_uri && !matches!(written.as_bytes(), b"" | [b'/', ..] | b"~" | [b'~', b'/', ..])
}

fn resolve_on(client: &ExecServerClient, written: &OsStr) -> anyhow::Result<PathUri> {
    let info = client.info();
    let shown = written.display();
    let bad = || format!("invalid path `{shown}`");
    if let Some(uri) = written.to_str().filter(|text| text.starts_with("file:")) {
        return uri.parse::<PathUri>().with_context(bad);
    }
    match written.as_bytes() {
        b"" => bail!("empty path; write `.` for the server's working directory"),
        [b'/', ..] => match written.to_str() {
            Some(text) => text.parse::<PathUri>().with_context(bad),
            None => PathUri::try_from(Path::new(written)).with_context(bad),
        },
        b"~" | [b'~', b'/', ..] => {
            let Some(home) = &info.user_home_dir else {
                bail!(
                    "the server does not report its home directory; write `{shown}` as an absolute path"
                );
            };
            let below = written.as_bytes()[1..].iter().skip_while(|&&byte| byte == b'/');
            home.join(below.copied().collect::<Vec<u8>>()).with_context(bad)
        }
        relative => {
            let Some(cwd) = &info.cwd else {
                bail!(
                    "the server does not report its working directory; write `{shown}` as an \
                     absolute path"
                );
            };
            cwd.join(relative).with_context(bad)
        }
    }
}

/// The working directory of the place, or else of the server.
pub(crate) fn working_directory(connected: &Connected) -> anyhow::Result<PathUri> {
    resolve(connected, ".")
}

/// A path on the server, for messages.
pub(crate) fn display(path: &PathUri) -> String {
    crate::style::escaped(path.as_bytes())
}

/// Removes the colon that marks a path on the server in `cp`.
pub(crate) fn strip_colon(written: &OsStr) -> &OsStr {
    match written.as_bytes().strip_prefix(b":") {
        Some(b"") => OsStr::new("."),
        Some(path) => OsStr::from_bytes(path),
        None => written,
    }
}
