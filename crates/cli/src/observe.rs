//! What an operator sees of a server: the flags for metrics, spans, the control socket, the audit log and
//! recordings.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::Args;
use codex_exec_server::{AuditConfig, AuditLog, RecordConfig, Recorder, ServerConfig, SpanConfig};
use tokio::signal::unix::{SignalKind, signal};

#[derive(Debug, Args)]
#[command(next_help_heading = "Observation")]
pub(crate) struct ObserveArgs {
    /// Serve counters as Prometheus text at http://IP:PORT/metrics; the address must be loopback
    #[arg(long, value_name = "IP:PORT")]
    metrics: Option<SocketAddr>,

    /// Export spans of requests that carry a sampled traceparent to this OpenTelemetry collector, by OTLP over
    /// HTTP, for example http://127.0.0.1:4318
    #[arg(long, value_name = "URL")]
    otlp_endpoint: Option<String>,

    /// Listen on this Unix socket for the operator: codex exec-server status, drain
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,

    /// Append who did what to this file (mode 0600) as JSON lines; SIGHUP reopens it
    #[arg(long, value_name = "FILE")]
    audit_log: Option<PathBuf>,

    /// Refuse requests while the audit log cannot be written
    #[arg(long, requires = "audit_log")]
    audit_required: bool,

    /// Record the output of every terminal to this directory, as asciicast files; see codex replay
    #[arg(long, value_name = "DIR")]
    record: Option<PathBuf>,

    /// Record what is typed, too: that includes passwords
    #[arg(long, requires = "record")]
    record_input: bool,
}

impl ObserveArgs {
    /// The files that no sandbox may open.
    pub(crate) fn files(&self) -> impl Iterator<Item = &Path> {
        self.audit_log.as_deref().into_iter().chain(self.record.as_deref())
    }

    /// Sets the configuration of a server.
    pub(crate) fn configure(&self, config: &mut ServerConfig) -> anyhow::Result<()> {
        if let Some(address) = self.metrics {
            if !address.ip().is_loopback() {
                bail!(
                    "--metrics {address} is reachable from other machines, and anyone may read it; \
                     use a loopback address and a proxy that asks for a password"
                );
            }
            config.metrics_address = Some(address);
        }
        if let Some(endpoint) = &self.otlp_endpoint {
            let spans = SpanConfig::new(endpoint);
            let invalid = || format!("invalid --otlp-endpoint {endpoint:?}");
            config.spans = Some(spans.with_context(invalid)?);
        }
        config.control_socket = self.control.clone();
        if let Some(path) = &self.audit_log {
            let mut audit = AuditConfig::new(path);
            audit.required = self.audit_required;
            let opened = AuditLog::open(audit);
            let log =
                opened.with_context(|| format!("cannot open --audit-log {}", path.display()))?;
            config.audit = Some(log);
        }
        if let Some(directory) = &self.record {
            let mut record = RecordConfig::new(directory);
            record.input = self.record_input;
            let started = Recorder::start(record);
            let recorder =
                started.with_context(|| format!("cannot use --record {}", directory.display()))?;
            config.recorder = Some(recorder);
        }
        Ok(())
    }
}

/// Reopens the audit log on each SIGHUP. Call it inside a runtime.
pub(crate) fn reopen_on_hangup(config: &ServerConfig) -> anyhow::Result<()> {
    let Some(log) = config.audit.clone() else { return Ok(()) };
    let mut hangups = signal(SignalKind::hangup()).context("cannot listen for SIGHUP")?;
    tokio::spawn(async move {
        while hangups.recv().await.is_some() {
            log.reopen();
        }
    });
    Ok(())
}
