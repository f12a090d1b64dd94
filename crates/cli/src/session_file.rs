//! The file of a saved session: its name, and its text.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The name of a saved session: letters, digits, `-`, `_` and `.`; never a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SessionName(String);

impl FromStr for SessionName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let fine = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if text.is_empty()
            || text.starts_with(['.', '-'])
            || text.len() > 64
            || !text.chars().all(fine)
        {
            return Err("expected up to 64 letters, digits, -, _ and ., not starting with - or ."
                .to_owned());
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for SessionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A saved session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SavedSession {
    #[serde(skip)]
    pub name: String,
    /// The server, as in `--on`.
    pub url: String,
    /// The registry, if the server is an environment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub registry: Option<String>,
    /// The session's id.
    pub session_id: String,
    /// The id of the named process.
    pub process_id: String,
    /// Whether the process has a terminal.
    #[serde(default)]
    pub tty: bool,
    /// The credential that the session was made with; no other one is sent to its server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credential: Option<SavedCredential>,
    /// The name of the place in the user's file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<String>,
}

/// What is remembered of a credential; never its value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedCredential {
    /// The flag or variable that it came from.
    pub source: String,
    /// A digest of it and its origin.
    pub digest: String,
}

impl SavedSession {
    /// Reads the text of a file, which does not say the name.
    pub(crate) fn parse(text: &[u8]) -> serde_json::Result<Self> {
        serde_json::from_slice(text)
    }

    /// The text of its file.
    pub(crate) fn to_text(&self) -> serde_json::Result<Vec<u8>> {
        let mut text = serde_json::to_vec_pretty(self)?;
        text.push(b'\n');
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_be_a_path() {
        for good in ["build", "a.b-c_1"] {
            good.parse::<SessionName>().unwrap();
        }
        for bad in ["", ".", "..", "a/b", "-x", ".hidden", "a b", "ä"] {
            bad.parse::<SessionName>().unwrap_err();
        }
    }
}
