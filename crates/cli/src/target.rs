//! The process that a command refers to: by a saved name, or by session and process id.

use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use codex_exec_server::{AttachParams, ErrorKind, ProcessId, ProcessInfo, Role, SessionInfo};

use crate::exit::{self, CommandError};
use crate::on::{ConnectOptions, Connected, OnArgs};
use crate::place::place;
use crate::saved_sessions::{SavedSession, SessionName};
use crate::style::quoted;

#[derive(Debug, Args)]
pub(crate) struct TargetArgs {
    #[command(flatten)]
    pub on: OnArgs,

    /// The session of the process: its id (needs --on) or a saved name
    #[arg(long, value_name = "ID")]
    session: Option<String>,

    /// A name given by --detach or printed by codex shell; with --session, a process id
    #[arg(value_name = "NAME")]
    pub id: String,
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

/// How a command joins a session beside the clients that are there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Join {
    pub role: Role,
    /// Receive the events of the process.
    pub watch: bool,
    /// Detach all others.
    pub take: bool,
}

impl Join {
    /// To read.
    pub(crate) const VIEW: Self = Self { role: Role::View, watch: false, take: false };
    /// To change something.
    pub(crate) const CONTROL: Self = Self { role: Role::Control, watch: false, take: false };

    pub(crate) fn options(self, process: Option<&str>) -> ConnectOptions {
        let events = process.filter(|_| self.watch).map(ProcessId::from).into_iter().collect();
        let attach = AttachParams { role: self.role, events, take: self.take };
        ConnectOptions { attach: Some(attach), heartbeat: self.watch, ..ConnectOptions::default() }
    }
}

impl TargetArgs {
    /// Connects to the session and finds the process.
    pub(crate) async fn open(&self, join: Join) -> anyhow::Result<Target> {
        let (connected, saved, process) = match &self.session {
            Some(session) => {
                let options = join.options(Some(&self.id));
                let (connected, saved) = connect(&self.on, session, options).await?;
                (connected, saved, self.id.clone())
            }
            None => match find(&self.on, &self.id)? {
                Some(saved) => {
                    let process = saved.process_id.clone();
                    let options = join.options(Some(&process));
                    (resume(&self.on, &saved, options).await?, Some(saved), process)
                }
                None => {
                    let Some((session, process)) = self.find_on_server().await? else {
                        if let Some(saved) = find_saved(&self.id)? {
                            bail!(
                                "no detached process named `{}` on {}; the one that is saved by this name is \
                                 on {}: leave out --on and $CODEX_EXEC_SERVER_URL, or pass --on {}",
                                self.id,
                                self.on.display(),
                                saved.shown_url(),
                                quoted(&saved.shown_url())
                            );
                        }
                        bail!(
                            "no detached process named `{}`; `codex ps` lists the names, with --on \
                             those of other machines too, and --session with --on finds other \
                             processes",
                            self.id
                        );
                    };
                    let options = join.options(Some(&process));
                    let options = ConnectOptions { session: Some(session), ..options };
                    (self.on.connect(options).await?, None, process)
                }
            },
        };
        let process = ProcessId::from(process.as_str());
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

impl TargetArgs {
    /// The same arguments, quoted for a shell.
    pub(crate) fn arguments(&self) -> String {
        let session = match &self.session {
            Some(session) => format!(" --session {}", quoted(session)),
            None => String::new(),
        };
        format!("{}{session} {}", self.on.flag(), quoted(&self.id))
    }

    /// The session and the process with this name on the server of `--on`, wherever it was started.
    async fn find_on_server(&self) -> anyhow::Result<Option<(String, String)>> {
        let mut found = named(list(&self.on).await?, &self.id);
        match (found.pop(), found.is_empty()) {
            (Some(session), true) => {
                let process = process_of(&session).map(|process| process.process_id.to_string());
                Ok(process.map(|process| (session.session_id, process)))
            }
            (None, _) => Ok(None),
            (Some(_), false) => bail!(
                "{} sessions are named `{}`; choose one by --session, with an id from `codex ps \
                 --json`",
                found.len() + 1,
                self.id
            ),
        }
    }
}

/// The sessions with this name that have a process, only the running ones if there are any.
fn named(sessions: Vec<SessionInfo>, name: &str) -> Vec<SessionInfo> {
    let named =
        sessions.into_iter().filter(|session| session.session_name.as_deref() == Some(name));
    let (running, ended): (Vec<_>, Vec<_>) =
        named.partition(|session| process_of(session).is_some_and(|process| !process.exited));
    if running.is_empty() { ended.into_iter().next_back().into_iter().collect() } else { running }
}

/// The process that a named session is about: its first.
pub(crate) fn process_of(session: &SessionInfo) -> Option<&ProcessInfo> {
    session.processes.first()
}

/// The sessions of this user on the server of `--on`; none without a server, or if it cannot list them.
pub(crate) async fn list(on: &OnArgs) -> anyhow::Result<Vec<SessionInfo>> {
    if on.place().is_none() {
        return Ok(Vec::new());
    }
    let options = ConnectOptions { fail_fast: true, ..ConnectOptions::default() };
    let connected = on.connect(options).await?;
    let listed = match connected.client.capabilities().session_sharing {
        true => connected.client.session_list().await.map(|listed| listed.sessions),
        false => Ok(Vec::new()),
    };
    connected.close().await;
    Ok(listed?)
}

/// How long to wait for the server of a name that may be free.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// Fails if a process that still runs has the name. The name of one that has ended is free.
pub(crate) async fn require_free(on: &OnArgs, name: &SessionName) -> anyhow::Result<()> {
    let Some(saved) = SavedSession::find(name)? else { return Ok(()) };
    let ended = async {
        let options = ConnectOptions { fail_fast: true, ..Join::VIEW.options(None) };
        let connected = match resume(on, &saved, options).await {
            Ok(connected) => connected,
            // `resume` has removed it.
            Err(error) => return exit::kind(&error) == ErrorKind::UnknownSession,
        };
        let listed = connected.client.process_list().await;
        connected.close().await;
        listed.is_ok_and(|listed| {
            let mut named = listed
                .processes
                .iter()
                .filter(|process| *process.process_id.0 == *saved.process_id);
            named.all(|process| process.exited)
        })
    };
    match tokio::time::timeout(REPLY_TIMEOUT, ended).await {
        Ok(true) => saved.remove(),
        _ => saved.refuse(),
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

/// The saved session with this name, unless `--on` names another server; `None` if the text is not a valid name.
fn find(on: &OnArgs, text: &str) -> anyhow::Result<Option<SavedSession>> {
    Ok(find_saved(text)?.filter(|saved| on.is_server_of(saved)))
}

fn find_saved(text: &str) -> anyhow::Result<Option<SavedSession>> {
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
    if let Some(saved) = find(on, session)? {
        return Ok((resume(on, &saved, options).await?, Some(saved)));
    }
    if on.place().is_none() {
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
