//! `--ca-file`: whom to trust where this program dials TLS.

use std::path::PathBuf;

use clap::Args;
use codex_exec_server::client::trust_only;

/// `--ca-file`.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct CaArgs {
    /// Trust the certificate authorities in this PEM file instead of the system's
    /// [$CODEX_CA_CERTIFICATE names one to trust besides them]
    #[arg(long, help_heading = "Connection", value_name = "FILE")]
    ca_file: Option<PathBuf>,
}

impl CaArgs {
    /// Makes the connections of this program trust the file. Call it before the first.
    pub(crate) fn apply(&self) -> anyhow::Result<()> {
        match &self.ca_file {
            Some(file) => trust_only(file).map_err(anyhow::Error::msg),
            None => Ok(()),
        }
    }
}
