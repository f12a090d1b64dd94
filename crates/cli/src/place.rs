//! The value of `--on`: an address, or the name of a place in the user's file.

use crate::exit;
use crate::places_file::{self, PlaceSettings, PlacesFile};

/// The value of `--on`, resolved.
#[derive(Debug, Clone)]
pub(crate) struct Chosen {
    pub place: Place,
    /// The name and the settings, if it was chosen by name.
    pub named: Option<Box<NamedPlace>>,
}

/// A place of the user's file.
#[derive(Debug, Clone)]
pub(crate) struct NamedPlace {
    pub name: String,
    pub settings: PlaceSettings,
}

impl From<Place> for Chosen {
    fn from(place: Place) -> Self {
        Self { place, named: None }
    }
}

/// Parses the value of `--on`. Reads the user's file if it can be a name.
pub(crate) fn choose(text: &str) -> Result<Chosen, String> {
    if !places_file::is_name(text) {
        return place(text).map(Chosen::from);
    }
    let settings = PlacesFile::read().and_then(|file| file.find(text).cloned());
    let settings = settings.map_err(|error| exit::message(&error))?;
    let place = settings.place()?;
    let named = NamedPlace { name: text.to_owned(), settings };
    Ok(Chosen { place, named: Some(Box::new(named)) })
}

/// A server that `--on` names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    /// A websocket, by its URL: `ws://`, `wss://`, `unix:` or `vsock:`.
    Websocket(String),
    /// A command that serves on its stdin and stdout.
    Stdio(Vec<String>),
    /// An environment behind a rendezvous, by its id.
    Environment(String),
}

impl Place {
    /// The place as text for [`place`], to be saved; `None` if its sessions end with their connection, or if
    /// its URL has a query or a fragment, which may be a secret.
    pub(crate) fn url(&self) -> Option<String> {
        match self {
            Self::Websocket(url) if url.starts_with("ws") => {
                (!url.contains(['?', '#', '@'])).then(|| url.clone())
            }
            Self::Websocket(url) => Some(url.clone()),
            Self::Stdio(_) => None,
            Self::Environment(id) => Some(format!("env:{id}")),
        }
    }
}

/// Parses an address.
pub(crate) fn place(text: &str) -> Result<Place, String> {
    if text.starts_with("ws://") || text.starts_with("wss://") {
        return Ok(Place::Websocket(text.to_owned()));
    }
    if let Some(path) = text.strip_prefix("unix:") {
        let path = path.strip_prefix("//").unwrap_or(path);
        // Absolute, so that a saved session is found from another directory too.
        let path = std::path::absolute(path)
            .ok()
            .and_then(|path| path.into_os_string().into_string().ok());
        let path = path.ok_or("expected the path of a socket, such as unix:/run/codex.sock")?;
        return Ok(Place::Websocket(format!("unix:{path}")));
    }
    if let Some(address) = text.strip_prefix("vsock:") {
        let is_number = |text: &str| text.parse::<u32>().is_ok();
        return match address.split_once(':') {
            Some((cid, port)) if is_number(cid) && is_number(port) => {
                Ok(Place::Websocket(text.to_owned()))
            }
            _ => Err("expected vsock:CID:PORT, such as vsock:3:4500".to_owned()),
        };
    }
    if let Some(command) = text.strip_prefix("stdio:") {
        let argv = shlex::split(command).ok_or("the command after stdio: has an unclosed quote")?;
        if argv.is_empty() {
            return Err(
                "expected a command, such as stdio:\"ssh host codex exec-server --listen stdio\""
                    .to_owned(),
            );
        }
        return Ok(Place::Stdio(argv));
    }
    if let Some(id) = text.strip_prefix("env:") {
        return match id.trim() {
            "" => Err("expected an environment id, such as env:laptop".to_owned()),
            id => Ok(Place::Environment(id.to_owned())),
        };
    }
    Err("expected ws://HOST:PORT, wss://HOST, unix:PATH, vsock:CID:PORT, stdio:COMMAND, env:ID or the name \
         of a place (`codex places list`)"
        .to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_parsed_or_refused() {
        assert_eq!(place("ws://h:1"), Ok(Place::Websocket("ws://h:1".into())));
        assert_eq!(
            place("stdio:ssh 'my host' x"),
            Ok(Place::Stdio(vec!["ssh".into(), "my host".into(), "x".into()]))
        );
        assert_eq!(place("env:laptop"), Ok(Place::Environment("laptop".into())));
        assert_eq!(place("unix:///run/a b"), Ok(Place::Websocket("unix:/run/a b".into())));
        assert_eq!(place("vsock:2:4500"), Ok(Place::Websocket("vsock:2:4500".into())));
        for bad in [
            "", "http://h", "stdio:", "stdio:'a", "h:1", "env:", "env: ", "unix:", "vsock:1",
            "vsock::1",
        ] {
            place(bad).unwrap_err();
        }
    }

    #[test]
    fn a_saved_place_parses_to_itself() {
        for text in ["ws://h:1", "wss://h/x", "unix:a", "vsock:1:2", "env:laptop"] {
            let url = place(text).unwrap().url().unwrap();
            assert_eq!(place(&url), place(text));
        }
        assert_eq!(place("stdio:cat").unwrap().url(), None);
    }
}
