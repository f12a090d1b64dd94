//! ChatGPT tokens: used while they last, renewed when they do not, shared with other processes.
//!
//! Invariant: tokens are renewed under the file's lock and after reading the file again, so two
//! processes never spend the same refresh token and never write over each other's renewal.

use std::fmt;
use std::time::{Duration, SystemTime};

use tokio::sync::Mutex;

use super::auth_file::AuthLock;
use super::issuer::IssuedTokens;
use super::{AuthFile, Issuer, OauthError, SignInError, TokenSet, claims, rfc3339};
use crate::base_url::BaseUrl;
use crate::http_client::HttpClient;
use crate::secret::Secret;

/// How long before its end a token is renewed.
const MARGIN: Duration = Duration::from_secs(60);
/// Who renews tokens that do not say where they come from.
pub(crate) const DEFAULT_ISSUER: &str = "https://auth.openai.com";

/// Tokens of a sign-in, and the file they live in.
pub struct ChatGptTokens {
    file: AuthFile,
    current: Mutex<TokenSet>,
    /// Issuer and client id, where those in the tokens are not to be used.
    issuer: (Option<String>, Option<String>),
    now: fn() -> SystemTime,
}

/// What one request carries.
pub(crate) struct Usable {
    pub(crate) access_token: Secret,
    pub(crate) account_id: Option<String>,
}

impl ChatGptTokens {
    /// The tokens read from `file`.
    pub fn new(
        file: AuthFile,
        tokens: TokenSet,
        issuer: (Option<String>, Option<String>),
        now: fn() -> SystemTime,
    ) -> Self {
        Self { file, current: Mutex::new(tokens), issuer, now }
    }

    pub(crate) async fn current(&self, http: &HttpClient) -> Result<Usable, SignInError> {
        let mut current = self.current.lock().await;
        if self.is_stale(&current) {
            *current = self.renewed(&current, http).await?;
        }
        Ok(usable(&current))
    }

    /// After a 401: gets other tokens. False if there are none to be had without signing in.
    pub(crate) async fn renew(&self, http: &HttpClient) -> Result<bool, SignInError> {
        let mut current = self.current.lock().await;
        match self.renewed(&current, http).await {
            Ok(tokens) => {
                *current = tokens;
                Ok(true)
            }
            // The registry's own refusal says more than that there is nothing to renew.
            Err(SignInError::Expired(error)) if !error.is_transient() => {
                tracing::info!(%error, "the sign-in was refused and not renewed");
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    fn is_stale(&self, tokens: &TokenSet) -> bool {
        claims(&tokens.access_token.as_str().into())
            .is_some_and(|claims| claims.expires_by((self.now)(), MARGIN))
    }

    async fn renewed(&self, old: &TokenSet, http: &HttpClient) -> Result<TokenSet, SignInError> {
        let file = self.file.clone();
        let lock = tokio::task::spawn_blocking(move || file.lock())
            .await
            .map_err(|error| SignInError::AgentTask(error.to_string()))??;
        let mut content = self.file.read()?.ok_or(SignInError::None)?;
        let stored = content.tokens.clone().ok_or(SignInError::None)?;
        if stored.access_token != old.access_token && !self.is_stale(&stored) {
            tracing::debug!("another process has renewed the sign-in");
            return Ok(stored);
        }
        let issued = self.ask(&stored, http).await.map_err(|error| match error {
            OauthError::Unreachable(error) => SignInError::Unreachable(error),
            other => SignInError::Expired(other),
        })?;
        let tokens = merge(stored, issued);
        content.tokens = Some(tokens.clone());
        content.last_refresh = Some(rfc3339((self.now)()));
        self.store(lock, content).await?;
        tracing::info!("renewed the sign-in");
        Ok(tokens)
    }

    async fn store(&self, lock: AuthLock, content: super::AuthJson) -> Result<(), SignInError> {
        let file = self.file.clone();
        tokio::task::spawn_blocking(move || file.write(&lock, &content))
            .await
            .map_err(|error| SignInError::AgentTask(error.to_string()))??;
        Ok(())
    }

    async fn ask(&self, old: &TokenSet, http: &HttpClient) -> Result<IssuedTokens, OauthError> {
        if old.refresh_token.is_empty() {
            return Err(OauthError::Setup("there is no refresh token"));
        }
        let identity = claims(&old.id_token.as_str().into()).unwrap_or_default();
        let base = self.issuer.0.clone().or(identity.iss.clone());
        let base = base.unwrap_or_else(|| DEFAULT_ISSUER.to_owned());
        let base: BaseUrl = base.parse().map_err(|_| OauthError::Setup("its issuer is no URL"))?;
        // A token names the client that it was made for.
        let client = self.issuer.1.clone();
        let client = client.or_else(|| identity.audiences().first().map(ToString::to_string));
        let client = client
            .ok_or(OauthError::Setup("its client is not known; set CODEX_LOGIN_CLIENT_ID"))?;
        let issuer = Issuer::discover(&base, client, http).await?;
        let fields = vec![
            ("grant_type", "refresh_token".to_owned()),
            ("refresh_token", old.refresh_token.clone()),
        ];
        issuer.tokens(fields, http).await
    }
}

/// The new tokens; what the issuer left out stays.
fn merge(mut tokens: TokenSet, issued: IssuedTokens) -> TokenSet {
    tokens.access_token = issued.access_token.expose().to_owned();
    if let Some(refresh_token) = issued.refresh_token {
        tokens.refresh_token = refresh_token.expose().to_owned();
    }
    if let Some(id_token) = issued.id_token {
        tokens.id_token = id_token.expose().to_owned();
    }
    tokens
}

fn usable(tokens: &TokenSet) -> Usable {
    let from_token = || Some(claims(&tokens.id_token.as_str().into())?.account()?.to_owned());
    Usable {
        access_token: tokens.access_token.as_str().into(),
        account_id: tokens.account_id.clone().or_else(from_token),
    }
}

impl fmt::Debug for ChatGptTokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatGptTokens").field("file", &self.file).finish_non_exhaustive()
    }
}
