//! Every error response has a kind.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use codex_exec_server_protocol::ErrorKind::{self, *};
use codex_exec_server_protocol::{FileMethod, Method};
use serde_json::{Value, json};

use crate::support::*;

/// A directory with every kind of file.
struct Tree(tempfile::TempDir);

impl Tree {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        std::fs::write(at("file"), "text").unwrap();
        std::fs::write(at("broken"), "\x01no program").unwrap();
        std::fs::set_permissions(at("broken"), PermissionsExt::from_mode(0o755)).unwrap();
        std::fs::create_dir_all(at("full/inner")).unwrap();
        std::os::unix::fs::symlink("file", at("link")).unwrap();
        std::os::unix::fs::symlink("loop", at("loop")).unwrap();
        Self(directory)
    }

    fn path(&self, name: &str) -> &str {
        // Leaked: a few dozen short strings of one test.
        Box::leak(self.0.path().join(name).to_str().unwrap().to_owned().into_boxed_str())
    }
}

fn read_only() -> Value {
    json!({"permissions": {"type": "read-only"}, "cwd": "file:///"})
}

#[tokio::test]
async fn failures_of_processes_have_kinds() {
    let tree = Tree::new();
    let mut client = Client::ready(&server()).await;
    client.start(start("taken", &["sleep", "1000"])).await.unwrap();
    let plain = |argv: &[&str]| start("new", argv);
    let cases = [
        (start("taken", &["true"]), ProcessExists),
        (plain(&["no-such-program"]), ProgramNotFound),
        (plain(&["/no/such/program"]), ProgramNotFound),
        (plain(&[tree.path("file")]), ProgramNotExecutable),
        (plain(&[tree.path("broken")]), ProgramNotExecutable),
        (plain(&[tree.path("file/x")]), ProgramNotExecutable),
        (plain(&[tree.path("full")]), ProgramNotExecutable),
        (plain(&["true"]).with("cwd", tree.path("none")), WorkingDirectoryMissing),
        (plain(&["true"]).with("cwd", tree.path("file")), WorkingDirectoryMissing),
        (plain(&["true"]).with("cwd", tree.path("loop")), WorkingDirectoryMissing),
        (plain(&["true"]).with("cwd", "relative"), InvalidParams),
        (plain(&[]), InvalidParams),
        (plain(&["a\0b"]), InvalidParams),
        (plain(&["true"]).with("envPolicy", json!({"inherit": "everything"})), InvalidParams),
        (plain(&["true"]).with("retain", json!({"bytes": 1_u64 << 60})), LimitReached),
        (plain(&["true"]).with("shellSnapshot", json!({})), InvalidParams),
        (plain(&["true"]).with("sandbox", read_only()), SandboxUnavailable),
    ];
    for (start, kind) in cases {
        let params = start.0;
        assert_eq!(client.kind("process/start", params.clone()).await, kind, "{params}");
        let tty = Start(params).tty().0;
        assert_eq!(client.kind("process/start", tty.clone()).await, kind, "{tty}");
    }
    let none = json!({"processId": "none", "rows": 1, "cols": 1});
    assert_eq!(client.kind("process/read", none.clone()).await, UnknownProcess);
    assert_eq!(client.kind("process/resize", none).await, UnknownProcess);
    let size = json!({"processId": "taken", "rows": 1, "cols": 1});
    assert_eq!(client.kind("process/resize", size).await, NoTerminal);
    let write = json!({"processId": "taken", "chunk": "", "writeId": ""});
    assert_eq!(client.kind("process/write", write).await, InvalidParams);
    assert_eq!(client.kind("no/such/method", json!({})).await, MethodNotFound);
    assert_eq!(client.kind("initialize", json!({"clientName": "x"})).await, AlreadyInitialized);
}

#[tokio::test]
async fn failures_of_sessions_have_kinds() {
    let server = server();
    let mut first = Client::memory(&server);
    assert_eq!(first.kind("process/list", json!({})).await, NotInitialized);
    let none = json!({"clientName": "x", "resumeSessionId": "none"});
    assert_eq!(first.kind("initialize", none).await, UnknownSession);
    let answer = first.call("initialize", json!({"clientName": "x"})).await.unwrap();
    assert_eq!(first.kind("process/list", json!({})).await, NotInitialized);
    let same = json!({"clientName": "x", "resumeSessionId": answer["sessionId"]});
    let second = Client::memory(&server).kind("initialize", same).await;
    assert_eq!(second, SessionAttached);
}

#[tokio::test]
async fn failures_of_files_have_kinds() {
    let tree = Tree::new();
    let mut client = Client::ready(&server()).await;
    let path = |name: &str| json!({"path": tree.path(name)});
    let with = |name: &str, more: Value| {
        let mut params = path(name);
        params.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        params
    };
    let two = |from: &str, to: &str| json!({"sourcePath": tree.path(from), "destinationPath": tree.path(to), "recursive": true});
    let long = "x".repeat(300);
    client.call("fs/open", with("file", json!({"handleId": "h"}))).await.unwrap();
    let cases = [
        ("fs/readFile", path("none"), PathNotFound),
        ("fs/readFile", path("file/x"), NotADirectory),
        ("fs/readFile", path("full"), NotARegularFile),
        ("fs/readFile", path("loop"), InvalidPath),
        ("fs/readFile", path(&long), InvalidPath),
        ("fs/readFile", with("link", json!({"followSymlinks": false})), SymlinkRefused),
        ("fs/readFile", json!({"path": ""}), InvalidParams),
        ("fs/readFile", with("file", json!({"sandbox": read_only()})), SandboxUnavailable),
        ("fs/readDirectory", path("file"), NotADirectory),
        ("fs/createDirectory", with("full", json!({"recursive": false})), AlreadyExists),
        ("fs/createDirectory", path("file"), AlreadyExists),
        ("fs/remove", with("full", json!({"recursive": false})), DirectoryNotEmpty),
        ("fs/writeFile", json!({"path": "/dev/full", "dataBase64": "eA=="}), NotARegularFile),
        ("fs/writeFile", with("x", json!({"dataBase64": "!"})), InvalidParams),
        ("fs/copy", two("full", "full/inner/copy"), Refused),
        ("fs/copy", two("none", "copy"), PathNotFound),
        ("fs/rename", two("none", "copy"), PathNotFound),
        ("fs/open", with("file", json!({"handleId": "h"})), IdInUse),
        ("fs/readBlock", json!({"handleId": "none", "offset": 0, "len": 1}), UnknownFileHandle),
        ("fs/readBlock", json!({"handleId": "h", "offset": 0, "len": 0}), InvalidParams),
        ("fs/writeBlock", json!({"handleId": "h", "offset": 0, "chunk": "eA=="}), InvalidParams),
        ("fs/search", with("full", json!({"pattern": "("})), InvalidParams),
        ("fs/watch", with("none", json!({"watchId": 1})), PathNotFound),
    ];
    for (method, params, kind) in cases {
        assert_eq!(client.kind(method, params.clone()).await, kind, "{method} {params}");
    }
    for id in 0..1000 {
        let open = with("file", json!({"handleId": format!("h{id}")}));
        if client.call("fs/open", open.clone()).await.is_err() {
            assert_eq!(client.kind("fs/open", open).await, LimitReached);
            return;
        }
    }
    panic!("there is a limit on open handles");
}

#[tokio::test]
async fn failures_of_fetches_have_kinds() {
    let mut client = Client::ready(&server()).await;
    let fetch = |url: &str| json!({"requestId": "r", "method": "GET", "url": url, "headers": []});
    assert_eq!(client.kind("http/request", fetch("http://127.0.0.1:1/")).await, HttpFailed);
    assert_eq!(client.kind("http/request", fetch("ftp://x/")).await, InvalidParams);
}

/// Valid params of a method.
fn params(method: Method, tree: &Tree) -> Value {
    use Method::*;
    match method {
        Initialize => json!({"clientName": "x"}),
        ProcessStart => start("p", &["true"]).0,
        ProcessRead => json!({"processId": "p", "afterSeq": 0, "maxBytes": 9, "waitMs": 0}),
        ProcessWrite => json!({"processId": "p", "chunk": "eA==", "writeId": "w"}),
        ProcessSignal => json!({"processId": "p", "signal": "interrupt"}),
        ProcessTerminate | ProcessScreen => json!({"processId": "p"}),
        ProcessResize => json!({"processId": "p", "rows": 1, "cols": 1}),
        NetworkUpdateRules => json!({"processId": "p", "rules": {"domains": {"x": "allow"}}}),
        ProcessList | SessionList | EnvironmentInfo | EnvironmentStatus => json!({}),
        EnvironmentConfigRead => {
            json!({"cwd": tree.path("full"), "configPaths": [["x"]], "requirementsPaths": []})
        }
        CapabilityRootsDiscover => json!({"roots": [{"id": "r", "path": tree.path("full")}]}),
        CapabilitiesDiscover => json!({"cwd": tree.path("full")}),
        File(method) => file_params(method, tree),
        HttpRequest => {
            json!({"requestId": "r", "method": "GET", "url": "http://127.0.0.1:1/", "headers": []})
        }
    }
}

fn file_params(method: FileMethod, tree: &Tree) -> Value {
    let (file, new) = (tree.path("file"), tree.path("new"));
    let options = json!({"maxDepth": 3, "maxDirectories": 9, "maxEntries": 9,
                         "followDirectorySymlinks": false});
    match method {
        FileMethod::ReadFile | FileMethod::GetMetadata | FileMethod::Canonicalize => {
            json!({"path": file})
        }
        FileMethod::ReadDirectory => json!({"path": tree.path("full")}),
        FileMethod::Open => json!({"handleId": "h", "path": file, "mode": "read"}),
        FileMethod::ReadBlock => json!({"handleId": "h", "offset": 0, "len": 1}),
        FileMethod::WriteBlock => json!({"handleId": "h", "offset": 0, "chunk": "eA=="}),
        FileMethod::Close => json!({"handleId": "h", "commit": true}),
        FileMethod::WriteFile => json!({"path": new, "dataBase64": "eA==", "mode": 0o600}),
        FileMethod::CreateDirectory | FileMethod::Remove => {
            json!({"path": new, "recursive": false, "force": false})
        }
        FileMethod::Walk => json!({"path": tree.path("full"), "options": options}),
        FileMethod::Copy | FileMethod::Rename => {
            json!({"sourcePath": new, "destinationPath": tree.path("newer"), "recursive": false})
        }
        FileMethod::WatchMissing => json!({"watchId": 1, "missing": [tree.path("none")]}),
        FileMethod::Symlink => json!({"path": tree.path("sym"), "target": "file"}),
        FileMethod::SetMode => json!({"path": new, "mode": 0o600}),
        FileMethod::Search => json!({"path": tree.path("full"), "pattern": "x", "searchId": "s"}),
        FileMethod::CancelSearch => json!({"searchId": "s"}),
        FileMethod::Glob => json!({"path": tree.path("full"), "patterns": ["*"]}),
        FileMethod::Watch => json!({"watchId": 2, "path": tree.path("full")}),
        FileMethod::Unwatch => json!({"watchId": 2}),
    }
}

/// An invalid value for a member: of another type, out of range, or a name that does not exist. No path
/// leads out of the tree to an existing file.
fn odd(random: &mut fastrand::Rng, tree: &Tree) -> Value {
    let paths = ["none", "file/x", "full", "loop", "none/deeper"];
    match random.u8(..10) {
        0 => Value::Null,
        1 => json!(random.i64(-2..100)),
        2 => json!(u64::MAX),
        3 => json!(random.bool()),
        4 => json!([]),
        5 => json!({"x": [1.5]}),
        6 => json!(""),
        7 => json!("no\0such"),
        8 => json!("x".repeat(random.usize(..300))),
        _ => json!(tree.path(paths[random.usize(..paths.len())])),
    }
}

/// The test client fails on an error without a kind, or with a kind that does not match its code; this
/// causes as many errors as possible.
#[tokio::test]
async fn every_error_of_a_mutated_request_has_a_kind() {
    let seed = 0x6b69_6e64;
    let mut random = fastrand::Rng::with_seed(seed);
    let tree = Tree::new();
    let server = server();
    let mut refused = BTreeSet::new();
    let mut kinds = std::collections::HashSet::<ErrorKind>::new();
    for method in Method::all() {
        let mut client = match method {
            Method::Initialize => Client::memory(&server),
            _ => Client::ready(&server).await,
        };
        let name = method.name();
        let mut wrong = vec![json!([]), json!("x"), json!(7), json!({})];
        for _ in 0..40 {
            let mut params = params(method, &tree);
            let members = params.as_object_mut().unwrap();
            let names: Vec<String> = members.keys().cloned().collect();
            if names.is_empty() {
                break;
            }
            let member = &names[random.usize(..names.len())];
            match random.u8(..4) {
                0 => drop(members.remove(member)),
                _ => drop(members.insert(member.clone(), odd(&mut random, &tree))),
            }
            // Long polls and slow requests are not tested here.
            if !(method == Method::ProcessRead && member == "waitMs") {
                wrong.push(params);
            }
        }
        for params in wrong {
            let id = client.send_request(name, params).await;
            if client.response(id).await.is_err() {
                refused.insert(name);
                kinds.insert(client.kind_of_response(id));
            }
        }
    }
    // These methods have no params.
    let without = ["environment/info", "environment/status", "process/list", "session/list"];
    let all: BTreeSet<_> = Method::all().map(Method::name).collect();
    let never: Vec<_> = all.difference(&refused).copied().collect();
    assert_eq!(never, without, "seed {seed}");
    for kind in [InvalidParams, UnknownProcess, PathNotFound, UnknownFileHandle, NotADirectory] {
        assert!(kinds.contains(&kind), "{kind} was not met: {kinds:?}");
    }
    assert!(Path::new(tree.path("file")).exists(), "the tree is still there");
}
