//! The interface between the registry client and sign-in.
//!
//! Invariant: a credential makes no header before [`Credential::check_target`] has accepted the registry;
//! [`Registry::new`](crate::Registry::new) calls it.

use std::error::Error;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use codex_exec_rpc::Secret;
use http::{HeaderMap, header};

use crate::base_url::BaseUrl;
use crate::destination::{CredentialKind, Verdict, may_send};
use crate::http_client::HttpClient;

/// A request as it will be sent, for credentials that sign it.
#[derive(Debug, Clone, Copy)]
pub struct OutgoingRequest<'a> {
    /// `GET` or `POST`.
    pub method: &'a str,
    /// `http`, `https`, `ws` or `wss`, with the query.
    pub url: &'a str,
    /// The `Content-Type` header, if there is one.
    pub content_type: Option<&'a str>,
    /// The body; empty for an upgrade.
    pub body: &'a [u8],
}

/// Authenticates requests to a registry. `Debug` must not show the secret.
pub trait Credential: fmt::Debug + Send + Sync {
    /// Whether the credential may be sent to this service.
    fn check_target(&self, base: &BaseUrl) -> Result<(), CredentialError>;

    /// Makes the headers of one request. May send requests by `http`, for example for a new token.
    fn headers<'a>(&'a self, http: &'a HttpClient) -> CredentialFuture<'a, HeaderMap>;

    /// Makes the headers of this request, for example with a signature. The default is
    /// [`headers`](Self::headers), which is the same for every request.
    fn headers_for<'a>(
        &'a self,
        _request: OutgoingRequest<'a>,
        http: &'a HttpClient,
    ) -> CredentialFuture<'a, HeaderMap> {
        self.headers(http)
    }

    /// Renews the credential after a 401. Returns whether there is now another one to try.
    fn renew<'a>(&'a self, http: &'a HttpClient) -> CredentialFuture<'a, bool>;
}

impl Credential for Arc<dyn Credential> {
    fn check_target(&self, base: &BaseUrl) -> Result<(), CredentialError> {
        (**self).check_target(base)
    }

    fn headers<'a>(&'a self, http: &'a HttpClient) -> CredentialFuture<'a, HeaderMap> {
        (**self).headers(http)
    }

    fn headers_for<'a>(
        &'a self,
        request: OutgoingRequest<'a>,
        http: &'a HttpClient,
    ) -> CredentialFuture<'a, HeaderMap> {
        (**self).headers_for(request, http)
    }

    fn renew<'a>(&'a self, http: &'a HttpClient) -> CredentialFuture<'a, bool> {
        (**self).renew(http)
    }
}

/// [`may_send`] for a credential without hosts that the user allowed.
pub fn check_destination(kind: CredentialKind, base: &BaseUrl) -> Result<(), CredentialError> {
    match may_send(kind, base.origin(), &[]) {
        Verdict::Send => Ok(()),
        Verdict::SendInClear => Err(refused(base, "it would be sent unencrypted")),
        Verdict::Refuse(rule) => Err(refused(base, rule)),
    }
}

fn refused(base: &BaseUrl, rule: &str) -> CredentialError {
    CredentialError::permanent(format!("refusing to send the credential to {base}: {rule}"))
}

/// The return type of [`Credential`]'s methods.
pub type CredentialFuture<'a, T> =
    Pin<Box<dyn Future<Output = Result<T, CredentialError>> + Send + 'a>>;

/// A token that the user gave for one registry.
#[derive(Debug, Clone)]
pub struct BearerToken(pub Secret);

impl Credential for BearerToken {
    fn check_target(&self, base: &BaseUrl) -> Result<(), CredentialError> {
        check_destination(CredentialKind::RegistryToken, base)
    }

    fn headers<'a>(&'a self, _http: &'a HttpClient) -> CredentialFuture<'a, HeaderMap> {
        Box::pin(async {
            let value = self.0.header("Bearer ").ok_or_else(|| {
                CredentialError::permanent(
                    "the token contains characters that an HTTP header cannot carry; check its \
                     source",
                )
            })?;
            Ok(HeaderMap::from_iter([(header::AUTHORIZATION, value)]))
        })
    }

    fn renew<'a>(&'a self, _http: &'a HttpClient) -> CredentialFuture<'a, bool> {
        Box::pin(async { Ok(false) })
    }
}

/// Why a credential cannot be used.
pub struct CredentialError {
    cause: Box<dyn Error + Send + Sync>,
    transient: bool,
}

impl CredentialError {
    /// A failure that retrying does not cure.
    pub fn permanent(cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { cause: cause.into(), transient: false }
    }

    /// A failure that may go away.
    pub fn transient(cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self { cause: cause.into(), transient: true }
    }

    /// Whether a later attempt may succeed.
    pub fn is_transient(&self) -> bool {
        self.transient
    }
}

// Prints the cause alone.
impl fmt::Debug for CredentialError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.cause, f)
    }
}

impl fmt::Display for CredentialError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.cause, f)
    }
}

impl Error for CredentialError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.cause.source()
    }
}
