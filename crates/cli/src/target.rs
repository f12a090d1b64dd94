//! The process that a command refers to: by a saved name, or by session and process id.

use anyhow::{Context, bail};
use clap::Args;
use codex_exec_server::{ErrorKind, ProcessId, ProcessInfo};

use crate::exit::{self, CommandError};
use crate::on::{ConnectOptions, Connected, OnArgs};
use crate::place::place;
use crate::saved_sessions::{SavedSession, SessionName};

#[derive(Debug, Args)]
pub(crate) struct TargetArgs {
    #[command(flatten)]
    pub on: OnArgs,

    /// The session of the process: its id (needs --on) or a saved name
    #[arg(long, value_name = "ID")]
    session: Option<String>,

    /// A name given by --detach or printed by codex shell; with --session, a process id
    #[arg(value_name = "NAME")]
    id: String,
}

/// A process in its session.
#[derive(Debug)]
pub(crate) struct Target {
    pub connected: Connected,
    pub process: ProcessId,
    pub saved: Option<SavedSession>,
    /// The server's information about it, if the server can list processes.
    pub info: Option<ProcessInfo>,
}

impl TargetArgs {
    /// Connects to the session and finds the process.
    pub(crate) async fn open(&self, options: ConnectOptions) -> anyhow::Result<Target> {
        let (connected, saved) = match &self.session {
            Some(session) => connect(&self.on, session, options).await?,
            None => {
                let Some(saved) = find(&self.id)? else {
                    bail!(
                        "no detached process named `{}`; `codex ps` lists the names, --session with \
                         --on finds other processes",
                        self.id
                    );
                };
                (resume(&self.on, &saved, options).await?, Some(saved))
            }
        };
        let process = match (&self.session, &saved) {
            (None, Some(saved)) => saved.process_id.as_str(),
            _ => self.id.as_str(),
        };
        let process = ProcessId::from(process);
        let mut info = None;
        if connected.client.capabilities().process_list {
            let listed = connected.client.process_list().await?.processes;
            let names: Vec<String> =
                listed.iter().map(|process| process.process_id.to_string()).collect();
            info = listed.into_iter().find(|candidate| candidate.process_id == process);
            if info.is_none() {
                if let (None, Some(saved)) = (&self.session, &saved) {
                    saved.remove()?;
                    bail!("`{}` has ended, and its output was already read", saved.name);
                }
                match names.as_slice() {
                    [] => bail!("the session has no processes left"),
                    names => bail!(
                        "the session has no process `{process}`; it has {}",
                        crate::style::printable(&names.join(", "))
                    ),
                }
            }
        }
        Ok(Target { connected, process, saved, info })
    }
}

impl Target {
    /// Whether the process has a terminal.
    pub(crate) fn has_terminal(&self) -> bool {
        match &self.info {
            Some(info) => info.tty,
            None => self.saved.as_ref().is_some_and(|saved| saved.tty),
        }
    }

    /// Removes the saved name of a process that has ended.
    pub(crate) fn forget(&self) -> anyhow::Result<()> {
        self.saved.as_ref().map_or(Ok(()), SavedSession::remove)
    }
}

/// The saved session with this name; `None` if the text is not a valid name.
pub(crate) fn find(text: &str) -> anyhow::Result<Option<SavedSession>> {
    match text.parse::<SessionName>() {
        Ok(name) => SavedSession::find(&name),
        Err(_) => Ok(None),
    }
}

/// Connects to a session by its saved name or its id.
pub(crate) async fn connect(
    on: &OnArgs,
    session: &str,
    options: ConnectOptions,
) -> anyhow::Result<(Connected, Option<SavedSession>)> {
    if let Some(saved) = find(session)? {
        return Ok((resume(on, &saved, options).await?, Some(saved)));
    }
    if on.on.is_none() {
        bail!("no saved session `{session}`; if it is a session id, add --on SERVER");
    }
    let options = ConnectOptions { session: Some(session.to_owned()), ..options };
    Ok((on.connect(options).await?, None))
}

/// Connects to a saved session. Removes one that the server no longer knows.
pub(crate) async fn resume(
    on: &OnArgs,
    saved: &SavedSession,
    options: ConnectOptions,
) -> anyhow::Result<Connected> {
    let place = place(&saved.url).map_err(anyhow::Error::msg);
    let place = place.with_context(|| format!("cannot reattach to `{}`", saved.name))?;
    let on = on.for_saved(place, saved, !options.one_of_all);
    let options = ConnectOptions { session: Some(saved.session_id.clone()), ..options };
    match on.connect(options).await {
        Ok(connected) => Ok(connected),
        Err(error) if exit::kind(&error) == ErrorKind::UnknownSession => {
            saved.remove()?;
            let gone = anyhow::anyhow!(
                "`{}` is gone: its session expired or the server was restarted; the name is free \
                 again",
                saved.name
            );
            Err(CommandError::new(ErrorKind::UnknownSession, gone).into())
        }
        Err(error) => Err(error).with_context(|| format!("cannot reattach to `{}`", saved.name)),
    }
}
