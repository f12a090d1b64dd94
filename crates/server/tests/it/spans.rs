//! Spans, as a collector receives them.

use std::collections::BTreeMap;
use std::time::Duration;

use codex_exec_serving::SpanConfig;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use crate::support::{Client, server_with};

/// A collector that answers each message with this status.
struct Collector {
    endpoint: String,
    spans: mpsc::UnboundedReceiver<Value>,
}

impl Collector {
    async fn start(status: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}/base", listener.local_addr().unwrap());
        let (found, spans) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                for span in receive(socket, status).await {
                    let _ = found.send(span);
                }
            }
        });
        Self { endpoint, spans }
    }

    /// Everything that was received. Call it after the server has shut down.
    async fn received(&mut self, count: usize) -> Vec<Value> {
        let mut all = Vec::new();
        while all.len() < count {
            let next = tokio::time::timeout(crate::support::PATIENCE, self.spans.recv());
            all.push(next.await.expect("a span is missing").unwrap());
        }
        all.extend(std::iter::from_fn(|| self.spans.try_recv().ok()));
        all
    }
}

/// Reads a request and answers it; returns its spans.
async fn receive(mut socket: TcpStream, status: &str) -> Vec<Value> {
    let mut request = Vec::new();
    let (head, length) = loop {
        assert_ne!(socket.read_buf(&mut request).await.unwrap(), 0, "the request ends early");
        let text = String::from_utf8_lossy(&request).to_ascii_lowercase();
        let Some(head) = text.find("\r\n\r\n") else { continue };
        assert!(text.starts_with("post /base/v1/traces http/1.1\r\n"), "{text}");
        assert!(text.contains("content-type: application/json"), "{text}");
        let length = text.split("content-length: ").nth(1).unwrap();
        break (head + 4, length.split("\r\n").next().unwrap().parse::<usize>().unwrap());
    };
    while request.len() < head + length {
        assert_ne!(socket.read_buf(&mut request).await.unwrap(), 0, "the body ends early");
    }
    let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 2\r\n\r\n{{}}");
    socket.write_all(answer.as_bytes()).await.unwrap();
    let message: Value = serde_json::from_slice(&request[head..]).unwrap();
    message["resourceSpans"][0]["scopeSpans"][0]["spans"].as_array().unwrap().clone()
}

fn config(endpoint: &str) -> Option<SpanConfig> {
    let mut config = SpanConfig::new(endpoint).unwrap();
    config.interval = Duration::from_millis(20);
    Some(config)
}

/// A random `traceparent`, and whether it is to become a span.
fn parent(random: &mut fastrand::Rng) -> (String, bool) {
    let (trace, span) = (random.u128(1..), random.u64(1..));
    match random.u8(0..5) {
        0 => (format!("00-{trace:032x}-{span:016x}-00"), false),
        1 => (format!("00-{trace:032x}-{:016x}-01", 0), false),
        2 => (format!("{trace:032x}"), false),
        _ => (format!("00-{trace:032x}-{span:016x}-01"), true),
    }
}

/// Random requests: exactly the sampled ones become spans, each below its caller's, with the kind of its error.
#[tokio::test]
async fn each_sampled_request_becomes_one_span_below_its_caller() {
    let mut collector = Collector::start("200 OK").await;
    let server = server_with(|config_of| config_of.spans = config(&collector.endpoint));
    let mut client = Client::ready(&server).await;
    let mut random = fastrand::Rng::with_seed(15);
    let mut expected = BTreeMap::new();
    for number in 0..200 {
        let (method, params, kind) = random
            .choice([
                ("environment/status", json!({}), None),
                ("process/terminate", json!({"processId": "no"}), None),
                ("process/read", json!({"processId": "secret"}), Some("unknownProcess")),
                ("fs/readFile", json!({"path": "file:///no/such/secret"}), Some("pathNotFound")),
                ("secret/method", json!({}), Some("methodNotFound")),
            ])
            .unwrap();
        let (text, is_sampled) = parent(&mut random);
        let id = format!("r{number}");
        let request = json!({
            "id": id, "method": method, "params": params, "trace": {"traceparent": text},
        });
        client.send(request.to_string()).await;
        let answer = client.response(id.as_str()).await;
        assert_eq!(answer.is_err(), kind.is_some(), "{method}: {answer:?}");
        if is_sampled {
            let name = if method == "secret/method" { "unknown" } else { method };
            expected.insert(text, (name.to_owned(), kind.map(str::to_owned)));
        }
    }
    client.close().await;
    server.shut_down().await;
    let mut seen = BTreeMap::new();
    for span in collector.received(expected.len()).await {
        assert!(!span.to_string().contains("secret"), "{span}");
        let [trace, parent, own] =
            ["traceId", "parentSpanId", "spanId"].map(|id| span[id].as_str().unwrap().to_owned());
        assert!(own.len() == 16 && own != parent, "{span}");
        let nanos = |key: &str| span[key].as_str().unwrap().parse::<u64>().unwrap();
        assert!(nanos("startTimeUnixNano") <= nanos("endTimeUnixNano"), "{span}");
        let attributes = span["attributes"].as_array().unwrap();
        let error = attributes.iter().find(|attribute| attribute["key"] == "error.type");
        let error = error.map(|found| found["value"]["stringValue"].as_str().unwrap().to_owned());
        assert_eq!(span["status"]["code"] == 2, error.is_some(), "{span}");
        let name = span["name"].as_str().unwrap().to_owned();
        assert!(seen.insert(format!("00-{trace}-{parent}-01"), (name, error)).is_none(), "{span}");
    }
    assert!(expected.len() > 50);
    assert_eq!(seen, expected);
}

/// A collector that refuses or never answers loses spans only.
#[tokio::test]
async fn a_collector_that_fails_delays_no_request() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let refusing = Collector::start("503 Service Unavailable").await;
    for endpoint in [format!("http://{}", silent.local_addr().unwrap()), refusing.endpoint.clone()]
    {
        let server = server_with(|config_of| {
            let mut spans = config(&endpoint).unwrap();
            spans.queue = 4;
            spans.timeout = Duration::from_millis(50);
            config_of.spans = Some(spans);
        });
        let mut client = Client::ready(&server).await;
        for number in 0..100 {
            let id = format!("r{number}");
            let request = json!({
                "id": id,
                "method": "environment/status",
                "trace": {"traceparent": format!("00-{:032x}-{:016x}-01", 1, number + 1)},
            });
            client.send(request.to_string()).await;
            assert_eq!(client.response(id.as_str()).await.unwrap(), json!({"status": "ready"}));
        }
        client.close().await;
        server.shut_down().await;
    }
}
