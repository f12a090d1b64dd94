//! `fs/walk`: both servers list random trees alike.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use codex_exec_client::protocol::files::{FsWalkOptions, FsWalkParams};
use codex_exec_client::{ExecServerClient, ExecServerError, PathUri, RemoteExecServerConnectArgs};

use crate::programs::{Implementation, Server, home};
use crate::support::soon;

/// SplitMix64: the same trees on every machine.
struct Seeded(u64);

impl Seeded {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % bound as u64) as usize
    }

    fn choice<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
}

const NAMES: [&[u8]; 13] = [
    b"a",
    b"b",
    b".h",
    b"c c",
    b"\xff\xfe",
    "é".as_bytes(),
    b"z%41",
    b"D",
    b"e.txt",
    b"x\xffy",
    b".git",
    b"#q?",
    b"~",
];

const TARGETS: [&[u8]; 11] = [
    b".",
    b"..",
    b"a",
    b"b",
    b"nowhere",
    b"../a",
    b"/etc/passwd",
    b"c c",
    b"a/b",
    b".h",
    b"x\xffy",
];

fn plant(seeded: &mut Seeded, directory: &Path, depth: usize) {
    for _ in 0..seeded.below(8) {
        let name = OsStr::from_bytes(seeded.choice(&NAMES));
        let path = directory.join(name);
        if path.symlink_metadata().is_ok() {
            continue;
        }
        match seeded.below(8) {
            0..3 if depth < 4 => {
                fs::create_dir(&path).unwrap();
                plant(seeded, &path, depth + 1);
                // Has an effect only for users other than root.
                if seeded.below(12) == 0 {
                    fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
                }
            }
            0..5 => fs::write(&path, "").unwrap(),
            5 => {
                let mode = rustix::fs::Mode::RWXU;
                rustix::fs::mkfifoat(rustix::fs::CWD, &path, mode).unwrap();
            }
            _ => symlink(OsStr::from_bytes(seeded.choice(&TARGETS)), &path).unwrap(),
        }
    }
}

/// Restores the permissions that [`plant`] has taken, so that the tree can be removed.
fn reopen(directory: &Path) {
    fs::set_permissions(directory, fs::Permissions::from_mode(0o755)).unwrap();
    for entry in fs::read_dir(directory).unwrap().map(Result::unwrap) {
        if entry.file_type().unwrap().is_dir() {
            reopen(&entry.path());
        }
    }
}

/// Entries, the paths of errors, and whether the walk was truncated; or the error code. Messages may differ.
type Listed = Result<(Vec<(PathUri, String)>, Vec<PathUri>, bool), i64>;

async fn walk(client: &ExecServerClient, root: &Path, options: &FsWalkOptions) -> Listed {
    let params = FsWalkParams::new(
        PathUri::from_native(root.as_os_str().as_bytes()).unwrap(),
        options.clone(),
    );
    match soon(client.fs_walk(params)).await {
        Ok(answer) => {
            let entries = answer.entries.into_iter();
            let entries = entries.map(|entry| (entry.path, format!("{:?}", entry.kind))).collect();
            let errors = answer.errors.into_iter().map(|error| error.path).collect();
            Ok((entries, errors, answer.truncated))
        }
        Err(ExecServerError::Server { code, .. }) => Err(code),
        Err(error) => panic!("{error}"),
    }
}

#[tokio::test]
#[ignore = "interop/run runs it"]
async fn random_trees_are_listed_alike() {
    let servers = [Server::start(Implementation::Theirs), Server::start(Implementation::Ours)];
    let mut clients = Vec::new();
    for server in &servers {
        let args = RemoteExecServerConnectArgs::new(&server.url, "interop");
        clients.push(soon(ExecServerClient::connect_websocket(args)).await.unwrap());
    }
    for seed in 0..80 {
        let place = home();
        let root = place.path().join("root");
        fs::create_dir(&root).unwrap();
        let mut seeded = Seeded(seed);
        plant(&mut seeded, &root, 0);
        for _ in 0..12 {
            let options = FsWalkOptions {
                max_depth: seeded.choice(&[0, 1, 2, 3, 64, 64]),
                max_directories: seeded.choice(&[0, 1, 2, 3, 5, 10, 10_000, 10_000, 10_000]),
                max_entries: seeded.choice(&[0, 1, 2, 3, 5, 9, 50_000, 50_000, 50_000, 50_000]),
                follow_directory_symlinks: seeded.below(2) == 0,
                prune_hidden_directories: seeded.below(2) == 0,
            };
            let below: &str = seeded.choice(&["", "", "", "a", "b", ".h", "nowhere", "e.txt"]);
            let at: PathBuf = root.join(below);
            let theirs = walk(&clients[0], &at, &options).await;
            let ours = walk(&clients[1], &at, &options).await;
            assert_eq!(ours, theirs, "seed {seed}, at {below:?}, {options:?}");
        }
        reopen(&root);
    }
}
