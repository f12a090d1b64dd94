//! Login and logout: writing and removing `auth.json`.

mod browser;
mod device;

use base64_simd::URL_SAFE_NO_PAD;
use codex_exec_remote::{BaseUrl, HttpClient, Secret};
use zeroize::Zeroizing;

use crate::auth_file::{AuthFile, AuthFileError, AuthJson, TokenSet};
use crate::issuer::{IssuedTokens, Issuer, OauthError};
use crate::jwt::claims;
use crate::sources::SignInSources;
use crate::timestamp::rfc3339;
use crate::tokens::DEFAULT_ISSUER;

pub use browser::{BrowserLogin, CallbackError};
pub use device::DeviceLogin;

/// The OAuth scope that logins request.
pub(crate) const SCOPE: &str = "openid profile email offline_access";

/// Why a login failed.
#[derive(Debug, thiserror::Error)]
pub enum LoginError {
    /// There is no home directory for `auth.json`.
    #[error("cannot find the home directory; set CODEX_HOME")]
    NoHome,
    /// No OAuth client id was given. There is no default.
    #[error("no OAuth client id given; pass --client-id or set CODEX_LOGIN_CLIENT_ID")]
    NoClient,
    /// The issuer is not a URL.
    #[error("invalid issuer URL; expected https://HOST")]
    Issuer,
    /// The API key is empty.
    #[error("the API key is empty; pipe it in: printenv OPENAI_API_KEY | codex login --api-key")]
    EmptyKey,
    /// `auth.json` could not be read or written.
    #[error(transparent)]
    File(#[from] AuthFileError),
    /// The issuer failed or refused.
    #[error(transparent)]
    Oauth(#[from] OauthError),
    /// The browser's callback failed.
    #[error(transparent)]
    Callback(#[from] CallbackError),
    /// The user did not sign in within this many seconds.
    #[error("no sign-in within {0} s; try again")]
    Timeout(u64),
    /// The random source failed.
    #[error("the random source failed")]
    Entropy,
}

/// Finds the issuer to sign in with: the given one, the environment's, or the default.
pub async fn login_issuer(
    sources: &SignInSources,
    issuer: Option<String>,
    client_id: Option<String>,
    http: &HttpClient,
) -> Result<Issuer, LoginError> {
    let client = client_id.or_else(|| sources.client_id.clone()).ok_or(LoginError::NoClient)?;
    let base = issuer.or_else(|| sources.issuer.clone());
    let base = base.unwrap_or_else(|| DEFAULT_ISSUER.to_owned());
    let base: BaseUrl = base.parse().map_err(|_| LoginError::Issuer)?;
    Ok(Issuer::discover(&base, client, http).await?)
}

/// Stores an API key, replacing earlier credentials.
pub fn login_with_api_key(sources: &SignInSources, key: &Secret) -> Result<AuthFile, LoginError> {
    if key.is_blank() {
        return Err(LoginError::EmptyKey);
    }
    let content = AuthJson {
        auth_mode: Some("apikey".to_owned()),
        api_key: Some(key.expose().trim().to_owned()),
        ..AuthJson::default()
    };
    replace(sources, &content)
}

/// Stores tokens, replacing earlier credentials.
pub fn login_with_tokens(
    sources: &SignInSources,
    issued: &IssuedTokens,
) -> Result<AuthFile, LoginError> {
    let text = |secret: &Option<Secret>| {
        secret.as_ref().map(|secret| secret.expose().to_owned()).unwrap_or_default()
    };
    let account = |token: &Secret| Some(claims(token)?.account()?.to_owned());
    let account_id = issued.id_token.as_ref().and_then(account);
    let content = AuthJson {
        auth_mode: Some("chatgpt".to_owned()),
        tokens: Some(TokenSet {
            id_token: text(&issued.id_token),
            access_token: issued.access_token.expose().to_owned(),
            refresh_token: text(&issued.refresh_token),
            account_id: account_id.or_else(|| account(&issued.access_token)),
        }),
        last_refresh: Some(rfc3339((sources.now)())),
        ..AuthJson::default()
    };
    replace(sources, &content)
}

/// Removes the stored credentials. Returns whether there were any.
pub fn logout(sources: &SignInSources) -> Result<bool, LoginError> {
    let file = sources.auth_file().ok_or(LoginError::NoHome)?;
    let lock = file.lock()?;
    Ok(file.remove(&lock)?)
}

fn replace(sources: &SignInSources, content: &AuthJson) -> Result<AuthFile, LoginError> {
    let file = sources.auth_file().ok_or(LoginError::NoHome)?;
    let lock = file.lock()?;
    file.write(&lock, content)?;
    Ok(file)
}

/// 32 random bytes in base64url.
pub(crate) fn random_text() -> Result<String, LoginError> {
    let mut bytes = Zeroizing::new([0; 32]);
    getrandom::fill(&mut *bytes).map_err(|_| LoginError::Entropy)?;
    Ok(URL_SAFE_NO_PAD.encode_to_string(*bytes))
}
