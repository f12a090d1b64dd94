//! Builds in which no path of this machine is left, neither from Rust nor from C.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

/// Replaces the directory of the sources and cargo's own in what this cargo compiles, and adds these flags for rustc.
pub(crate) fn replace_paths(
    cargo: &mut Command,
    sources: &Path,
    flags: &[&str],
) -> anyhow::Result<()> {
    let home = std::env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cargo")));
    let home = home.context("no CARGO_HOME and no HOME")?;
    let pairs = [(sources, "/src"), (home.as_path(), "/cargo")];
    let replace =
        |flag: &str| pairs.map(|(path, with)| format!("{flag}={}={with}", path.display()));
    let mut rust = Vec::from(replace("--remap-path-prefix"));
    rust.extend(flags.iter().map(|&flag| flag.to_owned()));
    cargo
        .env_remove("RUSTFLAGS")
        // Separated as cargo wants it, so that paths may have spaces.
        .env("CARGO_ENCODED_RUSTFLAGS", rust.join("\x1f"))
        .env("CFLAGS", replace("-ffile-prefix-map").join(" "))
        .env("CARGO_INCREMENTAL", "0");
    Ok(())
}

/// The time of a commit, in seconds since 1970: the time of what is built from it.
pub(crate) fn commit_time(commit: &str) -> anyhow::Result<u64> {
    let shown =
        Command::new("git").args(["show", "--no-patch", "--format=%ct", commit]).output()?;
    ensure!(shown.status.success(), "no commit {commit}");
    Ok(String::from_utf8(shown.stdout)?.trim().parse()?)
}
