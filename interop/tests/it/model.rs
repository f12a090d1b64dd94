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

fn function(name: &str, arguments: &Value) -> Value {
    json!({"type": "function_call", "name": name, "call_id": "call", "arguments": arguments.to_string()})
}

/// A scripted model on a port of its own.
pub(crate) struct Model {
    url: String,
    tool_outputs: Arc<Mutex<Vec<String>>>,
}

impl Model {
    /// Starts a model that takes one step per request, then finishes.
    pub(crate) fn start(steps: Vec<Step>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/v1", listener.local_addr().unwrap());
        let tool_outputs: Arc<Mutex<Vec<String>>> = Arc::default();
        let (steps, recorded) = (Arc::new(steps), tool_outputs.clone());
        thread::spawn(move || {
            for socket in listener.incoming() {
                let (steps, recorded) = (steps.clone(), recorded.clone());
                thread::spawn(move || serve(socket.unwrap(), &steps, &recorded));
            }
        });
        Self { url, tool_outputs }
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
        self.tool_outputs.lock().unwrap().clone()
    }
}

fn serve(mut socket: TcpStream, steps: &[Step], recorded: &Mutex<Vec<String>>) {
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
        Some("/v1/responses") => ("text/event-stream", respond(&body, steps, recorded)),
        _ => ("application/json", json!({"models": []}).to_string()),
    };
    let _ = write!(
        socket,
        "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{text}",
        text.len()
    );
}

fn respond(body: &[u8], steps: &[Step], recorded: &Mutex<Vec<String>>) -> String {
    let body: Value = serde_json::from_slice(body).unwrap();
    let tool_outputs: Vec<String> = body["input"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|item| item["type"] == "function_call_output")
        .map(|item| item["output"].as_str().map_or(item["output"].to_string(), str::to_owned))
        .collect();
    let last = tool_outputs.last().cloned().unwrap_or_default();
    let step = steps.get(tool_outputs.len()).map(|step| step(&last));
    *recorded.lock().unwrap() = tool_outputs;
    let item = step.unwrap_or_else(|| {
        json!({"type": "message", "role": "assistant",
            "content": [{"type": "output_text", "text": "done"}]})
    });
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
