//! Holes: takes a fix out, and checks that a random test finds the hole.
//!
//! Each file in `xtask/holes` is a patch that removes one protection. Its first lines say what is then
//! possible (`Hole:`), and which test has to fail (`Found-by:`): `generator` (the attacks), `torture FAULT`,
//! or `test PACKAGE FILTER`. A patched tree has to build, and the test has to pass without the patch, so
//! that a failure is the hole's. The working tree stays as it is: patches are applied to a copy of HEAD.

use std::collections::HashSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use clap::Args;

/// Where the patches are.
const PATCHES: &str = "xtask/holes";

/// Which holes to open.
#[derive(Debug, Args)]
pub(crate) struct HolesArgs {
    /// Only holes whose name contains this
    filter: Option<String>,
    /// Random attackers of `generator`, at most
    #[arg(long, default_value_t = 3_000)]
    cases: u32,
    /// Seconds of `torture`, at most
    #[arg(long, default_value_t = 120)]
    seconds: u32,
}

/// The test that finds a hole.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Finder {
    Generator,
    Torture { fault: String },
    Test { package: String, filter: String },
}

impl Finder {
    fn parse(text: &str) -> Option<Self> {
        let words: Vec<&str> = text.split_whitespace().collect();
        match words[..] {
            ["generator"] => Some(Self::Generator),
            ["torture", fault] => Some(Self::Torture { fault: fault.to_owned() }),
            ["test", package, filter] => {
                Some(Self::Test { package: package.to_owned(), filter: filter.to_owned() })
            }
            _ => None,
        }
    }
}

impl fmt::Display for Finder {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Generator => formatter.write_str("generator"),
            Self::Torture { fault } => write!(formatter, "torture {fault}"),
            Self::Test { package, filter } => write!(formatter, "test {package} {filter}"),
        }
    }
}

#[derive(Debug)]
struct Hole {
    name: String,
    patch: PathBuf,
    what: String,
    finder: Finder,
}

impl Hole {
    fn read(patch: PathBuf) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(&patch)?;
        let (what, finder) = header(&text)
            .with_context(|| format!("{}: needs `Hole:` and `Found-by:`", patch.display()))?;
        let name = patch.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Self { name, patch, what, finder })
    }
}

/// The description and the finder in the first lines of a patch.
fn header(text: &str) -> Option<(String, Finder)> {
    let mut lines = text.lines();
    let what = lines.next()?.strip_prefix("Hole: ")?.to_owned();
    let finder = Finder::parse(lines.next()?.strip_prefix("Found-by: ")?)?;
    Some((what, finder))
}

/// All holes, by name.
fn all() -> anyhow::Result<Vec<Hole>> {
    let entries = std::fs::read_dir(PATCHES).with_context(|| format!("cannot read {PATCHES}"))?;
    let mut paths: Vec<PathBuf> =
        entries.map(|entry| Ok(entry?.path())).collect::<anyhow::Result<_>>()?;
    paths.sort();
    paths.into_iter().map(Hole::read).collect()
}

/// A complaint for each patch that no longer applies.
pub(crate) fn complaints() -> anyhow::Result<Vec<String>> {
    let mut complaints = Vec::new();
    for hole in all()? {
        let applies = Command::new("git")
            .args(["apply", "--check"])
            .arg(&hole.patch)
            .stderr(Stdio::null())
            .status()?;
        if !applies.success() {
            complaints.push(format!("{}: does not apply; make it anew", hole.patch.display()));
        }
    }
    Ok(complaints)
}

pub(crate) fn run(args: &HolesArgs) -> anyhow::Result<()> {
    let wanted = |hole: &Hole| args.filter.as_ref().is_none_or(|part| hole.name.contains(part));
    let holes: Vec<Hole> = all()?.into_iter().filter(wanted).collect();
    ensure!(!holes.is_empty(), "no hole has that name; see {PATCHES}");
    let tree = Tree::check_out()?;
    let mut controlled = HashSet::new();
    let mut missed = Vec::new();
    for hole in &holes {
        if controlled.insert(&hole.finder) {
            ensure!(!tree.finds(&hole.finder, args)?, "`{}` fails without any hole", hole.finder);
        }
        let began = Instant::now();
        tree.apply(&hole.patch)?;
        let found = tree.finds(&hole.finder, args);
        tree.restore()?;
        let (found, seconds) = (found?, began.elapsed().as_secs());
        let verdict = if found { "found" } else { "MISSED" };
        eprintln!("{verdict:<7} {:<26} by {}, {seconds} s: {}", hole.name, hole.finder, hole.what);
        missed.extend((!found).then_some(hole.name.as_str()));
    }
    ensure!(missed.is_empty(), "not found: {}", missed.join(", "));
    Ok(())
}

/// A copy of HEAD with its own build directory, below `target`.
struct Tree {
    root: PathBuf,
    target: PathBuf,
}

impl Tree {
    fn check_out() -> anyhow::Result<Self> {
        let base = std::env::current_dir()?.join("target/holes");
        let tree = Self { root: base.join("tree"), target: base.join("target") };
        if tree.root.exists() {
            tree.git(&["checkout", "--quiet", "--force", "--detach"], &[&head()?])?;
        } else {
            std::fs::create_dir_all(&base)?;
            let added = Command::new("git")
                .args(["worktree", "add", "--quiet", "--force", "--detach"])
                .arg(&tree.root)
                .status()?;
            ensure!(added.success(), "git worktree add failed");
        }
        Ok(tree)
    }

    fn git(&self, arguments: &[&str], more: &[&str]) -> anyhow::Result<()> {
        let status =
            Command::new("git").arg("-C").arg(&self.root).args(arguments).args(more).status()?;
        ensure!(status.success(), "git {} failed", arguments.join(" "));
        Ok(())
    }

    fn apply(&self, patch: &Path) -> anyhow::Result<()> {
        let patch = patch.canonicalize()?;
        self.git(&["apply"], &[&patch.to_string_lossy()])
    }

    fn restore(&self) -> anyhow::Result<()> {
        self.git(&["checkout", "--quiet", "--force"], &["."])
    }

    fn cargo(&self, arguments: &[&str]) -> Command {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.current_dir(&self.root).env("CARGO_TARGET_DIR", &self.target);
        cargo.args(arguments).args(["--quiet", "--locked"]);
        cargo
    }

    /// Whether the finder fails on the tree as it is now.
    fn finds(&self, finder: &Finder, args: &HolesArgs) -> anyhow::Result<bool> {
        let (package, test) = match finder {
            Finder::Generator => ("codex", "attacks"),
            Finder::Torture { .. } => ("codex", ""),
            Finder::Test { package, .. } => (package.as_str(), "it"),
        };
        let built = match test {
            "" => self.cargo(&["build", "--package", package]).status()?,
            test => {
                self.cargo(&["test", "--package", package, "--test", test, "--no-run"]).status()?
            }
        };
        if !built.success() {
            bail!("the tree does not build");
        }
        let mut command = match finder {
            Finder::Generator => {
                let mut command = self.cargo(&["test", "--package", package, "--test", test]);
                command.env("ATTACK_CASES", args.cases.to_string());
                command.args(["--", "generator"]);
                command
            }
            Finder::Test { filter, .. } => {
                let mut command = self.cargo(&["test", "--package", package, "--test", test]);
                command.args(["--", filter]);
                command
            }
            Finder::Torture { fault } => {
                let mut command = in_pid_namespace();
                command.arg(std::env::current_exe()?).args(["torture", "--fault", fault]);
                command.args(["--seconds", &args.seconds.to_string(), "--codex"]);
                command.arg(self.target.join("debug/codex"));
                command
            }
        };
        let passed = command.stdout(Stdio::null()).stderr(Stdio::null()).status()?;
        Ok(!passed.success())
    }
}

/// Runs a command so that nothing it leaves behind survives: an open hole may leave processes.
fn in_pid_namespace() -> Command {
    let mut command = Command::new("unshare");
    if !rustix::process::geteuid().is_root() {
        command.arg("--map-root-user");
    }
    command.args(["--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL", "--"]);
    command
}

/// The commit that is checked out.
fn head() -> anyhow::Result<String> {
    let output = Command::new("git").args(["rev-parse", "HEAD"]).output()?;
    ensure!(output.status.success(), "git rev-parse failed");
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_names_the_hole_and_its_finder() {
        let (what, finder) =
            header("Hole: daemons stay\nFound-by: torture client\n\ndiff").expect("a header");
        assert_eq!(what, "daemons stay");
        assert_eq!(finder, Finder::Torture { fault: "client".to_owned() });
        assert_eq!(finder.to_string(), "torture client");
        assert!(header("Hole: x\nFound-by: luck\n").is_none());
        assert!(header("diff --git a b").is_none());
    }
}
