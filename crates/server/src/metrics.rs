//! Counters of a server, and the page of Prometheus text that shows them.
//!
//! They are atomic numbers that nothing locks; without `--metrics` there are none. No label comes from a
//! client, so that the page has a bounded length.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use codex_exec_host::process::ExitSummary;
use codex_exec_server_protocol::ErrorKind;
use codex_exec_server_protocol::resources::EndedBy;
use http_body_util::Full;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use crate::server::Server;

/// Upper bounds of the buckets of the start latency, in microseconds.
const BUCKETS: [u64; 12] = [
    500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000, 2_500_000,
    10_000_000,
];

/// Pages that are served at once; more connections wait.
const CONCURRENT_PAGES: usize = 8;

/// How long a scraper may take.
const SCRAPE_TIMEOUT: Duration = Duration::from_secs(10);

/// The counters of a server.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    connections: AtomicI64,
    connections_total: AtomicU64,
    refused: [AtomicU64; Refused::ALL.len()],
    processes: AtomicI64,
    starts: AtomicU64,
    /// By kind of error, in the order of [`ErrorKind::ALL`].
    failed_starts: FailedStarts,
    start_buckets: [AtomicU64; BUCKETS.len() + 1],
    start_us: AtomicU64,
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
    denials: AtomicU64,
    limits: [AtomicU64; LIMITS.len()],
}

#[derive(Debug)]
struct FailedStarts(Box<[AtomicU64]>);

impl Default for FailedStarts {
    fn default() -> Self {
        Self(ErrorKind::ALL.iter().map(|_| AtomicU64::new(0)).collect())
    }
}

const LIMITS: [EndedBy; 7] = [
    EndedBy::Oom,
    EndedBy::Wall,
    EndedBy::Idle,
    EndedBy::Cpu,
    EndedBy::Pids,
    EndedBy::Output,
    EndedBy::Disk,
];

/// Why a peer was not served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    /// It is sandboxed, or its process is unknown.
    Admission,
    /// It is a page in a browser.
    Origin,
    /// Its token is missing or wrong.
    Token,
    /// There are too many connections.
    Limit,
}

impl Refused {
    const ALL: [Self; 4] = [Self::Admission, Self::Origin, Self::Token, Self::Limit];

    fn name(self) -> &'static str {
        match self {
            Self::Admission => "admission",
            Self::Origin => "origin",
            Self::Token => "token",
            Self::Limit => "limit",
        }
    }
}

/// Counts a connection, a process or the like while it exists.
#[derive(Debug)]
pub(crate) struct Counted {
    metrics: Arc<Metrics>,
    which: fn(&Metrics) -> &AtomicI64,
}

impl Drop for Counted {
    fn drop(&mut self) {
        (self.which)(&self.metrics).fetch_sub(1, Relaxed);
    }
}

impl Metrics {
    pub(crate) fn connection(self: &Arc<Self>) -> Counted {
        self.connections_total.fetch_add(1, Relaxed);
        self.count(|metrics| &metrics.connections)
    }

    pub(crate) fn process(self: &Arc<Self>) -> Counted {
        self.count(|metrics| &metrics.processes)
    }

    fn count(self: &Arc<Self>, which: fn(&Metrics) -> &AtomicI64) -> Counted {
        which(self).fetch_add(1, Relaxed);
        Counted { metrics: self.clone(), which }
    }

    pub(crate) fn refused(&self, why: Refused) {
        let counter = Refused::ALL.iter().zip(&self.refused).find(|(one, _)| **one == why);
        if let Some((_, counter)) = counter {
            counter.fetch_add(1, Relaxed);
        }
    }

    pub(crate) fn started(&self, took: Duration) {
        let us = took.as_micros() as u64;
        let bucket = BUCKETS.iter().position(|&bound| us <= bound).unwrap_or(BUCKETS.len());
        self.start_buckets[bucket].fetch_add(1, Relaxed);
        self.start_us.fetch_add(us, Relaxed);
        self.starts.fetch_add(1, Relaxed);
    }

    pub(crate) fn start_failed(&self, kind: ErrorKind) {
        let counter =
            ErrorKind::ALL.iter().zip(&self.failed_starts.0).find(|(one, _)| **one == kind);
        if let Some((_, counter)) = counter {
            counter.fetch_add(1, Relaxed);
        }
    }

    pub(crate) fn exited(&self, exit: &ExitSummary) {
        if exit.sandbox_denied {
            self.denials.fetch_add(1, Relaxed);
        }
        let limit = LIMITS.iter().zip(&self.limits).find(|(by, _)| Some(**by) == exit.ended_by);
        if let Some((_, counter)) = limit {
            counter.fetch_add(1, Relaxed);
        }
    }

    pub(crate) fn received(&self, bytes: usize) {
        self.bytes_in.fetch_add(bytes as u64, Relaxed);
    }

    pub(crate) fn sent(&self, bytes: usize) {
        self.bytes_out.fetch_add(bytes as u64, Relaxed);
    }

    /// The page, in the text format of Prometheus.
    fn page(&self, sessions: [usize; 2]) -> String {
        let mut page = Page(String::with_capacity(4096));
        let get = |counter: &AtomicU64| counter.load(Relaxed);
        let gauge = |gauge: &AtomicI64| gauge.load(Relaxed).max(0).cast_unsigned();
        page.head("connections", "gauge", "Connections that are open.");
        page.value("connections", "", gauge(&self.connections));
        page.head("connections_total", "counter", "Connections that were accepted.");
        page.value("connections_total", "", get(&self.connections_total));
        page.head("refused_peers_total", "counter", "Peers that were not served, by reason.");
        for (why, counter) in Refused::ALL.iter().zip(&self.refused) {
            page.value("refused_peers_total", &label("reason", why.name()), get(counter));
        }
        page.head("sessions", "gauge", "Sessions, by whether a connection is attached.");
        for (state, count) in ["attached", "detached"].into_iter().zip(sessions) {
            page.value("sessions", &label("state", state), count as u64);
        }
        page.head("processes", "gauge", "Processes that run.");
        page.value("processes", "", gauge(&self.processes));
        page.head(
            "start_failures_total",
            "counter",
            "Processes that did not start, by error kind.",
        );
        for (kind, counter) in ErrorKind::ALL.iter().zip(&self.failed_starts.0) {
            if get(counter) > 0 {
                page.value("start_failures_total", &label("kind", kind.name()), get(counter));
            }
        }
        page.head("start_seconds", "histogram", "Time from a start request to its response.");
        let mut below = 0;
        for (bound, counter) in BUCKETS.iter().zip(&self.start_buckets) {
            below += get(counter);
            let bound = format!("{}", *bound as f64 / 1e6);
            page.value("start_seconds_bucket", &label("le", &bound), below);
        }
        // The sum of the buckets, not another counter: they must agree while they change.
        let count = below + self.start_buckets.last().map_or(0, get);
        page.value("start_seconds_bucket", &label("le", "+Inf"), count);
        page.line("start_seconds_sum", "", &format!("{}", get(&self.start_us) as f64 / 1e6));
        page.value("start_seconds_count", "", count);
        page.head("received_bytes_total", "counter", "Bytes of messages from clients.");
        page.value("received_bytes_total", "", get(&self.bytes_in));
        page.head("sent_bytes_total", "counter", "Bytes of messages to clients.");
        page.value("sent_bytes_total", "", get(&self.bytes_out));
        page.head(
            "sandbox_denials_total",
            "counter",
            "Processes whose sandbox probably denied them something.",
        );
        page.value("sandbox_denials_total", "", get(&self.denials));
        page.head("limits_reached_total", "counter", "Processes that a limit ended, by limit.");
        for (by, counter) in LIMITS.iter().zip(&self.limits) {
            page.value("limits_reached_total", &label("limit", by.name()), get(counter));
        }
        page.0
    }
}

fn label(name: &str, value: &str) -> String {
    format!("{{{name}=\"{value}\"}}")
}

struct Page(String);

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ =
            writeln!(self.0, "# HELP codex_exec_{name} {help}\n# TYPE codex_exec_{name} {kind}");
    }

    fn value(&mut self, name: &str, labels: &str, value: u64) {
        self.line(name, labels, &value.to_string());
    }

    fn line(&mut self, name: &str, labels: &str, value: &str) {
        let _ = writeln!(self.0, "codex_exec_{name}{labels} {value}");
    }
}

/// Serves the page until the server shuts down. Sandboxed processes are refused, as by the server itself.
pub(crate) async fn serve(listener: TcpListener, server: Server) {
    let slots = Arc::new(Semaphore::new(CONCURRENT_PAGES));
    loop {
        let Ok(slot) = slots.clone().acquire_owned().await else { return };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = server.shutting_down() => return,
        };
        match accepted {
            Ok((socket, _)) => {
                let served = serve_one(socket, server.clone());
                tokio::spawn(async move {
                    let _slot = slot;
                    let _ = tokio::time::timeout(SCRAPE_TIMEOUT, served).await;
                });
            }
            Err(error) => {
                tracing::warn!(%error, "accept failed");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

async fn serve_one(socket: TcpStream, server: Server) {
    let refused = server.host().peers().admit(&socket).await.is_err();
    let service = service_fn(|request: Request<hyper::body::Incoming>| {
        let found = (request.method(), request.uri().path()) == (&Method::GET, "/metrics");
        let (status, text) = match (refused, found) {
            (true, _) => (StatusCode::FORBIDDEN, "refused\n".to_owned()),
            (_, false) => (StatusCode::NOT_FOUND, "not found; GET /metrics\n".to_owned()),
            _ => (StatusCode::OK, server.metrics_page()),
        };
        let mut response = Response::new(Full::new(Bytes::from(text)));
        *response.status_mut() = status;
        let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
        response.headers_mut().insert(CONTENT_TYPE, kind);
        async move { Ok::<_, std::convert::Infallible>(response) }
    });
    let http = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(SCRAPE_TIMEOUT)
        .max_buf_size(16 << 10)
        .keep_alive(false)
        .serve_connection(TokioIo::new(socket), service);
    if let Err(error) = http.await {
        tracing::debug!(%error, "a scrape failed");
    }
}

impl Server {
    /// Counts a peer that was not served, if there are counters.
    pub(crate) fn count_refused(&self, why: Refused) {
        if let Some(metrics) = self.metrics() {
            metrics.refused(why);
        }
    }

    /// The counters as a page; empty without counters.
    pub(crate) fn metrics_page(&self) -> String {
        let sessions = self.sessions().counts();
        self.metrics().map(|metrics| metrics.page(sessions)).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_shows_what_was_counted() {
        let metrics = Arc::new(Metrics::default());
        let open = metrics.connection();
        drop(metrics.connection());
        metrics.refused(Refused::Token);
        let mut random = fastrand::Rng::with_seed(15);
        let times: Vec<u64> = (0..500).map(|_| random.u64(..20_000_000)).collect();
        times.iter().for_each(|&us| metrics.started(Duration::from_micros(us)));
        metrics.start_failed(ErrorKind::ProgramNotFound);
        let page = metrics.page([2, 1]);
        let value = |name: &str| -> f64 {
            let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            line.unwrap_or_else(|| panic!("{name} in {page}")).parse().unwrap()
        };
        assert_eq!(value("codex_exec_connections"), 1.0);
        assert_eq!(value("codex_exec_connections_total"), 2.0);
        assert_eq!(value("codex_exec_refused_peers_total{reason=\"token\"}"), 1.0);
        assert_eq!(value("codex_exec_sessions{state=\"detached\"}"), 1.0);
        assert_eq!(value("codex_exec_start_failures_total{kind=\"programNotFound\"}"), 1.0);
        assert_eq!(value("codex_exec_start_seconds_count"), 500.0);
        for bound in BUCKETS {
            let expected = times.iter().filter(|&&us| us <= bound).count();
            let name = format!("codex_exec_start_seconds_bucket{{le=\"{}\"}}", bound as f64 / 1e6);
            assert_eq!(value(&name), expected as f64, "{bound}");
        }
        drop(open);
        assert!(metrics.page([0, 0]).contains("\ncodex_exec_connections 0\n"));
    }
}
