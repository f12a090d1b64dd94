//! `codex rm` and what it refuses to remove.
//!
//! Every tree here is a temporary directory, and so is every home: a guard that fails costs nothing.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::commands::{codex, output};
use crate::terminal::Terminal;

/// `codex rm -rf`, where this is the home and this the working directory.
fn rm(home: &Path, cwd: &Path, path: &str) -> Command {
    let mut command = codex();
    command.args(["rm", "-rf", path]).env("HOME", home).current_dir(cwd);
    command
}

#[test]
fn the_home_directory_is_not_removed() {
    let home = tempfile::tempdir().unwrap();
    std::fs::write(home.path().join("letter"), "").unwrap();
    for path in ["~", "~/", "~/.", home.path().to_str().unwrap()] {
        output(&mut rm(home.path(), Path::new("/"), path)).failed(1, "refusing to remove");
        assert!(home.path().join("letter").exists(), "{path}");
    }
    let mut meant = rm(home.path(), Path::new("/"), "~");
    output(meant.args(["--no-preserve", "~"])).success();
    assert!(!home.path().exists());
    output(rm(home.path(), Path::new("/"), "x").args(["--no-preserve", "y"]))
        .failed(2, "not among the files to remove");
}

/// The oracle: a directory is preserved exactly if the home or the working directory is it or lies below it.
/// The paths go through links and `..`.
#[test]
fn a_directory_is_refused_exactly_if_it_contains_a_preserved_one() {
    for seed in 0..40 {
        let mut random = fastrand::Rng::with_seed(seed);
        let base = tempfile::tempdir().unwrap();
        let base = base.path().canonicalize().unwrap();
        let mut directories = vec![base.join("top")];
        for n in 0..random.usize(4..10) {
            let parent = directories[random.usize(..directories.len())].clone();
            directories.push(parent.join(format!("d{n}")));
        }
        for directory in &directories {
            std::fs::create_dir_all(directory).unwrap();
        }
        let mut pick = || directories[random.usize(..directories.len())].clone();
        let (home, cwd, target) = (pick(), pick(), pick());
        let home_by_link = base.join("home");
        std::os::unix::fs::symlink(&home, &home_by_link).unwrap();
        std::os::unix::fs::symlink(target.parent().unwrap(), base.join("way")).unwrap();
        let name = target.file_name().unwrap().to_str().unwrap();
        let way = base.join("way");
        let written = match seed % 3 {
            0 => target.display().to_string(),
            1 => way.join(name).display().to_string(),
            _ => way.join(name).join("..").join(name).display().to_string(),
        };
        let expected = home.starts_with(&target) || cwd.starts_with(&target);
        let result = output(&mut rm(&home_by_link, &cwd, &written));
        let case = format!("seed {seed}: {written}, home {home:?}, cwd {cwd:?}: {result:?}");
        assert_eq!(result.code, Some(i32::from(expected)), "{case}");
        assert_eq!(target.exists(), expected, "{case}");
    }
}

#[test]
fn what_contains_a_mount_point_is_not_removed() {
    let base = tempfile::tempdir().unwrap();
    let mount: PathBuf = base.path().join("a b/mount");
    std::fs::create_dir_all(&mount).unwrap();
    let script =
        "mount -t tmpfs none \"$2\" && touch \"$2/file\" && \"$1\" rm -rf \"$3\"; ls \"$2\"";
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]);
    command.arg(codex().get_program()).arg(&mount).arg(base.path().join("a b"));
    let result = output(command.current_dir("/"));
    assert!(result.err.contains("a mount point"), "{result:?}");
    assert_eq!(result.out, "file\n", "{result:?}");
}

#[test]
fn a_person_is_asked_before_a_full_directory_is_removed() {
    let base = tempfile::tempdir().unwrap();
    let full = base.path().join("full");
    std::fs::create_dir(&full).unwrap();
    std::fs::write(full.join("file"), "").unwrap();
    let mut command = codex();
    command.args(["rm", "-r"]).arg(&full).current_dir("/");
    let mut terminal = Terminal::start(&command);
    terminal.shows("and all its contents? [y/N]");
    terminal.type_in("n\n");
    terminal.shows("not removed");
    assert_eq!(terminal.ends().code(), Some(1));
    assert!(full.exists());
    let mut terminal = Terminal::start(&command);
    terminal.shows("[y/N]");
    terminal.type_in("y\n");
    assert_eq!(terminal.ends().code(), Some(0));
    assert!(!full.exists());
}
