//! Slow consumers of a server that retains little and lacks `processRetainUntilRead`: every byte arrives,
//! or its loss is reported at its position.

use std::collections::VecDeque;

use codex_exec_client::{ClientTuning, ExecCommand, ExecServerClient, Lost, Process, ProcessEvent};
use futures_util::StreamExt;
use serde_json::{Value, json};
use tokio::io::AsyncReadExt;
use tokio::sync::mpsc;

use crate::support::{Fake, FakeDialer, base64, go, options, soon};

/// How much output the server retains, in bytes.
const RING: usize = 1 << 20;
/// Every chunk consists of whole numbered lines of this length.
const LINE: usize = 16;

/// A server with one process, which sends output as fast as the connection takes it.
struct Old {
    random: fastrand::Rng,
    id: String,
    /// The next line, and the number of lines.
    line: u64,
    lines: u64,
    seq: u64,
    ring: VecDeque<(u64, &'static str, String, usize)>,
    kept: usize,
    over: bool,
    /// How many more connections end early.
    cuts: usize,
}

impl Old {
    /// Publishes the next event: retains it, and returns its notification.
    fn publish(&mut self) -> Value {
        self.seq += 1;
        let (id, seq) = (self.id.clone(), self.seq);
        if self.line == self.lines && !self.over {
            self.over = true;
            let params =
                json!({"processId": id, "seq": seq, "exitCode": 0, "sandboxDenied": false});
            return json!({"method": "process/exited", "params": params});
        }
        if self.over {
            return json!({"method": "process/closed", "params": {"processId": id, "seq": seq}});
        }
        let count = match self.random.u8(0..4) {
            0 => 1,
            1 => 4096,
            _ => self.random.u64(1..512),
        };
        let until = (self.line + count).min(self.lines);
        let text: String = (self.line..until).map(|n| format!("{n:015}\n")).collect();
        self.line = until;
        let stream = if self.random.u8(0..8) == 0 { "stderr" } else { "stdout" };
        let chunk = base64(text.as_bytes());
        self.ring.push_back((seq, stream, chunk.clone(), text.len()));
        self.kept += text.len();
        while self.kept > RING {
            let Some((.., len)) = self.ring.pop_front() else { break };
            self.kept -= len;
        }
        let params = json!({"processId": id, "seq": seq, "stream": stream, "chunk": chunk});
        json!({"method": "process/output", "params": params})
    }

    fn is_closed(&self) -> bool {
        self.over && self.ring.back().is_none_or(|last| last.0 + 2 <= self.seq)
    }

    fn read(&self, params: &Value) -> Value {
        let after = params["afterSeq"].as_u64().unwrap_or(0);
        let most = params["maxBytes"].as_u64().unwrap_or(u64::MAX) as usize;
        let (mut chunks, mut bytes) = (Vec::new(), 0);
        for (seq, stream, chunk, len) in self.ring.iter().filter(|kept| kept.0 > after) {
            if !chunks.is_empty() && bytes + len > most {
                break;
            }
            bytes += len;
            chunks.push(json!({"seq": seq, "stream": stream, "chunk": chunk}));
        }
        let next =
            chunks.last().map_or(self.seq + 1, |last: &Value| last["seq"].as_u64().unwrap() + 1);
        json!({"chunks": chunks, "nextSeq": next, "exited": self.over,
            "exitCode": self.over.then_some(0), "closed": self.is_closed()})
    }

    /// Serves the process over as many connections as needed.
    async fn serve(mut self, mut fake: Fake, mut dialled: mpsc::UnboundedReceiver<Fake>) {
        loop {
            let mut left = match self.cuts {
                0 => usize::MAX,
                _ => self.random.usize(1..60),
            };
            self.cuts = self.cuts.saturating_sub(1);
            loop {
                let asked = tokio::select! {
                    message = fake.message() => Some(message),
                    () = std::future::ready(()), if !self.is_closed() => None,
                };
                match asked {
                    None if left == 0 => break,
                    None => {
                        left -= 1;
                        let event = self.publish();
                        fake.send(event).await;
                    }
                    // The client has received everything.
                    Some(None) => return,
                    Some(Some(request)) => {
                        let result = match request["method"].as_str().unwrap() {
                            "process/read" => self.read(&request["params"]),
                            "environment/status" => json!({"status": "ready"}),
                            _ => json!({}),
                        };
                        fake.send(json!({"id": request["id"], "result": result})).await;
                    }
                }
            }
            drop(fake);
            let Some(next) = dialled.recv().await else { return };
            fake = next;
            fake.accept_initialize(json!({})).await;
        }
    }
}

/// A client of a process that writes `lines` lines, and the server's future.
async fn start(
    seed: u64,
    lines: u64,
    cuts: usize,
    tuning: ClientTuning,
) -> (ExecServerClient, Process, impl Future<Output = ()> + Send + 'static) {
    let mut options = options();
    options.tuning = tuning;
    let (dialer, mut dialled) = FakeDialer::new();
    let connecting = go(ExecServerClient::connect(dialer, options));
    let mut fake = dialled.recv().await.unwrap();
    fake.accept_initialize(json!({})).await;
    let client = connecting.await.unwrap().unwrap();
    let spawning = go({
        let client = client.clone();
        async move { client.spawn(ExecCommand::new(["x"])).await }
    });
    let id = fake.accept_start().await;
    let old = Old {
        random: fastrand::Rng::with_seed(seed),
        id,
        line: 0,
        lines,
        seq: 0,
        ring: VecDeque::new(),
        kept: 0,
        over: false,
        cuts,
    };
    let process = soon(spawning).await.unwrap().unwrap();
    (client, process, old.serve(fake, dialled))
}

fn tuning(random: &mut fastrand::Rng) -> ClientTuning {
    let mut tuning = ClientTuning::default();
    tuning.event_window = *random.choice(&[1, 4 << 10, 64 << 10, 1 << 20]).unwrap();
    if random.bool() {
        tuning.spill_limit = *random.choice(&[0, 100_000, 1 << 20]).unwrap();
    }
    tuning
}

/// Checks that lines arrive in order and that missing ones were reported.
#[derive(Default)]
struct Lines {
    next: u64,
    rest: Vec<u8>,
    lost: bool,
}

impl Lines {
    fn take(&mut self, bytes: &[u8], context: &str) {
        self.rest.extend_from_slice(bytes);
        let whole = self.rest.len() / LINE * LINE;
        for line in self.rest[..whole].chunks(LINE) {
            let number: u64 = std::str::from_utf8(line).unwrap().trim().parse().unwrap();
            assert!(
                number == self.next || (self.lost && number > self.next),
                "{number} instead of {}, {context}",
                self.next
            );
            self.lost = false;
            self.next = number + 1;
        }
        self.rest.drain(..whole);
    }
}

/// The seeds; `SLOW_SEEDS` sets their number.
fn seeds() -> std::ops::Range<u64> {
    0..std::env::var("SLOW_SEEDS").ok().and_then(|count| count.parse().ok()).unwrap_or(8)
}

/// A slow consumer of a process whose connection is cut `cuts` times.
async fn consume(seed: u64, cuts: usize) -> bool {
    let mut random = fastrand::Rng::with_seed(seed);
    let (lines, tuning) = (random.u64(1..100_000), tuning(&mut random));
    let context = format!("seed {seed}, {tuning:?}");
    let (_client, mut process, server) = start(seed, lines, cuts, tuning).await;
    let mut events = process.take_events().unwrap();
    go(server);
    let (mut got, mut any_lost, mut exit) = (Lines::default(), false, None);
    while let Some(event) = soon(events.next()).await {
        if random.u8(0..16) == 0 {
            // The paused clock advances when all tasks wait.
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        match event {
            ProcessEvent::Output { bytes, .. } => got.take(&bytes, &context),
            ProcessEvent::Lost(Lost::Output { .. }) => {
                assert!(got.rest.is_empty());
                (got.lost, any_lost) = (true, true);
            }
            ProcessEvent::Exited(status) => exit = Some(status.code),
            ProcessEvent::Closed => {}
            other => panic!("{other:?}, {context}"),
        }
    }
    assert_eq!(exit, Some(0), "{context}");
    assert!(got.next == lines || got.lost, "{} of {lines} lines, {context}", got.next);
    any_lost
}

#[tokio::test(start_paused = true)]
async fn a_slow_consumer_gets_every_byte() {
    for seed in seeds() {
        assert!(!consume(seed, 0).await, "seed {seed}");
    }
}

#[tokio::test(start_paused = true)]
async fn every_byte_arrives_or_is_reported_lost_through_cut_connections() {
    for seed in seeds() {
        consume(seed, 5).await;
    }
}

#[tokio::test(start_paused = true)]
async fn separately_read_streams_get_every_byte() {
    for seed in seeds() {
        let mut random = fastrand::Rng::with_seed(seed);
        let (lines, tuning) = (random.u64(1..100_000), tuning(&mut random));
        // A stream that waits for the other needs room in the window.
        let mut tuning = tuning;
        tuning.spill_limit = ClientTuning::default().spill_limit;
        let (_client, mut process, server) = start(seed, lines, 0, tuning).await;
        let (mut out, mut err) = (process.take_stdout().unwrap(), process.take_stderr().unwrap());
        go(server);
        let (mut first, mut second) = (Vec::new(), Vec::new());
        soon(out.read_to_end(&mut first)).await.unwrap();
        soon(err.read_to_end(&mut second)).await.unwrap();
        let numbers = |text: &[u8]| -> Vec<u64> {
            String::from_utf8_lossy(text).lines().map(|line| line.parse().unwrap()).collect()
        };
        let (first, second) = (numbers(&first), numbers(&second));
        assert!(first.is_sorted() && second.is_sorted(), "seed {seed}");
        let mut all = [first, second].concat();
        all.sort_unstable();
        assert!(all == (0..lines).collect::<Vec<_>>(), "seed {seed}");
    }
}

#[tokio::test(start_paused = true)]
async fn output_spooled_to_disk_delays_no_request() {
    let mut tuning = ClientTuning::default();
    tuning.event_window = 64 << 10;
    let (client, mut process, server) = start(1, 300_000, 0, tuning).await;
    let events = process.take_events().unwrap();
    go(server);
    // All of it arrives without a consumer, and requests get responses meanwhile.
    for _ in 0..20 {
        assert_eq!(soon(client.environment_status()).await.unwrap().status, "ready");
    }
    assert_eq!(soon(process.wait()).await.unwrap().code, 0);
    // Without a consumer the file is not needed any more.
    drop(events);
    assert_eq!(soon(client.environment_status()).await.unwrap().status, "ready");
}
