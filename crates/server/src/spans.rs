//! Spans of requests, exported to an OpenTelemetry collector: OTLP over HTTP, as JSON.
//!
//! A request whose `traceparent` is sampled becomes a span below its caller's; others cost nothing. One task
//! sends what has gathered, a batch at a time. Its queue is bounded: a collector that is slow or gone loses
//! spans, and delays no request.
//!
//! Invariant: a span has the method, two times and the kind of the error, and nothing else of the request.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use codex_exec_rpc::{HttpTarget, Proxies};
use codex_exec_server_protocol::{ErrorKind, Method, RpcError, Trace, TraceParent};
use http_body_util::{BodyExt, Full, Limited};
use hyper::header::{CONTENT_TYPE, HOST, HeaderValue};
use hyper::{Request, StatusCode};
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};
use url::Url;

/// Longest response of a collector that is read, in bytes.
const MAX_RESPONSE: usize = 64 << 10;

/// Where and how to export spans.
#[derive(Clone)]
#[non_exhaustive]
pub struct SpanConfig {
    /// The collector, without `/v1/traces`.
    endpoint: Url,
    /// Spans that wait to be sent (default: 4,096); more are lost.
    pub queue: usize,
    /// Most spans in one message to the collector (default: 512).
    pub batch: usize,
    /// How long a span waits for others before it is sent (default: 1 s).
    pub interval: Duration,
    /// Time for one message, its response included (default: 10 s).
    pub timeout: Duration,
}

/// Why a URL cannot be the endpoint of a collector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SpanEndpointError {
    /// It is not a URL of HTTP.
    #[error("expected http://HOST:PORT or https://HOST")]
    Url,
    /// It holds a user name, a password, a query or a fragment, which logs would show.
    #[error("expected no user, password, query or fragment")]
    Extra,
}

impl SpanConfig {
    /// Exports to this collector, for example `http://127.0.0.1:4318`.
    pub fn new(endpoint: &str) -> Result<Self, SpanEndpointError> {
        let endpoint = Url::parse(endpoint.trim()).map_err(|_| SpanEndpointError::Url)?;
        if !matches!(endpoint.scheme(), "http" | "https") || !endpoint.has_host() {
            return Err(SpanEndpointError::Url);
        }
        let extra = [endpoint.query(), endpoint.fragment(), endpoint.password()];
        if !endpoint.username().is_empty() || extra.iter().any(Option::is_some) {
            return Err(SpanEndpointError::Extra);
        }
        Ok(Self {
            endpoint,
            queue: 4096,
            batch: 512,
            interval: Duration::from_secs(1),
            timeout: Duration::from_secs(10),
        })
    }
}

impl fmt::Debug for SpanConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpanConfig")
            .field("endpoint", &self.endpoint.as_str())
            .finish_non_exhaustive()
    }
}

/// Takes the spans of a server. Clones share its queue.
#[derive(Debug, Clone)]
pub(crate) struct SpanExporter {
    queue: mpsc::Sender<Message>,
    lost: Arc<AtomicU64>,
}

#[derive(Debug)]
enum Message {
    Span(Finished),
    Flush(oneshot::Sender<()>),
}

/// The span of a request that has ended.
#[derive(Debug)]
struct Finished {
    parent: TraceParent,
    method: &'static str,
    began: SystemTime,
    took: Duration,
    error: Option<&'static str>,
}

impl SpanExporter {
    /// Starts the task that sends. Call it inside a runtime.
    pub(crate) fn start(config: SpanConfig) -> Self {
        let (queue, messages) = mpsc::channel(config.queue.max(1));
        let lost = Arc::<AtomicU64>::default();
        tokio::spawn(export(config, messages, lost.clone()));
        Self { queue, lost }
    }

    /// Begins the span of a request; `None` if its caller does not record one.
    pub(crate) fn begin(&self, trace: Option<&Trace>, method: &str) -> Option<Box<Span>> {
        let parent: TraceParent = trace?.traceparent.as_deref()?.parse().ok()?;
        parent.is_sampled.then(|| {
            Box::new(Span {
                exporter: self.clone(),
                parent,
                // What is not a method may be anything.
                method: Method::from_name(method).map_or("unknown", Method::name),
                began: SystemTime::now(),
                clock: Instant::now(),
                error: Some(CONNECTION_LOST),
            })
        })
    }

    /// Sends what is queued, and waits for that at most this long.
    pub(crate) async fn flush(&self, timeout: Duration) {
        let (done, flushed) = oneshot::channel();
        let flush = async {
            if self.queue.send(Message::Flush(done)).await.is_ok() {
                let _ = flushed.await;
            }
        };
        let _ = tokio::time::timeout(timeout, flush).await;
    }
}

/// What a span has instead of an error kind if the connection ended before the response.
const CONNECTION_LOST: &str = "connectionLost";

/// The span of a request; dropping it exports it.
#[derive(Debug)]
pub(crate) struct Span {
    exporter: SpanExporter,
    parent: TraceParent,
    method: &'static str,
    began: SystemTime,
    clock: Instant,
    error: Option<&'static str>,
}

impl Span {
    /// Sets what came of the request.
    pub(crate) fn respond(&mut self, error: Option<&RpcError>) {
        self.error = error.map(|error| error.kind.unwrap_or(ErrorKind::Internal).name());
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        let span = Finished {
            parent: self.parent,
            method: self.method,
            began: self.began,
            took: self.clock.elapsed(),
            error: self.error,
        };
        if self.exporter.queue.try_send(Message::Span(span)).is_err() {
            self.exporter.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Sends batches until the last exporter is dropped.
async fn export(config: SpanConfig, mut messages: mpsc::Receiver<Message>, lost: Arc<AtomicU64>) {
    let mut failing = false;
    while let Some(first) = messages.recv().await {
        let (mut spans, mut flushed) = (Vec::new(), Vec::new());
        let mut take = |message, spans: &mut Vec<Finished>| match message {
            Message::Span(span) => {
                spans.push(span);
                true
            }
            Message::Flush(done) => {
                flushed.push(done);
                false
            }
        };
        let gather = async {
            let mut goes_on = take(first, &mut spans);
            while goes_on && spans.len() < config.batch {
                let Some(message) = messages.recv().await else { return };
                goes_on = take(message, &mut spans);
            }
        };
        let _ = tokio::time::timeout(config.interval, gather).await;
        if !spans.is_empty() {
            let sent = tokio::time::timeout(config.timeout, send(&config, &spans)).await;
            let sent = sent.unwrap_or_else(|_| Err("no response in time".to_owned()));
            match sent {
                Ok(()) => {
                    let lost = lost.swap(0, Ordering::Relaxed);
                    if lost > 0 || failing {
                        tracing::warn!(lost, "spans are exported again");
                    }
                    failing = false;
                }
                Err(error) => {
                    lost.fetch_add(spans.len() as u64, Ordering::Relaxed);
                    if !std::mem::replace(&mut failing, true) {
                        let endpoint = config.endpoint.as_str();
                        tracing::warn!(endpoint, %error, "cannot export spans; they are lost");
                    }
                }
            }
        }
        for done in flushed {
            let _ = done.send(());
        }
    }
}

async fn send(config: &SpanConfig, spans: &[Finished]) -> Result<(), String> {
    let endpoint = &config.endpoint;
    let authority = &endpoint[url::Position::BeforeHost..url::Position::AfterPort];
    let path = format!("{}/v1/traces", endpoint.path().trim_end_matches('/'));
    let mut request = Request::post(path)
        .body(Full::new(Bytes::from(message(spans).to_string())))
        .map_err(|error| error.to_string())?;
    let host = HeaderValue::from_str(authority).map_err(|error| error.to_string())?;
    request.headers_mut().insert(HOST, host);
    request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    let target = HttpTarget {
        secure: endpoint.scheme() == "https",
        authority,
        connect_timeout: config.timeout,
        tls: None,
        proxies: Proxies::from_env(),
    };
    let response = target.send(request).await.map_err(|error| error.to_string())?;
    let status = response.status();
    // Read to its end, so that the collector sees no broken connection.
    let _ = Limited::new(response.into_body(), MAX_RESPONSE).collect().await;
    match status {
        StatusCode::OK | StatusCode::ACCEPTED | StatusCode::NO_CONTENT => Ok(()),
        status => Err(format!("the collector answered {status}")),
    }
}

/// An `ExportTraceServiceRequest`.
fn message(spans: &[Finished]) -> Value {
    let text = |key: &str, value: &str| json!({"key": key, "value": {"stringValue": value}});
    let spans: Vec<Value> = spans
        .iter()
        .map(|span| {
            let began = span.began.duration_since(UNIX_EPOCH).unwrap_or_default();
            let mut attributes =
                vec![text("rpc.system", "jsonrpc"), text("rpc.method", span.method)];
            attributes.extend(span.error.map(|kind| text("error.type", kind)));
            json!({
                "traceId": hex(&span.parent.trace_id),
                // The half of a random UUID without its version.
                "spanId": hex(&uuid::Uuid::new_v4().as_bytes()[8..]),
                "parentSpanId": hex(&span.parent.span_id),
                "flags": 1,
                "name": span.method,
                // Of a server.
                "kind": 2,
                "startTimeUnixNano": began.as_nanos().to_string(),
                "endTimeUnixNano": (began + span.took).as_nanos().to_string(),
                "attributes": attributes,
                "status": if span.error.is_some() { json!({"code": 2}) } else { json!({}) },
            })
        })
        .collect();
    let version = env!("CARGO_PKG_VERSION");
    json!({"resourceSpans": [{
        "resource": {"attributes": [
            text("service.name", "codex-exec-server"), text("service.version", version),
        ]},
        "scopeSpans": [{"scope": {"name": "codex-exec-server", "version": version}, "spans": spans}],
    }]})
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_plain_urls_of_http() {
        for good in ["http://127.0.0.1:4318", "https://collector.example/otel/", "http://[::1]:1"] {
            assert!(SpanConfig::new(good).is_ok(), "{good}");
        }
        for bad in ["", "collector:4318", "ftp://x", "unix:/x", "http://"] {
            assert_eq!(SpanConfig::new(bad).unwrap_err(), SpanEndpointError::Url, "{bad}");
        }
        for bad in ["http://u@h", "http://u:p@h", "http://h/?key=k", "http://h/#x"] {
            assert_eq!(SpanConfig::new(bad).unwrap_err(), SpanEndpointError::Extra, "{bad}");
        }
    }
}
