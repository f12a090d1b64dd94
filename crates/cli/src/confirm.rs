//! A yes-or-no question on the terminal, even if stdin is not one.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};

use codex_exec_server::client::Approval;

use crate::exit::print_stderr;
use crate::signals::Signals;

/// The terminal that questions are asked on.
#[derive(Debug)]
pub(crate) struct Terminal(File);

impl Terminal {
    /// The controlling terminal; fails if there is none.
    pub(crate) fn open() -> io::Result<Self> {
        File::options().read(true).write(true).open("/dev/tty").map(Self)
    }

    /// Asks the question. Anything but yes is no: another answer, the end of the input, a failure.
    pub(crate) async fn ask(mut self, question: String) -> bool {
        let answer = tokio::task::spawn_blocking(move || {
            self.0.write_all(question.as_bytes())?;
            let mut line = String::new();
            BufReader::new(self.0).read_line(&mut line)?;
            io::Result::Ok(matches!(line.trim().to_lowercase().as_str(), "y" | "yes"))
        });
        answer.await.is_ok_and(|answer| answer.unwrap_or(false))
    }
}

/// Asks whether to run a command without its sandbox. A missing terminal and a signal refuse, too.
pub(crate) async fn confirm(question: &str, signals: &Signals) -> Approval {
    let Ok(terminal) = Terminal::open() else {
        print_stderr(format_args!(
            "the sandbox denied the command something, and --ask needs a terminal to ask on; run \
             codex in a terminal, or without --sandbox"
        ));
        return Approval::Refused;
    };
    let is_yes = tokio::select! {
        is_yes = terminal.ask(question.to_owned()) => is_yes,
        _ = signals.exit_code() => {
            let _ = writeln!(io::stderr());
            false
        }
    };
    match is_yes {
        true => Approval::Approved,
        false => Approval::Refused,
    }
}
