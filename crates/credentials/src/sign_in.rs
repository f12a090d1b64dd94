//! Sign-in: the credential in use, the hosts it may be sent to, and the headers it makes.
//!
//! Precedence: `--use-agent-identity-auth` uses only `CODEX_ACCESS_TOKEN`; the older `--executor-id` uses
//! only `CODEX_EXEC_SERVER_REMOTE_BEARER_TOKEN`; a harness uses `CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN` first;
//! otherwise `CODEX_API_KEY`, then the ChatGPT tokens of `auth.json`, then the API key of `auth.json`.
//!
//! Invariant: a credential makes no header before [`SignIn::check_target`] has accepted its target.

use std::sync::Arc;

use codex_exec_remote::{
    BaseUrl, Credential, CredentialError, CredentialFuture, CredentialKind, HttpClient, HttpError,
    Origin, Secret, Verdict, may_send,
};
use http::{HeaderMap, HeaderName, header};
use ring::digest::{Context, SHA256};

use crate::agent::AgentIdentity;
use crate::auth_file::AuthFileError;
use crate::issuer::OauthError;
use crate::tokens::ChatGptTokens;

/// The header that names the account of a ChatGPT token.
pub(crate) const ACCOUNT_ID: HeaderName = HeaderName::from_static("chatgpt-account-id");

/// Why there is no usable credential.
#[derive(Debug, thiserror::Error)]
pub enum SignInError {
    /// No source has a credential.
    #[error("not signed in; run codex login or set CODEX_API_KEY")]
    None,
    /// `--use-agent-identity-auth` without `CODEX_ACCESS_TOKEN`.
    #[error("--use-agent-identity-auth needs CODEX_ACCESS_TOKEN; set it, or omit the flag")]
    NoAccessToken,
    /// `--executor-id` without `CODEX_EXEC_SERVER_REMOTE_BEARER_TOKEN`.
    #[error("--executor-id needs CODEX_EXEC_SERVER_REMOTE_BEARER_TOKEN; set it")]
    NoRemoteToken,
    /// The credential must not be sent to this host.
    #[error(
        "refusing to send the {credential} to {host}: {rule}; if you trust that host, add \
         --allow-registry-host {host}"
    )]
    HostNotAllowed {
        /// The kind of credential.
        credential: &'static str,
        /// The host.
        host: String,
        /// The rule that forbids it.
        rule: &'static str,
    },
    /// A credential with characters that no header can carry.
    #[error("the {0} contains characters that an HTTP header cannot carry; check its source")]
    Malformed(&'static str),
    /// `CODEX_ACCESS_TOKEN` is not a valid agent identity.
    #[error("CODEX_ACCESS_TOKEN is invalid: {0}; get a new one")]
    AgentToken(&'static str),
    /// The agent's task could not be registered, or a task of this program failed.
    #[error("cannot register the agent's task: {0}")]
    AgentTask(String),
    /// `auth.json` now holds the credentials of another account.
    #[error(
        "{} now holds the credentials of another account; restart to use them",
        .0.display()
    )]
    OtherAccount(std::path::PathBuf),
    /// `auth.json` could not be read or written.
    #[error(transparent)]
    File(#[from] AuthFileError),
    /// The tokens have expired, and the issuer refused to renew them.
    #[error("the sign-in has expired and cannot be renewed: {0}; run codex login")]
    Expired(#[source] OauthError),
    /// The issuer could not be reached.
    #[error("cannot renew the sign-in: {0}")]
    Unreachable(#[from] HttpError),
}

impl SignInError {
    /// Whether a later attempt may succeed.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable(error) => !matches!(error, HttpError::Url),
            Self::Expired(error) => error.is_transient(),
            _ => false,
        }
    }
}

/// A credential. Clones share its state. `Debug` shows only its kind.
#[derive(Debug, Clone)]
pub struct SignIn {
    kind: Kind,
    allowed_hosts: Arc<[String]>,
}

#[derive(Debug, Clone)]
enum Kind {
    ApiKey(Secret),
    Bearer(Secret),
    Tokens(Arc<ChatGptTokens>),
    Agent(Arc<AgentIdentity>),
}

impl SignIn {
    /// An API key.
    pub fn api_key(key: Secret) -> Self {
        Kind::ApiKey(key).into()
    }

    /// A bearer token, for the older registration or a self-hosted registry.
    pub fn bearer(token: Secret) -> Self {
        Kind::Bearer(token).into()
    }

    /// ChatGPT tokens, renewed as needed.
    pub fn chat_gpt(tokens: ChatGptTokens) -> Self {
        Kind::Tokens(Arc::new(tokens)).into()
    }

    /// An agent identity.
    pub fn agent(identity: AgentIdentity) -> Self {
        Kind::Agent(Arc::new(identity)).into()
    }

    /// Allows these hosts regardless of the credential's rule.
    #[must_use]
    pub fn with_allowed_hosts(mut self, hosts: impl Into<Arc<[String]>>) -> Self {
        self.allowed_hosts = hosts.into();
        self
    }

    /// The kind of credential, for people.
    pub fn describe(&self) -> &'static str {
        match &self.kind {
            Kind::ApiKey(_) => "API key",
            Kind::Bearer(_) => "bearer token",
            Kind::Tokens(_) => "ChatGPT sign-in",
            Kind::Agent(_) => "agent identity",
        }
    }

    /// Whether the credential may be sent to this service.
    pub fn check_target(&self, base: &BaseUrl) -> Result<(), SignInError> {
        let kind = match &self.kind {
            Kind::ApiKey(_) => CredentialKind::ApiKey,
            Kind::Bearer(_) => CredentialKind::RegistryToken,
            Kind::Tokens(_) => CredentialKind::SignIn,
            Kind::Agent(_) => CredentialKind::AgentIdentity,
        };
        let rule = match may_send(kind, base.origin(), &self.allowed_hosts) {
            Verdict::Send => return Ok(()),
            Verdict::SendInClear => "it would be sent unencrypted",
            Verdict::Refuse(rule) => rule,
        };
        let (credential, host) = (self.describe(), base.host().to_owned());
        Err(SignInError::HostNotAllowed { credential, host, rule })
    }

    /// What a saved session remembers of this credential: the same for the same key, token or account at the
    /// same registry, and of no use to sign in with. See [`fingerprint`].
    pub fn fingerprint(&self, registry: &BaseUrl) -> String {
        let identity = match &self.kind {
            Kind::ApiKey(secret) | Kind::Bearer(secret) => secret.clone(),
            Kind::Tokens(tokens) => tokens.identity(),
            Kind::Agent(identity) => identity.account_id().unwrap_or_default().into(),
        };
        fingerprint(registry.origin(), &identity)
    }

    async fn headers_now(&self, http: &HttpClient) -> Result<HeaderMap, SignInError> {
        let mut headers = HeaderMap::new();
        match &self.kind {
            Kind::ApiKey(key) | Kind::Bearer(key) => {
                bearer(&mut headers, key, self.describe())?;
            }
            Kind::Tokens(tokens) => {
                let current = tokens.current(http).await?;
                bearer(&mut headers, &current.access_token, self.describe())?;
                account(&mut headers, current.account_id.as_deref())?;
            }
            Kind::Agent(identity) => {
                let assertion = identity.assertion(http).await?;
                let value = assertion.header("AgentAssertion ");
                let value = value.ok_or(SignInError::Malformed("agent assertion"))?;
                headers.insert(header::AUTHORIZATION, value);
                account(&mut headers, identity.account_id())?;
            }
        }
        Ok(headers)
    }

    async fn renew_now(&self, http: &HttpClient) -> Result<bool, SignInError> {
        match &self.kind {
            Kind::Tokens(tokens) => tokens.renew(http).await,
            Kind::Agent(identity) => Ok(identity.forget_task().await),
            Kind::ApiKey(_) | Kind::Bearer(_) => Ok(false),
        }
    }
}

/// A digest of a secret and the origin it is for: short enough that it confirms a guess, and no more.
pub fn fingerprint(origin: &Origin, secret: &Secret) -> String {
    let mut context = Context::new(&SHA256);
    context.update(b"codex saved credential\0");
    context.update(origin.to_string().as_bytes());
    context.update(b"\0");
    context.update(secret.expose().as_bytes());
    context.finish().as_ref().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

impl Credential for SignIn {
    fn check_target(&self, base: &BaseUrl) -> Result<(), CredentialError> {
        Ok(Self::check_target(self, base)?)
    }

    fn headers<'a>(&'a self, http: &'a HttpClient) -> CredentialFuture<'a, HeaderMap> {
        Box::pin(async { Ok(self.headers_now(http).await?) })
    }

    fn renew<'a>(&'a self, http: &'a HttpClient) -> CredentialFuture<'a, bool> {
        Box::pin(async { Ok(self.renew_now(http).await?) })
    }
}

impl From<SignInError> for CredentialError {
    fn from(error: SignInError) -> Self {
        match error.is_transient() {
            true => Self::transient(error),
            false => Self::permanent(error),
        }
    }
}

impl From<Kind> for SignIn {
    fn from(kind: Kind) -> Self {
        Self { kind, allowed_hosts: Arc::default() }
    }
}

fn bearer(headers: &mut HeaderMap, token: &Secret, what: &'static str) -> Result<(), SignInError> {
    let value = token.header("Bearer ").ok_or(SignInError::Malformed(what))?;
    headers.insert(header::AUTHORIZATION, value);
    Ok(())
}

fn account(headers: &mut HeaderMap, id: Option<&str>) -> Result<(), SignInError> {
    if let Some(id) = id {
        let value = id.parse().map_err(|_| SignInError::Malformed("account id"))?;
        headers.insert(ACCOUNT_ID, value);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credential_is_sent_only_to_permitted_hosts() {
        let url = |text: &str| text.parse::<BaseUrl>().unwrap();
        let key = SignIn::api_key("k".into());
        let token = SignIn::bearer("t".into());
        key.check_target(&url("https://api.openai.com")).unwrap();
        key.check_target(&url("http://127.0.0.1:8")).unwrap();
        token.check_target(&url("https://own.example")).unwrap();
        for (sign_in, base) in [
            (&key, "https://own.example"),
            (&key, "http://api.openai.com"),
            (&token, "http://own.example"),
        ] {
            let error = sign_in.check_target(&url(base)).unwrap_err();
            assert!(error.to_string().contains("--allow-registry-host"), "{error}");
        }
        let with_allowed_hosts = key.with_allowed_hosts(vec!["Own.example".to_owned()]);
        with_allowed_hosts.check_target(&url("http://own.example:99")).unwrap();
    }
}
