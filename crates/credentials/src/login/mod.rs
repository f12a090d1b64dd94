//! Signing in and out: what ends up in `auth.json`, and how it gets there.

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

/// What is asked for on behalf of the user.
pub(crate) const SCOPE: &str = "openid profile email offline_access";

/// Why nobody is signed in.
#[derive(Debug, thiserror::Error)]
pub enum LoginError {
    /// There is no home to keep credentials in.
    #[error("cannot find the home directory; set CODEX_HOME")]
    NoHome,
    /// No client id: it belongs to whoever registered it with the issuer.
    #[error("no OAuth client id given; pass --client-id or set CODEX_LOGIN_CLIENT_ID")]
    NoClient,
    /// Not a URL.
    #[error("invalid issuer URL; expected https://HOST")]
    Issuer,
    /// An empty key.
    #[error("the API key is empty; pipe it in: printenv OPENAI_API_KEY | codex login --api-key")]
    EmptyKey,
    /// The file of credentials.
    #[error(transparent)]
    File(#[from] AuthFileError),
    /// The issuer.
    #[error(transparent)]
    Oauth(#[from] OauthError),
    /// The browser's way back.
    #[error(transparent)]
    Callback(#[from] CallbackError),
    /// Nobody signed in.
    #[error("no sign-in within {0} s; try again")]
    Timeout(u64),
    /// No randomness.
    #[error("the random source failed")]
    Entropy,
}

/// The issuer to sign in with: what is given, else the environment's, else the usual one.
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

/// Keeps an API key instead of whatever was kept before.
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

/// Keeps tokens instead of whatever was kept before.
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

/// Forgets what was kept. Tells whether there was anything.
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

/// 32 random bytes as text for a URL.
pub(crate) fn random_text() -> Result<String, LoginError> {
    let mut bytes = Zeroizing::new([0; 32]);
    getrandom::fill(&mut *bytes).map_err(|_| LoginError::Entropy)?;
    Ok(URL_SAFE_NO_PAD.encode_to_string(*bytes))
}
