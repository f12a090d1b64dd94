//! `codex logs`: prints the output of a process without attaching to it.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use codex_exec_server::ReadParams;

use crate::exit::print_stderr;
use crate::on::block_on;
use crate::output::Sink;
use crate::target::{Join, TargetArgs};

/// Print the output of a process
///
/// The server keeps the newest 16 MiB of a process started by codex run --detach. Its stdout goes to
/// stdout, its stderr to stderr. If the server drops output while logs prints, logs prints how much and
/// exits with 1.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codex logs build             print the output so far
  codex logs -f build          follow it; Ctrl-C stops logs, not the process")]
pub(crate) struct LogsArgs {
    #[command(flatten)]
    target: TargetArgs,

    /// Follow the output until the process ends
    #[arg(short, long)]
    follow: bool,
}

/// How long one request waits for more output.
const WAIT: Duration = Duration::from_secs(20);
/// Bytes per request.
const READ_BYTES: u64 = 1 << 20;

pub(crate) fn run(args: &LogsArgs) -> anyhow::Result<ExitCode> {
    block_on(async {
        let target = args.target.open(Join::VIEW).await?;
        let mut sink = Sink::new(false);
        let (mut after, mut gaps) = (0, Gaps::default());
        loop {
            let params = ReadParams {
                process_id: target.process.clone(),
                after_seq: Some(after),
                max_bytes: Some(READ_BYTES),
                wait_ms: args.follow.then_some(WAIT.as_secs() * 1000),
            };
            let read = target.connected.client.process_read(params).await?;
            let mut dropped = read.dropped_bytes;
            for chunk in &read.chunks {
                if let Some(amount) = gaps.before(chunk.seq, dropped, read.exited) {
                    print_stderr(format_args!("the server dropped {amount} of output before this"));
                }
                dropped = 0;
                sink.output(chunk.stream, &chunk.chunk.0).await?;
            }
            match read.chunks.last() {
                Some(last) => after = last.seq,
                None if read.closed || !args.follow => break,
                // Skip the exit's number, or the next request would return at once again.
                None => after = read.next_seq.saturating_sub(1).max(after),
            }
        }
        target.connected.close().await;
        Ok(if gaps.failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    })
}

/// Finds missing output by gaps in the sequence numbers.
#[derive(Debug, Default)]
struct Gaps {
    last: u64,
    /// The number of the exit, which no chunk has, was skipped.
    exit_found: bool,
    /// Output is missing between printed chunks. Output missing before all of them was dropped earlier, and
    /// is no failure.
    failed: bool,
}

impl Gaps {
    /// The amount of output missing before a chunk.
    fn before(&mut self, seq: u64, dropped: u64, exited: bool) -> Option<String> {
        let missing = seq.saturating_sub(self.last + 1);
        let first = std::mem::replace(&mut self.last, seq) == 0;
        if missing == 1 && dropped == 0 && exited && !self.exit_found {
            self.exit_found = true;
            return None;
        }
        if missing == 0 && dropped == 0 {
            return None;
        }
        self.failed |= !first;
        Some(match (dropped, missing) {
            (0, 1) => "1 chunk".to_owned(),
            (0, chunks) => format!("{chunks} chunks"),
            (bytes, _) => format!("{bytes} bytes"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_reported_but_the_number_of_the_exit_is_no_gap() {
        let mut gaps = Gaps::default();
        assert_eq!(gaps.before(4, 0, false), Some("3 chunks".to_owned()));
        assert!(!gaps.failed, "dropped before the first chunk");
        assert_eq!(gaps.before(5, 0, true), None);
        assert_eq!(gaps.before(7, 0, true), None);
        assert!(!gaps.failed, "6 is the exit's");
        assert_eq!(gaps.before(9, 0, true), Some("1 chunk".to_owned()));
        assert!(gaps.failed);
        assert_eq!(gaps.before(12, 300, true), Some("300 bytes".to_owned()));
    }
}
