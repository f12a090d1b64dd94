//! What is configured and installed on the server's machine: their client finds it on our server, and our
//! server finds what theirs does.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;

use serde_json::{Value, json};

use crate::model::Step;
use crate::programs::{Implementation, Program, Server, home};
use crate::real_client::session;
use crate::tap::Tap;

/// An MCP server with one tool, over HTTP. It answers only those who bring the token.
struct Mcp {
    url: String,
    /// The methods that were asked for, with a token or without.
    asked: Arc<Mutex<Vec<String>>>,
}

const TOKEN: &str = "mcp-secret-7f3a";

impl Mcp {
    fn start(token: Option<&'static str>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/mcp", listener.local_addr().unwrap());
        let asked: Arc<Mutex<Vec<String>>> = Arc::default();
        let heard = asked.clone();
        thread::spawn(move || {
            for socket in listener.incoming() {
                let heard = heard.clone();
                thread::spawn(move || serve(socket.unwrap(), token, &heard));
            }
        });
        Self { url, asked }
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }
}

fn serve(mut socket: TcpStream, token: Option<&str>, heard: &Mutex<Vec<String>>) {
    let mut reader = BufReader::new(socket.try_clone().unwrap());
    let (mut request, mut length, mut authorized) = (String::new(), 0, token.is_none());
    reader.read_line(&mut request).unwrap();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap() == 0 || line.trim().is_empty() {
            break;
        }
        let Some((name, value)) = line.split_once(':') else { continue };
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = value.trim().parse().unwrap(),
            "authorization" => {
                authorized = token.is_some_and(|token| value.trim() == format!("Bearer {token}"));
            }
            _ => {}
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let method = body["method"].as_str().unwrap_or_default();
    let (status, answer) = match method {
        _ if !authorized => ("401 Unauthorized", Value::Null),
        "initialize" => (
            "200 OK",
            json!({"protocolVersion": body["params"]["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "executor-only", "version": "1"}}),
        ),
        "tools/list" => (
            "200 OK",
            json!({"tools": [{"name": "double", "description": "Doubles a number.",
                "inputSchema": {"type": "object", "properties": {"n": {"type": "number"}}}}]}),
        ),
        "tools/call" => {
            let n = body["params"]["arguments"]["n"].as_i64().unwrap_or_default();
            let text = format!("doubled-{}", 2 * n);
            ("200 OK", json!({"content": [{"type": "text", "text": text}]}))
        }
        "" => ("405 Method Not Allowed", Value::Null),
        _ => ("202 Accepted", Value::Null),
    };
    heard.lock().unwrap().push(format!("{method} {status}"));
    let text = match answer {
        Value::Null => String::new(),
        result => json!({"jsonrpc": "2.0", "id": body["id"], "result": result}).to_string(),
    };
    let _ = write!(
        socket,
        "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{text}",
        text.len()
    );
}

/// Calls the tool. Tools of an MCP server are a namespace of their own.
fn double() -> Step {
    let step = json!({"type": "function_call", "namespace": "mcp__lab", "name": "double", "call_id": "call",
        "arguments": json!({"n": 21}).to_string()});
    Box::new(move |_| step.clone())
}

/// Their client, on a server of ours whose own configuration has the MCP server.
fn on_ours(mcp: &Mcp, more: &str) -> (Vec<String>, String) {
    let config = home();
    let text = format!("[mcp_servers.lab]\nurl = \"{}\"\n{more}", mcp.url);
    std::fs::write(config.path().join("config.toml"), text).unwrap();
    let server = Server::with(Implementation::Ours, |command| {
        command.env("CODEX_HOME", config.path()).env("LAB_TOKEN", TOKEN).env("RUST_LOG", "debug");
    });
    let session = session("danger-full-access", vec![double()], |command| {
        command.env("CODEX_EXEC_SERVER_URL", &server.url);
    });
    let log = server.program.log();
    assert!(log.contains("method=\"environmentConfig/read\""), "{log}");
    (session.tool_outputs, log)
}

#[test]
#[ignore = "interop/run runs it"]
fn their_client_calls_a_tool_that_only_our_server_configures() {
    let mcp = Mcp::start(None);
    let (answers, _) = on_ours(&mcp, "");
    assert!(answers[0].contains("doubled-42"), "{answers:?} {:?}", mcp.asked());
    assert!(mcp.asked().contains(&"tools/list 200 OK".to_owned()), "{:?}", mcp.asked());
}

#[test]
#[ignore = "interop/run runs it"]
fn the_token_of_a_tool_stays_on_our_server() {
    let mcp = Mcp::start(Some(TOKEN));
    let (answers, log) = on_ours(&mcp, "bearer_token_env_var = \"LAB_TOKEN\"\n");
    assert!(answers[0].contains("doubled-42"), "{answers:?} {:?}", mcp.asked());
    assert!(!log.contains(TOKEN), "the token is in the log");
}

/// Without `httpHeaderEnvVars`, their client drops the servers that need a token and keeps the others.
#[test]
#[ignore = "interop/run runs it"]
fn tools_that_need_a_token_are_used_only_if_headers_can_have_variables() {
    for (without, used) in [(None, true), (Some("httpHeaderEnvVars"), false)] {
        let (secret, open) = (Mcp::start(Some(TOKEN)), Mcp::start(None));
        let config = home();
        let text = format!(
            "[mcp_servers.secret]\nurl = \"{}\"\nbearer_token_env_var = \"LAB_TOKEN\"\n\
             [mcp_servers.lab]\nurl = \"{}\"\n",
            secret.url, open.url
        );
        std::fs::write(config.path().join("config.toml"), text).unwrap();
        let server = Server::with(Implementation::Ours, |command| {
            command.env("CODEX_HOME", config.path()).env("LAB_TOKEN", TOKEN);
        });
        let tap = Tap::start(&server.url, without);
        let session = session("danger-full-access", vec![double()], |command| {
            command.env("CODEX_EXEC_SERVER_URL", &tap.url);
        });
        assert!(session.tool_outputs[0].contains("doubled-42"), "{:?}", session.tool_outputs);
        assert_eq!(!secret.asked().is_empty(), used, "{:?}", secret.asked());
        let requests = tap.messages.of("http/request");
        let header = |request: &Value| {
            let headers = request["headers"].as_array().unwrap().iter();
            headers.filter(|header| header["valueEnvVar"] == "LAB_TOKEN").count()
        };
        assert_eq!(requests.iter().map(header).sum::<usize>() > 0, used, "{requests:?}");
        assert!(!json!(requests).to_string().contains(TOKEN), "{requests:?}");
    }
}

/// A server on stdin and stdout that speaks plain JSON.
pub(crate) struct Plain {
    _program: Program,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    last_id: u64,
}

impl Plain {
    pub(crate) fn start(implementation: Implementation, home: &Path) -> Self {
        Self::with(implementation, home, |_| {})
    }

    /// Starts a server; `change` may add flags and variables.
    pub(crate) fn with(
        implementation: Implementation,
        home: &Path,
        change: impl FnOnce(&mut Command),
    ) -> Self {
        let mut command = implementation.program(home);
        std::fs::create_dir_all(home.join("codex")).unwrap();
        command.env("CODEX_HOME", home.join("codex")).args(["exec-server", "--listen", "stdio"]);
        change(&mut command);
        let mut program =
            Program::start(command.stdin(Stdio::piped()).stdout(Stdio::piped()).current_dir(home));
        let input = program.child.stdin.take().unwrap();
        let output = BufReader::new(program.child.stdout.take().unwrap());
        let mut plain = Self { _program: program, input, output, last_id: 0 };
        plain.call("initialize", &json!({"clientName": "interop"}));
        writeln!(plain.input, r#"{{"method":"initialized"}}"#).unwrap();
        plain
    }

    /// Sends requests without waiting, and returns their answers in the order in which they come: the place of
    /// the request, and the result or the code of the error.
    pub(crate) fn pipeline(&mut self, requests: &[(&str, Value)]) -> Vec<(u64, Value)> {
        let first = self.last_id + 1;
        for (method, params) in requests {
            self.last_id += 1;
            writeln!(
                self.input,
                "{}",
                json!({"id": self.last_id, "method": method, "params": params})
            )
            .unwrap();
        }
        let mut answers = Vec::new();
        while answers.len() < requests.len() {
            let mut line = String::new();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "it ended");
            let answer: Value = serde_json::from_str(&line).unwrap();
            if let Some(id) = answer["id"].as_u64().filter(|_| answer.get("method").is_none()) {
                answers.push((id - first, result(&answer)));
            }
        }
        answers
    }

    /// The result, or the code of the error.
    pub(crate) fn call(&mut self, method: &str, params: &Value) -> Value {
        self.last_id += 1;
        let message = json!({"id": self.last_id, "method": method, "params": params});
        writeln!(self.input, "{message}").unwrap();
        loop {
            let mut line = String::new();
            assert_ne!(
                self.output.read_line(&mut line).unwrap(),
                0,
                "it ended: {method} {message}"
            );
            let answer: Value = serde_json::from_str(&line).unwrap();
            if answer["id"] == self.last_id {
                return result(&answer);
            }
        }
    }
}

fn result(answer: &Value) -> Value {
    match answer.get("result") {
        Some(result) => result.clone(),
        None => json!({"code": answer["error"]["code"]}),
    }
}

/// A tree in a home, that both servers look at.
struct World {
    home: tempfile::TempDir,
    random: Random,
}

/// Small and repeatable.
pub(crate) struct Random(pub u64);

impl Random {
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % n
    }

    pub(crate) fn one<'c>(&mut self, of: &[&'c str]) -> &'c str {
        of[self.below(of.len())]
    }
}

impl World {
    fn new(seed: u64) -> Self {
        let home = home();
        std::fs::create_dir(home.path().join("codex")).unwrap();
        Self { home, random: Random(seed) }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.at(name);
        // What is a file already cannot have files in it.
        if std::fs::create_dir_all(path.parent().unwrap()).is_ok() {
            let _ = std::fs::write(path, text);
        }
    }

    fn uri(&self, name: &str) -> String {
        format!("file://{}", self.at(name).display())
    }

    /// Asks both.
    fn agree(&self, seed: u64, method: &str, params: &Value, sorted: &[&str]) {
        let mut answers = BTreeMap::new();
        for (name, implementation) in
            [("ours", Implementation::Ours), ("theirs", Implementation::Theirs)]
        {
            let mut answer = Plain::start(implementation, self.home.path()).call(method, params);
            sort(&mut answer, sorted);
            answers.insert(name, answer);
        }
        let [ours, theirs] = [&answers["ours"], &answers["theirs"]];
        assert_eq!(ours, theirs, "seed {seed}: {method} {params}\n{}", self.listing());
    }

    /// Every file, for the message of a failure.
    fn listing(&self) -> String {
        let find = std::process::Command::new("find")
            .arg(self.home.path())
            .args(["-type", "f", "-size", "-4k", "-print", "-exec", "cat", "{}", ";"])
            .output();
        String::from_utf8_lossy(&find.unwrap().stdout).into_owned()
    }
}

/// Puts lists of these names in order: what is told in them has none.
fn sort(value: &mut Value, names: &[&str]) {
    match value {
        Value::Object(members) => {
            for (name, value) in members {
                sort(value, names);
                if let (Value::Array(list), true) = (value, names.contains(&name.as_str())) {
                    list.sort_by_key(ToString::to_string);
                }
            }
        }
        Value::Array(list) => list.iter_mut().for_each(|value| sort(value, names)),
        _ => {}
    }
}

pub(crate) fn seeds(count: u64) -> impl Iterator<Item = u64> {
    let first = std::env::var("SEED").ok().map(|seed| seed.parse().unwrap());
    (0..count).map(move |n| first.unwrap_or(7_919 * n + 1))
}

const DIRECTORIES: [&str; 6] = ["r", "r/a", "r/a/b", "r/c", "wt", "wt/a"];

fn random_toml(random: &mut Random) -> String {
    let mut text = String::new();
    for _ in 0..random.below(6) {
        text += random.one(&[
            "m = 1\n",
            "m = { z = 1, a = [1, { q = 'x' }] }\n",
            "n = \"a\\nb \\\"q\\\" \\u00e9\"\n",
            "n = 1e3\n",
            "o = 2020-01-01T00:00:00Z\n",
            "o = [[1], []]\n",
            "\"a.b\" = 'C:\\x'\n",
            "p.q.r = true\n",
            "p.s = 0xff\n",
            "\"\" = inf\n",
            "q = '''\nx\n  y'''\n",
        ]);
    }
    for _ in 0..random.below(4) {
        text += random.one(&[
            "[t]\nk = 1\n",
            "[t.u]\nz = \"z\"\na = 1\n",
            "[[l]]\nx = 1\n",
            "[[l]]\n[l.t]\ny = 2\n",
            "[t.\"x y\"]\n",
            "# a comment\n",
            "[p.z]\nv = -1\n",
            "[broken\n",
        ]);
    }
    text
}

fn random_path(random: &mut Random) -> Value {
    let first = ["m", "n", "o", "p", "q", "t", "l", "a.b", "", "none"];
    let more = ["q", "u", "x y", "s", "z", "0", "k", "t"];
    let mut path = vec![random.one(&first)];
    for _ in 0..random.below(3) {
        path.push(random.one(&more));
    }
    json!(path)
}

#[test]
#[ignore = "interop/run runs it"]
fn our_server_reads_the_configuration_that_theirs_does() {
    for seed in seeds(40) {
        let mut world = World::new(seed);
        let directory = world.home.path().to_owned();
        for name in DIRECTORIES {
            std::fs::create_dir_all(world.at(name)).unwrap();
            if world.random.below(2) == 0 {
                let text = random_toml(&mut world.random);
                world.write(&format!("{name}/.codex/config.toml"), &text);
            }
            match world.random.below(8) {
                0 => world.write(&format!("{name}/.git/HEAD"), ""),
                1 => std::fs::create_dir_all(world.at(&format!("{name}/.git"))).unwrap(),
                2 => world.write(&format!("{name}/.git"), "gitdir: ../r/.git/worktrees/wt\n"),
                3 => world.write(&format!("{name}/marker"), ""),
                _ => {}
            }
        }
        if world.random.below(2) == 0 {
            world.write("r/.git/HEAD", "");
            let root = world.at("r");
            let git = root.join(".git/worktrees/wt");
            world.write("wt/.git", &format!("gitdir: {}\n", git.display()));
            let common = world.random.one(&["../..\n", "..\n", ""]);
            world.write("r/.git/worktrees/wt/commondir", common);
            let back = world.random.one(&["wt/.git", "other/.git"]);
            world.write(
                "r/.git/worktrees/wt/gitdir",
                &format!("{}\n", directory.join(back).display()),
            );
        }
        std::os::unix::fs::symlink(world.at("r"), world.at("link")).unwrap();
        let mut user = match world.random.below(4) {
            0 => "project_root_markers = [\"marker\"]\n".to_owned(),
            1 => "project_root_markers = [\"marker\", \".git\"]\n".to_owned(),
            _ => String::new(),
        };
        user += &random_toml(&mut world.random);
        for name in DIRECTORIES.iter().chain(&["link", "link/a"]) {
            if let level @ ("trusted" | "untrusted") =
                world.random.one(&["trusted", "trusted", "untrusted", "", "", ""])
            {
                user += &format!(
                    "[projects.\"{}\"]\ntrust_level = \"{level}\"\n",
                    world.at(name).display()
                );
            }
        }
        world.write("codex/config.toml", &user);
        let cwd =
            world.random.one(&["r", "r/a", "r/a/b", "r/c", "wt/a", "link/a", "r/a/none", "none"]);
        let paths: Vec<Value> =
            (0..1 + world.random.below(3)).map(|_| random_path(&mut world.random)).collect();
        let params =
            json!({"cwd": world.uri(cwd), "configPaths": paths, "requirementsPaths": [["m"]]});
        world.agree(seed, "environmentConfig/read", &params, &[]);
    }
}

/// Skills, manifests and what they refer to, in places that are searched and places that are not.
fn populate(world: &mut World, root: &str) {
    let directories =
        ["", "/a", "/a/b", "/.hidden", "/a/deep/er/and/deep/er", "/p", "/p/skills/s", "/q"];
    for _ in 0..2 + world.random.below(10) {
        let directory = world.random.one(&directories);
        let place = format!("{root}{directory}");
        match world.random.below(9) {
            0..4 => {
                let text = random_skill(&mut world.random);
                world.write(&format!("{place}/SKILL.md"), &text);
            }
            4 => {
                let text = world.random.one(&[
                    "policy:\n  allow_implicit_invocation: false\n",
                    "policy: {products: [codex, chatgpt]}\n",
                    "policy: {products: [none]}\n",
                    "dependencies:\n  tools:\n    - {type: mcp, value: v, url: u, transport: t}\n    - {type: x}\n",
                    "interface: {display_name: x}\n", "interface: 3\npolicy: {}\n", "[", "",
                ]);
                world.write(&format!("{place}/agents/openai.yaml"), text);
            }
            5 | 6 => {
                let kind = world.random.one(&["codex", "codex", "claude", "cursor"]);
                let text = world.random.one(&[
                    "{}", "{\"name\":\"n1\"}", "{\"name\":\"n2\",\"mcpServers\":\"./m.json\",\"apps\":\"./sub/../a\"}",
                    "{\"name\":\" n3 \",\"interface\":{\"displayName\":\" D \"},\"apps\":\"./m.json\"}",
                    "{\"mcpServers\":{\"x\":{}}}", "{\"name\":\"\",\"mcpServers\":\"m.json\"}", "not json", "[1]",
                ]);
                world.write(&format!("{place}/.{kind}-plugin/plugin.json"), text);
            }
            7 => world.write(&format!("{place}/{}", world.random.0 % 3), "x"),
            _ => {
                let name = world.random.one(&["m.json", ".mcp.json", ".app.json"]);
                world.write(&format!("{place}/{name}"), "{}");
            }
        }
    }
}

fn random_skill(random: &mut Random) -> String {
    let name = random.one(&["n", "\"a  b\"", "a: b", "", "[x", "12", "~", "'q'", "@x", "n # c"]);
    let description = random.one(&[
        "d",
        "use: this",
        "\"x\" y",
        "1.10",
        "yes",
        "",
        "|\n  one\n  two",
        ">-\n  a\n\n  b",
        "a: b # c",
        "{a: b}",
        "[a, b]",
        "[a] b",
        "it's: x",
        "*x",
        "%x",
        "&a x",
        "- x",
        "`x`",
        "! x: y",
    ]);
    let more = random.one(&[
        "",
        "",
        "metadata:\n  short-description: s: d\n",
        "metadata:\n  short-description: 3\n",
        "metadata: x\n",
        "other: [\n",
        "name: again\n",
        "list:\n  - a: b: c\n",
    ]);
    let (open, close) = match random.below(8) {
        0 => ("", "---\n"),
        1 => ("---\n", ""),
        2 => (" --- \n", "---"),
        _ => ("---\n", "---\nbody\n"),
    };
    format!("{open}name: {name}\ndescription: {description}\n{more}{close}")
}

#[test]
#[ignore = "interop/run runs it"]
fn our_server_finds_the_files_below_a_root_that_theirs_does() {
    for seed in seeds(30) {
        let mut world = World::new(seed);
        populate(&mut world, "around/root");
        populate(&mut world, "other");
        if world.random.below(3) == 0 {
            world.write("around/.codex-plugin/plugin.json", "{\"name\":\"around\"}");
        }
        let _ = std::os::unix::fs::symlink(world.at("other"), world.at("around/root/link"));
        let roots: Vec<Value> = ["around/root", "around/root/a", "other", "none"]
            .iter()
            .map(|name| json!({"id": name, "path": world.uri(name)}))
            .collect();
        world.agree(seed, "capabilityRoots/discoverV1", &json!({"roots": roots}), &["warnings"]);
    }
}

#[test]
#[ignore = "interop/run runs it"]
fn our_server_describes_what_is_installed_as_theirs_does() {
    for seed in seeds(30) {
        let mut world = World::new(seed);
        populate(&mut world, "codex/skills");
        populate(&mut world, ".agents/skills");
        for plugin in ["m1/p1", "m1/p2", "m2/p1"] {
            for _ in 0..1 + world.random.below(2) {
                let version =
                    world.random.one(&["local", "1.0.0", "1.10.0", "1.9.0", "2.0.0-rc.1", "abc"]);
                let root = format!("codex/plugins/cache/{plugin}/{version}");
                populate(&mut world, &root);
                if world.random.below(4) > 0 {
                    let text = format!("{{\"name\":\"{}\"}}", plugin.replace('/', "-"));
                    world.write(&format!("{root}/.codex-plugin/plugin.json"), &text);
                }
            }
        }
        let params = json!({"cwd": world.uri("work")});
        world.agree(seed, "capabilities/discoverV2", &params, &[]);
    }
}
