//! ChatGPT tokens: renewed before they expire, and shared with other processes.
//!
//! Invariant: a process renews tokens under the file's lock and after reading the file again, so two
//! processes never use the same refresh token and never overwrite each other's renewal. A refresh token
//! that was sent may be used up, so the new tokens are stored even if the caller no longer waits: a
//! separate task requests and stores them, and [`finish_renewals`] waits for it before the program ends.
//! Tokens of another account are never used in place of these.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use codex_exec_remote::{BaseUrl, HttpClient, Secret};
use tokio::sync::{Mutex, OwnedMutexGuard, RwLock};

use crate::auth_file::{AuthFile, AuthJson, AuthLock, TokenSet};
use crate::issuer::{IssuedTokens, Issuer, OauthError};
use crate::jwt::claims;
use crate::sign_in::SignInError;
use crate::timestamp::rfc3339;

/// How long before its expiry a token is renewed.
const MARGIN: Duration = Duration::from_secs(60);
/// The issuer for tokens that name none.
pub(crate) const DEFAULT_ISSUER: &str = "https://auth.openai.com";

/// Held for reading from the sending of a refresh token until the new tokens are stored; held for writing
/// at the end of the program.
static RENEWALS: RwLock<()> = RwLock::const_new(());

/// Waits up to `limit` until every renewal in progress is stored. No renewal begins in this process after
/// that. Call it before the runtime ends.
pub async fn finish_renewals(limit: Duration) {
    match tokio::time::timeout(limit, RENEWALS.write()).await {
        Ok(guard) => std::mem::forget(guard),
        Err(_) => tracing::warn!("renewing the sign-in did not finish in time"),
    }
}

/// The tokens of a sign-in, and the file that stores them.
pub struct ChatGptTokens {
    current: Arc<Mutex<TokenSet>>,
    renewer: Renewer,
}

/// Renews tokens.
#[derive(Debug, Clone)]
struct Renewer {
    file: AuthFile,
    /// Issuer and client id that replace those in the tokens.
    issuer: (Option<String>, Option<String>),
    now: fn() -> SystemTime,
}

/// What one request sends.
pub(crate) struct RequestTokens {
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
        let renewer = Renewer { file, issuer, now };
        Self { current: Arc::new(Mutex::new(tokens)), renewer }
    }

    /// The account, which stays the same when tokens are renewed; without one, the refresh token.
    pub(crate) fn identity(&self) -> Secret {
        match self.current.try_lock() {
            Ok(tokens) => tokens.account_id.clone().unwrap_or_else(|| tokens.refresh_token.clone()),
            // Being renewed. Unknown is never the same as another.
            Err(_) => String::new(),
        }
        .into()
    }

    pub(crate) async fn current(&self, http: &HttpClient) -> Result<RequestTokens, SignInError> {
        let current = self.current.clone().lock_owned().await;
        if self.renewer.is_stale(&current) {
            return self.renew_in_task(current, http).await;
        }
        Ok(request_tokens(&current))
    }

    /// Renews the tokens after a 401. False if that needs a new sign-in.
    pub(crate) async fn renew(&self, http: &HttpClient) -> Result<bool, SignInError> {
        let current = self.current.clone().lock_owned().await;
        match self.renew_in_task(current, http).await {
            Ok(_) => Ok(true),
            // The registry's own refusal is more helpful than the issuer's.
            Err(SignInError::Expired(error)) if !error.is_transient() => {
                tracing::info!(%error, "the sign-in was refused and cannot be renewed");
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Renews the tokens in a task that continues if the caller is cancelled.
    async fn renew_in_task(
        &self,
        mut current: OwnedMutexGuard<TokenSet>,
        http: &HttpClient,
    ) -> Result<RequestTokens, SignInError> {
        let (renewer, http) = (self.renewer.clone(), http.clone());
        let renewal = tokio::spawn(async move {
            *current = renewer.renew(&current, &http).await?;
            Ok(request_tokens(&current))
        });
        renewal.await.map_err(|error| SignInError::AgentTask(error.to_string()))?
    }
}

impl Renewer {
    fn is_stale(&self, tokens: &TokenSet) -> bool {
        claims(&tokens.access_token.as_str().into())
            .is_some_and(|claims| claims.expires_by((self.now)(), MARGIN))
    }

    async fn renew(&self, old: &TokenSet, http: &HttpClient) -> Result<TokenSet, SignInError> {
        let file = self.file.clone();
        let lock = tokio::task::spawn_blocking(move || file.lock())
            .await
            .map_err(|error| SignInError::AgentTask(error.to_string()))??;
        let (_, stored) = self.stored(old)?;
        if stored.access_token != old.access_token && !self.is_stale(&stored) {
            tracing::debug!("another process has renewed the sign-in");
            return Ok(stored);
        }
        let refused = |error| match error {
            OauthError::Unreachable(error) => SignInError::Unreachable(error),
            other => SignInError::Expired(other),
        };
        let issuer = self.issuer(&stored, http).await.map_err(refused)?;
        let _under_way = RENEWALS.read().await;
        let issued = refresh(&issuer, &stored, http).await.map_err(refused)?;
        // Not every program that writes the file takes the lock.
        let (mut content, now) = self.stored(&stored)?;
        if now.refresh_token != stored.refresh_token {
            tracing::warn!("the sign-in was replaced while it was renewed");
            return Ok(now);
        }
        let tokens = merge(now, issued);
        content.tokens = Some(tokens.clone());
        content.last_refresh = Some(rfc3339((self.now)()));
        self.store(lock, content).await?;
        tracing::info!("renewed the sign-in");
        Ok(tokens)
    }

    /// Reads the file again; fails if it is for another account.
    fn stored(&self, old: &TokenSet) -> Result<(AuthJson, TokenSet), SignInError> {
        let content = self.file.read()?.ok_or(SignInError::None)?;
        let stored = content.tokens.clone().ok_or(SignInError::None)?;
        match is_same_account(old, &stored) {
            true => Ok((content, stored)),
            false => Err(SignInError::OtherAccount(self.file.path().to_owned())),
        }
    }

    async fn store(&self, lock: AuthLock, content: AuthJson) -> Result<(), SignInError> {
        let file = self.file.clone();
        tokio::task::spawn_blocking(move || file.write(&lock, &content))
            .await
            .map_err(|error| SignInError::AgentTask(error.to_string()))??;
        Ok(())
    }

    async fn issuer(&self, old: &TokenSet, http: &HttpClient) -> Result<Issuer, OauthError> {
        if old.refresh_token.is_empty() {
            return Err(OauthError::Setup("there is no refresh token"));
        }
        let identity = claims(&old.id_token.as_str().into()).unwrap_or_default();
        let base = self.issuer.0.clone().or(identity.iss.clone());
        let base = base.unwrap_or_else(|| DEFAULT_ISSUER.to_owned());
        let base: BaseUrl =
            base.parse().map_err(|_| OauthError::Setup("its issuer is not a URL"))?;
        // A token names the client that it was issued to.
        let client = self.issuer.1.clone();
        let client = client.or_else(|| identity.audiences().first().map(ToString::to_string));
        let client = client
            .ok_or(OauthError::Setup("its client id is not known; set CODEX_LOGIN_CLIENT_ID"))?;
        Issuer::discover(&base, client, http).await
    }
}

/// Uses the refresh token.
async fn refresh(
    issuer: &Issuer,
    old: &TokenSet,
    http: &HttpClient,
) -> Result<IssuedTokens, OauthError> {
    let fields = vec![
        ("grant_type", "refresh_token".to_owned()),
        ("refresh_token", old.refresh_token.clone()),
    ];
    issuer.tokens(fields, http).await
}

/// Whether two sets of tokens act for the same account of the same user.
fn is_same_account(one: &TokenSet, other: &TokenSet) -> bool {
    let user = |tokens: &TokenSet| claims(&tokens.id_token.as_str().into())?.sub;
    let same_user = match (user(one), user(other)) {
        (Some(one), Some(other)) => one == other,
        _ => true,
    };
    same_user && account(one) == account(other)
}

fn account(tokens: &TokenSet) -> Option<String> {
    let from_token = || Some(claims(&tokens.id_token.as_str().into())?.account()?.to_owned());
    tokens.account_id.clone().or_else(from_token)
}

/// The new tokens; those that the issuer left out stay.
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

fn request_tokens(tokens: &TokenSet) -> RequestTokens {
    RequestTokens { access_token: tokens.access_token.as_str().into(), account_id: account(tokens) }
}

impl fmt::Debug for ChatGptTokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatGptTokens").field("file", &self.renewer.file).finish_non_exhaustive()
    }
}
