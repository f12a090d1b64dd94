//! Saved sessions, by name.
//!
//! One file per session, `$XDG_STATE_HOME/codex/sessions/NAME.json`, readable by its owner only: anyone who
//! knows a session's id and can connect can take it over. It contains no token.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

use anyhow::{Context, bail};
use codex_exec_server::client::WebsocketDial;
use codex_exec_server::credentials::{check_directory, create_new, home_dir};

use crate::on::OnArgs;
use crate::place::Place;
pub(crate) use crate::session_file::{SavedCredential, SavedSession, SessionName};

impl SavedSession {
    /// A session to save; `None` if the server's sessions end with their connection, or if its URL has a
    /// query, which may be a secret.
    pub(crate) fn new(
        name: &SessionName,
        on: &OnArgs,
        session: &str,
        process: &str,
        tty: bool,
    ) -> anyhow::Result<Option<Self>> {
        let Some(place) = on.place() else { return Ok(None) };
        let Some(url) = place.url() else { return Ok(None) };
        let registry = match place {
            Place::Environment(_) => on.registry().ok(),
            _ => None,
        };
        Ok(Some(Self {
            name: name.to_string(),
            url,
            registry,
            session_id: session.to_owned(),
            process_id: process.to_owned(),
            tty,
            credential: on.saved_credential()?,
            place: on.place_name().map(str::to_owned),
        }))
    }

    /// The server, for people: without what may be a secret in a file of an older version.
    pub(crate) fn shown_url(&self) -> String {
        match self.url.starts_with("ws") {
            true => WebsocketDial::new(&self.url).redacted_url(),
            false => self.url.clone(),
        }
    }

    /// The saved session with this name.
    pub(crate) fn find(name: &SessionName) -> anyhow::Result<Option<Self>> {
        let directory = directory()?;
        check_directory(&directory)?;
        let path = directory.join(format!("{name}.json"));
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => {
                return Err(error).with_context(|| format!("cannot read {}", path.display()));
            }
        };
        let saved = Self::parse(&text).with_context(|| {
            format!("{} is not a valid session file; remove it", path.display())
        })?;
        Ok(Some(Self { name: name.to_string(), ..saved }))
    }

    /// Fails because the name is in use.
    pub(crate) fn refuse(&self) -> anyhow::Result<()> {
        let name = &self.name;
        bail!(
            "the name `{name}` is already in use; see `codex ps`, then `codex attach {name}` or `codex \
             kill {name}`; if its server is gone for good, remove {}",
            self.file()?.display()
        )
    }

    /// All saved sessions, sorted by name.
    pub(crate) fn all() -> anyhow::Result<Vec<Self>> {
        let directory = directory()?;
        let entries = match fs::read_dir(&directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => {
                return Err(error).with_context(|| format!("cannot read {}", directory.display()));
            }
        };
        let mut all = Vec::new();
        for entry in entries {
            let file = entry?.file_name();
            let name = file.to_str().and_then(|file| file.strip_suffix(".json"));
            if let Some(Ok(name)) = name.map(str::parse)
                && let Some(saved) = Self::find(&name)?
            {
                all.push(saved);
            }
        }
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(all)
    }

    /// The session's file.
    pub(crate) fn file(&self) -> anyhow::Result<PathBuf> {
        Ok(directory()?.join(format!("{}.json", self.name)))
    }

    /// Saves the session atomically.
    pub(crate) fn write(&self) -> anyhow::Result<()> {
        let file = self.file()?;
        let failed = || format!("cannot save the session in {}", file.display());
        let directory = directory()?;
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&directory)
            .with_context(failed)?;
        let text = self.to_text()?;
        check_directory(&directory)?;
        let fresh = directory.join(format!(".{}.{}", self.name, std::process::id()));
        // Left by a process with the same id that was killed.
        let _ = fs::remove_file(&fresh);
        let written = create_new(&fresh)
            .and_then(|mut to| to.write_all(&text))
            .and_then(|()| fs::rename(&fresh, &file));
        if written.is_err() {
            let _ = fs::remove_file(&fresh);
        }
        written.with_context(failed)
    }

    /// Deletes the session's file.
    pub(crate) fn remove(&self) -> anyhow::Result<()> {
        let file = self.file()?;
        match fs::remove_file(&file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("cannot remove {}", file.display()))
            }
            _ => Ok(()),
        }
    }
}

/// The directory of the saved sessions.
pub(crate) fn directory() -> anyhow::Result<PathBuf> {
    let first = directories().next();
    first.context("cannot find the directory of saved sessions; set HOME or XDG_STATE_HOME")
}

/// That directory first, then the default one, which other commands of this user may use.
pub(crate) fn directories() -> impl Iterator<Item = PathBuf> {
    let named = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from);
    let named = named.filter(|path| path.is_absolute());
    let usual = home_dir().map(|home| home.join(".local/state"));
    named.into_iter().chain(usual).map(|state| state.join("codex/sessions"))
}
