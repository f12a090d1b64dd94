//! `codex exec-server token`: creates the token file of `--ws-auth capability-token`.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use codex_exec_server::credentials::create_new;

use crate::exit::print_stderr;
use crate::style::quoted;

/// Create a token file for --ws-auth capability-token
///
/// The token has 256 random bits. The file gets mode 0600; one that exists is left alone. Copy it to the clients
/// over a channel that you trust, such as scp.
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  codex exec-server token /etc/codex/token
  codex exec-server --listen ws://0.0.0.0:4500 --ws-auth capability-token --ws-token-file /etc/codex/token
  codex shell --on ws://HOST:4500 --token-file token")]
pub(crate) struct TokenArgs {
    /// The file to create
    #[arg(value_name = "PATH")]
    file: PathBuf,
}

impl TokenArgs {
    pub(crate) fn create(&self) -> anyhow::Result<()> {
        let mut bits = [0; 32];
        getrandom::fill(&mut bits).context("cannot get random bytes from the system")?;
        let mut token: String = bits.iter().map(|byte| format!("{byte:02x}")).collect();
        token.push('\n');
        let shown = self.file.display();
        create_new(&self.file)
            .and_then(|mut file| file.write_all(token.as_bytes()).and_then(|()| file.sync_all()))
            .with_context(|| format!("cannot create the token file {shown}"))?;
        let file = quoted(&self.file.to_string_lossy());
        print_stderr(format_args!(
            "created {shown}; serve with: codex exec-server --listen ws://IP:PORT --ws-auth capability-token \
             --ws-token-file {file}; connect with a copy: codex shell --on ws://HOST:PORT --token-file FILE"
        ));
        Ok(())
    }
}
