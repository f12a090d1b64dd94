//! `codex logs`: what a process said, without being attached to it.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use codex_exec_server::ReadParams;

use crate::exit::tell;
use crate::on::{Wants, block_on};
use crate::output::Sink;
use crate::target::TargetArgs;

/// Print what a process said
///
/// As far as the server has kept it: 16 MiB for one started by codex run --detach. Its stderr goes
/// to stderr.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codex logs build             what it said so far
  codex logs -f build          and what it says from now on; Ctrl-C stops watching, not the process")]
pub struct LogsArgs {
    #[command(flatten)]
    target: TargetArgs,

    /// Go on until it has ended
    #[arg(short, long)]
    follow: bool,
}

/// How long one request waits for more.
const WAIT: Duration = Duration::from_secs(20);
/// How much is asked for at once.
const AT_ONCE: u64 = 1 << 20;

pub fn run(args: &LogsArgs) -> anyhow::Result<ExitCode> {
    block_on(async {
        let target = args.target.open(Wants::default()).await?;
        let mut sink = Sink::new(false);
        let mut after = 0;
        loop {
            let params = ReadParams {
                process_id: target.process.clone(),
                after_seq: Some(after),
                max_bytes: Some(AT_ONCE),
                wait_ms: args.follow.then_some(WAIT.as_secs() * 1000),
            };
            let read = target.connected.client.process_read(params).await?;
            if read.dropped_bytes > 0 {
                tell(format_args!("{} bytes before this were not kept", read.dropped_bytes));
            }
            for chunk in &read.chunks {
                sink.output(chunk.stream, &chunk.chunk.0).await?;
            }
            match read.chunks.last() {
                Some(last) => after = last.seq,
                None if read.closed || !args.follow => break,
                // The exit has a number too, and would be told again and again.
                None => after = read.next_seq.saturating_sub(1).max(after),
            }
        }
        target.connected.close().await;
        Ok(ExitCode::SUCCESS)
    })
}
