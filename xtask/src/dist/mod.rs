//! What to give to others, in `target/dist`: a static program, a tarball and a Debian package with its manual,
//! completions and units, and what a container image is made from. The same commit gives the same bytes.

mod contents;
mod deb;
mod licenses;
pub(crate) mod program;
mod tree;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use sha2::{Digest, Sha256};

use crate::remap;
use contents::Contents;
use tree::Tree;

/// The name of the package: another one may be named `codex`.
const PACKAGE: &str = "codex-exec-server";

/// The version of the workspace.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The users of the container. `codex` owns its data.
const CONTAINER_PASSWD: &str = "\
root:x:0:0:root:/:/sbin/nologin
codex:x:10001:10001:codex:/data:/sbin/nologin
";

/// What to make.
#[derive(Debug, Args)]
pub(crate) struct DistArgs {
    /// Make a Debian package, too
    #[arg(long)]
    deb: bool,
    /// The directory to make anew
    #[arg(long, default_value = "target/dist", value_name = "DIR")]
    output: PathBuf,
}

pub(crate) fn run(args: &DistArgs) -> anyhow::Result<()> {
    let epoch = epoch()?;
    let sources = std::env::current_dir()?;
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| "target".into(), PathBuf::from);
    let program = program::build(&sources, &sources.join(target).join("dist-build"), epoch)?;
    let contents = Contents::new(&program)?;

    let architecture = std::env::consts::ARCH;
    let name = format!("codex-{VERSION}-{architecture}-linux");
    let tarball = contents.tree(&contents::LOCAL)?.to_tar_gz(&format!("{name}/"), epoch)?;
    let mut output = Tree::default();
    let mut sums = String::new();
    let mut add = |name: &str, bytes: Vec<u8>| {
        eprintln!("{:>10}  {name}", bytes.len());
        sums.push_str(&format!("{:x}  {name}\n", Sha256::digest(&bytes)));
        match name {
            "codex" | "install.sh" => output.program(name, bytes),
            _ => output.file(name, bytes),
        }
    };
    add("codex", fs::read(&program)?);
    add(&format!("{name}.tar.gz"), tarball);
    if args.deb {
        add(&deb::file_name(), deb::package(contents.tree(&contents::DEBIAN)?, epoch)?);
    }
    add("install.sh", contents::read("install.sh")?);
    output.file("SHA256SUMS", sums);
    output.file("Containerfile", contents::read("deploy/Containerfile")?);
    output.file("container/root/etc/passwd", CONTAINER_PASSWD);
    output.private_directory("container/owned/data");
    replace(&args.output, &output)
}

/// The time of the archives' entries.
fn epoch() -> anyhow::Result<u64> {
    match std::env::var("SOURCE_DATE_EPOCH") {
        Ok(seconds) => {
            seconds.parse().with_context(|| format!("invalid SOURCE_DATE_EPOCH \"{seconds}\""))
        }
        Err(_) => remap::commit_time("HEAD").context("set SOURCE_DATE_EPOCH"),
    }
}

/// Writes a tree in place of what an earlier run made.
fn replace(directory: &Path, tree: &Tree) -> anyhow::Result<()> {
    if directory.join("SHA256SUMS").exists() {
        fs::remove_dir_all(directory)?;
    }
    tree.write_to(directory)
}
