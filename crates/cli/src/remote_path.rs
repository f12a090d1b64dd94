//! Paths of the other side, as people write them.

use anyhow::{Context, bail};
use codex_exec_server::{ExecServerClient, PathUri};

/// A path as written: absolute, below `~`, or relative to where the server works.
pub fn resolve(client: &ExecServerClient, text: &str) -> anyhow::Result<PathUri> {
    let info = client.info();
    let bad = || format!("`{text}` is no path of the other side");
    if text.is_empty() {
        bail!("an empty path names nothing; where the server works is `.`");
    }
    if text.starts_with('/') || text.starts_with("file:") {
        return text.parse::<PathUri>().with_context(bad);
    }
    if text == "~" || text.starts_with("~/") {
        let Some(home) = &info.user_home_dir else {
            bail!("the server does not tell where ~ is; write an absolute path");
        };
        return home.join(text[1..].trim_start_matches('/')).with_context(bad);
    }
    let Some(cwd) = &info.cwd else {
        bail!("the server does not tell where it works; write `{text}` as an absolute path");
    };
    cwd.join(text).with_context(bad)
}

/// Where the server works.
pub fn working_directory(client: &ExecServerClient) -> anyhow::Result<PathUri> {
    resolve(client, ".")
}

/// A path of the other side for people.
pub fn shown(path: &PathUri) -> String {
    crate::style::printable(&String::from_utf8_lossy(path.as_bytes()))
}

/// Without the colon that marks a path of the other side in `cp`.
pub fn unmarked(text: &str) -> &str {
    match text.strip_prefix(':') {
        Some("") => ".",
        Some(path) => path,
        None => text,
    }
}
