//! Copies in all three directions follow the same rules: what they replace, refuse and skip.

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use codex_exec_client::{
    ExecServerClient, ExecServerError, PathUri, TransferOptions, TransferReport,
};

use crate::embedded::embedded;
use crate::skipped::skipped;

fn uri(path: &Path) -> PathUri {
    PathUri::try_from(path).unwrap()
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Up,
    Down,
    Within,
}

const DIRECTIONS: [Direction; 3] = [Direction::Up, Direction::Down, Direction::Within];

async fn copy(
    client: &ExecServerClient,
    direction: Direction,
    from: &Path,
    to: &Path,
    options: &TransferOptions,
) -> Result<TransferReport, ExecServerError> {
    let files = client.files();
    match direction {
        Direction::Up => files.upload(from, &uri(to), options).await,
        Direction::Down => files.download(&uri(from), to, options).await,
        Direction::Within => files.copy_within(&uri(from), &uri(to), options).await,
    }
}

/// What exists at the destination of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Nothing,
    File,
    HardLink,
    Link,
    LinkToLink,
    LinkToNothing,
    LinkToFifo,
    LinkToDirectory,
    Fifo,
    Socket,
    Device,
    Directory,
}

const FOUND: [Found; 12] = [
    Found::Nothing,
    Found::File,
    Found::HardLink,
    Found::Link,
    Found::LinkToLink,
    Found::LinkToNothing,
    Found::LinkToFifo,
    Found::LinkToDirectory,
    Found::Fifo,
    Found::Socket,
    Found::Device,
    Found::Directory,
];

fn node(path: &Path, kind: &str) -> bool {
    let arguments: &[&str] = if kind == "c" { &["c", "1", "3"] } else { &["p"] };
    let made = std::process::Command::new("mknod").arg(path).args(arguments).output().unwrap();
    made.status.success()
}

/// Creates `to` in `root`, with `target` as the target of links. False if that needs root.
fn plant(root: &Path, found: Found, mode: u32) -> bool {
    let (to, target) = (root.join("to"), root.join("target"));
    let file = |path: &Path| {
        std::fs::write(path, "old").unwrap();
        set_mode(path, mode);
    };
    match found {
        Found::Nothing => {}
        Found::File => file(&to),
        Found::HardLink => {
            file(&to);
            std::fs::hard_link(&to, &target).unwrap();
        }
        Found::Link => {
            file(&target);
            symlink("target", &to).unwrap();
        }
        Found::LinkToLink => {
            file(&target);
            symlink(&target, root.join("between")).unwrap();
            symlink("./between", &to).unwrap();
        }
        Found::LinkToNothing => symlink("target", &to).unwrap(),
        Found::LinkToFifo => {
            symlink("target", &to).unwrap();
            return node(&target, "p");
        }
        Found::LinkToDirectory => {
            std::fs::create_dir(&target).unwrap();
            symlink("target", &to).unwrap();
        }
        Found::Fifo => return node(&to, "p"),
        Found::Socket => drop(UnixListener::bind(&to).unwrap()),
        Found::Device => return node(&to, "c"),
        Found::Directory => std::fs::create_dir(&to).unwrap(),
    }
    true
}

/// Every path with its kind, permission bits and content.
fn names(root: &Path) -> BTreeMap<PathBuf, (String, u32, Vec<u8>)> {
    let entries = std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path());
    entries
        .map(|path| {
            let metadata = path.symlink_metadata().unwrap();
            let leads = std::fs::read_link(&path).unwrap_or_default();
            let content = match metadata.is_file() {
                true => std::fs::read(&path).unwrap(),
                false => Vec::new(),
            };
            let kind = format!("{:?} {leads:?}", metadata.file_type());
            (path, (kind, metadata.mode() & 0o7777, content))
        })
        .collect()
}

#[tokio::test]
async fn copies_replace_only_regular_files_in_every_direction() {
    let (_server, client) = embedded().await;
    let mut random = fastrand::Rng::with_seed(5);
    for (direction, found) in
        DIRECTIONS.iter().flat_map(|direction| FOUND.map(|found| (*direction, found)))
    {
        let directory = tempfile::tempdir().unwrap();
        let (source, root) = (directory.path().join("source"), directory.path().join("root"));
        // Some sizes take one request, some several blocks.
        let len = [0, random.usize(1..1000), random.usize(270_000..600_000)][random.usize(..3)];
        let content: Vec<u8> = (0..len).map(|_| random.u8(..)).collect();
        let (bits, old_bits) = (random.u32(..0o10000) | 0o400, random.u32(..0o1000) | 0o600);
        std::fs::write(&source, &content).unwrap();
        set_mode(&source, bits);
        std::fs::create_dir(&root).unwrap();
        if !plant(&root, found, old_bits) {
            continue;
        }
        let before = names(&root);
        let options = TransferOptions::default();
        let copied = copy(&client, direction, &source, &root.join("to"), &options).await;
        let replaced = match found {
            Found::Nothing | Found::File | Found::HardLink => Some("to"),
            Found::Link | Found::LinkToLink | Found::LinkToNothing => Some("target"),
            _ => None,
        };
        let what = format!("{direction:?} {found:?}: {copied:?}");
        assert_eq!(copied.is_ok(), replaced.is_some(), "{what}");
        let mut wanted = before.clone();
        if let Some(name) = replaced {
            let path = root.join(name);
            // `root` was created with all bits that the umask allows.
            let allowed = root.metadata().unwrap().mode() & 0o777;
            let bits = match (before.contains_key(&path), direction) {
                (true, _) => old_bits,
                (false, Direction::Down) => bits & allowed,
                (false, _) => bits & 0o777,
            };
            let kind = names(directory.path())[&source].0.clone();
            wanted.insert(path, (kind, bits, content));
        }
        assert!(names(&root) == wanted, "{what}");
    }
}

/// Whether the filesystem supports unnamed files.
fn has_unnamed_files(directory: &Path) -> bool {
    use rustix::fs::{Mode, OFlags, open};
    open(directory, OFlags::TMPFILE | OFlags::RDWR, Mode::RUSR).is_ok()
}

#[tokio::test]
async fn a_copy_appears_only_when_it_is_complete() {
    let (_server, client) = embedded().await;
    let directory = tempfile::tempdir().unwrap();
    if !has_unnamed_files(directory.path()) {
        return skipped("this filesystem has no unnamed files");
    }
    let (source, root) = (directory.path().join("source"), directory.path().join("root"));
    std::fs::write(&source, vec![7; 3_000_000]).unwrap();
    std::fs::create_dir(&root).unwrap();
    for direction in DIRECTIONS {
        for existing in [false, true] {
            let to = root.join(format!("{direction:?}"));
            if existing {
                std::fs::write(&to, "old").unwrap();
            }
            let (before, watched) = (names(&root), root.clone());
            let options = TransferOptions::default().on_progress(move |at| {
                if at.bytes < at.total_bytes {
                    assert!(names(&watched) == before, "{direction:?}");
                }
            });
            copy(&client, direction, &source, &to, &options).await.unwrap();
            assert_eq!(std::fs::read(&to).unwrap().len(), 3_000_000);
            std::fs::remove_file(&to).unwrap();
            assert!(names(&root).is_empty(), "{direction:?}");
        }
    }
}

#[tokio::test]
async fn a_tree_is_not_copied_into_itself() {
    let (_server, client) = embedded().await;
    let directory = tempfile::tempdir().unwrap();
    let tree = directory.path().join("tree");
    std::fs::create_dir_all(tree.join("sub")).unwrap();
    std::fs::write(tree.join("file"), "x").unwrap();
    symlink("tree/sub", directory.path().join("inside")).unwrap();
    let options = TransferOptions::default();
    for to in ["tree", "tree/new", "tree/sub/new/newer", "inside", "inside/new"] {
        let to = uri(&directory.path().join(to));
        let copied = client.files().copy_within(&uri(&tree), &to, &options).await;
        let error = copied.unwrap_err().to_string();
        assert!(error.contains("into itself"), "{to}: {error}");
    }
    let beside = uri(&directory.path().join("tree2/new"));
    client.files().copy_within(&uri(&tree), &beside, &options).await.unwrap();
    assert_eq!(names(&tree).len(), 2);
    assert_eq!(names(&directory.path().join("tree2/new")).len(), 2);
}
