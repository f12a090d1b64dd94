//! `codex run` against a server that retains 1 MiB of output, has no extensions, and sends as fast as it can:
//! nothing is lost, or the loss is reported and the exit code is not 0.

use std::collections::VecDeque;
use std::io::Read;
use std::process::{Command, Stdio};

use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio_websockets::{Message, ServerBuilder, WebSocketStream};

use crate::commands::{CommandOutput, codex};

/// How much output the server retains, in bytes.
const RING: usize = 1 << 20;

/// The output of the process, and how the server handles it.
#[derive(Debug, Clone, Copy)]
struct Script {
    seed: u64,
    bytes: usize,
    exit_code: i32,
    /// One of this many chunks is neither sent nor retained.
    loses_one_in: Option<u64>,
}

struct Process {
    id: Value,
    random: fastrand::Rng,
    script: Script,
    said: usize,
    seq: u64,
    ring: VecDeque<(u64, String, usize)>,
    kept: usize,
}

/// The output of the process in this range.
fn words(seed: u64, from: usize, to: usize) -> Vec<u8> {
    (from..to).map(|at| (at as u64 ^ (at as u64 >> 9) ^ seed) as u8).collect()
}

impl Process {
    /// The next chunk, if it is to be sent.
    fn next(&mut self) -> Option<Value> {
        let len = if self.random.bool() { 8192 } else { self.random.usize(1..60_000) };
        let end = (self.said + len).min(self.script.bytes);
        let bytes = words(self.script.seed, self.said, end);
        let len = bytes.len();
        (self.said, self.seq) = (end, self.seq + 1);
        if self.script.loses_one_in.is_some_and(|n| self.seq.is_multiple_of(n)) {
            return None;
        }
        let chunk = base64_simd::STANDARD.encode_to_string(bytes);
        self.ring.push_back((self.seq, chunk.clone(), len));
        self.kept += len;
        while self.kept > RING {
            self.kept -= self.ring.pop_front().unwrap().2;
        }
        Some(json!({"method": "process/output", "params":
            {"processId": self.id, "seq": self.seq, "stream": "stdout", "chunk": chunk}}))
    }

    fn is_over(&self) -> bool {
        self.said == self.script.bytes
    }

    fn read(&self, params: &Value) -> Value {
        let after = params["afterSeq"].as_u64().unwrap_or(0);
        let chunks: Vec<_> = self
            .ring
            .iter()
            .filter(|kept| kept.0 > after)
            .map(|(seq, chunk, _)| json!({"seq": seq, "stream": "stdout", "chunk": chunk}))
            .collect();
        // The exit and the close have one number each.
        let next = self.seq + 1 + if self.is_over() { 2 } else { 0 };
        json!({"chunks": chunks, "nextSeq": next, "exited": self.is_over(),
            "exitCode": self.is_over().then_some(self.script.exit_code), "closed": self.is_over()})
    }
}

type Socket = WebSocketStream<TcpStream>;

async fn send(socket: &mut Socket, message: &Value) {
    // Fails if the client has already closed.
    let _ = socket.send(Message::text(message.to_string())).await;
}

/// Serves one client. Signals `all_sent` when all output is sent.
async fn serve(listener: TcpListener, script: Script, all_sent: oneshot::Sender<()>) {
    let (stream, _) = listener.accept().await.unwrap();
    let (_, mut socket) = ServerBuilder::new().accept(stream).await.unwrap();
    let (mut process, mut all_sent) = (None::<Process>, Some(all_sent));
    loop {
        let pushing = process.as_ref().is_some_and(|process| !process.is_over());
        let message = tokio::select! {
            message = socket.next() => message,
            () = std::future::ready(()), if pushing => {
                let process = process.as_mut().unwrap();
                if let Some(chunk) = process.next() {
                    send(&mut socket, &chunk).await;
                }
                if process.is_over() {
                    let id = &process.id;
                    let exited = json!({"processId": id, "seq": process.seq + 1,
                        "exitCode": script.exit_code, "sandboxDenied": false});
                    send(&mut socket, &json!({"method": "process/exited", "params": exited})).await;
                    let closed = json!({"processId": id, "seq": process.seq + 2});
                    send(&mut socket, &json!({"method": "process/closed", "params": closed})).await;
                    let _ = all_sent.take().unwrap().send(());
                }
                continue;
            }
        };
        let Some(Ok(message)) = message else { return };
        let Some(text) = message.as_text() else { continue };
        let request: Value = serde_json::from_str(text).unwrap();
        let params = &request["params"];
        let result = match request["method"].as_str().unwrap() {
            "initialized" => continue,
            "initialize" => json!({"sessionId": "s", "environmentInfo":
                {"cwd": "file:///", "platformOs": "linux", "capabilities": {}}}),
            "process/start" => {
                process = Some(Process {
                    id: params["processId"].clone(),
                    random: fastrand::Rng::with_seed(script.seed),
                    script,
                    said: 0,
                    seq: 0,
                    ring: VecDeque::new(),
                    kept: 0,
                });
                json!({"processId": params["processId"]})
            }
            "process/read" => process.as_ref().unwrap().read(params),
            _ => json!({}),
        };
        send(&mut socket, &json!({"id": request["id"], "result": result})).await;
    }
}

/// Runs a command on such a server. With `late`, reads no output before the server has sent everything.
fn run(script: Script, late: bool, flags: &[&str]) -> (CommandOutput, Vec<u8>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let url = format!("ws://{}", listener.local_addr().unwrap());
    let (all_sent, sent) = oneshot::channel();
    let serving = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            serve(TcpListener::from_std(listener).unwrap(), script, all_sent).await;
        });
    });
    let mut command: Command = codex();
    command.args(["run", "--on", &url]).args(flags).args(["--", "anything"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stderr = child.stderr.take().unwrap();
    let complaints = std::thread::spawn(move || {
        let mut text = String::new();
        stderr.read_to_string(&mut text).unwrap();
        text
    });
    if late {
        sent.blocking_recv().unwrap();
    }
    let (mut random, mut out) = (fastrand::Rng::with_seed(script.seed), Vec::new());
    let mut stdout = child.stdout.take().unwrap();
    let mut buffer = vec![0; 100_000];
    while let len @ 1.. = stdout.read(&mut buffer[..random.usize(1..100_000)]).unwrap() {
        out.extend_from_slice(&buffer[..len]);
    }
    let code = child.wait().unwrap().code();
    serving.join().unwrap();
    (CommandOutput { code, out: String::new(), err: complaints.join().unwrap() }, out)
}

#[test]
fn a_slow_reader_gets_every_byte() {
    // More than the client's window, the socket and the pipe together.
    for (seed, late) in [(1, true), (2, false)] {
        let script = Script { seed, bytes: 24_000_000, exit_code: 3, loses_one_in: None };
        let (said, out) = run(script, late, &[]);
        assert_eq!((said.code, said.err.as_str()), (Some(3), ""), "seed {seed}");
        assert!(out == words(seed, 0, script.bytes), "{} bytes, seed {seed}", out.len());
    }
}

#[test]
fn lost_output_is_reported_and_fails_the_run() {
    for seed in 0..6 {
        let bytes = fastrand::Rng::with_seed(seed).usize(100_000..3_000_000);
        let exit_code = if seed % 2 == 0 { 0 } else { 3 };
        let script = Script { seed, bytes, exit_code, loses_one_in: Some(seed + 2) };
        let json = seed % 3 == 0;
        let (said, out) = run(script, false, if json { &["--json"] } else { &[] });
        said.failed(125, "no longer retains");
        said.failed(125, &format!("the command itself exited with code {exit_code}"));
        let text = String::from_utf8_lossy(&out);
        assert_eq!(text.contains(r#"{"type":"lost","#), json, "seed {seed}");
        assert!(json || out.len() < bytes, "seed {seed}");
    }
}
