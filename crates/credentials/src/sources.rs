//! The sources of credentials: the environment, read once, and `auth.json`.

use std::env;
use std::path::PathBuf;
use std::time::SystemTime;

use crate::agent::AgentIdentity;
use crate::auth_file::AuthFile;
use crate::home::home_dir;
use crate::sign_in::{SignIn, SignInError};
use crate::tokens::ChatGptTokens;
use codex_exec_remote::{BaseUrl, Secret};

/// The kind of credential that a caller requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SignInKind {
    /// `CODEX_API_KEY`, otherwise `auth.json`.
    #[default]
    Default,
    /// `CODEX_ACCESS_TOKEN`, an agent identity.
    AgentIdentity,
    /// `CODEX_EXEC_SERVER_REMOTE_BEARER_TOKEN`, for the older registration.
    RemoteBearer,
    /// For a harness: `CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN`, otherwise as [`Self::Default`].
    Harness,
}

/// Everything that sign-in reads.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SignInSources {
    /// `CODEX_HOME`, else `~/.codex`.
    pub codex_home: Option<PathBuf>,
    /// `CODEX_API_KEY`.
    pub api_key: Option<Secret>,
    /// `CODEX_ACCESS_TOKEN`.
    pub access_token: Option<Secret>,
    /// `CODEX_EXEC_SERVER_REMOTE_BEARER_TOKEN`.
    pub remote_bearer_token: Option<Secret>,
    /// `CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN`.
    pub harness_token: Option<Secret>,
    /// `CODEX_AUTH_API_URL`: where agents register their tasks.
    pub auth_api: Option<String>,
    /// `CODEX_LOGIN_ISSUER`: the issuer for renewals; default the one that issued the tokens.
    pub issuer: Option<String>,
    /// `CODEX_LOGIN_CLIENT_ID`: the client id for renewals; default the one in the tokens.
    pub client_id: Option<String>,
    /// Hosts that a credential may be sent to regardless of its rule.
    pub allowed_hosts: Vec<String>,
    /// The clock.
    pub now: fn() -> SystemTime,
}

/// Where agents register their tasks by default.
const DEFAULT_AUTH_API: &str = "https://auth.openai.com";

impl Default for SignInSources {
    fn default() -> Self {
        Self {
            codex_home: None,
            api_key: None,
            access_token: None,
            remote_bearer_token: None,
            harness_token: None,
            auth_api: None,
            issuer: None,
            client_id: None,
            allowed_hosts: Vec::new(),
            now: SystemTime::now,
        }
    }
}

impl SignInSources {
    /// Reads this process's environment. Empty variables count as unset.
    pub fn from_env() -> Self {
        let text = |name| env::var(name).ok().filter(|value: &String| !value.trim().is_empty());
        // A path may be any bytes.
        let path = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let secret = |name| text(name).map(|value| Secret::from(value.trim()));
        let home = || home_dir().map(|home| home.join(".codex"));
        Self {
            codex_home: path("CODEX_HOME").or_else(home),
            api_key: secret("CODEX_API_KEY"),
            access_token: secret("CODEX_ACCESS_TOKEN"),
            remote_bearer_token: secret("CODEX_EXEC_SERVER_REMOTE_BEARER_TOKEN"),
            harness_token: secret("CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN"),
            auth_api: text("CODEX_AUTH_API_URL"),
            issuer: text("CODEX_LOGIN_ISSUER"),
            client_id: text("CODEX_LOGIN_CLIENT_ID"),
            ..Self::default()
        }
    }

    /// The `auth.json`, if there is a home directory.
    pub fn auth_file(&self) -> Option<AuthFile> {
        self.codex_home.as_deref().map(AuthFile::in_home)
    }

    /// Chooses the credential to use.
    pub fn sign_in(&self, kind: SignInKind) -> Result<SignIn, SignInError> {
        let sign_in = match kind {
            SignInKind::AgentIdentity => {
                let token = self.access_token.clone().ok_or(SignInError::NoAccessToken)?;
                let base = self.auth_api.as_deref().unwrap_or(DEFAULT_AUTH_API);
                let base: BaseUrl = base.parse().map_err(|_| {
                    SignInError::AgentTask("CODEX_AUTH_API_URL is not a URL".into())
                })?;
                SignIn::agent(AgentIdentity::new(&token, base, self.now)?)
            }
            SignInKind::RemoteBearer => {
                SignIn::bearer(self.remote_bearer_token.clone().ok_or(SignInError::NoRemoteToken)?)
            }
            SignInKind::Harness => match &self.harness_token {
                Some(token) => SignIn::bearer(token.clone()),
                None => self.default_sign_in()?,
            },
            SignInKind::Default => self.default_sign_in()?,
        };
        Ok(sign_in.with_allowed_hosts(self.allowed_hosts.clone()))
    }

    fn default_sign_in(&self) -> Result<SignIn, SignInError> {
        if let Some(key) = &self.api_key {
            return Ok(SignIn::api_key(key.clone()));
        }
        let file = self.auth_file().ok_or(SignInError::None)?;
        let content = file.read()?.ok_or(SignInError::None)?;
        if let Some(tokens) = content.tokens
            && !tokens.access_token.is_empty()
        {
            let issuer = (self.issuer.clone(), self.client_id.clone());
            return Ok(SignIn::chat_gpt(ChatGptTokens::new(file, tokens, issuer, self.now)));
        }
        match content.api_key {
            Some(key) if !key.trim().is_empty() => Ok(SignIn::api_key(key.trim().into())),
            _ => Err(SignInError::None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn home(content: &str) -> (tempfile::TempDir, SignInSources) {
        let home = tempfile::tempdir().unwrap();
        std::fs::write(home.path().join("auth.json"), content).unwrap();
        let codex_home = Some(home.path().to_owned());
        (home, SignInSources { codex_home, ..Default::default() })
    }

    #[test]
    fn sign_in_sources_follow_their_precedence() {
        let both = r#"{"OPENAI_API_KEY":"f","tokens":{"id_token":"","access_token":"t","refresh_token":"r","account_id":"a"}}"#;
        let (_kept, mut sources) = home(both);
        let kind =
            |sources: &SignInSources| sources.sign_in(SignInKind::Default).map(|s| s.describe());
        assert_eq!(kind(&sources).unwrap(), "ChatGPT sign-in");
        sources.api_key = Some("k".into());
        assert_eq!(kind(&sources).unwrap(), "API key");

        let harness =
            |sources: &SignInSources| sources.sign_in(SignInKind::Harness).map(|s| s.describe());
        assert_eq!(harness(&sources).unwrap(), "API key");
        sources.harness_token = Some("h".into());
        assert_eq!(harness(&sources).unwrap(), "bearer token");
        assert_eq!(kind(&sources).unwrap(), "API key", "a server takes no harness's token");

        let (_kept, sources) = home(r#"{"OPENAI_API_KEY":"f"}"#);
        assert_eq!(kind(&sources).unwrap(), "API key");
        let (_kept, sources) = home(r#"{"OPENAI_API_KEY":null}"#);
        assert!(kind(&sources).unwrap_err().to_string().contains("run codex login"));
        assert!(matches!(kind(&SignInSources::default()), Err(SignInError::None)));
    }

    #[test]
    fn requested_credential_kind_is_never_substituted() {
        let sources = SignInSources { api_key: Some("k".into()), ..Default::default() };
        let error = sources.sign_in(SignInKind::AgentIdentity).unwrap_err();
        assert!(matches!(error, SignInError::NoAccessToken));
        let error = sources.sign_in(SignInKind::RemoteBearer).unwrap_err();
        assert!(matches!(error, SignInError::NoRemoteToken));
        let sources = SignInSources { access_token: Some("k".into()), ..Default::default() };
        assert!(matches!(sources.sign_in(SignInKind::Default), Err(SignInError::None)));
    }
}
