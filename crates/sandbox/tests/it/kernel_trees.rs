//! The kernel's file systems, mounted in random places: no policy that grants what is around them opens a device
//! of theirs, another process, or a file whose reading has effects.

use std::path::{Path, PathBuf};
use std::process::Command;

use codex_exec_server_protocol::{AccessMode, SpecialPath};

use super::support::*;
use crate::skipped::{runs_as_root, skipped};

/// How many random machines. `KERNEL_TREE_CASES` for more.
const CASES: u64 = 12;

/// A kind of file system, and files that an instance has.
type Kind = (&'static str, &'static [&'static str]);

const KINDS: [Kind; 5] = [
    ("devtmpfs", &["kmsg", "vga_arbiter"]),
    ("devpts", &["ptmx"]),
    ("proc", &["version", "1/status"]),
    ("tracefs", &["README", "trace_pipe"]),
    ("debugfs", &["sleep_time", "fault_around_bytes"]),
];

/// Devices that every sandbox has; with namespaces, a `ptmx` of its own.
const USUAL: [&str; 7] = ["null", "zero", "full", "random", "urandom", "tty", "ptmx"];

/// Devices of this machine that no sandbox has unless a policy names them.
fn devices() -> Vec<PathBuf> {
    let names = ["/dev", "/dev/pts"].map(|directory| std::fs::read_dir(directory).unwrap());
    let paths = names.into_iter().flatten().map(|entry| entry.unwrap());
    let devices = paths.filter(|entry| {
        let kind = entry.file_type().unwrap();
        !kind.is_dir() && !kind.is_symlink() && !USUAL.iter().any(|it| entry.file_name() == *it)
    });
    devices.map(|entry| entry.path()).collect()
}

/// Of those, what this kernel has.
fn kinds() -> Vec<Kind> {
    let known = std::fs::read_to_string("/proc/filesystems").unwrap();
    let is_known = |kind: &str| known.lines().any(|line| line.ends_with(&format!("\t{kind}")));
    let (kinds, missing): (Vec<Kind>, Vec<Kind>) =
        KINDS.into_iter().partition(|(kind, _)| is_known(kind));
    for (kind, _) in missing {
        skipped(&format!("the kernel has no {kind}"));
    }
    kinds
}

#[test]
fn a_grant_around_the_kernels_trees_does_not_open_them() {
    let cases = std::env::var("KERNEL_TREE_CASES").map_or(CASES, |text| text.parse().unwrap());
    let (devices, kinds) = (devices(), kinds());
    for user in users() {
        for seed in 0..cases {
            let mut random = Random(seed);
            let world = World::new(user);
            let places = ["m", "m/a", "m/a/b", "m/b", "n"].map(|name| world.base.join(name));
            for place in &places {
                std::fs::create_dir(place).unwrap();
                std::fs::write(place.join("plain"), "plain").unwrap();
            }
            world.own();
            // Only root can mount.
            let count = if runs_as_root() { random.below(4) } else { 0 };
            let mut mounts: Vec<(&PathBuf, Kind)> = Vec::new();
            for _ in 0..count {
                let place = random.pick(&places[1..]);
                if !mounts.iter().any(|(other, _)| place.starts_with(other)) {
                    mounts.push((place, *random.pick(&kinds)));
                }
            }
            let around = [Path::new("/"), Path::new("/var"), &world.base, &places[0], &places[1]];
            let granted = *random.pick(&around);
            let mut entries = vec![
                special(SpecialPath::Minimal, AccessMode::Read),
                at(&world.work, AccessMode::Read),
                at(granted, AccessMode::Read),
            ];
            if random.below(2) == 0 {
                entries.push(at(&world.outside, AccessMode::Write));
            }
            let mut closed: Vec<PathBuf> = Vec::new();
            for (place, (_, files)) in &mounts {
                closed.extend(files.iter().map(|file| place.join(file)));
            }
            closed.extend((0..8).map(|_| random.pick(&devices).clone()));
            let covered = |path: &PathBuf| mounts.iter().any(|(place, _)| path.starts_with(place));
            let open: Vec<PathBuf> = places
                .iter()
                .filter(|place| place.starts_with(granted) && !covered(place))
                .map(|place| place.join("plain"))
                .collect();
            let script =
                "for file; do (exec 3<\"$file\") 2>/dev/null && echo \"$file\"; done; true";
            let mut argv =
                vec!["sh".to_owned(), "-c".to_owned(), script.to_owned(), "sh".to_owned()];
            let tried = closed.iter().chain(&open);
            argv.extend(tried.map(|path| path.to_str().unwrap().to_owned()));
            for landlock_only in [true, false] {
                let context = world.context(managed(entries.clone()));
                let mut server =
                    mounted(&world, &mounts, world.server(&context, &world.work, &argv));
                if landlock_only {
                    server.env("TEST_LANDLOCK_ONLY", "1");
                }
                let done = finish(&mut server);
                // The same tree twice: a rule for one name is one for the other.
                if landlock_only && done.code == REFUSED {
                    continue;
                }
                let mut expected: Vec<&str> = open.iter().map(|it| it.to_str().unwrap()).collect();
                let mut opened: Vec<&str> = done.ok().out.lines().collect();
                expected.sort_unstable();
                opened.sort_unstable();
                assert_eq!(
                    opened, expected,
                    "seed {seed}, {user:?}, landlock only: {landlock_only}, {granted:?} readable, \
                     {mounts:?}"
                );
            }
        }
    }
}

/// A file system that is none of the kernel's.
const TMPFS: Kind = ("tmpfs", &["plain"]);

/// The server's command, in a mount namespace with these mounts.
fn mounted(world: &World, mounts: &[(&PathBuf, Kind)], server: Command) -> Command {
    if mounts.is_empty() {
        return server;
    }
    let mut script = String::from("set -e\n");
    for (place, (kind, _)) in mounts {
        script.push_str(&format!("mount -t {kind} {kind} '{}'\n", place.display()));
    }
    in_namespace(world, &script, &server)
}

/// The server's command, in a mount namespace that root has changed by a script.
fn in_namespace(world: &World, script: &str, server: &Command) -> Command {
    let user = match world.user {
        User::Own => "",
        User::Nobody => "setpriv --reuid=65534 --regid=65534 --clear-groups",
    };
    let script = format!("{script}exec {user} \"$@\"");
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", &script, "sh"]);
    command.arg(server.get_program()).args(server.get_args());
    World::clothe_as_root(&mut command);
    command.current_dir("/");
    command
}

/// A directory that is mounted a second time, with other file systems below one of its names: without namespaces a
/// policy opens no object that it does not open with them, or is refused.
#[test]
fn second_names_of_a_directory_open_no_more_without_namespaces() {
    let cases = std::env::var("KERNEL_TREE_CASES").map_or(2 * CASES, |text| text.parse().unwrap());
    if !runs_as_root() {
        return;
    }
    let (mut compared, mut refused) = (0, 0);
    for user in users() {
        for seed in 0..cases {
            let mut random = Random(1 << 32 | seed);
            let world = World::new(user);
            let places = ["h", "h/a", "h/a/b", "h/c", "x", "y"].map(|name| world.base.join(name));
            for place in &places {
                std::fs::create_dir(place).unwrap();
                std::fs::write(place.join("plain"), place.to_str().unwrap()).unwrap();
            }
            world.own();
            let mut script = String::from("set -e\n");
            let mut probed: Vec<PathBuf> = Vec::new();
            for second in &places[4..] {
                let (first, read_only) = (random.pick(&places[..4]), random.below(4) == 0);
                let flags = if read_only { "-o bind,ro" } else { "--bind" };
                script.push_str(&format!(
                    "mount {flags} '{}' '{}'\n",
                    first.display(),
                    second.display()
                ));
                let names = ["plain", "a/plain", "b/plain", "a/b/plain", "c/plain"];
                probed.extend(names.map(|name| second.join(name)));
            }
            let mut mounted = Vec::new();
            for _ in 0..1 + random.below(2) {
                let place = random.pick(&places[1..4]);
                if mounted.iter().any(|other: &&PathBuf| place.starts_with(other)) {
                    continue;
                }
                mounted.push(place);
                let (kind, files) = *random.pick(&[KINDS[0], KINDS[2], KINDS[3], TMPFS]);
                script.push_str(&format!("mount -t {kind} {kind} '{}'\n", place.display()));
                if kind == TMPFS.0 {
                    script.push_str(&format!("echo tmpfs > '{}/plain'\n", place.display()));
                }
                probed.extend(files.iter().map(|file| place.join(file)));
            }
            probed.extend(places.iter().map(|place| place.join("plain")));
            let accesses =
                [AccessMode::Read, AccessMode::Read, AccessMode::Write, AccessMode::Deny];
            let mut entries = vec![
                special(SpecialPath::Minimal, AccessMode::Read),
                at(&world.work, AccessMode::Read),
            ];
            for _ in 0..1 + random.below(2) {
                let place: &PathBuf = random.pick(&places);
                entries.push(at(place, *random.pick(&accesses)));
            }
            let opened = |landlock_only: bool| {
                // A plain file says what it is, by whatever name; others are what they are by one name.
                let try_all = "for file; do id=$file; case $file in */plain) id=$(cat $file);; esac\n\
                               (exec 3<$file) && echo read $id; (exec 3>>$file) && echo write $id\n\
                               done 2>/dev/null; true";
                let mut argv = vec!["sh".into(), "-c".into(), try_all.to_owned(), "sh".into()];
                argv.extend(probed.iter().map(|path| path.to_str().unwrap().to_owned()));
                let context = world.context(managed(entries.clone()));
                let server = world.server(&context, &world.work, &argv);
                let mut server = in_namespace(&world, &script, &server);
                if landlock_only {
                    server.env("TEST_LANDLOCK_ONLY", "1");
                }
                let done = finish(&mut server);
                (done.code != REFUSED).then(|| {
                    let lines = done.ok().out.lines().map(str::to_owned);
                    lines.collect::<std::collections::BTreeSet<String>>()
                })
            };
            let Some(without) = opened(true) else {
                refused += 1;
                continue;
            };
            let Some(with) = opened(false) else { continue };
            compared += 1;
            let more: Vec<_> = without.difference(&with).collect();
            assert!(more.is_empty(), "seed {seed}, {user:?}: {more:?}\n{entries:?}\n{script}");
        }
    }
    assert!(compared > cases / 2 && refused > cases / 20, "{compared} {refused}");
}
