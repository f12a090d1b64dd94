//! `codex mcp`: whatever a model sends, nothing outside the policy changes, and no command is lost.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use fastrand::Rng;
use serde_json::{Value, json};

use crate::support::codex;

/// A client that speaks plain JSON over stdio.
struct Mcp {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
    last_id: u64,
}

impl Mcp {
    fn start(command: &mut Command) -> Self {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        let mut mcp = Self { child, stdin, stdout, last_id: 0 };
        let hello = json!({"protocolVersion": "2025-06-18", "capabilities": {},
            "clientInfo": {"name": "test", "version": "0"}});
        let answer = mcp.request("initialize", &hello);
        assert_eq!(answer["result"]["protocolVersion"], "2025-06-18");
        mcp.send(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"}));
        mcp
    }

    fn in_workspace(root: &Path, policy: &Path) -> Self {
        let mut command = codex();
        // The policy grants the directory that it names.
        command.env_remove("TMPDIR");
        Self::start(command.arg("mcp").arg("--cwd").arg(root).arg("--sandbox").arg(policy))
    }

    fn send(&mut self, message: &Value) {
        writeln!(self.stdin.as_ref().unwrap(), "{message}").unwrap();
    }

    fn ask(&mut self, method: &str, params: &Value) -> u64 {
        self.last_id += 1;
        let id = self.last_id;
        self.send(&json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}));
        id
    }

    fn next(&mut self) -> Value {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
    }

    fn request(&mut self, method: &str, params: &Value) -> Value {
        let id = self.ask(method, params);
        loop {
            let message = self.next();
            if message["id"] == id {
                return message;
            }
        }
    }

    fn call(&mut self, name: &str, arguments: &Value) -> Value {
        self.request("tools/call", &json!({"name": name, "arguments": arguments}))["result"].clone()
    }

    /// Closes stdin and waits for the end.
    fn end(mut self) {
        drop(self.stdin.take());
        assert!(crate::support::wait(&mut self.child).success());
    }
}

impl Drop for Mcp {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn text(result: &Value) -> String {
    let blocks = result["content"].as_array().into_iter().flatten();
    blocks.filter_map(|block| block["text"].as_str()).collect()
}

/// A workspace, a directory outside it, and a policy that permits writing to the workspace alone.
struct World {
    _directory: tempfile::TempDir,
    root: PathBuf,
    outside: PathBuf,
    policy: PathBuf,
}

impl World {
    fn new() -> Self {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = directory.path().to_owned();
        let (root, outside, policy) =
            (path.join("work"), path.join("outside"), path.join("policy.json"));
        std::fs::create_dir_all(outside.join("deep")).unwrap();
        std::fs::create_dir(&root).unwrap();
        for name in ["a", "b.txt", "deep/c"] {
            std::fs::write(outside.join(name), format!("old {name}\n")).unwrap();
        }
        symlink(&outside, root.join("link")).unwrap();
        symlink(outside.join("a"), root.join("link-a")).unwrap();
        std::fs::write(root.join("inside"), "old\n").unwrap();
        let text = r#"{"type":"workspace-write","exclude_slash_tmp":true}"#;
        std::fs::write(&policy, text).unwrap();
        Self { _directory: directory, root, outside, policy }
    }

    /// Everything outside the workspace: names, kinds, modes, contents.
    fn snapshot(&self) -> BTreeMap<PathBuf, (u32, Vec<u8>)> {
        fn add(path: &Path, found: &mut BTreeMap<PathBuf, (u32, Vec<u8>)>) {
            let metadata = std::fs::symlink_metadata(path).unwrap();
            let content =
                if metadata.is_file() { std::fs::read(path).unwrap() } else { Vec::new() };
            found.insert(path.to_owned(), (metadata.mode(), content));
            if metadata.is_dir() {
                for entry in std::fs::read_dir(path).unwrap() {
                    add(&entry.unwrap().path(), found);
                }
            }
        }
        let mut found = BTreeMap::new();
        add(&self.outside, &mut found);
        add(&self.policy, &mut found);
        found
    }
}

/// A path that may lead outside, in one of many spellings.
fn some_path(random: &mut Rng, world: &World) -> String {
    let outside = world.outside.to_str().unwrap();
    let name = ["a", "b.txt", "deep/c", "new", "deep/new/x", ""][random.usize(..6)];
    match random.u32(..10) {
        0 => format!("{outside}/{name}"),
        1 => format!("../outside/{name}"),
        2 => format!("link/{name}"),
        3 => "link-a".to_owned(),
        4 => format!("file://{outside}/{name}"),
        5 => format!("./x/../../outside/./{name}"),
        6 => format!("file://{}/%2e%2e/outside/{name}", world.root.display()),
        7 => world.policy.display().to_string(),
        8 => format!("/proc/self/root{outside}/{name}"),
        _ => ["inside", "made/here", "."][random.usize(..3)].to_owned(),
    }
}

/// What a model might send to widen its policy.
fn widening(random: &mut Rng, world: &World) -> (&'static str, Value) {
    match random.u32(..10) {
        0 => ("sandbox", json!({"type": "danger-full-access"})),
        1 => ("sandbox", json!("disabled")),
        2 => ("sandbox", Value::Null),
        3 => ("policy", json!({"permissions": {"type": "disabled"}})),
        4 => ("sandbox_permissions", json!("require_escalated")),
        5 => ("with_escalated_permissions", json!(true)),
        6 => ("on", json!("stdio:sh")),
        7 => ("env", json!({"TMPDIR": world.outside})),
        8 => ("env", json!({"TMPDIR": world.root.parent(), "HOME": "/"})),
        _ => ("no_sandbox", json!(true)),
    }
}

fn some_call(random: &mut Rng, world: &World) -> (&'static str, Value) {
    let path = some_path(random, world);
    let quoted = format!("'{}'", path.replace("file://", ""));
    let (name, mut arguments) = match random.u32(..9) {
        0 => {
            let scripts = [
                format!("echo new > {quoted}"),
                format!("rm -rf {quoted}; chmod 777 {quoted}; mkdir -p {quoted}/q"),
                format!("mv inside {quoted}; ln -s {quoted} made-link; echo x >> made-link"),
                format!(
                    "unshare -Urm sh -c 'mount --bind . {path}; echo x > {quoted}'; touch {quoted}"
                ),
                format!("cd {quoted} && touch here"),
            ];
            ("run", json!({"command": scripts[random.usize(..scripts.len())]}))
        }
        1 => ("run", json!({"argv": ["touch", path.replace("file://", "")], "cwd": "."})),
        2 => ("run", json!({"command": "touch new; echo x > a", "cwd": path})),
        3 => ("write_file", json!({"path": path, "content": "new"})),
        4 => ("write_file", json!({"path": path, "content": "bmV3", "base64": true})),
        5 => {
            let written = path.replace("file://", "");
            let section = match random.u32(..3) {
                0 => format!("*** Add File: {written}\n+new\n"),
                1 => format!("*** Delete File: {written}\n"),
                _ => format!("*** Update File: inside\n*** Move to: {written}\n@@\n-old\n+new\n"),
            };
            ("edit", json!({"patch": format!("*** Begin Patch\n{section}*** End Patch")}))
        }
        6 => {
            let patch = "*** Begin Patch\n*** Add File: new\n+x\n*** End Patch";
            ("edit", json!({"patch": patch, "cwd": path}))
        }
        7 => ("fetch", json!({"url": "http://127.0.0.1:1/", "method": "POST"})),
        _ => {
            ("read_file", json!({"path": path, "offset": random.u64(..), "length": random.u64(..)}))
        }
    };
    if random.u32(..4) == 0 {
        let (member, value) = widening(random, world);
        arguments[member] = value;
    }
    if random.u32(..8) == 0 {
        let members = ["path", "cwd", "command", "env", "wait_seconds"];
        let junk = [json!(5), json!([]), json!("\u{0}"), json!(-1e300), json!({"a": "b"})];
        arguments[members[random.usize(..members.len())]] =
            junk[random.usize(..junk.len())].clone();
    }
    (name, arguments)
}

#[test]
fn no_arguments_change_anything_outside_the_policy() {
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let mut random = Rng::with_seed(seed);
    let world = World::new();
    let mut mcp = Mcp::in_workspace(&world.root, &world.policy);
    let before = world.snapshot();
    let (mut succeeded, mut failed) = (0, 0);
    for round in 0..150 {
        let (name, arguments) = some_call(&mut random, &world);
        let answer = mcp.request("tools/call", &json!({"name": name, "arguments": arguments}));
        match answer["result"]["isError"] == false {
            true => succeeded += 1,
            false => failed += 1,
        }
        assert_eq!(world.snapshot(), before, "seed {seed}, round {round}: {name} {arguments}");
    }
    assert!(succeeded > 20 && failed > 20, "{succeeded} calls succeeded, {failed} failed");
    // The tools do change what the policy permits.
    assert_eq!(
        mcp.call("write_file", &json!({"path": "control", "content": "x"}))["isError"],
        false
    );
    mcp.call("run", &json!({"command": "echo y > control-too"}));
    assert_eq!(std::fs::read_to_string(world.root.join("control")).unwrap(), "x");
    assert_eq!(std::fs::read_to_string(world.root.join("control-too")).unwrap(), "y\n");
    mcp.end();
}

#[test]
fn cancelled_run_keeps_its_command() {
    let world = World::new();
    let mut mcp = Mcp::in_workspace(&world.root, &world.policy);
    let command = "echo started; read line; echo got $line";
    let arguments = json!({"command": command, "keep_stdin": true, "wait_seconds": 50});
    let id = mcp.ask("tools/call", &json!({"name": "run", "arguments": arguments}));
    // The command is there once it is listed.
    while !text(&mcp.call("list", &json!({}))).contains("p1") {}
    mcp.send(&json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id}}));
    let mut seen =
        text(&mcp.call("write", &json!({"handle": "p1", "text": "it\n", "wait_seconds": 20})));
    while !seen.contains("exited with code 0") {
        seen += &text(&mcp.call("output", &json!({"handle": "p1", "wait_seconds": 20})));
    }
    assert!(seen.contains("got it"), "{seen}");
    mcp.end();
}

#[test]
fn commands_end_with_their_client() {
    let world = World::new();
    let mut mcp = Mcp::in_workspace(&world.root, &world.policy);
    let fifo = world.root.join("alive");
    mcp.call("run", &json!({"command": "mkfifo alive"}));
    let command = "(echo up; exec sleep 1000) > alive";
    let started = mcp.call("run", &json!({"command": command, "wait_seconds": 0}));
    assert_eq!(started["structuredContent"]["running"], true, "{started}");
    let mut pipe = std::fs::File::open(&fifo).unwrap();
    let mut up = [0; 3];
    pipe.read_exact(&mut up).unwrap();
    mcp.end();
    // The end of the pipe comes when the last process that holds it has ended.
    let mut rest = String::new();
    pipe.read_to_string(&mut rest).unwrap();
    assert_eq!((&up, rest.as_str()), (b"up\n", ""));
}

#[test]
fn malformed_messages_are_answered_and_survived() {
    let world = World::new();
    let mut mcp = Mcp::in_workspace(&world.root, &world.policy);
    for (line, code) in [
        ("{", -32700),
        ("[]", -32600),
        (r#"{"jsonrpc":"1.0","id":1,"method":"ping"}"#, -32600),
        (r#"{"jsonrpc":"2.0","id":1,"method":"no/such"}"#, -32601),
        (r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"no_such"}}"#, -32602),
    ] {
        writeln!(mcp.stdin.as_ref().unwrap(), "{line}").unwrap();
        assert_eq!(mcp.next()["error"]["code"], code, "{line}");
    }
    assert_eq!(mcp.request("ping", &json!({}))["result"], json!({}));
    mcp.end();
}

/// Sends one HTTP request and returns the response.
fn post(address: &str, headers: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(
        stream,
        "POST /mcp HTTP/1.1\r\n{headers}Content-Type: application/json\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// The status line of the response to `initialize`.
fn status(address: &str, headers: &str) -> String {
    let body = r#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{}}"#;
    post(address, headers, body).lines().next().unwrap_or_default().to_owned()
}

/// `codex mcp --http` with this token and policy, and the address that it prints.
fn http_server(world: &World, token: &Path) -> (Child, String) {
    let mut command = codex();
    command.args(["mcp", "--http", "127.0.0.1:0", "--cwd"]).arg(&world.root);
    command.arg("--http-token-file").arg(token).arg("--sandbox").arg(&world.policy);
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.split("http://").nth(1).and_then(|rest| rest.split('/').next()).unwrap();
    (child, address.to_owned())
}

/// A command in a sandbox with network reads no token, and is refused with one.
#[test]
fn commands_cannot_call_the_tools_of_their_server() {
    let world = World::new();
    std::fs::write(&world.policy, r#"{"type":"workspace-write","network_access":true}"#).unwrap();
    let token = world.outside.join("token");
    std::fs::write(&token, "secret\n").unwrap();
    let (mut child, address) = http_server(&world, &token);
    let (host, port) = address.split_once(':').unwrap();
    let headers = format!(
        "Host: {address}\r\nAuthorization: Bearer secret\r\nAccept: application/json, text/event-stream\r\n"
    );
    let hello = json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
        "protocolVersion": "2025-06-18", "capabilities": {},
        "clientInfo": {"name": "test", "version": "0"}}});
    let answer = post(&address, &headers, &hello.to_string());
    let session = answer.lines().find(|line| line.to_lowercase().starts_with("mcp-session-id:"));
    let headers = format!("{headers}{}\r\n", session.unwrap_or_else(|| panic!("{answer}")));
    let ready = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
    post(&address, &headers, &ready.to_string());
    let script = format!(
        "cat {} 2>/dev/null; exec 3<>/dev/tcp/{host}/{port}; \
         printf 'POST /mcp HTTP/1.1\\r\\nHost: {address}\\r\\nAuthorization: Bearer secret\\r\\n\
         Content-Length: 2\\r\\nConnection: close\\r\\n\\r\\n{{}}' >&3; head -n 1 <&3; echo done",
        token.display()
    );
    let call = json!({"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {
        "name": "run", "arguments": {"argv": ["bash", "-c", script]}}});
    let answer = post(&address, &headers, &call.to_string());
    assert!(answer.contains("403") && answer.contains("done"), "{answer}");
    assert!(!answer.contains("secret"), "{answer}");
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn http_refuses_web_pages_and_needs_a_token_beyond_loopback() {
    let world = World::new();
    let refused = codex().args(["mcp", "--http", "0.0.0.0:0"]).output().unwrap();
    assert!(!refused.status.success());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--http-token-file"));

    let token = world.root.join("token");
    std::fs::write(&token, "secret\n").unwrap();
    let (mut child, address) = http_server(&world, &token);
    let host = format!("Host: {address}\r\n");
    let bearer = "Authorization: Bearer secret\r\n";
    for (headers, expected) in [
        (format!("{host}{bearer}"), "200"),
        (format!("{host}{bearer}Origin: http://localhost:3000\r\n"), "200"),
        (host.clone(), "401"),
        (format!("{host}Authorization: Bearer wrong\r\n"), "401"),
        (format!("{host}{bearer}Origin: https://evil.example\r\n"), "403"),
        (format!("Host: evil.example\r\n{bearer}"), "403"),
    ] {
        let found = status(&address, &headers);
        assert!(found.contains(expected), "{headers}: {found}");
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn schema_and_openrpc_documents_are_printed() {
    for (flag, member) in [(None, "$defs"), (Some("--openrpc"), "openrpc")] {
        let output = codex().args(["protocol", "schema"]).args(flag).output().unwrap();
        assert!(output.status.success());
        let document: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(document[member].is_object() || document[member].is_string(), "{member}");
    }
}
