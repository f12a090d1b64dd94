//! `codex kill`: sends a signal to a detached process.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use clap::{Args, ValueEnum};
use codex_exec_server::{
    ExecServerClient, ProcessId, ProcessSignal, SignalParams, TerminateParams,
};

use crate::exit::print_stderr;
use crate::on::block_on;
use crate::style;
use crate::target::{Join, TargetArgs};

/// End a detached process, or send it a signal
///
/// The signal goes to the process group. --signal kill also ends descendants that left the group. If the
/// process still runs two seconds after a signal that usually ends one, kill says so and exits with 0, since
/// the signal was sent. If the process has already exited, kill ends what it left running and frees its name.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  codex kill build                     ask it to end (SIGTERM)
  codex kill -s kill build             end it and everything it started; also -s SIGKILL, -s 9
  codex kill -s user1 build            send SIGUSR1")]
pub(crate) struct KillArgs {
    #[command(flatten)]
    target: TargetArgs,

    /// The signal to send; also as SIGTERM, TERM or 15
    #[arg(short, long, value_enum, ignore_case = true, default_value_t = Signal::Terminate)]
    signal: Signal,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Signal {
    #[value(aliases = ["int", "sigint", "2"])]
    Interrupt,
    #[value(aliases = ["term", "sigterm", "15"])]
    Terminate,
    #[value(aliases = ["sigkill", "9"])]
    Kill,
    #[value(aliases = ["hup", "sighup", "1"])]
    Hangup,
    #[value(aliases = ["sigquit", "3"])]
    Quit,
    #[value(aliases = ["usr1", "sigusr1", "10"])]
    User1,
    #[value(aliases = ["usr2", "sigusr2", "12"])]
    User2,
    #[value(aliases = ["sigstop", "19"])]
    Stop,
    #[value(aliases = ["cont", "sigcont", "18"])]
    Continue,
}

impl Signal {
    /// Whether the signal ends most processes. An interrupt often ends only what a shell runs.
    fn ends(self) -> bool {
        matches!(self, Self::Terminate | Self::Hangup | Self::Quit)
    }

    /// The name that systems know it by.
    fn name(self) -> &'static str {
        match self {
            Self::Interrupt => "SIGINT",
            Self::Terminate => "SIGTERM",
            Self::Kill => "SIGKILL",
            Self::Hangup => "SIGHUP",
            Self::Quit => "SIGQUIT",
            Self::User1 => "SIGUSR1",
            Self::User2 => "SIGUSR2",
            Self::Stop => "SIGSTOP",
            Self::Continue => "SIGCONT",
        }
    }
}

impl From<Signal> for ProcessSignal {
    fn from(signal: Signal) -> Self {
        match signal {
            Signal::Interrupt => Self::Interrupt,
            Signal::Terminate => Self::Terminate,
            Signal::Kill => Self::Kill,
            Signal::Hangup => Self::Hangup,
            Signal::Quit => Self::Quit,
            Signal::User1 => Self::User1,
            Signal::User2 => Self::User2,
            Signal::Stop => Self::Stop,
            Signal::Continue => Self::Continue,
        }
    }
}

pub(crate) fn run(args: &KillArgs) -> anyhow::Result<ExitCode> {
    block_on(async {
        let target = args.target.open(Join::CONTROL).await?;
        let client = &target.connected.client;
        let process_id = target.process.clone();
        if let Some(info) = &target.info
            && info.exited
        {
            // Its name becomes free, so kill what it left running.
            client.process_terminate(TerminateParams { process_id }).await?;
            target.forget()?;
            let code = info.exit_code.unwrap_or_default();
            print_stderr(format_args!("the process has already exited with code {code}"));
        } else if let Signal::Kill = args.signal {
            let killed = client.process_terminate(TerminateParams { process_id }).await?;
            if !killed.running {
                print_stderr(format_args!("the process has already exited"));
            }
            target.forget()?;
        } else {
            let signal = ProcessSignal::from(args.signal);
            if signal != ProcessSignal::Interrupt && !client.capabilities().process_signals {
                bail!(
                    "this server supports only interrupt and kill; add --signal interrupt or --signal kill"
                );
            }
            client.process_signal(SignalParams { process_id, signal }).await?;
            if args.signal.ends() && still_runs(client, &target.process).await {
                args.warn_running();
            }
        }
        target.connected.close().await;
        Ok(ExitCode::SUCCESS)
    })
}

impl KillArgs {
    /// Prints that the process still runs, and how to end it.
    fn warn_running(&self) {
        let signal = self.signal.name();
        let shown = style::printable(&self.target.id);
        let arguments = self.target.arguments();
        print_stderr(format_args!(
            "`{shown}` still runs {} s after {signal}: it ignores the signal, as interactive shells ignore \
             SIGTERM, or needs longer; `codex ps` shows when it has ended, and `codex kill -s \
             kill{arguments}` ends it with everything it started",
            WAIT.as_secs()
        ));
    }
}

/// How long a process may take to end before a message says that it has not.
const WAIT: Duration = Duration::from_secs(2);
/// How often to look whether it has ended.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Whether the process still runs after [`WAIT`]; false if the server cannot tell.
async fn still_runs(client: &ExecServerClient, process: &ProcessId) -> bool {
    if !client.capabilities().process_list {
        return false;
    }
    let ended = async {
        while let Ok(listed) = client.process_list().await
            && listed.processes.iter().any(|info| info.process_id == *process && !info.exited)
        {
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    };
    tokio::time::timeout(WAIT, ended).await.is_err()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_has_the_names_that_kill_takes() {
        let names = [
            ("2 int SIGINT interrupt", ProcessSignal::Interrupt),
            ("15 TERM SigTerm terminate", ProcessSignal::Terminate),
            ("9 KILL SIGKILL kill", ProcessSignal::Kill),
            ("1 HUP sighup hangup", ProcessSignal::Hangup),
            ("3 QUIT SIGQUIT", ProcessSignal::Quit),
            ("10 USR1 SIGUSR1 user1", ProcessSignal::User1),
            ("12 USR2 SIGUSR2 user2", ProcessSignal::User2),
            ("19 STOP SIGSTOP", ProcessSignal::Stop),
            ("18 CONT SIGCONT continue", ProcessSignal::Continue),
        ];
        for (names, expected) in names {
            for name in names.split(' ') {
                let parsed = Signal::from_str(name, true).unwrap_or_else(|_| panic!("{name}"));
                assert_eq!(ProcessSignal::from(parsed), expected, "{name}");
            }
        }
        assert!(Signal::from_str("SIG", true).is_err());
    }
}
