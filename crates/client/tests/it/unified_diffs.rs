//! Unified diffs, with `git apply` as the oracle: random trees, random edits, and targets that have drifted since.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use codex_exec_client::Patch;
use fastrand::Rng;

use crate::embedded::embedded;
use crate::skipped::skipped;

type Tree = BTreeMap<String, Vec<u8>>;

/// Lines that repeat, so that positions matter.
fn lines(random: &mut Rng, count: usize) -> Vec<String> {
    (0..count)
        .map(|_| format!("{}\n", random.choice(["a", "b", "", "}", "x y", "ä"]).unwrap()))
        .collect()
}

fn content(random: &mut Rng) -> Vec<u8> {
    let count = random.usize(0..25);
    let mut text = lines(random, count).concat();
    if random.u8(..5) == 0 {
        text.pop();
    }
    text.into_bytes()
}

fn edited(random: &mut Rng, content: &[u8], edits: usize) -> Vec<u8> {
    let mut all: Vec<Vec<u8>> =
        content.split_inclusive(|&b| b == b'\n').map(<[u8]>::to_vec).collect();
    for _ in 0..edits {
        let at = random.usize(0..=all.len());
        match random.u8(..3) {
            0 if at < all.len() => drop(all.remove(at)),
            1 if at < all.len() => all[at] = lines(random, 1).concat().into_bytes(),
            _ => all.insert(at, lines(random, 1).concat().into_bytes()),
        }
    }
    // Only the last line can lack its end.
    let last = all.len().saturating_sub(1);
    for line in &mut all[..last] {
        if line.last() != Some(&b'\n') {
            line.push(b'\n');
        }
    }
    all.concat()
}

fn write(root: &Path, tree: &Tree) {
    fs::create_dir_all(root).unwrap();
    for (name, content) in tree {
        let path = root.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
}

fn read(root: &Path) -> Tree {
    let mut tree = Tree::new();
    let mut todo = vec![root.to_owned()];
    while let Some(directory) = todo.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                todo.push(path);
            } else {
                let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
                tree.insert(name, fs::read(path).unwrap());
            }
        }
    }
    tree
}

fn git(directory: &Path, arguments: &[&str]) -> std::process::Output {
    let mut command = Command::new("git");
    command.current_dir(directory).args(["-c", "core.safecrlf=false"]).args(arguments);
    // No repository around the directory, and no settings of the tester.
    command.env("GIT_CEILING_DIRECTORIES", "/").env("GIT_CONFIG_GLOBAL", "/dev/null");
    command.env("GIT_CONFIG_NOSYSTEM", "1").output().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn diffs_apply_exactly_where_git_apply_applies_them() {
    if Command::new("git").arg("--version").output().is_err() {
        return skipped("git is not installed");
    }
    let (server, client) = embedded().await;
    let mut outcomes = [0; 2];
    for seed in 0..150 {
        let mut random = Rng::with_seed(seed);
        let root = tempfile::tempdir().unwrap();
        let names = ["f", "d/g", "n ä", "h"];
        let mut before = Tree::new();
        for name in names {
            if random.u8(..4) > 0 {
                before.insert(name.to_owned(), content(&mut random));
            }
        }
        let mut after = before.clone();
        for name in names {
            match random.u8(..6) {
                0 => drop(after.remove(name)),
                1 => drop(after.insert(name.to_owned(), content(&mut random))),
                _ => {
                    if let Some(old) = before.get(name) {
                        let edits = random.usize(0..4);
                        after.insert(name.to_owned(), edited(&mut random, old, edits));
                    }
                }
            }
        }
        if let (0, Some(moved)) = (random.u8(..4), after.remove("h")) {
            after.insert("moved/h".to_owned(), moved);
        }
        // A repository makes the diff; the targets are none.
        let made = root.path().join("made");
        write(&made, &before);
        git(&made, &["init", "-q"]);
        git(&made, &["add", "-A"]);
        git(
            &made,
            &["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "x", "--allow-empty"],
        );
        for name in before.keys() {
            fs::remove_file(made.join(name)).unwrap();
        }
        write(&made, &after);
        git(&made, &["add", "-A"]);
        let context = format!("-U{}", random.usize(1..5));
        let diff = git(&made, &["diff", "--cached", "-M", &context, "HEAD"]).stdout;
        if diff.is_empty() {
            continue;
        }
        // The target has drifted in half of the rounds.
        let mut target = before.clone();
        if random.bool() {
            for content in target.values_mut() {
                let edits = random.usize(0..3);
                *content = edited(&mut random, content, edits);
            }
        }
        let (ours, theirs) = (root.path().join("ours"), root.path().join("theirs"));
        write(&ours, &target);
        write(&theirs, &target);
        let file = root.path().join("change.diff");
        fs::write(&file, &diff).unwrap();
        let applied = git(&theirs, &["apply", "--whitespace=nowarn", file.to_str().unwrap()]);
        let text = String::from_utf8(diff).unwrap();
        let cwd = ours.to_str().unwrap().parse().unwrap();
        let report = match Patch::parse(&text) {
            Ok(patch) => client.files().apply_patch(&patch, &cwd).await,
            Err(error) => Err(error),
        };
        let said = format!(
            "seed {seed}: {report:?}\n{}\n{text}",
            String::from_utf8_lossy(&applied.stderr)
        );
        assert_eq!(report.is_ok(), applied.status.success(), "{said}");
        let expected = if report.is_ok() { read(&theirs) } else { target };
        assert_eq!(read(&ours), expected, "{said}");
        outcomes[usize::from(report.is_ok())] += 1;
    }
    assert!(outcomes[0] > 10 && outcomes[1] > 50, "{outcomes:?}");
    client.close().await;
    server.shut_down().await;
}
