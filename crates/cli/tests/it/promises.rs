//! The promises of the sandbox, attacked through every filesystem method, against a server of the tests' user
//! and one of nobody.
//!
//! A table of routes (ways to name a protected path) times a table of methods. The tests check the disk and the
//! bytes that came out, not the server's responses.

use std::collections::BTreeMap;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};

use crate::skipped::runs_as_root;
use crate::support::{Client, Running, codex};

/// The user id of `nobody`.
const UNPRIVILEGED: u32 = 65_534;

/// Content that must not leak, plain and in base64, with a size that nothing else has.
const SECRET: &str = "TOPSECRET";
const SECRET_ENCODED: &str = "VE9QU0VDUkVU";
const SECRET_SIZE: usize = 4_321;

/// `work` is the workspace, `outside` is not.
struct World {
    _directory: tempfile::TempDir,
    nobody: bool,
    base: PathBuf,
    work: PathBuf,
    outside: PathBuf,
}

impl World {
    fn new(nobody: bool) -> Self {
        // Not below /tmp, which some policies make writable.
        let directory = tempfile::Builder::new().prefix("fs-").tempdir_in("/var/tmp").unwrap();
        let base = directory.path().canonicalize().unwrap();
        std::fs::set_permissions(&base, PermissionsExt::from_mode(0o755)).unwrap();
        let (work, outside) = (base.join("work"), base.join("outside"));
        let secret = SECRET.repeat(SECRET_SIZE / SECRET.len() + 1);
        for directory in
            ["work/deep", "work/.git", "work/.agents", "work/denied", "work/real", "outside/hidden"]
        {
            std::fs::create_dir_all(base.join(directory)).unwrap();
        }
        for file in [
            "outside/secret",
            "outside/hidden/secret",
            "work/.env",
            "work/deep/.env",
            "work/denied/secret",
        ] {
            std::fs::write(base.join(file), &secret[..SECRET_SIZE]).unwrap();
        }
        std::fs::write(base.join("work/.git/config"), "[core]").unwrap();
        std::fs::write(base.join("work/real/secret"), "real").unwrap();
        let world = Self { _directory: directory, nobody, base, work, outside };
        world.arrange();
        world
    }

    /// Restores what an attempt may have changed.
    fn arrange(&self) {
        for (link, target) in [
            ("link-to-file", self.outside.join("secret")),
            ("link-to-directory", self.outside.clone()),
            ("deep/link-to-directory", self.outside.clone()),
            ("chain", "link-to-file".into()),
            ("relative", "../outside/secret".into()),
            ("over-proc", format!("/proc/self/root{}/secret", self.outside.display()).into()),
            ("over-fd", "/proc/self/fd".into()),
            ("git", ".git".into()),
            ("env", ".env".into()),
            ("codex", ".codex".into()),
        ] {
            let link = self.work.join(link);
            if std::fs::read_link(&link).is_ok_and(|there| there == target) {
                continue;
            }
            let _ = std::fs::remove_file(&link);
            let _ = std::fs::remove_dir_all(&link);
            symlink(target, link).unwrap();
        }
        std::fs::write(self.work.join("file"), "file").unwrap();
        for taken in ["taken", "taken-too"] {
            let taken = self.work.join(taken);
            let _ = std::fs::remove_file(&taken);
            let _ = std::fs::remove_dir_all(&taken);
        }
        if self.nobody {
            give(&self.base);
        }
    }

    /// A server of root or nobody, or of the tests' user if that is not root.
    fn server(&self) -> Running {
        let mut command = codex();
        if self.nobody {
            command.uid(UNPRIVILEGED).gid(UNPRIVILEGED);
        }
        Running::start_with(command.args(["exec-server", "--detach-ttl", "0"]))
    }

    /// Everything that no attempt may change: paths, kinds, modes, inodes and content.
    fn kept(&self) -> BTreeMap<PathBuf, (u32, u64, Vec<u8>)> {
        let mut kept = BTreeMap::new();
        for place in
            ["outside", "work/.git", "work/.agents", "work/denied", "work/.env", "work/deep/.env"]
        {
            look(&self.base.join(place), &mut kept);
        }
        kept
    }

    /// A path in the workspace with a leaked secret, or a created `.codex`.
    fn leaked(&self) -> Option<PathBuf> {
        let mut all = BTreeMap::new();
        look(&self.work, &mut all);
        all.retain(|path, (_, _, content)| {
            let moved = content.windows(SECRET.len()).any(|part| part == SECRET.as_bytes())
                && !path.ends_with(".env")
                && !path.starts_with(self.work.join("denied"));
            let created = path.starts_with(self.work.join(".codex"))
                && (path.as_os_str() != self.work.join(".codex").as_os_str() || !path.is_dir());
            moved || created
        });
        all.into_keys().next()
    }

    /// Every route to an existing protected path.
    fn routes(&self) -> Vec<String> {
        let (work, outside) = (self.work.display(), self.outside.display());
        vec![
            format!("{outside}/secret"),
            format!("{outside}/hidden"),
            format!("{outside}"),
            format!("{work}/../outside/secret"),
            format!("{work}/deep/../../outside/hidden/secret"),
            format!("{work}/link-to-file"),
            format!("{work}/link-to-directory"),
            format!("{work}/link-to-directory/secret"),
            format!("{work}/link-to-directory/hidden"),
            format!("{work}/deep/link-to-directory/secret"),
            format!("{work}/link-to-directory/../outside/secret"),
            format!("{work}/chain"),
            format!("{work}/relative"),
            format!("{work}/over-proc"),
            format!("{work}/over-fd/0"),
            format!("/proc/self/root{outside}/secret"),
            format!("/proc/1/root{outside}/secret"),
            format!("/proc/self/cwd{outside}/secret"),
            format!("/proc/self/fd/0{outside}/secret"),
            format!("{work}/denied"),
            format!("{work}/denied/secret"),
            format!("{work}/.env"),
            format!("{work}/env"),
            format!("{work}/deep/.env"),
        ]
    }

    /// Routes to paths that may be read but not changed, or not created.
    fn protected(&self) -> Vec<String> {
        let work = self.work.display();
        vec![
            format!("{work}/.git"),
            format!("{work}/.git/config"),
            format!("{work}/git/config"),
            format!("{work}/.agents"),
            format!("{work}/.agents/new"),
            format!("{work}/.codex"),
            format!("{work}/.codex/new"),
            format!("{work}/codex/new"),
            format!("{work}/deep/../.git/config"),
        ]
    }

    /// The whole disk readable, the workspace writable, some of it denied.
    fn wide(&self) -> Value {
        self.policy(&json!([
            {"path": {"type": "special", "value": {"kind": "root"}}, "access": "read"},
            {"path": {"type": "special", "value": {"kind": "project_roots"}}, "access": "write"},
            {"path": {"type": "path", "path": self.work.join("denied")}, "access": "deny"},
            {"path": {"type": "glob_pattern", "pattern": "**/.env"}, "access": "deny"},
        ]))
    }

    /// The same, with the outside denied by name.
    fn denying(&self) -> Value {
        let mut policy = self.wide();
        let entries = policy["permissions"]["file_system"]["entries"].as_array_mut().unwrap();
        entries.push(
            json!({"path": {"type": "path", "path": self.outside.clone()}, "access": "deny"}),
        );
        policy
    }

    /// Grants what programs need and the workspace, but not the outside.
    fn narrow(&self) -> Value {
        let mut policy = self.wide();
        policy["permissions"]["file_system"]["entries"][0] =
            json!({"path": {"type": "special", "value": {"kind": "minimal"}}, "access": "read"});
        policy
    }

    fn policy(&self, entries: &Value) -> Value {
        json!({
            "permissions": {
                "type": "managed",
                "network": "restricted",
                "file_system": {"type": "restricted", "entries": entries},
            },
            "cwd": self.work,
            "workspaceRoots": [self.work],
        })
    }
}

fn give(path: &Path) {
    std::os::unix::fs::lchown(path, Some(UNPRIVILEGED), Some(UNPRIVILEGED)).unwrap();
    if path.is_dir() && !path.is_symlink() {
        for entry in std::fs::read_dir(path).unwrap() {
            give(&entry.unwrap().path());
        }
    }
}

fn look(path: &Path, all: &mut BTreeMap<PathBuf, (u32, u64, Vec<u8>)>) {
    let Ok(found) = path.symlink_metadata() else { return };
    let content = match found.file_type() {
        kind if kind.is_file() => std::fs::read(path).unwrap(),
        kind if kind.is_symlink() => {
            std::fs::read_link(path).unwrap().into_os_string().into_encoded_bytes()
        }
        _ => Vec::new(),
    };
    all.insert(path.to_owned(), (found.mode(), found.ino(), content));
    if found.is_dir() {
        for entry in std::fs::read_dir(path).unwrap() {
            look(&entry.unwrap().path(), all);
        }
    }
}

/// Requests that belong together: each is sent if the one before was not refused.
type Attempt = Vec<(&'static str, Value)>;

/// Every way to change or create a path.
fn changes(path: &str, work: &Path) -> Vec<Attempt> {
    let taken = work.join("taken");
    let file = work.join("file");
    let below = format!("{path}/new");
    let x = "eA==";
    let blocks = |mode: &str, path: &str| -> Attempt {
        vec![
            ("fs/open", json!({"handleId": "h", "path": path, "mode": mode})),
            ("fs/writeBlock", json!({"handleId": "h", "offset": 0, "chunk": x})),
            ("fs/close", json!({"handleId": "h", "commit": true})),
        ]
    };
    vec![
        vec![("fs/writeFile", json!({"path": path, "dataBase64": x}))],
        vec![("fs/writeFile", json!({"path": below, "dataBase64": x}))],
        vec![("fs/writeFile", json!({"path": path, "dataBase64": x, "atomic": true}))],
        vec![("fs/writeFile", json!({"path": below, "dataBase64": x, "atomic": true}))],
        vec![("fs/writeFile", json!({"path": path, "dataBase64": x, "followSymlinks": false}))],
        blocks("replace", path),
        blocks("replace", &below),
        blocks("replaceAtomic", path),
        blocks("replaceAtomic", &below),
        vec![("fs/createDirectory", json!({"path": path, "recursive": false}))],
        vec![("fs/createDirectory", json!({"path": format!("{path}/new/newer")}))],
        vec![("fs/remove", json!({"path": path}))],
        vec![("fs/remove", json!({"path": path, "recursive": false, "force": false}))],
        vec![("fs/copy", json!({"sourcePath": file, "destinationPath": path, "recursive": true}))],
        vec![("fs/copy", json!({"sourcePath": file, "destinationPath": below, "recursive": true}))],
        vec![("fs/rename", json!({"sourcePath": path, "destinationPath": taken}))],
        vec![(
            "fs/rename",
            json!({"sourcePath": file, "destinationPath": path, "overwrite": true}),
        )],
        vec![("fs/rename", json!({"sourcePath": file, "destinationPath": below}))],
        vec![("fs/symlink", json!({"path": path, "target": "/etc"}))],
        vec![("fs/symlink", json!({"path": below, "target": "/etc"}))],
        vec![("fs/setMode", json!({"path": path, "mode": 0o777}))],
        // Through a link that the attacker creates.
        vec![
            ("fs/symlink", json!({"path": taken, "target": path})),
            ("fs/writeFile", json!({"path": taken, "dataBase64": x})),
        ],
        vec![
            ("fs/symlink", json!({"path": taken, "target": path})),
            ("fs/writeFile", json!({"path": taken.join("new"), "dataBase64": x})),
        ],
        vec![
            ("fs/symlink", json!({"path": taken, "target": path})),
            ("fs/setMode", json!({"path": taken, "mode": 0o777})),
        ],
    ]
}

/// Every way to read a path.
fn looks(path: &str, world: &World) -> Vec<Attempt> {
    let (taken, too) = (world.work.join("taken"), world.work.join("taken-too"));
    let search = |path: &Value| json!({"path": path, "pattern": SECRET, "hidden": true, "respectGitignore": false});
    let path = json!(path);
    let options = json!({"maxDepth": 64, "maxDirectories": 10_000, "maxEntries": 50_000,
                         "followDirectorySymlinks": true});
    let block =
        |handle: &str| ("fs/readBlock", json!({"handleId": handle, "offset": 0, "len": 99}));
    vec![
        vec![("fs/readFile", json!({"path": path}))],
        vec![("fs/readFile", json!({"path": path, "followSymlinks": false}))],
        vec![("fs/open", json!({"handleId": "r", "path": path})), block("r")],
        vec![("fs/getMetadata", json!({"path": path}))],
        vec![("fs/canonicalize", json!({"path": path}))],
        vec![("fs/readDirectory", json!({"path": path}))],
        vec![("fs/walk", json!({"path": path, "options": options}))],
        vec![("fs/search", search(&path))],
        vec![("fs/glob", json!({"path": path, "patterns": ["**"], "hidden": true}))],
        // Copied into the workspace and read there.
        vec![
            ("fs/copy", json!({"sourcePath": path, "destinationPath": taken, "recursive": true})),
            ("fs/readFile", json!({"path": taken})),
        ],
        vec![
            ("fs/rename", json!({"sourcePath": path, "destinationPath": taken})),
            ("fs/readFile", json!({"path": taken})),
        ],
        vec![
            ("fs/symlink", json!({"path": taken, "target": path})),
            ("fs/readFile", json!({"path": taken})),
        ],
        vec![
            ("fs/symlink", json!({"path": taken, "target": path})),
            ("fs/open", json!({"handleId": "s", "path": taken})),
            block("s"),
        ],
        vec![
            ("fs/symlink", json!({"path": taken, "target": path})),
            ("fs/copy", json!({"sourcePath": taken, "destinationPath": too, "recursive": true})),
            ("fs/readFile", json!({"path": too})),
        ],
        vec![
            ("fs/symlink", json!({"path": taken, "target": path})),
            ("fs/readDirectory", json!({"path": taken})),
        ],
    ]
}

/// Sends an attempt's requests under a policy; returns all responses, and whether the last one was refused.
async fn send(client: &mut Client, attempt: &Attempt, sandbox: &Value) -> (String, bool) {
    let mut said = String::new();
    for (method, params) in attempt {
        let mut params = params.clone();
        params["sandbox"] = sandbox.clone();
        let answer = client.call(method, params).await;
        said.push_str(&answer.to_string());
        if let Some(code) = answer["error"]["code"].as_i64() {
            assert!([-32600, -32602, -32603, -32004].contains(&code), "{method}: {answer}");
            close(client, attempt).await;
            return (said, true);
        }
    }
    close(client, attempt).await;
    (said, false)
}

/// Closes what an attempt may have opened.
async fn close(client: &mut Client, attempt: &Attempt) {
    for (_, params) in attempt.iter().filter(|(method, _)| *method == "fs/open") {
        client.call("fs/close", json!({"handleId": params["handleId"]})).await;
    }
}

/// Both root and nobody, or only the tests' user.
fn users() -> Vec<bool> {
    if runs_as_root() { vec![false, true] } else { vec![false] }
}

#[tokio::test]
async fn no_method_changes_a_protected_path() {
    for nobody in users() {
        let world = World::new(nobody);
        let server = world.server();
        let mut client = server.client().await;
        let before = world.kept();
        for sandbox in [world.wide(), world.narrow()] {
            for route in world.routes().iter().chain(&world.protected()) {
                for attempt in changes(route, &world.work) {
                    let (said, _) = send(&mut client, &attempt, &sandbox).await;
                    assert_eq!(world.kept(), before, "nobody: {nobody}, {attempt:?}: {said}");
                    assert_eq!(world.leaked(), None, "nobody: {nobody}, {attempt:?}: {said}");
                    world.arrange();
                }
            }
        }
    }
}

#[tokio::test]
async fn no_method_reveals_a_denied_path() {
    for nobody in users() {
        let world = World::new(nobody);
        let server = world.server();
        let mut client = server.client().await;
        let before = world.kept();
        for sandbox in [world.denying(), world.narrow()] {
            // Also from a parent directory, without naming the denied path.
            let above = [&world.base, &world.work].map(|path| path.to_str().unwrap().to_owned());
            for route in world.routes().into_iter().chain(above) {
                for attempt in looks(&route, &world) {
                    let (said, _) = send(&mut client, &attempt, &sandbox).await;
                    let told =
                        [SECRET_ENCODED, &SECRET_SIZE.to_string()].map(|it| said.contains(it));
                    assert_eq!(told, [false; 2], "nobody: {nobody}, {attempt:?}: {said}");
                    // A search does not echo its pattern, so the word was found in a file.
                    assert!(!said.contains(SECRET), "nobody: {nobody}, {attempt:?}: {said}");
                    let names_it = attempt.iter().any(|(_, p)| p.to_string().contains("hidden/"));
                    assert!(names_it || !said.contains("hidden/"), "{attempt:?}: {said}");
                    assert_eq!(world.kept(), before, "nobody: {nobody}, {attempt:?}: {said}");
                    assert_eq!(world.leaked(), None, "nobody: {nobody}, {attempt:?}: {said}");
                    world.arrange();
                }
            }
        }
    }
}

/// The attempts are real: without a policy each of them succeeds.
#[tokio::test]
async fn without_a_policy_every_attempt_succeeds() {
    let routes = ["outside/secret", "outside/hidden", "outside/missing"];
    let count = changes("", Path::new("/")).len();
    let mut ineffective: Vec<usize> = (0..count).collect();
    for route in routes {
        let mut at = 0;
        while at < ineffective.len() {
            let world = World::new(false);
            let server = world.server();
            let mut client = server.client().await;
            let before = world.kept();
            let path = world.base.join(route);
            let attempt = &changes(path.to_str().unwrap(), &world.work)[ineffective[at]];
            send(&mut client, attempt, &Value::Null).await;
            if world.kept() == before {
                at += 1;
            } else {
                ineffective.remove(at);
            }
        }
    }
    assert_eq!(ineffective, [0; 0], "these attempts change nothing even if they may");
    let count = looks("", &World::new(false)).len();
    for index in 0..count {
        let world = World::new(false);
        let server = world.server();
        let mut client = server.client().await;
        let mut told = false;
        for route in routes {
            let path = world.base.join(route);
            let attempt = &looks(path.to_str().unwrap(), &world)[index];
            let (said, _) = send(&mut client, attempt, &Value::Null).await;
            told |= [SECRET, SECRET_ENCODED, "4321", "hidden", "secret"]
                .iter()
                .any(|it| said.contains(it));
            world.arrange();
        }
        assert!(told, "{index}");
    }
}

/// Promise 9, for every method that can be refused.
#[tokio::test]
async fn a_refusal_names_the_path_and_the_systems_error() {
    for nobody in users() {
        let world = World::new(nobody);
        let server = world.server();
        let mut client = server.client().await;
        let secret = world.outside.join("secret");
        let new = world.outside.join("new");
        let file = world.work.join("file");
        let x = "eA==";
        for (method, params) in [
            ("fs/writeFile", json!({"path": secret, "dataBase64": x})),
            ("fs/writeFile", json!({"path": secret, "dataBase64": x, "atomic": true})),
            ("fs/open", json!({"handleId": "h", "path": secret, "mode": "replace"})),
            ("fs/open", json!({"handleId": "h", "path": new, "mode": "replaceAtomic"})),
            ("fs/createDirectory", json!({"path": new})),
            ("fs/remove", json!({"path": secret})),
            ("fs/copy", json!({"sourcePath": file, "destinationPath": new, "recursive": false})),
            ("fs/rename", json!({"sourcePath": secret, "destinationPath": new})),
            ("fs/symlink", json!({"path": new, "target": "x"})),
            ("fs/setMode", json!({"path": secret, "mode": 0o777})),
        ] {
            let mut params = params.clone();
            params["sandbox"] = world.wide();
            let answer = client.call(method, params).await;
            let message = answer["error"]["message"].as_str().unwrap_or_default();
            assert_eq!(answer["error"]["code"], -32600, "{method}: {answer}");
            assert!(message.contains("Operation not permitted"), "{method}: {answer}");
            assert!(message.contains("/outside/"), "{method}: {answer}");
        }
        for (method, params) in [
            ("fs/readFile", json!({"path": world.work.join("denied/secret")})),
            ("fs/open", json!({"handleId": "h", "path": world.work.join("denied/secret")})),
            ("fs/readDirectory", json!({"path": world.work.join("denied")})),
            ("fs/readFile", json!({"path": world.work.join(".env")})),
        ] {
            let mut params = params.clone();
            params["sandbox"] = world.wide();
            let answer = client.call(method, params).await;
            let message = answer["error"]["message"].as_str().unwrap_or_default();
            assert_eq!(answer["error"]["code"], -32600, "{method}: {answer}");
            assert!(message.contains("Operation not permitted"), "{method}: {answer}");
            assert!(message.contains(world.work.to_str().unwrap()), "{method}: {answer}");
        }
        // A path that is not granted does not exist for the sandbox.
        let params = json!({"path": secret, "sandbox": world.narrow()});
        let answer = client.call("fs/readFile", params).await;
        assert_eq!(answer["error"]["code"], -32004, "{answer}");
    }
}

/// Promise 1: paths that are swapped while the server works on them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn links_swapped_in_a_loop_lead_nowhere() {
    for nobody in users() {
        let world = World::new(nobody);
        let server = world.server();
        let mut client = server.client().await;
        let before = world.kept();
        let (swap, link) = (world.work.join("swap"), world.work.join("swap-link"));
        std::fs::create_dir(&swap).unwrap();
        symlink(&world.outside, &link).unwrap();
        world.arrange();
        let stop = AtomicBool::new(false);
        let (name, sandbox) = (swap.join("secret"), world.denying());
        let x = "eA==";
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let flags = rustix::fs::RenameFlags::EXCHANGE;
                let here = rustix::fs::CWD;
                while !stop.load(Ordering::Relaxed) {
                    let _ = rustix::fs::renameat_with(here, &swap, here, &link, flags);
                }
            });
            let _stop = Stop(&stop);
            let attack = async {
                for _ in 0..20 {
                    let taken = world.work.join("taken");
                    for attempt in [
                        vec![("fs/writeFile", json!({"path": name, "dataBase64": x}))],
                        vec![(
                            "fs/writeFile",
                            json!({"path": name, "dataBase64": x, "atomic": true}),
                        )],
                        vec![("fs/createDirectory", json!({"path": swap.join("new/newer")}))],
                        vec![("fs/setMode", json!({"path": name, "mode": 0o777}))],
                        vec![("fs/readFile", json!({"path": name}))],
                        vec![(
                            "fs/copy",
                            json!({"sourcePath": swap.join("hidden"), "destinationPath": taken,
                                   "recursive": true}),
                        )],
                        vec![(
                            "fs/copy",
                            json!({"sourcePath": world.work.join("real"), "recursive": true,
                                   "destinationPath": swap.join("copied")}),
                        )],
                        vec![("fs/rename", json!({"sourcePath": name, "destinationPath": taken}))],
                        vec![("fs/remove", json!({"path": swap.join("hidden")}))],
                        vec![("fs/remove", json!({"path": name}))],
                        vec![("fs/remove", json!({"path": taken}))],
                    ] {
                        let (said, _) = send(&mut client, &attempt, &sandbox).await;
                        assert!(!said.contains(SECRET_ENCODED), "{attempt:?}: {said}");
                    }
                }
            };
            tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(attack));
        });
        assert_eq!(world.kept(), before, "nobody: {nobody}");
        assert_eq!(world.leaked(), None, "nobody: {nobody}");
    }
}

/// Ends the other thread when it is dropped.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Promises 2, 3 and 4.
#[tokio::test]
async fn writes_follow_hard_links_and_links_stay_links() {
    for nobody in users() {
        let world = World::new(nobody);
        let (hard, other) = (world.work.join("hard"), world.outside.join("hard"));
        std::fs::write(&other, "old").unwrap();
        std::fs::hard_link(&other, &hard).unwrap();
        world.arrange();
        let inode = other.metadata().unwrap().ino();
        let server = world.server();
        let mut client = server.client().await;
        let blocks = vec![
            ("fs/open", json!({"handleId": "h", "path": hard, "mode": "replace"})),
            ("fs/writeBlock", json!({"handleId": "h", "offset": 0, "chunk": "YmxvY2s="})),
            ("fs/close", json!({"handleId": "h"})),
        ];
        for (attempt, content) in [
            (vec![("fs/writeFile", json!({"path": hard, "dataBase64": "bmV3"}))], "new"),
            (blocks, "block"),
        ] {
            let (said, refused) = send(&mut client, &attempt, &world.wide()).await;
            assert!(!refused, "{said}");
            assert_eq!(std::fs::read_to_string(&other).unwrap(), content);
            assert_eq!(hard.metadata().unwrap().ino(), inode);
        }
        // A link is removed and copied as a link, whatever it leads to.
        let before = world.kept();
        let taken = world.work.join("taken");
        let link = world.work.join("link-to-file");
        let copy = json!({"sourcePath": link, "destinationPath": taken, "recursive": false});
        let attempt = vec![("fs/copy", copy), ("fs/remove", json!({"path": link}))];
        let (said, refused) = send(&mut client, &attempt, &world.wide()).await;
        assert!(!refused, "{said}");
        assert_eq!(std::fs::read_link(&taken).unwrap(), world.outside.join("secret"));
        assert!(link.symlink_metadata().is_err());
        assert_eq!(world.kept(), before);
    }
}

/// Requests for set-id bits are refused, and copies drop them.
#[tokio::test]
async fn no_method_creates_a_set_id_file() {
    for nobody in users() {
        let world = World::new(nobody);
        let (file, taken) = (world.work.join("file"), world.work.join("taken"));
        let opened = world.work.join("opened");
        let server = world.server();
        let mut client = server.client().await;
        let mode = |path: &Path| path.metadata().unwrap().mode() & 0o7777;
        for (bits, refused) in [(0o4755, true), (0o2755, true), (0o755, false)] {
            for (method, params) in [
                ("fs/setMode", json!({"path": file, "mode": bits})),
                ("fs/writeFile", json!({"path": taken, "dataBase64": "eA==", "mode": bits})),
                (
                    "fs/open",
                    json!({"handleId": "h", "path": opened, "mode": "replace", "permissions": bits}),
                ),
            ] {
                let (said, was) = send(&mut client, &vec![(method, params)], &world.wide()).await;
                assert_eq!(was, refused, "{method} {bits:o}: {said}");
            }
            // A refused request leaves nothing behind.
            assert_eq!((taken.exists(), opened.exists()), (!refused, !refused), "{bits:o}");
            world.arrange();
        }
        let tree = world.work.join("tree");
        std::fs::create_dir(&tree).unwrap();
        std::fs::write(tree.join("tool"), "x").unwrap();
        world.arrange();
        let set = |path: &Path, bits| {
            std::fs::set_permissions(path, PermissionsExt::from_mode(bits)).unwrap();
        };
        set(&tree.join("tool"), 0o4755);
        set(&tree, 0o2755);
        let copy = json!({"sourcePath": tree, "destinationPath": taken, "recursive": true});
        let (said, refused) = send(&mut client, &vec![("fs/copy", copy)], &world.wide()).await;
        assert!(!refused, "{said}");
        assert_eq!((mode(&taken), mode(&taken.join("tool"))), (0o755, 0o755));
        let write = json!({"path": tree.join("tool"), "dataBase64": "eQ==", "atomic": true});
        let (said, refused) =
            send(&mut client, &vec![("fs/writeFile", write)], &world.wide()).await;
        assert!(!refused, "{said}");
        assert_eq!(mode(&tree.join("tool")), 0o755);
    }
}

/// Requests do not wait for special files.
#[tokio::test]
async fn pipes_and_devices_are_refused_at_once() {
    for nobody in users() {
        let world = World::new(nobody);
        let fifo = world.work.join("fifo");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &fifo,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::from_raw_mode(0o666),
            0,
        )
        .unwrap();
        world.arrange();
        let server = world.server();
        let mut client = server.client().await;
        let taken = world.work.join("taken");
        for sandbox in [world.wide(), world.narrow()] {
            for path in [fifo.as_path(), Path::new("/dev/zero"), Path::new("/dev/tty")] {
                for (method, params) in [
                    ("fs/readFile", json!({"path": path})),
                    ("fs/open", json!({"handleId": "h", "path": path})),
                    ("fs/open", json!({"handleId": "h", "path": path, "mode": "replace"})),
                    ("fs/writeFile", json!({"path": path, "dataBase64": "eA=="})),
                    (
                        "fs/copy",
                        json!({"sourcePath": path, "destinationPath": taken, "recursive": true}),
                    ),
                ] {
                    let mut params = params.clone();
                    params["sandbox"] = sandbox.clone();
                    let answer = client.call(method, params).await;
                    assert_eq!(answer["error"]["code"], -32600, "{method} {path:?}: {answer}");
                }
            }
        }
    }
}

/// A watch reports only readable paths.
#[tokio::test]
async fn changes_of_denied_paths_are_not_reported() {
    for nobody in users() {
        let world = World::new(nobody);
        let server = world.server();
        let mut client = server.client().await;
        let sandbox = world.denying();
        let watch = |id: i64, path: &Path| json!({"watchId": id, "path": path, "debounceMs": 1, "sandbox": sandbox});
        client.call("fs/watch", watch(1, &world.outside)).await;
        client.call("fs/watch", watch(2, &world.outside.join("secret"))).await;
        client.call("fs/watch", watch(3, &world.work.join("link-to-directory"))).await;
        client.call("fs/watch", watch(4, &world.base)).await;
        let missing = [world.outside.join("new"), world.work.join("link-to-directory/new")];
        let missing = json!({"watchId": 5, "missing": missing, "present": null,
                             "sandbox": sandbox});
        client.call("fs/watchMissing", missing).await;
        let seen = client.call("fs/watch", watch(6, &world.work.join("real"))).await;
        assert_eq!(seen["result"], json!({}), "{seen}");
        std::fs::write(world.outside.join("new"), SECRET).unwrap();
        std::fs::write(world.outside.join("secret"), SECRET).unwrap();
        std::fs::write(world.work.join("real/new"), "").unwrap();
        // One helper has all the watches, so a report of the outside would have arrived by now.
        loop {
            let notice = client.notification().await;
            assert!(!notice.to_string().contains("/outside"), "{notice}");
            assert_ne!(notice["params"]["watchId"], 5, "{notice}");
            if notice["params"]["watchId"] == 6 {
                break;
            }
        }
    }
}
