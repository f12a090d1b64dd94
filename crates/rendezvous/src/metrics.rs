//! Metrics for Prometheus: numbers only, no ids and no addresses.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;

use crate::table::Dropped;

/// Counters since the start.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    pub frames_to_environments: AtomicU64,
    pub frames_to_harnesses: AtomicU64,
    pub bytes_to_environments: AtomicU64,
    pub bytes_to_harnesses: AtomicU64,
    frames_between_nodes: AtomicU64,
    bytes_between_nodes: AtomicU64,
    invalid: AtomicU64,
    not_owned: AtomicU64,
    unknown: AtomicU64,
    away: AtomicU64,
    pub resets: AtomicU64,
    pub cut_off: AtomicU64,
    pub replaced: AtomicU64,
    pub authentication_failures: AtomicU64,
    pub limited: AtomicU64,
    pub store_errors: AtomicU64,
    requests: Mutex<BTreeMap<(&'static str, u16), u64>>,
}

/// Current values.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Gauges {
    pub environments: usize,
    pub harnesses: usize,
    pub streams: usize,
    pub connections: usize,
    pub wires: usize,
}

impl Metrics {
    pub(crate) fn dropped(&self, why: Dropped) {
        let counter = match why {
            Dropped::Invalid => &self.invalid,
            Dropped::NotOwned => &self.not_owned,
            Dropped::Unknown => &self.unknown,
            Dropped::Away => &self.away,
        };
        counter.fetch_add(1, Relaxed);
    }

    /// Counts a frame from another node.
    pub(crate) fn between_nodes(&self, len: usize) {
        self.frames_between_nodes.fetch_add(1, Relaxed);
        self.bytes_between_nodes.fetch_add(len as u64, Relaxed);
    }

    pub(crate) fn request(&self, call: &'static str, status: u16) {
        let mut requests = self.requests.lock();
        *requests.entry((call, status)).or_default() += 1;
    }

    /// Renders everything in the Prometheus text format.
    pub(crate) fn render(&self, now: Gauges) -> String {
        let mut out = String::with_capacity(4096);
        let mut metric = |name: &str, kind: &str, help: &str, values: &[(&str, u64)]| {
            let _ = writeln!(out, "# HELP codex_rendezvous_{name} {help}");
            let _ = writeln!(out, "# TYPE codex_rendezvous_{name} {kind}");
            for (labels, value) in values {
                let _ = writeln!(out, "codex_rendezvous_{name}{labels} {value}");
            }
        };
        let get = |counter: &AtomicU64| counter.load(Relaxed);
        let gauge = |value: usize| [("", value as u64)];
        let online = gauge(now.environments);
        metric("environments_online", "gauge", "Environments connected to this node.", &online);
        metric("harnesses", "gauge", "Harnesses connected to this node.", &gauge(now.harnesses));
        metric(
            "streams",
            "gauge",
            "Open streams between harnesses and environments.",
            &gauge(now.streams),
        );
        metric("connections", "gauge", "Open connections.", &gauge(now.connections));
        metric(
            "wires",
            "gauge",
            "Harnesses whose environment is at another node.",
            &gauge(now.wires),
        );
        metric(
            "frames_forwarded_total",
            "counter",
            "Frames forwarded.",
            &[
                ("{to=\"environment\"}", get(&self.frames_to_environments)),
                ("{to=\"harness\"}", get(&self.frames_to_harnesses)),
            ],
        );
        metric(
            "bytes_forwarded_total",
            "counter",
            "Bytes of forwarded frames.",
            &[
                ("{to=\"environment\"}", get(&self.bytes_to_environments)),
                ("{to=\"harness\"}", get(&self.bytes_to_harnesses)),
            ],
        );
        metric(
            "frames_dropped_total",
            "counter",
            "Frames dropped, by reason.",
            &[
                ("{why=\"invalid\"}", get(&self.invalid)),
                ("{why=\"not_owned\"}", get(&self.not_owned)),
                ("{why=\"unknown\"}", get(&self.unknown)),
                ("{why=\"away\"}", get(&self.away)),
            ],
        );
        let counters = [
            (
                "frames_between_nodes_total",
                "Frames received from other nodes.",
                &self.frames_between_nodes,
            ),
            (
                "bytes_between_nodes_total",
                "Bytes of frames received from other nodes.",
                &self.bytes_between_nodes,
            ),
            ("resets_total", "Streams ended by the service.", &self.resets),
            ("cut_off_total", "Tokens cut off because their handshakes failed.", &self.cut_off),
            ("registrations_replaced_total", "Registrations that were replaced.", &self.replaced),
            (
                "authentication_failures_total",
                "Tokens and URLs that were refused.",
                &self.authentication_failures,
            ),
            ("limited_total", "Requests answered with 429.", &self.limited),
            ("store_errors_total", "Failures of the store.", &self.store_errors),
        ];
        for (name, help, counter) in counters {
            metric(name, "counter", help, &[("", get(counter))]);
        }
        let requests = self.requests.lock();
        let labels: Vec<_> = requests
            .iter()
            .map(|((call, status), count)| {
                (format!("{{call=\"{call}\",status=\"{status}\"}}"), *count)
            })
            .collect();
        let labels: Vec<_> = labels.iter().map(|(label, count)| (label.as_str(), *count)).collect();
        metric("requests_total", "counter", "Requests by call and status.", &labels);
        out
    }
}
