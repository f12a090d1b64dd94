//! A scripted model: the Responses API over HTTP, with server-sent events.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;

use serde_json::{Value, json};

/// The model's next step, given the output of the last tool call.
pub(crate) type Step = Box<dyn Fn(&str) -> Value + Send + Sync>;

/// Calls a tool with these arguments.
pub(crate) fn call(tool: &'static str, arguments: Value) -> Step {
    Box::new(move |_| function(tool, &arguments))
}

/// Calls a tool with arguments that depend on the last output.
pub(crate) fn call_with(
    tool: &'static str,
    arguments: impl Fn(&str) -> Value + Send + Sync + 'static,
) -> Step {
    Box::new(move |answer| function(tool, &arguments(answer)))
}

/// Runs a command.
pub(crate) fn exec(cmd: &str) -> Step {
    // Long enough that the command ends first.
    call("exec_command", json!({"cmd": cmd, "yield_time_ms": 30_000}))
}

fn message(text: &str) -> Value {
    json!({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]})
}

fn function(name: &str, arguments: &Value) -> Value {
    json!({"type": "function_call", "name": name, "call_id": "call", "arguments": arguments.to_string()})
}

/// A scripted model on a port of its own.
pub(crate) struct Model {
    url: String,
    heard: Arc<Mutex<Heard>>,
}

/// What the client has sent.
#[derive(Default)]
struct Heard {
    tool_outputs: Vec<String>,
    /// The first request.
    prompt: String,
    /// Requests for a review.
    reviews: usize,
}

struct Script {
    steps: Vec<Step>,
    /// The outcome of every review.
    verdict: &'static str,
}

impl Model {
    /// Starts a model that takes one step per request, then finishes. As a reviewer it denies everything.
    pub(crate) fn start(steps: Vec<Step>) -> Self {
        Self::reviewing(steps, "deny")
    }

    /// Starts a model that is also the reviewer of approvals, with this outcome: `allow` or `deny`.
    pub(crate) fn reviewing(steps: Vec<Step>, verdict: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/v1", listener.local_addr().unwrap());
        let heard: Arc<Mutex<Heard>> = Arc::default();
        let (script, recorded) = (Arc::new(Script { steps, verdict }), heard.clone());
        thread::spawn(move || {
            for socket in listener.incoming() {
                let (script, recorded) = (script.clone(), recorded.clone());
                thread::spawn(move || serve(socket.unwrap(), &script, &recorded));
            }
        });
        Self { url, heard }
    }

    /// Configures this model as the only one in `home`.
    pub(crate) fn configure(&self, home: &Path) {
        let config = format!(
            "model = \"scripted\"\nmodel_provider = \"scripted\"\n[model_providers.scripted]\n\
             name = \"scripted\"\nbase_url = \"{}\"\nwire_api = \"responses\"\n",
            self.url
        );
        std::fs::write(home.join("config.toml"), config).unwrap();
    }

    /// The outputs of the tool calls, in order.
    pub(crate) fn tool_outputs(&self) -> Vec<String> {
        self.heard.lock().unwrap().tool_outputs.clone()
    }

    /// What the model was told before its first step.
    pub(crate) fn prompt(&self) -> String {
        self.heard.lock().unwrap().prompt.clone()
    }

    /// How often it was asked for a review.
    pub(crate) fn reviews(&self) -> usize {
        self.heard.lock().unwrap().reviews
    }
}

fn serve(mut socket: TcpStream, script: &Script, heard: &Mutex<Heard>) {
    let mut reader = BufReader::new(socket.try_clone().unwrap());
    let mut request = String::new();
    reader.read_line(&mut request).unwrap();
    let mut length = 0;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap() == 0 || line.trim().is_empty() {
            break;
        }
        if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = value.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    let (kind, text) = match request.split(' ').nth(1) {
        Some("/v1/responses") => ("text/event-stream", respond(&body, script, heard)),
        _ => ("application/json", json!({"models": []}).to_string()),
    };
    let _ = write!(
        socket,
        "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{text}",
        text.len()
    );
}

fn respond(body: &[u8], script: &Script, heard: &Mutex<Heard>) -> String {
    let text = String::from_utf8_lossy(body).into_owned();
    let body: Value = serde_json::from_slice(body).unwrap();
    let mut heard = heard.lock().unwrap();
    let item = if body["text"]["format"]["schema"]["properties"].get("outcome").is_some() {
        heard.reviews += 1;
        let review = json!({"outcome": script.verdict, "risk_level": "low",
            "user_authorization": "high", "rationale": "scripted"});
        message(&review.to_string())
    } else {
        let tool_outputs: Vec<String> = body["input"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|item| item["type"] == "function_call_output")
            .map(|item| item["output"].as_str().map_or(item["output"].to_string(), str::to_owned))
            .collect();
        let last = tool_outputs.last().cloned().unwrap_or_default();
        let step = script.steps.get(tool_outputs.len()).map(|step| step(&last));
        if tool_outputs.is_empty() {
            heard.prompt = text;
        }
        heard.tool_outputs = tool_outputs;
        step.unwrap_or_else(|| message("done"))
    };
    let usage = json!({"input_tokens": 1, "input_tokens_details": null, "output_tokens": 1,
        "output_tokens_details": null, "total_tokens": 2});
    let events = [
        json!({"type": "response.created", "response": {"id": "r"}}),
        json!({"type": "response.output_item.done", "item": item}),
        json!({"type": "response.completed", "response": {"id": "r", "usage": usage}}),
    ];
    let event =
        |event: &Value| format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap());
    events.iter().map(event).collect()
}
