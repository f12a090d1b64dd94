//! Flags of Codex configuration that service files pass to `exec-server`. Most are checked and have no
//! effect: this server is configured by its own flags only.

use clap::{Args, ValueEnum};

/// Flags that another implementation reads.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Compatibility")]
pub(crate) struct ConfigArgs {
    /// Accepted for compatibility: a Codex configuration value, which this server ignores
    #[arg(short = 'c', long = "config", value_name = "KEY=VALUE", hide_short_help = true)]
    config: Vec<String>,

    /// Accepted for compatibility: a Codex feature, which this server ignores
    #[arg(long, value_name = "FEATURE", value_parser = feature, hide_short_help = true)]
    enable: Vec<String>,

    /// Accepted for compatibility: a Codex feature, which this server ignores
    #[arg(long, value_name = "FEATURE", value_parser = feature, hide_short_help = true)]
    disable: Vec<String>,

    /// Accepted for compatibility: this server has no settings in config.toml
    #[arg(long, hide_short_help = true)]
    strict_config: bool,

    /// Give each sandbox its own PIDs (isolate), or show it all processes of this machine (inherit)
    ///
    /// With inherit, commands see the host's /proc, command lines included; they can still neither
    /// signal nor inspect processes outside of their sandbox.
    #[arg(
        long,
        value_name = "MODE",
        value_enum,
        hide_short_help = true,
        hide_possible_values = true
    )]
    linux_sandbox_pid_namespace: Option<PidNamespace>,

    /// Let proxies of a managed network pass requests for private addresses on to the upstream proxy
    #[arg(long, hide_short_help = true, env = "CODEX_EXEC_SERVER_PROXY_PRIVATE_IPS_VIA_UPSTREAM")]
    pub(crate) proxy_private_ips_via_upstream: bool,
}

/// The same flags before the subcommand.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct GlobalConfigArgs {
    #[arg(short = 'c', long = "config", value_name = "KEY=VALUE", hide = true)]
    config: Vec<String>,

    #[arg(long, value_name = "FEATURE", value_parser = feature, hide = true)]
    enable: Vec<String>,

    #[arg(long, value_name = "FEATURE", value_parser = feature, hide = true)]
    disable: Vec<String>,

    #[arg(long, hide = true)]
    strict_config: bool,
}

impl GlobalConfigArgs {
    /// Logs the flags that have no effect. Call it once logging is set up.
    pub(crate) fn note_ignored(&self) {
        note_ignored(&self.config, self.enable.iter().chain(&self.disable));
    }
}

impl ConfigArgs {
    /// Whether sandboxes see the processes of the host.
    pub(crate) fn shares_pids(&self) -> bool {
        self.linux_sandbox_pid_namespace == Some(PidNamespace::Inherit)
    }

    /// Logs the flags that have no effect. Call it once logging is set up.
    pub(crate) fn note_ignored(&self) {
        note_ignored(&self.config, self.enable.iter().chain(&self.disable));
    }
}

fn note_ignored<'a>(config: &[String], features: impl Iterator<Item = &'a String>) {
    // Values may be secrets.
    for key in config.iter().map(|setting| setting.split('=').next().unwrap_or_default()) {
        tracing::info!(key, "configuration value ignored");
    }
    for feature in features {
        tracing::info!(feature, "feature flag ignored");
    }
}

fn feature(text: &str) -> Result<String, String> {
    let named = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if text.is_empty() || !text.chars().all(named) {
        return Err("expected the name of a feature".to_owned());
    }
    Ok(text.to_owned())
}

/// Whose PIDs a sandbox sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PidNamespace {
    Isolate,
    Inherit,
}
