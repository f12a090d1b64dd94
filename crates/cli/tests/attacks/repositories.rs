//! Random layouts of a repository and its workspace: git outside the sandbox runs nothing that a sandboxed
//! command has written.

use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::generator::random::Random;

const CASES: u64 = 32;

/// Directories of a layout, by their names below its base: the root, what is around it, beside it and
/// in it.
const PLACES: [&str; 6] = ["p/w", "p", "p/sib", "p/w/child", "p/w/.git", "p/w/child/deep"];

/// A directory that does not exist.
const ABSENT: &str = "p/w/absent";

/// Possible targets of the repository's `hooks`.
const HOOKS: [&str; 4] = ["p/w", "p", "p/w/hk", "p/hk"];

struct Layout {
    base: tempfile::TempDir,
    /// How it was made, for the message of a failed test.
    told: String,
    /// The writable directories besides the workspace.
    writable: Vec<PathBuf>,
}

impl Layout {
    fn random(random: &mut Random) -> Self {
        let base = tempfile::tempdir_in("/var/tmp").unwrap();
        let mut layout = Self { base, told: String::new(), writable: Vec::new() };
        for name in ["p/w/child/deep", "p/sib", "p/w/hk", "p/hk"] {
            fs::create_dir_all(layout.path(name)).unwrap();
        }
        let own = *random.pick(&PLACES);
        let shared = if random.percent(40) { *random.pick(&PLACES) } else { own };
        layout.repository(random, own, shared);
        layout.pointer(random, own);
        if random.percent(40) {
            layout.writable.push(layout.path("p"));
            layout.told.push_str(", around it writable");
        }
        layout
    }

    fn path(&self, name: &str) -> PathBuf {
        self.base.path().join(name)
    }

    fn root(&self) -> PathBuf {
        self.path("p/w")
    }

    fn mark(&self) -> PathBuf {
        self.path("mark")
    }

    /// Creates a git directory in `own` that shares the content of `shared`.
    fn repository(&mut self, random: &mut Random, own: &str, shared: &str) {
        let _ = write!(self.told, "git directory {own}, shared {shared}");
        let directory = self.path(shared);
        fs::create_dir_all(&directory).unwrap();
        git(&directory, &["init", "--quiet", "--bare", "."]);
        let mut config = fs::read_to_string(directory.join("config")).unwrap();
        config = config.replace("bare = true", "bare = false");
        if random.percent(30) {
            config = config.replace("repositoryformatversion = 0", "repositoryformatversion = 1");
            config.push_str("[extensions]\n\tworktreeConfig = true\n");
            self.told.push_str(", its own configuration");
        }
        config.push_str("[user]\n\tname = n\n\temail = n@example.com\n");
        fs::write(directory.join("config"), config).unwrap();
        if own != shared {
            let own = self.path(own);
            fs::create_dir_all(&own).unwrap();
            fs::write(own.join("HEAD"), "ref: refs/heads/main\n").unwrap();
            fs::write(own.join("commondir"), format!("{}\n", self.spelled(random, &own, shared)))
                .unwrap();
        }
        fs::remove_dir_all(directory.join("hooks")).unwrap();
        match random.below(3) {
            0 => {}
            1 => fs::create_dir(directory.join("hooks")).unwrap(),
            _ => {
                let hooks = *random.pick(&HOOKS);
                let target = self.spelled(random, &directory, hooks);
                symlink(target, directory.join("hooks")).unwrap();
                let _ = write!(self.told, ", hooks -> {hooks}");
            }
        }
    }

    /// Creates the workspace's `.git`, which points to the directory.
    fn pointer(&mut self, random: &mut Random, own: &str) {
        let root = self.root();
        if own == "p/w/.git" {
            return;
        }
        let (name, target) = (root.join(".git"), self.spelled(random, &root, own));
        // It may exist already as the shared directory.
        if name.exists() {
            fs::rename(&name, root.join("shared")).unwrap();
            let file = self.path(own).join("commondir");
            fs::write(file, root.join("shared").to_str().unwrap()).unwrap();
        }
        if random.percent(50) {
            self.told.push_str(", by a link");
            symlink(target, name).unwrap();
        } else {
            fs::write(name, format!("gitdir: {target}\n")).unwrap();
        }
    }

    /// The path of a directory, relative to another or absolute.
    fn spelled(&mut self, random: &mut Random, from: &Path, name: &str) -> String {
        // Through a missing directory it leads nowhere, until somebody creates that.
        let name = match random.percent(30) {
            true => format!("{ABSENT}/../../../{name}"),
            false => name.to_owned(),
        };
        if name.starts_with(ABSENT) {
            self.told.push_str(", through a missing directory");
        }
        if random.percent(50) {
            return self.path(&name).to_str().unwrap().to_owned();
        }
        let depth = from.strip_prefix(self.base.path()).unwrap().components().count();
        format!("{}{name}", "../".repeat(depth))
    }

    /// A script that plants everything that git might run, in every writable directory.
    fn attack(&self) -> String {
        let mark = self.mark();
        let mark = mark.to_str().unwrap();
        let evil = self.path("p/w/evil");
        let run = format!("printf '[core]\\n\\tfsmonitor = \"touch {mark}; false\"\\n'");
        let places: Vec<String> = PLACES
            .into_iter()
            .chain(HOOKS)
            .chain(["p/w/shared"])
            .map(|name| self.path(name).to_str().unwrap().to_owned())
            .collect();
        format!(
            "exec 2>/dev/null; cp -r {template} {evil}; {run} >> {evil}/config
             mkdir -p {absent}
             set -- {places}
             mkdir -p $(printf '%s/hooks ' \"$@\")
             for place in \"$@\"; do
               {run} >> $place/config; {run} >> $place/config.worktree
               for at in $place $place/hooks; do
                 for hook in pre-commit post-commit post-index-change; do
                   printf '#!/bin/sh\\ntouch {mark}\\n' > $at/$hook && all=\"$all $at/$hook\"
                 done
               done
               test -e $place/commondir || echo {evil} > $place/commondir
             done
             chmod +x $all
             : > {root}/ran; echo ran; read -r _",
            absent = self.path(ABSENT).display(),
            template = self.path("template").display(),
            evil = evil.display(),
            places = places.join(" "),
            root = self.root().display(),
        )
    }

    /// Whether git in the workspace runs any of it.
    fn runs_something(&self) -> bool {
        let root = self.root();
        fs::write(root.join("new"), "new").unwrap();
        for words in [&["status"][..], &["add", "new"], &["commit", "--quiet", "-m", "new"]] {
            // It may fail; what matters is what it has run by then.
            let _ = command(&root, words).output().unwrap();
        }
        self.mark().exists()
    }
}

fn command(directory: &Path, words: &[&str]) -> Command {
    let mut git = Command::new("git");
    git.args(words).current_dir(directory).stdin(Stdio::null());
    git.env("GIT_CONFIG_GLOBAL", "/dev/null").env("GIT_CONFIG_NOSYSTEM", "1");
    git.env("GIT_CEILING_DIRECTORIES", "/var/tmp");
    git
}

fn git(directory: &Path, words: &[&str]) {
    let said = command(directory, words).output().unwrap();
    assert!(said.status.success(), "{said:?}");
}

#[test]
fn git_outside_runs_nothing_that_was_written_inside() {
    let (mut refused, mut held, mut open) = (0, 0, 0);
    for seed in 0..CASES {
        let layout = Layout::random(&mut Random::new(seed));
        fs::create_dir(layout.path("template")).unwrap();
        git(&layout.path("template"), &["init", "--quiet", "--bare", "."]);
        // The control: without a sandbox, the same script makes git run something.
        if seed % 8 == 0 {
            let control = Layout::random(&mut Random::new(seed));
            fs::create_dir(control.path("template")).unwrap();
            git(&control.path("template"), &["init", "--quiet", "--bare", "."]);
            let mut attack = Command::new("sh");
            attack.args(["-c", &control.attack()]).current_dir(control.base.path());
            attack.stdin(Stdio::null()).stdout(Stdio::null());
            attack.status().unwrap();
            open += u32::from(control.runs_something());
        }
        let mut sandbox = Command::new(env!("CARGO_BIN_EXE_codex"));
        sandbox.args(["sandbox", "--profile", "workspace-write"]).current_dir(layout.root());
        for writable in &layout.writable {
            sandbox.arg("--writable").arg(writable);
        }
        sandbox.args(["--", "sh", "-c", &layout.attack()]);
        sandbox.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut running = sandbox.spawn().unwrap();
        // One line once the script has done it all; the end of the stream if it was refused.
        let mut line = String::new();
        BufReader::new(running.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let during = line == "ran\n" && layout.runs_something();
        drop(running.stdin.take());
        let said = running.wait_with_output().unwrap();
        assert!(!during, "seed {seed}: {}: while the sandbox runs", layout.told);
        if line == "ran\n" {
            assert!(layout.root().join("ran").exists(), "seed {seed}: {}", layout.told);
            held += 1;
        } else {
            let why = String::from_utf8_lossy(&said.stderr);
            let names_it = why.contains("cannot be protected or granted");
            assert!(names_it, "seed {seed}: {}: {why}", layout.told);
            refused += 1;
        }
        assert!(!layout.runs_something(), "seed {seed}: {}: {said:?}", layout.told);
    }
    // Each kind of layout occurs often.
    assert!(refused > CASES / 6 && held > CASES / 6, "{refused} refused, {held} held");
    assert!(open > 0, "nothing is ever run, whoever plants it");
}
