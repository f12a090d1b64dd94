//! Logs: to stderr, never to stdout.

use std::sync::atomic::{AtomicBool, Ordering};

use clap::{Args, ValueEnum};
use tracing_subscriber::EnvFilter;

/// Whether stderr carries JSON lines.
static JSON: AtomicBool = AtomicBool::new(false);

/// Whether log lines are JSON, so that no other text belongs on stderr of a server.
pub(crate) fn is_json() -> bool {
    JSON.load(Ordering::Relaxed)
}

/// How the program logs.
#[derive(Debug, Args)]
pub(crate) struct LoggingArgs {
    /// Write log lines as text or json; $RUST_LOG sets the level (default: warn)
    #[arg(
        long,
        value_enum,
        default_value_t,
        global = true,
        value_name = "FORMAT",
        hide_possible_values = true,
        display_order = 900
    )]
    log_format: LogFormat,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum LogFormat {
    /// For people
    #[default]
    Text,
    /// For programs: one JSON object per line
    Json,
}

impl LoggingArgs {
    /// Starts logging for the rest of the program.
    pub(crate) fn start(&self) {
        let mut filter =
            EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
        // At lower levels the library logs whole messages, which contain keys.
        for directive in ["async_nats=warn", "async_nats::connection=warn"] {
            filter = filter.add_directive(directive.parse().unwrap_or_default());
        }
        // A line that cannot be written is lost. To report that, the library would print to stderr, and so
        // panic in whichever thread logged.
        let builder = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            .log_internal_errors(false);
        JSON.store(self.log_format == LogFormat::Json, Ordering::Relaxed);
        match self.log_format {
            LogFormat::Text => {
                use std::io::IsTerminal;
                let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
                builder.with_ansi(std::io::stderr().is_terminal() && !plain).init();
            }
            LogFormat::Json => builder.json().init(),
        }
    }
}
