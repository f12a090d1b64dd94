//! What is installed: the program, its manual, completions, units of systemd, and documents.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, ensure};

use super::tree::{Tree, gzip};
use super::{PACKAGE, licenses};
use crate::packages::Packages;
use crate::{codex, sbom};

/// Units for the whole machine and for one user.
const SYSTEM_UNITS: [&str; 2] = ["codex-exec-server@.service", "codex-rendezvous.service"];
const USER_UNIT: &str = "codex-exec-server.service";

/// Where a kind of file goes, below a prefix.
#[derive(Debug)]
pub(crate) struct Layout {
    pub prefix: &'static str,
    pub zsh: &'static str,
    pub user_units: &'static str,
}

/// As programs find files below `/usr/local` and `~/.local`.
pub(crate) const LOCAL: Layout =
    Layout { prefix: "", zsh: "site-functions", user_units: "share/systemd/user" };

/// As Debian has it.
pub(crate) const DEBIAN: Layout =
    Layout { prefix: "usr/", zsh: "vendor-completions", user_units: "lib/systemd/user" };

/// The files that have to be made, made once for all layouts.
#[derive(Debug)]
pub(crate) struct Contents {
    program: Vec<u8>,
    completions: [(&'static str, Vec<u8>); 3],
    bill_of_materials: String,
    licenses: String,
}

impl Contents {
    pub(crate) fn new(program: &Path) -> anyhow::Result<Self> {
        let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        let fetched = codex::cargo()
            .args(["fetch", "--locked", "--quiet", "--target", &platform])
            .status()?;
        ensure!(fetched.success(), "cannot fetch the packages of the workspace");
        let packages = Packages::load(std::env::consts::ARCH)?;
        let completion = |shell| Ok::<_, anyhow::Error>((shell, completion(program, shell)?));
        Ok(Self {
            completions: [completion("bash")?, completion("zsh")?, completion("fish")?],
            program: fs::read(program)?,
            bill_of_materials: sbom::json_text(&packages)?,
            licenses: licenses::text(&packages)?,
        })
    }

    /// The tree of one layout.
    pub(crate) fn tree(&self, layout: &Layout) -> anyhow::Result<Tree> {
        let mut tree = Tree::default();
        let Layout { prefix, zsh, user_units } = layout;
        tree.program(&format!("{prefix}bin/codex"), self.program.clone());
        tree.link(&format!("{prefix}bin/codex-exec-server"), "codex");
        for (shell, script) in &self.completions {
            let path = match *shell {
                "bash" => "bash-completion/completions/codex".to_owned(),
                "zsh" => format!("zsh/{zsh}/_codex"),
                _ => "fish/vendor_completions.d/codex.fish".to_owned(),
            };
            tree.file(&format!("{prefix}share/{path}"), script.clone());
        }
        for name in names_in("docs/man", ".1")? {
            let page = gzip(&read(&format!("docs/man/{name}"))?)?;
            tree.file(&format!("{prefix}share/man/man1/{name}.gz"), page);
        }
        for unit in SYSTEM_UNITS {
            let text = read(&format!("deploy/{unit}"))?;
            tree.file(&format!("{prefix}lib/systemd/system/{unit}"), text);
        }
        let text = read(&format!("deploy/user/{USER_UNIT}"))?;
        tree.file(&format!("{prefix}{user_units}/{USER_UNIT}"), text);
        self.add_documents(&mut tree, &format!("{prefix}share/doc/{PACKAGE}/"))?;
        Ok(tree)
    }

    fn add_documents(&self, tree: &mut Tree, directory: &str) -> anyhow::Result<()> {
        for name in ["LICENSE", "README.md", "SECURITY.md"] {
            tree.file(&format!("{directory}{name}"), read(name)?);
        }
        for from in ["docs", "docs/guides", "docs/protocol"] {
            for name in names_in(from, ".md")? {
                tree.file(&format!("{directory}{from}/{name}"), read(&format!("{from}/{name}"))?);
            }
        }
        let changes = gzip(&read("CHANGELOG.md")?)?;
        tree.file(&format!("{directory}changelog.gz"), changes);
        tree.file(&format!("{directory}codex.cdx.json"), self.bill_of_materials.as_str());
        let licenses = gzip(self.licenses.as_bytes())?;
        tree.file(&format!("{directory}third-party-licenses.gz"), licenses);
        Ok(())
    }
}

fn completion(program: &Path, shell: &str) -> anyhow::Result<Vec<u8>> {
    let printed = Command::new(program).args(["completion", shell]).output()?;
    ensure!(printed.status.success(), "codex completion {shell} failed");
    Ok(printed.stdout)
}

pub(crate) fn read(file: &str) -> anyhow::Result<Vec<u8>> {
    fs::read(file).with_context(|| format!("cannot read {file}"))
}

/// The files in a directory with this ending, sorted.
fn names_in(directory: &str, ending: &str) -> anyhow::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(directory).with_context(|| format!("cannot read {directory}"))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.ends_with(ending) {
            names.push(name);
        }
    }
    ensure!(!names.is_empty(), "no {ending} in {directory}");
    names.sort();
    Ok(names)
}
