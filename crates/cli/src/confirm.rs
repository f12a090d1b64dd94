//! A yes-or-no question on the terminal, even if stdin is not one.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};

use codex_exec_server::client::Approval;

use crate::exit::print_stderr;
use crate::signals::Signals;

/// Asks the question. Anything but yes refuses: another answer, no terminal, a signal.
pub(crate) async fn confirm(question: &str, signals: &Signals) -> Approval {
    let Ok(mut terminal) = File::options().read(true).write(true).open("/dev/tty") else {
        print_stderr(format_args!(
            "the sandbox denied the command something, and --ask needs a terminal to ask on; run \
             codex in a terminal, or without --sandbox"
        ));
        return Approval::Refused;
    };
    let question = question.to_owned();
    let answer = tokio::task::spawn_blocking(move || {
        terminal.write_all(question.as_bytes())?;
        let mut line = String::new();
        BufReader::new(terminal).read_line(&mut line)?;
        std::io::Result::Ok(line)
    });
    let answer = tokio::select! {
        answer = answer => answer.ok().and_then(Result::ok).unwrap_or_default(),
        _ = signals.exit_code() => {
            let _ = writeln!(std::io::stderr());
            return Approval::Refused;
        }
    };
    match answer.trim().to_lowercase().as_str() {
        "y" | "yes" => Approval::Approved,
        _ => Approval::Refused,
    }
}
