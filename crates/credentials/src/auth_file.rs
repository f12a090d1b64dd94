//! `auth.json`: the stored credentials.
//!
//! Invariant: the file has mode 0600, in a directory that others cannot write, and is replaced as a whole, never written in place. A process changes
//! it only while it holds the lock file beside it, and after reading it under that lock. Unknown members
//! are preserved.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::private_files::{ExposedError, check_directory, make_private};

/// The location of the stored credentials.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuthFile {
    path: PathBuf,
}

/// The content of the file. `Debug` shows no secret.
#[derive(Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct AuthJson {
    /// How the user signed in: `apikey` or `chatgpt`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auth_mode: Option<String>,
    /// An API key.
    #[serde(rename = "OPENAI_API_KEY", default)]
    pub api_key: Option<String>,
    /// ChatGPT tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<TokenSet>,
    /// When the tokens were last renewed, RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_refresh: Option<String>,
    /// Members that this version does not know, preserved.
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

/// Tokens of a ChatGPT sign-in. `Debug` shows no token.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TokenSet {
    /// The JWT that identifies the user.
    pub id_token: String,
    /// The token that requests carry.
    pub access_token: String,
    /// The token that obtains the next access token.
    pub refresh_token: String,
    /// The account that the tokens act for.
    pub account_id: Option<String>,
}

/// Why the file could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum AuthFileError {
    /// A system call failed.
    #[error("cannot {doing} {}: {source}", path.display())]
    Io {
        /// The operation: `read`, `lock`, `write` or `remove`.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Others can change the file, or could read it.
    #[error(transparent)]
    Exposed(#[from] ExposedError),
    /// The file is not valid JSON of this form.
    #[error("{} is not a valid credentials file; run codex login to write a new one", .0.display())]
    Content(PathBuf),
}

/// Locks the file while it is read and replaced. Released on drop and at the end of the process.
#[derive(Debug)]
pub struct AuthLock {
    _file: File,
}

impl AuthFile {
    /// The `auth.json` in this directory.
    pub fn in_home(codex_home: &Path) -> Self {
        Self { path: codex_home.join("auth.json") }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the file; `None` if it does not exist.
    pub fn read(&self) -> Result<Option<AuthJson>, AuthFileError> {
        check_directory(self.directory())?;
        let read = || {
            let mut file = File::open(&self.path)?;
            let mut bytes = Vec::new();
            Ok((file.read_to_end(&mut bytes)?, file, bytes))
        };
        let read: io::Result<_> = read();
        if let Ok((_, file, _)) = &read {
            make_private(&self.path, file)?;
        }
        match read.map(|(_, _, bytes)| bytes) {
            Ok(bytes) => match serde_json::from_slice(&bytes) {
                Ok(read) => Ok(Some(read)),
                Err(_) => Err(AuthFileError::Content(self.path.clone())),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(self.error("read", source)),
        }
    }

    /// Waits for the lock. Blocks the thread.
    pub fn lock(&self) -> Result<AuthLock, AuthFileError> {
        check_directory(self.directory())?;
        let lock = || {
            let directory = self.directory();
            fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
            let file = OpenOptions::new()
                .create(true)
                .truncate(false)
                .write(true)
                .mode(0o600)
                .custom_flags(OFlags::NOFOLLOW.bits().cast_signed())
                .open(self.path.with_extension("json.lock"))?;
            file.lock()?;
            Ok(AuthLock { _file: file })
        };
        lock().map_err(|source| self.error("lock", source))
    }

    /// Replaces the file, under the lock.
    pub fn write(&self, _lock: &AuthLock, content: &AuthJson) -> Result<(), AuthFileError> {
        let replace = || {
            // Created with mode 0600 in the same directory, so that the rename is atomic.
            let mut file = tempfile::NamedTempFile::new_in(self.directory())?;
            let mut bytes = serde_json::to_vec_pretty(content).map_err(io::Error::other)?;
            bytes.push(b'\n');
            file.write_all(&bytes)?;
            file.as_file().sync_all()?;
            file.persist(&self.path).map_err(|error| error.error)?;
            Ok(())
        };
        replace().map_err(|source| self.error("write", source))
    }

    /// Removes the file, under the lock. Returns whether it existed.
    pub fn remove(&self, _lock: &AuthLock) -> Result<bool, AuthFileError> {
        match fs::remove_file(&self.path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(source) => Err(self.error("remove", source)),
        }
    }

    fn directory(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("."))
    }

    fn error(&self, doing: &'static str, source: io::Error) -> AuthFileError {
        AuthFileError::Io { doing, path: self.path.clone(), source }
    }
}

impl fmt::Debug for AuthJson {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AuthJson")
            .field("auth_mode", &self.auth_mode)
            .field("api_key", &self.api_key.is_some())
            .field("tokens", &self.tokens.is_some())
            .field("last_refresh", &self.last_refresh)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for TokenSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenSet").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn auth_file_is_private_and_preserves_unknown_members() {
        let home = tempfile::tempdir().unwrap();
        let file = AuthFile::in_home(&home.path().join("new"));
        assert_eq!(file.read().unwrap(), None);
        let lock = file.lock().unwrap();
        let text = r#"{"OPENAI_API_KEY":null,"agent_identity":{"x":1},"later":[2]}"#;
        let mut content: AuthJson = serde_json::from_str(text).unwrap();
        content.tokens = Some(TokenSet { access_token: "secret".into(), ..Default::default() });
        file.write(&lock, &content).unwrap();
        assert_eq!(fs::metadata(file.path()).unwrap().permissions().mode() & 0o777, 0o600);
        let back = file.read().unwrap().unwrap();
        assert_eq!(back, content);
        assert_eq!(back.rest["later"], serde_json::json!([2]));
        assert!(!format!("{back:?}").contains("secret"));
        assert!(file.remove(&lock).unwrap());
        assert!(!file.remove(&lock).unwrap());
    }

    #[test]
    fn damaged_auth_file_is_reported() {
        let home = tempfile::tempdir().unwrap();
        let file = AuthFile::in_home(home.path());
        fs::write(file.path(), "{").unwrap();
        assert!(matches!(file.read(), Err(AuthFileError::Content(_))));
    }
}
