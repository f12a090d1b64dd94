//! The operator's policy: random policies and random requests, judged by what changed on the disk and by what
//! was read.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::support::{Client, Running, codex, start};

/// Directories of the tree, each with files.
const DIRECTORIES: [&str; 7] = ["a", "a/b", "a/b/c", "d", "d/e", "f", "f/g"];

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Access {
    Deny,
    Read,
    Write,
}

/// The policy as the operator means it: of the paths around a path the longest one decides.
#[derive(Debug)]
struct Model(Vec<(PathBuf, Access)>);

impl Model {
    fn access(&self, path: &Path) -> Access {
        let around = self.0.iter().filter(|(root, _)| path.starts_with(root));
        let length = |root: &PathBuf| root.components().count();
        let longest = around.clone().map(|(root, _)| length(root)).max();
        let deciding = around.filter(|(root, _)| Some(length(root)) == longest);
        // Of equal paths: denied before written, written before read.
        let mut deciding: Vec<Access> = deciding.map(|(_, access)| *access).collect();
        deciding.sort();
        match deciding.first() {
            Some(Access::Deny) | None => Access::Deny,
            Some(_) => *deciding.last().unwrap(),
        }
    }
}

/// Everything below a directory: its kind, mode, and content or target. Links are not followed. Placeholders,
/// the empty sticky directories that hold denied names while a sandbox runs, do not count.
fn snapshot(directory: &Path) -> BTreeMap<PathBuf, (u32, Vec<u8>)> {
    let mut found = BTreeMap::new();
    let mut directories = vec![directory.to_owned()];
    while let Some(directory) = directories.pop() {
        let entries = std::fs::read_dir(&directory);
        let entries = entries.unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
        for entry in entries.flatten() {
            let path = entry.path();
            let metadata = path.symlink_metadata().unwrap();
            if metadata.is_dir() && metadata.mode() & 0o1000 != 0 && is_empty(&path) {
                continue;
            }
            let content = if metadata.is_symlink() {
                std::fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes()
            } else if metadata.is_file() {
                std::fs::read(&path).unwrap()
            } else {
                // `cp -r` copies what hides a denied file as what it is: neither a file nor a directory.
                if metadata.is_dir() {
                    directories.push(path.clone());
                }
                Vec::new()
            };
            found.insert(path, (metadata.mode(), content));
        }
    }
    found
}

fn is_empty(directory: &Path) -> bool {
    std::fs::read_dir(directory).is_ok_and(|mut entries| entries.next().is_none())
}

fn build(root: &Path) {
    for directory in DIRECTORIES {
        let directory = root.join(directory);
        std::fs::create_dir_all(&directory).unwrap();
        for file in ["one", "two"] {
            let path = directory.join(file);
            // What a denied file says must not be seen.
            let text = format!("<{}>\n", path.strip_prefix(root).unwrap().display());
            std::fs::write(path, text).unwrap();
        }
    }
    for (link, target) in [("a/to-d", "../d"), ("d/to-f", "../f/g"), ("f/to-one", "../a/b/one")] {
        std::os::unix::fs::symlink(target, root.join(link)).unwrap();
    }
}

struct World {
    root: PathBuf,
    random: fastrand::Rng,
    /// The paths that the policy names in the tree.
    named: Vec<PathBuf>,
}

impl World {
    /// A path of the tree, perhaps by a link, perhaps missing.
    fn path(&mut self) -> PathBuf {
        let mut path = self.root.join(DIRECTORIES[self.random.usize(..DIRECTORIES.len())]);
        if self.random.u8(..4) == 0 {
            path = self
                .root
                .join(["a/to-d", "d/to-f", "a/to-d/to-f", "a/../d"][self.random.usize(..4)]);
        }
        match self.random.u8(..4) {
            0 => path,
            1 => path.join("one"),
            2 => path.join("two"),
            _ => path.join("new"),
        }
    }

    fn uri(&mut self) -> String {
        format!("file://{}", self.path().display())
    }

    /// What a client asks for itself: nothing, everything, or some paths.
    fn sandbox(&mut self) -> Option<Value> {
        let network = ["restricted", "enabled"][self.random.usize(..2)];
        Some(match self.random.u8(..8) {
            0 | 1 => return None,
            2 => json!({"type": "danger-full-access"}),
            3 => json!({"permissions": {"type": "external", "network": network}}),
            4 => json!({"permissions": {"type": "managed", "network": network,
                "file_system": {"type": "unrestricted"}}}),
            5 => json!({"permissions": {"type": "disabled"}, "assurance": "landlock"}),
            _ => {
                let access = ["read", "write"][self.random.usize(..2)];
                let root = json!({"type": "special", "value": {"kind": "root"}});
                let mut entries = vec![json!({"path": root, "access": access})];
                for _ in 0..self.random.usize(..4) {
                    let access = ["read", "write", "write", "deny"][self.random.usize(..4)];
                    entries.push(
                        json!({"path": {"type": "path", "path": self.uri()}, "access": access}),
                    );
                }
                json!({"permissions": {"type": "managed", "network": network,
                    "file_system": {"type": "restricted", "entries": entries}}})
            }
        })
    }

    /// A shell command that reads or changes something.
    fn script(&mut self) -> String {
        let (one, other) = (self.path(), self.path());
        let (one, other) = (one.display(), other.display());
        match self.random.u8(..10) {
            0 | 1 => format!("cat {one} {other}"),
            // A link in place of what the policy names.
            9 => {
                let directory = DIRECTORIES[self.random.usize(..DIRECTORIES.len())];
                let named = self.named[self.random.usize(..self.named.len())].display();
                format!("rm -rf {named}; ln -s {}/{directory} {named}", self.root.display())
            }
            2 | 3 => format!("echo changed >> {one}"),
            4 => format!("rm -rf {one}"),
            5 => format!("mkdir -p {one}/deep && echo new > {one}/deep/file"),
            6 => format!("ln -s {one} {other}; cat {other}"),
            7 => format!("mv {one} {other}; chmod 700 {other}"),
            _ => format!("cp -r {one} {other}"),
        }
    }

    /// A request to the file system.
    fn file_request(&mut self) -> (&'static str, Value) {
        let (one, other) = (self.uri(), self.uri());
        match self.random.u8(..9) {
            0 | 1 => ("fs/readFile", json!({"path": one})),
            2 | 3 => (
                "fs/writeFile",
                json!({"path": one, "dataBase64": "Y2hhbmdlZA==",
                "atomic": self.random.bool()}),
            ),
            4 => ("fs/createDirectory", json!({"path": one, "recursive": true})),
            5 => ("fs/remove", json!({"path": one, "recursive": true, "force": true})),
            6 => {
                ("fs/copy", json!({"sourcePath": one, "destinationPath": other, "recursive": true}))
            }
            7 => (
                "fs/rename",
                json!({"sourcePath": one, "destinationPath": other, "overwrite": true}),
            ),
            _ => ("fs/symlink", json!({"path": one, "target": self.path()})),
        }
    }

    fn policy(&mut self) -> (String, Model) {
        let mut lists: [Vec<PathBuf>; 3] = Default::default();
        // The whole disk can be read, or only what programs need.
        let base = match self.random.bool() {
            true => vec!["/".to_owned()],
            false => ["/bin", "/usr", "/lib", "/lib64", "/etc"].map(str::to_owned).to_vec(),
        };
        let mut model: Vec<(PathBuf, Access)> =
            base.iter().map(|path| (path.into(), Access::Read)).collect();
        lists[1].extend(base.iter().map(PathBuf::from));
        for _ in 0..self.random.usize(1..6) {
            let kind = [0, 1, 2, 2][self.random.usize(..4)];
            let directory = DIRECTORIES[self.random.usize(..DIRECTORIES.len())];
            let path = match self.random.u8(..5) {
                0 => self.root.join(directory).join("one"),
                1 => self.root.join(directory).join("new"),
                _ => self.root.join(directory),
            };
            lists[kind].push(path.clone());
            model.push((path, [Access::Deny, Access::Read, Access::Write][kind]));
        }
        // A path that does not exist yet, below one that can be written.
        let around = self.root.join(DIRECTORIES[self.random.usize(..DIRECTORIES.len())]);
        let (kind, below) = (self.random.usize(..3), around.join("new"));
        lists[2].push(around.clone());
        lists[kind].push(below.clone());
        model.push((around, Access::Write));
        model.push((below, [Access::Deny, Access::Read, Access::Write][kind]));
        let in_tree = model.iter().filter(|(path, _)| path.starts_with(&self.root));
        self.named = in_tree.map(|(path, _)| path.clone()).collect();
        let [deny, read, write] = lists.map(|paths| json!(paths).to_string());
        (format!("deny = {deny}\nread = {read}\nwrite = {write}\n"), Model(model))
    }
}

#[tokio::test]
async fn no_request_exceeds_the_operators_policy() {
    let (mut changes, mut reads, mut refusals) = (0, 0, 0);
    let cases =
        std::env::var("POLICY_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(25);
    for seed in 0..cases {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().canonicalize().unwrap().join("tree");
        build(&root);
        let random = fastrand::Rng::with_seed(seed);
        let mut world = World { root: root.clone(), random, named: Vec::new() };
        let (text, model) = world.policy();
        let file = directory.path().join("policy.toml");
        std::fs::write(&file, &text).unwrap();
        let arguments = ["--policy", file.to_str().unwrap()];
        let mut server = Running::start(&arguments);
        let mut client = server.client().await;
        for step in 0..30 {
            // A server that starts anew knows nothing of what processes could write.
            if world.random.u8(..10) == 0 {
                drop((client, server));
                server = Running::start(&arguments);
                client = server.client().await;
            }
            let before = snapshot(&root);
            // A file that was denied all the time says something that no answer may contain.
            let denied = before.iter().filter(|(path, _)| model.access(path) == Access::Deny);
            let secrets: Vec<String> = denied
                .filter_map(|(_, (_, content))| String::from_utf8(content.clone()).ok())
                .filter(|content| content.starts_with('<'))
                .map(|content| content.trim().to_owned())
                .collect();
            let (shown, answer) = match world.random.bool() {
                true => {
                    let script = world.script();
                    let answer = run(&mut client, step, &script, world.sandbox()).await;
                    (script, answer)
                }
                false => {
                    let (method, mut params) = world.file_request();
                    if let Some(sandbox) = world.sandbox() {
                        params["sandbox"] = sandbox;
                    }
                    let shown = format!("{method} {params}");
                    let answer = client.call(method, params).await;
                    refusals += u32::from(answer.get("error").is_some());
                    let data = answer["result"]["dataBase64"].as_str().unwrap_or_default();
                    let data = base64_simd::STANDARD.decode_to_vec(data).unwrap();
                    (shown, String::from_utf8_lossy(&data).into_owned())
                }
            };
            let at = format!("seed {seed}, step {step}: {shown}\n{text}");
            for secret in &secrets {
                assert!(!answer.contains(secret), "{secret} was read, {at}");
            }
            reads += u32::from(answer.contains('<'));
            let after = snapshot(&root);
            for path in before.keys().chain(after.keys()) {
                if before.get(path) != after.get(path) {
                    assert_eq!(
                        model.access(path),
                        Access::Write,
                        "{} changed, {at}",
                        path.display()
                    );
                    changes += 1;
                }
            }
        }
    }
    // The policies are not all closed.
    assert!(changes > 50 && reads > 20 && refusals > 50, "{changes} {reads} {refusals}");
}

/// Runs a script; returns what it printed.
async fn run(client: &mut Client, step: u32, script: &str, sandbox: Option<Value>) -> String {
    let id = format!("p{step}");
    let mut params = start(&id, script);
    if let Some(sandbox) = sandbox {
        params["sandbox"] = sandbox;
    }
    let answer = client.call("process/start", params).await;
    match answer.get("result") {
        Some(started) => {
            assert_eq!(started["sandboxType"], "linuxSeccomp", "{started}");
            client.closed(&id).await.0
        }
        None => String::new(),
    }
}

#[tokio::test]
async fn a_read_only_server_serves_reading_and_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, "content").unwrap();
    let server = Running::start(&["--read-only"]);
    let mut client = server.client().await;
    let uri = format!("file://{}", file.display());
    let read = client.call("fs/readFile", json!({"path": uri})).await;
    assert_eq!(read["result"]["dataBase64"], "Y29udGVudA==", "{read}");
    let (said, code) = client.run("r", &format!("cat {}", file.display())).await;
    assert_eq!((said.as_str(), code), ("content", 0));
    let (_, code) = client.run("w", &format!("echo x > {}", file.display())).await;
    assert_ne!(code, 0);
    let write = client.call("fs/writeFile", json!({"path": uri, "dataBase64": ""})).await;
    assert!(write.get("error").is_some(), "{write}");
    assert_eq!(std::fs::read(&file).unwrap(), b"content");
    // No network: neither by the process, nor by the server for the client.
    let port = server.url.rsplit_once(':').unwrap().1.to_owned();
    let connect = format!(
        "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", {port}))' 2>/dev/null"
    );
    assert_ne!(client.run("n", &connect).await.1, 0);
    let kind = |answer: &Value| answer["error"]["data"]["kind"].clone();
    let url = format!("http://127.0.0.1:{port}/readyz");
    let http = json!({"requestId": "h", "method": "GET", "url": url});
    assert_eq!(kind(&client.call("http/request", http).await), "operatorPolicy");
    let mut managed = start("m", "true");
    managed["sandbox"] = json!({"type": "read-only"});
    managed["enforceManagedNetwork"] = json!(true);
    assert_eq!(kind(&client.call("process/start", managed).await), "operatorPolicy");
}

#[tokio::test]
async fn variables_and_requests_are_held_to_the_policy() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("policy.toml");
    std::fs::write(&file, "env = ['PATH', 'GOOD_*']\nnetwork = true\n").unwrap();
    let arguments = ["exec-server", "--policy", file.to_str().unwrap()];
    let server = Running::start_with(
        codex().args(arguments).env("GOOD_SERVER", "1").env("SECRET_SERVER", "2"),
    );
    let mut client = server.client().await;
    let mut params = start("p", "env | grep -E 'GOOD|SECRET|LD_' | sort");
    params["env"] = json!({"PATH": "/usr/bin:/bin", "GOOD_CLIENT": "3", "LD_LIBRARY_PATH": "/x"});
    params["envPolicy"] = json!({"inherit": "all", "ignoreDefaultExcludes": true, "exclude": [],
        "set": {"SECRET_SET": "4"}, "includeOnly": []});
    let answer = client.call("process/start", params).await;
    assert!(answer.get("result").is_some(), "{answer}");
    assert_eq!(client.closed("p").await.0, "GOOD_CLIENT=3\nGOOD_SERVER=1\n");
    let port = server.url.rsplit_once(':').unwrap().1.to_owned();
    let mut http = json!({"requestId": "h", "method": "GET",
        "url": format!("http://127.0.0.1:{port}/readyz"),
        "headers": [{"name": "x", "value": "", "valueEnvVar": "SECRET_SERVER"}]});
    let answer = client.call("http/request", http.clone()).await;
    assert_eq!(answer["error"]["data"]["kind"], "operatorPolicy", "{answer}");
    http["headers"][0]["valueEnvVar"] = json!("GOOD_SERVER");
    http["requestId"] = json!("i");
    let answer = client.call("http/request", http).await;
    assert!(answer["result"]["status"].is_number(), "{answer}");
    // A policy that others can write is no policy.
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
    let output = codex().args(arguments).output().unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8(output.stderr).unwrap().contains("chmod 600"));
}
