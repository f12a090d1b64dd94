//! Whether the program can be reproduced: two clean builds of one commit, in two directories, compared byte
//! by byte.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};
use clap::Args;

use crate::{codex, dist, remap};

/// How to build.
#[derive(Debug, Args)]
pub(crate) struct ReproduceArgs {
    /// Build as for a release, which takes several times as long
    #[arg(long)]
    release: bool,
    /// Build the static program of `cargo xtask dist`
    #[arg(long, conflicts_with_all = ["release", "package"])]
    dist: bool,
    /// The commit to build
    #[arg(long, default_value = "HEAD")]
    commit: String,
    /// Build this package
    #[arg(long, default_value = "codex")]
    package: String,
}

pub(crate) fn run(args: &ReproduceArgs) -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let mut built = Vec::new();
    // Paths of different lengths: what is padded to a length hides no difference.
    for name in ["one", "another-directory"] {
        let place = directory.path().join(name);
        check_out(&args.commit, &place)?;
        let program = build(args, &place)?;
        let bytes = std::fs::read(&program)?;
        eprintln!("{name}: {} bytes, SHA-256 {}", bytes.len(), digest(&program)?);
        // The second build must not read what the first one left.
        std::fs::remove_dir_all(place.join("target"))?;
        built.push(bytes);
    }
    let same = built[0].iter().zip(&built[1]).take_while(|(a, b)| a == b).count();
    ensure!(built[0] == built[1], "the builds differ from byte {same} on");
    eprintln!("the builds are the same");
    Ok(())
}

fn check_out(commit: &str, place: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(place)?;
    let mut archive =
        Command::new("git").args(["archive", commit]).stdout(Stdio::piped()).spawn()?;
    let tar = archive.stdout.take().context("no archive")?;
    let unpacked = Command::new("tar").arg("-x").current_dir(place).stdin(tar).status()?;
    ensure!(archive.wait()?.success() && unpacked.success(), "cannot check out {commit}");
    Ok(())
}

/// Builds with every path of this machine replaced, and returns the program.
fn build(args: &ReproduceArgs, place: &Path) -> anyhow::Result<PathBuf> {
    // The time of the commit, for what asks for a time.
    let epoch = remap::commit_time(&args.commit)?;
    let target = place.join("target");
    if args.dist {
        return dist::program::build(place, &target, epoch);
    }
    let mut command = codex::cargo();
    command
        .args(["build", "--quiet", "--locked", "--package", &args.package])
        .args(args.release.then_some("--release"))
        .current_dir(place)
        .env("CARGO_TARGET_DIR", &target)
        .env("SOURCE_DATE_EPOCH", epoch.to_string());
    remap::replace_paths(&mut command, place, &[])?;
    ensure!(command.status()?.success(), "the build in {} failed", place.display());
    let profile = if args.release { "release" } else { "debug" };
    Ok(target.join(profile).join(&args.package))
}

fn digest(file: &Path) -> anyhow::Result<String> {
    let summed = Command::new("sha256sum").arg(file).output().context("sha256sum")?;
    let line = String::from_utf8(summed.stdout)?;
    Ok(line.split(' ').next().context("sha256sum printed nothing")?.to_owned())
}
