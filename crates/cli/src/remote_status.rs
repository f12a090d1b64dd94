//! What a server in remote mode prints to stderr for people: that clients can reach it and how, and when its
//! connection to the rendezvous is lost and restored.
//!
//! Invariant: nothing among the lines of `--log-format json`, which has the same events at level info.

use tokio::sync::watch;

use crate::exit::print_stderr;
use crate::logging;
use crate::style::quoted;

/// What a server in remote mode is reached by.
#[derive(Debug)]
pub(crate) enum Served<'a> {
    /// An environment behind a rendezvous.
    Environment(&'a str),
    /// An executor of the older revision.
    Executor(&'a str),
    /// An environment on a websocket that the server dials.
    Direct(&'a str),
}

/// Prints the status that is sent to the result, until that is dropped. Must be called inside a tokio runtime.
pub(crate) fn report(registry: &str, served: &Served<'_>) -> watch::Sender<bool> {
    let (status, mut changes) = watch::channel(false);
    if logging::is_json() {
        return status;
    }
    let first = first_line(registry, served);
    tokio::spawn(async move {
        if changes.wait_for(|connected| *connected).await.is_err() {
            return;
        }
        print_stderr(format_args!("{first}"));
        let mut shown = true;
        while changes.changed().await.is_ok() {
            let connected = *changes.borrow_and_update();
            if connected == shown {
                continue;
            }
            shown = connected;
            match connected {
                true => print_stderr(format_args!("connected again")),
                false => print_stderr(format_args!(
                    "the connection is lost; reconnecting; commands keep running"
                )),
            }
        }
    });
    status
}

fn first_line(registry: &str, served: &Served<'_>) -> String {
    let registry = registry.trim_end_matches('/');
    match served {
        Served::Environment(id) => format!(
            "serving environment {id} through {registry}, until Ctrl-C; connect with: codex shell --on {} \
             --registry {}",
            quoted(&format!("env:{id}")),
            quoted(registry)
        ),
        Served::Executor(id) => format!(
            "serving executor {id} through {registry}, until Ctrl-C; the rendezvous can read all traffic: \
             --environment-id encrypts it end to end"
        ),
        Served::Direct(id) => {
            format!("serving environment {id} on a websocket that {registry} named, until Ctrl-C")
        }
    }
}
