//! Their client as an application runs it: `codex app-server`, which asks its user for approval.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use serde_json::{Value, json};

use crate::model::{Model, Step};
use crate::programs::{Implementation, Program, TIMEOUT, home};

/// A finished turn of their client.
pub(crate) struct Turn {
    pub tool_outputs: Vec<String>,
    /// What its model was told first.
    pub prompt: String,
    /// The params of the questions that it asked; all were answered with yes.
    pub approvals: Vec<Value>,
    /// Everything that it sent to its user.
    pub log: String,
}

/// The settings of a turn.
#[derive(Default)]
pub(crate) struct Settings {
    /// The exec-server.
    pub url: String,
    /// `KEY=VALUE` of the configuration.
    pub config: Vec<String>,
    /// Members of `thread/start`.
    pub thread: Value,
    /// Where the commands run; a directory of its own if it is empty.
    pub workspace: PathBuf,
}

/// Runs the script in a thread of its own; every question is answered with yes.
pub(crate) fn turn(settings: &Settings, steps: Vec<Step>) -> Turn {
    let model = Model::start(steps);
    let home = home();
    let codex_home = home.path().join("codex");
    std::fs::create_dir(&codex_home).unwrap();
    model.configure(&codex_home);
    let workspace = match settings.workspace.as_os_str().is_empty() {
        true => home.path().join("workspace"),
        false => settings.workspace.clone(),
    };
    std::fs::create_dir_all(&workspace).unwrap();
    let mut command = Implementation::Theirs.program(&codex_home);
    command.env("CODEX_EXEC_SERVER_URL", &settings.url).arg("app-server");
    for setting in &settings.config {
        command.args(["-c", setting]);
    }
    command.current_dir(&workspace).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut client = AppServer::start(Program::start(&mut command));
    let info = json!({"name": "interop", "title": null, "version": "1"});
    client.call(
        "initialize",
        &json!({"clientInfo": info, "capabilities": {"experimentalApi": true}}),
    );
    client.send(&json!({"method": "initialized"}));
    let mut start = json!({"cwd": workspace});
    if let Value::Object(members) = &settings.thread {
        start.as_object_mut().unwrap().extend(members.clone());
    }
    let thread = client.call("thread/start", &start)["thread"]["id"].clone();
    let input = json!([{"type": "text", "text": "go", "text_elements": []}]);
    client.call("turn/start", &json!({"threadId": thread, "input": input}));
    client.until(|message| message["method"] == "turn/completed");
    Turn {
        tool_outputs: model.tool_outputs(),
        prompt: model.prompt(),
        approvals: client.approvals,
        log: client.log,
    }
}

struct AppServer {
    program: Program,
    input: ChildStdin,
    messages: Receiver<Value>,
    last_id: u64,
    approvals: Vec<Value>,
    log: String,
}

impl AppServer {
    fn start(mut program: Program) -> Self {
        let input = program.child.stdin.take().unwrap();
        let output = BufReader::new(program.child.stdout.take().unwrap());
        let (sender, messages) = channel();
        thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                let _ = sender.send(serde_json::from_str(&line).unwrap());
            }
        });
        Self { program, input, messages, last_id: 0, approvals: Vec::new(), log: String::new() }
    }

    fn send(&mut self, message: &Value) {
        writeln!(self.input, "{message}").unwrap();
    }

    fn call(&mut self, method: &str, params: &Value) -> Value {
        self.last_id += 1;
        let id = self.last_id;
        self.send(&json!({"id": id, "method": method, "params": params}));
        let answer = self.until(|message| message["id"] == id && message.get("method").is_none());
        assert!(answer.get("result").is_some(), "{method} {params}: {answer}");
        answer["result"].clone()
    }

    /// Answers questions until this message comes.
    fn until(&mut self, wanted: impl Fn(&Value) -> bool) -> Value {
        loop {
            let message = self.messages.recv_timeout(TIMEOUT).unwrap_or_else(|_| {
                panic!("no message: {}\n{}", self.log, self.program.log());
            });
            self.log += &format!("{message}\n");
            if wanted(&message) {
                return message;
            }
            if message.get("id").is_some() && message.get("method").is_some() {
                self.approvals.push(message["params"].clone());
                self.send(&json!({"id": message["id"], "result": {"decision": "accept"}}));
            }
        }
    }
}
